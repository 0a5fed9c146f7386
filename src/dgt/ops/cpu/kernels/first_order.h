// What residual keys lose to first order in q - m, the offset of a query from the mean of its group.
//
// A residual key carries the mean value of its members, and the mass that they have to first order. What that loses is,
// with the center and the covariance C = mean of (k - center)(v - center)^T of the keys and values of each cluster,
//
//   of the mass    h t,                      h = s^2 |q - m|^2 / 2 D,   t = sum_U p |k - k'|^2
//   of the values  s w J^T (q - m),          J = sum of (Z / sum of Z) (t / spread) C over the clusters
//
// where p = exp(s m.k) / Z, `spread` is t of all members with equal weights, and w the weight that the query gives to
// all residual keys. h is added to their scores in units of t, at most 1 at the largest. The covariances are shared by
// all groups, and estimated from one in SAMPLED members.
#pragma once

#include "attention.h"
#include "products.h"
#include "residual.h"

namespace dgt {

// The covariance of a cluster from some of its members, centered.
struct CovarianceBuffers {
    static constexpr int64_t SAMPLES = 64;  // at a time
    float* samples;                         // (SAMPLES, 2, width)

    CovarianceBuffers(Arena& arena, const dgt_problem& problem) {
        samples = arena.take<float>(is_first_order(problem) ? SAMPLES * 2 * round_up(problem.channels, W) : 0);
    }
};

// Row d of the covariances of all clusters stands together: (channels, clusters, width).
inline void estimate_covariance(const SortedKeys& keys, int64_t cluster, int64_t clusters, int64_t channels,
                                const CovarianceBuffers& b) {
    int64_t width = round_up(channels, W);
    int64_t end = keys.starts[cluster + 1];
    float share = 1.0f / (float)max<int64_t>(1, divide_up(end - keys.starts[cluster], SAMPLED));
    const float* center = keys.centers + cluster * 2 * width;
    float* covariance = keys.covariances + cluster * width;
    float ones[MOST_ROWS];
    for (float& one : ones) one = 1.0f;
    const float* fades = nullptr;
    for (int64_t next = keys.starts[cluster]; next < end || !fades; fades = ones) {
        int64_t count = 0;
        for (; next < end && count < CovarianceBuffers::SAMPLES; next += SAMPLED, ++count) {
            float* sample = b.samples + 2 * count * width;
            for (int64_t d = 0; d < width; d += W)
                store(sample + d, (keys.pairs.at(next, d) - load(center + d)) * share);
            for (int64_t d = width; d < 2 * width; d += W) store(sample + d, keys.pairs.at(next, d) - load(center + d));
        }
        for (int64_t d = 0; d < channels; d += MOST_ROWS) {
            int rows = (int)min<int64_t>(MOST_ROWS, channels - d);
            row_weigh({b.samples + d, 1, 2 * width}, rows, {b.samples + width, nullptr, 2 * width}, count,
                      covariance + d * clusters * width, clusters * width, width, fades);
        }
    }
}

// J of some groups, in units of log 2, from the masses and the spreads of their residual keys.
inline void mix_covariances(const SortedKeys& keys, int64_t groups, int64_t channels, const GroupsBuffers& b) {
    for (int64_t g = 0; g < groups; ++g) {
        float* weights = b.masses + g * b.clusters;
        const float* spreads = b.spreads + g * b.clusters;
        float largest = -INFINITE;
        for (int64_t c = 0; c < b.clusters; ++c) largest = max(largest, weights[c]);
        float sum = 0.0f;
        for (int64_t c = 0; c < b.clusters; ++c) {
            weights[c] = weights[c] == -INFINITE ? 0.0f : __builtin_exp2f(weights[c] - largest);
            sum += weights[c];
        }
        for (int64_t c = 0; c < b.clusters; ++c) {
            float ratio = keys.spreads[c] > 0.0f ? min(spreads[c] / keys.spreads[c], MOST_SPREAD) : 0.0f;
            weights[c] *= sum > 0.0f ? LN_2 * ratio / sum : 0.0f;
        }
    }
    for (int64_t d = 0; d < channels; ++d)
        for (int64_t first = 0; first < groups; first += MOST_ROWS) {
            int rows = (int)min<int64_t>(MOST_ROWS, groups - first);
            row_weigh({b.masses + first * b.clusters, b.clusters, 1}, rows,
                      {keys.covariances + d * b.clusters * b.width, nullptr, b.width}, b.clusters,
                      b.mixed(first) + d * b.width, b.mixed_size, b.width, nullptr);
        }
}

// The offsets of a part's queries from the mean of their group, in units of log 2, and h of each; `largest` is the
// largest t.
inline void measure_offsets(const dgt_problem& problem, int64_t count, const float* mean, float largest,
                            const AttendBuffers& b) {
    int64_t width = round_up(problem.channels, W);
    float factor = 0.5f * LN_2 * LN_2 / (float)problem.channels;
    for (int64_t r = 0; r < count; ++r) {
        Floats squares{};
        for (int64_t d = 0; d < width; d += W) {
            Floats offset = load(b.queries + r * width + d) - load(mean + d);
            squares += offset * offset;
            store(b.offsets + r * width + d, offset);
        }
        b.heights[r] = LOG2_E * min(factor * sum_of_lanes(squares), 1.0f / largest);
    }
}

// Add what the values lose, after the residual keys and before all others: the sums are still theirs alone.
inline void add_lost_values(const dgt_problem& problem, int64_t count, const float* mixed, const AttendBuffers& b) {
    int64_t width = round_up(problem.channels, W);
    float ones[MOST_ROWS];
    for (float& one : ones) one = 1.0f;
    for (int64_t first = 0; first < count; first += MOST_ROWS) {
        int rows = (int)min<int64_t>(MOST_ROWS, count - first);
        for (int64_t r = first; r < first + rows; ++r) {
            float sum = sum_of_lanes(b.sums[r]);
            for (int64_t d = 0; d < width; d += W) {
                float* offset = b.offsets + r * width + d;
                store(offset, load(offset) * sum);
            }
        }
        row_weigh({b.offsets + first * width, width, 1}, rows, {mixed, nullptr, width}, problem.channels,
                  b.outputs + first * width, width, width, ones);
    }
}

// Attend from the queries of a part to residual keys, and then to others.
inline void attend_part_to_first_order(const dgt_problem& problem, const Head& h, Part part, const Pairs& residual,
                                       const float* mean, float largest_spread, const float* mixed, AttendBuffers& b) {
    load_queries(problem, h, part, b);
    measure_offsets(problem, part.count, mean, largest_spread, b);
    const Pairs others = part.keys.pairs;
    part.keys.pairs = residual;
    bool is_first_block = attend_keys(problem, h, part, true, b);
    if (!is_first_block) add_lost_values(problem, part.count, mixed, b);
    part.keys.pairs = others;
    is_first_block = attend_keys(problem, h, part, is_first_block, b);
    write_part(problem, h, part, is_first_block, b);
}

}  // namespace dgt
