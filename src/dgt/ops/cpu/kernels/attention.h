// Softmax attention of some queries over a list of keys (Eq. 2), block by block of keys.
//
// A block's keys are gathered and transposed once for all queries of a part; their scores stay in the first cache. The
// softmax is computed online: a row keeps its largest score, its sum of exponentials and its output so far, and all
// that came before fades by 2^(old maximum - new maximum). Scores are in units of log 2.
#pragma once

#include "interface.h"
#include "keys.h"
#include "lanes.h"
#include "products.h"
#include "tokens.h"

namespace dgt {

constexpr float ABSORBING = 1e30f;  // nothing is left of a score that is added to such a number

inline float largest_of(const float* numbers, int64_t count, int64_t step) {
    float largest = -INFINITE;
    for (int64_t j = 0; j < count; ++j) largest = max(largest, numbers[j * step]);
    return largest;
}

// The largest number that the mask of dense attention adds to a query's scores, if it leaves nothing of them; else 0.
// Many write the lowest number of float32 for -inf: a row of these weighs all keys alike.
inline float absorbing_mask(const dgt_problem& problem, const Head& h, int64_t query) {
    float largest = 0.0f;
    if (problem.mask_type == DGT_MASK_FLOAT) {
        const float* added = (const float*)h.mask + query * problem.mask_strides[2];
        largest = largest_of(added, problem.keys, problem.mask_strides[3]);
    } else if (problem.mask_type == DGT_MASK_GRID) {
        const float* columns = (const float*)h.bias_columns.at(query);
        const float* rows = (const float*)h.bias_rows.at(query);
        largest = largest_of(rows, problem.keys / problem.grid_columns, 1);
        largest += largest_of(columns, problem.grid_columns, 1);
    }
    bool absorbs = largest > -INFINITE && largest < INFINITE && __builtin_fabsf(largest) > ABSORBING;
    return absorbs ? largest : 0.0f;
}

// Whether the mask of dense attention is of numbers that are added to scores.
inline bool adds_numbers(const dgt_problem& problem) {
    return problem.mask_type == DGT_MASK_FLOAT || problem.mask_type == DGT_MASK_GRID;
}

// What a grid of keys adds to the scores of one query with the keys from `first` on, up to W - 1 numbers more.
DGT_INLINE void join_grid(const dgt_problem& problem, const Head& h, int64_t query, int64_t first, int64_t count,
                          float absorbing, float* added) {
    const float* rows = (const float*)h.bias_rows.at(query) + first / problem.grid_columns;
    const float* columns = (const float*)h.bias_columns.at(query);
    int64_t column = first % problem.grid_columns;
    for (int64_t j = 0; j < count; column = 0, ++rows) {
        Floats of_row = all(*rows);
        auto join = [&](Floats of_columns) { return (of_row + of_columns - absorbing) * LOG2_E; };
        int64_t end = j + min(problem.grid_columns - column, count - j);
        for (; j + W <= end; j += W, column += W) store(added + j, join(load(columns + column)));
        if (j < end) store(added + j, join(load_lanes(columns + column, first_lanes(end - j))));
        j = end;
    }
}

// What the mask of dense attention adds to the scores of one query with the keys of a block, all keys from `first` on,
// in units of log 2: whole vectors, and up to W - 1 numbers more. Where scores are absorbed it is what becomes of them:
// 0 for the largest number, so that no product is beyond float32.
DGT_INLINE void read_mask(const dgt_problem& problem, const Head& h, int64_t query, int64_t first, int64_t count,
                          float absorbing, float* added) {
    if (problem.mask_type == DGT_MASK_GRID) {
        join_grid(problem, h, query, first, count, absorbing, added);
    } else {
        int64_t step = problem.mask_strides[3];
        const float* mask = (const float*)h.mask + query * problem.mask_strides[2] + first * step;
        if (step == 1)
            for (int64_t j = 0; j < count; ++j) added[j] = (mask[j] - absorbing) * LOG2_E;
        else
            for (int64_t j = 0; j < count; ++j) added[j] = (mask[j * step] - absorbing) * LOG2_E;
    }
    for (int64_t j = count; j < round_up(count, W); ++j) added[j] = added[count - 1];
}

// Hide the scores of one query with those keys of a block that a mask does not let it see.
inline void hide_scores(const dgt_problem& problem, const Head& h, int64_t query, int64_t first, int64_t count,
                        float* scores) {
    int64_t step = problem.mask_strides[3];
    const uint8_t* sees = (const uint8_t*)h.mask + query * problem.mask_strides[2] + first * step;
    for (int64_t j = 0; j < count; ++j) scores[j] = sees[j * step] ? scores[j] : -INFINITE;
    for (int64_t j = count; j < round_up(count, W); ++j) scores[j] = scores[count - 1];
}

constexpr int64_t NEAR = 8;  // rows ahead that are brought near

struct AttendBuffers {
    float* queries;    // rows of the part, scaled
    float* outputs;    // rows so far, not yet divided by their sums
    float* largest;    // score of every row so far
    float* absorbing;  // of every row, from `absorbing_mask`
    float* offsets;    // to first order: rows less the mean of their group
    float* heights;    // to first order: what every row adds to a score, in units of the key's spread
    Floats* sums;      // of every row's exponentials, lane by lane
    float* scores;     // (MOST_BF16_ROWS, key_block)
    float* added;      // to these, from `read_mask`
    KeyBlock keys;
    Bf16x2* bf16_queries;  // rows of the part that are multiplied as bfloat16, as they are
    Bf16x2* bf16_weights;  // (MOST_BF16_ROWS, key_block / 2)

