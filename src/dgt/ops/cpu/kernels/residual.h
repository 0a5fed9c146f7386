// The keys that a group does not select, summarized as one residual key per cluster of keys.
//
// For the mean query m of a group, scale s, and the members U of a cluster that the group did not select:
//
//   Z = sum_U exp(s m.k),   k' = sum_U exp(s m.k) k / Z,   v' = sum_U exp(s m.k) v / Z,   bias = log Z - s m.k'
//
// Keys are sorted by cluster, as panels and as rows next to their values, so that a cluster is one run of both. A few
// groups are processed at a time: their scores with all keys select the exact keys, and the other keys are summed up.
//
// The exact keys of a group are those with the largest s m.k + log(|k - center|^2 |v - center|), with the centers of
// the key's cluster: the further a key is from what represents it, the more is lost by leaving it out.
#pragma once

#include "attention.h"
#include "clustering.h"
#include "interface.h"
#include "products.h"
#include "selection.h"

namespace dgt {

constexpr int64_t GROUPS_AT_ONCE = 16;         // their scores share the L2 cache
constexpr int64_t SAMPLED = 4;                 // one in so many members, for covariances
constexpr float MOST_SPREAD = 2.0f;            // of what is left of a cluster, relative to all of it
constexpr float LEAST_LOSS = 1.17549435e-38f;  // squared: the least normal float

// The real keys after the prefix of one head, sorted by cluster.
struct KeyOrder {
    int64_t* count;   // number of keys
    int32_t* order;   // their numbers, counted from the first after the prefix
    int32_t* starts;  // start of each cluster, and the end

    KeyOrder() = default;
    KeyOrder(Arena& arena, int64_t keys, int64_t clusters) {
        count = arena.take<int64_t>(1);
        order = arena.take<int32_t>(keys);
        starts = arena.take<int32_t>(max<int64_t>(1, clusters) + 1);
    }

    // Sort by cluster; keys of cluster -1 are omitted. Without ids, all keys that the mask shows are in one cluster.
    void sort(const int32_t* ids, int64_t keys, int64_t clusters, const uint8_t* mask) const {
        if (ids) {
            sort_by_group(ids, keys, clusters, order, starts);
            *count = starts[clusters];
            return;
        }
        int64_t found = 0;
        for (int64_t i = 0; i < keys; ++i)
            if (!mask || mask[i]) order[found++] = (int32_t)i;
        starts[0] = 0;
        starts[1] = (int32_t)found;
        *count = found;
    }
};

// Keys and values side by side, (count, 2, width): of float32, or as they are where bfloat16 is multiplied.
struct PairTable {
    float* floats;
    uint16_t* halves;
    int64_t width;
    bool bf16;

    PairTable() = default;
    PairTable(Arena& arena, int64_t count, int64_t channels, bool as_bf16) {
        width = round_up(channels, W);
        bf16 = as_bf16;
        floats = arena.take<float>(bf16 ? 0 : count * 2 * width);
        halves = arena.take<uint16_t>(bf16 ? count * 2 * width : 0);
    }

    const void* row(int64_t place) const {
        return bf16 ? (const void*)(halves + 2 * place * width) : (const void*)(floats + 2 * place * width);
    }

    // Numbers d.. of a pair, W of them.
    Floats at(int64_t place, int64_t d) const {
        return bf16 ? floats_of_bfloat16(load_halves(halves + 2 * place * width + d, W))
                    : load(floats + 2 * place * width + d);
    }

    void copy(const Rows& key, const Rows& value, int64_t token, int64_t channels, int64_t place) const {
        if (!bf16) {
            copy_row(key, token, channels, 1.0f, floats + 2 * place * width);
            copy_row(value, token, channels, 1.0f, floats + (2 * place + 1) * width);
            return;
        }
        copy_halves(key, token, channels, halves + 2 * place * width);
        copy_halves(value, token, channels, halves + (2 * place + 1) * width);
    }
};

// The same with their tokens.
struct SortedKeys : KeyOrder {
    float* panels;         // keys
    PairTable pairs;       // (count)
    PairTable prefix;      // those of the prefix
    Bf16x2* bf16_members;  // the pairs of a cluster, two beside each other: (2, width) from `first_member` on
    float* centers;        // (clusters, 2, width): means of the keys and values of each cluster
    float* losses;         // (count): logarithms of what leaving a key out loses, in units of log 2

