// Dynamic Group Attention on CPUs (section 3.1 of the paper): group, select, attend, and the gradients; also dense
// attention.
//
//   grouping.h    each query joins its nearest centroid
//   selection.h   each centroid selects its k best keys                 (Eq. 1)
//   keys.h        lists of keys, gathered block by block
//   attention.h   softmax attention of queries over a list of keys      (Eq. 2)
//   few_keys.h    the same with few keys
//   backward.h    its gradients
//   marks.h       these with few keys
//   slots.h       which parts of the queries accumulate them together
//   residual.h    the keys that are not selected, summarized as residual keys
//   residual_attention.h  attention to these as well, and its gradients
//   clustering.h  clusters of tokens
//   clustered.h   attention with groups and clusters found in the tokens
//   first_order.h what residual keys lose, to first order
//   products.h    the two matrix products that everything is made of
//   bfloat16.h    two products of bfloat16 in one instruction
//   tiles.h       the same in the matrix units of Intel's servers
//   lanes.h       vectors of floats
//   tokens.h      rows of tokens in memory
//   parts.h       how the queries of a head are divided
//   parallel.h    threads that share the steps of a call
//   memory.h      the working memory of a call
//   interface.h   the functions that Python calls
//
// Operators on maps are in maps.cpp.
//
// This file divides the work among threads: with many heads, each thread processes whole heads one after another while
// their tokens are in the cache; with few heads, threads share every step.

#include "attention.h"
#include "backward.h"
#include "clustered.h"
#include "few_keys.h"
#include "grouping.h"
#include "interface.h"
#include "marks.h"
#include "memory.h"
#include "parallel.h"
#include "parts.h"
#include "residual_attention.h"
#include "selection.h"
#include "slots.h"

namespace dgt {
namespace {

constexpr size_t MOST_SLOT_BYTES = (size_t)512 << 20;  // of all heads whose gradients are computed together

// Which steps of the operator a call performs.
struct Steps {
    bool group;
    bool select;
    bool attend;
};

int64_t top_k_of(const dgt_problem& problem) { return problem.list_length - problem.prefix; }

// Candidates of each group, with room for this many keys.
Candidates* take_candidates(Arena& arena, const dgt_problem& problem, int64_t keys) {
    int64_t room = candidate_room(top_k_of(problem), keys);
    Candidates* candidates = arena.take<Candidates>(problem.groups);
    float* scores = arena.take<float>(problem.groups * room);
    int32_t* ids = arena.take<int32_t>(problem.groups * room);
    for (int64_t g = 0; candidates && g < problem.groups; ++g)
        candidates[g] = {scores + g * room, ids + g * room, 0, 0.0f};
    return candidates;
}

void cut(const dgt_problem& problem, const Head& h, const Steps& steps, const Parts& parts) {
    bool all_keys = steps.select && problem.list_length >= problem.keys;
    if (!steps.group) read_ids(h.group_ids, problem.queries, parts.groups);
    if (!steps.select) read_ids(h.key_ids, problem.groups * problem.list_length, parts.lists);
    if (all_keys) cut_real_queries(problem, h, parts);
    else cut_by_group(problem, h, parts);
    write_queries_of_no_group(problem, h, parts);
}

// Group queries begin..end of a head; the prefix belongs to no group.
void group(const dgt_problem& problem, const Head& h, int64_t begin, int64_t end, int32_t* groups,
           const GroupBuffers& buffers, const Rows* prefetched, Status& status) {
    for (int64_t i = begin; i < min(problem.prefix, end); ++i) groups[i] = -1;
    if (!group_queries(h.query, max(begin, problem.prefix), end, h.query_mask, h.centroids, problem.groups,
                       problem.channels, groups, buffers, prefetched))
        status.raise(DGT_NAN_IN_QUERY);
    write_ids(groups + begin, end - begin, h.group_ids ? h.group_ids + begin : nullptr);
}

// Write the list of a group, for the kernels and for the caller.
void write_list_of(const dgt_problem& problem, const Head& h, int64_t g, const Candidates& found, const Parts& parts) {
    int32_t* list = parts.lists + g * problem.list_length;
    write_list(found, problem, h.key_mask, list);
    write_ids(list, problem.list_length, h.key_ids ? h.key_ids + g * problem.list_length : nullptr);
}

// ---- many heads: one thread processes a whole head ------------------------------------------------------------------

struct HeadBuffers {
    GroupBuffers group;
    SelectBuffers select;
    Candidates* candidates;
    Parts parts;
    FewKeys keys;
    FewBuffers few;
    AttendBuffers attend;

