// Heads, lists of keys, and blocks of keys that are gathered and transposed for the products.
#pragma once

#include "bfloat16.h"
#include "interface.h"
#include "lanes.h"
#include "memory.h"
#include "products.h"
#include "tokens.h"

namespace dgt {

constexpr float LOG2_E = 1.44269504088896f;
constexpr float LN_2 = 0.693147180559945f;

// Keys of a block: scores, panels and values of a block share the caches.
constexpr int64_t MOST_KEYS = 128;

constexpr int64_t key_block(int64_t channels) {
    return max<int64_t>(32, round_up(min<int64_t>(MOST_KEYS, 4096 / channels), 16));
}

constexpr int64_t KEYS_AT_HAND = 320;      // of a head, in the first cache; more are brought there
constexpr int64_t QUERIES_OF_COPIES = 32;  // for more, values are copied side by side

// Queries of a part at most: their rows fit the second cache, and a head of many queries has parts for 16 threads.
constexpr int64_t part_size(const dgt_problem& problem) {
    int64_t most = max<int64_t>(64, min<int64_t>(1024, 32768 / problem.channels));
    return min(most, max<int64_t>(128, divide_up(problem.queries, 16)));
}

// Whether attention is told what its residual keys lose.
constexpr bool is_first_order(const dgt_problem& problem) {
    return problem.first_order && problem.key_clusters.count > 0;
}

// Of scores, which are in units of log 2.
inline float factor_of(const dgt_problem& problem) { return (float)(problem.scale * LOG2_E); }

// One head of one image.
struct Head {
    int64_t index;  // image * H + head
    int64_t image;
    Rows query;
    Rows key;
    Rows value;
    Rows output;
    Rows grad_output;
    Rows grad_query;
    Rows grad_key;
    Rows grad_value;
    const float* centroids;
    const uint8_t* query_mask;
    const uint8_t* key_mask;
    const float* key_bias;
    float* grad_key_bias;
    const char* mask;  // of dense attention: at the first query and key
    Rows bias_rows;    // of every query: what is added for the rows of a grid of keys, and for its columns
    Rows bias_columns;
    int64_t* group_ids;
    int64_t* key_ids;
    float* logsumexp;
};

inline Head head_of(const dgt_problem& problem, int64_t index) {
    int64_t image = index / problem.heads;
    int64_t head = index % problem.heads;
    int64_t key_head = head / (problem.heads / problem.key_heads);
    int64_t mask_size = problem.mask_type == DGT_MASK_FLOAT ? 4 : 1;
    Head h;
    h.index = index;
    h.image = image;
    h.query = rows_of(problem.query, problem.type, image, head);
    h.key = rows_of(problem.key, problem.type, image, key_head);
    h.value = rows_of(problem.value, problem.type, image, key_head);
    h.output = rows_of(problem.output, problem.type, image, head);
    h.grad_output = rows_of(problem.grad_output, problem.type, image, head);
    h.grad_query = rows_of(problem.grad_query, problem.grad_type, image, head);
    h.grad_key = rows_of(problem.grad_key, problem.grad_type, image, head);
    h.grad_value = rows_of(problem.grad_value, problem.grad_type, image, head);
    h.centroids = problem.centroids + head * problem.groups * problem.channels;
    h.query_mask = problem.query_mask ? problem.query_mask + image * problem.queries : nullptr;
    h.key_mask = problem.key_mask ? problem.key_mask + image * problem.keys : nullptr;
    h.key_bias = problem.key_bias ? problem.key_bias + index * problem.keys : nullptr;
    h.grad_key_bias = problem.grad_key_bias ? problem.grad_key_bias + index * problem.keys : nullptr;
    h.mask = (const char*)problem.mask + (image * problem.mask_strides[0] + head * problem.mask_strides[1]) * mask_size;
    h.bias_rows = rows_of(problem.bias_rows, DGT_FLOAT32, image, head);
    h.bias_columns = rows_of(problem.bias_columns, DGT_FLOAT32, image, head);
    h.group_ids = problem.group_ids ? problem.group_ids + index * problem.queries : nullptr;
    h.key_ids = problem.key_ids ? problem.key_ids + index * problem.groups * problem.list_length : nullptr;
    h.logsumexp = problem.logsumexp ? problem.logsumexp + index * problem.queries : nullptr;
    return h;
}

// Keys with their values beside them: those of the tokens, and such as stand for many others.
struct Pairs {
    const void* const* rows;  // (count): where a key begins; its value is `width` further
    const float* biases;      // in units of log 2; -inf where a key stands for none
    int64_t count;
    int64_t bf16_count = 0;          // so many of the first are bfloat16, the others float32
    const float* spreads = nullptr;  // of keys that stand for many, to first order; padded to whole vectors
};

// The keys that a part attends to, without those that are hidden.
struct KeyList {
    const int32_t* ids;                   // null: 0, 1, 2 and so on
    int64_t length;                       // places, of which some may hold -1
    const uint8_t* mask;                  // 1 where a key is real; null: all are
    Pairs pairs = {nullptr, nullptr, 0};  // behind the places

