// Products of bfloat16 numbers as they are, two at a time. A lane holds two numbers that stand beside each other, and
// one instruction of AVX-512 BF16 multiplies them with two others and adds both products to a sum of float32. Scores
// take two channels at a time, weighted values two keys.
#pragma once

#include "lanes.h"
#include "memory.h"
#include "tokens.h"

namespace dgt {

// DGT_BFLOAT16_PAIRS is the same without the instruction, for the check on any processor: it is no faster than float32.
#if defined(DGT_AVX512_BF16) || defined(DGT_BFLOAT16_PAIRS) || defined(DGT_TILES)
constexpr bool HAS_BFLOAT16_PRODUCTS = true;
#else
constexpr bool HAS_BFLOAT16_PRODUCTS = false;
#endif

// Two bfloat16 numbers in 32 bits.
struct Bf16x2 {
    uint16_t first;
    uint16_t second;
};

typedef uint32_t UnalignedWords __attribute__((vector_size(W * 4), aligned(2), may_alias));

DGT_INLINE Words load(const Bf16x2* from) { return *(const UnalignedWords*)from; }
DGT_INLINE void store(Bf16x2* to, Words x) { *(UnalignedWords*)to = x; }
DGT_INLINE void store(uint16_t* to, Floats x) { *(UnalignedHalves*)to = bfloat16_of_floats(x); }
DGT_INLINE Words all(Bf16x2 x) {
    uint32_t word;
    memcpy(&word, &x, sizeof word);
    return Words{} + word;
}

DGT_INLINE Floats add_product(Floats sum, Floats x, Floats y) { return sum + x * y; }
DGT_INLINE Floats add_product(Floats sum, Words x, Words y) {
#if defined(DGT_AVX512_BF16)
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y);
#else
    sum += (Floats)(x & 0xFFFF0000u) * (Floats)(y & 0xFFFF0000u);
    return sum + (Floats)(x << 16) * (Floats)(y << 16);
#endif
}

// Whether queries, keys, values and weights of a call are multiplied as bfloat16; residual keys are float32.
constexpr bool multiplies_bfloat16(const dgt_problem& problem) {
    return HAS_BFLOAT16_PRODUCTS && problem.type == DGT_BFLOAT16 && problem.channels % 2 == 0;
}

// Panels as those of `pack`, of pairs of channels: (count / W, D / 2, W). `rows_buffer` holds W rows.
inline void pack(const Rows& rows, const int32_t* ids, int64_t first, int64_t count, int64_t channels,
                 float* rows_buffer, Bf16x2* panels) {
    int64_t pairs = channels / 2;
    bool aligned = ((intptr_t)rows.data | (intptr_t)rows.stride) % 4 == 0;
    for (int64_t start = 0; start < count; start += W, panels += pairs * W) {
        const float* row[W];  // of 32 bits, whatever they are
        for (int i = 0; i < W; ++i) {
            int64_t place = min<int64_t>(start + i, count - 1);
            const char* token = rows.at(ids ? ids[place] : first + place);
            row[i] = (const float*)token;
            if (aligned) continue;
            row[i] = rows_buffer + i * pairs;
            memcpy(rows_buffer + i * pairs, token, (size_t)pairs * 4);
        }
        for (int64_t d = 0; d < pairs; d += W) transpose(row, d, pairs - d, (float*)panels + d * W);
    }
}

// A lane each of two vectors, rounded.
DGT_INLINE Words pairs_of(Floats first, Floats second) {
    return words_of(bfloat16_of_floats(first)) | words_of(bfloat16_of_floats(second)) << 16;
}

// The channels of a token as they are.
DGT_INLINE void copy_pairs(const Rows& rows, int64_t token, int64_t pairs, Bf16x2* to) {
    memcpy(to, rows.at(token), (size_t)pairs * sizeof(Bf16x2));
}

// Two rows of bfloat16 beside each other; the places up to a multiple of W become zero. No other row is zero.
DGT_INLINE void join_rows(const uint16_t* one, const uint16_t* other, int64_t channels, Bf16x2* to) {
    for (int64_t start = 0; start < channels; start += W) {
        Words low = words_of(load_halves(one + start, channels - start));
        Words high{};
        if (other) high = words_of(load_halves(other + start, channels - start)) << 16;
        store(to + start, low | high);
    }
}

// Channels of two tokens beside each other; a second token below 0 is zero.
DGT_INLINE void copy_rows(const Rows& rows, int64_t first, int64_t second, int64_t channels, Bf16x2* to) {
    const uint16_t* other = second < 0 ? nullptr : (const uint16_t*)rows.at(second);
    join_rows((const uint16_t*)rows.at(first), other, channels, to);
}

}  // namespace dgt
