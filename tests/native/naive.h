// The operator as naive loops in double precision: one head of one image.
#pragma once

#include "problem.h"

#include <limits>

namespace native_check {

constexpr double INFINITE = std::numeric_limits<double>::infinity();

// A head of a problem, with its results.
struct Head {
    const Data& data;
    int64_t index;  // image * H + head
    Doubles queries, keys, values, outputs, grad_outputs;

    Head(const Data& all, int64_t number) : data(all), index(number) {
        const Case& c = size();
        queries = data.query.of_head(index, c.queries, c.channels);
        keys = data.key.of_head(key_index(), c.keys, c.channels);
        values = data.value.of_head(key_index(), c.keys, c.channels);
        outputs = data.output.of_head(index, c.queries, c.channels);
        grad_outputs = data.grad_output.of_head(index, c.queries, c.channels);
    }

    const Case& size() const { return data.size; }
    int64_t image() const { return index / size().heads; }
    int64_t key_index() const {
        const int64_t queries_of_a_key = size().heads / size().key_heads;
        return image() * size().key_heads + index % size().heads / queries_of_a_key;
    }
    double query(int64_t i, int64_t d) const { return queries[i * size().channels + d]; }
    double key(int64_t j, int64_t d) const { return keys[j * size().channels + d]; }
    double value(int64_t j, int64_t d) const { return values[j * size().channels + d]; }
    double output(int64_t i, int64_t d) const { return outputs[i * size().channels + d]; }
    double grad_output(int64_t i, int64_t d) const { return grad_outputs[i * size().channels + d]; }
    double centroid(int64_t group, int64_t d) const {
        const int64_t head = index % size().heads;
        return data.centroids[(head * size().groups + group) * size().channels + d];
    }
    bool is_real_query(int64_t i) const { return data.real_queries[image() * size().queries + i]; }
    bool is_real_key(int64_t j) const { return data.real_keys[image() * size().keys + j]; }
    int64_t group_of(int64_t i) const { return data.group_ids[index * size().queries + i]; }
    const int64_t* list(int64_t group) const {
        return data.key_ids.data() + (index * size().groups + group) * size().list_length();
    }

    double group_score(int64_t i, int64_t group) const {
        double sum = 0;
        for (int64_t d = 0; d < size().channels; ++d) sum += query(i, d) * centroid(group, d);
        return sum;
    }
    double key_score(int64_t group, int64_t j) const {
        double sum = 0;
        for (int64_t d = 0; d < size().channels; ++d) sum += centroid(group, d) * key(j, d);
        return sum;
    }
};

// A key that a query attends to, and what is added to its score.
struct Seen {
    int64_t key;
    double added;
};

// Inside groups: the keys in the list of the query's group; all real keys for a prefix query; none for padding.
inline std::vector<Seen> keys_in_group(const Head& head, int64_t query) {
    std::vector<Seen> seen;
    auto add = [&](int64_t j) {
        seen.push_back({j, head.size().biased ? head.data.key_bias[head.index * head.size().keys + j] : 0.0});
    };
    const int64_t group = head.group_of(query);
    if (group >= 0) {
        for (int64_t place = 0; place < head.size().list_length(); ++place) {
            const int64_t j = head.list(group)[place];
            if (j >= 0) add(j);
        }
    } else if (query < head.size().prefix && head.is_real_query(query)) {
        for (int64_t j = 0; j < head.size().keys; ++j) {
            if (head.is_real_key(j)) add(j);
        }
    }
    return seen;
}

// Dense attention: all keys, under the mask.
inline std::vector<Seen> keys_under_mask(const Head& head, int64_t query) {
    const Case& c = head.size();
    std::vector<Seen> seen;
    for (int64_t j = 0; j < c.keys; ++j) {
        const int64_t place = (head.image() * c.queries + query) * c.keys + j;
        if (c.dense_mask == DGT_MASK_BOOL && !head.data.bool_mask[place]) continue;
        double added = c.dense_mask == DGT_MASK_FLOAT ? head.data.float_mask[place] : 0.0;
        if (c.dense_mask == DGT_MASK_GRID) {
            const int64_t of_query = (head.image() * c.queries + query) * c.heads + head.index % c.heads;
            const int64_t rows = c.keys / c.grid_columns;
            added = head.data.bias_rows[of_query * rows + j / c.grid_columns];
            added += head.data.bias_columns[of_query * c.grid_columns + j % c.grid_columns];
        }
        if (c.biased) added += head.data.key_bias[head.index * c.keys + j];
        seen.push_back({j, added});
    }
    return seen;
}

// Sums, and sums of the sizes of what is added up: what rounding every addend may change.
struct Sums {
    Doubles values, sizes;