    HeadBuffers(Arena& arena, const dgt_problem& problem)
        : group(arena, problem),
          select(arena, problem),
          candidates(take_candidates(arena, problem, problem.keys)),
          parts(arena, problem),
          keys(arena, problem),
          few(arena, problem),
          attend(arena, problem) {}
};

void do_head(const dgt_problem& problem, const Head& h, const Steps& steps, HeadBuffers& b, Status& status) {
    if (steps.group)
        group(problem, h, 0, problem.queries, b.parts.groups, b.group, steps.attend ? &h.output : nullptr, status);
    if (steps.select) {
        const Rows* prefetched = steps.attend ? &h.value : nullptr;
        bool good = collect_candidates(h.key, problem.prefix, problem.keys, h.key_mask, h.centroids, problem.groups,
                                       problem.channels, top_k_of(problem), b.candidates, b.select, prefetched);
        for (int64_t g = 0; g < problem.groups; ++g) {
            good &= keep_largest(b.candidates[g], top_k_of(problem), 0);
            write_list_of(problem, h, g, b.candidates[g], b.parts);
        }
        if (!good) status.raise(DGT_NAN_IN_KEY);
    }
    if (!steps.attend || status.get() != DGT_GOOD) return;
    cut(problem, h, steps, b.parts);
    if (has_few_keys(problem)) b.keys.load(problem, h);
    for (int64_t i = 0; i < *b.parts.count; ++i) attend(problem, h, b.parts.parts[i], b.keys, b.few, b.attend);
}

int do_heads(const dgt_problem& problem, const Steps& steps) {
    int64_t threads = min(thread_count(problem), head_count(problem));
    size_t bytes = bytes_of<HeadBuffers>(problem);
    Block block(bytes * (size_t)threads);
    if (block.failed()) return DGT_NO_MEMORY;
    Status status;
    in_parallel(problem, threads, [&](Member& member) {
        Arena arena(block.aligned() + bytes * (size_t)member.seat(), bytes);
        HeadBuffers buffers(arena, problem);
        member.share(head_count(problem),
                     [&](int64_t i) { do_head(problem, head_of(problem, i), steps, buffers, status); });
    });
    return status.get();
}

// ---- few heads: threads share every step ----------------------------------------------------------------------------

// Number of tasks into which the queries, and the keys, of a head are divided.
int64_t pieces_of_head(const dgt_problem& problem) {
    int64_t wanted = divide_up(4 * thread_count(problem), head_count(problem));
    return max<int64_t>(1, min(wanted, max(problem.queries, problem.keys) / 1024));
}

// Candidates found by each piece of the keys, then merged.
struct SharedBuffers {
    int64_t pieces;
    Candidates** found;  // (heads, pieces): of each group
    Parts** parts;       // (heads)
    FewKeys** keys;      // (heads)

    SharedBuffers(Arena& arena, const dgt_problem& problem) {
        pieces = pieces_of_head(problem);
        int64_t heads = head_count(problem);
        found = arena.take<Candidates*>(heads * pieces);
        parts = arena.take<Parts*>(heads);
        keys = arena.take<FewKeys*>(heads);
        for (int64_t i = 0; i < heads * pieces; ++i) {
            Candidates* candidates = take_candidates(arena, problem, divide_up(problem.keys, pieces));
            if (found) found[i] = candidates;
        }
        for (int64_t i = 0; i < heads; ++i) {
            Parts* place_of_parts = arena.take<Parts>(1);
            FewKeys* place_of_keys = arena.take<FewKeys>(1);
            Parts some_parts(arena, problem);
            FewKeys some_keys(arena, problem);
            if (!parts) continue;
            *(parts[i] = place_of_parts) = some_parts;
            *(keys[i] = place_of_keys) = some_keys;
        }
    }
};

struct StepBuffers {
    GroupBuffers group;
    SelectBuffers select;
    Candidates merged;
    FewBuffers few;
    AttendBuffers attend;

