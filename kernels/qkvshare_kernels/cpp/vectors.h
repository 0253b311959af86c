// Vectors of 16 floats, which compilers split where registers are shorter, and what the kernels do with them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

#define INLINE inline __attribute__((always_inline))

constexpr int W = 16;
typedef float vec __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(2 * W), aligned(2), may_alias));
typedef uint8_t bvec __attribute__((vector_size(W), aligned(1), may_alias));

enum Type { FLOAT32, FLOAT16, BFLOAT16 };

// At cache lines, which vectors then don't cross.
template <class T>
struct Aligned {
    typedef T value_type;
    Aligned() = default;
    template <class U>
    Aligned(const Aligned<U>&) {}
    T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(64))); }
    void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
    template <class U>
    bool operator==(const Aligned<U>&) const { return true; }
    template <class U>
    bool operator!=(const Aligned<U>&) const { return false; }
};
typedef std::vector<float, Aligned<float>> Floats;

constexpr int padded(int n) { return (n + W - 1) / W * W; }

INLINE vec load(const float* p) { return *reinterpret_cast<const vec*>(p); }
INLINE void store(float* p, vec v) { *reinterpret_cast<vec*>(p) = v; }
INLINE vec fill(float x) { return x - vec{}; }
INLINE vec least_of(vec a, vec b) { return a < b ? a : b; }
INLINE vec most_of(vec a, vec b) { return a > b ? a : b; }
INLINE vec size_of(vec a) { return (vec)((ivec)a & 0x7fffffff); }

INLINE vec floor_of(vec v) {
#if defined(__AVX512F__)
    return (vec)_mm512_roundscale_ps((__m512)v, 9);
#else
    for (int i = 0; i < W; i++) v[i] = std::floor(v[i]);
    return v;
#endif
}

// a * b + c, rounded once where that is faster: for sums that need not be equal everywhere.
INLINE vec fused(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

INLINE vec from_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
    return __builtin_convertvector(__builtin_convertvector(*reinterpret_cast<const bvec*>(p), ivec), vec);
#endif
}

INLINE vec from_bytes(bvec b) { return from_bytes(reinterpret_cast<const uint8_t*>(&b)); }

INLINE void to_bytes(uint8_t* p, ivec v) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)v));
#else
    *reinterpret_cast<bvec*>(p) = __builtin_convertvector(v, bvec);
#endif
}

INLINE void to_bytes(uint8_t* p, vec v) { to_bytes(p, __builtin_convertvector(v, ivec)); }

// 64 numbers of a byte each.
INLINE void to_bytes(uint8_t* p, const ivec* v) {
#if defined(__AVX512BW__)
    const __m512i low = _mm512_packus_epi32((__m512i)v[0], (__m512i)v[1]);
    const __m512i all = _mm512_packus_epi16(low, _mm512_packus_epi32((__m512i)v[2], (__m512i)v[3]));
    const ivec order = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    _mm512_storeu_si512(p, _mm512_permutexvar_epi32((__m512i)order, all));
#else
    for (int i = 0; i < 4; i++) to_bytes(p + i * W, v[i]);
#endif
}

inline float half_to_float(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    _Float16 x;
    std::memcpy(&x, &h, 2);
    return float(x);
#endif
}

inline uint16_t float_to_half(float f) {
#if defined(__F16C__)
    return _cvtss_sh(f, 0);
#else
    _Float16 x = _Float16(f);
    uint16_t h;
    std::memcpy(&h, &x, 2);
    return h;
#endif
}

INLINE vec from_halves(const uint16_t* p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
    float x[W];
    for (int i = 0; i < W; i += 8)
        _mm256_storeu_ps(x + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i))));
    return load(x);
#else
    vec v;
    for (int i = 0; i < W; i++) v[i] = half_to_float(p[i]);
    return v;
#endif
}

INLINE void to_halves(uint16_t* p, vec v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)v, 0));
#elif defined(__F16C__)
    float x[W];
    store(x, v);
    for (int i = 0; i < W; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), 0));
#else
    for (int i = 0; i < W; i++) p[i] = float_to_half(v[i]);
#endif
}

// To the nearest bfloat16, ties to even, in the lower halves.
INLINE ivec brains_of(vec v) {
    const ivec u = (ivec)v;
    const ivec up = ((u + 0x7fff + ((u >> 16) & 1)) >> 16) & 0xffff;
    return (u & 0x7fffffff) > 0x7f800000 ? ivec{} + 0x7fc0 : up;
}

