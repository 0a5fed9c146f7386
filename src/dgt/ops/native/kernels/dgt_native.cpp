// Dynamic Group Attention on CPUs: group, select, attend (dgt.ops.attention), float32, exact; and attend's gradients.
//
// One source for every instruction set: lanes are GCC/Clang vector extensions of W floats; the few things that these
// cannot say (compress, masks as bits, the 16 x 16 transposition) have an AVX-512 form, an AVX2 form where it matters,
// and a portable form. Compile once per instruction set, load the best (native.py). No library is linked: the caller
// hands over a parallel loop (PyTorch's own `torch_parallel_for`, a C function of libtorch_cpu since 2.10), so threads
// are those of the host's pool and nothing is oversubscribed.
//
// All three steps are one small matrix product, `scores`: R rows (broadcast) times C panels of W tokens, transposed
// (`pack`), with R x C vectors of sums in registers.
//   group   panels of queries  x centroids -> argmax down the lanes
//   select  panels of keys     x centroids -> keys above a rising threshold are compressed into candidates, from which
//                                             the exact top k is taken again and again (`keep_largest`)
//   attend  panels of the group's gathered keys x its queries -> softmax, online over blocks of keys, times values

// C++ without its library, so that any compiler builds it for any system and nothing is linked but C's.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define DGT_W 16
#elif defined(__AVX2__)
#define DGT_W 8
#else
#define DGT_W 4
#endif
#ifndef KEY_BLOCK
#define KEY_BLOCK 128  // keys whose scores are in the first cache at a time
#endif
#define INLINE static inline __attribute__((always_inline))
#if defined(_WIN32)
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace {

constexpr int W = DGT_W;
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int ROWS = 4, SUMS = 12;  // of 16 registers
#else
constexpr int ROWS = 8, SUMS = 24;  // of 32
#endif
constexpr int COLS = SUMS / ROWS;  // vectors beside each other in the block of most rows
constexpr int MOST = 8;            // vectors beside each other at most
constexpr int TILE = 32;           // queries that share a visit to a block of keys
constexpr int CHUNK = 6 * 16;      // tokens that are packed at a time
constexpr float INF = __builtin_inff();

template <class T>
constexpr T min(T a, T b) { return b < a ? b : a; }
template <class T>
constexpr T max(T a, T b) { return a < b ? b : a; }

struct Counter {  // shared by threads
    int64_t value = 0;
    int64_t add(int64_t x) { return __atomic_fetch_add(&value, x, __ATOMIC_RELAXED); }
    void set(int64_t x) { __atomic_store_n(&value, x, __ATOMIC_RELAXED); }
    operator int64_t() const { return __atomic_load_n(&value, __ATOMIC_RELAXED); }
};

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef float vfu __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int32_t viu __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint32_t mask;  // a bit a lane

INLINE vf load(const float* p) { return *(const vfu*)p; }
INLINE void store(float* p, vf x) { *(vfu*)p = x; }
INLINE vi loadi(const int32_t* p) { return *(const viu*)p; }
INLINE vf set1(float x) { return x - vf{}; }
INLINE vi lanes() {
    vi x;
    for (int i = 0; i < W; ++i) x[i] = i;
    return x;
}
constexpr mask ALL = (mask)((1ull << W) - 1);
INLINE mask first_lanes(long n) { return n >= W ? ALL : ((mask)1 << n) - 1; }
INLINE int count_bits(mask m) { return __builtin_popcount(m); }

#if defined(__AVX512F__)
INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE mask not_le(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ); }  // a > b, or NaN
INLINE mask ge(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
INLINE mask eq(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
INLINE mask unordered(vf a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
INLINE vf select(mask m, vf a, vf b) { return _mm512_mask_mov_ps(b, m, a); }
INLINE vi select(mask m, vi a, vi b) { return (vi)_mm512_mask_mov_epi32((__m512i)b, m, (__m512i)a); }
INLINE void compress(float* p, vf x, mask m) { _mm512_storeu_ps(p, _mm512_maskz_compress_ps(m, x)); }
INLINE void compress(int32_t* p, vi x, mask m) {
    _mm512_storeu_si512(p, _mm512_maskz_compress_epi32(m, (__m512i)x));
}
INLINE vf spread_max(vf x) {  // the largest, in every lane
    x = vmax(x, _mm512_shuffle_f32x4(x, x, 0x4e));
    x = vmax(x, _mm512_shuffle_f32x4(x, x, 0xb1));
    x = vmax(x, _mm512_permute_ps(x, 0x4e));
    return vmax(x, _mm512_permute_ps(x, 0xb1));
}
INLINE float hmax(vf x) { return _mm512_reduce_max_ps(x); }
INLINE float hmin(vf x) { return _mm512_reduce_min_ps(x); }
INLINE float hsum(vf x) { return _mm512_reduce_add_ps(x); }
INLINE vf load_some(const float* p, mask m) { return _mm512_maskz_loadu_ps(m, p); }
INLINE void store_some(float* p, vf x, mask m) { _mm512_mask_storeu_ps(p, m, x); }
INLINE mask lowest_bits(mask m, int n) { return _pdep_u32(n >= 32 ? ~0u : (1u << n) - 1, m); }
#else
#if defined(__AVX2__)
INLINE mask bits(vi m) { return (mask)_mm256_movemask_ps((__m256)m); }
INLINE vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
#else
INLINE mask bits(vi m) {
    mask b = 0;
    for (int i = 0; i < W; ++i) b |= (mask)(m[i] & 1) << i;
    return b;
}
INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }
#endif
INLINE vi spread(mask m) {
    vi one = (vi{} + 1) << lanes();
    return ((vi{} + (int32_t)m) & one) == one;
}
INLINE mask not_le(vf a, vf b) { return bits(~(vi)(a <= b)); }
INLINE mask ge(vf a, vf b) { return bits(a >= b); }
INLINE mask eq(vf a, vf b) { return bits(a == b); }
INLINE mask unordered(vf a) { return bits(a != a); }
INLINE vf select(mask m, vf a, vf b) { return spread(m) ? a : b; }
INLINE vi select(mask m, vi a, vi b) { return spread(m) ? a : b; }
template <class T, class V>
INLINE void compress(T* p, V x, mask m) {
#if defined(__AVX2__)  // the places of the set bits, as bytes
    uint64_t wide = _pdep_u64(m, 0x0101010101010101ull) * 0xFF;
    uint64_t places = _pext_u64(0x0706050403020100ull, wide);
    __m256i order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)places));
    _mm256_storeu_si256((__m256i*)p, _mm256_permutevar8x32_epi32((__m256i)x, order));
