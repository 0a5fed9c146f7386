// Clusters of a head's tokens: deterministic Lloyd's k-means with Euclidean distances.
//
// A token joins the centroid with the largest <token, c> - |c|^2 / 2; the first one wins ties. Iterations on a sample
// of the tokens, whose panels are packed once, precede one iteration on all of them.
#pragma once

#include "grouping.h"
#include "interface.h"
#include "lanes.h"
#include "products.h"
#include "tokens.h"

namespace dgt {

// Centroids of a head, in float32 whatever the type of the tokens.
struct Centroids {
    float* rows;    // (count, width), zero beyond the last channel
    float* halves;  // (count): half the squared norms
    int64_t count;
    int64_t width;

    Centroids() = default;
    Centroids(Arena& arena, int64_t clusters, int64_t channels) {
        count = clusters;
        width = round_up(channels, W);
        rows = arena.take<float>(count * width);
        halves = arena.take<float>(count);
    }

    float* row(int64_t i) const { return rows + i * width; }

    void measure() const {
        for (int64_t i = 0; i < count; ++i) {
            Floats sum{};
            for (int64_t d = 0; d < width; d += W) sum += load(row(i) + d) * load(row(i) + d);
            halves[i] = 0.5f * sum_of_lanes(sum);
        }
    }

    bool is_finite() const {
        Bits other = 0;
        for (int64_t i = 0; i < count * width; i += W) other |= is_nan(load(rows + i) - load(rows + i));
        return other == 0;
    }
};

// Number of tokens in a sample of `real` ones.
inline int64_t sample_size(const dgt_clusters& clusters, int64_t real) { return divide_up(real, clusters.every); }

struct ClusterBuffers {
    float* rows;    // converted tokens
    float* panels;  // of one chunk
    float* scores;  // (MOST_ROWS, CHUNK)
    float* sums;    // (count, width)
    int32_t* members;

    ClusterBuffers(Arena& arena, int64_t most_clusters, int64_t channels) {
        int64_t width = round_up(channels, W);
        rows = arena.take<float>(W * width);
        panels = arena.take<float>(panels_size(CHUNK, channels));
        scores = arena.take<float>(MOST_ROWS * CHUNK);
        sums = arena.take<float>(most_clusters * width);
        members = arena.take<int32_t>(most_clusters);
    }
};

// A sample of the tokens, packed for the iterations on it.
struct SampleBuffers {
    float* panels;
    int32_t* ids;

    SampleBuffers(Arena& arena, int64_t most_tokens, int64_t channels) {
        panels = arena.take<float>(panels_size(most_tokens, channels));
        ids = arena.take<int32_t>(round_up(most_tokens, W));
    }
};

// The nearest centroids of up to CHUNK tokens in panels; `ids` is padded to whole vectors.
inline void find_nearest(const float* panels, int64_t count, const Centroids& centroids, int64_t channels,
                         float* scores, int32_t* ids) {
    Floats best[CHUNK / W];
    Ints nearest[CHUNK / W];
    int64_t vectors = divide_up(count, W);
    for (int64_t v = 0; v < vectors; ++v) {
        best[v] = all(-INFINITE);
        nearest[v] = Ints{};
    }
    for (int64_t first = 0; first < centroids.count; first += MOST_ROWS) {
        int rows = (int)min<int64_t>(MOST_ROWS, centroids.count - first);
        row_scores(centroids.row(first), centroids.width, rows, panels, vectors, channels, nullptr, scores, CHUNK,
                   nullptr);
        for (int64_t v = 0; v < vectors; ++v) {
            Floats most = best[v];
            Ints id = nearest[v];
            for (int r = 0; r < rows; ++r) {
                Floats score = load(scores + r * CHUNK + v * W) - centroids.halves[first + r];
                Bits is_nearer = is_not_at_most(score, most);
                most = choose(is_nearer, score, most);
                id = choose(is_nearer, Ints{} + (int32_t)(first + r), id);
            }
            best[v] = most;
            nearest[v] = id;
        }
    }
    for (int64_t v = 0; v < vectors; ++v) store(ids + v * W, nearest[v]);
}

// Move each centroid to the mean of its members; one without members stays. Token i is numbers[i], or i if `numbers` is
// null.
inline void move_to_means(const Rows& tokens, const int32_t* numbers, int64_t count, const int32_t* ids,
                          int64_t channels, const Centroids& centroids, const ClusterBuffers& b) {
    int64_t width = centroids.width;
    memset(b.sums, 0, (size_t)(centroids.count * width) * sizeof(float));
    memset(b.members, 0, (size_t)centroids.count * sizeof(int32_t));
    for (int64_t i = 0; i < count; ++i) {
        if (ids[i] < 0) continue;
        int64_t token = numbers ? numbers[i] : i;
        float* sum = b.sums + ids[i] * width;
        for (int64_t d = 0; d < channels; d += W)
            store(sum + d, load(sum + d) + load_channels(tokens, token, d, channels));
        ++b.members[ids[i]];
    }
    for (int64_t c = 0; c < centroids.count; ++c) {
        if (!b.members[c]) continue;
        float share = 1.0f / (float)b.members[c];
        for (int64_t d = 0; d < width; d += W) store(centroids.row(c) + d, load(b.sums + c * width + d) * share);
    }
}

// Find centroids by iterating on a sample. `order` holds the `real` tokens, spread evenly.
inline void cluster_sample(const Rows& tokens, const int32_t* order, int64_t real, const dgt_clusters& clusters,
                           int64_t channels, const Centroids& centroids, const SampleBuffers& sample,
                           const ClusterBuffers& b) {
    for (int64_t c = 0; c < centroids.count; ++c)
        copy_row(tokens, order[real ? c % real : 0], channels, 1.0f, centroids.row(c));
    int64_t count = sample_size(clusters, real);
    if (clusters.steps > 0 && count > 0) pack(tokens, order, 0, count, channels, b.rows, sample.panels);
    for (int64_t step = 0; step < clusters.steps; ++step) {
        centroids.measure();
        for (int64_t start = 0; start < count; start += CHUNK)
            find_nearest(sample.panels + start * channels, min(CHUNK, count - start), centroids, channels, b.scores,
                         sample.ids + start);
        move_to_means(tokens, order, count, sample.ids, channels, centroids, b);
    }
    centroids.measure();
}

// Assign tokens begin..end to their nearest centroids; -1 where the mask hides one.
inline void join_nearest(const Rows& tokens, int64_t begin, int64_t end, const uint8_t* mask,
                         const Centroids& centroids, int64_t channels, int32_t* ids, const ClusterBuffers& b) {
    alignas(64) int32_t found[CHUNK];
    for (int64_t start = begin; start < end; start += CHUNK) {
        int64_t count = min(CHUNK, end - start);
        pack(tokens, nullptr, start, count, channels, b.rows, b.panels);
        find_nearest(b.panels, count, centroids, channels, b.scores, found);
        for (int64_t i = 0; i < count; ++i) ids[start + i] = !mask || mask[start + i] ? found[i] : -1;
    }
}

}  // namespace dgt
