// Gradients of softmax attention over lists of keys (the appendix's products). The weights are recomputed.
//
// With P = softmax(s Q K^T + b), O = P V and the gradient dO, and delta = rowsum(dO O) - d logsumexp:
//     dS = P (dO V^T - delta),   dQ = s dS K,   dK = s dS^T Q,   dV = P^T dO,   db = colsum(dS).
//
// Queries in several parts contribute to the gradient of the same key. Their contributions are accumulated in slots: a
// slot belongs to a few parts that share a list of keys, and the slots are added in a fixed order, so the result is
// bitwise the same whatever the threads and however many there are.
#pragma once

#include "attention.h"
#include "parts.h"

namespace dgt {

constexpr int64_t MOST_WHOLE_SLOTS = 16;   // per head, for lists of all keys
constexpr int64_t MOST_GROUP_SLOTS = 256;  // per head, for lists of groups, in addition to one per group
constexpr int64_t FEW_QUERIES = 16;        // whose weights and weight gradients fit in the L1 cache

// Sums of the gradients of the keys in one list.
struct Slot {
    int64_t first_part;
    int64_t part_count;
    int32_t* ids;   // the keys, in list order
    float* keys;    // (keys in the list, width)
    float* values;  // the same
    float* biases;  // (keys in the list)
    int64_t count;  // number of keys

    // Lay out a slot for a list of `length` keys.
    void take(Arena& arena, const dgt_problem& x, int64_t length) {
        int64_t width = round_up(x.channels, W);
        ids = arena.take<int32_t>(length);
        keys = arena.take<float>(length * width);
        values = arena.take<float>(length * width);
        biases = arena.take<float>(length + W);
    }
};

struct BackwardBuffers {
    float* queries;       // rows of a part, scaled
    float* grad_outputs;  // rows of a part
    float* grad_queries;  // rows of a part, accumulated so far
    float* logsumexps;    // of a part, in units of log 2
    float* deltas;        // of a part
    float* key_panels;
    float* value_panels;
    float* key_rows;
    float* rows;  // converted tokens
    float* biases;
    float* weights;      // (FEW_QUERIES, key_block): P
    float* grad_scores;  // (FEW_QUERIES, key_block): dS
    int32_t* ids;

