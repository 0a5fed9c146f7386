// Attention of a pretrained model in groups found in its own tokens, with residual keys.
//
//   clustering.h  groups of queries, clusters of keys
//   residual.h    exact keys of each group; the other keys summarized, one key per cluster
//   first_order.h what the summaries lose, to first order
//   attention.h   softmax attention over the prefix, the exact and the residual keys
//
// Key heads are processed in waves; the heads of a wave go through six steps together. What a wave stores is
// proportional to its tokens; group-key scores and residual keys exist only for the groups that a thread is working on.
#pragma once

#include "attention.h"
#include "clustering.h"
#include "first_order.h"
#include "interface.h"
#include "memory.h"
#include "parallel.h"
#include "residual.h"

namespace dgt {

constexpr int64_t PIECE = 11 * CHUNK;                  // tokens per task
constexpr size_t MOST_WAVE_BYTES = (size_t)256 << 20;  // of all heads that are processed together

// The clustered tokens of one head.
struct Clustered {
    Rows rows;
    int64_t count;
    const uint8_t* mask;   // 1 where a token is real; null: all are
    const int32_t* order;  // the real tokens, spread evenly

    int64_t real() const {
        if (!mask) return count;
        int64_t found = 0;
        for (int64_t i = 0; i < count; ++i) found += mask[i] != 0;
        return found;
    }
};

inline const int32_t* order_of(const dgt_clusters& clusters, int64_t image) {
    return clusters.order ? clusters.order + image * clusters.order_image_stride : nullptr;
}

inline Clustered clustered_queries(const dgt_problem& problem, const Head& h) {
    const uint8_t* mask = h.query_mask ? h.query_mask + problem.prefix : nullptr;
    return {h.query.from(problem.prefix), problem.queries - problem.prefix, mask,
            order_of(problem.query_clusters, h.image)};
}

inline Clustered clustered_keys(const dgt_problem& problem, const Head& h) {
    const uint8_t* mask = h.key_mask ? h.key_mask + problem.prefix : nullptr;
    return {h.key.from(problem.prefix), problem.keys - problem.prefix, mask, order_of(problem.key_clusters, h.image)};
}

inline int64_t* ids_of(const dgt_clusters& clusters, int64_t image, int64_t head) {
    if (!clusters.ids) return nullptr;
    return clusters.ids + image * clusters.ids_image_stride + head * clusters.ids_head_stride;
}

// The groups of the queries of one head.
struct QueryGroups {
    Centroids centroids;
    int32_t* ids;
    int32_t* order;   // queries sorted by group, numbered from the first after the prefix
    int32_t* starts;  // start of each group in that order, and the end
    int32_t* active;  // nonempty groups
    int32_t* prefix;  // real queries in the prefix
    int64_t* counts;  // number of active groups; number of those queries

    QueryGroups() = default;
    QueryGroups(Arena& arena, const dgt_problem& problem)
        : centroids(arena, problem.query_clusters.count, problem.channels) {
        int64_t queries = problem.queries - problem.prefix;
        ids = arena.take<int32_t>(queries);
        order = arena.take<int32_t>(queries);
        starts = arena.take<int32_t>(problem.query_clusters.count + 1);
        active = arena.take<int32_t>(problem.query_clusters.count);
        prefix = arena.take<int32_t>(problem.prefix);
        counts = arena.take<int64_t>(2);
    }

    void sort(const dgt_problem& problem, const Head& h) const {
        sort_by_group(ids, problem.queries - problem.prefix, centroids.count, order, starts);
        counts[0] = 0;
        for (int64_t g = 0; g < centroids.count; ++g)
            if (starts[g] < starts[g + 1]) active[counts[0]++] = (int32_t)g;
        counts[1] = 0;
        for (int64_t i = 0; i < problem.prefix; ++i)
            if (!h.query_mask || h.query_mask[i]) prefix[counts[1]++] = (int32_t)i;
    }
};

// State of one key head and of the query heads that it serves.
struct KeyHead {
    Centroids centroids;
    int32_t* ids;  // null: one cluster, or none
    SortedKeys keys;
    QueryGroups* queries;

    KeyHead() = default;
    KeyHead(Arena& arena, const dgt_problem& problem) : centroids(arena, problem.key_clusters.count, problem.channels) {
        int64_t count = problem.keys - problem.prefix;
        ids = arena.take<int32_t>(problem.key_clusters.count > 1 ? count : 0);
        if (problem.key_clusters.count <= 1) ids = nullptr;
        keys = SortedKeys(arena, count, problem.key_clusters.count, problem.prefix, problem.channels,
                          is_first_order(problem), multiplies_bfloat16(problem));
        queries = arena.take<QueryGroups>(heads_of(problem));
        for (int64_t i = 0; i < heads_of(problem); ++i) {
            QueryGroups groups(arena, problem);
            if (queries) queries[i] = groups;
        }
    }

