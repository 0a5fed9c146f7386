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

// Queries whose weights and weight gradients are computed at once: they fit in the L1 cache. Tiles take 16 pairs of
// them.
constexpr int64_t few_queries(const dgt_problem& problem) {
    return HAS_TILES && multiplies_bfloat16(problem) ? 2 * TILE_PAIRS : 16;
}

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
    void take(Arena& arena, const dgt_problem& problem, int64_t length) {
        int64_t width = round_up(problem.channels, W);
        ids = arena.take<int32_t>(length);
        keys = arena.take<float>(length * width);
        values = arena.take<float>(length * width);
        biases = arena.take<float>(length + W);
    }
};

// What is multiplied as bfloat16.
struct Bf16Backward {
    Bf16x2* queries;            // rows of a part, as they are
    Bf16x2* grad_outputs;       // the same
    Bf16x2* query_pairs;        // of two rows
    Bf16x2* grad_output_pairs;  // of two rows
    Bf16x2* key_panels;
    Bf16x2* value_panels;
    Bf16x2* key_pairs;         // of two keys
    Bf16x2* weight_pairs;      // (few_queries / 2, key_block): P of two queries
    Bf16x2* grad_score_pairs;  // (few_queries / 2, key_block): dS of two queries
    Bf16x2* grad_scores;       // (few_queries, key_block / 2): dS of two keys

    Bf16Backward(Arena& arena, const dgt_problem& problem) {
        bool used = multiplies_bfloat16(problem);
        int64_t width = round_up(problem.channels, W);
        int64_t part = used ? part_size(problem) : 0;
        int64_t block = used ? key_block(problem.channels) : 0;
        queries = arena.take<Bf16x2>(part * problem.channels / 2);
        grad_outputs = arena.take<Bf16x2>(part * problem.channels / 2);
        query_pairs = arena.take<Bf16x2>(divide_up(part, 2) * width);
        grad_output_pairs = arena.take<Bf16x2>(divide_up(part, 2) * width);
        key_panels = arena.take<Bf16x2>(panels_size(block, problem.channels / 2));
        value_panels = arena.take<Bf16x2>(panels_size(block, problem.channels / 2));
        key_pairs = arena.take<Bf16x2>(block / 2 * width);
        weight_pairs = arena.take<Bf16x2>(few_queries(problem) / 2 * block);
        grad_score_pairs = arena.take<Bf16x2>(few_queries(problem) / 2 * block);
        grad_scores = arena.take<Bf16x2>(few_queries(problem) * block / 2);
    }
};

struct BackwardBuffers {
    float* queries;       // rows of a part, scaled
    float* grad_outputs;  // rows of a part
    float* grad_queries;  // rows of a part, accumulated so far
    float* logsumexps;    // of a part, in units of log 2
    float* deltas;        // of a part
    float* absorbing;     // of a part, from `absorbing_mask`
    float* key_panels;
    float* value_panels;
    float* key_rows;
    float* rows;  // converted tokens
    float* biases;
    float* weights;      // (few_queries, key_block): P
    float* grad_scores;  // (few_queries, key_block): dS
    int32_t* ids;
    Bf16Backward bf16;

    BackwardBuffers(Arena& arena, const dgt_problem& problem) : bf16(arena, problem) {
        int64_t width = round_up(problem.channels, W);
        int64_t part = part_size(problem);
        int64_t block = key_block(problem.channels);
        queries = arena.take<float>(part * width);
        grad_outputs = arena.take<float>(part * width);
        grad_queries = arena.take<float>(part * width);
        logsumexps = arena.take<float>(part);
        deltas = arena.take<float>(part);
        absorbing = arena.take<float>(part);
        key_panels = arena.take<float>(panels_size(block, problem.channels));
        value_panels = arena.take<float>(panels_size(block, problem.channels));
        key_rows = arena.take<float>(block * width);
        rows = arena.take<float>(W * width);
        biases = arena.take<float>(block + W);
        weights = arena.take<float>(few_queries(problem) * block);
        grad_scores = arena.take<float>(few_queries(problem) * block);
        ids = arena.take<int32_t>(block);
    }
};