    bool is_whole() const { return !ids && !mask; }
};

// Lists of groups as marks: which keys every query sees, a bit a key.
struct SeenKeys {
    const int32_t* groups = nullptr;  // of every query; -1: it sees all keys
    const Bits* bits = nullptr;       // (G + 1, vectors), all keys behind the groups; null: all queries see all keys
    int64_t all_row = 0;              // G
    int64_t vectors = 0;

    const Bits* of(int64_t query) const {
        int64_t row = groups[query] < 0 ? all_row : groups[query];
        return bits + row * vectors;
    }
};

// Queries that attend to one list of keys.
struct Part {
    const int32_t* order;  // query numbers; null: first, first + 1 and so on
    int64_t first;
    int64_t count;
    KeyList keys;
    SeenKeys seen = {};  // of gradients: all keys are in the list

    int64_t query(int64_t row) const { return order ? order[first + row] : first + row; }
};

// Take the next keys of a list, `most` of them or as many as there are; `cursor` is the place to go on from.
DGT_INLINE int64_t take_keys(const KeyList& list, int64_t& cursor, int64_t most, int32_t* ids) {
    int64_t count = 0;
    for (; cursor < list.length && count < most; ++cursor) {
        int64_t id = list.ids ? list.ids[cursor] : cursor;
        ids[count] = (int32_t)id;
        count += id >= 0 && (!list.mask || list.mask[id]);
    }
    return count;
}

// Keys and values of a block, ready for the products.
struct KeyBlock {
    int32_t* ids;
    int64_t count;
    float* rows;                     // tokens that are converted
    float* panels;                   // keys
    float* copies;                   // values side by side
    int64_t* offsets;                // of values that stay where they are
    float* biases;                   // of keys, in units of log 2
    const float* spreads = nullptr;  // of keys that stand for others, to first order
    Values values;
    bool is_bf16;  // whether they are multiplied as bfloat16: these are used in place of panels and copies
    Bf16x2* bf16_panels;
    Bf16x2* bf16_copies;  // (pairs of keys, width)

    KeyBlock(Arena& arena, const dgt_problem& problem) {
        int64_t width = round_up(problem.channels, W);
        int64_t most = key_block(problem.channels);
        bool bf16 = multiplies_bfloat16(problem);
        ids = arena.take<int32_t>(most);
        count = 0;
        rows = arena.take<float>(W * width);
        panels = arena.take<float>(panels_size(most, problem.channels));
        copies = arena.take<float>(most * width);
        offsets = arena.take<int64_t>(most);
        biases = arena.take<float>(most + W);
        bf16_panels = arena.take<Bf16x2>(bf16 ? panels_size(most, problem.channels / 2) : 0);
        bf16_copies = arena.take<Bf16x2>(bf16 ? most / 2 * width : 0);
    }

    // Load the next keys of a list for so many queries; false where none are left.
    bool load_next(const dgt_problem& problem, const Head& h, const KeyList& list, int64_t& cursor, int64_t queries) {
        spreads = nullptr;
        return load_listed(problem, h, list, cursor, queries) || load_pairs(problem, list, cursor);
    }

    // Bring the pairs of a block near, while another one is worked on.
    static void prefetch_pairs(const dgt_problem& problem, const Pairs& pairs, int64_t first) {
        int64_t numbers = 2 * round_up(problem.channels, W);
        for (int64_t j = first; j < min(first + key_block(problem.channels), pairs.count); ++j) {
            int64_t bytes = numbers * (j < pairs.bf16_count ? 2 : 4);
            for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)pairs.rows[j] + i, 0, 2);
        }
    }

    const float* bias() const { return has_bias_ ? biases : nullptr; }

