// The check of attention in given groups with residual keys: naive loops in double precision, and their differences.
#pragma once

#include "naive_clusters.h"

namespace native_check {

// Residual keys of a problem, and the clusters that they sum up.
struct ResidualKeys {
    Ids clusters;  // (B, H, S); empty: all keys that are real are in one
    Floats pairs;
    Floats biases;

    explicit ResidualKeys(const Case& c, const Bytes& real) {
        std::mt19937 random(5);
        for (int64_t j = 0; c.residual_keys > 1 && j < c.all_heads() * c.keys; ++j) {
            const int64_t cluster = (int64_t)(random() % (c.residual_keys + 1)) - 1;
            clusters.push_back(real[j / c.keys / c.heads * c.keys + j % c.keys] ? cluster : -1);
        }
        pairs.resize(c.all_heads() * c.groups * c.residual_keys * 2 * c.channels);
        biases.resize(c.all_heads() * c.groups * c.residual_keys);
    }

    void describe(const Case& c, dgt_problem& problem) {
        problem.key_clusters.count = c.residual_keys;
        problem.key_clusters.ids = clusters.empty() ? nullptr : clusters.data();
        problem.key_clusters.ids_image_stride = c.heads * c.keys;
        problem.key_clusters.ids_head_stride = c.keys;
        problem.residual_keys = pairs.data();
        problem.residual_biases = biases.data();
    }

    bool sums_up(const Head& head, int64_t cluster, int64_t key) const {
        if (clusters.empty()) return head.is_real_key(key);
        return clusters[head.index * head.size().keys + key] == cluster;
    }
};

// Queries, keys and values of one head.
struct Tokens {
    Doubles query, key, value;

    explicit Tokens(const Head& head) {
        const int64_t channels = head.size().channels;
        for (int64_t i = 0; i < head.size().queries * channels; ++i)
            query.push_back(head.query(i / channels, i % channels));
        for (int64_t j = 0; j < head.size().keys * channels; ++j) {
            key.push_back(head.key(j / channels, j % channels));
            value.push_back(head.value(j / channels, j % channels));
        }
    }
};

inline Doubles row_of(const Doubles& rows, int64_t row, int64_t channels) {
    return Doubles(rows.begin() + row * channels, rows.begin() + (row + 1) * channels);
}

// What a group attends to.
inline std::vector<Entry> entries_of(const Head& head, const ResidualKeys& residual, const Tokens& tokens,
                                     int64_t group) {
    const Case& c = head.size();
    Doubles mean(c.channels);
    double members = 0;
    for (int64_t i = 0; i < c.queries; ++i) {
        if (head.group_of(i) != group) continue;
        members += 1;
        for (int64_t d = 0; d < c.channels; ++d) mean[d] += tokens.query[i * c.channels + d];
    }
    for (double& x : mean) x *= head.data.scale / std::max(1.0, members);
    std::vector<Entry> found;
    Bytes selected(c.keys);
    for (int64_t n = 0; n < c.list_length(); ++n) {
        const int64_t j = head.list(group)[n];
        if (j < 0) continue;
        selected[j] = 1;
        found.push_back({row_of(tokens.key, j, c.channels), row_of(tokens.value, j, c.channels), 0.0});
    }
    for (int64_t cluster = 0; cluster < c.residual_keys; ++cluster) {
        Entry rest{Doubles(c.channels), Doubles(c.channels), 0.0};
        double mass = 0;
        for (int64_t j = 0; j < c.keys; ++j) {
            if (selected[j] || !residual.sums_up(head, cluster, j)) continue;
            const double weight = std::exp(dot(mean, row_of(tokens.key, j, c.channels)));
            mass += weight;
            for (int64_t d = 0; d < c.channels; ++d) {
                rest.key[d] += weight * tokens.key[j * c.channels + d];
                rest.value[d] += weight * tokens.value[j * c.channels + d];
            }
        }
        if (mass == 0) continue;
        for (int64_t d = 0; d < c.channels; ++d) {
            rest.key[d] /= mass;
            rest.value[d] /= mass;
        }
        rest.added = std::log(mass) - dot(mean, rest.key);
        found.push_back(rest);
    }
    return found;
}

inline Doubles attend_from(const Doubles& query, double scale, const std::vector<Entry>& entries) {
    double largest = -INFINITE;
    for (const Entry& entry : entries) largest = std::max(largest, scale * dot(query, entry.key) + entry.added);
    Doubles output(query.size());
    double sum = 0;
    for (const Entry& entry : entries) {
        const double weight = std::exp(scale * dot(query, entry.key) + entry.added - largest);
        sum += weight;
        for (size_t d = 0; d < query.size(); ++d) output[d] += weight * entry.value[d];
    }
    for (double& x : output) x = sum > 0 ? x / sum : 0;
    return output;
}

// The output (L, D) of a head.
inline Doubles attend_to_residual_keys(const Head& head, const ResidualKeys& residual, const Tokens& tokens) {
    const Case& c = head.size();
    Doubles output(c.queries * c.channels);
    for (int64_t group = 0; group < c.groups; ++group) {
        const std::vector<Entry> entries = entries_of(head, residual, tokens, group);
        for (int64_t i = 0; i < c.queries; ++i) {
            if (head.group_of(i) != group) continue;
            const Doubles row = attend_from(row_of(tokens.query, i, c.channels), head.data.scale, entries);
            std::copy(row.begin(), row.end(), output.begin() + i * c.channels);
        }
    }
    return output;
}

// The largest error of some gradients, by differences of the sum of output times its gradient.
inline double error_of_gradients(const Head& head, const ResidualKeys& residual) {
    const Case& c = head.size();
    Tokens tokens(head);
    auto loss = [&] {
        const Doubles output = attend_to_residual_keys(head, residual, tokens);
        double sum = 0;
        for (int64_t i = 0; i < c.queries * c.channels; ++i)
            sum += output[i] * head.grad_output(i / c.channels, i % c.channels);
        return sum;
    };
    std::mt19937 random(3);
    double worst = 0;
    auto compare = [&](Doubles& of, const Floats& ours) {
        constexpr double STEP = 1e-5;
        for (int n = 0; n < 4; ++n) {
            const size_t place = random() % of.size();
            const double there = of[place];
            of[place] = there + STEP;
            const double above = loss();
            of[place] = there - STEP;
            const double difference = (above - loss()) / (2 * STEP);
            of[place] = there;
            worst = std::max(worst, relative(ours[head.index * of.size() + place], difference));
        }
    };
    compare(tokens.query, head.data.grad_query);
    compare(tokens.key, head.data.grad_key);
    compare(tokens.value, head.data.grad_value);
    return worst;
}

}  // namespace native_check