inline void load_bf16_part(const dgt_problem& problem, const Head& h, const Part& part, const Bf16Backward& b) {
    int64_t width = round_up(problem.channels, W);
    int64_t pairs = problem.channels / 2;
    for (int64_t r = 0; r < part.count; ++r) {
        copy_pairs(h.query, part.query(r), pairs, b.queries + r * pairs);
        copy_pairs(h.grad_output, part.query(r), pairs, b.grad_outputs + r * pairs);
    }
    for (int64_t r = 0; r < part.count; r += 2) {
        int64_t query = part.query(r);
        int64_t next = r + 1 < part.count ? part.query(r + 1) : -1;
        copy_rows(h.query, query, next, problem.channels, b.query_pairs + r / 2 * width);
        copy_rows(h.grad_output, query, next, problem.channels, b.grad_output_pairs + r / 2 * width);
    }
}

// Load the rows of a part; delta = <dO, O> - d logsumexp.
inline void load_part(const dgt_problem& problem, const Head& h, const Part& part, const BackwardBuffers& b) {
    int64_t width = round_up(problem.channels, W);
    bool bf16 = multiplies_bfloat16(problem);
    if (bf16) load_bf16_part(problem, h, part, b.bf16);
    for (int64_t r = 0; r < part.count; ++r) {
        int64_t query = part.query(r);
        if (!bf16) copy_row(h.query, query, problem.channels, factor_of(problem), b.queries + r * width);
        if (!bf16) copy_row(h.grad_output, query, problem.channels, 1.0f, b.grad_outputs + r * width);
        Floats product{};
        for (int64_t d = 0; d < problem.channels; d += W)
            product += load_channels(h.grad_output, query, d, problem.channels) *
                       load_channels(h.output, query, d, problem.channels);
        float grad_sum = problem.grad_logsumexp ? problem.grad_logsumexp[h.index * problem.queries + query] : 0.0f;
        b.deltas[r] = sum_of_lanes(product) - grad_sum;
        float sum = h.logsumexp[query];
        b.absorbing[r] = absorbing_mask(problem, h, query);
        b.logsumexps[r] = sum == -INFINITE ? INFINITE : sum * LOG2_E;  // sees no key: all its weights become zero
        memset(b.grad_queries + r * width, 0, (size_t)width * sizeof(float));
    }
}

// Load a block of keys and their values.
inline void load_keys(const dgt_problem& problem, const Head& h, int64_t keys, const BackwardBuffers& b) {
    int64_t width = round_up(problem.channels, W);
    if (multiplies_bfloat16(problem)) {
        pack(h.key, b.ids, 0, keys, problem.channels, b.rows, b.bf16.key_panels);
        pack(h.value, b.ids, 0, keys, problem.channels, b.rows, b.bf16.value_panels);
        for (int64_t j = 0; j < keys; j += 2) {
            int64_t next = j + 1 < keys ? b.ids[j + 1] : -1;
            copy_rows(h.key, b.ids[j], next, problem.channels, b.bf16.key_pairs + j / 2 * width);
        }
    } else {
        pack(h.key, b.ids, 0, keys, problem.channels, b.rows, b.key_panels);
        pack(h.value, b.ids, 0, keys, problem.channels, b.rows, b.value_panels);
        for (int64_t j = 0; j < keys; ++j) copy_row(h.key, b.ids[j], problem.channels, 1.0f, b.key_rows + j * width);
    }
    for (int64_t j = 0; h.key_bias && j < keys; ++j) b.biases[j] = h.key_bias[b.ids[j]] * LOG2_E;
    for (int64_t j = keys; j < round_up(keys, W); ++j) b.biases[j] = 0.0f;
}

// Q K^T and dO V^T of some of a part's queries with a block of keys.
inline void score_rows(const dgt_problem& problem, const Head& h, int64_t first, int64_t queries, int64_t vectors,
                       const BackwardBuffers& b) {
    int64_t width = round_up(problem.channels, W);
    int64_t pairs = problem.channels / 2;
    int64_t stride = key_block(problem.channels);
    const float* biases = h.key_bias ? b.biases : nullptr;
    bool bf16 = multiplies_bfloat16(problem);
    int64_t most = bf16 ? MOST_BF16_ROWS : MOST_ROWS;
    for (int64_t r = 0; r < queries; r += most) {
        int rows = (int)min(most, queries - r);
        float* scores = b.weights + r * stride;
        float* grads = b.grad_scores + r * stride;
        if (bf16) {
            row_scores(b.bf16.queries + (first + r) * pairs, pairs, rows, b.bf16.key_panels, vectors, pairs,
                       factor_of(problem), biases, scores, stride, nullptr);
            row_scores(b.bf16.grad_outputs + (first + r) * pairs, pairs, rows, b.bf16.value_panels, vectors, pairs,
                       1.0f, nullptr, grads, stride, nullptr);
        } else {
            row_scores(b.queries + (first + r) * width, width, rows, b.key_panels, vectors, problem.channels, biases,
                       scores, stride, nullptr);
            row_scores(b.grad_outputs + (first + r) * width, width, rows, b.value_panels, vectors, problem.channels,
                       nullptr, grads, stride, nullptr);
        }
    }
}

