// quantize and dequantize on CPUs. The specification is reference.py: codes, scales and minima are equal to its own
// bit for bit, so every product and sum is rounded (compile with -ffp-contract=off, never with -ffast-math) and sums
// are folded in its order. One task is a tile of tokens of one head, which stays in the first level cache.
// Threads come from the OpenMP runtime that torch has loaded.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__F16C__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older ones refuse it
#endif
#endif

namespace {

#define INLINE inline __attribute__((always_inline))

constexpr int W = 16;  // floats in a vector; compilers split it where registers are shorter
typedef float vec __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint8_t bvec __attribute__((vector_size(W), aligned(1), may_alias));

constexpr float STEP = 1.0f / 1024, SMALLEST = 1.0f / 16384;  // 2 * FP16_STEP, SMALLEST_SCALE
enum Type { FLOAT32, FLOAT16, BFLOAT16 };

INLINE vec load(const float* p) { return *reinterpret_cast<const vec*>(p); }
INLINE void store(float* p, vec v) { *reinterpret_cast<vec*>(p) = v; }
INLINE vec fill(float x) { return x - vec{}; }
INLINE vec least_of(vec a, vec b) { return a < b ? a : b; }
INLINE vec most_of(vec a, vec b) { return a > b ? a : b; }
INLINE vec size_of(vec a) { return (vec)((ivec)a & 0x7fffffff); }

INLINE vec from_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
    return __builtin_convertvector(__builtin_convertvector(*reinterpret_cast<const bvec*>(p), ivec), vec);
#endif
}

INLINE vec from_bytes(bvec b) { return from_bytes(reinterpret_cast<const uint8_t*>(&b)); }

INLINE void to_bytes(uint8_t* p, vec v) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvttps_epi32((__m512)v)));
#else
    *reinterpret_cast<bvec*>(p) = __builtin_convertvector(__builtin_convertvector(v, ivec), bvec);
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

void halves_to_floats(const uint16_t* h, float* out, size_t n) {
    size_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(h + i))));
#endif
    for (; i < n; i++) out[i] = half_to_float(h[i]);
}

void floats_to_halves(const float* x, uint16_t* out, size_t n) {
    size_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), 0));
#endif
    for (; i < n; i++) out[i] = float_to_half(x[i]);
}

inline uint16_t float_to_brain(float f) {  // to nearest even
    uint32_t u;
    std::memcpy(&u, &f, 4);
    return (u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

void read_row(const char* p, Type type, float* out, int n) {
    const uint16_t* h = reinterpret_cast<const uint16_t*>(p);
    if (type == FLOAT32) {
        std::memcpy(out, p, size_t(n) * 4);
    } else if (type == FLOAT16) {
        halves_to_floats(h, out, n);
    } else {
        for (int i = 0; i < n; i++) {
            uint32_t u = uint32_t(h[i]) << 16;
            std::memcpy(out + i, &u, 4);
        }
    }
}

void write_row(char* p, Type type, const float* x, int n) {
    uint16_t* h = reinterpret_cast<uint16_t*>(p);
    if (type == FLOAT32) {
        std::memcpy(p, x, size_t(n) * 4);
    } else if (type == FLOAT16) {
        floats_to_halves(x, h, n);
    } else {
        for (int i = 0; i < n; i++) h[i] = float_to_brain(x[i]);
    }
}

template <int D, class V>
INLINE V swapped(V v) {  // element i ^ D in place of i
#define AT(i) (i) ^ D
    return __builtin_shufflevector(v, v, AT(0), AT(1), AT(2), AT(3), AT(4), AT(5), AT(6), AT(7), AT(8), AT(9), AT(10),
                                   AT(11), AT(12), AT(13), AT(14), AT(15));
#undef AT
}

// A butterfly of distance D within a vector: lower + upper, lower - upper.
template <int D>
INLINE vec within(vec v) {
    constexpr int32_t S = INT32_MIN;
    constexpr ivec flip = {0,          D & 1 ? S : 0, D & 2 ? S : 0, D & 3 ? S : 0, D & 4 ? S : 0, D & 5 ? S : 0,
                           D & 6 ? S : 0, D & 7 ? S : 0, D & 8 ? S : 0, D & 9 ? S : 0, D & 10 ? S : 0, D & 11 ? S : 0,
                           D & 12 ? S : 0, D & 13 ? S : 0, D & 14 ? S : 0, D & 15 ? S : 0};
    return swapped<D>(v) + (vec)((ivec)v ^ flip);
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

template <int NV>
inline float fold(vec* x, int vectors) {  // vectors: a power of two
    for (int h = (NV ? NV : vectors) / 2; h; h /= 2)
        for (int i = 0; i < h; i++) x[i] += x[i + h];
    return fold_vector(x[0]);
}

template <int NV>
INLINE void butterflies(vec* v, float norm) {
    for (int i = 0; i < NV; i++) v[i] = within<8>(within<4>(within<2>(within<1>(v[i]))));
    for (int h = 1; h < NV; h *= 2)
        for (int b = 0; b < NV; b += 2 * h)
            for (int i = b; i < b + h; i++) {
                vec low = v[i], high = v[i + h];
                v[i] = low + high, v[i + h] = low - high;
            }
    for (int i = 0; i < NV; i++) v[i] = v[i] * norm;
}

template <int NV>
inline void rotate_vectors(float* x, float norm) {
    vec v[NV];
    for (int i = 0; i < NV; i++) v[i] = load(x + i * W);
    butterflies<NV>(v, norm);
    for (int i = 0; i < NV; i++) store(x + i * W, v[i]);
}

// A tile of rows of NV vectors, rotated unless norm is 0. Returns 0, or NaN where a value is not finite. next: how far
// away the next tile is (0: there is none); in a cache [L, H, T, D] that is too far for the processor to guess.
// low, high: where the ends of every column go, or null.
template <int NV>
vec read_tile(const char* from, int64_t stride, int rows, float norm, float* to, int64_t next, float* low,
              float* high) {
    vec looked[NV] = {}, least[NV], most[NV];
    for (int i = 0; i < NV; i++) least[i] = fill(INFINITY), most[i] = fill(-INFINITY);
    for (int t = 0; t < rows; t++, from += stride, to += NV * W) {
        if (next)
            for (int i = 0; i < NV * W * 4; i += 64) __builtin_prefetch(from + next + i, 0, 2);
        vec v[NV];
        for (int i = 0; i < NV; i++) v[i] = load(reinterpret_cast<const float*>(from) + i * W);
        for (int i = 0; i < NV; i++) looked[i] += v[i] * 0.0f;
        if (norm != 0) butterflies<NV>(v, norm);
        for (int i = 0; i < NV; i++) store(to + i * W, v[i]);
        if (low)
            for (int i = 0; i < NV; i++) least[i] = least_of(v[i], least[i]), most[i] = most_of(v[i], most[i]);
    }
    for (int i = 0; i < NV; i++) {
        if (low) store(low + i * W, least[i]), store(high + i * W, most[i]);
        if (i) looked[0] += looked[i];
    }
    return looked[0];
}

// Hadamard rotation of blocks of the largest power of two in n, distances ascending (reference.rotate).
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

void pack_row(const uint8_t* c, uint8_t* out, int d, int bits) {  // c: zeros behind d, up to a multiple of 8
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

template <int BITS>
INLINE ivec codes_from(const float* x, vec inverse, vec offset, bool clamp) {
    vec v = load(x) * inverse + offset;
    if (clamp) v = least_of(most_of(v, fill(0)), fill(float((1 << BITS) - 1)));
    return __builtin_convertvector(v, ivec);
}

INLINE void to_bytes(uint8_t* p, ivec v) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)v));
#else
    *reinterpret_cast<bvec*>(p) = __builtin_convertvector(v, bvec);
#endif
}

