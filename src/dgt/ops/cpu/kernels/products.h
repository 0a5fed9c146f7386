// The two small matrix products that everything is made of.
//
//   scores   rows times panels of W tokens:  S[r, j] = sum_d A[r, d] B[j, d] + added[r, j]
//   weigh    weights times rows:             O[r, d] = fade[r] O[r, d] + sum_j P[r, j] V[j, d]
//
// Both keep R x C vectors of sums in registers; R rows are broadcast, C vectors stand beside each other. Every size
// that fits the registers is a function of its own, in a table. Factors are float32 or pairs of bfloat16 numbers, of
// two channels d or of two j; sums are float32.
#pragma once

#include "bfloat16.h"
#include "lanes.h"
#include "memory.h"
#include "tiles.h"

namespace dgt {

constexpr int MOST_ROWS = REGISTERS == 32 ? 8 : 4;
constexpr int MOST_SUMS = REGISTERS == 32 ? 24 : 12;
constexpr int MOST_VECTORS = 8;
constexpr int MOST_BF16_ROWS = HAS_TILES ? TILE_ROWS : MOST_ROWS;  // of products of bfloat16

constexpr int vectors_beside(int rows) { return min(MOST_VECTORS, MOST_SUMS / rows); }

// Numbers that are added to scores: those of every row, or the same of all rows.
struct Added {
    const float* first;  // of the first row; null: nothing is added
    int64_t stride;      // from a row to the next

    Added(const float* shared) : first(shared), stride(0) {}
    Added(const float* of_rows, int64_t to_next) : first(of_rows), stride(to_next) {}
    Added from(int64_t token) const { return {first ? first + token : nullptr, stride}; }
};

// sum[r][c] += sum_d A[r, d] B[c, d], of floats or of pairs.
template <int R, int C, class T>
DGT_INLINE void add_scores(Floats (&sum)[R][C], const T* a, int64_t a_stride, const T* panels, int64_t channels) {
    for (int64_t d = 0; d < channels; ++d) {
        decltype(all(T{})) x[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) x[c] = load(panels + (c * channels + d) * W);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            auto y = all(a[r * a_stride + d]);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) sum[r][c] = add_product(sum[r][c], y, x[c]);
        }
    }
}

template <int R, int C>
DGT_INLINE void keep_scores(const Floats (&sum)[R][C], float* s, int64_t s_stride, Floats* largest) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) store(s + r * s_stride + c * W, sum[r][c]);
    if (!largest) return;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        Floats most = sum[r][0];
#pragma GCC unroll 8
        for (int c = 1; c < C; ++c) most = larger(most, sum[r][c]);
        largest[r] = larger(largest[r], most);
    }
}

template <int R, int C>
void scores_of(const float* a, int64_t a_stride, const float* panels, int64_t channels, Added added, float* s,
               int64_t s_stride, Floats* largest) {
    Floats sum[R][C] = {};
    add_scores(sum, a, a_stride, panels, channels);
    if (added.first) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) sum[r][c] += load(added.first + r * added.stride + c * W);
    }
    keep_scores(sum, s, s_stride, largest);
}

// Floats can be scaled before; pairs of bfloat16 numbers would be rounded, so that their sums are: by `factor`.
template <int R, int C>
void bf16_scores_of(const Bf16x2* a, int64_t a_stride, const Bf16x2* panels, int64_t pairs, float factor, Added added,
                    float* s, int64_t s_stride, Floats* largest) {
    Floats sum[R][C] = {};
    add_scores(sum, a, a_stride, panels, pairs);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            Floats more = added.first ? load(added.first + r * added.stride + c * W) : Floats{};
            sum[r][c] = sum[r][c] * factor + more;
        }
    }
    keep_scores(sum, s, s_stride, largest);
}

