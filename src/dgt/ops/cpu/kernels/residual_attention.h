// Attention in given groups with residual keys, and its gradients.
//
// The residual keys of all groups stand behind the S keys of a head: that of group g and cluster c is key S + g M + c,
// in the list of its group, with the bias b. To attention and to its gradients it is a key like any other. It is itself
// the result of attention, of t = s m to the pairs (k_j, v_j) of its members j. So its gradients dk', dv' and db
// become, with e = dk' - db t,
//
//   p_j = exp(t.k_j - Z),   dS_j = p_j (e.k_j + dv'.v_j - e.k' - dv'.v' + db),
//   dk_j += p_j e + dS_j t,   dv_j += p_j dv',   dt += sum_j dS_j k_j - db k'.
#pragma once

#include "attention.h"
#include "few_keys.h"
#include "interface.h"
#include "memory.h"
#include "parallel.h"
#include "residual.h"
#include "slots.h"

namespace dgt {

constexpr int64_t KEYS_OF_A_TASK = 1024;
constexpr int64_t GROUPS_OF_MEMBERS = 32;  // whose weights of CHUNK members are in the first caches

// Sizes of attention to the tokens and the residual keys of all groups.
inline dgt_problem with_residual_keys(const dgt_problem& problem) {
    dgt_problem x = problem;
    x.keys += problem.groups * problem.key_clusters.count;
    x.list_length += problem.key_clusters.count;
    x.key_mask = nullptr;       // no list holds a hidden key
    x.grad_type = DGT_FLOAT32;  // of sums
    return x;
}

// Keys and values of a head with the residual ones behind them, of the tokens' type.
struct ExtendedKeys {
    Rows key;
    Rows value;
    float* biases;  // zeros, then b

    ExtendedKeys(Arena& arena, const dgt_problem& problem) {
        int64_t keys = with_residual_keys(problem).keys;
        int64_t stride = problem.channels * bytes_of(problem.type);
        key = {arena.take<char>(keys * stride), stride, problem.type};
        value = {arena.take<char>(keys * stride), stride, problem.type};
        biases = arena.take<float>(keys);
    }

    void copy(const Head& h, int64_t begin, int64_t end) const {
        for (int64_t j = begin; j < end; ++j) {
            int64_t ahead = min(j + NEAR, end - 1);
            prefetch(h.key, ahead, key.stride / bytes_of(key.type), false);
            prefetch(h.value, ahead, value.stride / bytes_of(value.type), false);
            copy_token(h.key.at(j), key.stride, key.at(j));
            copy_token(h.value.at(j), value.stride, value.at(j));
            biases[j] = 0.0f;
        }
    }

    static void copy_token(const char* from, int64_t bytes, char* to) {
        constexpr int64_t VECTOR = sizeof(Floats);
        int64_t i = 0;
        for (; i + VECTOR <= bytes; i += VECTOR) memcpy(to + i, from + i, VECTOR);  // no call: the size is known
        if (i < bytes) memcpy(to + i, from + i, (size_t)(bytes - i));
    }

    void set(int64_t place, int64_t channels, const float* one_key, const float* one_value, float bias) const {
        const Rows keys = {(char*)one_key, 0, DGT_FLOAT32};
        const Rows values = {(char*)one_value, 0, DGT_FLOAT32};
        for (int64_t d = 0; d < channels; d += W) {
            store_channels(key, place, d, channels, load_channels(keys, 0, d, channels));
            store_channels(value, place, d, channels, load_channels(values, 0, d, channels));
        }
        biases[place] = bias;
    }
};

// What the groups of a head are, and which keys their residual keys may sum up.
struct GroupsOfHead {
    float* means;       // (G, width): t = s m
    float* counts;      // (G): queries of a group
    int32_t* clusters;  // of each key; -1 for none
    int32_t* places;    // of each key in the order of clusters; -1 for none

    GroupsOfHead(Arena& arena, const dgt_problem& problem) {
        means = arena.take<float>(problem.groups * round_up(problem.channels, W));
        counts = arena.take<float>(problem.groups);
        clusters = arena.take<int32_t>(problem.keys);
        places = arena.take<int32_t>(problem.keys);
    }

