// Attention inside groups with few keys (Eq. 2): no gathering.
//
// If a group has only a handful of queries, gathering and transposing its keys costs more than computing their scores.
// So all keys of a head are transposed once, each query's scores with all of them are computed, and the scores of its
// group's keys are compacted: the group's list is one bit per key.
#pragma once

#include "attention.h"

namespace dgt {

constexpr int64_t FEW_KEYS = 320;
constexpr int64_t FEW_QUERIES_OF_A_LIST = 6;  // with more queries, gathering the keys is faster
constexpr int64_t MOST_FEW_VECTORS = FEW_KEYS / W;

// Whether scoring all keys costs less than gathering those in a list.
inline bool has_few_keys(const dgt_problem& problem) {
    return problem.keys <= FEW_KEYS && problem.keys <= 3 * problem.list_length && problem.mask_type == DGT_NO_MASK;
}

// Keys and values of a head, prepared for the products.
struct FewKeys {
    float* panels;
    float* rows;          // converted tokens
    float* copies;        // values, if they are converted or padded
    float* biases;        // of keys, in units of log 2
    Bf16x2* bf16_panels;  // keys that are multiplied as bfloat16, in place of panels

    FewKeys(Arena& arena, const dgt_problem& problem) {
        int64_t keys = has_few_keys(problem) ? problem.keys : 0;
        int64_t width = round_up(problem.channels, W);
        panels = arena.take<float>(panels_size(keys, problem.channels));
        rows = arena.take<float>(W * width);
        copies = arena.take<float>(keys * width);
        biases = arena.take<float>(round_up(keys, W));
        bf16_panels = arena.take<Bf16x2>(multiplies_bfloat16(problem) ? panels_size(keys, problem.channels / 2) : 0);
    }

    static bool copies_values(const dgt_problem& problem) {
        return problem.type != DGT_FLOAT32 || problem.channels % W;
    }

    void load(const dgt_problem& problem, const Head& h) const {
        int64_t width = round_up(problem.channels, W);
        if (multiplies_bfloat16(problem)) pack(h.key, nullptr, 0, problem.keys, problem.channels, rows, bf16_panels);
        else pack(h.key, nullptr, 0, problem.keys, problem.channels, rows, panels);
        for (int64_t j = 0; copies_values(problem) && j < problem.keys; ++j)
            copy_row(h.value, j, problem.channels, 1.0f, copies + j * width);
        for (int64_t j = 0; h.key_bias && j < round_up(problem.keys, W); ++j)
            biases[j] = h.key_bias[min(j, problem.keys - 1)] * LOG2_E;
    }

    Values values(const dgt_problem& problem, const Head& h, const int64_t* offsets) const {
        if (copies_values(problem)) return {copies, offsets, 0};
        return {(const float*)h.value.data, offsets, 0};
    }
};

// The keys in a list as bits, and the locations of their values.
struct Marks {
    Bits bits[MOST_FEW_VECTORS];
    int64_t offsets[FEW_KEYS];
    int64_t count;
    uint8_t bytes[FEW_KEYS];

    // Returns false if the list is not ascending, because the compacted scores are.
    bool read(const dgt_problem& problem, const Head& h, const KeyList& list) {
        const int32_t* there = list.ids;
        int64_t length = list.length;
        if (!is_full_and_ascends(list)) {
            int64_t cursor = 0;
            length = take_keys(list, cursor, FEW_KEYS, ids);
            if (!ascends(ids, length)) return false;
            there = ids;
        }
        int64_t stride = FewKeys::copies_values(problem) ? round_up(problem.channels, W) : h.value.stride / 4;
        for (int64_t j = 0; j < length; ++j) offsets[j] = there[j] * stride;
        memset(bytes, 0, sizeof bytes);
        for (int64_t j = 0; j < length; ++j) bytes[there[j]] = 1;
        count = length;
        for (int64_t i = 0; i < divide_up(problem.keys, W); ++i) bits[i] = bits_of_mask(bytes, i * W, W);
        return true;
    }

private:
    static bool ascends(const int32_t* ids, int64_t count) {
        Ints falls{};
        int64_t j = 1;
        for (; j + W <= count; j += W) falls |= (Ints)(load(ids + j) <= load(ids + j - 1));
        bool good = bits_of(falls) == 0;
        for (; j < count; ++j) good &= ids[j] > ids[j - 1];
        return good;
    }

    // All lists are, if no token is hidden.
    static bool is_full_and_ascends(const KeyList& list) {
        bool full = list.ids && !list.mask && list.length > 0 && list.ids[0] >= 0;
        return full && ascends(list.ids, list.length);
    }

