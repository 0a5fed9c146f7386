// Lists of keys as marks, one bit per key, for gradients with few keys: no gathering.
//
// If a group has only a handful of queries, gathering its keys and scattering their gradients costs more than the
// products. So all queries are multiplied with all keys, and a weight is zero if the list of the query's group lacks
// the key.
#pragma once

#include "attention.h"
#include "parts.h"

namespace dgt {

constexpr int64_t COST_OF_LISTED_KEY = 8;  // to gather one key of a list, measured in query-key pairs

// Whether computing pairs that are in no list costs less than gathering. Hidden tokens may hold anything and must not
// be read.
inline bool pays_to_mark(const dgt_problem& problem) {
    int64_t unlisted_pairs = problem.queries * (problem.keys - problem.list_length);
    return problem.groups && !problem.key_mask &&
           unlisted_pairs <= COST_OF_LISTED_KEY * problem.groups * problem.list_length;
}

// The lists of a head as marks.
struct MarkTable {
    Bits* bits;      // (G + 1, vectors): of each group, and of all keys
    uint8_t* bytes;  // of one list
    int64_t vectors;

    MarkTable(Arena& arena, const dgt_problem& problem) {
        vectors = pays_to_mark(problem) ? divide_up(problem.keys, W) : 0;
        bits = arena.take<Bits>((problem.groups + 1) * vectors);
        bytes = arena.take<uint8_t>(vectors * W);
    }

    // Returns false if a list is not ascending: it may contain a key twice.
    bool read(const dgt_problem& problem, const int32_t* lists) const {
        for (int64_t g = 0; g < problem.groups; ++g)
            if (!read_list(lists + g * problem.list_length, problem.list_length, bits + g * vectors)) return false;
        for (int64_t v = 0; v < vectors; ++v) bits[problem.groups * vectors + v] = first_lanes(problem.keys - v * W);
        return true;
    }

    SeenKeys seen_by(const int32_t* groups, int64_t group_count) const { return {groups, bits, group_count, vectors}; }

private:
    bool read_list(const int32_t* list, int64_t length, Bits* marks) const {
        memset(bytes, 0, (size_t)(vectors * W));
        bool ascends = true;
        int32_t before = -1;
        for (int64_t j = 0; j < length; ++j) {
            if (list[j] < 0) continue;
            ascends &= list[j] > before;
            before = list[j];
            bytes[before] = 1;
        }
        for (int64_t v = 0; v < vectors; ++v) marks[v] = bits_of_mask(bytes, v * W, W);
        return ascends;
    }
};

// Parts of attention under marks: all real queries, and the prefix, are multiplied with all keys.
inline void cut_under_marks(const dgt_problem& problem, const Head& h, const MarkTable& marks, const Parts& to) {
    *to.count = 0;
    int64_t count = 0;
    for (int64_t i = 0; i < problem.queries; ++i) {
        bool in_prefix = i < problem.prefix && is_real(h, i);
        if (to.groups[i] >= 0 || in_prefix) to.order[count++] = (int32_t)i;
    }
    add_parts(to, to.order, 0, count, {nullptr, problem.keys, nullptr}, part_size(problem));
    for (int64_t i = 0; i < *to.count; ++i) to.parts[i].seen = marks.seen_by(to.groups, problem.groups);
}

}  // namespace dgt
