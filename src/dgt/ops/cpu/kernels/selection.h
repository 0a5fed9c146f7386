// Select the keys of each group (Eq. 1): exactly the k keys with the largest dot products with the centroid.
//
// There is one pass over the keys. A group collects the keys whose score is above a threshold; when it has collected
// many, it keeps its k largest (and a few more, which is faster) and raises the threshold to the smallest of them, so
// fewer and fewer are collected.
#pragma once

#include "grouping.h"
#include "interface.h"
#include "lanes.h"
#include "products.h"
#include "tokens.h"

namespace dgt {

// A group's candidates by ascending id. They include all keys seen so far whose score is above `threshold`.
struct Candidates {
    float* scores;
    int32_t* ids;
    int64_t count;
    float threshold;
};

// Beyond this many candidates only the k largest are kept.
constexpr int64_t candidate_limit(int64_t top_k) { return max<int64_t>(256, 4 * top_k); }

// Room for the candidates of a group among this many keys.
constexpr int64_t candidate_room(int64_t top_k, int64_t keys) {
    return min(candidate_limit(top_k), round_up(keys, W)) + CHUNK + 2 * W;
}

// How many scores reach each of three bounds.
struct Counts {
    int of[3];
};

DGT_INLINE Counts count_reaching(const float* scores, int64_t vectors, const float* bounds) {
    Floats a = all(bounds[0]);
    Floats b = all(bounds[1]);
    Floats c = all(bounds[2]);
    Counts counts = {{0, 0, 0}};
    int64_t i = 0;
    for (; i + 2 <= vectors; i += 2) {  // one popcount for two vectors
        Floats x = load(scores + i * W);
        Floats y = load(scores + i * W + W);
        counts.of[0] += count_bits(is_at_least(x, a) | is_at_least(y, a) << W);
        counts.of[1] += count_bits(is_at_least(x, b) | is_at_least(y, b) << W);
        counts.of[2] += count_bits(is_at_least(x, c) | is_at_least(y, c) << W);
    }
    if (i < vectors) {
        Floats x = load(scores + i * W);
        counts.of[0] += count_bits(is_at_least(x, a));
        counts.of[1] += count_bits(is_at_least(x, b));
        counts.of[2] += count_bits(is_at_least(x, c));
    }
    return counts;
}

// These integers have the same order as the floats.
DGT_INLINE int32_t rank_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits >= 0 ? bits : INT32_MIN - bits;
}

