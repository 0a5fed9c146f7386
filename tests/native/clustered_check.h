// Checks of clusters and of attention in groups with residual keys.
#pragma once

#include "naive_clusters.h"

namespace native_check {

// The problem of a case, with clusters of its queries and keys.
inline dgt_problem clustered_problem(Data& data, Clustering& queries, Clustering& keys) {
    dgt_problem problem = problem_of(data);
    problem.key_bias = nullptr;
    problem.centroids = nullptr;
    problem.mask_type = DGT_NO_MASK;
    problem.logsumexp = nullptr;
    problem.query_mask = data.size.queries == data.size.keys ? problem.query_mask : nullptr;
    problem.query_clusters = queries.describe(3);
    problem.key_clusters = keys.describe(3);
    problem.first_order = data.size.first_order;
    return problem;
}

// Only the clusters of the tokens: those of queries, or of keys treated as queries.
inline int cluster_alone(const dgt_problem& whole, const dgt_tokens& tokens, int64_t count, int64_t heads,
                         const uint8_t* mask, const dgt_clusters& clusters, Bytes& own_mask) {
    dgt_problem problem = whole;
    const int64_t size = whole.type == DGT_FLOAT32 ? 4 : 2;
    const int64_t behind = count - whole.prefix;
    own_mask.clear();
    for (int64_t image = 0; mask && image < whole.images; ++image) {
        for (int64_t i = 0; i < behind; ++i) own_mask.push_back(mask[image * count + whole.prefix + i]);
    }
    problem.query = tokens;
    problem.query.data = (char*)tokens.data + whole.prefix * tokens.token_stride * size;
    problem.key = problem.query;
    problem.heads = heads;
    problem.key_heads = heads;
    problem.queries = behind;
    problem.keys = behind;
    problem.query_mask = mask ? own_mask.data() : nullptr;
    problem.query_clusters = clusters;
    return dgt_cluster_tokens(&problem);
}

// Centroids are the means of their members; without iterations on a sample, each token is in the nearest initial
// cluster.
template <class At>
double error_of_clusters(const Clustering& found, int64_t index, int64_t image, int64_t real, int64_t channels,
                         bool nearest, const At& at) {
    double worst = 0;
    for (int64_t cluster = 0; cluster < found.count(); ++cluster) {
        Doubles sum(channels);
        int64_t members = 0;
        for (int64_t i = 0; i < found.tokens(); ++i) {
            if (found.id(index, i) != cluster) continue;
            ++members;
            for (int64_t d = 0; d < channels; ++d) sum[d] += at(i, d);
        }
        for (int64_t d = 0; members && d < channels; ++d)
            worst = std::max(worst, std::abs(found.centroid(index, cluster, d) - sum[d] / members));
    }
    for (int64_t i = 0; nearest && i < found.tokens(); ++i) {
        if (found.id(index, i) < 0) continue;
        auto distance = [&](int64_t cluster) {
            double squares = 0;
            for (int64_t d = 0; d < channels; ++d) {
                const double x = at(i, d) - at(found.first(image, cluster, real), d);
                squares += x * x;
            }
            return squares;
        };
        for (int64_t cluster = 0; cluster < found.count(); ++cluster)
            worst = std::max(worst, (distance(found.id(index, i)) - distance(cluster)) * 0.1);
    }
    return worst;
}

struct ClusteredErrors {
    double clusters = 0;
    double output = 0;
};

// Compare one head with naive loops.
inline void compare_clustered(const Head& head, const Clustering& queries, const Clustering& keys,
                              ClusteredErrors& errors) {
    const Case& c = head.size();
    auto check = [&](int64_t i, const Doubles& expected) {
        for (int64_t d = 0; d < c.channels; ++d) {
            const double wrong = std::abs(head.output(i, d) - expected[d]) / (1 + std::abs(expected[d]));
            errors.output = std::max(errors.output, wrong);
        }
    };
    const bool masks_queries = c.queries == c.keys;
    for (int64_t i = 0; i < c.prefix; ++i) {
        std::vector<Entry> all;
        for (int64_t j = 0; j < c.keys; ++j) {
            if (!head.is_real_key(j)) continue;
            Entry one{Doubles(c.channels), Doubles(c.channels), 0.0};
            for (int64_t d = 0; d < c.channels; ++d) {
                one.key[d] = head.key(j, d);
                one.value[d] = head.value(j, d);
            }
            all.push_back(one);
        }
        check(i, masks_queries && !head.is_real_query(i) ? Doubles(c.channels) : attend_to(head, i, all, {}));
    }
    for (int64_t group = -1; group < queries.count(); ++group) {
        Ids members;
        Doubles mean(c.channels);
        for (int64_t i = c.prefix; i < c.queries; ++i) {
            if (queries.id(head.index, i - c.prefix) != group) continue;
            members.push_back(i);
            for (int64_t d = 0; d < c.channels; ++d) mean[d] += head.query(i, d);
        }
        if (members.empty()) continue;
        for (double& x : mean) x /= (double)members.size();
        const std::vector<Entry> entries = entries_of(head, mean, keys, c.residual_keys > 0);
        for (int64_t i : members) check(i, group < 0 ? Doubles(c.channels) : attend_to(head, i, entries, mean));
    }
}

}  // namespace native_check