#else
    for (; m; m &= m - 1) *p++ = x[__builtin_ctz(m)];
#endif
}
INLINE float hmax(vf x) {
    float y = x[0];
    for (int i = 1; i < W; ++i) y = x[i] > y ? x[i] : y;
    return y;
}
INLINE vf spread_max(vf x) { return set1(hmax(x)); }
INLINE float hmin(vf x) {
    float y = x[0];
    for (int i = 1; i < W; ++i) y = x[i] < y ? x[i] : y;
    return y;
}
INLINE float hsum(vf x) {
    float y = 0;
    for (int i = 0; i < W; ++i) y += x[i];
    return y;
}
INLINE vf load_some(const float* p, mask m) {
    vf x{};
    for (int i = 0; i < W; ++i)
        if (m >> i & 1) x[i] = p[i];
    return x;
}
INLINE void store_some(float* p, vf x, mask m) {
    for (int i = 0; i < W; ++i)
        if (m >> i & 1) p[i] = x[i];
}
INLINE mask lowest_bits(mask m, int n) {
    mask kept = 0;
    for (; m && n > 0; m &= m - 1, --n) kept |= m & -m;
    return kept;
}
#endif

// 2^x for x <= 0, relative error 1e-7; 0 below 2^-126.
INLINE vf exp2_of(vf x) {
    x = vmax(x, set1(-126.0f));
    vf t = x + 12582912.0f;  // rounds; the integer stands in the low bits
    vf f = x - (t - 12582912.0f);
    vf p = set1(0.0013276466634f);
    p = p * f + 0.0096755409613f;
    p = p * f + 0.0555071346462f;
    p = p * f + 0.2402212023735f;
    p = p * f + 0.6931469440460f;
    p = p * f + 1.0000001192093f;
    return (vf)((vi)p + ((vi)t << 23));
}

// S[r, c] = sum_d A[r, d] B[c][d]: R rows of A, C panels of W columns, each D x W. Their maxima, a lane each, go to top.
template <int R, int C>
void scores(const float* a, long lda, const float* b, long depth, float* s, long lds, vf* top) {
    vf sum[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) sum[r][c] = vf{};
    for (long d = 0; d < depth; ++d) {
        vf x[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) x[c] = load(b + (c * depth + d) * W);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            vf y = set1(a[r * lda + d]);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) sum[r][c] += y * x[c];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) store(s + r * lds + c * W, sum[r][c]);
    if (top)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            vf most = sum[r][0];
#pragma GCC unroll 8
            for (int c = 1; c < C; ++c) most = vmax(most, sum[r][c]);
            top[r] = vmax(top[r], most);
        }
}

// O[r] = f[r] O[r] + sum_j P[r, j] V[at[j]]: R rows, C vectors of channels; without f there is no O yet. P[r, j] stands
// at r * row + j * step, so that it may be read as it is, or transposed.
template <int R, int C>
void weigh(const float* p, long row, long step, const float* v, const int32_t* at, long keys, float* o, long ldo,
           const float* f) {
    constexpr int U = R * C >= 8 ? 1 : (R * C >= 4 ? 2 : 4);  // enough sums to hide the latency
    vf sum[U][R][C];
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) sum[u][r][c] = vf{};
    long j = 0;
    for (; j + U <= keys; j += U) {
#pragma GCC unroll 4
        for (int u = 0; u < U; ++u) {
            const float* from = v + at[j + u];
            vf x[C];
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) x[c] = load(from + c * W);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                vf y = set1(p[r * row + (j + u) * step]);
#pragma GCC unroll 8
                for (int c = 0; c < C; ++c) sum[u][r][c] += y * x[c];
            }
        }
    }
    for (; j < keys; ++j)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) sum[0][r][c] += p[r * row + j * step] * load(v + at[j] + c * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            vf y = sum[0][r][c];
            for (int u = 1; u < U; ++u) y += sum[u][r][c];
            if (f) y += f[r] * load(o + r * ldo + c * W);
            store(o + r * ldo + c * W, y);
        }
}

typedef void (*ScoresFn)(const float*, long, const float*, long, float*, long, vf*);
typedef void (*WeighFn)(const float*, long, long, const float*, const int32_t*, long, float*, long, const float*);
constexpr int cols_of(int rows) { return min(MOST, SUMS / rows); }
constexpr int fit(int rows, int cols) { return min(cols, cols_of(rows)); }
#define ROW_OF(F, R) {F<R, 1>, F<R, fit(R, 2)>, F<R, fit(R, 3)>, F<R, fit(R, 4)>, F<R, fit(R, 5)>, F<R, fit(R, 6)>, F<R, fit(R, 7)>, F<R, fit(R, 8)>}
#define TABLE(F) {ROW_OF(F, 1), ROW_OF(F, 2), ROW_OF(F, 3), ROW_OF(F, 4), ROW_OF(F, 5), ROW_OF(F, 6), ROW_OF(F, 7), ROW_OF(F, 8)}
const ScoresFn SCORES[8][MOST] = TABLE(scores);
const WeighFn WEIGH[8][MOST] = TABLE(weigh);

// Up to ROWS rows of A times all panels, as evenly cut as registers allow.
INLINE void row_scores(const float* a, long lda, int rows, const float* b, int panels, long depth, float* s, long lds,
                       vf* top = nullptr) {
    int pieces = (panels + cols_of(rows) - 1) / cols_of(rows);
    for (int i = 0; i < pieces; ++i) {
        int p = panels * i / pieces, cols = panels * (i + 1) / pieces - p;
        SCORES[rows - 1][cols - 1](a, lda, b + p * depth * W, depth, s + p * W, lds, top);
    }
}