    // Read groups, lists, in which the residual keys of a group come last, and clusters.
    void read(const dgt_problem& problem, const Head& h, const Parts& to, const KeyOrder& order) const {
        int64_t residual = problem.key_clusters.count;
        read_ids(h.group_ids, problem.queries, to.groups);
        for (int64_t g = 0; g < problem.groups; ++g) {
            int32_t* list = to.lists + g * (problem.list_length + residual);
            read_ids(h.key_ids + g * problem.list_length, problem.list_length, list);
            for (int64_t c = 0; c < residual; ++c)
                list[problem.list_length + c] = (int32_t)(problem.keys + g * residual + c);
        }
        find_means(problem, h, to.groups);
        const dgt_clusters& given = problem.key_clusters;
        if (given.ids) {
            int64_t head = h.index % problem.heads;
            read_ids(given.ids + h.image * given.ids_image_stride + head * given.ids_head_stride, problem.keys,
                     clusters);
        }
        order.sort(given.ids ? clusters : nullptr, problem.keys, residual, h.key_mask);
        for (int64_t j = 0; j < problem.keys; ++j) places[j] = -1;
        for (int64_t j = 0; j < *order.count; ++j) places[order.order[j]] = (int32_t)j;
    }

private:
    void find_means(const dgt_problem& problem, const Head& h, const int32_t* groups) const {
        int64_t width = round_up(problem.channels, W);
        memset(means, 0, (size_t)(problem.groups * width) * sizeof(float));
        memset(counts, 0, (size_t)problem.groups * sizeof(float));
        for (int64_t i = 0; i < problem.queries; ++i) {
            prefetch(h.query, min(i + NEAR, problem.queries - 1), problem.channels, false);
            if (groups[i] < 0) continue;
            float* sum = means + groups[i] * width;
            for (int64_t d = 0; d < problem.channels; d += W)
                store(sum + d, load(sum + d) + load_channels(h.query, i, d, problem.channels));
            counts[groups[i]] += 1.0f;
        }
        for (int64_t g = 0; g < problem.groups; ++g) {
            float factor = (float)problem.scale / max(1.0f, counts[g]);
            for (int64_t d = 0; d < width; d += W) store(means + g * width + d, load(means + g * width + d) * factor);
        }
    }
};

// ---- forward ------------------------------------------------------------------------------------------------------

// Some heads whose steps are taken together.
class ResidualAttention {
public:
    struct Buffers {
        GroupsBuffers groups;
        FewBuffers few;
        AttendBuffers attend;
        float* rows;  // converted tokens

        Buffers(Arena& arena, const dgt_problem& problem)
            : groups(arena, problem, problem.keys, 0, 0, false, false),
              few(arena, with_residual_keys(problem)),
              attend(arena, with_residual_keys(problem)) {
            rows = arena.take<float>(W * round_up(problem.channels, W));
        }
    };

    ResidualAttention(Arena& arena, const dgt_problem& problem, int64_t heads)
        : problem_(problem), extended_(with_residual_keys(problem)) {
        heads_ = arena.take<State>(heads);
        for (int64_t i = 0; i < heads; ++i) {
            State state(arena, problem);
            if (heads_) heads_[i] = state;
        }
    }

    // Attend from the queries of `count` heads.
    void run(Member& member, int64_t first, int64_t count, Buffers& own) {
        int64_t pieces = divide_up(problem_.keys, KEYS_OF_A_TASK);
        int64_t blocks = divide_up(problem_.groups, GROUPS_AT_ONCE);
        int64_t parts = Parts::most(problem_);
        member.share(count, [&](int64_t i) { start(head_of(problem_, first + i), heads_[i]); });
        member.share(count * pieces, [&](int64_t task) {
            lay_out(head_of(problem_, first + task / pieces), heads_[task / pieces], task % pieces, own);
        });
        member.share(count * blocks, [&](int64_t task) {
            sum_up(first + task / blocks, heads_[task / blocks], task % blocks * GROUPS_AT_ONCE, own);
        });
        if (has_few_keys(extended_))
            member.share(count, [&](int64_t i) { heads_[i].few.load(extended_, extend(first + i, heads_[i])); });
        member.share(count * parts, [&](int64_t task) {
            const State& state = heads_[task / parts];
            if (task % parts >= *state.parts.count) return;
            const Part& part = state.parts.parts[task % parts];
            attend(extended_, extend(first + task / parts, state), part, state.few, own.few, own.attend);
        });
    }

private:
    struct State {
        ExtendedKeys keys;
        GroupsOfHead groups;
        SortedKeys sorted;
        Parts parts;
        FewKeys few;