    StepBuffers(Arena& arena, const dgt_problem& problem)
        : group(arena, problem), select(arena, problem), few(arena, problem), attend(arena, problem) {
        int64_t pieces = pieces_of_head(problem);
        int64_t room = pieces * candidate_room(top_k_of(problem), divide_up(problem.keys, pieces)) + W;
        merged = {arena.take<float>(room), arena.take<int32_t>(room), 0, 0.0f};
    }
};

// Build a group's list from the candidates found by all pieces of the keys.
void merge_candidates(const dgt_problem& problem, const Head& h, int64_t g, const SharedBuffers& shared,
                      Candidates merged, Status& status) {
    for (int64_t piece = 0; piece < shared.pieces; ++piece) {
        const Candidates& part = shared.found[h.index * shared.pieces + piece][g];
        memcpy(merged.scores + merged.count, part.scores, (size_t)part.count * sizeof(float));
        memcpy(merged.ids + merged.count, part.ids, (size_t)part.count * sizeof(int32_t));
        merged.count += part.count;
    }
    if (!keep_largest(merged, top_k_of(problem), 0)) status.raise(DGT_NAN_IN_KEY);
    write_list_of(problem, h, g, merged, *shared.parts[h.index]);
}

void collect_piece(const dgt_problem& problem, const Head& h, int64_t piece, const SharedBuffers& shared,
                   const SelectBuffers& buffers, Status& status) {
    int64_t keys = problem.keys - problem.prefix;
    int64_t begin = problem.prefix + keys * piece / shared.pieces;
    int64_t end = problem.prefix + keys * (piece + 1) / shared.pieces;
    Candidates* candidates = shared.found[h.index * shared.pieces + piece];
    if (!collect_candidates(h.key, begin, end, h.key_mask, h.centroids, problem.groups, problem.channels,
                            top_k_of(problem), candidates, buffers, nullptr))
        status.raise(DGT_NAN_IN_KEY);
}

void group_and_collect(const dgt_problem& problem, const Steps& steps, const SharedBuffers& shared,
                       const StepBuffers& own, Member& member, Status& status) {
    int64_t pieces = shared.pieces;
    member.share(2 * head_count(problem) * pieces, [&](int64_t task) {
        Head h = head_of(problem, task / 2 / pieces);
        int64_t piece = task / 2 % pieces;
        bool selects = task % 2 == 0;
        if (selects && steps.select) collect_piece(problem, h, piece, shared, own.select, status);
        if (!selects && steps.group)
            group(problem, h, problem.queries * piece / pieces, problem.queries * (piece + 1) / pieces,
                  shared.parts[h.index]->groups, own.group, nullptr, status);
    });
}

void merge_and_cut(const dgt_problem& problem, const Steps& steps, const SharedBuffers& shared, const StepBuffers& own,
                   Member& member, Status& status) {
    int64_t tasks = problem.groups + 1;
    member.share(head_count(problem) * tasks, [&](int64_t task) {
        Head h = head_of(problem, task / tasks);
        int64_t g = task % tasks - 1;
        if (g >= 0 && steps.select) merge_candidates(problem, h, g, shared, own.merged, status);
        if (g >= 0 || !steps.attend) return;
        cut(problem, h, steps, *shared.parts[h.index]);
        if (has_few_keys(problem)) shared.keys[h.index]->load(problem, h);
    });
}

void attend_parts(const dgt_problem& problem, const SharedBuffers& shared, StepBuffers& own, Member& member) {
    int64_t most = Parts::most(problem);
    member.share(head_count(problem) * most, [&](int64_t task) {
        int64_t head = task / most;
        const Parts& parts = *shared.parts[head];
        if (task % most >= *parts.count) return;
        const Part& part = parts.parts[task % most];
        attend(problem, head_of(problem, head), part, *shared.keys[head], own.few, own.attend);
    });
}

int share_heads(const dgt_problem& problem, const Steps& steps) {
    int64_t threads = thread_count(problem);
    size_t shared_bytes = bytes_of<SharedBuffers>(problem);
    size_t own_bytes = bytes_of<StepBuffers>(problem);
    Block block(shared_bytes + own_bytes * (size_t)threads);
    if (block.failed()) return DGT_NO_MEMORY;
    Arena shared_arena(block.aligned(), shared_bytes);
    SharedBuffers shared(shared_arena, problem);
    Status status;
    in_parallel(problem, threads, [&](Member& member) {
        Arena arena(block.aligned() + shared_bytes + own_bytes * (size_t)member.seat(), own_bytes);
        StepBuffers own(arena, problem);
        group_and_collect(problem, steps, shared, own, member, status);
        if (status.get() != DGT_GOOD) return;
        merge_and_cut(problem, steps, shared, own, member, status);
        if (status.get() != DGT_GOOD || !steps.attend) return;
        attend_parts(problem, shared, own, member);
    });
    return status.get();
}

int run(const dgt_problem& problem, const Steps& steps) {
    return shares_heads(problem) ? share_heads(problem, steps) : do_heads(problem, steps);
}

// ---- dense attention ---------------------------------------------------------------------------------------------

struct DenseBuffers {
    Parts parts;
    AttendBuffers attend;

