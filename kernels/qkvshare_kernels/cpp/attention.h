// Attention of one token over packed pages. Codes are read as they are: scales of keys go into the query, those of values
// into the weights, and a rotated query takes the place of rotated keys.

#pragma once

#include <memory>

#include "products.h"

namespace {

// e**x for x <= 0 (Cephes' polynomial), relative error below 2e-7; 0 below -87.
INLINE vec exponential(vec x) {
    const vec bounded = most_of(x, fill(-87.0f));
    const vec n = floor_of(bounded * 1.44269504088896341f + 0.5f);
    const vec r = (bounded - n * 0.693359375f) - n * -2.12194440e-4f;
    vec p = fill(1.9875691500e-4f);
    p = fused(p, r, fill(1.3981999507e-3f)), p = fused(p, r, fill(8.3334519073e-3f));
    p = fused(p, r, fill(4.1665795894e-2f)), p = fused(p, r, fill(1.6666665459e-1f));
    p = fused(p, r, fill(5.0000001201e-1f));
    p = p * r * r + r + 1.0f;
    const ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
    return (vec)((ivec)(p * (vec)power) & (x > -87.0f));
}

struct Side {  // keys or values of one page, of all heads of a layer
    const uint8_t* codes;
    const uint16_t *scale, *minimum;
    int64_t codes_stride, scale_stride;
    int bits, group;
    bool rotated;
    explicit Side(const int64_t* f)
        : codes(reinterpret_cast<const uint8_t*>(f[0])), scale(reinterpret_cast<const uint16_t*>(f[1])),
          minimum(reinterpret_cast<const uint16_t*>(f[2])), codes_stride(f[3]), scale_stride(f[4]), bits(int(f[5])),
          group(int(f[6])), rotated(f[7] != 0) {}
    // n of a head's scales and minima from the at-th on
    void scales(int64_t head, int64_t at, int n, float* s, float* least) const {
        halves_to_floats(scale + head * scale_stride + at, s, n);
        if (minimum) return halves_to_floats(minimum + head * scale_stride + at, least, n);
        const float middle = float((1 << bits) - 1) / -2;
        for (int i = 0; i < n; i += W) store(least + i, load(s + i) * middle);
    }
};

constexpr int SIDE_FIELDS = 8, FIELDS = 2 * SIDE_FIELDS + 1;

// Softmax over what has been read so far, and the values weighted with it, for the queries of one key head.
struct Reader {
    int queries, dk, dv, pk, pv;
    Floats query, rotated, scaled, plain, turned, greatest, total, shift, scores, rows, scale, least, weights, sums;
    std::vector<uint8_t> spread;
    int64_t width = 0;  // of a query's scores

    Reader(int queries, int dk, int dv)
        : queries(queries), dk(dk), dv(dv), pk(padded(dk)), pv(padded(dv)), query(queries * pk), rotated(queries * pk),
          scaled(queries * pk), plain(queries * pv), turned(queries * pv), greatest(queries, -INFINITY), total(queries),
          shift(queries), rows(W * std::max(pk, pv)), scale(pk), least(pk), sums(queries * W * W),
          spread(std::max(pk, pv) + 64) {}

    void begin(const float* q, float norm) {
        for (int g = 0; g < queries; g++) {
            std::memcpy(&query[g * pk], q + g * dk, size_t(dk) * 4);
            std::memcpy(&rotated[g * pk], q + g * dk, size_t(dk) * 4);
            rotate_row(&rotated[g * pk], dk, norm);
        }
    }

    void begin_page(int64_t tokens) {
        width = (tokens + W - 1) / W * W + W;
        scores.assign(size_t(queries) * width, -INFINITY);
    }

    // Of `count` tokens from t on: what is in sums, over all lanes.
    void score(int64_t t, int count, bool shifted) {
        const ivec lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        for (int g = 0; g < queries; g++) {
            const vec found = sums_across(reinterpret_cast<const vec*>(&sums[g * W * W])) + (shifted ? shift[g] : 0);
            store(&scores[g * width + t], lanes < count ? found : fill(-INFINITY));
        }
    }