// pack_row for rows of NV vectors, a multiple of 4.
template <int BITS, int NV>
INLINE void emit_row(const float* x, const vec* inverse, const vec* offset, bool clamp, uint8_t* out) {
    ivec c[NV];
#pragma GCC unroll 16
    for (int i = 0; i < NV; i++) c[i] = codes_from<BITS>(x + i * W, inverse[i], offset[i], clamp);
    if constexpr (BITS == 8) {
        for (int i = 0; i < NV; i++) to_bytes(out + i * W, c[i]);
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

// Rows of a tile. share 0: inverse and offset of every column; else of every `share` vectors of every row.
template <int BITS, int NV>
void emit_tile(const float* x, int rows, const float* inverse, const float* offset, int share, bool clamp,
               uint8_t* out, int row_bytes) {
    vec a[NV], b[NV];
    if (!share)
        for (int i = 0; i < NV; i++) a[i] = load(inverse + i * W), b[i] = load(offset + i * W);
    for (int t = 0; t < rows; t++) {
        if (share)
            for (int i = 0; i < NV; i++) {
                const int k = t * (NV / share) + i / share;
                a[i] = fill(inverse[k]), b[i] = fill(offset[k]);
            }
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

// Rows into floats, rotated unless norm is 0. share as in emit_tile. past: past the caches. stride: of out, in floats.
template <int BITS, int NV>
void take_tile(const uint8_t* codes, int rows, int row_bytes, const float* scale, const float* least, int share,
               float norm, bool past, float* out, int64_t stride) {
    vec a[NV], b[NV];
    if (!share)
        for (int i = 0; i < NV; i++) a[i] = load(scale + i * W), b[i] = load(least + i * W);
    for (int t = 0; t < rows; t++, codes += row_bytes, out += stride) {
        if (share)
            for (int i = 0; i < NV; i++) {
                const int k = t * (NV / share) + i / share;
                a[i] = fill(scale[k]), b[i] = fill(least[k]);
            }
        vec v[NV];
#pragma GCC unroll 16
        for (int i = 0; i < NV; i++) v[i] = take<BITS, NV>(codes, i) * a[i] + b[i];
        if (norm != 0) butterflies<NV>(v, norm);
#if defined(__AVX512F__)
        if (past) {
            for (int i = 0; i < NV; i++) _mm512_stream_ps(out + i * W, (__m512)v[i]);
            continue;
        }
#endif
        for (int i = 0; i < NV; i++) store(out + i * W, v[i]);
    }
}

typedef void (*Emit)(const float*, int, const float*, const float*, int, bool, uint8_t*, int);
typedef void (*Take)(const uint8_t*, int, int, const float*, const float*, int, float, bool, float*, int64_t);

template <int NV>
Emit emit_of(int bits) {
    return bits == 8   ? emit_tile<8, NV>
           : bits == 4 ? emit_tile<4, NV>
           : bits == 3 ? emit_tile<3, NV>
                       : emit_tile<2, NV>;
}

template <int NV>
Take take_of(int bits) {
    return bits == 8   ? take_tile<8, NV>
           : bits == 4 ? take_tile<4, NV>
           : bits == 3 ? take_tile<3, NV>
                       : take_tile<2, NV>;
}

// For head sizes of 64, 128 and 256 in groups of whole vectors; null for others, which go code by code.
Emit fast_emit(int d, int bits) {
    return d == 64 ? emit_of<4>(bits) : d == 128 ? emit_of<8>(bits) : d == 256 ? emit_of<16>(bits) : nullptr;
}

Take fast_take(int d, int bits) {
    return d == 64 ? take_of<4>(bits) : d == 128 ? take_of<8>(bits) : d == 256 ? take_of<16>(bits) : nullptr;
}

void unpack_row(const uint8_t* p, uint8_t* c, int d, int bits) {  // writes d codes and up to 7 more
    if (bits == 4) {
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

struct Shape {
    int64_t layers, heads, tokens;
    int d, row_bytes, bits, group;  // group: values that share a scale, along tokens or along d
    int64_t layer_stride, head_stride, token_stride;  // of the native tensor, in bytes
    bool channel, symmetric, rotate;
    float fit, norm, most;
    Type type;
    int padded() const { return (d + W - 1) / W * W; }
    int groups() const { return int(((channel ? tokens : d) + group - 1) / group); }
};

// What every group of a tile needs. Arrays hold one entry per group; loops over them become vector code.
struct Ranges {
    std::vector<float> low, high, inverse, offset, middle, centre, step, spread, cross;
    explicit Ranges(size_t n)
        : low(n + W), high(n + W), inverse(n + W), offset(n + W), middle(n + W), centre(n + W), step(n + W),
          spread(n + W), cross(n + W) {}
};

void first_codes(Ranges& r, size_t n, float largest) {
    const float share = 1.0f / largest;
    for (size_t i = 0; i < n; i += W) {
        const vec low = load(&r.low[i]), step = most_of(load(&r.high[i]) - low, fill(SMALLEST)) * share;
        const vec inverse = 1.0f / step;
        store(&r.step[i], step), store(&r.inverse[i], inverse), store(&r.offset[i], 0.5f - low * inverse);
    }
}

void move_ends(Ranges& r, size_t n, float largest, float fit) {
    for (size_t i = 0; i < n; i += W) {
        const vec spread = load(&r.spread[i]), low = load(&r.low[i]), high = load(&r.high[i]);
        const vec slope = spread > 0 ? load(&r.cross[i]) / spread : load(&r.step[i]);
        const vec least = load(&r.centre[i]) - load(&r.middle[i]) * slope;
        const vec up = most_of(least - low, fill(0)), down = most_of(high - (least + largest * slope), fill(0));
        store(&r.low[i], low + fit * up), store(&r.high[i], high - fit * down);
    }
}

// Returns whether everything decodes to at most `most`.
bool store_scales(Ranges& r, size_t n, float largest, bool symmetric, float most, uint16_t* scale, uint16_t* minimum) {
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
        store(width + i, most_of(s * (1 + STEP), fill(SMALLEST)));
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

INLINE vec floor_of(vec v) {
#if defined(__AVX512F__)
    return (vec)_mm512_roundscale_ps((__m512)v, 9);
#else
    for (int i = 0; i < W; i++) v[i] = std::floor(v[i]);
    return v;
#endif
}

int power_of_two(int n) {
    int p = 1;
    while (p < n) p *= 2;
    return p;
}

struct Scratch {
    std::vector<float> tile, products;
    std::vector<uint8_t> codes;
    Ranges ranges;
    Scratch(size_t tile_floats, size_t product_floats, size_t code_bytes, size_t groups)
        : tile(tile_floats + W), products(product_floats), codes(code_bytes + 64), ranges(groups) {}
};

// Sums over the rows of a column of vectors, folded; rows: a power of two.
inline vec fold_rows(float* x, int rows) {
    for (int h = rows / 2; h; h /= 2)
        for (int t = 0; t < h; t++) store(x + t * W, load(x + t * W) + load(x + (t + h) * W));
    return load(x);
}

void ranges_of_channels(const Shape& s, Scratch& m, int rows, float largest, bool known) {
    const int d = s.padded(), folded = power_of_two(rows);
    Ranges& r = m.ranges;
    for (int c = 0; c < d && known && s.symmetric; c += W) {
        const vec high = most_of(-load(&r.low[c]), load(&r.high[c]));
        store(&r.high[c], high), store(&r.low[c], -high);
    }
    for (int c = 0; c < d && !known; c += W) {
        vec low = load(&m.tile[c]), high = low;
        if (s.symmetric) {
            high = size_of(high);
            for (int t = 1; t < rows; t++) high = most_of(high, size_of(load(&m.tile[t * d + c])));
            low = -high;
        } else {
            for (int t = 1; t < rows; t++) {
                vec x = load(&m.tile[t * d + c]);
                low = least_of(x, low), high = most_of(x, high);
            }
        }
        store(&r.low[c], low), store(&r.high[c], high);
    }
    if (s.fit == 0) return;
    first_codes(r, d, largest);
    float* const p = m.products.data();
    float* const codes = p + size_t(folded) * W;
    const float count = 1.0f / rows;
    for (int c = 0; c < d; c += W) {
        const vec inverse = load(&r.inverse[c]), offset = load(&r.offset[c]);
        for (int t = 0; t < rows; t++) store(codes + t * W, floor_of(load(&m.tile[t * d + c]) * inverse + offset));
        std::fill(p + rows * W, p + folded * W, 0.0f);
        vec middle = fill(largest / 2), centre = fill(0);
        if (!s.symmetric) {
            std::memcpy(p, codes, size_t(rows) * W * 4);
            middle = fold_rows(p, folded) * count;
            std::fill(p + rows * W, p + folded * W, 0.0f);
            for (int t = 0; t < rows; t++) store(p + t * W, load(&m.tile[t * d + c]));
            centre = fold_rows(p, folded) * count;
        }
        std::fill(p + rows * W, p + folded * W, 0.0f);
        for (int t = 0; t < rows; t++) {
            vec code = load(codes + t * W) - middle;
            store(codes + t * W, code), store(p + t * W, code * code);
        }
        store(&r.spread[c], fold_rows(p, folded));
        std::fill(p + rows * W, p + folded * W, 0.0f);
        for (int t = 0; t < rows; t++) store(p + t * W, load(codes + t * W) * (load(&m.tile[t * d + c]) - centre));
        store(&r.cross[c], fold_rows(p, folded));
        store(&r.middle[c], middle), store(&r.centre[c], centre);
    }
    move_ends(r, d, largest, s.fit);
}

// One group of a token's head: `x` holds its values, repeated up to `count`, then zeros up to NV (a power of two)
// vectors. Groups of other sizes go through NV = 0.
void range_of_token(const float* x, int count, Ranges& r, size_t i, bool symmetric) {
    float low = x[0], high = x[0];
    vec l = fill(low), h = fill(high);
    int j = 0;
    if (symmetric) {
        h = size_of(h);
        for (; j + W <= count; j += W) h = most_of(h, size_of(load(x + j)));
        for (; j < count; j++) h[0] = std::max(h[0], std::fabs(x[j]));
    } else {
        for (; j + W <= count; j += W) l = least_of(load(x + j), l), h = most_of(load(x + j), h);
        for (; j < count; j++) l[0] = std::min(l[0], x[j]), h[0] = std::max(h[0], x[j]);
    }
    high = most_in(h);
    r.high[i] = high, r.low[i] = symmetric ? -high : least_in(l);
}

template <int NV>
void sums_of_token(const float* x, int count, int vectors, Ranges& r, size_t i, bool symmetric, float largest, vec* p) {
    const int n = NV ? NV : vectors;
    vec* const codes = p + n;
    const ivec lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    auto valid = [&](int v, vec value) {  // zero behind the group
        return v * W + W <= count ? value : (vec)((ivec)value & (lanes + v * W < count));
    };
    const float inverse = r.inverse[i], offset = r.offset[i];
    for (int v = 0; v < n; v++) codes[v] = floor_of(load(x + v * W) * inverse + offset);
    float middle = largest / 2, centre = 0;
    if (!symmetric) {
        const float share = 1.0f / count;
        for (int v = 0; v < n; v++) p[v] = valid(v, codes[v]);
        middle = fold<NV>(p, n) * share;
        for (int v = 0; v < n; v++) p[v] = valid(v, load(x + v * W));
        centre = fold<NV>(p, n) * share;
    }
    for (int v = 0; v < n; v++) codes[v] -= middle, p[v] = valid(v, codes[v] * codes[v]);
    r.spread[i] = fold<NV>(p, n);
    for (int v = 0; v < n; v++) p[v] = valid(v, codes[v] * (load(x + v * W) - centre));
    r.cross[i] = fold<NV>(p, n);
    r.middle[i] = middle, r.centre[i] = centre;
}

void ranges_of_tokens(const Shape& s, Scratch& m, int rows, int row_floats, float largest) {
    const int groups = s.groups(), slot = row_floats / groups, vectors = slot / W;
    const size_t n = size_t(rows) * groups;
    vec* const p = reinterpret_cast<vec*>(m.products.data());
    for (size_t i = 0; i < n; i++) range_of_token(&m.tile[i * slot], s.group, m.ranges, i, s.symmetric);
    if (s.fit == 0) return;
    first_codes(m.ranges, n, largest);
    for (size_t i = 0; i < n; i++) {
        const float* x = &m.tile[i * slot];
        if (vectors == 4)
            sums_of_token<4>(x, s.group, 4, m.ranges, i, s.symmetric, largest, p);
        else
            sums_of_token<0>(x, s.group, vectors, m.ranges, i, s.symmetric, largest, p);
    }
    move_ends(m.ranges, n, largest, s.fit);
}

// Adds zero for finite values, and NaN for others.
inline void look_at(const float* x, int n, vec& sum) {
    int i = 0;
    for (; i + W <= n; i += W) sum += load(x + i) * 0.0f;
    for (; i < n; i++) sum[0] += x[i] * 0.0f;
}

inline void codes_of(const float* x, uint8_t* out, int n, vec inverse, vec offset, bool clamp, float largest) {
    for (int i = 0; i < n; i += W) {
        vec v = load(x + i) * inverse + offset;
        if (clamp) v = least_of(most_of(v, fill(0)), fill(largest));
        to_bytes(out + i, v);
    }
}

// Tokens [start, start + count) of one head. Returns false for NaN and Inf.
bool quantize_tile(const Shape& s, Scratch& m, const char* x, int64_t next, int64_t unit, int64_t start, int count,
                   uint8_t* codes, uint16_t* scale, uint16_t* minimum) {
    const float largest = float((1 << s.bits) - 1);
    const int groups = s.groups(), d = s.padded();
    const int slot = power_of_two(std::max(s.group, W)), row = s.channel ? d : groups * slot;
    vec finite = fill(0);
    std::vector<float> whole(s.channel ? 0 : d);
    const bool simple = s.type == FLOAT32 && s.d == row && (s.d == 64 || s.d == 128 || s.d == 256);
    if (simple) {
        const char* const from = x + start * s.token_stride;
        const float norm = s.rotate ? s.norm : 0;
        float *const low = s.channel ? m.ranges.low.data() : nullptr, *const high = m.ranges.high.data();
        finite = s.d == 64    ? read_tile<4>(from, s.token_stride, count, norm, m.tile.data(), next, low, high)
                 : s.d == 128 ? read_tile<8>(from, s.token_stride, count, norm, m.tile.data(), next, low, high)
                              : read_tile<16>(from, s.token_stride, count, norm, m.tile.data(), next, low, high);
    }
    for (int t = 0; t < count && !simple; t++) {
        float* const to = &m.tile[size_t(t) * row];
        float* const values = s.channel || groups == 1 ? to : whole.data();
        read_row(x + (start + t) * s.token_stride, s.type, values, s.d);
        look_at(values, s.d, finite);
        if (s.rotate) rotate_row(values, s.d, s.norm);
        if (s.channel) {
            std::fill(to + s.d, to + d, 0.0f);
            continue;
        }
        for (int g = 0; g < groups; g++) {  // ragged last groups repeat their last value
            const int n = std::min(s.group, s.d - g * s.group);
            float* const group = to + g * slot;
            if (values != to) std::memcpy(group, values + g * s.group, size_t(n) * 4);
            std::fill(group + n, group + s.group, group[n - 1]);
            std::fill(group + s.group, group + slot, 0.0f);
        }
    }
    if (fold_vector(finite) != 0) return false;
    const int rows = s.channel ? s.group : count;
    for (int t = count; t < rows; t++) std::memcpy(&m.tile[size_t(t) * row], &m.tile[size_t(count - 1) * row], row * 4);
    const bool clamp = s.fit != 0;
    Ranges& r = m.ranges;
    std::vector<uint16_t> halves(s.channel ? 2 * d : 0);
    if (s.channel) {
        ranges_of_channels(s, m, rows, largest, simple);
        if (!store_scales(r, s.d, largest, s.symmetric, s.most, halves.data(), halves.data() + d)) return false;
        const int64_t at = (unit * groups + start / s.group) * s.d;
        std::memcpy(scale + at, halves.data(), s.d * 2);
        if (!s.symmetric) std::memcpy(minimum + at, halves.data() + d, s.d * 2);
    } else {
        ranges_of_tokens(s, m, count, row, largest);
        const int64_t at = (unit * s.tokens + start) * groups;
        uint16_t* const least = minimum ? minimum + at : nullptr;
        if (!store_scales(r, size_t(count) * groups, largest, s.symmetric, s.most, scale + at, least)) return false;
    }
    uint8_t* const spread = m.codes.data();
    const bool whole_row = s.channel || row == s.d;  // no gaps between groups
    const Emit emit = whole_row && (s.channel || s.group % W == 0) ? fast_emit(s.d, s.bits) : nullptr;
    if (emit) {
        uint8_t* const to = codes + (unit * s.tokens + start) * s.row_bytes;
        const int share = s.channel ? 0 : s.group / W;
        emit(m.tile.data(), count, r.inverse.data(), r.offset.data(), share, clamp, to, s.row_bytes);
        return true;
    }
    for (int t = 0; t < count; t++) {
        uint8_t* const to = codes + (unit * s.tokens + start + t) * s.row_bytes;
        uint8_t* const c = s.bits == 8 && s.d % W == 0 ? to : spread;
        const float* const from = &m.tile[size_t(t) * row];
        if (s.channel) {
            for (int i = 0; i < d; i += W)
                codes_of(from + i, c + i, W, load(&r.inverse[i]), load(&r.offset[i]), clamp, largest);
        } else if (groups == 1 || s.group % W == 0) {
            for (int g = 0; g < groups; g++) {
                const size_t i = size_t(t) * groups + g;
                const int n = std::min(s.group, d - g * s.group);
                codes_of(from + g * slot, c + g * s.group, n, fill(r.inverse[i]), fill(r.offset[i]), clamp, largest);
            }
        } else {
            uint8_t part[W];
            for (int i = 0; i < s.d; i++) {
                const int g = i / s.group;
                const size_t k = size_t(t) * groups + g;
                vec v = fill(from[g * slot + i % s.group] * r.inverse[k] + r.offset[k]);
                if (clamp) v = least_of(most_of(v, fill(0)), fill(largest));
                to_bytes(part, v);
                c[i] = part[0];
            }
        }
        if (c != to) {
            std::fill(c + s.d, c + (s.d + 7) / 8 * 8, uint8_t(0));
            pack_row(c, to, s.d, s.bits);
        }
    }
    return true;
}

// Fresh memory at once instead of by a fault for every page.
void touch(uint8_t* p, int64_t bytes) {
#if defined(MADV_POPULATE_WRITE)
    const uintptr_t first = (reinterpret_cast<uintptr_t>(p) + 4095) & ~uintptr_t(4095);
    const uintptr_t last = reinterpret_cast<uintptr_t>(p + bytes) & ~uintptr_t(4095);
    if (last > first + (1 << 15)) madvise(reinterpret_cast<void*>(first), last - first, MADV_POPULATE_WRITE);
#endif
}

struct Groups {  // scales and minima of one tile in float32
    std::vector<float> scale, least;
    void set(size_t n, const uint16_t* s, const uint16_t* m, float symmetric) {
        scale.resize(n + W), least.resize(n + W);
        halves_to_floats(s, scale.data(), n);
        if (m) return halves_to_floats(m, least.data(), n);
        for (size_t i = 0; i < n; i++) least[i] = scale[i] * symmetric;
    }
};

}  // namespace

extern "C" {

// codes [L, H, T, row_bytes], scale and minimum (null if symmetric) [L, H, G, D] or [L, H, T, G] in fp16, all
// contiguous. x [L, H, T, D] with strides in bytes, D contiguous. Returns 0, or 1 where x holds NaN, Inf, or what would
// decode to more than `most`.
int qkvshare_quantize(const char* x, int type, int64_t layers, int64_t heads, int64_t tokens, int d,
                      int64_t layer_stride, int64_t head_stride, int64_t token_stride, int bits, int channel,
                      int symmetric, int group, float fit, float norm, float most, uint8_t* codes, int row_bytes,
                      uint16_t* scale, uint16_t* minimum, int threads) {
    const Shape s{layers, heads, tokens, d, row_bytes, bits, group, layer_stride, head_stride, token_stride,
                  channel != 0, symmetric != 0, norm != 0, fit, norm, most, Type(type)};
    const int64_t tile = channel ? group : std::min<int64_t>(tokens, 64);
    const int64_t tiles = (tokens + tile - 1) / tile, tasks = layers * heads * tiles;
    const int row = channel ? s.padded() : s.groups() * power_of_two(std::max(group, W));
    const size_t products = 2 * size_t(power_of_two(std::max<int64_t>(group, W))) * (channel ? W : 1) + W;
    int bad = 0;
    touch(codes, layers * heads * tokens * row_bytes);
#pragma omp parallel num_threads(threads) reduction(| : bad) if (threads > 1)
    {
        Scratch m(size_t(tile) * row, products, s.padded(), channel ? s.padded() : size_t(tile) * s.groups());
#pragma omp for schedule(static)
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t unit = task / tiles, start = task % tiles * tile;
            const char* from = x + unit / heads * layer_stride + unit % heads * head_stride;
            const int count = int(std::min(tile, tokens - start));
            const int64_t after = task + 1 < tasks && tiles == 1 ? task + 1 : unit;
            const char* const next = x + after / heads * layer_stride + after % heads * head_stride;
            bad |= !quantize_tile(s, m, from, next - from, unit, start, count, codes, scale, minimum);
        }
    }
    return bad;
}

// The inverse, into out [L, H, T, D]. Packed tensors have strides of whole layers and heads, in elements, so that the
// first tokens of a page can be read in place. large: out belongs to more memory than caches hold.
void qkvshare_dequantize(const uint8_t* codes, const uint16_t* scale, const uint16_t* minimum, char* out, int type,
                         int64_t layers, int64_t heads, int64_t tokens, int d, int64_t layer_stride,
                         int64_t head_stride, int64_t token_stride, int64_t codes_stride, int64_t scale_stride,
                         int bits, int channel, int group, float norm, int row_bytes, int large, int threads) {
    const Shape s{layers, heads, tokens, d, row_bytes, bits, group, layer_stride, head_stride, token_stride,
                  channel != 0, minimum == nullptr, norm != 0, 0, norm, 0, Type(type)};
    const int64_t tile = channel ? std::min<int64_t>(group, tokens) : std::min<int64_t>(tokens, 64);
    const int64_t tiles = (tokens + tile - 1) / tile, tasks = layers * heads * tiles;
    const int groups = s.groups(), padded = s.padded();
    const float symmetric = float((1 << bits) - 1) / -2;
    const Take take = channel || (group % W == 0 && d % group == 0) ? fast_take(d, bits) : nullptr;
    const bool past = large && take && type == FLOAT32 &&
                      ((reinterpret_cast<uintptr_t>(out) | layer_stride | head_stride | token_stride) & 63) == 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Groups g;
        std::vector<uint8_t> spread(padded + 64);
        std::vector<float> values(padded + W);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t unit = task / tiles, start = task % tiles * tile;
            const int count = int(std::min(tile, tokens - start));
            char* const to = out + unit / heads * layer_stride + unit % heads * head_stride;
            const int64_t at = unit * scale_stride + (channel ? start / tile * d : start * groups);
            g.set(channel ? d : size_t(count) * groups, scale + at, minimum ? minimum + at : nullptr, symmetric);
            for (int t = 0; t < count; t++) {
                const uint8_t* c = codes + unit * codes_stride + (start + t) * row_bytes;
                char* const row = to + (start + t) * token_stride;
                const bool direct = type == FLOAT32 && d % W == 0;
                float* const v = direct ? reinterpret_cast<float*>(row) : values.data();
                if (take) {
                    const size_t k = channel ? 0 : size_t(t) * groups;
                    const int rows = direct ? count : 1;
                    take(c, rows, row_bytes, &g.scale[k], &g.least[k], channel ? 0 : group / W, norm, past, v,
                         token_stride / 4);
                    if (direct) break;
                    write_row(row, s.type, v, d);
                    continue;
                }
                if (bits != 8) {
                    unpack_row(c, spread.data(), d, bits);
                    c = spread.data();
                } else if (d % W) {
                    std::memcpy(spread.data(), c, d);
                    c = spread.data();
                }
                if (channel) {
                    for (int i = 0; i < d; i += W)
                        store(v + i, from_bytes(c + i) * load(&g.scale[i]) + load(&g.least[i]));
                } else if (groups == 1 || group % W == 0) {
                    for (int i = 0; i < d; i += W) {
                        const int k = t * groups + i / group;
                        store(v + i, from_bytes(c + i) * g.scale[k] + g.least[k]);
                    }
                } else {
                    for (int i = 0; i < d; i++) {
                        const int k = t * groups + i / group;
                        v[i] = float(c[i]) * g.scale[k] + g.least[k];
                    }
                }
                if (s.rotate) rotate_row(v, d, norm);
                if (!direct) write_row(row, s.type, v, d);
            }
        }
#if defined(__AVX512F__)
        if (past) _mm_sfence();
#endif
    }
}
}

namespace {

// e**x for x <= 0 (Cephes' polynomial), relative error below 2e-7; 0 below -87.
inline vec exponential(vec x) {
    const vec bounded = most_of(x, fill(-87.0f));
    const vec n = floor_of(bounded * 1.44269504088896341f + 0.5f);
    const vec r = (bounded - n * 0.693359375f) - n * -2.12194440e-4f;
    vec p = fill(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f, p = p * r + 8.3334519073e-3f, p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f, p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
    return (vec)((ivec)(p * (vec)power) & (x > -87.0f));
}

// Softmax over what has been read so far, and the values weighted with it, for the queries of one key head.
struct Reader {
    int queries, dk, dv;
    std::vector<float> query, rotated, scaled, plain, turned, greatest, total, scores, row, weights;
    Reader(int queries, int dk, int dv)
        : queries(queries), dk(dk), dv(dv), query(queries * padded(dk)), rotated(queries * padded(dk)),
          scaled(queries * padded(dk)), plain(queries * padded(dv)), turned(queries * padded(dv)),
          greatest(queries, -INFINITY), total(queries), row(std::max(padded(dk), padded(dv)) + 64) {}
    static int padded(int d) { return (d + W - 1) / W * W; }
    static int slots(int64_t tokens) { return int(tokens + W - 1) / W * W; }

    void begin_page(int64_t tokens) { scores.assign(size_t(queries) * slots(tokens), -INFINITY); }

    void score(int t, int width, const float* row_, const float* q, const float* shift) {
        const int d = padded(dk);
        for (int g = 0; g < queries; g++) {
            vec sum = fill(0);
            for (int i = 0; i < d; i += W) sum += load(row_ + i) * load(q + g * d + i);
            scores[size_t(g) * width + t] = fold_vector(sum) + (shift ? shift[g] : 0);
        }
    }

    void weigh(int64_t tokens) {  // scores become weights; what was summed before is brought to the same greatest score
        const int width = slots(tokens), d = padded(dv);
        for (int g = 0; g < queries; g++) {
            float* const s = &scores[size_t(g) * width];
            vec most = fill(greatest[g]);
            for (int i = 0; i < width; i += W) most = most_of(load(s + i), most);
            const float now = most_in(most), fade = std::exp(greatest[g] - now);
            vec sum = fill(0);
            for (int i = 0; i < width; i += W) {
                const vec p = exponential(load(s + i) - now);
                store(s + i, p), sum += p;
            }
            total[g] = total[g] * fade + fold_vector(sum), greatest[g] = now;
            if (fade == 1) continue;
            for (int i = 0; i < d; i += W) {
                store(&plain[g * d + i], load(&plain[g * d + i]) * fade);
                store(&turned[g * d + i], load(&turned[g * d + i]) * fade);
            }
        }
    }

    void add(const float* values, const float* weight, int stride, float* to) {
        const int d = padded(dv);
        for (int g = 0; g < queries; g++) {
            const float w = weight[size_t(g) * stride];
            for (int i = 0; i < d; i += W) store(to + g * d + i, load(to + g * d + i) + load(values + i) * w);
        }
    }
};

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
};

constexpr int SIDE_FIELDS = 8, FIELDS = 2 * SIDE_FIELDS + 1;

void take_any(const uint8_t* c, Take take, int d, int bits, const float* scale, const float* least, float* out,
              uint8_t* spread) {
    if (take) return take(c, 1, 0, scale, least, 0, 0, false, out, 0);
    if (bits == 8)
        std::memcpy(spread, c, d);
    else
        unpack_row(c, spread, d, bits);
    for (int i = 0; i < d; i += W) store(out + i, from_bytes(spread + i));
    for (int i = d; i < Reader::padded(d); i++) out[i] = 0;
}

// Keys are read as codes: q.k = (q * scale).code + q.minimum, and a rotated query takes the place of rotated keys.
void read_page(Reader& r, const int64_t* fields, int64_t head, const float* ones, const float* zeros) {
    const Side k(fields), v(fields + SIDE_FIELDS);
    const int64_t tokens = fields[2 * SIDE_FIELDS];
    const int dk = Reader::padded(r.dk), dv = Reader::padded(r.dv), width = Reader::slots(tokens);
    const int row_k = k.bits == 3 ? (r.dk + 7) / 8 * 3 : (r.dk * k.bits + 7) / 8;
    const int row_v = v.bits == 3 ? (r.dv + 7) / 8 * 3 : (r.dv * v.bits + 7) / 8;
    const Take take_k = fast_take(r.dk, k.bits), take_v = fast_take(r.dv, v.bits);
    std::vector<uint8_t> spread(std::max(dk, dv) + 64);
    std::vector<float> shift(r.queries);
    r.begin_page(tokens);
    for (int64_t start = 0; start < tokens; start += k.group) {
        const int64_t at = head * k.scale_stride + start / k.group * r.dk;
        std::fill(r.scaled.begin(), r.scaled.end(), 0.0f), std::fill(shift.begin(), shift.end(), 0.0f);
        const float middle = float((1 << k.bits) - 1) / -2;
        for (int g = 0; g < r.queries; g++) {
            const float* const q = (k.rotated ? r.rotated.data() : r.query.data()) + g * dk;
            for (int i = 0; i < r.dk; i++) {
                const float scale = half_to_float(k.scale[at + i]);
                r.scaled[g * dk + i] = q[i] * scale;
                shift[g] += q[i] * (k.minimum ? half_to_float(k.minimum[at + i]) : scale * middle);
            }
        }
        for (int64_t t = start; t < std::min(tokens, start + k.group); t++) {
            const uint8_t* const c = k.codes + head * k.codes_stride + t * row_k;
            take_any(c, take_k, r.dk, k.bits, ones, zeros, r.row.data(), spread.data());
            r.score(int(t), width, r.row.data(), r.scaled.data(), shift.data());
        }
    }
    r.weigh(tokens);
    float* const sum = v.rotated ? r.turned.data() : r.plain.data();
    const int groups = (r.dv + v.group - 1) / v.group;
    const float middle = float((1 << v.bits) - 1) / -2;
    std::vector<float> scale(dv), least(dv);
    for (int64_t t = 0; t < tokens; t++) {
        const uint8_t* const c = v.codes + head * v.codes_stride + t * row_v;
        const int64_t at = head * v.scale_stride + t * groups;
        take_any(c, take_v, r.dv, v.bits, ones, zeros, r.row.data(), spread.data());
        if (groups == 1) {
            const float s = half_to_float(v.scale[at]), l = v.minimum ? half_to_float(v.minimum[at]) : s * middle;
            for (int i = 0; i < dv; i += W) store(&r.row[i], load(&r.row[i]) * s + l);
        } else {
            for (int i = 0; i < r.dv; i++) {
                const int64_t j = at + i / v.group;
                const float s = half_to_float(v.scale[j]), l = v.minimum ? half_to_float(v.minimum[j]) : s * middle;
                r.row[i] = r.row[i] * s + l;
            }
        }
        r.add(r.row.data(), &r.scores[t], width, sum);
    }
}

void read_native(Reader& r, const char* keys, const char* values, Type type, int64_t tokens, int64_t key_stride,
                 int64_t value_stride) {
    const int width = Reader::slots(tokens);
    r.begin_page(tokens);
    std::fill(r.row.begin(), r.row.end(), 0.0f);
    for (int64_t t = 0; t < tokens; t++) {
        read_row(keys + t * key_stride, type, r.row.data(), r.dk);
        r.score(int(t), width, r.row.data(), r.query.data(), nullptr);
    }
    r.weigh(tokens);
    std::fill(r.row.begin(), r.row.end(), 0.0f);
    for (int64_t t = 0; t < tokens; t++) {
        read_row(values + t * value_stride, type, r.row.data(), r.dv);
        r.add(r.row.data(), &r.scores[t], width, r.plain.data());
    }
}

}  // namespace

extern "C" {

// One query per query head [HQ, DK] (already multiplied with the scaling) over packed pages, given by FIELDS numbers
// each, and runs of native tokens, given by 7 numbers each (keys, values, tokens, and strides of heads and tokens in
// bytes: keys', values'). out [HQ, DV]. splits: parts of the pages that may be read at the same time.
void qkvshare_attention(const float* query, float* out, int64_t heads, int queries, int dk, int dv,
                        const int64_t* pages, int64_t page_count, const int64_t* natives, int64_t native_count,
                        int type, float norm_k, float norm_v, int64_t splits, int threads) {
    const int pk = Reader::padded(dk), pv = Reader::padded(dv);
    const std::vector<float> ones(std::max(pk, pv), 1.0f), zeros(std::max(pk, pv), 0.0f);
    const int64_t tasks = heads * splits;
    std::vector<Reader> readers(tasks, Reader(queries, dk, dv));
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic)
    for (int64_t task = 0; task < tasks; task++) {
        Reader& r = readers[task];
        const int64_t head = task / splits, split = task % splits;
        for (int g = 0; g < queries; g++) {
            std::memcpy(&r.query[g * pk], query + (head * queries + g) * dk, size_t(dk) * 4);
            std::memcpy(&r.rotated[g * pk], query + (head * queries + g) * dk, size_t(dk) * 4);
            rotate_row(&r.rotated[g * pk], dk, norm_k);
        }
        const int64_t all = page_count + native_count;
        for (int64_t i = all * split / splits; i < all * (split + 1) / splits; i++) {
            if (i < page_count) {
                read_page(r, pages + i * FIELDS, head, ones.data(), zeros.data());
                continue;
            }
            const int64_t* const n = natives + (i - page_count) * 7;
            read_native(r, reinterpret_cast<const char*>(n[0]) + head * n[3],
                        reinterpret_cast<const char*>(n[1]) + head * n[4], Type(type), n[2], n[5], n[6]);
        }
    }
    for (int64_t head = 0; head < heads; head++)
        for (int g = 0; g < queries; g++) {
            float greatest = -INFINITY, total = 0;
            for (int64_t s = 0; s < splits; s++) greatest = std::max(greatest, readers[head * splits + s].greatest[g]);
            std::vector<float> plain(pv), turned(pv);
            for (int64_t s = 0; s < splits; s++) {
                const Reader& r = readers[head * splits + s];
                const float weight = std::exp(r.greatest[g] - greatest);  // 0 for a split that had nothing to read
                total += r.total[g] * weight;
                for (int i = 0; i < dv; i++) {
                    plain[i] += r.plain[g * pv + i] * weight;
                    turned[i] += r.turned[g * pv + i] * weight;
                }
            }
            rotate_row(turned.data(), dv, norm_v);
            float* const to = out + (head * queries + g) * dv;
            for (int i = 0; i < dv; i++) to[i] = (plain[i] + turned[i]) / total;
        }
}
}