    DenseBuffers(Arena& arena, const dgt_problem& problem) : parts(arena, problem), attend(arena, problem) {}
};

int run_dense(const dgt_problem& problem) {
    int64_t most = divide_up(problem.queries, part_size(problem));
    int64_t tasks = head_count(problem) * most;
    int64_t threads = min(thread_count(problem), tasks);
    size_t bytes = bytes_of<DenseBuffers>(problem);
    Block block(bytes * (size_t)threads);
    if (block.failed()) return DGT_NO_MEMORY;
    in_parallel(problem, threads, [&](Member& member) {
        Arena arena(block.aligned() + bytes * (size_t)member.seat(), bytes);
        DenseBuffers own(arena, problem);
        member.share(tasks, [&](int64_t task) {
            Head h = head_of(problem, task / most);
            cut_densely(problem, h, own.parts);
            attend_part(problem, h, own.parts.parts[task % most], own.attend);
        });
    });
    return DGT_GOOD;
}

// ---- gradients ---------------------------------------------------------------------------------------------------

// Read the groups of queries and the lists of groups; dense attention has none.
void read_choice(const dgt_problem& problem, const Head& h, const Parts& to) {
    if (!problem.groups) return;
    read_ids(h.group_ids, problem.queries, to.groups);
    read_ids(h.key_ids, problem.groups * problem.list_length, to.lists);
}

// Many heads: a thread reuses the memory of one slot.
struct BackwardHeadBuffers {
    SlotTable table;
    BackwardBuffers backward;
    KeySums sums;
    Slot memory;