// P[r, j] stands at r * p_row + j * p_step, so that it may be read as it is, or transposed. V[j] stands at
// v + offsets[j], or, without offsets, at v + j * v_stride.
template <class T, int R, int C>
void weigh_of(const T* p, int64_t p_row, int64_t p_step, const T* v, const int64_t* offsets, int64_t v_stride,
              int64_t count, float* o, int64_t o_stride, const float* fade) {
    constexpr int U = R * C >= 8 ? 1 : (R * C >= 4 ? 2 : 4);  // enough sums to hide the latency of an addition
    Floats sum[U][R][C];
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) sum[u][r][c] = Floats{};
    int64_t j = 0;
    for (; j + U <= count; j += U) {
#pragma GCC unroll 4
        for (int u = 0; u < U; ++u) {
            const T* from = v + (offsets ? offsets[j + u] : (j + u) * v_stride);
            decltype(all(T{})) x[C];
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) x[c] = load(from + c * W);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                auto y = all(p[r * p_row + (j + u) * p_step]);
#pragma GCC unroll 8
                for (int c = 0; c < C; ++c) sum[u][r][c] = add_product(sum[u][r][c], y, x[c]);
            }
        }
    }
    for (; j < count; ++j) {
        const T* from = v + (offsets ? offsets[j] : j * v_stride);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c)
                sum[0][r][c] = add_product(sum[0][r][c], all(p[r * p_row + j * p_step]), load(from + c * W));
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            Floats y = sum[0][r][c];
            for (int u = 1; u < U; ++u) y += sum[u][r][c];
            if (fade) y += fade[r] * load(o + r * o_stride + c * W);
            store(o + r * o_stride + c * W, y);
        }
}

template <int R, int C>
constexpr auto float_weigh_of = weigh_of<float, R, C>;
template <int R, int C>
constexpr auto bf16_weigh_of = weigh_of<Bf16x2, R, C>;

using ScoresFunction = decltype(&scores_of<1, 1>);
using Bf16ScoresFunction = decltype(&bf16_scores_of<1, 1>);
template <class T>
using WeighFunction = decltype(&weigh_of<T, 1, 1>);

// Row R of a table: R rows, 1 to 8 vectors beside each other, or as many as fit.
#define DGT_SIZE(F, R, C) F<R, min(C, vectors_beside(R))>
#define DGT_ROW(F, R)                                                            \
    {DGT_SIZE(F, R, 1), DGT_SIZE(F, R, 2), DGT_SIZE(F, R, 3), DGT_SIZE(F, R, 4), \
     DGT_SIZE(F, R, 5), DGT_SIZE(F, R, 6), DGT_SIZE(F, R, 7), DGT_SIZE(F, R, 8)}
#if defined(DGT_AVX2)
#define DGT_TABLE(F) {DGT_ROW(F, 1), DGT_ROW(F, 2), DGT_ROW(F, 3), DGT_ROW(F, 4)}
#else
#define DGT_TABLE(F)                                             \
    {DGT_ROW(F, 1), DGT_ROW(F, 2), DGT_ROW(F, 3), DGT_ROW(F, 4), \
     DGT_ROW(F, 5), DGT_ROW(F, 6), DGT_ROW(F, 7), DGT_ROW(F, 8)}
#endif
static const ScoresFunction SCORES[MOST_ROWS][MOST_VECTORS] = DGT_TABLE(scores_of);
static const Bf16ScoresFunction BF16_SCORES[MOST_ROWS][MOST_VECTORS] = DGT_TABLE(bf16_scores_of);
static const WeighFunction<float> WEIGH[MOST_ROWS][MOST_VECTORS] = DGT_TABLE(float_weigh_of);
static const WeighFunction<Bf16x2> BF16_WEIGH[MOST_ROWS][MOST_VECTORS] = DGT_TABLE(bf16_weigh_of);

template <class T>
struct WeightsOf {
    const T* at;
    int64_t row;   // from a row to the next
    int64_t step;  // from a weight of a row to the next
};
using Weights = WeightsOf<float>;
using Bf16Weights = WeightsOf<Bf16x2>;

template <class T>
struct ValuesOf {
    const T* first;
    const int64_t* offsets;  // of every row from `first`; null: rows stand `stride` apart
    int64_t stride;
};
using Values = ValuesOf<float>;
using Bf16Values = ValuesOf<Bf16x2>;

// Calls `product(first, beside)` for all vectors beside each other, cut as evenly as registers allow.
template <class Product>
DGT_INLINE void in_pieces(int64_t vectors, int rows, const Product& product) {
    int64_t pieces = divide_up(vectors, vectors_beside(rows));
    for (int64_t i = 0; i < pieces; ++i) {
        int64_t first = vectors * i / pieces;
        product(first, vectors * (i + 1) / pieces - first);
    }
}