// P and dS of some queries as bfloat16.
inline void round_weights(const dgt_problem& problem, int64_t queries, int64_t vectors, const BackwardBuffers& b) {
    int64_t stride = key_block(problem.channels);
    for (int64_t r = 0; r < queries; r += 2) {
        bool alone = r + 1 == queries;
        for (int64_t i = 0; i < vectors * W; i += W) {
            int64_t place = r * stride + i;
            Floats weight = load(b.weights + place);
            Floats grad = load(b.grad_scores + place);
            Floats next_weight = alone ? Floats{} : load(b.weights + place + stride);
            Floats next_grad = alone ? Floats{} : load(b.grad_scores + place + stride);
            store(b.bf16.weight_pairs + r / 2 * stride + i, pairs_of(weight, next_weight));
            store(b.bf16.grad_score_pairs + r / 2 * stride + i, pairs_of(grad, next_grad));
            store((uint16_t*)b.bf16.grad_scores + place, grad);
            if (!alone) store((uint16_t*)b.bf16.grad_scores + place + stride, next_grad);
        }
    }
}

// Add the mask of dense attention to the scores of one query with the keys of a block.
inline void add_mask(const dgt_problem& problem, const Head& h, int64_t query, int64_t first, int64_t count,
                     float absorbing, float* scores) {
    if (problem.mask_type == DGT_MASK_BOOL) hide_scores(problem, h, query, first, count, scores);
    if (!adds_numbers(problem)) return;
    alignas(64) float added[MOST_KEYS + W];
    read_mask(problem, h, query, first, count, absorbing, added);
    for (int64_t i = 0; i < round_up(count, W); i += W) {
        Floats score = absorbing != 0.0f ? Floats{} : load(scores + i);
        store(scores + i, score + load(added + i));
    }
}

// P and dS of some of a part's queries with a block of keys.
inline void weights_of(const dgt_problem& problem, const Head& h, const Part& part, int64_t first, int64_t queries,
                       int64_t first_key, int64_t keys, const BackwardBuffers& b) {
    int64_t stride = key_block(problem.channels);
    int64_t vectors = divide_up(keys, W);
    Bits last = first_lanes(keys - (vectors - 1) * W);
    score_rows(problem, h, first, queries, vectors, b);
    for (int64_t r = 0; r < queries; ++r) {
        float* weights = b.weights + r * stride;
        float* grads = b.grad_scores + r * stride;
        add_mask(problem, h, part.query(first + r), first_key, keys, b.absorbing[first + r], weights);
        Floats sum = all(b.logsumexps[first + r]);
        Floats delta = all(b.deltas[first + r]);
        const Bits* seen = part.seen.bits ? part.seen.of(part.query(first + r)) + first_key / W : nullptr;
        for (int64_t i = 0; i < vectors; ++i) {
            // Never above 1: among large scores rounding is more than that, and of both signs.
            Floats weight = power_of_two(-larger(Floats{}, sum - load(weights + i * W)));
            Floats grad = weight * (load(grads + i * W) - delta);
            Bits there = i == vectors - 1 ? last : ALL_LANES;
            if (seen) there &= seen[i];
            store(weights + i * W, choose(there, weight, Floats{}));
            store(grads + i * W, choose(there, grad, Floats{}));
        }
    }
    if (multiplies_bfloat16(problem)) round_weights(problem, queries, vectors, b);
}