    BackwardHeadBuffers(Arena& arena, const dgt_problem& problem)
        : table(arena, problem), backward(arena, problem), sums(arena, problem, keys_to_sum_apart(problem)) {
        bool whole = SlotTable::most_whole_slots(problem) > 0;
        memory.take(arena, problem, whole ? max(problem.keys, problem.list_length) : problem.list_length);
    }
};

void backward_head(const dgt_problem& problem, const Head& to, BackwardHeadBuffers& b) {
    Head h = with_sums(problem, to, b.sums);
    clear_gradients(problem, h);
    read_choice(problem, h, b.table.parts);
    cut_into_slots(problem, h, b.table);
    for (int64_t i = 0; i < *b.table.count; ++i) {
        Slot slot = b.memory;
        slot.first_part = b.table.slots[i].first_part;
        slot.part_count = b.table.slots[i].part_count;
        backward_slot(problem, h, b.table.parts.parts, slot, list_length_of(problem, b.table, slot), b.backward);
        add_slot(problem, h, slot, 0, problem.keys);
    }
    b.sums.write_to(to, 0, keys_to_sum_apart(problem), problem.channels);
}

int backward_heads(const dgt_problem& problem) {
    int64_t threads = min(thread_count(problem), head_count(problem));
    size_t bytes = bytes_of<BackwardHeadBuffers>(problem);
    Block block(bytes * (size_t)threads);
    if (block.failed()) return DGT_NO_MEMORY;
    in_parallel(problem, threads, [&](Member& member) {
        Arena arena(block.aligned() + bytes * (size_t)member.seat(), bytes);
        BackwardHeadBuffers own(arena, problem);
        member.share(head_count(problem), [&](int64_t i) { backward_head(problem, head_of(problem, i), own); });
    });
    return DGT_GOOD;
}

// Few heads: the threads process those from `first` on together: cut into parts, accumulate in slots, add the slots.
int share_gradients(const dgt_problem& problem, int64_t first, int64_t heads, size_t head_bytes) {
    int64_t threads = thread_count(problem);
    size_t own_bytes = bytes_of<BackwardBuffers>(problem);
    size_t table_bytes = (size_t)round_up(heads * (int64_t)sizeof(HeadSlots), Arena::ALIGNMENT);
    size_t shared_bytes = table_bytes + head_bytes * (size_t)heads;
    Block block(shared_bytes + own_bytes * (size_t)threads);
    if (block.failed()) return DGT_NO_MEMORY;
    HeadSlots* slots = (HeadSlots*)block.aligned();
    Arena shared(block.aligned() + table_bytes, shared_bytes - table_bytes);
    for (int64_t i = 0; i < heads; ++i) {
        HeadSlots laid_out(shared, problem);
        slots[i] = laid_out;
    }
    int64_t most = SlotTable::most_group_slots(problem) + SlotTable::most_whole_slots(problem);
    int64_t ranges = divide_up(4 * threads, heads);
    in_parallel(problem, threads, [&](Member& member) {
        Arena arena(block.aligned() + shared_bytes + own_bytes * (size_t)member.seat(), own_bytes);
        BackwardBuffers own(arena, problem);
        member.share(heads, [&](int64_t i) {
            Head h = with_sums(problem, head_of(problem, first + i), slots[i].sums);
            clear_gradients(problem, h);
            read_choice(problem, h, slots[i].table.parts);
            cut_into_slots(problem, h, slots[i].table);
            slots[i].assign();
        });
        member.share(heads * most, [&](int64_t task) {
            SlotTable& table = slots[task / most].table;
            if (task % most >= *table.count) return;
            Slot& slot = table.slots[task % most];
            Head h = head_of(problem, first + task / most);
            backward_slot(problem, h, table.parts.parts, slot, list_length_of(problem, table, slot), own);
        });
        member.share(heads * ranges, [&](int64_t task) {
            const HeadSlots& of = slots[task / ranges];
            int64_t begin = problem.keys * (task % ranges) / ranges;
            int64_t end = problem.keys * (task % ranges + 1) / ranges;
            Head to = head_of(problem, first + task / ranges);
            Head h = with_sums(problem, to, of.sums);
            for (int64_t i = 0; i < *of.table.count; ++i) add_slot(problem, h, of.table.slots[i], begin, end);
            if (keys_to_sum_apart(problem)) of.sums.write_to(to, begin, end, problem.channels);
        });
    });
    return DGT_GOOD;
}

// Process as many heads at a time as memory allows.
int run_backward(const dgt_problem& problem) {
    if (!shares_heads(problem)) return backward_heads(problem);
    size_t head_bytes = bytes_of<HeadSlots>(problem);
    int64_t at_a_time = max<int64_t>(1, (int64_t)(MOST_SLOT_BYTES / head_bytes));
    for (int64_t first = 0; first < head_count(problem); first += at_a_time) {
        int status = share_gradients(problem, first, min(at_a_time, head_count(problem) - first), head_bytes);
        if (status != DGT_GOOD) return status;
    }
    return DGT_GOOD;
}

// ---- residual keys ------------------------------------------------------------------------------------------------

constexpr size_t MOST_RESIDUAL_BYTES = (size_t)512 << 20;  // of all heads that threads share

// Attention to residual keys, or its gradients, after steps that attend to nothing. Many heads: each thread processes
// whole heads; few heads: threads share every step of some.
template <class Residual>
int run_residual(const dgt_problem& problem, const Steps& before) {
    auto bytes_of_heads = [&](int64_t heads) {
        Arena measure;
        Residual residual(measure, problem, heads);
        return measure.used();
    };
    size_t own_bytes = bytes_of<typename Residual::Buffers>(problem);
    Status status;
    if (!shares_heads(problem)) {
        int64_t threads = min(thread_count(problem), head_count(problem));
        size_t step_bytes = bytes_of<HeadBuffers>(problem);
        size_t head_bytes = bytes_of_heads(1);
        size_t bytes = step_bytes + head_bytes + own_bytes;
        Block block(bytes * (size_t)threads);
        if (block.failed()) return DGT_NO_MEMORY;
        in_parallel(problem, threads, [&](Member& member) {
            Arena arena(block.aligned() + bytes * (size_t)member.seat(), bytes);
            HeadBuffers buffers(arena, problem);
            Residual residual(arena, problem, 1);
            typename Residual::Buffers own(arena, problem);
            member.share(head_count(problem), [&](int64_t i) {
                do_head(problem, head_of(problem, i), before, buffers, status);
                Team alone;
                Member self(alone, 0);
                if (status.get() == DGT_GOOD) residual.run(self, i, 1, own);
            });
        });
        return status.get();
    }
    if (before.group) status.raise((dgt_status)share_heads(problem, before));
    if (status.get() != DGT_GOOD) return status.get();
    int64_t most = max<int64_t>(1, (int64_t)(MOST_RESIDUAL_BYTES / bytes_of_heads(1)));
    int64_t together = min(most, min(thread_count(problem), head_count(problem)));
    size_t bytes = bytes_of_heads(together);
    Block block(bytes + own_bytes * (size_t)thread_count(problem));
    if (block.failed()) return DGT_NO_MEMORY;
    Arena arena(block.aligned(), bytes);
    Residual residual(arena, problem, together);
    for (int64_t first = 0; first < head_count(problem); first += together) {
        in_parallel(problem, thread_count(problem), [&](Member& member) {
            Arena of_member(block.aligned() + bytes + own_bytes * (size_t)member.seat(), own_bytes);
            typename Residual::Buffers own(of_member, problem);
            residual.run(member, first, min(together, head_count(problem) - first), own);
        });
    }
    return DGT_GOOD;
}

// ---- statistics of Eq. 3 -----------------------------------------------------------------------------------------

int run_statistics(const dgt_problem& problem) {
    int64_t threads = min(thread_count(problem), head_count(problem));
    size_t bytes = (size_t)round_up(round_up(problem.channels, W) * 4, Arena::ALIGNMENT);
    Block block(bytes * (size_t)threads);
    if (block.failed()) return DGT_NO_MEMORY;
    in_parallel(problem, threads, [&](Member& member) {
        float* row = (float*)(block.aligned() + bytes * (size_t)member.seat());
        member.share(head_count(problem), [&](int64_t i) {
            Head h = head_of(problem, i);
            add_statistics(h.query, problem.queries, h.group_ids, problem.groups, problem.channels,
                           problem.group_sums + i * problem.groups * problem.channels,
                           problem.group_counts + i * problem.groups, row);
        });
    });
    return DGT_GOOD;
}

// Dense attention has no groups and no lists.
dgt_problem without_groups(const dgt_problem& problem) {
    dgt_problem x = problem;
    x.groups = 0;
    x.list_length = 0;
    x.prefix = 0;
    return x;
}

}  // namespace
}  // namespace dgt