    explicit Sums(int64_t count) : values(count), sizes(count) {}
    void add(int64_t place, double addend) {
        values[place] += addend;
        sizes[place] += std::abs(addend);
    }
};

// Of one head: output (L, D), logsumexp (L), and the gradients, contiguous. The gradients belong to the output as
// rounded by the kernels to its type, so they are equally accurate for every type.
struct Expected {
    Doubles output, logsumexp;
    Sums grad_query, grad_key, grad_value, grad_key_bias;

    explicit Expected(const Case& c)
        : output(c.queries * c.channels),
          logsumexp(c.queries, -INFINITE),
          grad_query(c.queries * c.channels),
          grad_key(c.keys * c.channels),
          grad_value(c.keys * c.channels),
          grad_key_bias(c.keys) {}
};

// Add the contribution of one query. `seen` is not empty.
inline void attend(const Head& head, int64_t query, const std::vector<Seen>& seen, Expected& expected) {
    const int64_t channels = head.size().channels;
    Doubles weight(seen.size());
    double largest = -INFINITE;
    for (size_t n = 0; n < seen.size(); ++n) {
        double product = 0;
        for (int64_t d = 0; d < channels; ++d) product += head.query(query, d) * head.key(seen[n].key, d);
        weight[n] = head.data.scale * product + seen[n].added;
        largest = std::max(largest, weight[n]);
    }
    double sum = 0;
    for (double& w : weight) {
        w = std::exp(w - largest);
        sum += w;
    }
    for (double& w : weight) w /= sum;
    expected.logsumexp[query] = largest + std::log(sum);

    double* output = expected.output.data() + query * channels;
    for (size_t n = 0; n < seen.size(); ++n) {
        for (int64_t d = 0; d < channels; ++d) output[d] += weight[n] * head.value(seen[n].key, d);
    }

    double delta = -(double)head.data.grad_logsumexp[head.index * head.size().queries + query];
    for (int64_t d = 0; d < channels; ++d) delta += head.output(query, d) * head.grad_output(query, d);
    for (size_t n = 0; n < seen.size(); ++n) {
        const int64_t key = seen[n].key;
        double grad_weight = 0;
        for (int64_t d = 0; d < channels; ++d) grad_weight += head.grad_output(query, d) * head.value(key, d);
        const double grad_score = weight[n] * (grad_weight - delta);
        expected.grad_key_bias.add(key, grad_score);
        for (int64_t d = 0; d < channels; ++d) {
            expected.grad_query.add(query * channels + d, head.data.scale * grad_score * head.key(key, d));
            expected.grad_key.add(key * channels + d, head.data.scale * grad_score * head.query(query, d));
            expected.grad_value.add(key * channels + d, weight[n] * head.grad_output(query, d));
        }
    }
}

// `keys_of(head, query)` returns the keys that a query sees.
template <class KeysOf>
Expected expected_of(const Head& head, const KeysOf& keys_of) {
    const Case& c = head.size();
    Expected expected(c);
    for (int64_t query = 0; query < c.queries; ++query) {
        const std::vector<Seen> seen = keys_of(head, query);
        if (!seen.empty()) attend(head, query, seen, expected);
    }
    return expected;
}

// ---- errors of the kernels -----------------------------------------------------------------------------------------

inline double relative(double ours, double expected) { return std::abs(ours - expected) / (1 + std::abs(expected)); }

// Beyond what rounding the addends explains.
inline double largest_error(const Floats& ours, int64_t index, const Sums& expected, double rounding) {
    double worst = 0;
    const size_t count = expected.values.size();
    for (size_t n = 0; n < count; ++n) {
        const double error = relative(ours[index * count + n], expected.values[n]);
        worst = std::max(worst, error - rounding * expected.sizes[n] / (1 + std::abs(expected.values[n])));
    }
    return worst;
}

}  // namespace native_check
