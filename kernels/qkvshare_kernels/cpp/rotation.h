// Hadamard rotation of blocks of the largest power of two in a row's size, distances ascending (reference.rotate).

#pragma once

#include "vectors.h"

namespace {

// A butterfly of distance D within a vector: lower + upper, lower - upper.
template <int D>
INLINE vec within(vec v) {
#if defined(__AVX512F__)
    constexpr float S = -1;
    constexpr vec sign = {1,          D & 1 ? S : 1, D & 2 ? S : 1, D & 3 ? S : 1, D & 4 ? S : 1, D & 5 ? S : 1,
                          D & 6 ? S : 1, D & 7 ? S : 1, D & 8 ? S : 1, D & 9 ? S : 1, D & 10 ? S : 1, D & 11 ? S : 1,
                          D & 12 ? S : 1, D & 13 ? S : 1, D & 14 ? S : 1, D & 15 ? S : 1};
    return fused(v, sign, swapped<D>(v));  // the product is exact, so this is the rounded sum
#else
    constexpr int32_t S = INT32_MIN;
    constexpr ivec flip = {0,          D & 1 ? S : 0, D & 2 ? S : 0, D & 3 ? S : 0, D & 4 ? S : 0, D & 5 ? S : 0,
                           D & 6 ? S : 0, D & 7 ? S : 0, D & 8 ? S : 0, D & 9 ? S : 0, D & 10 ? S : 0, D & 11 ? S : 0,
                           D & 12 ? S : 0, D & 13 ? S : 0, D & 14 ? S : 0, D & 15 ? S : 0};
    return swapped<D>(v) + (vec)((ivec)v ^ flip);
#endif
}

// Those between vectors, of distances from H vectors on.
template <int NV, int H>
INLINE void between(vec* v) {
    if constexpr (H < NV) {
#pragma GCC unroll 16
        for (int i = 0; i < NV; i++) {
            if (i & H) continue;
            const vec low = v[i], high = v[i + H];
            v[i] = low + high, v[i + H] = low - high;
        }
        between<NV, 2 * H>(v);
    }
}

template <int NV>
INLINE void butterflies(vec* v, float norm) {
#pragma GCC unroll 16
    for (int i = 0; i < NV; i++) v[i] = within<1>(v[i]);
#pragma GCC unroll 16
    for (int i = 0; i < NV; i++) v[i] = within<2>(v[i]);
#pragma GCC unroll 16
    for (int i = 0; i < NV; i++) v[i] = within<4>(v[i]);
#pragma GCC unroll 16
    for (int i = 0; i < NV; i++) v[i] = within<8>(v[i]);
    between<NV, 1>(v);
#pragma GCC unroll 16
    for (int i = 0; i < NV; i++) v[i] = v[i] * norm;
}

template <int NV>
inline void rotate_vectors(float* x, float norm) {
    vec v[NV];
    for (int i = 0; i < NV; i++) v[i] = load(x + i * W);
    butterflies<NV>(v, norm);
    for (int i = 0; i < NV; i++) store(x + i * W, v[i]);
}

void rotate_row(float* x, int n, float norm) {
    const int block = n & -n;
    for (int b = 0; b < n; b += block) {
        float* y = x + b;
        switch (block) {
            case 16: rotate_vectors<1>(y, norm); break;
            case 32: rotate_vectors<2>(y, norm); break;
            case 64: rotate_vectors<4>(y, norm); break;
            case 128: rotate_vectors<8>(y, norm); break;
            case 256: rotate_vectors<16>(y, norm); break;
            default:
                for (int h = 1; h < block; h *= 2)
                    for (int s = 0; s < block; s += 2 * h)
                        for (int i = s; i < s + h; i++) {
                            float low = y[i], high = y[i + h];
                            y[i] = low + high, y[i + h] = low - high;
                        }
                for (int i = 0; i < block; i++) y[i] *= norm;
        }
    }
}

}  // namespace