    BackwardBuffers(Arena& arena, const dgt_problem& x) {
        int64_t width = round_up(x.channels, W);
        int64_t part = part_size(x);
        int64_t block = key_block(x.channels);
        queries = arena.take<float>(part * width);
        grad_outputs = arena.take<float>(part * width);
        grad_queries = arena.take<float>(part * width);
        logsumexps = arena.take<float>(part);
        deltas = arena.take<float>(part);
        key_panels = arena.take<float>(panels_size(block, x.channels));
        value_panels = arena.take<float>(panels_size(block, x.channels));
        key_rows = arena.take<float>(block * width);
        rows = arena.take<float>(W * width);
        biases = arena.take<float>(block + W);
        weights = arena.take<float>(FEW_QUERIES * block);
        grad_scores = arena.take<float>(FEW_QUERIES * block);
        ids = arena.take<int32_t>(block);
    }
};

// Load the rows of a part; delta = <dO, O> - d logsumexp.
inline void load_part(const dgt_problem& x, const Head& h, const Part& part, const BackwardBuffers& b) {
    int64_t width = round_up(x.channels, W);
    float factor = (float)(x.scale * LOG2_E);
    for (int64_t r = 0; r < part.count; ++r) {
        int64_t query = part.query(r);
        copy_row(h.query, query, x.channels, factor, b.queries + r * width);
        copy_row(h.grad_output, query, x.channels, 1.0f, b.grad_outputs + r * width);
        Floats product{};
        for (int64_t d = 0; d < x.channels; d += W)
            product += load(b.grad_outputs + r * width + d) * load_channels(h.output, query, d, x.channels);
        float grad_sum = x.grad_logsumexp ? x.grad_logsumexp[h.index * x.queries + query] : 0.0f;
        b.deltas[r] = sum_of_lanes(product) - grad_sum;
        float sum = h.logsumexp[query];
        b.logsumexps[r] = sum == -INFINITE ? INFINITE : sum * LOG2_E;  // sees no key: all its weights become zero
        memset(b.grad_queries + r * width, 0, (size_t)width * sizeof(float));
    }
}

// P and dS of some of a part's queries with a block of keys.
inline void weights_of(const dgt_problem& x, const Head& h, const Part& part, int64_t first, int64_t queries,
                       int64_t first_key, int64_t keys, const BackwardBuffers& b) {
    int64_t width = round_up(x.channels, W);
    int64_t stride = key_block(x.channels);
    int64_t vectors = divide_up(keys, W);
    Bits last = first_lanes(keys - (vectors - 1) * W);
    for (int64_t r = 0; r < queries; r += MOST_ROWS) {
        int rows = (int)min<int64_t>(MOST_ROWS, queries - r);
        row_scores(b.queries + (first + r) * width, width, rows, b.key_panels, vectors, x.channels,
                   h.key_bias ? b.biases : nullptr, b.weights + r * stride, stride, nullptr);
        row_scores(b.grad_outputs + (first + r) * width, width, rows, b.value_panels, vectors, x.channels, nullptr,
                   b.grad_scores + r * stride, stride, nullptr);
    }
    for (int64_t r = 0; r < queries; ++r) {
        float* weights = b.weights + r * stride;
        float* grads = b.grad_scores + r * stride;
        if (x.mask_type != DGT_NO_MASK) add_mask(x, h, part.query(first + r), first_key, keys, weights);
        Floats sum = all(b.logsumexps[first + r]);
        Floats delta = all(b.deltas[first + r]);
        const Bits* seen = part.seen.bits ? part.seen.of(part.query(first + r)) + first_key / W : nullptr;
        for (int64_t i = 0; i < vectors; ++i) {
            Floats weight = power_of_two(load(weights + i * W) - sum);
            Floats grad = weight * (load(grads + i * W) - delta);
            Bits there = i == vectors - 1 ? last : ALL_LANES;
            if (seen) there &= seen[i];
            store(weights + i * W, choose(there, weight, Floats{}));
            store(grads + i * W, choose(there, grad, Floats{}));
        }
    }
}

// Accumulate the gradients of a block of keys and of some queries.
inline void add_products(const dgt_problem& x, int64_t first, int64_t queries, int64_t keys, float* grad_keys,
                         float* grad_values, float* grad_biases, const BackwardBuffers& b) {
    float ones[MOST_ROWS];  // no rescaling
    for (float& one : ones) one = 1.0f;
    int64_t width = round_up(x.channels, W);
    int64_t stride = key_block(x.channels);
    for (int64_t r = 0; r < queries; r += MOST_ROWS) {  // dQ += dS K
        int rows = (int)min<int64_t>(MOST_ROWS, queries - r);
        row_weigh({b.grad_scores + r * stride, stride, 1}, rows, {b.key_rows, nullptr, width}, keys,
                  b.grad_queries + (first + r) * width, width, width, ones);
    }
    Values outputs = {b.grad_outputs + first * width, nullptr, width};
    Values tokens = {b.queries + first * width, nullptr, width};
    for (int64_t j = 0; j < keys; j += MOST_ROWS) {  // dV += P^T dO, dK += dS^T Q: the same product, weights transposed
        int rows = (int)min<int64_t>(MOST_ROWS, keys - j);
        row_weigh({b.weights + j, 1, stride}, rows, outputs, queries, grad_values + j * width, width, width, ones);
        row_weigh({b.grad_scores + j, 1, stride}, rows, tokens, queries, grad_keys + j * width, width, width, ones);
    }
    if (!x.grad_key_bias) return;
    for (int64_t r = 0; r < queries; ++r)
        for (int64_t j = 0; j < keys; j += W) {
            Bits there = first_lanes(keys - j);
            Floats sum = load_lanes(grad_biases + j, there) + load_lanes(b.grad_scores + r * stride + j, there);
            store_lanes(grad_biases + j, sum, there);
        }
}

// Add one part's contribution to its slot and write the gradients of its queries.
inline void backward_part(const dgt_problem& x, const Head& h, const Part& part, Slot& slot, const BackwardBuffers& b) {
    int64_t width = round_up(x.channels, W);
    load_part(x, h, part, b);
    int64_t cursor = 0;
    int64_t first_key = 0;
    int64_t done = 0;
    for (;;) {
        int64_t keys = take_keys(part.keys, cursor, key_block(x.channels), b.ids);
        if (keys == 0) break;
        memcpy(slot.ids + done, b.ids, (size_t)keys * sizeof(int32_t));
        pack(h.key, b.ids, 0, keys, x.channels, b.rows, b.key_panels);
        pack(h.value, b.ids, 0, keys, x.channels, b.rows, b.value_panels);
        for (int64_t j = 0; j < keys; ++j) {
            copy_row(h.key, b.ids[j], x.channels, 1.0f, b.key_rows + j * width);
            if (h.key_bias) b.biases[j] = h.key_bias[b.ids[j]] * LOG2_E;
        }
        for (int64_t j = keys; j < round_up(keys, W); ++j) b.biases[j] = 0.0f;
        for (int64_t first = 0; first < part.count; first += FEW_QUERIES) {
            int64_t queries = min(FEW_QUERIES, part.count - first);
            weights_of(x, h, part, first, queries, first_key, keys, b);
            add_products(x, first, queries, keys, slot.keys + done * width, slot.values + done * width,
                         slot.biases + done, b);
        }
        done += keys;
        first_key = cursor;
    }
    slot.count = done;
    for (int64_t r = 0; r < part.count; ++r)
        write_back_row(h.grad_query, part.query(r), x.channels, (float)x.scale, b.grad_queries + r * width);
}

inline void backward_slot(const dgt_problem& x, const Head& h, const Part* parts, Slot& slot, int64_t length,
                          const BackwardBuffers& b) {
    size_t bytes = (size_t)(length * round_up(x.channels, W)) * sizeof(float);
    memset(slot.keys, 0, bytes);
    memset(slot.values, 0, bytes);
    memset(slot.biases, 0, (size_t)length * sizeof(float));
    slot.count = 0;
    for (int64_t i = 0; i < slot.part_count; ++i) backward_part(x, h, parts[slot.first_part + i], slot, b);
}

// Add a slot to the gradients of keys begin..end.
inline void add_slot(const dgt_problem& x, const Head& h, const Slot& slot, int64_t begin, int64_t end) {
    int64_t width = round_up(x.channels, W);
    float* grad_bias = x.grad_key_bias ? x.grad_key_bias + h.index * x.keys : nullptr;
    for (int64_t j = 0; j < slot.count; ++j) {
        int64_t id = slot.ids[j];
        if (id < begin || id >= end) continue;
        for (int64_t d = 0; d < x.channels; d += W) {
            Bits there = first_lanes(x.channels - d);
            float* to_key = (float*)h.grad_key.at(id) + d;
            float* to_value = (float*)h.grad_value.at(id) + d;
            Floats key = load(slot.keys + j * width + d) * LN_2;  // queries were scaled to units of log 2
            store_lanes(to_key, load_lanes(to_key, there) + key, there);
            store_lanes(to_value, load_lanes(to_value, there) + load(slot.values + j * width + d), there);
        }
        if (grad_bias) grad_bias[id] += slot.biases[j];
    }
}

// Zero the gradients of one head.
inline void clear_gradients(const dgt_problem& x, const Head& h) {
    for (int64_t i = 0; i < x.queries; ++i) write_zeros(h.grad_query, i, x.channels);
    for (int64_t j = 0; j < x.keys; ++j) {
        write_zeros(h.grad_key, j, x.channels);
        write_zeros(h.grad_value, j, x.channels);
    }
    if (x.grad_key_bias) memset(x.grad_key_bias + h.index * x.keys, 0, (size_t)x.keys * sizeof(float));
}

}  // namespace dgt