    // The same of `count` rows of floats that are a multiple of 16 long, where they are read from.
    void score_rows(const float* x, int64_t stride, int64_t t, int count, const float* q, bool shifted) {
        for (int g = 0; g < queries; g++)
            for (int k = 0; k < count; k++) {
                vec sum = {};
                for (int i = 0; i < pk; i += W) sum = fused(load(x + k * stride + i), load(q + g * pk + i), sum);
                store(&sums[(g * W + k) * W], sum);
            }
        score(t, count, shifted);
    }

    void weigh() {  // scores become weights; what was summed before is brought to the same greatest score
        for (int g = 0; g < queries; g++) {
            float* const s = &scores[g * width];
            vec most = fill(greatest[g]);
            for (int64_t i = 0; i < width; i += W) most = most_of(load(s + i), most);
            const float now = most_in(most), fade = std::exp(greatest[g] - now);
            vec sum = fill(0);
            for (int64_t i = 0; i < width; i += W) {
                const vec p = exponential(load(s + i) - now);
                store(s + i, p), sum += p;
            }
            total[g] = total[g] * fade + fold_vector(sum), greatest[g] = now;
            if (fade == 1) continue;
            for (int i = 0; i < pv; i += W) {
                store(&plain[g * pv + i], load(&plain[g * pv + i]) * fade);
                store(&turned[g * pv + i], load(&turned[g * pv + i]) * fade);
            }
        }
    }

    void add_rows(const float* x, int64_t stride, int64_t t, int count, float* to) {
        for (int g = 0; g < queries; g++)
            for (int i = 0; i < pv; i += W) {
                vec sum = load(to + g * pv + i);
                for (int k = 0; k < count; k++)
                    sum = fused(load(x + k * stride + i), fill(scores[g * width + t + k]), sum);
                store(to + g * pv + i, sum);
            }
    }

    void read_page(const int64_t* fields, int64_t head) {
        const int64_t tokens = fields[2 * SIDE_FIELDS];
        begin_page(tokens);
        read_keys(Side(fields), head, tokens);
        weigh();
        const Side v(fields + SIDE_FIELDS);
        float* const sum = v.rotated ? turned.data() : plain.data();
        if (whole_row(dv) && v.group % 64 == 0 && dv % v.group == 0)
            read_values(v, head, tokens, sum);
        else
            read_values_slowly(v, head, tokens, sum);
    }

    void read_keys(const Side& k, int64_t head, int64_t tokens) {
        const Products products = whole_row(dk) ? fast_products(dk, k.bits) : nullptr;
        const int row = packed_bytes(dk, k.bits);
        const uint8_t* const codes = k.codes + head * k.codes_stride;
        const float* const from = k.rotated ? rotated.data() : query.data();
        for (int64_t start = 0; start < tokens; start += k.group) {
            k.scales(head, start / k.group * dk, dk, scale.data(), least.data());
            for (int g = 0; g < queries; g++) {
                vec sum = {};
                for (int i = 0; i < pk; i += W) {
                    const vec q = load(from + g * pk + i);
                    store(&scaled[g * pk + i], q * load(&scale[i]));
                    sum = fused(q, load(&least[i]), sum);
                }
                shift[g] = fold_vector(sum);
            }
            const int64_t stop = std::min(tokens, start + k.group);
            for (int64_t t = start; t < stop; t += W) {
                const int count = int(std::min<int64_t>(W, stop - t));
                if (products) {
                    products(codes + t * row, row, count, scaled.data(), queries, reinterpret_cast<vec*>(sums.data()));
                    score(t, count, true);
                } else {
                    unpack(codes + t * row, row, count, dk, k.bits);
                    score_rows(rows.data(), pk, t, count, scaled.data(), true);
                }
            }
        }
    }

    // Codes of up to 16 tokens into rows, zeros behind d.
    void unpack(const uint8_t* codes, int row, int count, int d, int bits) {
        const int size = padded(d);
        for (int k = 0; k < count; k++) {
            unpack_row(codes + k * row, spread.data(), d, bits);
            std::memset(&spread[d], 0, size - d);
            for (int i = 0; i < size; i += W) store(&rows[k * size + i], from_bytes(&spread[i]));
        }
    }

