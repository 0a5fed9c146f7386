// Group the queries (section 3.1): each query joins the centroid with the largest dot product.
#pragma once

#include "interface.h"
#include "lanes.h"
#include "products.h"
#include "tokens.h"

namespace dgt {

constexpr int64_t CHUNK = 96;  // tokens packed at a time

struct GroupBuffers {
    float* rows;    // converted tokens
    float* panels;  // of one chunk
    float* scores;  // (G, CHUNK)

    GroupBuffers(Arena& arena, const dgt_problem& problem) {
        rows = arena.take<float>(W * round_up(problem.channels, W));
        panels = arena.take<float>(panels_size(CHUNK, problem.channels));
        scores = arena.take<float>(round_up(problem.groups, MOST_ROWS) * CHUNK);
    }
};

// group_ids[i] = argmax_g <query[i], centroids[g]>, ties to the lowest, for i in begin..end; -1 where the mask hides a
// query. `prefetched`, if not null, holds rows that will soon be written in another order. Returns false if a score of
// a real query is NaN.
inline bool group_queries(const Rows& query, int64_t begin, int64_t end, const uint8_t* mask, const float* centroids,
                          int64_t groups, int64_t channels, int32_t* group_ids, const GroupBuffers& buffers,
                          const Rows* prefetched) {
    bool found_nan = false;
    for (int64_t start = begin; start < end; start += CHUNK) {
        int64_t count = min(CHUNK, end - start);
        int64_t vectors = divide_up(count, W);
        pack(query, nullptr, start, count, channels, buffers.rows, buffers.panels);
        prefetch_rows(query, start + count, min(start + count + CHUNK, end), channels);
        if (prefetched) prefetch_rows(*prefetched, start, start + count, channels);
        for (int64_t g = 0; g < groups; g += MOST_ROWS) {
            int rows = (int)min<int64_t>(MOST_ROWS, groups - g);
            row_scores(centroids + g * channels, channels, rows, buffers.panels, vectors, channels, nullptr,
                       buffers.scores + g * CHUNK, CHUNK, nullptr);
        }
        for (int64_t v = 0; v < vectors; ++v) {
            const float* scores = buffers.scores + v * W;
            Bits real = bits_of_mask(mask, start + v * W, count - v * W);
            Floats best = load(scores);
            Bits nan = 0;
            for (int64_t g = 0; g < groups; ++g) {
                Floats score = load(scores + g * CHUNK);
                best = larger(score, best);
                nan |= is_nan(score);
            }
            found_nan |= (nan & real) != 0;
            Ints id{};
            Ints group = Ints{} + (int32_t)groups;
            for (int64_t g = groups - 1; g >= 0; --g) {  // downwards, so that ties end at the lowest
                group -= 1;
                id = choose(is_equal(load(scores + g * CHUNK), best), group, id);
            }
            int64_t there = min<int64_t>(W, count - v * W);
            for (int64_t i = 0; i < there; ++i) group_ids[start + v * W + i] = real >> i & 1 ? id[i] : -1;
        }
    }
    return !found_nan;
}

// Sort queries by group: those of group g are order[starts[g]..starts[g + 1]), ascending. Queries in no group are
// omitted. `starts` has G + 1 entries.
inline void sort_by_group(const int32_t* group_ids, int64_t queries, int64_t groups, int32_t* order, int32_t* starts) {
    memset(starts, 0, (size_t)(groups + 1) * sizeof(int32_t));
    for (int64_t i = 0; i < queries; ++i)
        if (group_ids[i] >= 0) ++starts[group_ids[i] + 1];
    for (int64_t g = 0; g < groups; ++g) starts[g + 1] += starts[g];
    for (int64_t i = 0; i < queries; ++i)
        if (group_ids[i] >= 0) order[starts[group_ids[i]]++] = (int32_t)i;
    for (int64_t g = groups; g > 0; --g) starts[g] = starts[g - 1];
    starts[0] = 0;
}

// A part of Eq. 3: add the normalized queries of each group to sums (G, D), and count them.
inline void add_statistics(const Rows& query, int64_t queries, const int64_t* group_ids, int64_t groups,
                           int64_t channels, float* sums, float* counts, float* row) {
    memset(sums, 0, (size_t)(groups * channels) * sizeof(float));
    memset(counts, 0, (size_t)groups * sizeof(float));
    for (int64_t i = 0; i < queries; ++i) {
        if (group_ids[i] < 0) continue;
        copy_row(query, i, channels, 1.0f, row);
        Floats squares{};
        for (int64_t d = 0; d < channels; d += W) squares += load(row + d) * load(row + d);
        float length = __builtin_sqrtf(sum_of_lanes(squares));
        float factor = 1.0f / max(length, 1e-12f);
        float* sum = sums + group_ids[i] * channels;
        for (int64_t d = 0; d < channels; d += W) {
            Bits there = first_lanes(channels - d);
            store_lanes(sum + d, load_lanes(sum + d, there) + load(row + d) * factor, there);
        }
        counts[group_ids[i]] += 1.0f;
    }
}

}  // namespace dgt