// Up to ROWS rows of O, all channels.
INLINE void row_weigh(const float* p, long row, long step, int rows, const float* v, const int32_t* at, long keys,
                      float* o, long wide, const float* f) {
    int vectors = (int)(wide / W), pieces = (vectors + cols_of(rows) - 1) / cols_of(rows);
    for (int i = 0; i < pieces; ++i) {
        int c = vectors * i / pieces, cols = vectors * (i + 1) / pieces - c;
        WEIGH[rows - 1][cols - 1](p, row, step, v + c * W, at, keys, o + c * W, wide, f);
    }
}

#if defined(__AVX512F__)
// Transpose up to 16 x 16: columns d.. of the rows go to out[d][16].
INLINE void transpose(const float* const* rows, long d, long some, float* out) {
    __m512 a[16], b[16];
    mask m = first_lanes(some);
    if (some >= 16)
        for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_ps(rows[i] + d);
    else
        for (int i = 0; i < 16; ++i) a[i] = _mm512_maskz_loadu_ps(m, rows[i] + d);
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
    __m512 t[16];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_f32x4(b[i], b[i + 8], 0x88);
        t[i + 8] = _mm512_shuffle_f32x4(b[i], b[i + 8], 0xdd);
        t[i + 4] = _mm512_shuffle_f32x4(b[i + 4], b[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(b[i + 4], b[i + 12], 0xdd);
    }
    if (some >= 16) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) _mm512_storeu_ps(out + i * 16, t[i]);
    } else
        for (int i = 0; i < some; ++i) _mm512_storeu_ps(out + i * 16, t[i]);
}
#endif

// Rows (of ids, or in order) as panels of W, transposed; places left over at the end repeat the last row.
void pack(const float* base, long ld, const int32_t* ids, int count, long depth, float* out) {
    for (int i = 0; i < count; i += W, out += depth * W) {
        const float* rows[W];
        for (int j = 0; j < W; ++j) {
            int at = min(i + j, count - 1);
            rows[j] = base + (ids ? ids[at] : at) * ld;
        }
#if defined(__AVX512F__)
        for (long d = 0; d < depth; d += 16) transpose(rows, d, depth - d, out + d * 16);
#else
        for (long d = 0; d < depth; ++d)
            for (int j = 0; j < W; ++j) out[d * W + j] = rows[j][d];
#endif
    }
}

// Bring a row near: into the second cache (2), or the first (3).
INLINE void fetch(const float* row, long depth, int near) {
    for (long d = 0; d < depth; d += 16)
        if (near == 2) __builtin_prefetch(row + d, 0, 2);
        else __builtin_prefetch(row + d, 0, 3);
}

// ---- group ---------------------------------------------------------------------------------------------------------

// ids[i] = argmax_g <rows[i], centroids[g]>, the lowest of equal ones; false for NaN.
bool group(const float* base, long ld, int count, const float* centroids, int groups, long depth, int64_t* ids,
           float* panels, float* s) {
    mask nan = 0;
    for (int start = 0; start < count; start += CHUNK) {
        int some = min(CHUNK, count - start), vectors = (some + W - 1) / W;
        pack(base + start * ld, ld, nullptr, some, depth, panels);
        for (int g = 0; g < groups; g += ROWS)
            row_scores(centroids + g * depth, depth, min(ROWS, groups - g), panels, vectors, depth, s + g * CHUNK, CHUNK);
        for (int p = 0; p < vectors; ++p) {
            vf best = load(s + p * W);
            for (int g = 0; g < groups; ++g) {
                vf x = load(s + g * CHUNK + p * W);
                best = vmax(x, best);
                nan |= unordered(x);
            }
            vi id{}, place = vi{} + groups;
            for (int g = groups - 1; g >= 0; --g) {
                place -= 1;
                id = select(eq(load(s + g * CHUNK + p * W), best), place, id);
            }
            for (int j = 0; j < min(W, some - p * W); ++j) ids[start + p * W + j] = id[j];
        }
    }
    return !nan;
}

// ---- select --------------------------------------------------------------------------------------------------------

struct Candidates {  // of one group, by ascending id; all keys seen whose score is above `above` are among them
    float* score;
    int32_t* id;
    int count;
    float above;
};

// How many reach each of three bounds.
INLINE void count_ge(const float* x, int vectors, const float* bounds, int* counts) {
    vf a = set1(bounds[0]), b = set1(bounds[1]), c = set1(bounds[2]);
    int na = 0, nb = 0, nc = 0, i = 0;
    for (; i + 2 <= vectors; i += 2) {
        vf u = load(x + i * W), v = load(x + i * W + W);
        na += count_bits(ge(u, a) | ge(v, a) << W);
        nb += count_bits(ge(u, b) | ge(v, b) << W);
        nc += count_bits(ge(u, c) | ge(v, c) << W);
    }
    if (i < vectors) {
        vf u = load(x + i * W);
        na += count_bits(ge(u, a)), nb += count_bits(ge(u, b)), nc += count_bits(ge(u, c));
    }
    counts[0] = na, counts[1] = nb, counts[2] = nc;
}

INLINE int32_t order_of(float x) {  // a monotone image of the floats in the integers
    int32_t i;
    memcpy(&i, &x, 4);
    return i >= 0 ? i : INT32_MIN - i;
}
INLINE float float_of(int32_t i) {
    i = i >= 0 ? i : INT32_MIN - i;
    float x;
    memcpy(&x, &i, 4);
    return x;
}

struct Roots {  // 1 / sqrt(n)
    float table[1024];
    Roots() {
        for (int i = 0; i < 1024; ++i) table[i] = 1.0f / __builtin_sqrtf((float)max(i, 1));
    }
    float of(int n) const { return n < 1024 ? table[n] : 1.0f / __builtin_sqrtf((float)n); }
};
const Roots ROOTS;

