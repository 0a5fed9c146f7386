// Clusters, and attention in groups with residual keys, as naive loops in double precision: one head of one image.
#pragma once

#include "naive.h"

namespace native_check {

// A clustering of each head's tokens after the prefix, in the layout of the interface.
class Clustering {
public:
    // `real` is (B, tokens); only the tokens after the prefix are clustered.
    Clustering(const Case& c, int64_t heads, int64_t tokens, int64_t count, const Bytes& real)
        : images_(c.images), heads_(heads), tokens_(tokens - c.prefix), channels_(c.channels), count_(count) {
        for (int64_t image = 0; image < c.images; ++image) {
            const uint8_t* mask = real.data() + image * tokens + c.prefix;
            for (int64_t i = 0; i < tokens_; ++i) {
                if (mask[i]) order_.push_back((int32_t)i);
            }
            for (int64_t i = 0; i < tokens_; ++i) {
                if (!mask[i]) order_.push_back((int32_t)i);
            }
        }
        centroids_.resize(images_ * heads_ * count_ * channels_);
        ids_.resize(images_ * heads_ * tokens_, -2);
    }

    dgt_clusters describe(int64_t steps) {
        dgt_clusters clusters{};
        clusters.count = count_;
        clusters.steps = steps;
        clusters.every = 2;
        clusters.order = order_.data();
        clusters.order_image_stride = tokens_;
        clusters.centroids = centroids_.data();
        clusters.ids = ids_.data();
        clusters.ids_image_stride = heads_ * tokens_;
        clusters.ids_head_stride = tokens_;
        return clusters;
    }

    int64_t id(int64_t index, int64_t token) const { return ids_[index * tokens_ + token]; }
    double centroid(int64_t index, int64_t cluster, int64_t d) const {
        return centroids_[(index * count_ + cluster) * channels_ + d];
    }
    // The token that a cluster of an image is initialized with.
    int64_t first(int64_t image, int64_t cluster, int64_t real) const {
        return order_[image * tokens_ + (real ? cluster % real : 0)];
    }
    int64_t count() const { return count_; }
    int64_t tokens() const { return tokens_; }

private:
    int64_t images_;
    int64_t heads_;
    int64_t tokens_;
    int64_t channels_;
    int64_t count_;
    std::vector<int32_t> order_;
    Floats centroids_;
    Ids ids_;
};

// What a group attends to: its keys and values, and what is added to the scores.
struct Entry {
    Doubles key;
    Doubles value;
    double added;

