// Codes of a row of a token's head, as reference.pack lays them out.

#pragma once

#include "rotation.h"
#include "vectors.h"

namespace {

inline int packed_bytes(int d, int bits) { return bits == 3 ? (d + 7) / 8 * 3 : (d * bits + 7) / 8; }

// Whether rows of d codes are packed and unpacked in registers.
inline bool whole_row(int d) { return d == 64 || d == 128 || d == 256; }

// c: zeros behind d, up to a multiple of 8.
inline void pack_row(const uint8_t* c, uint8_t* out, int d, int bits) {
    if (bits == 4) {
        const int n = (d + 1) / 2;
        for (int i = 0; i < n; i++) out[i] = c[i] | c[i + n] << 4;
    } else if (bits == 2) {
        const int n = (d + 3) / 4;
        for (int i = 0; i < n; i++) out[i] = c[i] | c[i + n] << 2 | c[i + 2 * n] << 4 | c[i + 3 * n] << 6;
    } else if (bits == 3) {
        const int n = (d + 7) / 8;
        for (int i = 0; i < 2 * n; i++)
            out[i] = (c[i] & 3) | (c[i + 2 * n] & 3) << 2 | (c[i + 4 * n] & 3) << 4 | (c[i + 6 * n] & 3) << 6;
        for (int i = 0; i < n; i++) {
            int byte = 0;
            for (int j = 0; j < 8; j++) byte |= (c[i + j * n] >> 2) << j;
            out[2 * n + i] = uint8_t(byte);
        }
    } else {
        std::memcpy(out, c, d);
    }
}

inline void unpack_row(const uint8_t* p, uint8_t* c, int d, int bits) {  // writes d codes and up to 7 more
    if (bits == 8) {
        std::memcpy(c, p, d);
    } else if (bits == 4) {
        const int n = (d + 1) / 2;
        for (int i = 0; i < n; i++) c[i] = p[i] & 15, c[i + n] = p[i] >> 4;
    } else if (bits == 2) {
        const int n = (d + 3) / 4;
        for (int j = 0; j < 4; j++)
            for (int i = 0; i < n; i++) c[i + j * n] = (p[i] >> (2 * j)) & 3;
    } else {
        const int n = (d + 7) / 8;
        for (int j = 0; j < 4; j++)
            for (int i = 0; i < 2 * n; i++) c[i + 2 * j * n] = (p[i] >> (2 * j)) & 3;
        for (int j = 0; j < 8; j++)
            for (int i = 0; i < n; i++) c[i + j * n] |= ((p[2 * n + i] >> j) & 1) << 2;
    }
}

// pack_row of rows of NV vectors, a multiple of 4, in registers.
template <int BITS, int NV>
INLINE void emit_row(const float* x, const vec* inverse, const vec* offset, bool clamp, uint8_t* out) {
    ivec c[NV];
#pragma GCC unroll 16
    for (int i = 0; i < NV; i++) {
        vec v = load(x + i * W) * inverse[i] + offset[i];
        if (clamp) v = least_of(most_of(v, fill(0)), fill(float((1 << BITS) - 1)));
        c[i] = __builtin_convertvector(v, ivec);
    }
    if constexpr (BITS == 8) {
        for (int i = 0; i < NV; i += 4) to_bytes(out + i * W, c + i);
    } else if constexpr (BITS == 4) {
        for (int i = 0; i < NV / 2; i++) to_bytes(out + i * W, c[i] | c[i + NV / 2] << 4);
    } else {
        constexpr int N = NV / 4;
        for (int i = 0; i < N; i++)
            to_bytes(out + i * W, (c[i] & 3) | (c[i + N] & 3) << 2 | (c[i + 2 * N] & 3) << 4 | (c[i + 3 * N] & 3) << 6);
        if constexpr (BITS == 3 && NV == 4) {  // eighths of the row are half a vector
            const ivec upper = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
            ivec high = {};
            for (int i = 0; i < NV; i++) high |= (c[i] >> 2) << (upper + 2 * i);
            uint8_t bytes[W];
            to_bytes(bytes, high | swapped<8>(high));
            std::memcpy(out + N * W, bytes, 8);
        } else if constexpr (BITS == 3) {
            for (int i = 0; i < NV / 8; i++) {
                ivec high = {};
                for (int j = 0; j < 8; j++) high |= (c[i + j * (NV / 8)] >> 2) << j;
                to_bytes(out + (N + i) * W, high);
            }
        }
    }
}

// Rows of a tile. next: where the tile after it is, from here, in bytes, or 0. share 0: inverse and offset of every column; else of every `share` vectors of every row.
template <int BITS, int NV>
void emit_tile(const float* x, int rows, const float* inverse, const float* offset, int share, bool clamp,
               int64_t next, uint8_t* out, int row_bytes) {
    vec a[NV], b[NV];
    int of[NV];
    for (int i = 0; i < NV; i++) {
        of[i] = share ? i / share : 0;
        if (!share) a[i] = load(inverse + i * W), b[i] = load(offset + i * W);
    }
    for (int t = 0; t < rows; t++) {
        if (share) {
            for (int i = 0; i < NV; i++) a[i] = fill(inverse[of[i]]), b[i] = fill(offset[of[i]]);
            inverse += NV / share, offset += NV / share;
        }
        for (int i = 0; i < NV && next; i++)
            __builtin_prefetch(reinterpret_cast<const char*>(x + (t * NV + i) * W) + next, 0, 3);
        emit_row<BITS, NV>(x + t * NV * W, a, b, clamp, out + t * row_bytes);
    }
}

// The codes of vector i of a packed row of NV vectors, as floats.
template <int BITS, int NV>
INLINE vec take(const uint8_t* row, int i) {
    if constexpr (BITS == 8) return from_bytes(row + i * W);
    constexpr int N = BITS == 4 ? NV / 2 : NV / 4;
    bvec b = *reinterpret_cast<const bvec*>(row + i % N * W);
    if constexpr (BITS == 4) {
        b = i < N ? b & 15 : b >> 4;
    } else {
        b = (b >> (i / N * 2)) & 3;
#if defined(__AVX512F__) && defined(__BMI2__)
        if constexpr (BITS == 3 && NV == 4) {
            uint64_t high;
            std::memcpy(&high, row + N * W, 8);
            constexpr uint64_t every = 0x0101010101010101;
            const uint64_t bits = _pext_u64(high >> (2 * i), every) | _pext_u64(high >> (2 * i + 1), every) << 8;
            const __m512 low = (__m512)from_bytes(b);
            return (vec)_mm512_mask_add_ps(low, __mmask16(bits), low, _mm512_set1_ps(4));
        }
#endif
        if constexpr (BITS == 3 && NV == 4) {
            bvec high = {};
            std::memcpy(&high, row + N * W, 8);
            high = __builtin_shufflevector(high, high, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7);
            const uint8_t j = uint8_t(1 << (2 * i)), k = uint8_t(2 << (2 * i));
            const bvec bit = {j, j, j, j, j, j, j, j, k, k, k, k, k, k, k, k};
            b |= (bvec)((high & bit) != 0) & 4;
        } else if constexpr (BITS == 3) {
            constexpr int M = NV / 8 ? NV / 8 : 1;
            b |= ((*reinterpret_cast<const bvec*>(row + (N + i % M) * W) >> (i / M)) & 1) << 2;
        }
    }
    return from_bytes(b);
}

}  // namespace
