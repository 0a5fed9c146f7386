// Vectors of floats, W lanes wide: 16 with AVX-512, 8 with AVX2, else 4.
//
// Arithmetic is that of GCC's and Clang's vector extensions. What these cannot say (bits of a comparison, compression,
// reading a part of a vector) has a form for AVX-512, one for AVX2 where it matters, and a portable one.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define DGT_INLINE static inline __attribute__((always_inline))

namespace dgt {

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define DGT_AVX512 1
#if defined(__AVX512BF16__)
#define DGT_AVX512_BF16 1
#endif
constexpr int W = 16;
constexpr int REGISTERS = 32;
#elif defined(__AVX2__)
#define DGT_AVX2 1
constexpr int W = 8;
constexpr int REGISTERS = 16;
#else
constexpr int W = 4;
constexpr int REGISTERS = 32;
#endif

typedef float Floats __attribute__((vector_size(W * 4)));
typedef int32_t Ints __attribute__((vector_size(W * 4)));
typedef uint32_t Words __attribute__((vector_size(W * 4)));
typedef float UnalignedFloats __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int32_t UnalignedInts __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint32_t Bits;  // a bit a lane

constexpr float INFINITE = __builtin_inff();
constexpr Bits ALL_LANES = (Bits)((1ull << W) - 1);

DGT_INLINE Floats load(const float* from) { return *(const UnalignedFloats*)from; }
DGT_INLINE Ints load(const int32_t* from) { return *(const UnalignedInts*)from; }
DGT_INLINE void store(float* to, Floats x) { *(UnalignedFloats*)to = x; }
DGT_INLINE void store(int32_t* to, Ints x) { *(UnalignedInts*)to = x; }
DGT_INLINE Floats all(float x) { return x - Floats{}; }
DGT_INLINE Ints lane_numbers() {
    Ints x;
    for (int i = 0; i < W; ++i) x[i] = i;
    return x;
}
DGT_INLINE Bits first_lanes(int64_t count) { return count >= W ? ALL_LANES : ((Bits)1 << count) - 1; }
DGT_INLINE int count_bits(Bits bits) { return __builtin_popcount(bits); }

#if defined(DGT_AVX512)

DGT_INLINE Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }  // b where one is NaN
DGT_INLINE Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
DGT_INLINE Bits is_not_at_most(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ); }  // a > b, or NaN
DGT_INLINE Bits is_at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
DGT_INLINE Bits is_equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
DGT_INLINE Bits is_nan(Floats a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
DGT_INLINE Bits bits_of(Ints truth) { return (Bits)_mm512_movepi32_mask((__m512i)truth); }
DGT_INLINE Floats choose(Bits bits, Floats a, Floats b) { return _mm512_mask_mov_ps(b, bits, a); }
DGT_INLINE Ints choose(Bits bits, Ints a, Ints b) { return (Ints)_mm512_mask_mov_epi32((__m512i)b, bits, (__m512i)a); }
// Compression by a register and a whole store: the form that stores a part is slow on Zen 4.
DGT_INLINE void compress(float* to, Floats x, Bits bits) { _mm512_storeu_ps(to, _mm512_maskz_compress_ps(bits, x)); }
DGT_INLINE void compress(int32_t* to, Ints x, Bits bits) {
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(bits, (__m512i)x));
}
DGT_INLINE Floats zero_below(Floats x, float bound, Floats y) {  // y, but 0 where x < bound
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, all(bound), _CMP_NLT_UQ), y);
}
DGT_INLINE Floats load_lanes(const float* from, Bits bits) { return _mm512_maskz_loadu_ps(bits, from); }
DGT_INLINE void store_lanes(float* to, Floats x, Bits bits) { _mm512_mask_storeu_ps(to, bits, x); }
DGT_INLINE Bits lowest_bits(Bits bits, int count) { return _pdep_u32(count >= 32 ? ~0u : (1u << count) - 1, bits); }
DGT_INLINE Floats spread_largest(Floats x) {  // the largest lane, in every lane
    x = larger(x, _mm512_shuffle_f32x4(x, x, 0x4e));
    x = larger(x, _mm512_shuffle_f32x4(x, x, 0xb1));
    x = larger(x, _mm512_permute_ps(x, 0x4e));
    return larger(x, _mm512_permute_ps(x, 0xb1));
}
// 1 / x with a relative error of 1e-7, for numbers of middling size: an estimate of 14 bits, and one step of Newton's.
DGT_INLINE Floats reciprocal(Floats x) {
    Floats estimate = _mm512_rcp14_ps(x);
    return estimate * (2.0f - x * estimate);
}
DGT_INLINE float largest_lane(Floats x) { return _mm512_reduce_max_ps(x); }
DGT_INLINE float smallest_lane(Floats x) { return _mm512_reduce_min_ps(x); }
DGT_INLINE float sum_of_lanes(Floats x) { return _mm512_reduce_add_ps(x); }