    int32_t ids[FEW_KEYS];
};

struct FewBuffers {
    float* queries;  // (MOST_ROWS, width), scaled
    float* outputs;  // the same
    float* scores;   // (MOST_ROWS, keys)
    Marks* marks;
    Bf16x2* bf16_queries;  // (MOST_ROWS, D / 2), as they are

    FewBuffers(Arena& arena, const dgt_problem& problem) {
        int64_t width = round_up(problem.channels, W);
        queries = arena.take<float>(MOST_ROWS * width);
        outputs = arena.take<float>(MOST_ROWS * width);
        scores = arena.take<float>(MOST_ROWS * (FEW_KEYS + W));
        marks = arena.take<Marks>(1);
        bf16_queries = arena.take<Bf16x2>(MOST_ROWS * problem.channels / 2);
    }
};

// Compact the marked scores and pad them with -inf; returns the largest.
DGT_INLINE float move_together(float* scores, const Marks& marks, int64_t vectors) {
    Floats largest = all(-INFINITE);
    int64_t kept = 0;
    for (int64_t i = 0; i < vectors; ++i) {
        Floats x = load(scores + i * W);
        largest = larger(choose(marks.bits[i], x, all(-INFINITE)), largest);
        compress(scores + kept, x, marks.bits[i]);  // never beyond what has been read
        kept += count_bits(marks.bits[i]);
    }
    store(scores + kept, all(-INFINITE));
    return largest_lane(largest);
}

constexpr int64_t STRIDE = FEW_KEYS + W;  // of rows of scores

// Scores of some queries of a part with all keys.
inline void score_few(const dgt_problem& problem, const Head& h, const Part& part, int64_t first, int rows,
                      const FewKeys& keys, const FewBuffers& b) {
    const float* biases = h.key_bias ? keys.biases : nullptr;
    int64_t width = round_up(problem.channels, W);
    int64_t pairs = problem.channels / 2;
    int64_t vectors = divide_up(problem.keys, W);
    if (multiplies_bfloat16(problem)) {
        for (int r = 0; r < rows; ++r) copy_pairs(h.query, part.query(first + r), pairs, b.bf16_queries + r * pairs);
        row_scores(b.bf16_queries, pairs, rows, keys.bf16_panels, vectors, pairs, factor_of(problem), biases, b.scores,
                   STRIDE, nullptr);
        return;
    }
    for (int r = 0; r < rows; ++r)
        copy_row(h.query, part.query(first + r), problem.channels, factor_of(problem), b.queries + r * width);
    row_scores(b.queries, width, rows, keys.panels, vectors, problem.channels, biases, b.scores, STRIDE, nullptr);
}

// Attend from a part's queries to its keys; does nothing and returns false if their list is not ascending.
inline bool attend_few(const dgt_problem& problem, const Head& h, const Part& part, const FewKeys& keys,
                       const FewBuffers& b) {
    int64_t width = round_up(problem.channels, W);
    int64_t vectors = divide_up(problem.keys, W);
    Marks& marks = *b.marks;
    if (!marks.read(problem, h, part.keys)) return false;
    Values values = keys.values(problem, h, marks.offsets);
    int64_t used = divide_up(marks.count, W);
    int64_t pieces = divide_up(part.count, MOST_ROWS);
    int64_t first = 0;
    for (int64_t piece = 0; piece < pieces; ++piece) {
        int rows = (int)divide_up(part.count - first, pieces - piece);
        float largest[MOST_ROWS];
        float sums[MOST_ROWS];
        score_few(problem, h, part, first, rows, keys, b);
        for (int r = 0; r < rows; ++r) {
            float* scores = b.scores + r * STRIDE;
            largest[r] = move_together(scores, marks, vectors);
            Floats sum{};
            if (used) exponentials(scores, used, ALL_LANES, all(largest[r]), sum, scores);
            sums[r] = sum_of_lanes(sum);
        }
        row_weigh({b.scores, STRIDE, 1}, rows, values, marks.count, b.outputs, width, width, nullptr);
        for (int r = 0; r < rows; ++r)
            write_row(problem, h, part.query(first + r), b.outputs + r * width, largest[r], sums[r]);
        first += rows;
    }
    return true;
}

// Attend from a part's queries to its keys, in the way that costs less.
inline void attend(const dgt_problem& problem, const Head& h, const Part& part, const FewKeys& keys,
                   const FewBuffers& few, AttendBuffers& buffers) {
    if (has_few_keys(problem) && part.count <= FEW_QUERIES_OF_A_LIST && attend_few(problem, h, part, keys, few)) return;
    attend_part(problem, h, part, buffers);
}

}  // namespace dgt
