// How the queries of a head are divided into parts, each with one list of keys. The division depends only on shapes and
// groups, never on threads, so the results do not depend on threads either.
#pragma once

#include "attention.h"
#include "grouping.h"
#include "interface.h"

namespace dgt {

// The parts of one head, with room for the largest possible number.
struct Parts {
    int32_t* groups;  // of each query; -1 for none
    int32_t* lists;   // (G, K): the keys of each group; -1 in empty places
    int32_t* order;   // queries by group
    int32_t* starts;  // start of each group in that order
    Part* parts;
    int64_t* count;  // number of parts

    Parts(Arena& arena, const dgt_problem& problem) {
        groups = arena.take<int32_t>(problem.queries);
        lists = arena.take<int32_t>(problem.groups * problem.list_length);
        order = arena.take<int32_t>(problem.queries);
        starts = arena.take<int32_t>(problem.groups + 1);
        parts = arena.take<Part>(most(problem));
        count = arena.take<int64_t>(1);
    }

    // Each group, and the prefix, may have one part that is not full.
    static int64_t most(const dgt_problem& problem) {
        return problem.groups + 1 + divide_up(problem.queries, part_size(problem));
    }
};

inline bool is_real(const Head& h, int64_t query) { return !h.query_mask || h.query_mask[query]; }

// The interface has 64-bit ids; the kernels use 32-bit ones.
inline void read_ids(const int64_t* from, int64_t count, int32_t* to) {
    for (int64_t i = 0; i < count; ++i) to[i] = (int32_t)from[i];
}

inline void write_ids(const int32_t* from, int64_t count, int64_t* to) {
    if (!to) return;
    for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}

// Divide `count` queries that share a list into even parts.
inline void add_parts(const Parts& to, const int32_t* order, int64_t first, int64_t count, KeyList keys, int64_t size) {
    int64_t pieces = divide_up(count, size);
    for (int64_t i = 0; i < pieces; ++i) {
        int64_t begin = count * i / pieces;
        int64_t end = count * (i + 1) / pieces;
        to.parts[(*to.count)++] = {order, first + begin, end - begin, keys, {}};
    }
}

// Parts of attention inside groups: the queries of each group; and the prefix, which attends to all keys.
inline void cut_by_group(const dgt_problem& problem, const Head& h, const Parts& to) {
    int64_t size = part_size(problem);
    *to.count = 0;
    sort_by_group(to.groups, problem.queries, problem.groups, to.order, to.starts);
    for (int64_t g = 0; g < problem.groups; ++g) {
        KeyList list = {to.lists + g * problem.list_length, problem.list_length, nullptr};
        add_parts(to, to.order, to.starts[g], to.starts[g + 1] - to.starts[g], list, size);
    }
    int64_t end = to.starts[problem.groups];
    int64_t prefix = 0;
    for (int64_t i = 0; i < problem.prefix; ++i)
        if (is_real(h, i)) to.order[end + prefix++] = (int32_t)i;
    add_parts(to, to.order, end, prefix, {nullptr, problem.keys, h.key_mask}, size);
}

// Parts of attention inside groups whose lists hold every key: all lists are equal, so groups make no difference.
inline void cut_real_queries(const dgt_problem& problem, const Head& h, const Parts& to) {
    *to.count = 0;
    int64_t count = 0;
    for (int64_t i = 0; i < problem.queries; ++i)
        if (is_real(h, i)) to.order[count++] = (int32_t)i;
    add_parts(to, to.order, 0, count, {nullptr, problem.keys, h.key_mask}, part_size(problem));
}

// Parts of dense attention.
inline void cut_densely(const dgt_problem& problem, const Head& h, const Parts& to) {
    *to.count = 0;
    add_parts(to, nullptr, 0, problem.queries, {nullptr, problem.keys, h.key_mask}, part_size(problem));
}

// A query that is in no part sees nothing: its output is zero.
inline void write_queries_of_no_group(const dgt_problem& problem, const Head& h, const Parts& parts) {
    for (int64_t i = 0; i < problem.queries; ++i) {
        bool in_prefix = i < problem.prefix && is_real(h, i);
        if (parts.groups[i] < 0 && !in_prefix) write_blind_row(problem, h, i);
    }
}

}  // namespace dgt