        State(Arena& arena, const dgt_problem& problem)
            : keys(arena, problem),
              groups(arena, problem),
              sorted(arena, problem.keys, problem.key_clusters.count, 0, problem.channels, false, false),
              parts(arena, with_residual_keys(problem)),
              few(arena, with_residual_keys(problem)) {}
    };

    Head extend(int64_t index, const State& state) const {
        Head h = head_of(problem_, index);
        h.key = state.keys.key;
        h.value = state.keys.value;
        h.key_bias = state.keys.biases;
        return h;
    }

    void start(const Head& h, State& state) const {
        state.groups.read(problem_, h, state.parts, state.sorted);
        cut_by_group(extended_, h, state.parts);
        write_queries_of_no_group(problem_, h, state.parts);
    }

    void lay_out(const Head& h, const State& state, int64_t piece, const Buffers& own) const {
        int64_t begin = piece * KEYS_OF_A_TASK;
        state.keys.copy(h, begin, min(begin + KEYS_OF_A_TASK, problem_.keys));
        int64_t end = min(begin + KEYS_OF_A_TASK, *state.sorted.count);
        if (begin < end) state.sorted.lay_out(h.key, h.value, begin, end, problem_.channels, own.rows);
    }

    // Sum up what some groups did not select.
    void sum_up(int64_t index, const State& state, int64_t first, const Buffers& own) const {
        const GroupsBuffers& b = own.groups;
        const SortedKeys& keys = state.sorted;
        int64_t count = min(GROUPS_AT_ONCE, problem_.groups - first);
        for (int64_t i = 0; i < count * b.width; i += W)
            store(b.means + i, load(state.groups.means + first * b.width + i) * LOG2_E);
        score_keys(keys, 0, *keys.count, count, problem_.channels, b);
        for (int64_t r = 0; r < count; ++r) {
            const int32_t* list = state.parts.lists + (first + r) * extended_.list_length;
            for (int64_t j = 0; j < problem_.list_length; ++j) {
                int32_t place = list[j] < 0 ? -1 : state.groups.places[list[j]];
                if (place >= 0) b.scores[r * b.stride + place] = -INFINITE;
            }
        }
        sum_up_clusters(keys, count, b);
        for (int64_t r = 0; r < count; ++r)
            for (int64_t c = 0; c < b.clusters; ++c) {
                int64_t place = (first + r) * b.clusters + c;
                const float* pair = b.residual(r, c);
                float bias = b.biases[r * b.clusters + c] * LN_2;
                state.keys.set(problem_.keys + place, problem_.channels, pair, pair + b.width, bias);
                write_pair(index * problem_.groups * b.clusters + place, pair, pair + b.width, bias);
            }
    }

    // For the gradients, if they are asked for.
    void write_pair(int64_t place, const float* key, const float* value, float bias) const {
        if (!problem_.residual_keys) return;
        size_t bytes = (size_t)problem_.channels * sizeof(float);
        float* to = problem_.residual_keys + place * 2 * problem_.channels;
        memcpy(to, key, bytes);
        memcpy(to + problem_.channels, value, bytes);
        problem_.residual_biases[place] = bias;
    }

    const dgt_problem& problem_;
    dgt_problem extended_;
    State* heads_;
};

// ---- gradients ----------------------------------------------------------------------------------------------------

// Working memory for the members of a cluster, CHUNK of them and some groups at a time.
struct MembersBuffers {
    float* rows;  // converted tokens
    float* key_panels;
    float* value_panels;
    float* key_rows;
    float* weights;       // (GROUPS_OF_MEMBERS, CHUNK): P
    float* grad_scores;   // the same: dS
    float* value_scores;  // the same: dv'.v
    float* grad_keys;     // (CHUNK, width)
    float* grad_values;   // the same

