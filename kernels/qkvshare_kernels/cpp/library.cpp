// The kernels of CPUs. The specification is reference.py: codes, scales and minima are equal to its own bit for bit, so
// every product and sum is rounded (compile with -ffp-contract=off, never with -ffast-math) and sums are folded in its
// order. Threads come from the OpenMP runtime that torch has loaded.

#include "attention.h"
#include "dequantize.h"
#include "quantize.h"
#include "turn.h"

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
    int bad = 0;
#pragma omp parallel num_threads(threads) reduction(| : bad) if (threads > 1)
    {
        Scratch m(s, tile);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t unit = task / tiles, start = task % tiles * tile;
            const char* const from = s.head(x, unit) + start * token_stride;
            const bool last = tiles > 1 || task + 1 == tasks;
            const int64_t next = last ? 0 : s.head(x, unit + 1) - from;
            const int count = int(std::min(tile, tokens - start));
            bad |= !quantize_tile(s, m, from, next, unit, start, count, codes, scale, minimum);
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
    const int groups = s.groups();
    const float symmetric = float((1 << bits) - 1) / -2;
    const Take take = s.whole() ? fast_take(d, bits, s.type) : nullptr;
    const bool past = large && ((reinterpret_cast<uintptr_t>(out) | layer_stride | head_stride | token_stride) & 63) == 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Opened m(s, tile);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t unit = task / tiles, start = task % tiles * tile;
            const int count = int(std::min(tile, tokens - start));
            char* const to = out + unit / heads * layer_stride + unit % heads * head_stride + start * token_stride;
            const int64_t at = unit * scale_stride + (channel ? start / tile * d : start * groups);
            m.set(channel ? d : size_t(count) * groups, scale + at, minimum ? minimum + at : nullptr, symmetric);
            const uint8_t* const from = codes + unit * codes_stride + start * row_bytes;
            if (take)
                take(from, count, row_bytes, m.scale.data(), m.least.data(), channel ? 0 : group / W, norm, past, to,
                     token_stride);
            else
                take_slowly(s, m, from, count, to);
        }
#if defined(__AVX512F__)
        if (past) _mm_sfence();
#endif
    }
}

// One query per query head [HQ, DK] (already multiplied with the scaling) over packed pages, given by FIELDS numbers
// each, and runs of native tokens, given by 7 numbers each (keys, values, tokens, and strides of heads and tokens in
// bytes: keys', values'). out [HQ, DV]. splits: parts of the pages that may be read at the same time.
void qkvshare_attention(const float* query, float* out, int64_t heads, int queries, int dk, int dv,
                        const int64_t* pages, int64_t page_count, const int64_t* natives, int64_t native_count,
                        int type, float norm_k, float norm_v, int64_t splits, int threads) {
    const int64_t all = page_count + native_count;
    std::vector<std::unique_ptr<Reader>> readers(heads * splits);
    // The same thread for the same pages in every call: it may still have them in its caches
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t task = 0; task < heads * splits; task++) {
        readers[task].reset(new Reader(queries, dk, dv));
        Reader& r = *readers[task];
        const int64_t head = task / splits, split = task % splits;
        r.begin(query + head * queries * dk, norm_k);
        for (int64_t i = all * split / splits; i < all * (split + 1) / splits; i++) {
            if (i < page_count) {
                r.read_page(pages + i * FIELDS, head);
                continue;
            }
            const int64_t* const n = natives + (i - page_count) * 7;
            r.read_native(reinterpret_cast<const char*>(n[0]) + head * n[3],
                          reinterpret_cast<const char*>(n[1]) + head * n[4], Type(type), n[2], n[5], n[6]);
        }
    }
    for (int64_t head = 0; head < heads; head++)
        join(&readers[head * splits], splits, norm_v, out + head * queries * dv);
}

// Turns x [L, H, T, D] in place by angles of which cos and sin are [T, half]; strides in bytes.
void qkvshare_turn(char* x, int type, int64_t layers, int64_t heads, int64_t tokens, int64_t layer_stride,
                   int64_t head_stride, int64_t token_stride, int first, int half, int interleaved, const float* cos,
                   const float* sin, int threads) {
    const Turn t{first, half, interleaved != 0};
    auto* const turn = type == FLOAT32 ? turn_rows<FLOAT32> : type == FLOAT16 ? turn_rows<FLOAT16> : turn_rows<BFLOAT16>;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t unit = 0; unit < layers * heads; unit++)
        turn(x + unit / heads * layer_stride + unit % heads * head_stride, token_stride, tokens, t, cos, sin);
}
}