    // To first order only.
    float* squares;      // (count): squared distances of keys from the centers
    float* spreads;      // (clusters): their means
    float* covariances;  // (channels, clusters, width), of keys with values

    SortedKeys() = default;
    SortedKeys(Arena& arena, int64_t keys, int64_t clusters, int64_t prefix_keys, int64_t channels, bool first_order,
               bool bf16)
        : KeyOrder(arena, keys, clusters),
          pairs(arena, keys, channels, bf16),
          prefix(arena, prefix_keys, channels, bf16) {
        panels = arena.take<float>(panels_size(keys, channels));
        bf16_members = arena.take<Bf16x2>(bf16 ? (keys + clusters + 1) / 2 * 2 * round_up(channels, W) : 0);
        centers = arena.take<float>(clusters * 2 * round_up(channels, W));
        losses = arena.take<float>(round_up(keys, W));
        squares = arena.take<float>(first_order ? keys : 0);
        spreads = arena.take<float>(first_order ? clusters : 0);
        covariances = arena.take<float>(first_order ? channels * clusters * round_up(channels, W) : 0);
    }

    bool bf16() const { return pairs.bf16; }

    // Pack places begin..end; begin is a multiple of W.
    void lay_out(const Rows& key, const Rows& value, int64_t begin, int64_t end, int64_t channels, float* rows) const {
        pack(key, order + begin, 0, end - begin, channels, rows, panels + begin * channels);
        for (int64_t i = begin; i < end; ++i) {
            int64_t ahead = order[min(i + NEAR, end - 1)];
            prefetch(key, ahead, channels, false);
            prefetch(value, ahead, channels, false);
            pairs.copy(key, value, order[i], channels, i);
        }
    }

    // Where the members of a cluster begin; one is left alone where their number is odd.
    Bf16x2* first_member(int64_t cluster) const {
        return bf16_members + (starts[cluster] + cluster + 1) / 2 * 2 * pairs.width;
    }

    // Lay the members of a cluster beside each other.
    void join_members(int64_t cluster) const {
        Bf16x2* to = first_member(cluster);
        int64_t end = starts[cluster + 1];
        for (int64_t i = starts[cluster]; i < end; i += 2, to += 2 * pairs.width) {
            const void* other = i + 1 == end ? nullptr : pairs.row(i + 1);
            join_rows((const uint16_t*)pairs.row(i), (const uint16_t*)other, 2 * pairs.width, to);
        }
    }

    // The center of a cluster, and what is lost of each member. Without residual keys, nothing tells them apart.
    void weigh_losses(int64_t cluster, int64_t clusters, int64_t channels, bool first_order) const {
        int64_t width = round_up(channels, W);
        if (clusters == 0) {
            memset(losses, 0, (size_t)*count * sizeof(float));
            return;
        }
        int64_t start = starts[cluster];
        int64_t end = starts[cluster + 1];
        float* center = centers + cluster * 2 * width;
        memset(center, 0, (size_t)(2 * width) * sizeof(float));
        float share = 1.0f / (float)max<int64_t>(1, end - start);
        for (int64_t i = start; i < end; ++i) {
            for (int64_t d = 0; d < 2 * width; d += W) store(center + d, load(center + d) + pairs.at(i, d));
        }
        for (int64_t d = 0; d < 2 * width; d += W) store(center + d, load(center + d) * share);
        float sum = 0.0f;
        for (int64_t i = start; i < end; ++i) {
            float square = distance(i, 0, center);
            losses[i] = 0.5f * logarithm(square * square * distance(i, width, center + width));
            sum += square;
            if (first_order) squares[i] = square;
        }
        if (first_order) spreads[cluster] = sum * share;
    }

    // Of the key or value of a pair, which begins at `start`, from its center: |a - b|^2
    float distance(int64_t place, int64_t start, const float* center) const {
        Floats sum{};
        for (int64_t d = 0; d < pairs.width; d += W) {
            Floats offset = pairs.at(place, start + d) - load(center + d);
            sum += offset * offset;
        }
        return sum_of_lanes(sum);
    }