    static int64_t heads_of(const dgt_problem& problem) { return problem.heads / problem.key_heads; }
};

struct ClusteredBuffers {
    ClusterBuffers cluster;
    SampleBuffers sample;
    GroupsBuffers groups;
    CovarianceBuffers covariance;
    AttendBuffers attend;

    ClusteredBuffers(Arena& arena, const dgt_problem& problem)
        : cluster(arena, max(problem.query_clusters.count, problem.key_clusters.count), problem.channels),
          sample(arena, most_sample(problem), problem.channels),
          groups(arena, problem, problem.keys - problem.prefix, problem.list_length - problem.prefix, problem.prefix,
                 is_first_order(problem), multiplies_bfloat16(problem)),
          covariance(arena, problem),
          attend(arena, problem) {}

    static int64_t most_sample(const dgt_problem& problem) {
        int64_t queries = sample_size(problem.query_clusters, problem.queries - problem.prefix);
        return problem.key_clusters.order
                   ? max(queries, sample_size(problem.key_clusters, problem.keys - problem.prefix))
                   : queries;
    }
};

// One wave of key heads, and what its steps share.
class Wave {
public:
    Wave(Arena& arena, const dgt_problem& problem, int64_t first, int64_t count)
        : problem_(problem), first_(first), count_(count), each_(KeyHead::heads_of(problem)) {
        heads_ = arena.take<KeyHead>(count);
        for (int64_t i = 0; i < count; ++i) {
            KeyHead head(arena, problem_);
            if (heads_) heads_[i] = head;
        }
    }

    void run(Member& member, ClusteredBuffers& own) {
        int64_t sides = 1 + each_;  // the keys, and each query head
        int64_t key_pieces = divide_up(problem_.keys - problem_.prefix, PIECE);
        int64_t query_pieces = divide_up(problem_.queries - problem_.prefix, PIECE);
        int64_t blocks = divide_up(problem_.query_clusters.count, GROUPS_AT_ONCE);
        int64_t pieces = key_pieces + each_ * query_pieces;
        member.share(count_ * sides, [&](int64_t task) { start_clusters(task / sides, task % sides, own); });
        member.share(count_ * pieces, [&](int64_t task) {
            int64_t piece = task % pieces;
            if (piece < key_pieces) join_keys(task / pieces, piece, own);
            else
                join_queries(task / pieces, (piece - key_pieces) / query_pieces, (piece - key_pieces) % query_pieces,
                             own);
        });
        member.share(count_ * sides, [&](int64_t task) { finish_clusters(task / sides, task % sides, own); });
        if (status_.get() != DGT_GOOD) return;
        member.share(count_ * key_pieces, [&](int64_t task) { lay_out(task / key_pieces, task % key_pieces, own); });
        int64_t clusters = max<int64_t>(1, problem_.key_clusters.count);
        member.share(count_ * clusters, [&](int64_t task) {
            measure_cluster(heads_[task / clusters].keys, task % clusters, own.covariance);
        });
        member.share(count_ * each_ * (blocks + 1), [&](int64_t task) {
            int64_t head = task / (blocks + 1);
            int64_t block = task % (blocks + 1);
            if (block == 0) attend_from_prefix(head / each_, head % each_, own);
            else attend_in_groups(head / each_, head % each_, (block - 1) * GROUPS_AT_ONCE, own);
        });
    }

    int status() const { return status_.get(); }

private:
    // A query head that the i-th key head of the wave serves.
    Head head(int64_t i, int64_t query) const {
        int64_t key_head = first_ + i;
        int64_t image = key_head / problem_.key_heads;
        return head_of(problem_, image * problem_.heads + key_head % problem_.key_heads * each_ + query);
    }

    bool clusters_keys() const { return problem_.key_clusters.count > 1 && problem_.key_clusters.order; }

    void start_clusters(int64_t i, int64_t side, const ClusteredBuffers& own) {
        if (side > 0) {
            Clustered tokens = clustered_queries(problem_, head(i, side - 1));
            cluster_sample(tokens.rows, tokens.order, tokens.real(), problem_.query_clusters, problem_.channels,
                           heads_[i].queries[side - 1].centroids, own.sample, own.cluster);
        } else if (clusters_keys()) {
            Clustered tokens = clustered_keys(problem_, head(i, 0));
            cluster_sample(tokens.rows, tokens.order, tokens.real(), problem_.key_clusters, problem_.channels,
                           heads_[i].centroids, own.sample, own.cluster);
        }
    }

