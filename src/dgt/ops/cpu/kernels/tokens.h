// Rows of tokens in memory, of float32, bfloat16 or float16; the kernels compute in float32.
#pragma once

#include "interface.h"
#include "lanes.h"
#include "memory.h"

namespace dgt {

// The (N, D) tokens of one head of one image.
struct Rows {
    char* data;
    int64_t stride;  // bytes from a token to the next
    dgt_type type;

    char* at(int64_t token) const { return data + token * stride; }
    Rows from(int64_t token) const { return {at(token), stride, type}; }
};

inline int64_t bytes_of(dgt_type type) { return type == DGT_FLOAT32 ? 4 : 2; }

inline Rows rows_of(const dgt_tokens& tokens, dgt_type type, int64_t image, int64_t head) {
    int64_t size = bytes_of(type);
    char* first = (char*)tokens.data + (image * tokens.image_stride + head * tokens.head_stride) * size;
    return {first, tokens.token_stride * size, type};
}

typedef uint16_t Halves __attribute__((vector_size(W * 2)));
typedef uint16_t UnalignedHalves __attribute__((vector_size(W * 2), aligned(2), may_alias));

#if defined(DGT_AVX512)
DGT_INLINE Words words_of(Halves x) { return (Words)_mm512_cvtepu16_epi32((__m256i)x); }  // GCC would cut it in two
#else
DGT_INLINE Words words_of(Halves x) { return __builtin_convertvector(x, Words); }
#endif

DGT_INLINE Floats floats_of_bfloat16(Halves x) { return (Floats)(words_of(x) << 16); }

// Rounds to the nearest, ties to even; NaN stays NaN.
DGT_INLINE Halves bfloat16_of_floats(Floats x) {
#if defined(DGT_AVX512_BF16)  // what is less than 2^-126 becomes 0
    return (Halves)_mm512_cvtneps_pbh(x);
#else
    Words bits = (Words)x;
    Words rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
    Words is_number = (Words)(x == x);
    Words kept = (rounded & is_number) | (((bits >> 16) | 0x40u) & ~is_number);
    return __builtin_convertvector(kept, Halves);
#endif
}

#if defined(DGT_AVX512)
DGT_INLINE Floats floats_of_float16(Halves x) { return (Floats)_mm512_cvtph_ps((__m256i)x); }
DGT_INLINE Halves float16_of_floats(Floats x) { return (Halves)_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
#elif defined(DGT_AVX2) && defined(__F16C__)
DGT_INLINE Floats floats_of_float16(Halves x) { return (Floats)_mm256_cvtph_ps((__m128i)x); }
DGT_INLINE Halves float16_of_floats(Floats x) { return (Halves)_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
#else
// By integers: exponent and fraction move to their places, and a product puts the bias of the exponent right.
DGT_INLINE Floats floats_of_float16(Halves x) {
    Words bits = __builtin_convertvector(x, Words);
    Words sign = (bits & 0x8000u) << 16;
    Words magnitude = (bits & 0x7FFFu) << 13;
    Floats scaled = (Floats)magnitude * 5.192296858534828e33f;  // 2^112
    Words special = (Words)(magnitude >= 0x0F800000u);          // infinity and NaN
    Words found = ((Words)scaled & ~special) | ((magnitude | 0x7F800000u) & special);
    return (Floats)(found | sign);
}

DGT_INLINE Halves float16_of_floats(Floats x) {
    Words bits = (Words)x;
    Words sign = bits >> 16 & 0x8000u;
    Words magnitude = bits & 0x7FFFFFFFu;
    Words is_nan_value = (Words)(magnitude > 0x7F800000u);
    Words overflows = (Words)(magnitude >= 0x477FF000u);  // 65520 and more round to infinity
    Words is_small = (Words)(magnitude < 0x38800000u);    // below 2^-14: subnormal
    Words normal = (magnitude - 0x38000000u + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;
    Words subnormal = (Words)((Floats)magnitude + 0.5f) - 0x3F000000u;  // adding 0.5 rounds at the last place
    Words found = (subnormal & is_small) | (normal & ~is_small);
    found = (found & ~overflows) | (0x7C00u & overflows);
    found = (found & ~is_nan_value) | (0x7E00u & is_nan_value);
    return __builtin_convertvector(found | sign, Halves);
}
#endif

DGT_INLINE Floats convert(dgt_type type, Halves x) {
    return type == DGT_BFLOAT16 ? floats_of_bfloat16(x) : floats_of_float16(x);
}

DGT_INLINE Halves convert(dgt_type type, Floats x) {
    return type == DGT_BFLOAT16 ? bfloat16_of_floats(x) : float16_of_floats(x);
}

// The first W of so many numbers of 16 bits, or as many as there are; the other lanes are zero.
DGT_INLINE Halves load_halves(const uint16_t* from, int64_t count) {
    if (count >= W) return *(const UnalignedHalves*)from;
    Halves x{};
    for (int64_t i = 0; i < count; ++i) x[i] = from[i];
    return x;
}

// Channels start.. of a token, W of them or as many as there are; the other lanes are zero.
DGT_INLINE Floats load_channels(const Rows& rows, int64_t token, int64_t start, int64_t channels) {
    const char* row = rows.at(token);
    int64_t count = channels - start;
    if (rows.type == DGT_FLOAT32) {
        const float* from = (const float*)row + start;
        return count >= W ? load(from) : load_lanes(from, first_lanes(count));
    }
    return convert(rows.type, load_halves((const uint16_t*)row + start, count));
}

DGT_INLINE void store_channels(const Rows& rows, int64_t token, int64_t start, int64_t channels, Floats x) {
    char* row = rows.at(token);
    int64_t count = channels - start;
    if (rows.type == DGT_FLOAT32) {
        float* to = (float*)row + start;
        if (count >= W) store(to, x);
        else store_lanes(to, x, first_lanes(count));
        return;
    }
    uint16_t* to = (uint16_t*)row + start;
    Halves halves = convert(rows.type, x);
    if (count >= W) *(UnalignedHalves*)to = halves;
    else
        for (int64_t i = 0; i < count; ++i) to[i] = halves[i];
}

// A token as float32, times a factor; the places up to a multiple of W become zero.
DGT_INLINE void copy_row(const Rows& rows, int64_t token, int64_t channels, float factor, float* to) {
    int64_t start = 0;
    if (rows.type == DGT_FLOAT32) {  // whole vectors without a look at the type
        const float* from = (const float*)rows.at(token);
        for (; start + W <= channels; start += W) store(to + start, load(from + start) * factor);
    }
    for (; start < channels; start += W) store(to + start, load_channels(rows, token, start, channels) * factor);
}

// A token of 16 bits as it is; the places up to a multiple of W become zero.
DGT_INLINE void copy_halves(const Rows& rows, int64_t token, int64_t channels, uint16_t* to) {
    const uint16_t* from = (const uint16_t*)rows.at(token);
    for (int64_t start = 0; start < channels; start += W)
        *(UnalignedHalves*)(to + start) = load_halves(from + start, channels - start);
}

// The reverse: a row of float32, times a factor, into a token.
DGT_INLINE void write_back_row(const Rows& rows, int64_t token, int64_t channels, float factor, const float* from) {
    int64_t start = 0;
    if (rows.type == DGT_FLOAT32) {
        float* to = (float*)rows.at(token);
        for (; start + W <= channels; start += W) store(to + start, load(from + start) * factor);
    }
    for (; start < channels; start += W) store_channels(rows, token, start, channels, load(from + start) * factor);
}

DGT_INLINE void write_zeros(const Rows& rows, int64_t token, int64_t channels) {
    memset(rows.at(token), 0, (size_t)(channels * bytes_of(rows.type)));
}

// Bring a token near: into the first cache, or (`far`) the second.
DGT_INLINE void prefetch(const Rows& rows, int64_t token, int64_t channels, bool far) {
    const char* row = rows.at(token);
    int64_t bytes = channels * bytes_of(rows.type);
    for (int64_t i = 0; i < bytes; i += 64) {
        if (far) __builtin_prefetch(row + i, 0, 2);
        else __builtin_prefetch(row + i, 0, 3);
    }
}

// Bring tokens into the second cache.
inline void prefetch_rows(const Rows& rows, int64_t begin, int64_t end, int64_t channels) {
    for (int64_t i = begin; i < end; ++i) prefetch(rows, i, channels, true);
}

// Bring a token near that will be written.
DGT_INLINE void prefetch_to_write(const Rows& rows, int64_t token, int64_t channels) {
    char* row = rows.at(token);
    int64_t bytes = channels * bytes_of(rows.type);
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 1, 3);
}

// Panels: W tokens beside each other, transposed, so that a vector holds one channel of W tokens: (count / W, D, W).
// Tokens ids[0..count), or first..first + count without ids; the last one fills the places left over.
// `rows_buffer` holds W rows of float32 where they must be converted.
inline void pack(const Rows& rows, const int32_t* ids, int64_t first, int64_t count, int64_t channels,
                 float* rows_buffer, float* panels) {
    int64_t padded = round_up(channels, W);
    for (int64_t start = 0; start < count; start += W, panels += channels * W) {
        const float* row[W];
        for (int i = 0; i < W; ++i) {
            int64_t place = min<int64_t>(start + i, count - 1);
            int64_t token = ids ? ids[place] : first + place;
            if (rows.type == DGT_FLOAT32) {
                row[i] = (const float*)rows.at(token);
            } else {
                copy_row(rows, token, channels, 1.0f, rows_buffer + i * padded);
                row[i] = rows_buffer + i * padded;
            }
        }
        for (int64_t d = 0; d < channels; d += W) transpose(row, d, channels - d, panels + d * W);
    }
}

// The same of rows of float32 that stand anywhere.
inline void pack_rows(const float* const* rows, int64_t count, int64_t channels, float* panels) {
    for (int64_t start = 0; start < count; start += W, panels += channels * W) {
        const float* row[W];
        for (int i = 0; i < W; ++i) row[i] = rows[min<int64_t>(start + i, count - 1)];
        for (int64_t d = 0; d < channels; d += W) transpose(row, d, channels - d, panels + d * W);
    }
}

inline int64_t panels_size(int64_t count, int64_t channels) { return round_up(count, W) * channels; }

// Which of the W bytes from `start` on are not zero, of the first `count`; all of these where there is no mask.
DGT_INLINE Bits bits_of_mask(const uint8_t* mask, int64_t start, int64_t count) {
    Bits lanes = first_lanes(count);
    if (!mask) return lanes;
#if defined(DGT_AVX512)
    if (count >= W)
        return (Bits)_mm_movemask_epi8(_mm_cmpgt_epi8(_mm_loadu_si128((const __m128i*)(mask + start)), __m128i{}));
#endif
    Bits bits = 0;
    int64_t there = min<int64_t>(count, W);
    for (int64_t i = 0; i < there; ++i) bits |= (Bits)(mask[start + i] != 0) << i;
    return bits & lanes;
}

}  // namespace dgt