// Keep the k largest, ties to the lowest id, in order; with `slack` at least these, and a few more, which is quicker.
// Where k or more reach a bound, no later score that is not above it can be among the k largest. False for NaN.
bool keep_largest(Candidates& c, int k, int slack = 0) {
    int n = c.count, vectors = (n + W - 1) / W;
    for (int i = n; i < vectors * W; ++i) c.score[i] = c.score[0];
    vf low = set1(INF), high = set1(-INF);
    mask nan = 0;
    for (int i = 0; i < vectors; ++i) {
        vf x = load(c.score + i * W);
        low = vmin(low, x), high = vmax(high, x), nan |= unordered(x);
    }
    if (nan) return false;
    if (n <= k) return true;
    for (int i = n; i < vectors * W; ++i) c.score[i] = -INF;
    // More than k reach `lo`, fewer than k reach `hi`. Every turn tries three bounds between them: first the quarters,
    // then where the k-th is if scores are spread evenly, with a margin of so many standard deviations.
    float lo = hmin(low), hi = float_of(order_of(hmax(high)) + 1), bound = lo;
    int above_lo = n, above_hi = 0, found = n;
    for (int turn = 0; found < k || found > k + slack; ++turn) {
        float three[3], wide = hi - lo, margin = 0.25f, middle = 0.5f;
        int counts[3], between = above_lo - above_hi;
        if (turn % 3) {
            middle = (float)(above_lo - k) * ROOTS.of(between) * ROOTS.of(between);
            margin = min(0.75f * ROOTS.of(between), 0.6f * min(middle, 1 - middle));
        }
        for (int i = 0; i < 3; ++i) three[i] = lo + wide * (middle + (float)(i - 1) * margin);
        if (turn > 12 || !(three[0] > lo && three[0] < three[1] && three[1] < three[2] && three[2] < hi)) {
            int64_t first = order_of(lo), last = order_of(hi);  // few floats are between, or infinite ones
            if (last - first <= 1) break;
            for (int i = 0; i < 3; ++i)
                three[i] = float_of((int32_t)(first + max<int64_t>(1, (last - first) * (i + 1) / 4)));
        }
        count_ge(c.score, vectors, three, counts);
        for (int i = 0; i < 3; ++i) {  // no branches: none of these could be foretold
            lo = counts[i] > k ? three[i] : lo, above_lo = counts[i] > k ? counts[i] : above_lo;
            bool hit = counts[i] >= k && counts[i] <= k + slack;
            bound = hit ? three[i] : bound, found = hit ? counts[i] : found;
        }
        for (int i = 2; i >= 0; --i)
            hi = counts[i] < k ? three[i] : hi, above_hi = counts[i] < k ? counts[i] : above_hi;
    }
    int out = 0;
    if (found >= k && found <= k + slack) {
        for (int i = 0; i < vectors; ++i) {
            vf x = load(c.score + i * W);
            mask m = ge(x, set1(bound));
            if (slack) compress(c.score + out, x, m);  // else nobody looks at them again
            compress(c.id + out, loadi(c.id + i * W), m);
            out += count_bits(m);
        }
        c.above = bound;
    } else {  // ties: `lo` is the k-th largest; of those that equal it the first
        int room = k - above_hi;
        for (int i = 0; i < vectors; ++i) {
            vf x = load(c.score + i * W);
            vi id = loadi(c.id + i * W);
            mask same = lowest_bits(eq(x, set1(lo)), room), m = (ge(x, set1(lo)) & ~eq(x, set1(lo))) | same;
            room -= count_bits(same);
            compress(c.score + out, x, m), compress(c.id + out, id, m);
            out += count_bits(m);
        }
        c.above = lo;
    }
    c.count = out;
    return true;
}

int candidate_limit(int k) { return max(256, 4 * k); }
int candidate_room(int k) { return candidate_limit(k) + CHUNK + 2 * W; }

// Collect candidates of every group among keys begin..end.
bool collect(const float* base, long ld, int begin, int end, const float* centroids, int groups, long depth, int k,
             Candidates* c, float* panels, const float* next = nullptr, long ld_next = 0) {
    int limit = candidate_limit(k);
    alignas(64) float s[ROWS * COLS * W];
    bool good = true;
    for (int g = 0; g < groups; ++g) c[g].count = 0, c[g].above = -INF;
    for (int start = begin; start < end; start += CHUNK) {
        int some = min(CHUNK, end - start), vectors = (some + W - 1) / W;
        pack(base + start * ld, ld, nullptr, some, depth, panels);
        if (next)  // what is read in no order later
            for (int i = start; i < start + some; ++i) fetch(next + i * ld_next, depth, 2);
        for (int g = 0; g < groups; g += ROWS) {
            int rows = min(ROWS, groups - g);
            for (int p = 0; p < vectors; p += COLS) {
                int cols = min(COLS, vectors - p);
                SCORES[rows - 1][cols - 1](centroids + g * depth, depth, panels + p * depth * W, depth, s, COLS * W, nullptr);
                for (int r = 0; r < rows; ++r) {
                    Candidates& one = c[g + r];
                    vf above = set1(one.above);
                    int n = one.count;
                    for (int q = 0; q < cols; ++q) {
                        vf x = load(s + (r * COLS + q) * W);
                        mask m = not_le(x, above) & first_lanes(some - (p + q) * W);
                        compress(one.score + n, x, m);
                        compress(one.id + n, lanes() + (start + (p + q) * W), m);
                        n += count_bits(m);
                    }
                    one.count = n;
                }
            }
        }
        for (int g = 0; g < groups; ++g)
            if (c[g].count >= limit) good &= keep_largest(c[g], k, 1 + k / 4);
    }
    return good;
}

// ---- attend --------------------------------------------------------------------------------------------------------

template <class T>
struct Array {  // std::vector needs the C++ library
    T* memory;
    explicit Array(size_t count) : memory((T*)malloc(max<size_t>(1, count) * sizeof(T))) {
        if (!memory) abort();
    }
    Array(const Array&) = delete;
    ~Array() { free(memory); }
    T* data() { return memory; }
    T& operator[](size_t i) { return memory[i]; }
};