    void join_keys(int64_t i, int64_t piece, const ClusteredBuffers& own) {
        Clustered tokens = clustered_keys(problem_, head(i, 0));
        int64_t begin = piece * PIECE;
        int64_t end = min(begin + PIECE, tokens.count);
        int64_t* given =
            ids_of(problem_.key_clusters, (first_ + i) / problem_.key_heads, (first_ + i) % problem_.key_heads);
        int32_t* ids = heads_[i].ids;
        if (clusters_keys()) {
            join_nearest(tokens.rows, begin, end, tokens.mask, heads_[i].centroids, problem_.channels, ids,
                         own.cluster);
            for (int64_t j = begin; given && j < end; ++j) given[j] = ids[j];
        } else if (ids) {
            for (int64_t j = begin; j < end; ++j) ids[j] = !tokens.mask || tokens.mask[j] ? (int32_t)given[j] : -1;
        }
    }

    void join_queries(int64_t i, int64_t query, int64_t piece, const ClusteredBuffers& own) {
        Clustered tokens = clustered_queries(problem_, head(i, query));
        const QueryGroups& groups = heads_[i].queries[query];
        int64_t begin = piece * PIECE;
        join_nearest(tokens.rows, begin, min(begin + PIECE, tokens.count), tokens.mask, groups.centroids,
                     problem_.channels, groups.ids, own.cluster);
    }

    void finish_clusters(int64_t i, int64_t side, const ClusteredBuffers& own) {
        KeyHead& of_keys = heads_[i];
        Head h = head(i, max<int64_t>(0, side - 1));
        if (side == 0) {
            Clustered tokens = clustered_keys(problem_, h);
            of_keys.keys.sort(of_keys.ids, tokens.count, problem_.key_clusters.count, tokens.mask);
            return;
        }
        Clustered tokens = clustered_queries(problem_, h);
        const QueryGroups& groups = of_keys.queries[side - 1];
        move_to_means(tokens.rows, nullptr, tokens.count, groups.ids, problem_.channels, groups.centroids, own.cluster);
        if (!groups.centroids.is_finite()) status_.raise(DGT_NAN_IN_QUERY);
        groups.sort(problem_, h);
        for (int64_t j = 0; h.query_mask && j < problem_.queries; ++j)
            if (!h.query_mask[j]) write_blind_row(problem_, h, j);
    }

    void lay_out(int64_t i, int64_t piece, const ClusteredBuffers& own) {
        Head h = head(i, 0);
        const SortedKeys& keys = heads_[i].keys;
        for (int64_t j = 0; piece == 0 && j < problem_.prefix; ++j)
            keys.prefix.copy(h.key, h.value, j, problem_.channels, j);
        int64_t begin = piece * PIECE;
        int64_t end = min(begin + PIECE, *keys.count);
        if (begin >= end) return;
        keys.lay_out(h.key.from(problem_.prefix), h.value.from(problem_.prefix), begin, end, problem_.channels,
                     own.cluster.rows);
    }

    void measure_cluster(const SortedKeys& keys, int64_t cluster, const CovarianceBuffers& own) {
        int64_t clusters = problem_.key_clusters.count;
        if (keys.bf16() && clusters > 0) keys.join_members(cluster);
        keys.weigh_losses(cluster, clusters, problem_.channels, is_first_order(problem_));
        if (is_first_order(problem_)) estimate_covariance(keys, cluster, clusters, problem_.channels, own);
    }

    void attend_from_prefix(int64_t i, int64_t query, ClusteredBuffers& own) {
        Head h = head(i, query);
        const QueryGroups& groups = heads_[i].queries[query];
        KeyList all_keys = {nullptr, problem_.keys, h.key_mask};
        for (int64_t first = 0; first < groups.counts[1]; first += part_size(problem_)) {
            int64_t count = min(part_size(problem_), groups.counts[1] - first);
            attend_part(problem_, h, {groups.prefix, first, count, all_keys}, own.attend);
        }
    }