    // |a - b|^2
    static float distance(const float* a, const float* b, int64_t width) {
        Floats sum{};
        for (int64_t d = 0; d < width; d += W) {
            Floats offset = load(a + d) - load(b + d);
            sum += offset * offset;
        }
        return sum_of_lanes(sum);
    }

    // In units of log 2; a large negative number of what is zero, or not finite.
    static float logarithm(float x) {
        return LOG2_E * __builtin_logf(x >= LEAST_LOSS && x < INFINITE ? x : LEAST_LOSS);
    }
};

// Working memory for a few groups of one head.
struct GroupsBuffers {
    int64_t clusters;
    int64_t width;
    int64_t stride;          // of the rows of scores
    float* means;            // (GROUPS_AT_ONCE, width), times scale and log2(e)
    float* scores;           // (GROUPS_AT_ONCE, stride), in units of log 2
    float* weights;          // (MOST_ROWS, longest cluster)
    uint16_t* bf16_weights;  // in place of these
    float* pairs;            // (GROUPS_AT_ONCE, clusters, 2, width): residual keys and values
    float* biases;           // (GROUPS_AT_ONCE, clusters), in units of log 2
    float* masses;           // (GROUPS_AT_ONCE, clusters): of residual keys for the means, in units of log 2
    float* spreads;          // (GROUPS_AT_ONCE, clusters): how far apart the members of residual keys are
    float* covariances;      // (GROUPS_AT_ONCE, channels, width): those of the clusters, mixed
    Candidates* candidates;  // (GROUPS_AT_ONCE)
    const void** list;       // pairs that a group attends to
    float* list_biases;      // their biases
    float* list_spreads;     // of residual keys
    int64_t mixed_size;      // from one of the mixed covariances to the next
    bool first_order;

    GroupsBuffers(Arena& arena, const dgt_problem& problem, int64_t keys, int64_t top_k, int64_t prefix,
                  bool to_first_order, bool bf16) {
        int64_t channels = problem.channels;
        first_order = to_first_order;
        clusters = problem.key_clusters.count;
        width = round_up(channels, W);
        stride = round_up(keys, W) + W;
        if (stride % 1024 == 0) stride += W;  // rows exactly a page apart would compete for the same cache sets
        means = arena.take<float>(GROUPS_AT_ONCE * width);
        scores = arena.take<float>(GROUPS_AT_ONCE * stride);
        int64_t all_weights = clusters ? MOST_ROWS * round_up(keys, W) : 0;
        weights = arena.take<float>(bf16 ? 0 : all_weights);
        bf16_weights = arena.take<uint16_t>(bf16 ? all_weights : 0);
        pairs = arena.take<float>(GROUPS_AT_ONCE * clusters * 2 * width);
        biases = arena.take<float>(GROUPS_AT_ONCE * clusters);
        mixed_size = channels * width + W;  // rows exactly pages apart would compete for the same cache sets
        masses = arena.take<float>(first_order ? GROUPS_AT_ONCE * clusters : 0);
        spreads = arena.take<float>(first_order ? GROUPS_AT_ONCE * clusters : 0);
        covariances = arena.take<float>(first_order ? GROUPS_AT_ONCE * mixed_size : 0);
        list_spreads = arena.take<float>(first_order ? clusters + W : 0);
        candidates = arena.take<Candidates>(GROUPS_AT_ONCE);
        list = arena.take<const void*>(prefix + top_k + clusters);
        list_biases = arena.take<float>(prefix + top_k + clusters);
        int64_t room = candidate_room(top_k, keys);
        float* candidate_scores = arena.take<float>(GROUPS_AT_ONCE * room);
        int32_t* candidate_ids = arena.take<int32_t>(GROUPS_AT_ONCE * room);
        for (int64_t g = 0; candidates && g < GROUPS_AT_ONCE; ++g)
            candidates[g] = {candidate_scores + g * room, candidate_ids + g * room, 0, 0.0f};
    }

    // Remove the exact keys of a group from its scores.
    void hide_selected(int64_t group) const {
        const Candidates& found = candidates[group];
        for (int64_t j = 0; j < found.count; ++j) scores[group * stride + found.ids[j]] = -INFINITE;
    }

    float* mixed(int64_t group) const { return covariances + group * mixed_size; }