int dgt_group_queries(const dgt_problem* problem) { return dgt::run(*problem, {true, false, false}); }

int dgt_select_keys(const dgt_problem* problem) { return dgt::run(*problem, {false, true, false}); }

int dgt_attend(const dgt_problem* problem) {
    if (problem->key_clusters.count) return dgt::run_residual<dgt::ResidualAttention>(*problem, {false, false, false});
    return dgt::run(*problem, {false, false, true});
}

int dgt_attention(const dgt_problem* problem) {
    if (problem->key_clusters.count) return dgt::run_residual<dgt::ResidualAttention>(*problem, {true, true, false});
    return dgt::run(*problem, {true, true, true});
}

int dgt_attend_backward(const dgt_problem* problem) {
    if (problem->key_clusters.count) return dgt::run_residual<dgt::ResidualGradients>(*problem, {false, false, false});
    return dgt::run_backward(*problem);
}

int dgt_dense(const dgt_problem* problem) { return dgt::run_dense(dgt::without_groups(*problem)); }

int dgt_dense_backward(const dgt_problem* problem) { return dgt::run_backward(dgt::without_groups(*problem)); }

int dgt_cluster_tokens(const dgt_problem* problem) { return dgt::run_cluster_tokens(dgt::without_groups(*problem)); }

int dgt_clustered_attention(const dgt_problem* problem) { return dgt::run_clustered(*problem); }

int dgt_group_statistics(const dgt_problem* problem) { return dgt::run_statistics(*problem); }

int dgt_abi_version() { return DGT_ABI_VERSION; }

int dgt_problem_size() { return (int)sizeof(dgt_problem); }

int dgt_lanes() { return dgt::W; }