struct Scratch {  // memory of a thread, for one call
    char* memory = nullptr;
    size_t used = 0, room = 0;
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    ~Scratch() { free(memory); }
    void reset(size_t bytes) {
        used = 0;
        if (room >= bytes + 4096) return;
        free(memory);
        room = bytes + 4096;
        memory = (char*)malloc(room);
        if (!memory) abort();
    }
    template <class T>
    T* take(size_t count) {
        size_t at = ((size_t)memory + used + 63) / 64 * 64;
        used = at + count * sizeof(T) - (size_t)memory;
        return (T*)at;
    }
};

// Softmax attention of `count` <= TILE rows over `keys` packed keys; value rows at v + at[j], DV channels (padded).
void attend_tile(const float* q, int count, const float* panels, const float* v, const int32_t* at, int keys, long depth,
                 long wide, float* s, float* o) {
    float top[TILE];
    vf total[TILE];
    for (int start = 0; start < keys; start += KEY_BLOCK) {
        int some = min(KEY_BLOCK, keys - start), vectors = (some + W - 1) / W;
        mask last = first_lanes(some - (vectors - 1) * W);
        int pieces = (count + ROWS - 1) / ROWS;
        for (int piece = 0; piece < pieces; ++piece) {
            int r0 = count * piece / pieces, rows = count * (piece + 1) / pieces - r0;
            vf most[ROWS];
            float factor[ROWS];
            for (int r = 0; r < rows; ++r) most[r] = start ? set1(top[r0 + r]) : set1(-INF);
            row_scores(q + r0 * depth, depth, rows, panels + start * depth, vectors, depth, s, KEY_BLOCK, most);
            for (int r = 0; r < rows; ++r) {  // lanes beyond the last key repeat it
                vf m = most[r] = spread_max(most[r]);
                vf fade = start ? exp2_of(set1(top[r0 + r]) - m) : vf{};
                total[r0 + r] = start ? total[r0 + r] * fade : vf{};
                factor[r] = fade[0], top[r0 + r] = m[0];
            }
            for (int r = 0; r < rows; ++r) {
                float* x = s + r * KEY_BLOCK;
                vf sum = total[r0 + r], shift = most[r];
                for (int i = 0; i < vectors - 1; ++i) {
                    vf y = exp2_of(load(x + i * W) - shift);
                    sum += y;
                    store(x + i * W, y);
                }
                vf y = exp2_of(load(x + (vectors - 1) * W) - shift);
                total[r0 + r] = sum + select(last, y, vf{});
                store(x + (vectors - 1) * W, y);
            }
            row_weigh(s, KEY_BLOCK, 1, rows, v, at + start, some, o + r0 * wide, wide, start ? factor : nullptr);
        }
    }
    for (int r = 0; r < count; ++r) {
        vf f = set1(1.0f / hsum(total[r]));
        for (long c = 0; c < wide; c += W) store(o + r * wide + c, load(o + r * wide + c) * f);
    }
}

struct Buffers {
    float *q, *s, *o;
};

// Attention of some rows (order[0..count), or first..first + count) over packed keys.
void attend_rows(const float* query, long ldq, float* out, long ldo, const int32_t* order, int first, int count,
                 const float* panels, const float* v, const int32_t* at, int keys, long depth, float scale, Buffers b) {
    long wide = (depth + W - 1) / W * W;
    int tiles = (count + TILE - 1) / TILE;
    for (int tile = 0; tile < tiles; ++tile) {
        int begin = (int)((long)count * tile / tiles), rows = (int)((long)count * (tile + 1) / tiles) - begin;
        for (int r = 0; r < rows; ++r) {
            const float* from = query + (order ? order[begin + r] : first + begin + r) * ldq;
            for (long d = 0; d < depth; ++d) b.q[r * depth + d] = from[d] * scale;
        }
        attend_tile(b.q, rows, panels, v, at, keys, depth, wide, b.s, b.o);
        for (int r = 0; r < rows; ++r) {
            float* to = out + (order ? order[begin + r] : first + begin + r) * ldo;
            for (long d = 0; d < depth; d += W) {
                vf x = load(b.o + r * wide + d);
                if (depth - d >= W) store(to + d, x);
                else store_some(to + d, x, first_lanes(depth - d));
            }
        }
    }
}

double now() {
    timespec t;  // of this thread: what else runs on a core does not count
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

}  // namespace

// ---- the operator --------------------------------------------------------------------------------------------------

typedef void (*Body)(int64_t begin, int64_t end, void* context);
typedef int (*Parallel)(int64_t begin, int64_t end, int64_t grain, Body body, void* context);

struct Problem {
    const float *query, *key, *value, *centroids;  // centroids (H, G, D), contiguous
    float* out;
    int64_t *group_ids, *key_ids;                    // (B, H, L), (B, H, G, k), contiguous
    int64_t batch, heads, tokens, depth, groups, top_k;
    int64_t q[3], k[3], v[3], o[3];                  // strides, in floats, of image, head, token
    float scale;
    int32_t threads;
    Parallel parallel;
    double* seconds;                                 // null, or 3: group, select, attend, summed over threads
};