DGT_INLINE float float_of_rank(int32_t rank) {
    int32_t bits = rank >= 0 ? rank : INT32_MIN - rank;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// State of the search for the k-th largest score: more than k scores reach `low`, fewer than k reach `high`.
struct Bracket {
    float low;
    float high;
    int64_t reaching_low;
    int64_t reaching_high;
};

// 1 / n and 1 / sqrt(n) for small n: a division would take longer than the counting.
struct Inverses {
    static constexpr int SIZE = 512;
    float one[SIZE];
    float root[SIZE];

    Inverses() {
        for (int n = 0; n < SIZE; ++n) {
            one[n] = 1.0f / (float)max(n, 1);
            root[n] = __builtin_sqrtf(one[n]);
        }
    }
};
static const Inverses INVERSES;

// Minimum and maximum of some scores, and how they are distributed in between.
struct Spread {
    float least;
    float most;
    float mean;
    float deviation;
    bool has_nan;
};

// Of the scores in this many vectors; those from `count` on equal the first.
DGT_INLINE Spread spread_of(const float* scores, int64_t vectors, int64_t count) {
    Floats first = all(scores[0]);
    Floats least = all(INFINITE);
    Floats most = all(-INFINITE);
    Floats sum{};
    Floats squares{};
    Bits nan = 0;
    for (int64_t i = 0; i < vectors; ++i) {
        Floats score = load(scores + i * W);
        Floats offset = score - first;
        least = smaller(least, score);
        most = larger(most, score);
        sum += offset;
        squares += offset * offset;
        nan |= is_nan(score);
    }
    float one = count < Inverses::SIZE ? INVERSES.one[count] : 1.0f / (float)count;
    float offset = sum_of_lanes(sum) * one;
    float variance = sum_of_lanes(squares) * one - offset * offset;
    return {smallest_lane(least), largest_lane(most), scores[0] + offset, __builtin_sqrtf(variance), nan != 0};
}

// Where the n-th largest would be if scores were normally distributed, with a margin of about a standard deviation on
// both sides. The normal distribution is close to the logistic one, whose quantiles are logarithms.
DGT_INLINE void guess_bounds(const Spread& spread, int64_t count, int64_t n, float* bounds) {
    constexpr float LOGISTIC = 0.5875f;
    float reaching = (float)n;
    float rest = (float)(count - n);
    float quantile = LOGISTIC * __builtin_logf(rest / reaching);
    float margin = 0.9f * LOGISTIC * __builtin_sqrtf((float)count / (reaching * rest));
    for (int i = 0; i < 3; ++i) bounds[i] = spread.mean + spread.deviation * (quantile + (float)(i - 1) * margin);
}

// Whether the bounds ascend inside a bracket.
DGT_INLINE bool fit(const float* bounds, const Bracket& bracket) {
    bool ascending = bounds[0] > bracket.low && bounds[0] < bounds[1] && bounds[1] < bounds[2];
    return ascending && bounds[2] < bracket.high;
}

// Three bounds inside a bracket: first the quarters; then where the k-th largest would be if scores were evenly
// distributed, with a margin of about a standard deviation on both sides. If few floats are left in between, or
// infinite ones, bisect by rank.
DGT_INLINE void choose_bounds(const Bracket& bracket, int64_t top_k, int turn, float* bounds) {
    float width = bracket.high - bracket.low;
    float middle = 0.5f;
    float margin = 0.25f;
    if (turn % 3) {
        int64_t between = max<int64_t>(1, bracket.reaching_low - bracket.reaching_high);
        bool small = between < Inverses::SIZE;
        float one = small ? INVERSES.one[between] : 1.0f / (float)between;
        float root = small ? INVERSES.root[between] : __builtin_sqrtf(one);
        middle = (float)(bracket.reaching_low - top_k) * one;
        margin = min(0.75f * root, 0.6f * min(middle, 1 - middle));
    }
    for (int i = 0; i < 3; ++i) bounds[i] = bracket.low + width * (middle + (float)(i - 1) * margin);
    if (turn <= 12 && fit(bounds, bracket)) return;
    int64_t first = rank_of(bracket.low);
    int64_t ranks = rank_of(bracket.high) - first;
    for (int i = 0; i < 3; ++i) bounds[i] = float_of_rank((int32_t)(first + max<int64_t>(1, ranks * (i + 1) / 4)));
}

// The scores from `low` to below `high`, at most W of them, compacted: the n-th largest, how many are larger, and how
// many reach it.
struct Place {
    float score;
    int64_t larger;
    int64_t reaching;
};

DGT_INLINE Place find_place(const float* scores, int64_t vectors, const Bracket& bracket, int64_t n) {
    alignas(64) float inside[2 * W];
    int64_t count = 0;
    for (int64_t i = 0; i < vectors; ++i) {
        Floats score = load(scores + i * W);
        Bits bits = is_at_least(score, all(bracket.low)) & ~is_at_least(score, all(bracket.high));
        compress(inside + count, score, bits);
        count += count_bits(bits);
    }
    Floats score = choose(first_lanes(count), load(inside), all(-INFINITE));
    Ints larger_than{};
    Ints at_least{};
    for (int64_t i = 0; i < count; ++i) {
        Floats other = all(inside[i]);
        larger_than -= (Ints)(other > score);
        at_least -= (Ints)(other >= score);
    }
    int32_t wanted = (int32_t)n;
    Bits found = bits_of((larger_than < wanted) & (at_least >= wanted));
    int lane = __builtin_ctz(found);  // count is at least n, so a lane is found
    return {score[lane], larger_than[lane], at_least[lane]};
}

// Keep the candidates that reach a bound; `with_scores` if the scores are needed again.
DGT_INLINE void keep_reaching(Candidates& found, int64_t vectors, float bound, bool with_scores) {
    int64_t kept = 0;
    for (int64_t i = 0; i < vectors; ++i) {
        Floats score = load(found.scores + i * W);
        Bits reach = is_at_least(score, all(bound));
        if (with_scores) compress(found.scores + kept, score, reach);
        compress(found.ids + kept, load(found.ids + i * W), reach);
        kept += count_bits(reach);
    }
    found.count = kept;
    found.threshold = bound;
}

// Keep the candidates above a bound, and the first `room` of those equal to it.
DGT_INLINE void keep_above_and_first(Candidates& found, int64_t vectors, float bound, int64_t room) {
    int64_t kept = 0;
    for (int64_t i = 0; i < vectors; ++i) {
        Floats score = load(found.scores + i * W);
        Ints id = load(found.ids + i * W);
        Bits equal = is_equal(score, all(bound));
        Bits first = lowest_bits(equal, (int)min<int64_t>(room, W));
        Bits keep = (is_at_least(score, all(bound)) & ~equal) | first;
        room -= count_bits(first);
        compress(found.scores + kept, score, keep);
        compress(found.ids + kept, id, keep);
        kept += count_bits(keep);
    }
    found.count = kept;
    found.threshold = bound;
}

// Keep the k largest in order, ties to the lowest id; with `slack`, at least these and at most that many more. Once k
// or more reach a bound, no later score at or below it can be among the k largest. If a score is NaN, keeps none and
// returns false.
inline bool keep_largest(Candidates& found, int64_t top_k, int64_t slack) {
    int64_t count = found.count;
    int64_t vectors = divide_up(count, W);
    for (int64_t i = count; i < vectors * W; ++i) found.scores[i] = found.scores[0];
    Spread spread = spread_of(found.scores, vectors, count);
    if (spread.has_nan) {
        found.count = 0;
        return false;
    }
    if (count <= top_k) return true;
    for (int64_t i = count; i < vectors * W; ++i) found.scores[i] = -INFINITE;

    Bracket bracket = {spread.least, float_of_rank(rank_of(spread.most) + 1), count, 0};
    for (int turn = 0; bracket.reaching_low - bracket.reaching_high > W; ++turn) {
        if ((int64_t)rank_of(bracket.high) - rank_of(bracket.low) <= 1) break;  // all remaining scores are equal
        float bounds[3];
        if (turn == 0) guess_bounds(spread, count, min(top_k + slack / 2, count - 1), bounds);
        if (turn > 0 || !fit(bounds, bracket)) choose_bounds(bracket, top_k, turn, bounds);
        Counts counts = count_reaching(found.scores, vectors, bounds);
        float bound = 0.0f;
        bool good = false;
        for (int i = 0; i < 3; ++i) {  // branch-free: these conditions are unpredictable
            int64_t now = counts.of[i];
            bracket.low = now > top_k ? bounds[i] : bracket.low;
            bracket.reaching_low = now > top_k ? now : bracket.reaching_low;
            bool fits = now >= top_k && now <= top_k + slack;
            bound = fits ? bounds[i] : bound;
            good |= fits;
        }
        if (good) {
            keep_reaching(found, vectors, bound, slack > 0);
            return true;
        }
        for (int i = 2; i >= 0; --i) {
            bracket.high = counts.of[i] < top_k ? bounds[i] : bracket.high;
            bracket.reaching_high = counts.of[i] < top_k ? counts.of[i] : bracket.reaching_high;
        }
    }
    int64_t between = bracket.reaching_low - bracket.reaching_high;
    Place place = {bracket.low, 0, between};
    if (between <= W) place = find_place(found.scores, vectors, bracket, top_k - bracket.reaching_high);
    if (bracket.reaching_high + place.reaching == top_k) keep_reaching(found, vectors, place.score, slack > 0);
    else keep_above_and_first(found, vectors, place.score, top_k - bracket.reaching_high - place.larger);
    return true;
}

// Add the scores of a vector that are real and above the threshold, or NaN; the first lane has id `first`.
DGT_INLINE void add_candidates(Candidates& found, Floats score, Bits real, int32_t first) {
    Bits above = is_not_at_most(score, all(found.threshold)) & real;
    compress(found.scores + found.count, score, above);
    compress(found.ids + found.count, lane_numbers() + first, above);
    found.count += count_bits(above);
}

struct SelectBuffers {
    float* rows;    // converted tokens
    float* panels;  // of one chunk
    float* scores;  // (MOST_ROWS, MOST_VECTORS W): scores of some groups

    SelectBuffers(Arena& arena, const dgt_problem& problem) {
        rows = arena.take<float>(W * round_up(problem.channels, W));
        panels = arena.take<float>(panels_size(CHUNK, problem.channels));
        scores = arena.take<float>(MOST_ROWS * MOST_VECTORS * W);
    }
};

// Collect the candidates of each group among keys begin..end; `prefetched`, if not null, holds rows that will soon be
// read in no particular order. Returns false if a score is NaN.
inline bool collect_candidates(const Rows& key, int64_t begin, int64_t end, const uint8_t* mask, const float* centroids,
                               int64_t groups, int64_t channels, int64_t top_k, Candidates* candidates,
                               const SelectBuffers& buffers, const Rows* prefetched) {
    constexpr int64_t BESIDE = vectors_beside(MOST_ROWS);
    int64_t limit = candidate_limit(top_k);
    bool good = true;
    for (int64_t g = 0; g < groups; ++g) {
        candidates[g].count = 0;
        candidates[g].threshold = -INFINITE;
    }
    for (int64_t start = begin; start < end; start += CHUNK) {
        int64_t count = min(CHUNK, end - start);
        int64_t vectors = divide_up(count, W);
        pack(key, nullptr, start, count, channels, buffers.rows, buffers.panels);
        prefetch_rows(key, start + count, min(start + count + CHUNK, end), channels);
        if (prefetched) prefetch_rows(*prefetched, start, start + count, channels);
        Bits real[CHUNK / W];
        for (int64_t v = 0; v < vectors; ++v) real[v] = bits_of_mask(mask, start + v * W, count - v * W);
        for (int64_t g = 0; g < groups; g += MOST_ROWS) {
            int rows = (int)min<int64_t>(MOST_ROWS, groups - g);
            for (int64_t first = 0; first < vectors; first += BESIDE) {
                int64_t beside = min(BESIDE, vectors - first);
                SCORES[rows - 1][beside - 1](centroids + g * channels, channels, buffers.panels + first * channels * W,
                                             channels, nullptr, buffers.scores, BESIDE * W, nullptr);
                for (int r = 0; r < rows; ++r) {
                    const float* scores = buffers.scores + r * BESIDE * W;
                    Candidates found = candidates[g + r];
                    for (int64_t v = 0; v < beside; ++v)
                        add_candidates(found, load(scores + v * W), real[first + v],
                                       (int32_t)(start + (first + v) * W));
                    candidates[g + r] = found;
                }
            }
        }
        for (int64_t g = 0; g < groups; ++g)
            if (candidates[g].count >= limit) good &= keep_largest(candidates[g], top_k, 1 + top_k / 4);
    }
    return good;
}

// Write a finished list: the prefix (-1 for a masked token), the selected keys, then -1.
inline void write_list(const Candidates& found, const dgt_problem& problem, const uint8_t* mask, int32_t* list) {
    for (int64_t j = 0; j < problem.prefix; ++j) list[j] = mask && !mask[j] ? -1 : (int32_t)j;
    int32_t* selected = list + problem.prefix;
    int64_t places = problem.list_length - problem.prefix;
    int64_t count = min(found.count, places);  // more if NaN stopped the selection
    memcpy(selected, found.ids, (size_t)count * sizeof(int32_t));
    for (int64_t j = count; j < places; ++j) selected[j] = -1;
}

}  // namespace dgt
