// Scales and minima of groups, as reference.quantize finds them. Sums are folded in its order.

#pragma once

#include "vectors.h"

namespace {

constexpr float STEP = 1.0f / 1024, SMALLEST = 1.0f / 16384;  // 2 * FP16_STEP, SMALLEST_SCALE

inline int power_of_two(int n) {
    int p = 1;
    while (p < n) p *= 2;
    return p;
}

// What every group of a tile needs, one entry per group and room for a vector more.
struct Ranges {
    Floats low, high, inverse, offset, middle, centre, step, spread, cross;
    explicit Ranges(size_t n)
        : low(n + W), high(n + W), inverse(n + W), offset(n + W), middle(n + W), centre(n + W), step(n + W),
          spread(n + W), cross(n + W) {}
};

inline void first_codes(Ranges& r, size_t n, float largest) {
    const float share = 1.0f / largest;
    for (size_t i = 0; i < n; i += W) {
        const vec low = load(&r.low[i]), step = most_of(load(&r.high[i]) - low, fill(SMALLEST)) * share;
        const vec inverse = 1.0f / step;
        store(&r.step[i], step), store(&r.inverse[i], inverse), store(&r.offset[i], 0.5f - low * inverse);
    }
}

inline void move_ends(Ranges& r, size_t n, float largest, float fit) {
    for (size_t i = 0; i < n; i += W) {
        const vec spread = load(&r.spread[i]), low = load(&r.low[i]), high = load(&r.high[i]);
        const vec slope = spread > 0 ? load(&r.cross[i]) / spread : load(&r.step[i]);
        const vec least = load(&r.centre[i]) - load(&r.middle[i]) * slope;
        const vec up = most_of(least - low, fill(0)), down = most_of(high - (least + largest * slope), fill(0));
        store(&r.low[i], low + fit * up), store(&r.high[i], high - fit * down);
    }
}

// Returns whether everything decodes to at most `most`.
inline bool store_scales(Ranges& r, size_t n, float largest, bool symmetric, float most, uint16_t* scale,
                         uint16_t* minimum) {
    const float share = 1.0f / largest, twice = float(2.0 / largest);
    float *const shown = r.step.data(), *const width = r.spread.data();
    if (!symmetric) {
        for (size_t i = 0; i < n; i += W) {
            const vec low = load(&r.low[i]);
            store(shown + i, (low - size_of(low) * STEP) + 0.0f);
        }
        floats_to_halves(shown, minimum, n), halves_to_floats(minimum, shown, n);
    }
    for (size_t i = 0; i < n; i += W) {
        const vec high = load(&r.high[i]), s = symmetric ? high * twice : (high - load(shown + i)) * share;
        store(width + i, most_of(fill(SMALLEST), s * (1 + STEP)));  // of NaN: NaN
    }
    floats_to_halves(width, scale, n), halves_to_floats(scale, width, n);
    ivec beyond = {};
    for (size_t i = 0; i < n; i += W) {
        const ivec lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const vec far = symmetric ? load(width + i) * (largest / 2) : load(shown + i) + load(width + i) * largest;
        beyond |= ((size_of(far) <= most) == 0) & (lanes < int(n - i));
        const vec inverse = 1.0f / load(width + i);
        store(&r.inverse[i], inverse);
        store(&r.offset[i], symmetric ? fill(largest / 2 + 0.5f) : 0.5f - load(shown + i) * inverse);
    }
    return fold_vector(__builtin_convertvector(beyond, vec)) == 0;
}

struct Two {
    vec a, b;
};

INLINE Two operator+(const Two& x, const Two& y) { return {x.a + y.a, x.b + y.b}; }

// reference.fold over f(t), f(t + step), ...: N of them.
template <int N, class F>
INLINE Two folded(const F& f, int t, int step) {
    if constexpr (N == 1)
        return f(t);
    else
        return folded<N / 2>(f, t, 2 * step) + folded<N / 2>(f, t + step, 2 * step);
}

// The same over f(0) ... f(n - 1), n a power of two of at most 8.
template <class F>
INLINE Two fold_few(const F& f, int n) {
    return n == 8 ? folded<8>(f, 0, 1) : n == 4 ? folded<4>(f, 0, 1) : n == 2 ? folded<2>(f, 0, 1) : f(0);
}

// And of any size. parts: room for n / 8.
template <class F>
INLINE Two fold_rows(const F& f, int n, Two* parts) {
    if (n < 8) return fold_few(f, n);
    int rest = n / 8;
    for (int t = 0; t < rest; t++) parts[t] = folded<8>(f, t, rest);
    for (; rest > 8; rest /= 2)
        for (int t = 0; t < rest / 2; t++) parts[t] = parts[t] + parts[t + rest / 2];
    return fold_few([&](int t) { return parts[t]; }, rest);
}

// Sums of 16 channels over the rows of a tile, beginning at x; WHOLE: the number of rows is a power of two.
template <bool WHOLE>
INLINE void sums_of_channels(const float* x, int rows, int d, size_t i, Ranges& r, bool symmetric, float largest,
                             Two* parts) {
    const int n = power_of_two(rows);
    const vec inverse = load(&r.inverse[i]), offset = load(&r.offset[i]);
    auto kept = [&](int t, vec a, vec b) { return WHOLE || t < rows ? Two{a, b} : Two{}; };
    auto value = [&](int t) { return load(x + (WHOLE ? t : std::min(t, rows - 1)) * d); };
    vec middle = fill(largest / 2), centre = {};
    if (!symmetric) {
        const float share = 1.0f / rows;
        const Two sums = fold_rows(
            [&](int t) {
                const vec v = value(t);
                return kept(t, floor_of(v * inverse + offset), v);
            },
            n, parts);
        middle = sums.a * share, centre = sums.b * share;
    }
    const Two sums = fold_rows(
        [&](int t) {
            const vec v = value(t), code = floor_of(v * inverse + offset) - middle;
            return kept(t, code * code, code * (v - centre));
        },
        n, parts);
    store(&r.spread[i], sums.a), store(&r.cross[i], sums.b);
    store(&r.middle[i], middle), store(&r.centre[i], centre);
}

// Groups of d channels. known: r.low and r.high are those of the rows already.
inline void ranges_of_channels(const float* tile, int rows, int d, bool known, bool symmetric, float largest, float fit,
                               Ranges& r, Two* parts) {
    for (int c = 0; c < d; c += W) {
        vec low = load(&r.low[c]), high = load(&r.high[c]);
        if (!known) low = high = load(tile + c);
        for (int t = 1; t < rows && !known; t++) {
            const vec x = load(tile + t * d + c);
            low = least_of(x, low), high = most_of(x, high);
        }
        if (symmetric) high = most_of(size_of(low), size_of(high)), low = -high;
        store(&r.low[c], low), store(&r.high[c], high);
    }
    if (fit == 0) return;
    first_codes(r, d, largest);
    for (int c = 0; c < d; c += W)
        if (rows == power_of_two(rows))
            sums_of_channels<true>(tile + c, rows, d, c, r, symmetric, largest, parts);
        else
            sums_of_channels<false>(tile + c, rows, d, c, r, symmetric, largest, parts);
    move_ends(r, d, largest, fit);
}

template <int N>
INLINE vec fold_vectors(vec* x) {
    if constexpr (N == 1) return x[0];
#pragma GCC unroll 8
    for (int i = 0; i < N / 2; i++) x[i] += x[i + N / 2];
    return fold_vectors<N / 2 + (N == 1)>(x);
}

// n groups of NV whole vectors each, behind each other. 16 of them are folded at once. Symmetric ranges show what isn't
// finite.
template <int NV, bool SYMMETRIC>
void ranges_of_tokens(const float* tile, size_t n, float largest, float fit, Ranges& r) {
    vec a[W], b[W];
    for (size_t i = 0; i < n; i += W) {
        for (size_t k = 0; k < W; k++) {
            const float* const x = tile + std::min(i + k, n - 1) * NV * W;
            if constexpr (SYMMETRIC) {
                ivec high = (ivec)size_of(load(x));  // as integers, which puts NaN above all numbers
                for (int v = 1; v < NV; v++) {
                    const ivec value = (ivec)size_of(load(x + v * W));
                    high = value > high ? value : high;
                }
                a[k] = (vec)high;
            } else {
                a[k] = b[k] = load(x);
                for (int v = 1; v < NV; v++)
                    a[k] = most_of(load(x + v * W), a[k]), b[k] = least_of(load(x + v * W), b[k]);
            }
        }
        if constexpr (SYMMETRIC) {
            const vec high = across(a, [](vec x, vec y) { return (vec)((ivec)x > (ivec)y ? (ivec)x : (ivec)y); });
            store(&r.high[i], high), store(&r.low[i], -high);
        } else {
            store(&r.high[i], across(a, [](vec x, vec y) { return most_of(x, y); }));
            store(&r.low[i], across(b, [](vec x, vec y) { return least_of(x, y); }));
        }
    }
    if (fit == 0) return;
    first_codes(r, n, largest);
    const float share = 1.0f / (NV * W);
    for (size_t i = 0; i < n; i += W) {
        vec middle = fill(largest / 2), centre = {};
        vec p[NV], q[NV];
        if constexpr (!SYMMETRIC) {
            for (size_t k = 0; k < W; k++) {
                const size_t g = std::min(i + k, n - 1);
                const vec inverse = fill(r.inverse[g]), offset = fill(r.offset[g]);
                for (int v = 0; v < NV; v++) {
                    q[v] = load(tile + (g * NV + v) * W);
                    p[v] = floor_of(q[v] * inverse + offset);
                }
                a[k] = fold_vectors<NV>(p), b[k] = fold_vectors<NV>(q);
            }
            middle = sums_across(a) * share, centre = sums_across(b) * share;
        }
        store(&r.middle[i], middle), store(&r.centre[i], centre);
        for (size_t k = 0; k < W; k++) {
            const size_t g = std::min(i + k, n - 1);
            const vec inverse = fill(r.inverse[g]), offset = fill(r.offset[g]), of_code = fill(r.middle[i + k]);
            for (int v = 0; v < NV; v++) {
                const vec x = load(tile + (g * NV + v) * W), code = floor_of(x * inverse + offset) - of_code;
                p[v] = code * code, q[v] = code * (SYMMETRIC ? x : x - r.centre[i + k]);
            }
            a[k] = fold_vectors<NV>(p), b[k] = fold_vectors<NV>(q);
        }
        store(&r.spread[i], sums_across(a)), store(&r.cross[i], sums_across(b));
    }
    move_ends(r, n, largest, fit);
}

typedef void (*FindRanges)(const float*, size_t, float, float, Ranges&);

template <bool SYMMETRIC>
FindRanges ranges_of_tokens(int vectors) {
    return vectors == 4    ? ranges_of_tokens<4, SYMMETRIC>
           : vectors == 8  ? ranges_of_tokens<8, SYMMETRIC>
           : vectors == 16 ? ranges_of_tokens<16, SYMMETRIC>
           : vectors == 2  ? ranges_of_tokens<2, SYMMETRIC>
                           : ranges_of_tokens<1, SYMMETRIC>;
}

// One group of any size, for which there is no faster way: `x` holds its values, then zeros up to a power of two.
inline void range_of_group(const float* x, int count, size_t i, bool symmetric, Ranges& r) {
    float low = x[0], high = x[0];
    for (int j = 0; j < count; j++) low = std::min(low, x[j]), high = std::max(high, x[j]);
    if (symmetric) high = std::max(std::fabs(low), std::fabs(high)), low = -high;
    r.low[i] = low, r.high[i] = high;
}

inline void sums_of_group(const float* x, int count, size_t i, bool symmetric, float largest, Ranges& r, float* p) {
    const int vectors = padded(power_of_two(count)) / W;
    vec* const a = reinterpret_cast<vec*>(p);
    vec* const b = a + vectors;
    const ivec lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    auto valid = [&](int v, vec value) { return (vec)((ivec)value & (lanes + v * W < count)); };
    auto fold = [&](vec* sums) {
        for (int h = vectors / 2; h; h /= 2)
            for (int v = 0; v < h; v++) sums[v] += sums[v + h];
        return fold_vector(sums[0]);
    };
    auto code = [&](int v) { return floor_of(load(x + v * W) * r.inverse[i] + r.offset[i]); };
    float middle = largest / 2, centre = 0;
    if (!symmetric) {
        const float share = 1.0f / count;
        for (int v = 0; v < vectors; v++) a[v] = valid(v, code(v)), b[v] = valid(v, load(x + v * W));
        middle = fold(a) * share, centre = fold(b) * share;
    }
    for (int v = 0; v < vectors; v++) {
        const vec c = code(v) - middle;
        a[v] = valid(v, c * c), b[v] = valid(v, c * (load(x + v * W) - centre));
    }
    r.spread[i] = fold(a), r.cross[i] = fold(b), r.middle[i] = middle, r.centre[i] = centre;
}

}  // namespace