namespace {

// Tasks 0..count on all threads, one at a time each, with that thread's scratch.
template <class F>
void share(const Problem& x, int64_t count, const F& task) {
    struct Context {
        Counter next;
        int64_t count;
        const F* task;
    } context;
    context.count = count, context.task = &task;
    Body body = [](int64_t, int64_t, void* p) {
        Context& c = *(Context*)p;
        Scratch own;
        for (int64_t i; (i = c.next.add(1)) < c.count;) (*c.task)(i, own);
    };
    int64_t threads = min<int64_t>(x.threads, count);
    if (threads > 1 && x.parallel) x.parallel(0, threads, 1, body, &context);
    else body(0, 1, &context);
}

struct Head {
    const float *query, *key, *value, *centroids;
    float* out;
    int64_t *group_ids, *key_ids;
};

Head head_of(const Problem& x, int64_t i) {
    int64_t b = i / x.heads, h = i % x.heads;
    return {x.query + b * x.q[0] + h * x.q[1],
            x.key + b * x.k[0] + h * x.k[1],
            x.value + b * x.v[0] + h * x.v[1],
            x.centroids + h * x.groups * x.depth,
            x.out + b * x.o[0] + h * x.o[1],
            x.group_ids ? x.group_ids + i * x.tokens : nullptr,
            x.key_ids ? x.key_ids + i * x.groups * x.top_k : nullptr};
}

// Queries in the order of their groups; start has G + 1 places.
void sort_by_group(const int64_t* ids, int tokens, int groups, int32_t* order, int32_t* start) {
    memset(start, 0, 4 * (groups + 1));
    for (int i = 0; i < tokens; ++i) ++start[ids[i] + 1];
    for (int g = 0; g < groups; ++g) start[g + 1] += start[g];
    for (int i = 0; i < tokens; ++i) order[start[ids[i]]++] = i;
    for (int g = groups; g > 0; --g) start[g] = start[g - 1];
    start[0] = 0;
}

size_t attend_bytes(const Problem& x, int64_t keys) {
    int64_t wide = (x.depth + W - 1) / W * W;
    return 4 * ((keys + W) * (x.depth + wide + 1) + TILE * (x.depth + wide) + ROWS * KEY_BLOCK) + 4096;
}

// Attend from the queries of one group to its keys.
void attend_group(const Problem& x, const Head& h, const int32_t* order, int count, const int32_t* ids, Scratch& m) {
    int k = (int)x.top_k;
    long wide = (x.depth + W - 1) / W * W, ldv = x.v[2];
    float* panels = m.take<float>((k + W) * x.depth);
    int32_t* at = m.take<int32_t>(k);
    Buffers b{m.take<float>(TILE * x.depth), m.take<float>(ROWS * KEY_BLOCK), m.take<float>(TILE * wide)};
    if (x.tokens > 2048)
        for (int j = 0; j < k; ++j) fetch(h.value + ids[j] * ldv, x.depth, 3);
    pack(h.key, x.k[2], ids, k, x.depth, panels);
    const float* values = h.value;
    if (x.depth % W || count > ROWS) {  // side by side: worth it for many queries; padded
        float* copy = m.take<float>(k * wide);
        for (int j = 0; j < k; ++j) {
            const float* row = h.value + ids[j] * ldv;
            for (long d = 0; d < wide; d += W)
                store(copy + j * wide + d, x.depth - d >= W ? load(row + d) : load_some(row + d, first_lanes(x.depth - d)));
            at[j] = (int32_t)(j * wide);
        }
        values = copy;
    } else
        for (int j = 0; j < k; ++j) at[j] = (int32_t)(ids[j] * ldv);
    float scale = x.scale * 1.44269504088896f;
    attend_rows(h.query, x.q[2], h.out, x.o[2], order, 0, count, panels, values, at, k, x.depth, scale, b);
}

void write_ids(const Candidates& c, int k, int64_t* to) {
    for (int j = 0; j < k; ++j) to[j] = c.id[j];
}

int dense(const Problem& x) {
    int64_t wide = (x.depth + W - 1) / W * W, all = x.batch * x.heads;
    int64_t pieces = all >= 4 * x.threads ? 1 : (4 * x.threads + all - 1) / all;
    pieces = min(pieces, (x.tokens + TILE - 1) / TILE);
    int64_t size = (x.tokens + W) * x.depth;
    bool padded = x.depth % W;
    Array<float> packed(pieces > 1 ? all * size : 0);
    auto pack_head = [&](const Head& h, float* to) { pack(h.key, x.k[2], nullptr, (int)x.tokens, x.depth, to); };
    if (pieces > 1) share(x, all, [&](int64_t i, Scratch&) { pack_head(head_of(x, i), packed.data() + i * size); });
    share(x, all * pieces, [&](int64_t task, Scratch& own) {
        int64_t i = task / pieces, piece = task % pieces;
        Head h = head_of(x, i);
        own.reset(attend_bytes(x, x.tokens));
        Buffers b{own.take<float>(TILE * x.depth), own.take<float>(ROWS * KEY_BLOCK), own.take<float>(TILE * wide)};
        float* panels = pieces > 1 ? packed.data() + i * size : own.take<float>(size);
        if (pieces == 1) pack_head(h, panels);
        int32_t* at = own.take<int32_t>(x.tokens);
        const float* values = h.value;
        if (padded) {
            float* copy = own.take<float>(x.tokens * wide);
            for (int64_t j = 0; j < x.tokens; ++j)
                for (long d = 0; d < wide; d += W)
                    store(copy + j * wide + d, load_some(h.value + j * x.v[2] + d, first_lanes(x.depth - d)));
            values = copy;
        }
        for (int64_t j = 0; j < x.tokens; ++j) at[j] = (int32_t)(j * (padded ? wide : x.v[2]));
        int first = (int)(x.tokens * piece / pieces), last = (int)(x.tokens * (piece + 1) / pieces);
        attend_rows(h.query, x.q[2], h.out, x.o[2], nullptr, first, last - first, panels, values, at, (int)x.tokens,
                    x.depth, x.scale * 1.44269504088896f, b);
    });
    return 0;
}

}  // namespace

EXPORT int dgt_abi_version() { return 1; }  // as ABI_VERSION of library.py; raised where this interface changes

EXPORT int dgt_lanes() { return W; }