    void attend_in_groups(int64_t i, int64_t query, int64_t first, ClusteredBuffers& own) {
        Head h = head(i, query);
        const QueryGroups& groups = heads_[i].queries[query];
        const SortedKeys& keys = heads_[i].keys;
        const GroupsBuffers& b = own.groups;
        int64_t count = min(GROUPS_AT_ONCE, groups.counts[0] - first);
        if (count <= 0) return;
        float factor = factor_of(problem_);
        for (int64_t r = 0; r < count; ++r) {
            const float* mean = groups.centroids.row(groups.active[first + r]);
            for (int64_t d = 0; d < b.width; d += W) store(b.means + r * b.width + d, load(mean + d) * factor);
        }
        if (!score_and_select(keys, count, problem_.channels, problem_.list_length - problem_.prefix, b)) {
            status_.raise(DGT_NAN_IN_KEY);
            return;
        }
        for (int64_t r = 0; r < count; ++r) b.hide_selected(r);
        sum_up_clusters(keys, count, b);
        if (is_first_order(problem_)) mix_covariances(keys, count, problem_.channels, b);
        for (int64_t r = 0; r < count; ++r) attend_group(h, groups, groups.active[first + r], keys, r, own);
    }

    // Attend from the queries of a group, the r-th of the groups processed together.
    void attend_group(Head h, const QueryGroups& groups, int64_t group, const SortedKeys& keys, int64_t r,
                      ClusteredBuffers& own) {
        const GroupsBuffers& b = own.groups;
        int64_t exact = list_exact(h, keys, r, b);
        Pairs residual = list_residual(exact, r, b);
        Pairs all_pairs = {b.list, b.list_biases, exact + residual.count, keys.bf16() ? exact : 0};
        if (is_first_order(problem_)) all_pairs.count = exact;
        KeyBlock::prefetch_pairs(problem_, all_pairs, 0);
        h.query = h.query.from(problem_.prefix);
        h.output = h.output.from(problem_.prefix);
        int64_t total = groups.starts[group + 1] - groups.starts[group];
        int64_t pieces = divide_up(total, part_size(problem_));
        for (int64_t piece = 0; piece < pieces; ++piece) {
            int64_t begin = total * piece / pieces;
            int64_t end = total * (piece + 1) / pieces;
            Part part = {groups.order, groups.starts[group] + begin, end - begin, {nullptr, 0, nullptr, all_pairs}};
            if (is_first_order(problem_))
                attend_part_to_first_order(problem_, h, part, residual, b.means + r * b.width, largest_spread(r, b),
                                           b.mixed(r), own.attend);
            else attend_part(problem_, h, part, own.attend);
        }
    }

    // What a group's queries attend to: the prefix and the exact keys; returns how many.
    int64_t list_exact(const Head& h, const SortedKeys& keys, int64_t r, const GroupsBuffers& b) const {
        const Candidates& found = b.candidates[r];
        int64_t length = 0;
        for (int64_t j = 0; j < problem_.prefix; ++j)
            if (!h.key_mask || h.key_mask[j]) b.list[length++] = keys.prefix.row(j);
        for (int64_t j = 0; j < found.count; ++j) b.list[length++] = keys.pairs.row(found.ids[j]);
        memset(b.list_biases, 0, (size_t)length * sizeof(float));
        return length;
    }

    // And, behind these, the residual keys that represent at least one key.
    Pairs list_residual(int64_t first, int64_t r, const GroupsBuffers& b) const {
        int64_t count = 0;
        for (int64_t c = 0; c < b.clusters; ++c) {
            float bias = b.biases[r * b.clusters + c];
            if (bias == -INFINITE) continue;
            b.list[first + count] = b.residual(r, c);
            b.list_biases[first + count] = bias;
            if (is_first_order(problem_)) b.list_spreads[count] = b.spreads[r * b.clusters + c];
            ++count;
        }
        if (is_first_order(problem_))
            for (int64_t j = count; count && j < round_up(count, W); ++j) b.list_spreads[j] = b.list_spreads[count - 1];
        return {b.list + first, b.list_biases + first, count, 0, is_first_order(problem_) ? b.list_spreads : nullptr};
    }

    static float largest_spread(int64_t r, const GroupsBuffers& b) {
        float largest = 0.0f;
        for (int64_t c = 0; c < b.clusters; ++c) largest = max(largest, b.spreads[r * b.clusters + c]);
        return largest;
    }