    void read_values(const Side& v, int64_t head, int64_t tokens, float* sum) {
        const Add add = fast_add(dv, v.bits);
        const int groups = dv / v.group, row = packed_bytes(dv, v.bits);
        const size_t room = size_t(width) * groups;
        if (scale.size() < room) scale.resize(room), least.resize(room);
        v.scales(head, 0, int(tokens) * groups, scale.data(), least.data());
        weights.resize(size_t(queries) * width);
        for (int group = 0; group < groups; group++) {
            for (int g = 0; g < queries; g++) {
                const float* const p = &scores[g * width];
                vec lower = {};
                for (int64_t t = 0; t < tokens; t += W) {
                    vec s = load(&scale[t]), l = load(&least[t]);
                    for (int k = 0; k < W && groups > 1; k++)
                        s[k] = scale[(t + k) * groups + group], l[k] = least[(t + k) * groups + group];
                    const vec weight = load(p + t);
                    store(&weights[g * width + t], weight * s);
                    lower += weight > 0 ? weight * l : fill(0);  // behind the tokens is anything
                }
                const float each = fold_vector(lower);
                for (int i = group * v.group; i < (group + 1) * v.group; i += W)
                    store(sum + g * pv + i, load(sum + g * pv + i) + each);
            }
            for (int i = group * v.group; i < (group + 1) * v.group; i += 64)
                add(v.codes + head * v.codes_stride, row, tokens, i / W, weights.data(), width, queries, sum + i);
        }
    }

    void read_values_slowly(const Side& v, int64_t head, int64_t tokens, float* sum) {
        const int groups = (dv + v.group - 1) / v.group, row = packed_bytes(dv, v.bits);
        const size_t room = size_t(W) * groups + W;
        if (scale.size() < room) scale.resize(room), least.resize(room);
        for (int64_t t = 0; t < tokens; t += W) {
            const int count = int(std::min<int64_t>(W, tokens - t));
            unpack(v.codes + head * v.codes_stride + t * row, row, count, dv, v.bits);
            v.scales(head, t * groups, count * groups, scale.data(), least.data());
            for (int k = 0; k < count; k++)
                for (int i = 0; i < dv; i++) {
                    const int j = k * groups + i / v.group;
                    rows[k * pv + i] = rows[k * pv + i] * scale[j] + least[j];
                }
            add_rows(rows.data(), pv, t, count, sum);
        }
    }

    // Rows of the cache's own type into floats, zeros behind d.
    void open(const char* x, Type type, int64_t stride, int count, int d) {
        const int size = padded(d);
        std::fill(rows.begin(), rows.end(), 0.0f);
        for (int k = 0; k < count; k++) read_row(x + k * stride, type, &rows[k * size], d);
    }

    void read_native(const char* keys, const char* values, Type type, int64_t tokens, int64_t key_stride,
                     int64_t value_stride) {
        begin_page(tokens);
        for (int64_t t = 0; t < tokens; t += W) {
            const int count = int(std::min<int64_t>(W, tokens - t));
            open(keys + t * key_stride, type, key_stride, count, dk);
            score_rows(rows.data(), pk, t, count, query.data(), false);
        }
        weigh();
        for (int64_t t = 0; t < tokens; t += W) {
            const int count = int(std::min<int64_t>(W, tokens - t));
            open(values + t * value_stride, type, value_stride, count, dv);
            add_rows(rows.data(), pv, t, count, plain.data());
        }
    }
};

// What the readers of parts of the history found, joined: out [queries, DV].
void join(const std::unique_ptr<Reader>* readers, int64_t splits, float norm, float* out) {
    const Reader& first = *readers[0];
    Floats plain(first.pv), turned(first.pv);
    for (int g = 0; g < first.queries; g++, out += first.dv) {
        float greatest = -INFINITY, total = 0;
        for (int64_t s = 0; s < splits; s++) greatest = std::max(greatest, readers[s]->greatest[g]);
        std::fill(plain.begin(), plain.end(), 0.0f), std::fill(turned.begin(), turned.end(), 0.0f);
        for (int64_t s = 0; s < splits; s++) {
            const Reader& r = *readers[s];
            const float weight = std::exp(r.greatest[g] - greatest);  // 0 for a split that had nothing to read
            total += r.total[g] * weight;
            for (int i = 0; i < r.pv; i++) {
                plain[i] += r.plain[g * r.pv + i] * weight;
                turned[i] += r.turned[g * r.pv + i] * weight;
            }
        }
        rotate_row(turned.data(), first.dv, norm);
        for (int i = 0; i < first.dv; i++) out[i] = (plain[i] + turned[i]) / total;
    }
}

}  // namespace