// 0, or 1 for NaN among the queries, 2 among the keys, 3 for scores of -inf. top_k >= tokens is dense attention.
EXPORT int dgt_forward(const Problem* problem) {
    const Problem& x = *problem;
    if (x.top_k >= x.tokens) return dense(x);
    const int L = (int)x.tokens, G = (int)x.groups, k = (int)x.top_k;
    const int64_t all = x.batch * x.heads, room = candidate_room(k);
    Counter error;
    Counter spent[3];
    auto clock = [&] { return x.seconds ? now() : 0.0; };
    auto note = [&](int step, double since) { if (x.seconds) spent[step].add((int64_t)(1e9 * (now() - since))); };
    auto candidates = [&](float* score, int32_t* id, Candidates* c) {
        for (int g = 0; g < G; ++g) c[g] = {score + g * room, id + g * room, 0, -INF};
    };
    const size_t step_bytes = 4 * (CHUNK * x.depth + (size_t)(G + ROWS) * CHUNK) + 1024;

    if (all >= 4 * x.threads || x.threads == 1) {  // whole heads
        const size_t bytes = step_bytes + G * room * 8 + G * sizeof(Candidates) + 8 * (L + G) + attend_bytes(x, k) + 4096;
        share(x, all, [&](int64_t i, Scratch& own) {
            Head h = head_of(x, i);
            own.reset(bytes);
            float* panels = own.take<float>(CHUNK * x.depth);
            float* s = own.take<float>((size_t)(G + ROWS) * CHUNK);
            Candidates* c = own.take<Candidates>(G);
            float* score = own.take<float>(G * room);
            candidates(score, own.take<int32_t>(G * room), c);
            int32_t *order = own.take<int32_t>(L), *start = own.take<int32_t>(G + 1);
            double t = clock();
            if (!group(h.query, x.q[2], L, h.centroids, G, x.depth, h.group_ids, panels, s)) error.set(1);
            note(0, t), t = clock();
            if (!collect(h.key, x.k[2], 0, L, h.centroids, G, x.depth, k, c, panels, h.value, x.v[2])) error.set(2);
            for (int g = 0; g < G; ++g) {
                if (!keep_largest(c[g], k)) error.set(2);
                else if (c[g].count < k) error.set(3);
                else write_ids(c[g], k, h.key_ids + (int64_t)g * k);
            }
            if (error) return;
            note(1, t), t = clock();
            sort_by_group(h.group_ids, L, G, order, start);
            size_t used = own.used;
            for (int g = 0; g < G; ++g)
                if (start[g + 1] > start[g]) {
                    own.used = used;
                    attend_group(x, h, order + start[g], start[g + 1] - start[g], c[g].id, own);
                }
            note(2, t);
        });
    } else {  // few heads: every step is shared
        int64_t pieces = max<int64_t>(1, min<int64_t>((4 * x.threads + all - 1) / all, L / 1024));
        Array<float> score(all * pieces * G * room);
        Array<int32_t> id(all * pieces * G * room), order(all * L), start(all * (G + 1));
        Array<Candidates> found(all * pieces * G);
        share(x, 2 * all * pieces, [&](int64_t task, Scratch& own) {
            int64_t part = task / 2, i = part / pieces, piece = part % pieces;
            int first = (int)(L * piece / pieces), last = (int)(L * (piece + 1) / pieces);
            Head h = head_of(x, i);
            own.reset(step_bytes);
            float* panels = own.take<float>(CHUNK * x.depth);
            double t = clock();
            if (task % 2) {
                float* s = own.take<float>((size_t)(G + ROWS) * CHUNK);
                if (!group(h.query + first * x.q[2], x.q[2], last - first, h.centroids, G, x.depth, h.group_ids + first,
                           panels, s))
                    error.set(1);
                note(0, t);
            } else {
                Candidates* c = found.data() + part * G;
                candidates(score.data() + part * G * room, id.data() + part * G * room, c);
                if (!collect(h.key, x.k[2], first, last, h.centroids, G, x.depth, k, c, panels)) error.set(2);
                note(1, t);
            }
        });
        if (error) return (int)error;
        share(x, all * (G + 1), [&](int64_t task, Scratch& own) {
            int64_t i = task / (G + 1);
            int g = (int)(task % (G + 1)) - 1;
            Head h = head_of(x, i);
            double t = clock();
            if (g < 0) {
                sort_by_group(h.group_ids, L, G, order.data() + i * L, start.data() + i * (G + 1));
                note(2, t);
                return;
            }
            own.reset(8 * (pieces * room + 2 * W) + 1024);
            Candidates c{own.take<float>(pieces * room + W), own.take<int32_t>(pieces * room + W), 0, -INF};
            for (int64_t piece = 0; piece < pieces; ++piece) {
                const Candidates& part = found[(i * pieces + piece) * G + g];
                memcpy(c.score + c.count, part.score, 4 * part.count);
                memcpy(c.id + c.count, part.id, 4 * part.count);
                c.count += part.count;
            }
            if (!keep_largest(c, k)) error.set(2);
            else if (c.count < k) error.set(3);
            else write_ids(c, k, h.key_ids + (int64_t)g * k);
            note(1, t);
        });
        if (error) return (int)error;
        struct Part { int64_t head; int group, first, count; };
        Array<Part> parts(all * (G + L / 1024));
        int64_t cut_into = 0;
        for (int64_t i = 0; i < all; ++i)
            for (int g = 0; g < G; ++g) {
                const int32_t* s = start.data() + i * (G + 1);
                int count = s[g + 1] - s[g], cuts = (count + 1023) / 1024;
                for (int cut = 0; cut < cuts; ++cut) {
                    int begin = (int)((int64_t)count * cut / cuts), stop = (int)((int64_t)count * (cut + 1) / cuts);
                    parts[cut_into++] = {i, g, s[g] + begin, stop - begin};
                }
            }
        share(x, cut_into, [&](int64_t task, Scratch& own) {
            const Part part = parts[task];
            Head h = head_of(x, part.head);
            double t = clock();
            own.reset(attend_bytes(x, k) + 4 * k + 256);
            int32_t* ids = own.take<int32_t>(k);
            for (int j = 0; j < k; ++j) ids[j] = (int32_t)h.key_ids[(int64_t)part.group * k + j];
            attend_group(x, h, order.data() + part.head * L + part.first, part.count, ids, own);
            note(2, t);
        });
    }
    if (x.seconds)
        for (int i = 0; i < 3; ++i) x.seconds[i] = 1e-9 * (double)spent[i];
    return (int)error;
}

// ---- backward of attend (pilot: a task is a whole head; up to 1024 keys a group) --------------------------------------