    AttendBuffers(Arena& arena, const dgt_problem& problem) : keys(arena, problem) {
        int64_t width = round_up(problem.channels, W);
        int64_t rows = part_size(problem);
        queries = arena.take<float>(rows * width);
        outputs = arena.take<float>(rows * width);
        largest = arena.take<float>(rows);
        absorbing = arena.take<float>(rows);
        offsets = arena.take<float>(is_first_order(problem) ? rows * width : 0);
        heights = arena.take<float>(is_first_order(problem) ? rows : 0);
        sums = arena.take<Floats>(rows);
        scores = arena.take<float>(MOST_BF16_ROWS * key_block(problem.channels));
        added = arena.take<float>(adds_numbers(problem) ? MOST_BF16_ROWS * key_block(problem.channels) + W : 0);
        bool bf16 = multiplies_bfloat16(problem);
        bf16_queries = arena.take<Bf16x2>(bf16 ? rows * problem.channels / 2 : 0);
        bf16_weights = arena.take<Bf16x2>(bf16 ? MOST_BF16_ROWS * key_block(problem.channels) / 2 : 0);
    }
};

// Online softmax of a row of scores: their exponentials become weights, of float32 or bfloat16, and those of float32
// are added up. Lanes beyond `last` hold nothing new.
template <class Weight>
DGT_INLINE void exponentials(const float* scores, int64_t vectors, Bits last, Floats largest, Floats& sum,
                             Weight* weights) {
    Floats shift = choose(is_equal(largest, all(-INFINITE)), Floats{}, largest);  // where no key was seen yet
    Floats total = sum;
    for (int64_t i = 0; i < vectors - 1; ++i) {
        Floats weight = power_of_two(load(scores + i * W) - shift);
        total += weight;
        store(weights + i * W, weight);
    }
    Floats weight = power_of_two(load(scores + (vectors - 1) * W) - shift);
    store(weights + (vectors - 1) * W, weight);
    sum = total + choose(last, weight, Floats{});
}

// Read the mask of some queries of a part, from row `first` on, and the biases of keys.
DGT_INLINE void read_mask_of_rows(const dgt_problem& problem, const Head& h, const Part& part, int64_t first, int rows,
                                  int64_t first_key, const AttendBuffers& b) {
    int64_t stride = key_block(problem.channels);
    for (int r = 0; r < rows; ++r) {
        float* added = b.added + r * stride;
        read_mask(problem, h, part.query(first + r), first_key, b.keys.count, b.absorbing[first + r], added);
        if (!b.keys.bias() || b.absorbing[first + r] != 0.0f) continue;
        for (int64_t i = 0; i < round_up(b.keys.count, W); i += W)
            store(added + i, load(added + i) + load(b.keys.bias() + i));
    }
}

// Attend from some queries of a part, as many as a product takes, from row `first` on, to a block of keys.
inline void attend_rows(const dgt_problem& problem, const Head& h, const Part& part, int64_t first, int rows,
                        int64_t first_key, bool is_first_block, const AttendBuffers& b) {
    const KeyBlock& keys = b.keys;
    bool bf16 = keys.is_bf16;
    int64_t width = round_up(problem.channels, W);
    int64_t pairs = problem.channels / 2;
    int64_t vectors = divide_up(keys.count, W);
    int64_t stride = key_block(problem.channels);
    Bits last = first_lanes(keys.count - (vectors - 1) * W);
    Floats largest[MOST_BF16_ROWS];
    float fade[MOST_BF16_ROWS];
    for (int r = 0; r < rows; ++r) largest[r] = is_first_block ? all(-INFINITE) : all(b.largest[first + r]);
    Added added = keys.bias();
    if (adds_numbers(problem)) {
        read_mask_of_rows(problem, h, part, first, rows, first_key, b);
        added = {b.added, stride};
    }
    if (bf16)
        row_scores(b.bf16_queries + first * pairs, pairs, rows, keys.bf16_panels, vectors, pairs, factor_of(problem),
                   added, b.scores, stride, largest);
    else
        row_scores(b.queries + first * width, width, rows, keys.panels, vectors, problem.channels, added, b.scores,
                   stride, largest);
    for (int r = 0; problem.mask_type != DGT_NO_MASK && r < rows; ++r) {
        bool is_absorbed = b.absorbing[first + r] != 0.0f;
        if (problem.mask_type != DGT_MASK_BOOL && !is_absorbed) continue;
        float* scores = b.scores + r * stride;
        if (is_absorbed) memcpy(scores, b.added + r * stride, (size_t)(vectors * W) * sizeof(float));
        else hide_scores(problem, h, part.query(first + r), first_key, keys.count, scores);
        largest[r] = is_first_block ? all(-INFINITE) : all(b.largest[first + r]);
        for (int64_t i = 0; i < vectors; ++i) largest[r] = larger(largest[r], load(scores + i * W));
    }
    if (keys.spreads) {
        for (int r = 0; r < rows; ++r) {
            float* scores = b.scores + r * stride;
            for (int64_t i = 0; i < vectors * W; i += W) {
                Floats score = load(scores + i) + b.heights[first + r] * load(keys.spreads + i);
                largest[r] = larger(largest[r], score);
                store(scores + i, score);
            }
        }
    }
    for (int r = 0; r < rows; ++r) {
        largest[r] = spread_largest(largest[r]);
        Floats before = is_first_block ? all(-INFINITE) : all(b.largest[first + r]);
        Floats faded = choose(is_equal(before, all(-INFINITE)), Floats{}, power_of_two(before - largest[r]));
        b.sums[first + r] = is_first_block ? Floats{} : b.sums[first + r] * faded;
        fade[r] = faded[0];
        b.largest[first + r] = largest[r][0];
    }
    float* outputs = b.outputs + first * width;
    const float* fades = is_first_block ? nullptr : fade;
    for (int r = 0; r < rows; ++r) {
        float* scores = b.scores + r * stride;
        uint16_t* weights = (uint16_t*)b.bf16_weights + r * stride;
        if (bf16) exponentials(scores, vectors, last, largest[r], b.sums[first + r], weights);
        else exponentials(scores, vectors, last, largest[r], b.sums[first + r], scores);
    }
    if (bf16)
        row_weigh(Bf16Weights{b.bf16_weights, stride / 2, 1}, rows, Bf16Values{keys.bf16_copies, nullptr, width},
                  divide_up(keys.count, 2), outputs, width, width, fades);
    else row_weigh(Weights{b.scores, stride, 1}, rows, keys.values, keys.count, outputs, width, width, fades);
}

// Divide a row by its sum, and write it; zero, and a logarithm of -inf, where it saw no key.
DGT_INLINE void write_row(const dgt_problem& problem, const Head& h, int64_t query, const float* output, float largest,
                          float sum) {
    bool blind = largest == -INFINITE;
    if (blind) write_zeros(h.output, query, problem.channels);
    else write_back_row(h.output, query, problem.channels, 1.0f / sum, output);
    if (h.logsumexp) h.logsumexp[query] = blind ? -INFINITE : largest * LN_2 + __builtin_logf(sum);
}

// Write that a query attends to nothing.
inline void write_blind_row(const dgt_problem& problem, const Head& h, int64_t query) {
    write_row(problem, h, query, nullptr, -INFINITE, 0.0f);
}

inline void load_queries(const dgt_problem& problem, const Head& h, const Part& part, const AttendBuffers& b) {
    int64_t width = round_up(problem.channels, W);
    int64_t pairs = problem.channels / 2;
    for (int64_t r = 0; r < part.count; ++r) {
        int64_t query = part.query(r);
        b.absorbing[r] = absorbing_mask(problem, h, query);
        if (r + NEAR < part.count) prefetch(h.query, part.query(r + NEAR), problem.channels, false);
        bool bf16 = multiplies_bfloat16(problem);
        if (bf16) copy_pairs(h.query, query, pairs, b.bf16_queries + r * pairs);
        if (!bf16 || problem.query_clusters.count > 0)  // residual keys are float32
            copy_row(h.query, query, problem.channels, factor_of(problem), b.queries + r * width);
    }
}

// Attend from the loaded queries of a part to its keys, after others unless they are the first; returns whether they
// saw none yet.
inline bool attend_keys(const dgt_problem& problem, const Head& h, const Part& part, bool is_first_block,
                        AttendBuffers& b) {
    int64_t cursor = 0;
    int64_t first_key = 0;
    while (b.keys.load_next(problem, h, part.keys, cursor, part.count)) {
        int64_t first = 0;
        int64_t most = b.keys.is_bf16 ? MOST_BF16_ROWS : MOST_ROWS;
        for (int64_t pieces = divide_up(part.count, most); pieces > 0; --pieces) {
            int rows = (int)divide_up(part.count - first, pieces);
            attend_rows(problem, h, part, first, rows, first_key, is_first_block, b);
            first += rows;
        }
        is_first_block = false;
        first_key = cursor;
    }
    return is_first_block;
}

// Write the outputs of a part, whose queries may be blind.
inline void write_part(const dgt_problem& problem, const Head& h, const Part& part, bool is_blind,
                       const AttendBuffers& b) {
    int64_t width = round_up(problem.channels, W);
    for (int64_t r = 0; r < part.count; ++r) {
        if (r + NEAR < part.count) prefetch_to_write(h.output, part.query(r + NEAR), problem.channels);
        if (is_blind) write_blind_row(problem, h, part.query(r));
        else write_row(problem, h, part.query(r), b.outputs + r * width, b.largest[r], sum_of_lanes(b.sums[r]));
    }
}

// Attend from the queries of a part to its keys.
inline void attend_part(const dgt_problem& problem, const Head& h, const Part& part, AttendBuffers& b) {
    load_queries(problem, h, part, b);
    bool is_blind = attend_keys(problem, h, part, true, b);
    write_part(problem, h, part, is_blind, b);
}

}  // namespace dgt