// What tiles leave to do on their scores: scale them, add `added`, and find the largest.
DGT_INLINE void finish_scores(float* s, int64_t s_stride, int rows, int64_t vectors, float factor, Added added,
                              Floats* largest) {
    for (int r = 0; r < rows; ++r) {
        float* row = s + r * s_stride;
        Floats most = all(-INFINITE);
        for (int64_t i = 0; i < vectors * W; i += W) {
            Floats score = load(row + i) * factor;
            if (added.first) score += load(added.first + r * added.stride + i);
            store(row + i, score);
            most = larger(most, score);
        }
        if (largest) largest[r] = larger(largest[r], most);
    }
}

// Weighted sums in tiles. Their rows are those of P, which are transposed first where they do not lie side by side.
DGT_INLINE void weigh_by_tiles(Bf16Weights weights, int rows, Bf16Values values, int64_t pairs, float* o,
                               int64_t o_stride, int64_t width, const float* fade) {
    for (int r = 0; fade && r < rows; ++r) {
        if (fade[r] == 1.0f) continue;
        for (int64_t d = 0; d < width; d += W) store(o + r * o_stride + d, load(o + r * o_stride + d) * fade[r]);
    }
    TileProduct product = {weights.at, weights.row, values.first, values.stride, W};
    if (weights.step == 1) {
        multiply_rows(product, rows, width / W, pairs, fade != nullptr, o, o_stride);
        return;
    }
    alignas(64) Bf16x2 transposed[TILE_ROWS * W];
    product.a = transposed;
    product.a_stride = W;
    for (int64_t first = 0; first < pairs; first += W, product.b += W * values.stride) {
        int64_t count = min<int64_t>(W, pairs - first);
        const float* columns[W];  // of 32 bits, whatever they are
        for (int i = 0; i < W; ++i)
            columns[i] = (const float*)(weights.at + (first + min<int64_t>(i, count - 1)) * weights.step);
        for (int r = 0; r < rows; r += W) transpose(columns, r, rows - r, (float*)transposed + r * W);
        multiply_rows(product, rows, width / W, count, fade || first, o, o_stride);
    }
}

// Scores of up to MOST_ROWS rows with all panels; their maxima go into `largest`.
DGT_INLINE void row_scores(const float* a, int64_t a_stride, int rows, const float* panels, int64_t vectors,
                           int64_t channels, Added added, float* s, int64_t s_stride, Floats* largest) {
    in_pieces(vectors, rows, [&](int64_t first, int64_t beside) {
        SCORES[rows - 1][beside - 1](a, a_stride, panels + first * channels * W, channels, added.from(first * W),
                                     s + first * W, s_stride, largest);
    });
}

// The same of up to MOST_BF16_ROWS rows.
DGT_INLINE void row_scores(const Bf16x2* a, int64_t a_stride, int rows, const Bf16x2* panels, int64_t vectors,
                           int64_t pairs, float factor, Added added, float* s, int64_t s_stride, Floats* largest) {
    if (HAS_TILES) {
        multiply_rows({a, a_stride, panels, W, pairs * W}, rows, vectors, pairs, false, s, s_stride);
        finish_scores(s, s_stride, rows, vectors, factor, added, largest);
        return;
    }
    in_pieces(vectors, rows, [&](int64_t first, int64_t beside) {
        BF16_SCORES[rows - 1][beside - 1](a, a_stride, panels + first * pairs * W, pairs, factor, added.from(first * W),
                                          s + first * W, s_stride, largest);
    });
}

// Weighted sums for up to MOST_ROWS rows of O, `width` channels (a multiple of W).
DGT_INLINE void row_weigh(Weights weights, int rows, Values values, int64_t count, float* o, int64_t o_stride,
                          int64_t width, const float* fade) {
    in_pieces(width / W, rows, [&](int64_t first, int64_t beside) {
        WEIGH[rows - 1][beside - 1](weights.at, weights.row, weights.step, values.first + first * W, values.offsets,
                                    values.stride, count, o + first * W, o_stride, fade);
    });
}

// The same for up to MOST_BF16_ROWS rows.
DGT_INLINE void row_weigh(Bf16Weights weights, int rows, Bf16Values values, int64_t pairs, float* o, int64_t o_stride,
                          int64_t width, const float* fade) {
    if (HAS_TILES) {
        weigh_by_tiles(weights, rows, values, pairs, o, o_stride, width, fade);
        return;
    }
    in_pieces(width / W, rows, [&](int64_t first, int64_t beside) {
        BF16_WEIGH[rows - 1][beside - 1](weights.at, weights.row, weights.step, values.first + first * W,
                                         values.offsets, values.stride, pairs, o + first * W, o_stride, fade);
    });
}

}  // namespace dgt
