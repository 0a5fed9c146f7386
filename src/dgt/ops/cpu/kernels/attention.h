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

// The largest number that the mask of dense attention adds to a query's scores, if it leaves nothing of them; else 0.
// Many write the lowest number of float32 for -inf: a row of these weighs all keys alike.
inline float absorbing_mask(const dgt_problem& problem, const Head& h, int64_t query) {
    if (problem.mask_type != DGT_MASK_FLOAT) return 0.0f;
    const float* added = (const float*)h.mask + query * problem.mask_strides[2];
    float largest = -INFINITE;
    for (int64_t j = 0; j < problem.keys; ++j) largest = max(largest, added[j * problem.mask_strides[3]]);
    bool absorbs = largest > -INFINITE && largest < INFINITE && __builtin_fabsf(largest) > ABSORBING;
    return absorbs ? largest : 0.0f;
}

// Add the mask of dense attention to the scores of one query with the keys of a block, all keys from `first` on. Scores
// that are absorbed are left out, and 0 is that of the largest mask, so that no product is beyond float32.
inline void add_mask(const dgt_problem& problem, const Head& h, int64_t query, int64_t first, int64_t count,
                     float absorbing, float* scores) {
    int64_t start = query * problem.mask_strides[2] + first * problem.mask_strides[3];
    int64_t step = problem.mask_strides[3];
    if (problem.mask_type == DGT_MASK_BOOL) {
        const uint8_t* sees = (const uint8_t*)h.mask + start;
        for (int64_t j = 0; j < count; ++j) scores[j] = sees[j * step] ? scores[j] : -INFINITE;
    } else if (absorbing != 0.0f) {
        const float* added = (const float*)h.mask + start;
        for (int64_t j = 0; j < count; ++j) scores[j] = (added[j * step] - absorbing) * LOG2_E;
    } else {
        const float* added = (const float*)h.mask + start;
        for (int64_t j = 0; j < count; ++j) scores[j] += added[j * step] * LOG2_E;
    }
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
    if (bf16)
        row_scores(b.bf16_queries + first * pairs, pairs, rows, keys.bf16_panels, vectors, pairs, factor_of(problem),
                   keys.bias(), b.scores, stride, largest);
    else
        row_scores(b.queries + first * width, width, rows, keys.panels, vectors, problem.channels, keys.bias(),
                   b.scores, stride, largest);
    if (problem.mask_type != DGT_NO_MASK) {
        for (int r = 0; r < rows; ++r) {
            float* scores = b.scores + r * stride;
            add_mask(problem, h, part.query(first + r), first_key, keys.count, b.absorbing[first + r], scores);
            largest[r] = is_first_block ? all(-INFINITE) : all(b.largest[first + r]);
            for (int64_t i = 0; i < vectors; ++i) largest[r] = larger(largest[r], load(scores + i * W));
        }
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