    // Of residual keys.
    double mass = -INFINITE;
    double spread = 0;
    std::vector<Doubles> covariance = {};  // of keys with values, times the spread that is left, relative to all
};

inline double dot(const Doubles& a, const Doubles& b) {
    double sum = 0;
    for (size_t d = 0; d < a.size(); ++d) sum += a[d] * b[d];
    return sum;
}

inline double square(const Doubles& a, const Doubles& b) {
    double sum = 0;
    for (size_t d = 0; d < a.size(); ++d) sum += (a[d] - b[d]) * (a[d] - b[d]);
    return sum;
}

// The keys of a cluster that are real.
inline Ids members_of(const Head& head, const Clustering& clusters, int64_t cluster) {
    Ids found;
    for (int64_t j = head.size().prefix; j < head.size().keys; ++j) {
        const bool is_member =
            clusters.count() == 1 || clusters.id(head.key_index(), j - head.size().prefix) == cluster;
        if (head.is_real_key(j) && is_member) found.push_back(j);
    }
    return found;
}

// |row - mean|^2 of each of some rows.
inline Doubles square_distances(const std::vector<Doubles>& rows) {
    Doubles mean(rows.empty() ? 0 : rows[0].size());
    for (const Doubles& row : rows) {
        for (size_t d = 0; d < row.size(); ++d) mean[d] += row[d] / (double)rows.size();
    }
    Doubles found;
    for (const Doubles& row : rows) found.push_back(square(row, mean));
    return found;
}

// What leaving out each key loses: log(|k - center|^2 |v - center|), with the centers of its cluster.
inline Doubles losses_of(const Head& head, const Clustering& clusters, bool has_clusters) {
    const Case& c = head.size();
    Doubles found(c.keys);
    for (int64_t cluster = 0; has_clusters && cluster < clusters.count(); ++cluster) {
        const Ids members = members_of(head, clusters, cluster);
        std::vector<Doubles> keys(members.size(), Doubles(c.channels));
        std::vector<Doubles> values = keys;
        for (size_t n = 0; n < members.size(); ++n) {
            for (int64_t d = 0; d < c.channels; ++d) {
                keys[n][d] = head.key(members[n], d);
                values[n][d] = head.value(members[n], d);
            }
        }
        const Doubles of_keys = square_distances(keys);
        const Doubles of_values = square_distances(values);
        for (size_t n = 0; n < members.size(); ++n) {
            const double squared = of_keys[n] * of_keys[n] * of_values[n];
            found[members[n]] = 0.5 * std::log(std::max(squared, (double)std::numeric_limits<float>::min()));
        }
    }
    return found;
}

// Of one in four members of a cluster, times the spread that is left of it, relative to that of all.
inline std::vector<Doubles> covariance_of(const Head& head, const Ids& members, double left) {
    const Case& c = head.size();
    const double share = 1.0 / (double)members.size();
    Doubles key(c.channels);
    Doubles value(c.channels);
    double spread = 0;
    for (int64_t j : members) {
        for (int64_t d = 0; d < c.channels; ++d) {
            key[d] += head.key(j, d) * share;
            value[d] += head.value(j, d) * share;
        }
    }
    for (int64_t j : members) {
        for (int64_t d = 0; d < c.channels; ++d) spread += std::pow(head.key(j, d) - key[d], 2) * share;
    }
    std::vector<Doubles> found(c.channels, Doubles(c.channels));
    const double factor = spread > 0 ? std::min(2.0, left / spread) / (double)((members.size() + 3) / 4) : 0.0;
    for (size_t n = 0; n < members.size(); n += 4) {
        for (int64_t d = 0; d < c.channels; ++d) {
            const double offset = factor * (head.key(members[n], d) - key[d]);
            for (int64_t e = 0; e < c.channels; ++e) found[d][e] += offset * (head.value(members[n], e) - value[e]);
        }
    }
    return found;
}

// The prefix, the k best keys for the mean query, and one residual key for each cluster of the others.
inline std::vector<Entry> entries_of(const Head& head, const Doubles& mean, const Clustering& clusters,
                                     bool has_clusters) {
    const Case& c = head.size();
    auto entry = [&](int64_t j) {
        Entry one{Doubles(c.channels), Doubles(c.channels), 0.0};
        for (int64_t d = 0; d < c.channels; ++d) {
            one.key[d] = head.key(j, d);
            one.value[d] = head.value(j, d);
        }
        return one;
    };
    std::vector<Entry> found;
    for (int64_t j = 0; j < c.prefix; ++j) {
        if (head.is_real_key(j)) found.push_back(entry(j));
    }
    Ids best;
    Doubles score(c.keys);
    for (int64_t j = c.prefix; j < c.keys; ++j) {
        score[j] = head.data.scale * dot(mean, entry(j).key);
        if (head.is_real_key(j)) best.push_back(j);
    }
    const Doubles loss = losses_of(head, clusters, has_clusters);
    std::stable_sort(best.begin(), best.end(),
                     [&](int64_t a, int64_t b) { return score[a] + loss[a] > score[b] + loss[b]; });
    const size_t places = std::min<size_t>(best.size(), c.list_length() - c.prefix);
    for (size_t n = 0; n < places; ++n) found.push_back(entry(best[n]));
    for (int64_t cluster = 0; has_clusters && cluster < clusters.count(); ++cluster) {
        Entry rest{Doubles(c.channels), Doubles(c.channels), 0.0};
        double mass = 0;
        for (size_t n = places; n < best.size(); ++n) {
            if (clusters.count() > 1 && clusters.id(head.key_index(), best[n] - c.prefix) != cluster) continue;
            const Entry member = entry(best[n]);
            const double weight = std::exp(score[best[n]]);
            mass += weight;
            for (int64_t d = 0; d < c.channels; ++d) {
                rest.key[d] += weight * member.key[d];
                rest.value[d] += weight * member.value[d];
            }
        }
        if (mass == 0) continue;
        for (int64_t d = 0; d < c.channels; ++d) {
            rest.key[d] /= mass;
            rest.value[d] /= mass;
        }
        rest.mass = std::log(mass);
        rest.added = rest.mass - head.data.scale * dot(mean, rest.key);
        for (size_t n = places; n < best.size(); ++n) {
            if (clusters.count() > 1 && clusters.id(head.key_index(), best[n] - c.prefix) != cluster) continue;
            rest.spread += std::exp(score[best[n]]) / mass * square(entry(best[n]).key, rest.key);
        }
        rest.covariance = covariance_of(head, members_of(head, clusters, cluster), rest.spread);
        found.push_back(rest);
    }
    return found;
}

// Attend from a query, of a group with this mean unless it is of none.
inline Doubles attend_to(const Head& head, int64_t query, const std::vector<Entry>& entries, const Doubles& mean) {
    const Case& c = head.size();
    const bool first_order = c.first_order && !mean.empty();
    Doubles output(c.channels);
    Doubles row(c.channels);
    for (int64_t d = 0; d < c.channels; ++d) row[d] = head.query(query, d);
    double height = 0;
    double spread = 0;
    double masses = 0;
    for (const Entry& entry : entries) spread = std::max(spread, entry.spread);
    for (const Entry& entry : entries) masses += std::exp(entry.mass);
    if (first_order) height = std::pow(head.data.scale, 2) * square(row, mean) / (2.0 * (double)c.channels);
    if (spread > 0) height = std::min(height, 1 / spread);
    auto score = [&](const Entry& entry) {
        return head.data.scale * dot(row, entry.key) + entry.added + height * entry.spread;
    };
    double largest = -INFINITE;
    for (const Entry& entry : entries) largest = std::max(largest, score(entry));
    double sum = 0;
    double residual = 0;
    for (const Entry& entry : entries) {
        const double weight = std::exp(score(entry) - largest);
        sum += weight;
        if (entry.mass > -INFINITE) residual += weight;
        for (int64_t d = 0; d < c.channels; ++d) output[d] += weight * entry.value[d];
    }
    for (const Entry& entry : entries) {
        if (!first_order || entry.mass == -INFINITE) continue;
        const double factor = head.data.scale * residual * std::exp(entry.mass) / masses;
        for (int64_t d = 0; d < c.channels; ++d) {
            for (int64_t e = 0; e < c.channels; ++e) output[e] += factor * (row[d] - mean[d]) * entry.covariance[d][e];
        }
    }
    for (double& x : output) x = sum > 0 ? x / sum : 0;
    return output;
}

}  // namespace native_check
