// Codes of tokens of one head with queries and with weights, in registers (rows of 64, 128 and 256).

#pragma once

#include "codes.h"

namespace {

// Products of the codes of up to 16 tokens with all queries, not summed yet: sums[16 * query + token].
template <int BITS, int NV>
void products_of(const uint8_t* codes, int row_bytes, int count, const float* query, int queries, vec* sums) {
    for (int t = 0; t < count; t++, codes += row_bytes) {
        vec k[NV];
#pragma GCC unroll 16
        for (int i = 0; i < NV; i++) k[i] = take<BITS, NV>(codes, i);
        for (int g = 0; g < queries; g++) {
            const float* const q = query + g * NV * W;
            vec even = k[0] * load(q), odd = k[1] * load(q + W);
#pragma GCC unroll 16
            for (int i = 2; i < NV; i += 2)
                even = fused(k[i], load(q + i * W), even), odd = fused(k[i + 1], load(q + (i + 1) * W), odd);
            sums[g * W + t] = even + odd;
        }
    }
}

// Adds 64 channels of tokens, weighted for Q queries: the channels from vector `first` of a row of NV on.
template <int BITS, int NV, int Q>
INLINE void add_channels(const uint8_t* codes, int row_bytes, int64_t tokens, int first, const float* weights,
                         int64_t width, float* out) {
    vec sum[Q][4];
    for (int g = 0; g < Q; g++)
        for (int i = 0; i < 4; i++) sum[g][i] = load(out + g * NV * W + i * W);
    for (int64_t t = 0; t < tokens; t++, codes += row_bytes) {
        vec v[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) v[i] = take<BITS, NV>(codes, first + i);
#pragma GCC unroll 4
        for (int g = 0; g < Q; g++) {
            const vec w = fill(weights[g * width + t]);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) sum[g][i] = fused(v[i], w, sum[g][i]);
        }
    }
    for (int g = 0; g < Q; g++)
        for (int i = 0; i < 4; i++) store(out + g * NV * W + i * W, sum[g][i]);
}

// The same for any number of queries, four at a time.
template <int BITS, int NV>
void add_values(const uint8_t* codes, int row_bytes, int64_t tokens, int first, const float* weights, int64_t width,
                int queries, float* out) {
#pragma GCC unroll 16
    for (int place = 0; place < NV; place += 4) {  // a constant where the loop is unrolled
        if (place != first) continue;
        int g = 0;
        for (; g + 4 <= queries; g += 4)
            add_channels<BITS, NV, 4>(codes, row_bytes, tokens, place, weights + g * width, width, out + g * NV * W);
        const float* const w = weights + g * width;
        if (queries - g == 3) add_channels<BITS, NV, 3>(codes, row_bytes, tokens, place, w, width, out + g * NV * W);
        if (queries - g == 2) add_channels<BITS, NV, 2>(codes, row_bytes, tokens, place, w, width, out + g * NV * W);
        if (queries - g == 1) add_channels<BITS, NV, 1>(codes, row_bytes, tokens, place, w, width, out + g * NV * W);
    }
}

typedef void (*Products)(const uint8_t*, int, int, const float*, int, vec*);
typedef void (*Add)(const uint8_t*, int, int64_t, int, const float*, int64_t, int, float*);

template <int NV>
Products products_of(int bits) {
    return bits == 8   ? products_of<8, NV>
           : bits == 4 ? products_of<4, NV>
           : bits == 3 ? products_of<3, NV>
                       : products_of<2, NV>;
}

template <int NV>
Add add_of(int bits) {
    return bits == 8 ? add_values<8, NV> : bits == 4 ? add_values<4, NV> : bits == 3 ? add_values<3, NV> : add_values<2, NV>;
}

inline Products fast_products(int d, int bits) {
    return d == 64 ? products_of<4>(bits) : d == 128 ? products_of<8>(bits) : products_of<16>(bits);
}

inline Add fast_add(int d, int bits) {
    return d == 64 ? add_of<4>(bits) : d == 128 ? add_of<8>(bits) : add_of<16>(bits);
}

}  // namespace