    MembersBuffers(Arena& arena, int64_t channels) {
        int64_t width = round_up(channels, W);
        rows = arena.take<float>(W * width);
        key_panels = arena.take<float>(panels_size(CHUNK, channels));
        value_panels = arena.take<float>(panels_size(CHUNK, channels));
        key_rows = arena.take<float>(CHUNK * width);
        weights = arena.take<float>(GROUPS_OF_MEMBERS * CHUNK);
        grad_scores = arena.take<float>(GROUPS_OF_MEMBERS * CHUNK);
        value_scores = arena.take<float>(GROUPS_OF_MEMBERS * CHUNK);
        grad_keys = arena.take<float>(CHUNK * width);
        grad_values = arena.take<float>(CHUNK * width);
    }
};

// The gradients of some heads whose steps are taken together.
class ResidualGradients {
public:
    struct Buffers {
        BackwardBuffers backward;
        MembersBuffers members;
        float* means;  // (G, width): dt

        Buffers(Arena& arena, const dgt_problem& problem)
            : backward(arena, with_residual_keys(problem)), members(arena, problem.channels) {
            means = arena.take<float>(problem.groups * round_up(problem.channels, W));
        }
    };

    ResidualGradients(Arena& arena, const dgt_problem& problem, int64_t heads)
        : problem_(problem),
          extended_(with_residual_keys(problem)),
          clusters_(problem.key_clusters.count),
          width_(round_up(problem.channels, W)) {
        heads_ = arena.take<State>(heads);
        for (int64_t i = 0; i < heads; ++i) {
            State state(arena, problem);
            if (heads_) heads_[i] = state;
        }
    }

    void run(Member& member, int64_t first, int64_t count, Buffers& own) {
        int64_t pieces = divide_up(problem_.keys, KEYS_OF_A_TASK);
        int64_t slots = SlotTable::most_group_slots(extended_) + SlotTable::most_whole_slots(extended_);
        int64_t ranges = divide_up(extended_.keys, KEYS_OF_A_TASK);
        int64_t rows = divide_up(max(problem_.keys, problem_.queries), KEYS_OF_A_TASK);
        member.share(count, [&](int64_t i) { start(head_of(problem_, first + i), heads_[i]); });
        member.share(count * pieces, [&](int64_t task) {
            int64_t begin = task % pieces * KEYS_OF_A_TASK;
            heads_[task / pieces].keys.copy(head_of(problem_, first + task / pieces), begin,
                                            min(begin + KEYS_OF_A_TASK, problem_.keys));
        });
        member.share(count * slots, [&](int64_t task) {
            SlotTable& table = heads_[task / slots].slots.table;
            if (task % slots >= *table.count) return;
            Slot& slot = table.slots[task % slots];
            Head h = extend(head_of(problem_, first + task / slots), heads_[task / slots]);
            backward_slot(extended_, h, table.parts.parts, slot, list_length_of(extended_, table, slot), own.backward);
        });
        member.share(count * ranges, [&](int64_t task) {
            Head h = extend(head_of(problem_, first + task / ranges), heads_[task / ranges]);
            add_slots(h, heads_[task / ranges], task % ranges * KEYS_OF_A_TASK);
        });
        member.share(count, [&](int64_t i) { prepare(first + i, heads_[i]); });
        member.share(count * pieces, [&](int64_t task) {
            add_piece(head_of(problem_, first + task / pieces), heads_[task / pieces], task % pieces, own.members);
        });
        member.share(count * rows, [&](int64_t task) {
            finish(head_of(problem_, first + task / rows), heads_[task / rows], task % rows * KEYS_OF_A_TASK, own);
        });
    }

private:
    struct State {
        ExtendedKeys keys;
        GroupsOfHead groups;
        KeyOrder order;
        HeadSlots slots;
        int32_t* selected;    // (G, K): places of the selected keys in the order of clusters; -1 for none
        int32_t* selections;  // (G K): which of these, by place
        int32_t* starts;      // (S + 1): of each place in that order
        Rows grad_query;      // (L, width), float32
        KeySums sums;         // of S + G M keys
        float* grad_biases;   // (S + G M)
        float* grad_pairs;    // (G, M, 2, width): e and dv'
        float* deltas;        // (G, M): e.k' + dv'.v' - db
        float* masses;        // (G, M): Z, in units of log 2
        float* grad_means;    // (1 + pieces of keys, G, width): parts of dt