struct Backward {
    const float* grad;        // of the output, with strides o
    float *dq, *dk, *dv;      // contiguous (B, H, L, D); dk and dv zero before
};

namespace {

constexpr int SOME = 16;  // queries at a time: their weights and those weights' gradients stay in the first cache
const struct Ones {
    float of[ROWS];
    Ones() {
        for (float& x : of) x = 1.0f;
    }
} ONES;

void backward_group(const Problem& x, const Head& h, const float* grad, float* dq, float* dk, float* dv,
                    const int32_t* order, int count, const int64_t* ids, Scratch& m) {
    const int k = (int)x.top_k, vectors = (k + W - 1) / W, padded = vectors * W;
    const long depth = x.depth, wide = (depth + W - 1) / W * W;
    int32_t *id = m.take<int32_t>(k), *at = m.take<int32_t>(max(k, SOME));
    float *keys = m.take<float>(padded * depth), *values = m.take<float>(padded * depth), *rows = m.take<float>(k * wide);
    float *gk = m.take<float>(padded * wide), *gv = m.take<float>(padded * wide);
    float *q = m.take<float>(SOME * wide), *g = m.take<float>(SOME * wide), *o = m.take<float>(SOME * wide);
    float *p = m.take<float>(SOME * padded), *dp = m.take<float>(SOME * padded);
    for (int j = 0; j < k; ++j) id[j] = (int32_t)ids[j];
    pack(h.key, x.k[2], id, k, depth, keys);
    pack(h.value, x.v[2], id, k, depth, values);
    auto copy = [&](const float* from, float* to, float scale) {
        for (long d = 0; d < wide; d += W)
            store(to + d, (depth - d >= W ? load(from + d) : load_some(from + d, first_lanes(depth - d))) * scale);
    };
    for (int j = 0; j < k; ++j) copy(h.key + id[j] * x.k[2], rows + j * wide, 1.0f);
    for (int j = 0; j < max(k, SOME); ++j) at[j] = (int32_t)(j * wide);
    memset(gk, 0, 4 * padded * wide), memset(gv, 0, 4 * padded * wide);
    const mask last = first_lanes(k - (vectors - 1) * W);
    for (int begin = 0; begin < count; begin += SOME) {
        int some = min(SOME, count - begin);
        vf most[SOME];
        for (int r = 0; r < some; ++r) {
            copy(h.query + order[begin + r] * x.q[2], q + r * wide, x.scale * 1.44269504088896f);
            copy(grad + order[begin + r] * x.o[2], g + r * wide, 1.0f);
            most[r] = set1(-INF);
        }
        for (int r = 0; r < some; r += ROWS) {
            int few = min(ROWS, some - r);
            row_scores(q + r * wide, wide, few, keys, vectors, depth, p + r * padded, padded, most + r);
            row_scores(g + r * wide, wide, few, values, vectors, depth, dp + r * padded, padded);
        }
        for (int r = 0; r < some; ++r) {
            float *a = p + r * padded, *b = dp + r * padded;
            vf shift = spread_max(most[r]), sum{}, dot{};
            for (int i = 0; i < vectors; ++i) {
                vf y = exp2_of(load(a + i * W) - shift);
                if (i == vectors - 1) y = select(last, y, vf{});
                sum += y, dot += y * load(b + i * W);
                store(a + i * W, y);
            }
            vf f = set1(1.0f / hsum(sum)), mean = set1(hsum(dot)) * f;
            for (int i = 0; i < vectors; ++i) {
                vf y = load(a + i * W) * f;
                store(a + i * W, y), store(b + i * W, y * (load(b + i * W) - mean));
            }
        }
        for (int r = 0; r < some; r += ROWS)
            row_weigh(dp + r * padded, padded, 1, min(ROWS, some - r), rows, at, k, o + r * wide, wide, nullptr);
        for (int j = 0; j < k; j += ROWS) {  // of keys: the same product, weights transposed
            int few = min(ROWS, k - j);
            row_weigh(p + j, 1, padded, few, g, at, some, gv + j * wide, wide, ONES.of);
            row_weigh(dp + j, 1, padded, few, q, at, some, gk + j * wide, wide, ONES.of);
        }
        for (int r = 0; r < some; ++r) {
            float* to = dq + order[begin + r] * depth;
            for (long d = 0; d < depth; d += W) store_some(to + d, load(o + r * wide + d) * x.scale, first_lanes(depth - d));
        }
    }
    for (int j = 0; j < k; ++j)
        for (long d = 0; d < depth; d += W) {
            mask there = first_lanes(depth - d);
            float *a = dk + id[j] * depth + d, *b = dv + id[j] * depth + d;
            store_some(a, load_some(a, there) + load(gk + j * wide + d) * 0.693147180559945f, there);
            store_some(b, load_some(b, there) + load(gv + j * wide + d), there);
        }
}

}  // namespace

EXPORT int dgt_backward(const Problem* problem, const Backward* gradients) {
    const Problem& x = *problem;
    const int L = (int)x.tokens, G = (int)x.groups, k = (int)x.top_k;
    const int64_t wide = (x.depth + W - 1) / W * W;
    share(x, x.batch * x.heads, [&](int64_t i, Scratch& own) {
        Head h = head_of(x, i);
        own.reset(8 * (L + G) + 4 * ((k + W) * (2 * x.depth + 3 * wide + 2) + SOME * (3 * wide + 2 * (k + W))) + 8192);
        int32_t *order = own.take<int32_t>(L), *start = own.take<int32_t>(G + 1);
        sort_by_group(h.group_ids, L, G, order, start);
        int64_t b = i / x.heads, at = i * x.tokens * x.depth;
        const float* grad = gradients->grad + b * x.o[0] + i % x.heads * x.o[1];
        size_t used = own.used;
        for (int g = 0; g < G; ++g)
            if (start[g + 1] > start[g]) {
                own.used = used;
                backward_group(x, h, grad, gradients->dq + at, gradients->dk + at, gradients->dv + at, order + start[g],
                               start[g + 1] - start[g], h.key_ids + (int64_t)g * k, own);
            }
    });
    return 0;
}