#else

#if defined(DGT_AVX2)
DGT_INLINE Bits bits_of(Ints truth) { return (Bits)_mm256_movemask_ps((__m256)truth); }
DGT_INLINE Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
DGT_INLINE Floats smaller(Floats a, Floats b) { return _mm256_min_ps(a, b); }
#else
DGT_INLINE Bits bits_of(Ints truth) {
    Bits bits = 0;
    for (int i = 0; i < W; ++i) bits |= (Bits)(truth[i] & 1) << i;
    return bits;
}
DGT_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }
DGT_INLINE Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
#endif

DGT_INLINE Ints truth_of(Bits bits) {
    Ints one = (Ints{} + 1) << lane_numbers();
    return ((Ints{} + (int32_t)bits) & one) == one;
}
DGT_INLINE Bits is_not_at_most(Floats a, Floats b) { return bits_of(~(Ints)(a <= b)); }
DGT_INLINE Bits is_at_least(Floats a, Floats b) { return bits_of((Ints)(a >= b)); }
DGT_INLINE Bits is_equal(Floats a, Floats b) { return bits_of((Ints)(a == b)); }
DGT_INLINE Bits is_nan(Floats a) { return bits_of((Ints)(a != a)); }
DGT_INLINE Floats choose(Bits bits, Floats a, Floats b) { return truth_of(bits) ? a : b; }
DGT_INLINE Floats zero_below(Floats x, float bound, Floats y) { return (Floats)(~(Ints)(x < bound) & (Ints)y); }
DGT_INLINE Ints choose(Bits bits, Ints a, Ints b) { return truth_of(bits) ? a : b; }

template <class T, class Vector>
DGT_INLINE void compress(T* to, Vector x, Bits bits) {
#if defined(DGT_AVX2)  // the places of the set bits, as bytes
    uint64_t wide = _pdep_u64(bits, 0x0101010101010101ull) * 0xFF;
    uint64_t places = _pext_u64(0x0706050403020100ull, wide);
    __m256i order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)places));
    _mm256_storeu_si256((__m256i*)to, _mm256_permutevar8x32_epi32((__m256i)x, order));
#else
    for (; bits; bits &= bits - 1) *to++ = x[__builtin_ctz(bits)];
#endif
}

DGT_INLINE Floats load_lanes(const float* from, Bits bits) {
    Floats x{};
    for (int i = 0; i < W; ++i)
        if (bits >> i & 1) x[i] = from[i];
    return x;
}
DGT_INLINE void store_lanes(float* to, Floats x, Bits bits) {
    for (int i = 0; i < W; ++i)
        if (bits >> i & 1) to[i] = x[i];
}
DGT_INLINE Bits lowest_bits(Bits bits, int count) {
    Bits kept = 0;
    for (; bits && count > 0; bits &= bits - 1, --count) kept |= bits & -bits;
    return kept;
}
DGT_INLINE Floats reciprocal(Floats x) { return 1.0f / x; }
DGT_INLINE float largest_lane(Floats x) {
    float most = x[0];
    for (int i = 1; i < W; ++i) most = x[i] > most ? x[i] : most;
    return most;
}
DGT_INLINE Floats spread_largest(Floats x) { return all(largest_lane(x)); }
DGT_INLINE float smallest_lane(Floats x) {
    float least = x[0];
    for (int i = 1; i < W; ++i) least = x[i] < least ? x[i] : least;
    return least;
}
DGT_INLINE float sum_of_lanes(Floats x) {
    float sum = 0;
    for (int i = 0; i < W; ++i) sum += x[i];
    return sum;
}