        State(Arena& arena, const dgt_problem& problem)
            : keys(arena, problem),
              groups(arena, problem),
              order(arena, problem.keys, problem.key_clusters.count),
              slots(arena, with_residual_keys(problem)),
              sums(arena, problem, with_residual_keys(problem).keys) {
            int64_t all = with_residual_keys(problem).keys;
            int64_t width = round_up(problem.channels, W);
            int64_t residual = problem.groups * problem.key_clusters.count;
            int64_t stride = width * (int64_t)sizeof(float);
            selected = arena.take<int32_t>(problem.groups * problem.list_length);
            selections = arena.take<int32_t>(problem.groups * problem.list_length);
            starts = arena.take<int32_t>(problem.keys + 1);
            grad_query = {arena.take<char>(problem.queries * stride), stride, DGT_FLOAT32};
            grad_biases = arena.take<float>(all);
            grad_pairs = arena.take<float>(residual * 2 * width);
            deltas = arena.take<float>(residual);
            masses = arena.take<float>(residual);
            grad_means = arena.take<float>((1 + divide_up(problem.keys, KEYS_OF_A_TASK)) * problem.groups * width);
        }
    };

    Head extend(Head h, const State& state) const {
        h.key = state.keys.key;
        h.value = state.keys.value;
        h.key_bias = state.keys.biases;
        h.grad_query = state.grad_query;
        h.grad_key_bias = state.grad_biases;
        return state.sums.instead_of(h);
    }

    const float* pair_of(int64_t index, int64_t residual) const {
        return problem_.residual_keys + (index * problem_.groups * clusters_ + residual) * 2 * problem_.channels;
    }

    float bias_of(int64_t index, int64_t residual) const {
        return problem_.residual_biases[index * problem_.groups * clusters_ + residual];
    }

    void start(const Head& h, State& state) const {
        state.groups.read(problem_, h, state.slots.table.parts, state.order);
        for (int64_t i = 0; i < problem_.groups * clusters_; ++i) {
            const float* pair = pair_of(h.index, i);
            state.keys.set(problem_.keys + i, problem_.channels, pair, pair + problem_.channels, bias_of(h.index, i));
        }
        sort_selections(state);
        cut_into_slots(extended_, h, state.slots.table);
        state.slots.assign();
        for (int64_t i = 0; i < problem_.queries; ++i) write_zeros(state.grad_query, i, problem_.channels);
    }

    void sort_selections(const State& state) const {
        int64_t length = problem_.list_length;
        for (int64_t g = 0; g < problem_.groups; ++g) {
            const int32_t* list = state.slots.table.parts.lists + g * extended_.list_length;
            for (int64_t j = 0; j < length; ++j)
                state.selected[g * length + j] = list[j] < 0 ? -1 : state.groups.places[list[j]];
        }
        sort_by_group(state.selected, problem_.groups * length, problem_.keys, state.selections, state.starts);
    }

    void add_slots(const Head& h, const State& state, int64_t begin) const {
        int64_t end = min(begin + KEYS_OF_A_TASK, extended_.keys);
        memset(h.grad_key.at(begin), 0, (size_t)((end - begin) * h.grad_key.stride));
        memset(h.grad_value.at(begin), 0, (size_t)((end - begin) * h.grad_value.stride));
        memset(h.grad_key_bias + begin, 0, (size_t)(end - begin) * sizeof(float));
        const SlotTable& table = state.slots.table;
        for (int64_t i = 0; i < *table.count; ++i) add_slot(extended_, h, table.slots[i], begin, end);
    }

    // From the gradients of the residual keys: what those of their members need.
    void prepare(int64_t index, const State& state) const {
        memset(state.grad_means, 0, (size_t)(problem_.groups * width_) * sizeof(float));
        for (int64_t i = 0; i < problem_.groups * clusters_; ++i) {
            const float* mean = state.groups.means + i / clusters_ * width_;
            float* grad_mean = state.grad_means + i / clusters_ * width_;
            float* pair = state.grad_pairs + i * 2 * width_;
            Rows of_key = {(char*)pair_of(index, i), 0, DGT_FLOAT32};
            Rows of_value = {(char*)(pair_of(index, i) + problem_.channels), 0, DGT_FLOAT32};
            float grad_bias = state.grad_biases[problem_.keys + i];
            Floats delta{};
            Floats product{};
            for (int64_t d = 0; d < problem_.channels; d += W) {
                Floats t = load(mean + d);
                Floats key = load_channels(of_key, 0, d, problem_.channels);
                Floats value = load_channels(of_value, 0, d, problem_.channels);
                Floats grad_key =
                    load_channels(state.sums.key, problem_.keys + i, d, problem_.channels) - grad_bias * t;
                Floats grad_value = load_channels(state.sums.value, problem_.keys + i, d, problem_.channels);
                store(pair + d, grad_key);
                store(pair + width_ + d, grad_value);
                store(grad_mean + d, load(grad_mean + d) - grad_bias * key);
                delta += grad_key * key + grad_value * value;
                product += t * key;
            }
            float bias = bias_of(index, i);
            state.deltas[i] = sum_of_lanes(delta) - grad_bias;
            // It sums up nothing: all weights become zero.
            state.masses[i] = bias == -INFINITE ? INFINITE : (bias + sum_of_lanes(product)) * LOG2_E;
        }
    }