    const dgt_problem& problem_;
    int64_t first_;
    int64_t count_;
    int64_t each_;  // query heads per key head
    KeyHead* heads_;
    Status status_;
};

inline int run_wave(const dgt_problem& problem, int64_t first, int64_t count) {
    Arena measure;
    Wave measured(measure, problem, first, count);
    size_t shared = measure.used();
    size_t bytes = bytes_of<ClusteredBuffers>(problem);
    int64_t threads = thread_count(problem);
    Block block(shared + bytes * (size_t)threads);
    if (block.failed()) return DGT_NO_MEMORY;
    Arena arena(block.aligned(), shared);
    Wave wave(arena, problem, first, count);
    in_parallel(problem, threads, [&](Member& member) {
        Arena of_member(block.aligned() + shared + bytes * (size_t)member.seat(), bytes);
        ClusteredBuffers own(of_member, problem);
        wave.run(member, own);
    });
    return wave.status();
}

// Process as many key heads at a time as memory allows.
inline int run_clustered(const dgt_problem& problem) {
    Arena measure;
    KeyHead head(measure, problem);
    int64_t heads = problem.images * problem.key_heads;
    int64_t at_a_time = max<int64_t>(1, (int64_t)(MOST_WAVE_BYTES / measure.used()));
    for (int64_t first = 0; first < heads; first += at_a_time) {
        int status = run_wave(problem, first, min(at_a_time, heads - first));
        if (status != DGT_GOOD) return status;
    }
    return DGT_GOOD;
}

// ---- clusters only --------------------------------------------------------------------------------------------------

struct TokenBuffers {
    ClusterBuffers cluster;
    SampleBuffers sample;

    TokenBuffers(Arena& arena, const dgt_problem& problem)
        : cluster(arena, problem.query_clusters.count, problem.channels),
          sample(arena, sample_size(problem.query_clusters, problem.queries), problem.channels) {}
};

// Clusters of one head.
struct TokenClusters {
    Centroids centroids;
    int32_t* ids;

    TokenClusters() = default;
    TokenClusters(Arena& arena, const dgt_problem& problem)
        : centroids(arena, problem.query_clusters.count, problem.channels) {
        ids = arena.take<int32_t>(problem.queries);
    }

    void write(const dgt_problem& problem, int64_t index) const {
        const dgt_clusters& to = problem.query_clusters;
        write_ids(ids, problem.queries, ids_of(to, index / problem.heads, index % problem.heads));
        for (int64_t c = 0; c < to.count; ++c)
            memcpy(to.centroids + (index * to.count + c) * problem.channels, centroids.row(c),
                   (size_t)problem.channels * sizeof(float));
    }
};

inline int run_cluster_tokens(const dgt_problem& problem) {
    int64_t heads = problem.images * problem.heads;
    int64_t threads = thread_count(problem);
    size_t head_bytes = bytes_of<TokenClusters>(problem);
    size_t table_bytes = (size_t)round_up(heads * (int64_t)sizeof(TokenClusters), Arena::ALIGNMENT);
    size_t shared = table_bytes + head_bytes * (size_t)heads;
    size_t bytes = bytes_of<TokenBuffers>(problem);
    Block block(shared + bytes * (size_t)threads);
    if (block.failed()) return DGT_NO_MEMORY;
    TokenClusters* found = (TokenClusters*)block.aligned();
    Arena arena(block.aligned() + table_bytes, shared - table_bytes);
    for (int64_t i = 0; i < heads; ++i) found[i] = TokenClusters(arena, problem);
    int64_t pieces = divide_up(problem.queries, PIECE);
    in_parallel(problem, threads, [&](Member& member) {
        Arena of_member(block.aligned() + shared + bytes * (size_t)member.seat(), bytes);
        TokenBuffers own(of_member, problem);
        member.share(heads, [&](int64_t i) {
            Clustered tokens = clustered_queries(problem, head_of(problem, i));
            cluster_sample(tokens.rows, tokens.order, tokens.real(), problem.query_clusters, problem.channels,
                           found[i].centroids, own.sample, own.cluster);
        });
        member.share(heads * pieces, [&](int64_t task) {
            Clustered tokens = clustered_queries(problem, head_of(problem, task / pieces));
            const TokenClusters& clusters = found[task / pieces];
            int64_t begin = task % pieces * PIECE;
            join_nearest(tokens.rows, begin, min(begin + PIECE, tokens.count), tokens.mask, clusters.centroids,
                         problem.channels, clusters.ids, own.cluster);
        });
        member.share(heads, [&](int64_t i) {
            Clustered tokens = clustered_queries(problem, head_of(problem, i));
            move_to_means(tokens.rows, nullptr, tokens.count, found[i].ids, problem.channels, found[i].centroids,
                          own.cluster);
            found[i].write(problem, i);
        });
    });
    return DGT_GOOD;
}

}  // namespace dgt
