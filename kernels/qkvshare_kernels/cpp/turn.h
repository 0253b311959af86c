// Rotary embeddings: pairs of a row's values turned by an angle of the token, in place.

#pragma once

#include "vectors.h"

namespace {

struct Turn {
    int first, half;   // `half` pairs from value `first` on
    bool interleaved;  // pairs are neighbours, else half of them apart
};

INLINE void turn(vec& a, vec& b, vec cos, vec sin) {
    const vec turned = a * cos - b * sin;
    b = b * cos + a * sin, a = turned;
}

// Where pairs fill whole vectors. x: at value `first`.
template <Type T, bool INTERLEAVED>
INLINE void turn_vectors(char* x, int half, const float* cos, const float* sin) {
    const int vectors = half / W;
    for (int i = 0; i < vectors; i++) {
        const int j = INTERLEAVED ? 2 * i : i, k = INTERLEAVED ? j + 1 : i + vectors;
        vec low = read<T>(x, j), high = read<T>(x, k), a = low, b = high;
        if constexpr (INTERLEAVED) {
            a = __builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            b = __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
        }
        turn(a, b, load(cos + i * W), load(sin + i * W));
        if constexpr (INTERLEAVED) {
            low = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            high = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        } else {
            low = a, high = b;
        }
        write<T>(x, j, low), write<T>(x, k, high);
    }
}

// Any number of pairs. row: room for 2 * half values.
template <Type T>
void turn_slowly(char* x, const Turn& t, const float* cos, const float* sin, float* row) {
    read_row<T>(x, row, 2 * t.half);
    for (int i = 0; i < t.half; i++) {
        float &a = row[t.interleaved ? 2 * i : i], &b = row[t.interleaved ? 2 * i + 1 : i + t.half];
        const float turned = a * cos[i] - b * sin[i];
        b = b * cos[i] + a * sin[i], a = turned;
    }
    write_row<T>(x, row, 2 * t.half);
}

// Tokens of one head; cos and sin [tokens, half].
template <Type T>
void turn_rows(char* x, int64_t stride, int64_t tokens, const Turn& t, const float* cos, const float* sin) {
    x += t.first * (T == FLOAT32 ? 4 : 2);
    Floats row(padded(2 * t.half));
    for (int64_t i = 0; i < tokens; i++, x += stride, cos += t.half, sin += t.half)
        if (t.half % W)
            turn_slowly<T>(x, t, cos, sin, row.data());
        else if (t.interleaved)
            turn_vectors<T, true>(x, t.half, cos, sin);
        else
            turn_vectors<T, false>(x, t.half, cos, sin);
}

}  // namespace
