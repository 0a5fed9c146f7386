// The slots of a head: which parts of its queries accumulate the gradients of their keys together.
#pragma once

#include "backward.h"
#include "marks.h"
#include "parts.h"

namespace dgt {

// The parts of a head, and the slots that they accumulate into.
struct SlotTable {
    Parts parts;
    MarkTable marks;
    Slot* slots;
    int64_t* count;

    SlotTable(Arena& arena, const dgt_problem& problem) : parts(arena, problem), marks(arena, problem) {
        slots = arena.take<Slot>(Parts::most(problem));
        count = arena.take<int64_t>(1);
    }

    static int64_t most_group_slots(const dgt_problem& problem) {
        return problem.groups ? min(Parts::most(problem), problem.groups + MOST_GROUP_SLOTS) : 0;
    }
    static int64_t most_whole_slots(const dgt_problem& problem) {
        int64_t queries = problem.groups && !pays_to_mark(problem) ? problem.prefix : problem.queries;
        return min(MOST_WHOLE_SLOTS, divide_up(queries, part_size(problem)));
    }
};

// Divide the queries of a head, whose groups and lists were read. If there are very many parts, consecutive ones that
// share a list also share a slot.
inline void cut_into_slots(const dgt_problem& problem, const Head& h, SlotTable& table) {
    if (!problem.groups) cut_densely(problem, h, table.parts);
    else if (pays_to_mark(problem) && table.marks.read(problem, table.parts.lists))
        cut_under_marks(problem, h, table.marks, table.parts);
    else cut_by_group(problem, h, table.parts);
    const Part* parts = table.parts.parts;
    int64_t total = *table.parts.count;
    *table.count = 0;
    for (int64_t first = 0; first < total;) {
        bool whole = !parts[first].keys.ids;
        int64_t most = divide_up(total, whole ? MOST_WHOLE_SLOTS : MOST_GROUP_SLOTS);
        int64_t end = first + 1;
        while (end < total && end - first < most && parts[end].keys.ids == parts[first].keys.ids) ++end;
        Slot& slot = table.slots[(*table.count)++];
        slot.first_part = first;
        slot.part_count = end - first;
        first = end;
    }
}

inline int64_t list_length_of(const dgt_problem& problem, const SlotTable& table, const Slot& slot) {
    return table.parts.parts[slot.first_part].keys.ids ? problem.list_length : problem.keys;
}

// The slots of a head that have memory of their own: threads fill them together, and add them by ranges of keys.
struct HeadSlots {
    SlotTable table;
    KeySums sums;
    Slot* group_memory;
    Slot* whole_memory;

    HeadSlots(Arena& arena, const dgt_problem& problem)
        : table(arena, problem), sums(arena, problem, keys_to_sum_apart(problem)) {
        group_memory = take_slots(arena, problem, SlotTable::most_group_slots(problem), problem.list_length);
        whole_memory = take_slots(arena, problem, SlotTable::most_whole_slots(problem), problem.keys);
    }

    // Assign memory to each slot.
    void assign() {
        int64_t groups = 0;
        int64_t wholes = 0;
        for (int64_t i = 0; i < *table.count; ++i) {
            Slot& slot = table.slots[i];
            bool whole = !table.parts.parts[slot.first_part].keys.ids;
            Slot memory = whole ? whole_memory[wholes++] : group_memory[groups++];
            memory.first_part = slot.first_part;
            memory.part_count = slot.part_count;
            slot = memory;
        }
    }

private:
    static Slot* take_slots(Arena& arena, const dgt_problem& problem, int64_t count, int64_t length) {
        Slot* slots = arena.take<Slot>(count);
        for (int64_t i = 0; i < count; ++i) {
            Slot slot;
            slot.take(arena, problem, length);
            if (slots) slots[i] = slot;
        }
        return slots;
    }
};

}  // namespace dgt