    // The gradients of a piece of the keys in the order of clusters.
    void add_piece(const Head& h, const State& state, int64_t piece, const MembersBuffers& b) const {
        const int32_t* starts = state.order.starts;
        float* grad_means = state.grad_means + (1 + piece) * problem_.groups * width_;
        memset(grad_means, 0, (size_t)(problem_.groups * width_) * sizeof(float));
        int64_t begin = piece * KEYS_OF_A_TASK;
        for (int64_t c = 0; c < clusters_; ++c) {
            int64_t end = min<int64_t>(begin + KEYS_OF_A_TASK, starts[c + 1]);
            for (int64_t first = max<int64_t>(begin, starts[c]); first < end; first += CHUNK)
                add_members(h, state, c, first, min(CHUNK, end - first), grad_means, b);
        }
    }

    // The gradients of some members of a cluster, places first..first + count.
    void add_members(const Head& h, const State& state, int64_t cluster, int64_t first, int64_t count,
                     float* grad_means, const MembersBuffers& b) const {
        const int32_t* ids = state.order.order + first;
        pack(h.key, ids, 0, count, problem_.channels, b.rows, b.key_panels);
        pack(h.value, ids, 0, count, problem_.channels, b.rows, b.value_panels);
        for (int64_t j = 0; j < count; ++j) copy_row(h.key, ids[j], problem_.channels, 1.0f, b.key_rows + j * width_);
        memset(b.grad_keys, 0, (size_t)(count * width_) * sizeof(float));
        memset(b.grad_values, 0, (size_t)(count * width_) * sizeof(float));
        for (int64_t g = 0; g < problem_.groups; g += GROUPS_OF_MEMBERS) {
            int64_t groups = min(GROUPS_OF_MEMBERS, problem_.groups - g);
            weigh_for(state, cluster, first, count, g, groups, b);
            add_products(state, cluster, count, g, groups, grad_means, b);
        }
        for (int64_t j = 0; j < count; ++j) {
            float* grad_key = (float*)state.sums.key.at(ids[j]);
            float* grad_value = (float*)state.sums.value.at(ids[j]);
            for (int64_t d = 0; d < width_; d += W) {
                store(grad_key + d, load(grad_key + d) + load(b.grad_keys + j * width_ + d));
                store(grad_value + d, load(grad_value + d) + load(b.grad_values + j * width_ + d));
            }
        }
    }

    // P and dS of some groups with some members.
    void weigh_for(const State& state, int64_t cluster, int64_t first, int64_t count, int64_t first_group,
                   int64_t groups, const MembersBuffers& b) const {
        int64_t vectors = divide_up(count, W);
        int64_t stride = clusters_ * 2 * width_;  // from a group's pair to the next
        const float* means = state.groups.means + first_group * width_;
        const float* pairs = state.grad_pairs + first_group * stride + cluster * 2 * width_;
        for (int64_t r = 0; r < groups; r += MOST_ROWS) {
            int rows = (int)min<int64_t>(MOST_ROWS, groups - r);
            row_scores(means + r * width_, width_, rows, b.key_panels, vectors, problem_.channels, nullptr,
                       b.weights + r * CHUNK, CHUNK, nullptr);
            row_scores(pairs + r * stride, stride, rows, b.key_panels, vectors, problem_.channels, nullptr,
                       b.grad_scores + r * CHUNK, CHUNK, nullptr);
            row_scores(pairs + r * stride + width_, stride, rows, b.value_panels, vectors, problem_.channels, nullptr,
                       b.value_scores + r * CHUNK, CHUNK, nullptr);
        }
        for (int64_t j = 0; j < count; ++j) {  // what a group selected is no member
            for (int64_t i = state.starts[first + j]; i < state.starts[first + j + 1]; ++i) {
                int64_t group = state.selections[i] / problem_.list_length - first_group;
                if (group >= 0 && group < groups) b.weights[group * CHUNK + j] = -INFINITE;
            }
        }
        for (int64_t r = 0; r < groups; ++r) {
            int64_t residual = (first_group + r) * clusters_ + cluster;
            Floats mass = all(state.masses[residual]);
            Floats delta = all(state.deltas[residual]);
            for (int64_t i = r * CHUNK; i < r * CHUNK + vectors * W; i += W) {
                Floats weight = power_of_two(-larger(Floats{}, mass - load(b.weights + i) * LOG2_E));  // at most 1
                Floats grad = load(b.grad_scores + i) + load(b.value_scores + i) - delta;
                store(b.weights + i, weight);
                store(b.grad_scores + i, weight * grad);
            }
        }
    }