// dQ += dS K, dV += P^T dO, dK += dS^T Q: one product, the weights of the last two transposed.
inline void add_gradients(const dgt_problem& problem, int64_t first, int64_t queries, int64_t keys, float* grad_keys,
                          float* grad_values, const BackwardBuffers& b) {
    float ones[MOST_ROWS];  // nothing fades
    for (float& one : ones) one = 1.0f;
    int64_t width = round_up(problem.channels, W);
    int64_t stride = key_block(problem.channels);
    for (int64_t r = 0; r < queries; r += MOST_ROWS) {
        int rows = (int)min<int64_t>(MOST_ROWS, queries - r);
        row_weigh(Weights{b.grad_scores + r * stride, stride, 1}, rows, Values{b.key_rows, nullptr, width}, keys,
                  b.grad_queries + (first + r) * width, width, width, ones);
    }
    Values outputs = {b.grad_outputs + first * width, nullptr, width};
    Values tokens = {b.queries + first * width, nullptr, width};
    for (int64_t j = 0; j < keys; j += MOST_ROWS) {
        int rows = (int)min<int64_t>(MOST_ROWS, keys - j);
        row_weigh(Weights{b.weights + j, 1, stride}, rows, outputs, queries, grad_values + j * width, width, width,
                  ones);
        row_weigh(Weights{b.grad_scores + j, 1, stride}, rows, tokens, queries, grad_keys + j * width, width, width,
                  ones);
    }
}

// The same in bfloat16; Q is not scaled there.
inline void add_bf16_gradients(const dgt_problem& problem, int64_t first, int64_t queries, int64_t keys,
                               float* grad_keys, float* grad_values, const BackwardBuffers& b) {
    float ones[MOST_BF16_ROWS];
    for (float& one : ones) one = 1.0f;
    int64_t width = round_up(problem.channels, W);
    int64_t stride = key_block(problem.channels);
    int64_t query_pairs = divide_up(queries, 2);
    for (int64_t r = 0; r < queries; r += MOST_BF16_ROWS) {
        int rows = (int)min<int64_t>(MOST_BF16_ROWS, queries - r);
        Bf16Weights weights = {b.bf16.grad_scores + r * stride / 2, stride / 2, 1};
        row_weigh(weights, rows, Bf16Values{b.bf16.key_pairs, nullptr, width}, divide_up(keys, 2),
                  b.grad_queries + (first + r) * width, width, width, ones);
    }
    Bf16Values outputs = {b.bf16.grad_output_pairs + first / 2 * width, nullptr, width};
    Bf16Values tokens = {b.bf16.query_pairs + first / 2 * width, nullptr, width};
    for (int64_t j = 0; j < keys; j += MOST_BF16_ROWS) {
        int rows = (int)min<int64_t>(MOST_BF16_ROWS, keys - j);
        row_weigh(Bf16Weights{b.bf16.weight_pairs + j, 1, stride}, rows, outputs, query_pairs, grad_values + j * width,
                  width, width, ones);
        row_weigh(Bf16Weights{b.bf16.grad_score_pairs + j, 1, stride}, rows, tokens, query_pairs, grad_keys + j * width,
                  width, width, ones);
    }
}

// Accumulate the gradients of a block of keys and of some queries.
inline void add_products(const dgt_problem& problem, const Head& h, int64_t first, int64_t queries, int64_t keys,
                         float* grad_keys, float* grad_values, float* grad_biases, const BackwardBuffers& b) {
    int64_t stride = key_block(problem.channels);
    if (multiplies_bfloat16(problem)) add_bf16_gradients(problem, first, queries, keys, grad_keys, grad_values, b);
    else add_gradients(problem, first, queries, keys, grad_keys, grad_values, b);
    if (!h.grad_key_bias) return;
    for (int64_t r = 0; r < queries; ++r)
        for (int64_t j = 0; j < keys; j += W) {
            Bits there = first_lanes(keys - j);
            Floats sum = load_lanes(grad_biases + j, there) + load_lanes(b.grad_scores + r * stride + j, there);
            store_lanes(grad_biases + j, sum, there);
        }
}