private:
    bool load_listed(const dgt_problem& problem, const Head& h, const KeyList& list, int64_t& cursor, int64_t queries) {
        if (cursor >= list.length) return false;
        int64_t first = cursor;
        bool whole = list.is_whole();
        if (whole) {
            count = min(key_block(problem.channels), list.length - cursor);
            cursor += count;
        } else {
            count = take_keys(list, cursor, key_block(problem.channels), ids);
        }
        if (count == 0) return false;
        if (!whole && problem.keys > KEYS_AT_HAND)
            for (int64_t j = 0; j < count; ++j) prefetch(h.value, ids[j], problem.channels, false);
        has_bias_ = h.key_bias != nullptr;
        is_bf16 = multiplies_bfloat16(problem);
        if (is_bf16) {
            pack(h.key, whole ? nullptr : ids, first, count, problem.channels, rows, bf16_panels);
            copy_bf16_values(problem, h, whole, first);
        } else {
            pack(h.key, whole ? nullptr : ids, first, count, problem.channels, rows, panels);
            load_values(problem, h, whole, first, queries);
        }
        if (has_bias_) {
            for (int64_t j = 0; j < count; ++j) biases[j] = h.key_bias[whole ? first + j : ids[j]] * LOG2_E;
            for (int64_t j = count; j < round_up(count, W); ++j) biases[j] = biases[count - 1];
        }
        return true;
    }

    // Pairs come behind all others.
    bool load_pairs(const dgt_problem& problem, const KeyList& list, int64_t& cursor) {
        int64_t first = cursor - list.length;
        is_bf16 = first < list.pairs.bf16_count;
        int64_t end = is_bf16 ? list.pairs.bf16_count : list.pairs.count;
        count = min(key_block(problem.channels), end - first);
        if (count <= 0) return false;
        if (is_bf16) copy_bf16_pairs(list.pairs.rows + first, problem.channels);
        else copy_pairs(list.pairs.rows + first, problem.channels);
        has_bias_ = true;
        spreads = list.pairs.spreads ? list.pairs.spreads + first : nullptr;
        for (int64_t j = 0; j < round_up(count, W); ++j) biases[j] = list.pairs.biases[first + min(j, count - 1)];
        cursor += count;
        prefetch_pairs(problem, list.pairs, first + count);
        return true;
    }

    void copy_pairs(const void* const* pairs, int64_t channels) {
        int64_t width = round_up(channels, W);
        pack_rows((const float* const*)pairs, count, channels, panels);
        for (int64_t j = 0; j < count; ++j) {
            const float* value = (const float*)pairs[j] + width;
            for (int64_t d = 0; d < width; d += W) store(copies + j * width + d, load(value + d));
        }
        values = {copies, nullptr, width};
    }

    void copy_bf16_pairs(const void* const* pairs, int64_t channels) {
        int64_t width = round_up(channels, W);
        // Rows of 32 bits, whatever they are.
        pack_rows((const float* const*)pairs, count, channels / 2, (float*)bf16_panels);
        for (int64_t j = 0; j < count; j += 2) {
            const uint16_t* one = (const uint16_t*)pairs[j] + width;
            const uint16_t* other = j + 1 == count ? nullptr : (const uint16_t*)pairs[j + 1] + width;
            join_rows(one, other, width, bf16_copies + j / 2 * width);
        }
    }

    // Values side by side, which pays for many queries, and is needed where they are converted or padded.
    void load_values(const dgt_problem& problem, const Head& h, bool whole, int64_t first, int64_t queries) {
        int64_t width = round_up(problem.channels, W);
        if (problem.channels % W || problem.type != DGT_FLOAT32 || queries > QUERIES_OF_COPIES) {
            for (int64_t j = 0; j < count; ++j)
                copy_row(h.value, whole ? first + j : ids[j], problem.channels, 1.0f, copies + j * width);
            values = {copies, nullptr, width};
            return;
        }
        int64_t stride = h.value.stride / 4;
        for (int64_t j = 0; j < count; ++j) offsets[j] = (whole ? first + j : ids[j]) * stride;
        values = {(const float*)h.value.data, offsets, 0};
    }

    void copy_bf16_values(const dgt_problem& problem, const Head& h, bool whole, int64_t first) {
        int64_t width = round_up(problem.channels, W);
        for (int64_t j = 0; j < count; j += 2) {
            int64_t one = whole ? first + j : ids[j];
            int64_t other = j + 1 == count ? -1 : (whole ? first + j + 1 : ids[j + 1]);
            copy_rows(h.value, one, other, problem.channels, bf16_copies + j / 2 * width);
        }
    }

    bool has_bias_ = false;
};

}  // namespace dgt