    float* residual(int64_t group, int64_t cluster) const { return pairs + (group * clusters + cluster) * 2 * width; }
};

// Score the means of some groups with the keys in places begin..end; begin is a multiple of W.
DGT_INLINE void score_keys(const SortedKeys& keys, int64_t begin, int64_t end, int64_t groups, int64_t channels,
                           const GroupsBuffers& b) {
    for (int64_t first = 0; first < groups; first += MOST_ROWS) {
        int rows = (int)min<int64_t>(MOST_ROWS, groups - first);
        row_scores(b.means + first * b.width, b.width, rows, keys.panels + begin * channels, divide_up(end - begin, W),
                   channels, nullptr, b.scores + first * b.stride + begin, b.stride, nullptr);
    }
}

// Score the means of some groups with all keys; the k keys of each with the largest scores and losses together become
// its candidates, by ascending place.
// Returns false if a score is NaN.
inline bool score_and_select(const SortedKeys& keys, int64_t groups, int64_t channels, int64_t top_k,
                             const GroupsBuffers& b) {
    int64_t limit = candidate_limit(top_k);
    int64_t total = *keys.count;
    bool good = true;
    for (int64_t g = 0; g < groups; ++g) {
        b.candidates[g].count = 0;
        b.candidates[g].threshold = -INFINITE;
    }
    for (int64_t start = 0; start < total; start += CHUNK) {
        int64_t count = min(CHUNK, total - start);
        int64_t vectors = divide_up(count, W);
        score_keys(keys, start, start + count, groups, channels, b);
        for (int64_t g = 0; g < groups; ++g) {
            Candidates found = b.candidates[g];
            const float* scores = b.scores + g * b.stride + start;
            for (int64_t v = 0; v < vectors; ++v)
                add_candidates(found, load(scores + v * W) + load(keys.losses + start + v * W),
                               first_lanes(count - v * W), (int32_t)(start + v * W));
            if (found.count >= limit) good &= keep_largest(found, top_k, 1 + top_k / 4);
            b.candidates[g] = found;
        }
    }
    for (int64_t g = 0; g < groups; ++g) good &= keep_largest(b.candidates[g], top_k, 0);
    return good;
}

// Weights as they are kept: of float32, or rounded to bfloat16.
DGT_INLINE Floats keep(float* to, Floats x) {
    store(to, x);
    return x;
}
DGT_INLINE Floats keep(uint16_t* to, Floats x) {
    Halves rounded = bfloat16_of_floats(x);
    *(UnalignedHalves*)to = rounded;
    return floats_of_bfloat16(rounded);
}
DGT_INLINE Floats kept(const float* from) { return load(from); }
DGT_INLINE Floats kept(const uint16_t* from) { return floats_of_bfloat16(load_halves(from, W)); }

// Weights of a cluster's members for one group, relative to the largest, and their sum; returns the largest score, or
// -inf if no member is left.
template <class Weight>
DGT_INLINE float weigh_members(const float* scores, int64_t count, Weight* weights, float& mass) {
    int64_t vectors = divide_up(count, W);
    Bits last = first_lanes(count - (vectors - 1) * W);
    Floats most = choose(last, load(scores + (vectors - 1) * W), all(-INFINITE));
    for (int64_t i = 0; i < vectors - 1; ++i) most = larger(most, load(scores + i * W));
    float largest = largest_lane(most);
    Floats shift = all(largest == -INFINITE ? 0.0f : largest);
    Floats sum{};
    for (int64_t i = 0; i < vectors - 1; ++i) {
        sum += keep(weights + i * W, power_of_two(load(scores + i * W) - shift));
    }
    Floats weight = choose(last, power_of_two(load(scores + (vectors - 1) * W) - shift), Floats{});
    mass = sum_of_lanes(sum + keep(weights + (vectors - 1) * W, weight));
    return largest;
}

// Divide one group's sums over one cluster by their mass; returns the bias of the residual key.
DGT_INLINE float finish_residual(const float* mean, float largest, float mass, int64_t width, float* pair) {
    if (largest == -INFINITE) {
        memset(pair, 0, (size_t)(2 * width) * sizeof(float));
        return -INFINITE;
    }
    float share = 1.0f / mass;
    Floats product{};
    for (int64_t d = 0; d < width; d += W) {
        Floats key = load(pair + d) * share;
        product += key * load(mean + d);
        store(pair + d, key);
        store(pair + width + d, load(pair + width + d) * share);
    }
    return largest + LOG2_E * __builtin_logf(mass) - sum_of_lanes(product);
}

// How far apart the members of a residual key are, by their weights: sum of p |k - center|^2, less |k' - center|^2.
template <class Weight>
DGT_INLINE float spread_of_members(const Weight* weights, const float* squares, int64_t count, float mass,
                                   const float* key, const float* center, int64_t width) {
    int64_t vectors = divide_up(count, W);
    Bits last = first_lanes(count - (vectors - 1) * W);
    Floats sum{};
    for (int64_t i = 0; i < vectors - 1; ++i) sum += kept(weights + i * W) * load(squares + i * W);
    int64_t rest = (vectors - 1) * W;
    sum += kept(weights + rest) * load_lanes(squares + rest, last);
    return max(0.0f, sum_of_lanes(sum) / mass - SortedKeys::distance(key, center, width));
}

// Sums of a cluster's members, by weights of some groups.
DGT_INLINE void sum_up_members(const SortedKeys& keys, int64_t cluster, int64_t count, const float* weights,
                               int64_t stride, int rows, float* sums, int64_t sums_stride) {
    int64_t width = 2 * keys.pairs.width;
    Values members = {keys.pairs.floats + keys.starts[cluster] * width, nullptr, width};
    row_weigh(Weights{weights, stride, 1}, rows, members, count, sums, sums_stride, width, nullptr);
}
DGT_INLINE void sum_up_members(const SortedKeys& keys, int64_t cluster, int64_t count, const uint16_t* weights,
                               int64_t stride, int rows, float* sums, int64_t sums_stride) {
    int64_t width = 2 * keys.pairs.width;
    Bf16Values members = {keys.first_member(cluster), nullptr, width};
    row_weigh(Bf16Weights{(const Bf16x2*)weights, stride / 2, 1}, rows, members, divide_up(count, 2), sums, sums_stride,
              width, nullptr);
}

template <class Weight>
void sum_up_clusters_by(const SortedKeys& keys, int64_t groups, const GroupsBuffers& b, Weight* weights) {
    for (int64_t c = 0; c < b.clusters; ++c) {
        int64_t start = keys.starts[c];
        int64_t count = keys.starts[c + 1] - start;
        int64_t stride = round_up(count, W);
        for (int64_t first = 0; first < groups; first += MOST_ROWS) {
            int rows = (int)min<int64_t>(MOST_ROWS, groups - first);
            float largest[MOST_ROWS];
            float mass[MOST_ROWS];
            for (int r = 0; r < rows; ++r) {
                const float* scores = b.scores + (first + r) * b.stride + start;
                largest[r] = -INFINITE;
                if (count) largest[r] = weigh_members(scores, count, weights + r * stride, mass[r]);
            }
            sum_up_members(keys, c, count, weights, stride, rows, b.residual(first, c), b.clusters * 2 * b.width);
            for (int r = 0; r < rows; ++r) {
                int64_t g = first + r;
                int64_t place = g * b.clusters + c;
                float* pair = b.residual(g, c);
                b.biases[place] = finish_residual(b.means + g * b.width, largest[r], mass[r], b.width, pair);
                if (!b.first_order) continue;
                bool is_empty = largest[r] == -INFINITE;
                b.masses[place] = is_empty ? -INFINITE : largest[r] + LOG2_E * __builtin_logf(mass[r]);
                b.spreads[place] = is_empty ? 0.0f
                                            : spread_of_members(weights + r * stride, keys.squares + start, count,
                                                                mass[r], pair, keys.centers + c * 2 * b.width, b.width);
            }
        }
    }
}

// Residual keys, values, and biases of some groups, from their scores, which are -inf for the exact keys.
inline void sum_up_clusters(const SortedKeys& keys, int64_t groups, const GroupsBuffers& b) {
    if (keys.bf16()) sum_up_clusters_by(keys, groups, b, b.bf16_weights);
    else sum_up_clusters_by(keys, groups, b, b.weights);
}

}  // namespace dgt