// Add one part's contribution to its slot and write the gradients of its queries.
inline void backward_part(const dgt_problem& problem, const Head& h, const Part& part, Slot& slot,
                          const BackwardBuffers& b) {
    int64_t width = round_up(problem.channels, W);
    load_part(problem, h, part, b);
    int64_t cursor = 0;
    int64_t first_key = 0;
    int64_t done = 0;
    for (;;) {
        int64_t keys = take_keys(part.keys, cursor, key_block(problem.channels), b.ids);
        if (keys == 0) break;
        memcpy(slot.ids + done, b.ids, (size_t)keys * sizeof(int32_t));
        load_keys(problem, h, keys, b);
        for (int64_t first = 0; first < part.count; first += few_queries(problem)) {
            int64_t queries = min(few_queries(problem), part.count - first);
            weights_of(problem, h, part, first, queries, first_key, keys, b);
            add_products(problem, h, first, queries, keys, slot.keys + done * width, slot.values + done * width,
                         slot.biases + done, b);
        }
        done += keys;
        first_key = cursor;
    }
    slot.count = done;
    for (int64_t r = 0; r < part.count; ++r)
        write_back_row(h.grad_query, part.query(r), problem.channels, (float)problem.scale, b.grad_queries + r * width);
}

inline void backward_slot(const dgt_problem& problem, const Head& h, const Part* parts, Slot& slot, int64_t length,
                          const BackwardBuffers& b) {
    size_t bytes = (size_t)(length * round_up(problem.channels, W)) * sizeof(float);
    memset(slot.keys, 0, bytes);
    memset(slot.values, 0, bytes);
    memset(slot.biases, 0, (size_t)length * sizeof(float));
    slot.count = 0;
    for (int64_t i = 0; i < slot.part_count; ++i) backward_part(problem, h, parts[slot.first_part + i], slot, b);
}

// Float32 sums of the gradients of the keys of a head.
struct KeySums {
    Rows key;    // (S, width)
    Rows value;  // the same

    KeySums(Arena& arena, const dgt_problem& problem, int64_t keys) {
        int64_t stride = round_up(problem.channels, W) * (int64_t)sizeof(float);
        key = {arena.take<char>(keys * stride), stride, DGT_FLOAT32};
        value = {arena.take<char>(keys * stride), stride, DGT_FLOAT32};
    }

    // A head that has these in place of its gradients.
    Head instead_of(Head h) const {
        h.grad_key = key;
        h.grad_value = value;
        return h;
    }

    void write_to(const Head& h, int64_t begin, int64_t end, int64_t channels) const {
        for (int64_t j = begin; j < end; ++j) {
            write_back_row(h.grad_key, j, channels, 1.0f, (const float*)key.at(j));
            write_back_row(h.grad_value, j, channels, 1.0f, (const float*)value.at(j));
        }
    }
};

// Gradients of float32 are their own sums.
inline int64_t keys_to_sum_apart(const dgt_problem& problem) {
    return problem.grad_type == DGT_FLOAT32 ? 0 : problem.keys;
}

inline Head with_sums(const dgt_problem& problem, const Head& h, const KeySums& sums) {
    return keys_to_sum_apart(problem) ? sums.instead_of(h) : h;
}

// Add a slot to the gradients of keys begin..end, which are float32.
inline void add_slot(const dgt_problem& problem, const Head& h, const Slot& slot, int64_t begin, int64_t end) {
    int64_t width = round_up(problem.channels, W);
    float factor =
        multiplies_bfloat16(problem) ? (float)problem.scale : LN_2;  // other queries are scaled, to units of log 2
    for (int64_t j = 0; j < slot.count; ++j) {
        int64_t id = slot.ids[j];
        if (id < begin || id >= end) continue;
        for (int64_t d = 0; d < problem.channels; d += W) {
            Bits there = first_lanes(problem.channels - d);
            float* to_key = (float*)h.grad_key.at(id) + d;
            float* to_value = (float*)h.grad_value.at(id) + d;
            Floats key = load(slot.keys + j * width + d) * factor;
            store_lanes(to_key, load_lanes(to_key, there) + key, there);
            store_lanes(to_value, load_lanes(to_value, there) + load(slot.values + j * width + d), there);
        }
        if (h.grad_key_bias) h.grad_key_bias[id] += slot.biases[j];
    }
}

// Zero the gradients of one head.
inline void clear_gradients(const dgt_problem& problem, const Head& h) {
    for (int64_t i = 0; i < problem.queries; ++i) write_zeros(h.grad_query, i, problem.channels);
    for (int64_t j = 0; j < problem.keys; ++j) {
        write_zeros(h.grad_key, j, problem.channels);
        write_zeros(h.grad_value, j, problem.channels);
    }
    if (h.grad_key_bias) memset(h.grad_key_bias, 0, (size_t)problem.keys * sizeof(float));
}

}  // namespace dgt
