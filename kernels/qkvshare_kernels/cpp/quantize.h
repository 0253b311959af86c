// Tiles of tokens of one head, which stay in the first level cache, into codes, scales and minima.

#pragma once

#include "codes.h"
#include "ranges.h"

namespace {

struct Shape {
    int64_t layers, heads, tokens;
    int d, row_bytes, bits, group;                    // group: values that share a scale, along tokens or along d
    int64_t layer_stride, head_stride, token_stride;  // of the native tensor, in bytes
    bool channel, symmetric, rotate;
    float fit, norm, most;
    Type type;
    int groups() const { return int(((channel ? tokens : d) + group - 1) / group); }
    // Rows and groups of whole vectors, in powers of two
    bool whole() const { return whole_row(d) && (channel || (group % W == 0 && d % group == 0)); }
    int slot() const { return channel ? padded(d) : whole() ? group : power_of_two(std::max(group, W)); }
    int row() const { return channel ? slot() : groups() * slot(); }  // floats of a token in a tile
    const char* head(const char* x, int64_t unit) const {
        return x + unit / heads * layer_stride + unit % heads * head_stride;
    }
};

struct Scratch {
    Floats tile, whole, parts;
    std::vector<uint8_t> codes;
    std::vector<uint16_t> halves;
    Ranges ranges;
    Scratch(const Shape& s, int64_t rows)
        : tile(size_t(rows) * s.row() + W), whole(padded(s.d)),
          parts(2 * size_t(power_of_two(std::max(s.group, 8 * W)) * (s.channel ? W / 8 : 1))), codes(padded(s.d) + 64),
          halves(2 * padded(s.d)), ranges(s.channel ? padded(s.d) : size_t(rows) * s.groups()) {}
};

// Rows of NV vectors, rotated if asked. Returns a sum which is finite where all of them are. next: how far away the tile
// after this one is (0: there is none); in a cache [L, H, T, D] that is too far for the processor to guess.
// low, high: where the ends of every column go, if asked.
template <int NV, Type T, bool ROTATE, bool ENDS>
float read_rows(const char* from, int64_t stride, int rows, float norm, float* to, int64_t next, float* low,
                float* high) {
    vec sum[4] = {}, least[NV], most[NV];
#pragma GCC unroll 16
    for (int i = 0; i < NV; i++) least[i] = fill(INFINITY), most[i] = fill(-INFINITY);
    for (int t = 0; t < rows; t++, from += stride, to += NV * W) {
        for (int i = 0; i < NV * W * (T == FLOAT32 ? 4 : 2); i += 64) __builtin_prefetch(from + next + i, 0, 3);
        vec v[NV];
#pragma GCC unroll 16
        for (int i = 0; i < NV; i++) v[i] = read<T>(from, i);
        if constexpr (ROTATE) butterflies<NV>(v, norm);
#pragma GCC unroll 16
        for (int i = 0; i < NV; i++) {
            if (!ROTATE || i == 0) sum[i % 4] += v[i];  // a rotation spreads what isn't finite over the row
            if constexpr (ENDS) least[i] = least_of(v[i], least[i]), most[i] = most_of(v[i], most[i]);
            store(to + i * W, v[i]);
        }
    }
    for (int i = 0; i < NV && ENDS; i++) store(low + i * W, least[i]), store(high + i * W, most[i]);
    return fold_vector(sum[0] + sum[1] + sum[2] + sum[3]);
}

typedef float (*Read)(const char*, int64_t, int, float, float*, int64_t, float*, float*);
typedef void (*Emit)(const float*, int, const float*, const float*, int, bool, int64_t, uint8_t*, int);

template <int NV, Type T>
Read read_of(bool rotate, bool ends) {
    return rotate ? ends ? read_rows<NV, T, true, true> : read_rows<NV, T, true, false>
           : ends ? read_rows<NV, T, false, true>
                  : read_rows<NV, T, false, false>;
}

template <Type T>
Read read_of(int d, bool rotate, bool ends) {
    return d == 64    ? read_of<4, T>(rotate, ends)
           : d == 128 ? read_of<8, T>(rotate, ends)
                      : read_of<16, T>(rotate, ends);
}

inline Read fast_read(const Shape& s) {
    return s.type == FLOAT32   ? read_of<FLOAT32>(s.d, s.rotate, s.channel)
           : s.type == FLOAT16 ? read_of<FLOAT16>(s.d, s.rotate, s.channel)
                               : read_of<BFLOAT16>(s.d, s.rotate, s.channel);
}

template <int NV>
Emit emit_of(int bits) {
    return bits == 8   ? emit_tile<8, NV>
           : bits == 4 ? emit_tile<4, NV>
           : bits == 3 ? emit_tile<3, NV>
                       : emit_tile<2, NV>;
}

inline Emit fast_emit(int d, int bits) {
    return d == 64 ? emit_of<4>(bits) : d == 128 ? emit_of<8>(bits) : emit_of<16>(bits);
}

// Rows of any size: groups of a token are spread over whole vectors, which sums can be folded in.
float read_slowly(const Shape& s, Scratch& m, const char* x, int count) {
    const int groups = s.groups(), slot = s.slot(), row = s.row(), d = padded(s.d);
    vec sum = {};
    for (int t = 0; t < count; t++) {
        float* const to = &m.tile[size_t(t) * row];
        float* const values = s.channel || groups == 1 ? to : m.whole.data();
        read_row(x + t * s.token_stride, s.type, values, s.d);
        std::fill(values + s.d, values + d, 0.0f);
        for (int i = 0; i < d; i += W) sum += load(values + i);
        if (s.rotate) rotate_row(values, s.d, s.norm);
        for (int g = 0; g < groups && !s.channel; g++) {  // ragged last groups repeat their last value
            const int n = std::min(s.group, s.d - g * s.group);
            float* const group = to + g * slot;
            if (values != to) std::memcpy(group, values + g * s.group, size_t(n) * 4);
            std::fill(group + n, group + s.group, group[n - 1]);
            std::fill(group + s.group, group + slot, 0.0f);
        }
    }
    return fold_vector(sum);
}

inline void codes_of(const float* x, uint8_t* out, int n, vec inverse, vec offset, bool clamp, float largest) {
    for (int i = 0; i < n; i += W) {
        vec v = load(x + i) * inverse + offset;
        if (clamp) v = least_of(most_of(v, fill(0)), fill(largest));
        to_bytes(out + i, v);
    }
}

void emit_slowly(const Shape& s, Scratch& m, int count, uint8_t* out) {
    const int groups = s.groups(), slot = s.slot(), d = padded(s.d);
    const bool clamp = s.fit != 0;
    const float largest = float((1 << s.bits) - 1);
    const Ranges& r = m.ranges;
    uint8_t* const c = m.codes.data();
    for (int t = 0; t < count; t++) {
        const float* const from = &m.tile[size_t(t) * s.row()];
        for (int i = 0; i < d && s.channel; i += W)
            codes_of(from + i, c + i, W, load(&r.inverse[i]), load(&r.offset[i]), clamp, largest);
        for (int g = 0; g < groups && !s.channel; g++) {  // a group's last vector may reach into the next group's codes
            const size_t k = size_t(t) * groups + g;
            const int n = std::min(s.group, s.d - g * s.group);
            codes_of(from + g * slot, c + g * s.group, n, fill(r.inverse[k]), fill(r.offset[k]), clamp, largest);
        }
        std::fill(c + s.d, c + (s.d + 7) / 8 * 8, uint8_t(0));
        pack_row(c, out + int64_t(t) * s.row_bytes, s.d, s.bits);
    }
}

void find_ranges(const Shape& s, Scratch& m, const float* tile, int count, int rows) {
    const float largest = float((1 << s.bits) - 1);
    const size_t n = size_t(count) * s.groups();
    if (s.channel) {
        Two* const parts = reinterpret_cast<Two*>(m.parts.data());
        ranges_of_channels(tile, rows, padded(s.d), s.whole(), s.symmetric, largest, s.fit, m.ranges, parts);
    } else if (s.whole()) {
        const int vectors = s.group / W;
        (s.symmetric ? ranges_of_tokens<true>(vectors) : ranges_of_tokens<false>(vectors))(tile, n, largest, s.fit, m.ranges);
    } else {
        const int slot = s.slot();
        for (size_t i = 0; i < n; i++) range_of_group(tile + i * slot, s.group, i, s.symmetric, m.ranges);
        if (s.fit == 0) return;
        first_codes(m.ranges, n, largest);
        for (size_t i = 0; i < n; i++)
            sums_of_group(tile + i * slot, s.group, i, s.symmetric, largest, m.ranges, m.parts.data());
        move_ends(m.ranges, n, largest, s.fit);
    }
}

// Tokens [start, start + count) of one head, which begin at x. Returns false for what fp16 can't hold, NaN and Inf.
bool quantize_tile(const Shape& s, Scratch& m, const char* x, int64_t next, int64_t unit, int64_t start, int count,
                   uint8_t* codes, uint16_t* scale, uint16_t* minimum) {
    const float largest = float((1 << s.bits) - 1);
    const int groups = s.groups(), row = s.row(), rows = s.channel ? s.group : count;
    const bool whole = s.whole(), clamp = s.fit != 0;
    Ranges& r = m.ranges;
    const float* tile = m.tile.data();
    const bool in_place = whole && !s.channel && s.symmetric && !s.rotate && s.type == FLOAT32 && s.token_stride == s.d * 4;
    if (in_place) {
        tile = reinterpret_cast<const float*>(x);
    } else {
        float* const to = m.tile.data();
        const float sum = whole ? fast_read(s)(x, s.token_stride, count, s.norm, to, next, r.low.data(), r.high.data())
                                : read_slowly(s, m, x, count);
        if (!std::isfinite(sum)) return false;
        for (int t = count; t < rows; t++) std::memcpy(to + size_t(t) * row, to + size_t(count - 1) * row, row * 4);
    }
    find_ranges(s, m, tile, count, rows);
    if (s.channel) {
        uint16_t* const halves = m.halves.data();
        if (!store_scales(r, s.d, largest, s.symmetric, s.most, halves, halves + padded(s.d))) return false;
        const int64_t at = (unit * groups + start / s.group) * s.d;
        std::memcpy(scale + at, halves, s.d * 2);
        if (!s.symmetric) std::memcpy(minimum + at, halves + padded(s.d), s.d * 2);
    } else {
        const int64_t at = (unit * s.tokens + start) * groups;
        uint16_t* const least = minimum ? minimum + at : nullptr;
        if (!store_scales(r, size_t(count) * groups, largest, s.symmetric, s.most, scale + at, least)) return false;
    }
    uint8_t* const to = codes + (unit * s.tokens + start) * s.row_bytes;
    if (whole)
        fast_emit(s.d, s.bits)(tile, count, r.inverse.data(), r.offset.data(), s.channel ? 0 : s.group / W, clamp,
                               in_place ? next : 0, to, s.row_bytes);
    else
        emit_slowly(s, m, count, to);
    return true;
}

}  // namespace