    // dt += dS K, dK += P^T e + dS^T t, dV += P^T dv'.
    void add_products(const State& state, int64_t cluster, int64_t count, int64_t first_group, int64_t groups,
                      float* grad_means, const MembersBuffers& b) const {
        float ones[MOST_ROWS];  // nothing fades
        for (float& one : ones) one = 1.0f;
        for (int64_t r = 0; r < groups; r += MOST_ROWS) {
            int rows = (int)min<int64_t>(MOST_ROWS, groups - r);
            row_weigh(Weights{b.grad_scores + r * CHUNK, CHUNK, 1}, rows, Values{b.key_rows, nullptr, width_}, count,
                      grad_means + (first_group + r) * width_, width_, width_, ones);
        }
        int64_t stride = clusters_ * 2 * width_;
        const float* pairs = state.grad_pairs + first_group * stride + cluster * 2 * width_;
        Values grad_keys = {pairs, nullptr, stride};
        Values grad_values = {pairs + width_, nullptr, stride};
        Values means = {state.groups.means + first_group * width_, nullptr, width_};
        for (int64_t j = 0; j < count; j += MOST_ROWS) {
            int rows = (int)min<int64_t>(MOST_ROWS, count - j);
            Weights weights = {b.weights + j, 1, CHUNK};
            Weights grad_scores = {b.grad_scores + j, 1, CHUNK};
            float* to_keys = b.grad_keys + j * width_;
            row_weigh(weights, rows, grad_keys, groups, to_keys, width_, width_, ones);
            row_weigh(grad_scores, rows, means, groups, to_keys, width_, width_, ones);
            row_weigh(weights, rows, grad_values, groups, b.grad_values + j * width_, width_, width_, ones);
        }
    }

    // Write the gradients of some keys, and add those of the mean to the queries of its group.
    void finish(const Head& h, const State& state, int64_t begin, const Buffers& own) const {
        state.sums.write_to(h, begin, min(begin + KEYS_OF_A_TASK, problem_.keys), problem_.channels);
        if (begin >= problem_.queries) return;
        int64_t size = problem_.groups * width_;
        int64_t pieces = divide_up(problem_.keys, KEYS_OF_A_TASK);
        for (int64_t i = 0; i < size; i += W) {
            Floats sum = load(state.grad_means + i);
            for (int64_t piece = 1; piece <= pieces; ++piece) sum += load(state.grad_means + piece * size + i);
            store(own.means + i, sum);
        }
        const int32_t* groups = state.slots.table.parts.groups;
        for (int64_t i = begin; i < min(begin + KEYS_OF_A_TASK, problem_.queries); ++i) {
            float* grad = (float*)state.grad_query.at(i);
            if (groups[i] >= 0) {
                Floats factor = all((float)problem_.scale / state.groups.counts[groups[i]]);
                const float* mean = own.means + groups[i] * width_;
                for (int64_t d = 0; d < width_; d += W) store(grad + d, load(grad + d) + load(mean + d) * factor);
            }
            write_back_row(h.grad_query, i, problem_.channels, 1.0f, grad);
        }
    }

    const dgt_problem& problem_;
    dgt_problem extended_;
    int64_t clusters_;
    int64_t width_;
    State* heads_;
};

}  // namespace dgt
