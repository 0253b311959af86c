// Codes, scales and minima into rows of a cache.

#pragma once

#include "quantize.h"

namespace {

// Rows of NV vectors, rotated unless norm is 0. share as in emit_tile. past: past the caches. stride: of out, in bytes.
template <int BITS, int NV, Type T>
void take_tile(const uint8_t* codes, int rows, int row_bytes, const float* scale, const float* least, int share,
               float norm, bool past, char* out, int64_t stride) {
    vec a[NV], b[NV];
    int of[NV];
    for (int i = 0; i < NV; i++) {
        of[i] = share ? i / share : 0;
        if (!share) a[i] = load(scale + i * W), b[i] = load(least + i * W);
    }
    for (int t = 0; t < rows; t++, codes += row_bytes, out += stride) {
        if (share) {
            for (int i = 0; i < NV; i++) a[i] = fill(scale[of[i]]), b[i] = fill(least[of[i]]);
            scale += NV / share, least += NV / share;
        }
        vec v[NV];
#pragma GCC unroll 16
        for (int i = 0; i < NV; i++) v[i] = take<BITS, NV>(codes, i) * a[i] + b[i];
        if (norm != 0) butterflies<NV>(v, norm);
#if defined(__AVX512F__)
        if (T == FLOAT32 && past) {
            for (int i = 0; i < NV; i++) _mm512_stream_ps(reinterpret_cast<float*>(out) + i * W, (__m512)v[i]);
            continue;
        }
#endif
        for (int i = 0; i < NV; i++) write<T>(out, i, v[i]);
    }
}

typedef void (*Take)(const uint8_t*, int, int, const float*, const float*, int, float, bool, char*, int64_t);

template <int NV, Type T>
Take take_of(int bits) {
    return bits == 8   ? take_tile<8, NV, T>
           : bits == 4 ? take_tile<4, NV, T>
           : bits == 3 ? take_tile<3, NV, T>
                       : take_tile<2, NV, T>;
}

template <Type T>
Take take_of(int d, int bits) {
    return d == 64 ? take_of<4, T>(bits) : d == 128 ? take_of<8, T>(bits) : take_of<16, T>(bits);
}

inline Take fast_take(int d, int bits, Type type) {
    return type == FLOAT32   ? take_of<FLOAT32>(d, bits)
           : type == FLOAT16 ? take_of<FLOAT16>(d, bits)
                             : take_of<BFLOAT16>(d, bits);
}

// What one thread needs: scales and minima of one tile in float32, and a row.
struct Opened {
    Floats scale, least, row;
    std::vector<uint8_t> codes;
    Opened(const Shape& s, int64_t rows)
        : scale(s.channel ? padded(s.d) : padded(int(rows) * s.groups())), least(scale.size()), row(padded(s.d)),
          codes(padded(s.d) + 64) {}
    void set(size_t n, const uint16_t* s, const uint16_t* m, float symmetric) {
        halves_to_floats(s, scale.data(), n);
        if (m) return halves_to_floats(m, least.data(), n);
        for (size_t i = 0; i < n; i += W) store(&least[i], load(&scale[i]) * symmetric);
    }
};

void take_slowly(const Shape& s, Opened& m, const uint8_t* codes, int count, char* out) {
    const int groups = s.groups(), d = padded(s.d);
    float* const v = m.row.data();
    uint8_t* const c = m.codes.data();
    for (int t = 0; t < count; t++, codes += s.row_bytes, out += s.token_stride) {
        unpack_row(codes, c, s.d, s.bits);
        for (int i = 0; i < d && s.channel; i += W)
            store(v + i, from_bytes(c + i) * load(&m.scale[i]) + load(&m.least[i]));
        for (int g = 0; g < groups && !s.channel; g++) {
            const size_t k = size_t(t) * groups + g;
            const int last = std::min(s.d, (g + 1) * s.group);
            int i = g * s.group;
            for (; i + W <= last || (i < last && groups == 1); i += W)
                store(v + i, from_bytes(c + i) * m.scale[k] + m.least[k]);
            for (; i < last; i++) v[i] = float(c[i]) * m.scale[k] + m.least[k];
        }
        if (s.rotate) rotate_row(v, s.d, s.norm);
        write_row(out, s.type, v, s.d);
    }
}

}  // namespace