// Vector i of a row of any type.
template <Type T>
INLINE vec read(const char* row, int i) {
    if constexpr (T == FLOAT32) return load(reinterpret_cast<const float*>(row) + i * W);
    const uint16_t* const h = reinterpret_cast<const uint16_t*>(row) + i * W;
    if constexpr (T == FLOAT16) return from_halves(h);
    return (vec)(__builtin_convertvector(*reinterpret_cast<const hvec*>(h), ivec) << 16);
}

template <Type T>
INLINE void write(char* row, int i, vec v) {
    uint16_t* const h = reinterpret_cast<uint16_t*>(row) + i * W;
    if constexpr (T == FLOAT32)
        store(reinterpret_cast<float*>(row) + i * W, v);
    else if constexpr (T == FLOAT16)
        to_halves(h, v);
    else
        *reinterpret_cast<hvec*>(h) = __builtin_convertvector(brains_of(v), hvec);
}

// The last n % 16 numbers go through a vector of their own.
template <Type T>
void read_row(const char* p, float* out, int n) {
    int i = 0;
    for (; i + W <= n; i += W) store(out + i, read<T>(p, i / W));
    if (i == n) return;
    constexpr int SIZE = T == FLOAT32 ? 4 : 2;
    char part[W * SIZE] = {};
    std::memcpy(part, p + i * SIZE, size_t(n - i) * SIZE);
    const vec v = read<T>(part, 0);
    std::memcpy(out + i, &v, size_t(n - i) * 4);
}

template <Type T>
void write_row(char* p, const float* x, int n) {
    int i = 0;
    for (; i + W <= n; i += W) write<T>(p, i / W, load(x + i));
    if (i == n) return;
    constexpr int SIZE = T == FLOAT32 ? 4 : 2;
    vec v = {};
    std::memcpy(&v, x + i, size_t(n - i) * 4);
    char part[W * SIZE];
    write<T>(part, 0, v);
    std::memcpy(p + i * SIZE, part, size_t(n - i) * SIZE);
}

inline void read_row(const char* p, Type type, float* out, int n) {
    type == FLOAT32 ? read_row<FLOAT32>(p, out, n)
    : type == FLOAT16 ? read_row<FLOAT16>(p, out, n) : read_row<BFLOAT16>(p, out, n);
}

inline void write_row(char* p, Type type, const float* x, int n) {
    type == FLOAT32 ? write_row<FLOAT32>(p, x, n)
    : type == FLOAT16 ? write_row<FLOAT16>(p, x, n) : write_row<BFLOAT16>(p, x, n);
}

// n numbers; arrays have room for whole vectors.
inline void halves_to_floats(const uint16_t* h, float* out, size_t n) {
    read_row<FLOAT16>(reinterpret_cast<const char*>(h), out, int(n));
}

inline void floats_to_halves(const float* x, uint16_t* out, size_t n) {
    write_row<FLOAT16>(reinterpret_cast<char*>(out), x, int(n));
}

template <int D, class V>
INLINE V swapped(V v) {  // element i ^ D in place of i
#define AT(i) (i) ^ D
    return __builtin_shufflevector(v, v, AT(0), AT(1), AT(2), AT(3), AT(4), AT(5), AT(6), AT(7), AT(8), AT(9), AT(10),
                                   AT(11), AT(12), AT(13), AT(14), AT(15));
#undef AT
}

INLINE float fold_vector(vec v) {  // halves onto halves, as reference.fold does
    v += swapped<8>(v), v += swapped<4>(v), v += swapped<2>(v), v += swapped<1>(v);
    return v[0];
}

INLINE float least_in(vec v) {
    v = least_of(v, swapped<8>(v)), v = least_of(v, swapped<4>(v));
    v = least_of(v, swapped<2>(v)), v = least_of(v, swapped<1>(v));
    return v[0];
}

inline float most_in(vec v) { return -least_in(-v); }

// One number of each of 16 vectors, as fold_vector and the others make it of one: halves of two vectors are put side
// by side, so that no lane works for nothing.
template <class Op>
INLINE vec across(const vec* v, Op op) {
    vec four[4];
    for (int k = 0; k < 4; k++) {
        vec pair[2];
        for (int j = 0; j < 2; j++) {
            const vec a = v[k + 8 * j], b = v[k + 8 * j + 4];
            pair[j] = op(__builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                         __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
        }
        const vec a = pair[0], b = pair[1];
        four[k] = op(__builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
                     __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
    }
    vec pair[2];
    for (int j = 0; j < 2; j++) {
        const vec a = four[2 * j], b = four[2 * j + 1];
        pair[j] = op(__builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
                     __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
    }
    const vec a = pair[0], b = pair[1];
    return op(__builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30),
              __builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31));
}

INLINE vec sums_across(const vec* v) {
    return across(v, [](vec a, vec b) { return a + b; });
}

}  // namespace