#endif

// 2^x for x <= 0, relative error 1e-7; 0 in place of what is less than 2^-126. NaN stays NaN. Lanes that nobody reads
// may hold any other x.
DGT_INLINE Floats power_of_two(Floats x) {
    Floats exponent = x;
    x = larger(all(-126.0f), x);
    Floats shifted = x + 12582912.0f;  // 1.5 * 2^23: rounds, and the integer stands in the low bits
    Floats rest = x - (shifted - 12582912.0f);
    Floats power = all(0.0013276466634f);
    power = power * rest + 0.0096755409613f;
    power = power * rest + 0.0555071346462f;
    power = power * rest + 0.2402212023735f;
    power = power * rest + 0.6931469440460f;
    power = power * rest + 1.0000001192093f;
    power = (Floats)((Words)power + ((Words)shifted << 23));
    return zero_below(exponent, -126.0f, power);
}

// ---- transposition of W x W floats -------------------------------------------------------------------------------

// Columns start..start+count (at most W) of W rows go to out[column][W].
DGT_INLINE void transpose(const float* const* rows, int64_t start, int64_t count, float* out) {
    Floats a[W];
    if (count >= W) {
        for (int i = 0; i < W; ++i) a[i] = load(rows[i] + start);
    } else {
        for (int i = 0; i < W; ++i) a[i] = load_lanes(rows[i] + start, first_lanes(count));
    }
    Floats t[W];
#if defined(DGT_AVX512)
    Floats b[W];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        a[i] = (__m512)_mm512_unpacklo_pd((__m512d)b[i], (__m512d)b[i + 2]);
        a[i + 1] = (__m512)_mm512_unpackhi_pd((__m512d)b[i], (__m512d)b[i + 2]);
        a[i + 2] = (__m512)_mm512_unpacklo_pd((__m512d)b[i + 1], (__m512d)b[i + 3]);
        a[i + 3] = (__m512)_mm512_unpackhi_pd((__m512d)b[i + 1], (__m512d)b[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        b[i] = _mm512_shuffle_f32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_f32x4(b[i], b[i + 8], 0x88);
        t[i + 8] = _mm512_shuffle_f32x4(b[i], b[i + 8], 0xdd);
        t[i + 4] = _mm512_shuffle_f32x4(b[i + 4], b[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(b[i + 4], b[i + 12], 0xdd);
    }
#elif defined(DGT_AVX2)
    Floats b[W];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
        a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
        a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
        a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm256_permute2f128_ps(a[i], a[i + 4], 0x20);
        t[i + 4] = _mm256_permute2f128_ps(a[i], a[i + 4], 0x31);
    }
#else
    Floats low01 = __builtin_shufflevector(a[0], a[1], 0, 4, 1, 5);
    Floats high01 = __builtin_shufflevector(a[0], a[1], 2, 6, 3, 7);
    Floats low23 = __builtin_shufflevector(a[2], a[3], 0, 4, 1, 5);
    Floats high23 = __builtin_shufflevector(a[2], a[3], 2, 6, 3, 7);
    t[0] = __builtin_shufflevector(low01, low23, 0, 1, 4, 5);
    t[1] = __builtin_shufflevector(low01, low23, 2, 3, 6, 7);
    t[2] = __builtin_shufflevector(high01, high23, 0, 1, 4, 5);
    t[3] = __builtin_shufflevector(high01, high23, 2, 3, 6, 7);
#endif
    if (count >= W) {
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) store(out + i * W, t[i]);
    } else {
        for (int64_t i = 0; i < count; ++i) store(out + i * W, t[i]);
    }
}

}  // namespace dgt
