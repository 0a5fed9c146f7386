// The native kernels against naive loops in double precision, without Python: for every instruction set, for
// sanitizers, and for other processors in emulation. `make test-native` builds and runs it, as do the commands in
// CONTRIBUTING.md. `native_check reduced` runs fewer and smaller cases.

#include "../../src/dgt/ops/cpu/kernels/parallel.h"
#include "clustered_check.h"
#include "layers_check.h"
#include "maps_check.h"
#include "naive.h"
#include "problem.h"
#include "residual_check.h"

#include <csignal>
#include <cstdio>
#include <limits>
#include <numeric>

#include <sys/wait.h>
#include <unistd.h>
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#endif

namespace native_check {
namespace {

int failures = 0;

void expect(bool good, const char* what, const std::string& name) {
    if (good) return;
    ++failures;
    std::printf("FAILED  %s: %s\n", name.c_str(), what);
}

// Largest errors in a case.
struct Errors {
    double output = 0;
    double gradients = 0;
};

// Of the output, relative to 1 + |x|: the rounding of the output's type plus the error of the sums.
double output_tolerance(dgt_type type) {
    if (type == DGT_BFLOAT16) return 1.0 / 256;
    if (type == DGT_FLOAT16) return 1.0 / 2048;
    return 1e-5;
}

// Of weights and their gradients, where both are multiplied as bfloat16.
double rounding_of_weights(const Case& c) { return c.type == DGT_BFLOAT16 && c.channels % 2 == 0 ? 1.0 / 256 : 0; }

constexpr double GRADIENT_TOLERANCE = 1e-4;  // relative to 1 + |x|, for sums over all queries of a key

// ---- lists ----------------------------------------------------------------------------------------------------------

// Whether all ids are in range and can be used as indices.
bool check_ranges(const Head& head, const std::string& name) {
    const Case& c = head.size();
    bool good = true;
    for (int64_t i = 0; i < c.queries; ++i) {
        const bool grouped = i >= c.prefix && head.is_real_query(i);
        const int64_t group = head.group_of(i);
        good = good && (grouped ? group >= 0 && group < c.groups : group == -1);
    }
    expect(good, "group ids in range, -1 for padding and prefix", name);
    for (int64_t place = 0; place < c.groups * c.list_length(); ++place) {
        const int64_t j = head.list(0)[place];
        good = good && j >= -1 && j < c.keys;
    }
    expect(good, "key ids in range", name);
    return good;
}

// The group with the highest score, ties to the lowest id.
void check_groups(const Head& head, const std::string& name) {
    const Case& c = head.size();
    for (int64_t i = c.prefix; i < c.queries; ++i) {
        if (!head.is_real_query(i)) continue;
        int64_t best = 0;
        for (int64_t group = 1; group < c.groups; ++group) {
            if (head.group_score(i, group) > head.group_score(i, best)) best = group;
        }
        const int64_t ours = head.group_of(i);
        const double lost = head.group_score(i, best) - head.group_score(i, ours);
        expect(c.whole ? ours == best : lost < 1e-4, "the best group", name);
    }
}

// The prefix, then the k real keys with the highest scores, ties to the lowest id, ascending, then -1.
void check_list(const Head& head, int64_t group, const std::string& name) {
    const Case& c = head.size();
    const int64_t* ours = head.list(group);
    for (int64_t j = 0; j < c.prefix; ++j) {
        expect(ours[j] == (head.is_real_key(j) ? j : -1), "the prefix stands first in a list", name);
    }
    ours += c.prefix;

    Doubles score(c.keys);
    Ids order;
    for (int64_t j = c.prefix; j < c.keys; ++j) {
        score[j] = head.key_score(group, j);
        if (head.is_real_key(j)) order.push_back(j);
    }
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return score[a] > score[b]; });
    const int64_t places = c.list_length() - c.prefix;
    const int64_t count = std::min<int64_t>(places, order.size());
    double lost = 0;
    bool ascending = true;
    for (int64_t n = 0; n < count; ++n) {
        if (ours[n] < c.prefix || !head.is_real_key(ours[n])) return expect(false, "a list holds real keys", name);
        lost += score[order[n]] - score[ours[n]];
        ascending = ascending && (n == 0 || ours[n] > ours[n - 1]);
    }
    expect(ascending, "key ids ascend", name);
    expect(std::abs(lost) <= (c.whole ? 0 : 1e-5 * count), "the k best keys", name);
    std::sort(order.begin(), order.begin() + count);
    if (c.whole) expect(std::equal(ours, ours + count, order.begin()), "ties to the lowest id", name);
    for (int64_t n = count; n < places; ++n) expect(ours[n] == -1, "places left over are -1", name);
}

// Sums of normalized queries, and counts (Eq. 3).
void check_statistics(const Head& head, const std::string& name) {
    const Case& c = head.size();
    Doubles sums(c.groups * c.channels);
    Doubles counts(c.groups);
    for (int64_t i = 0; i < c.queries; ++i) {
        const int64_t group = head.group_of(i);
        if (group < 0) continue;
        double squares = 0;
        for (int64_t d = 0; d < c.channels; ++d) squares += head.query(i, d) * head.query(i, d);
        const double length = std::max(std::sqrt(squares), 1e-12);
        for (int64_t d = 0; d < c.channels; ++d) sums[group * c.channels + d] += head.query(i, d) / length;
        counts[group] += 1;
    }
    double wrong = 0;  // relative to the number of unit vectors in the sum
    for (int64_t n = 0; n < c.groups * c.channels; ++n) {
        const double ours = head.data.group_sums[head.index * c.groups * c.channels + n];
        wrong = std::max(wrong, std::abs(ours - sums[n]) / (1 + counts[n / c.channels]));
    }
    expect(wrong < 1e-6, "sums of groups", name);
    const float* ours = head.data.group_counts.data() + head.index * c.groups;
    expect(std::equal(counts.begin(), counts.end(), ours), "counts of groups", name);
}

// ---- outputs and gradients ------------------------------------------------------------------------------------------

void compare(const Head& head, const Expected& expected, Errors& errors, const std::string& name) {
    const Case& c = head.size();
    for (int64_t i = 0; i < c.queries; ++i) {
        for (int64_t d = 0; d < c.channels; ++d) {
            const double ours = head.output(i, d);
            errors.output = std::max(errors.output, relative(ours, expected.output[i * c.channels + d]));
        }
        const double ours = head.data.logsumexp[head.index * c.queries + i];
        const bool blind = expected.logsumexp[i] == -INFINITE;
        expect(blind == (ours == -INFINITE), "a logsumexp of -inf where nothing is seen", name);
        if (!blind) expect(relative(ours, expected.logsumexp[i]) < 1e-5, "logsumexp", name);
    }
    double& worst = errors.gradients;
    const double rounding = rounding_of_weights(c);
    worst = std::max(worst, largest_error(head.data.grad_query, head.index, expected.grad_query, rounding));
    worst = std::max(worst, largest_error(head.data.grad_key, head.index, expected.grad_key, rounding));
    worst = std::max(worst, largest_error(head.data.grad_value, head.index, expected.grad_value, rounding));
    if (c.biased)
        worst = std::max(worst, largest_error(head.data.grad_key_bias, head.index, expected.grad_key_bias, 0));
}

void report(const Case& c, const Errors& errors, const char* what) {
    const std::string name = name_of(c) + what;
    expect(errors.output < output_tolerance(c.type), "output", name);
    expect(errors.gradients < GRADIENT_TOLERANCE, "gradients", name);
    std::printf("%-90s output %.1e gradients %.1e\n", name.c_str(), errors.output, errors.gradients);
}

// Gradients of the tokens' own type are those of float32, rounded once.
void check_gradients_of_own_type(const Data& data, dgt_problem problem, int (*backward)(const dgt_problem*),
                                 const std::string& name) {
    const Case& c = data.size;
    if (c.type == DGT_FLOAT32) return;
    Tensor query(c, c.heads, c.queries);
    Tensor key(c, c.heads, c.keys);
    Tensor value = key;
    problem.grad_type = c.type;
    problem.grad_query = query.tokens();
    problem.grad_key = key.tokens();
    problem.grad_value = value.tokens();
    expect(backward(&problem) == DGT_GOOD, "gradients of the tokens' type return 0", name);
    const double half_step = c.type == DGT_BFLOAT16 ? 0x1p-8 : 0x1p-11;
    const double smallest = c.type == DGT_BFLOAT16 ? 0x1p-126 : 0x1p-25;
    auto compare = [&](const Tensor& own, const Floats& floats, int64_t tokens, const char* of) {
        int64_t wrong = 0;
        for (int64_t i = 0; i < (int64_t)floats.size(); ++i) {
            const int64_t token = i / c.channels;
            const double there = own.at(token / tokens, token % tokens, i % c.channels);
            wrong += !(std::abs(there - floats[i]) <= half_step * std::abs(floats[i]) + smallest);
        }
        expect(wrong == 0, of, name);
    };
    compare(query, data.grad_query, c.queries, "query's gradient of its type");
    compare(key, data.grad_key, c.keys, "key's gradient of its type");
    compare(value, data.grad_value, c.keys, "value's gradient of its type");
}

// ---- the checks -----------------------------------------------------------------------------------------------------

// Run step by step, the lists are the same; the output may be summed in another order.
void check_steps(const Case& c, const Data& whole) {
    Data data = make_data(c);
    const std::string name = name_of(c) + " step by step";
    expect(call(dgt_group_queries, data) == DGT_GOOD, "grouping returns 0", name);
    expect(call(dgt_select_keys, data) == DGT_GOOD, "selecting returns 0", name);
    expect(data.group_ids == whole.group_ids, "the same groups", name);
    expect(data.key_ids == whole.key_ids, "the same lists", name);
    expect(call(dgt_attend, data) == DGT_GOOD, "attending returns 0", name);
    double worst = 0;
    for (int64_t index = 0; index < c.all_heads(); ++index) {
        const Head ours{data, index};
        const Head theirs{whole, index};
        for (int64_t i = 0; i < c.queries; ++i) {
            for (int64_t d = 0; d < c.channels; ++d) {
                worst = std::max(worst, relative(ours.output(i, d), theirs.output(i, d)));
            }
        }
    }
    expect(worst < 2 * output_tolerance(c.type), "the same output", name);
}

void check_groups_and_gradients(const Case& c) {
    Data data = make_data(c);
    const std::string name = name_of(c);
    expect(call(dgt_attention, data) == DGT_GOOD, "attention returns 0", name);
    for (int64_t index = 0; index < c.all_heads(); ++index) {
        if (!check_ranges({data, index}, name)) return;
    }
    expect(call(dgt_attend_backward, data) == DGT_GOOD, "the gradients return 0", name);
    expect(call(dgt_group_statistics, data) == DGT_GOOD, "the statistics return 0", name);
    Errors errors;
    for (int64_t index = 0; index < c.all_heads(); ++index) {
        const Head head{data, index};
        check_groups(head, name);
        for (int64_t group = 0; group < c.groups; ++group) check_list(head, group, name);
        check_statistics(head, name);
        compare(head, expected_of(head, keys_in_group), errors, name);
    }
    report(c, errors, "");
    check_gradients_of_own_type(data, problem_of(data), dgt_attend_backward, name);
    check_steps(c, data);
}

void check_dense(Case c) {
    c.masked = false;
    c.prefix = 0;
    Data data = make_data(c);
    const std::string name = name_of(c) + " dense";
    expect(call(dgt_dense, data) == DGT_GOOD, "dense attention returns 0", name);
    expect(call(dgt_dense_backward, data) == DGT_GOOD, "its gradients return 0", name);
    Errors errors;
    for (int64_t index = 0; index < c.all_heads(); ++index) {
        const Head head{data, index};
        compare(head, expected_of(head, keys_under_mask), errors, name);
    }
    report(c, errors, " dense");
    check_gradients_of_own_type(data, problem_of(data), dgt_dense_backward, name);
}

// Groups and clusters found in the tokens. Integer scores would tie, and ties may be broken either way here.
void check_clustered(Case c) {
    c.whole = false;
    c.biased = false;
    c.dense_mask = DGT_NO_MASK;
    if (c.queries != c.keys) c.prefix = std::min(c.prefix, std::min(c.queries, c.keys) - 1);
    c.groups = std::min(c.groups, c.queries - c.prefix);
    c.residual_keys = std::min(c.residual_keys, c.keys - c.prefix);
    Data data = make_data(c);
    const std::string name = name_of(c) + " clustered";
    const Bytes all_real(c.images * c.queries, 1);
    const bool masks_queries = c.masked && c.queries == c.keys;
    Clustering queries(c, c.heads, c.queries, c.groups, masks_queries ? data.real_queries : all_real);
    Clustering keys(c, c.key_heads, c.keys, c.residual_keys, data.real_keys);
    dgt_problem problem = clustered_problem(data, queries, keys);
    ClusteredErrors errors;
    Bytes mask;
    for (int64_t steps : {0, 3}) {
        const dgt_clusters clusters = queries.describe(steps);
        expect(
            cluster_alone(problem, problem.query, c.queries, c.heads, problem.query_mask, clusters, mask) == DGT_GOOD,
            "clustering queries returns 0", name);
        for (int64_t index = 0; index < c.all_heads(); ++index) {
            const Head head{data, index};
            int64_t real = 0;
            for (int64_t i = 0; i < queries.tokens(); ++i) real += queries.id(index, i) >= 0;
            auto at = [&](int64_t i, int64_t d) { return head.query(c.prefix + i, d); };
            errors.clusters = std::max(
                errors.clusters, error_of_clusters(queries, index, head.image(), real, c.channels, steps == 0, at));
        }
    }
    if (c.residual_keys > 1)
        expect(cluster_alone(problem, problem.key, c.keys, c.key_heads, problem.key_mask, keys.describe(3), mask) ==
                   DGT_GOOD,
               "clustering keys returns 0", name);
    expect(dgt_clustered_attention(&problem) == DGT_GOOD, "clustered attention returns 0", name);
    for (int64_t index = 0; index < c.all_heads(); ++index) compare_clustered({data, index}, queries, keys, errors);
    const Tensor found = data.output;
    problem.threads = 4 - c.threads;
    problem.key_clusters.order = nullptr;  // now the clusters it found are given
    expect(dgt_clustered_attention(&problem) == DGT_GOOD, "with given clusters it returns 0", name);
    expect(found == data.output, "the same output with given clusters and other threads, bit for bit", name);
    expect(errors.clusters < 1e-5, "clusters", name);
    expect(errors.output < output_tolerance(c.type), "output", name);
    std::printf("%-90s output %.1e clusters %.1e\n", name.c_str(), errors.output, errors.clusters);
}

// Given groups, with residual keys.
void check_residual(Case c) {
    c.whole = false;
    c.biased = false;
    c.first_order = false;
    c.prefix = 0;
    c.key_heads = c.heads;
    c.residual_keys = std::max<int64_t>(1, std::min(c.residual_keys, c.keys));
    Data data = make_data(c);
    ResidualKeys residual(c, data.real_keys);
    dgt_problem problem = problem_of(data);
    problem.grad_logsumexp = nullptr;
    residual.describe(c, problem);
    const std::string name = name_of(c) + " residual";
    expect(dgt_attention(&problem) == DGT_GOOD, "attention to residual keys returns 0", name);
    for (int64_t index = 0; index < c.all_heads(); ++index) {
        if (!check_ranges({data, index}, name)) return;
    }
    expect(dgt_attend_backward(&problem) == DGT_GOOD, "its gradients return 0", name);
    Errors errors;
    for (int64_t index = 0; index < c.all_heads(); ++index) {
        const Head head{data, index};
        const Doubles output = attend_to_residual_keys(head, residual, Tokens(head));
        for (int64_t i = 0; i < c.queries * c.channels; ++i) {
            const double ours = head.output(i / c.channels, i % c.channels);
            errors.output = std::max(errors.output, relative(ours, output[i]));
        }
        errors.gradients = std::max(errors.gradients, error_of_gradients(head, residual));
    }
    // Residual keys are rounded to the type, as are outputs, which the gradients are computed from.
    const double tolerance = output_tolerance(c.type) * (c.type == DGT_FLOAT32 ? 10 : 4);
    expect(errors.output < output_tolerance(c.type), "output", name);
    expect(errors.gradients < tolerance, "gradients", name);
    std::printf("%-90s output %.1e gradients %.1e\n", name.c_str(), errors.output, errors.gradients);

    const Data found = data;
    problem.threads = 4 - c.threads;
    expect(dgt_attend(&problem) == DGT_GOOD, "given the lists it returns 0", name);
    expect(dgt_attend_backward(&problem) == DGT_GOOD, "and so do its gradients", name);
    expect(found.output == data.output, "the same output with other threads, bit for bit", name);
    expect(found.grad_query == data.grad_query, "the same gradient in query", name);
    expect(found.grad_key == data.grad_key, "the same gradient in key", name);
    expect(found.grad_value == data.grad_value, "the same gradient in value", name);
    check_gradients_of_own_type(data, problem, dgt_attend_backward, name);
}

// Bitwise the same result with any number of threads.
void check_threads(const Case& c) {
    Data one = make_data(c);
    Data more = one;
    one.size.threads = 1;
    more.size.threads = 3;
    for (Data* data : {&one, &more}) {
        call(dgt_attention, *data);
        call(dgt_attend_backward, *data);
    }
    const std::string name = name_of(more.size);
    expect(one.group_ids == more.group_ids, "the groups of one thread", name);
    expect(one.key_ids == more.key_ids, "the lists of one thread", name);
    expect(one.output == more.output, "the output of one thread, bit for bit", name);
    expect(one.logsumexp == more.logsumexp, "the logsumexp of one thread, bit for bit", name);
    expect(one.grad_query == more.grad_query, "query's gradient of one thread, bit for bit", name);
    expect(one.grad_key == more.grad_key, "key's gradient of one thread, bit for bit", name);
    expect(one.grad_value == more.grad_value, "value's gradient of one thread, bit for bit", name);
}

void check_nan(const Case& c) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const int64_t place = (c.queries - 3) * c.channels;  // in the first head, in its last panel
    Data query = make_data(c);
    Data key = query;
    query.query.set(place, nan);
    key.key.set(place, nan);
    expect(call(dgt_attention, query) == DGT_NAN_IN_QUERY, "NaN is reported", name_of(c) + ", query");
    expect(call(dgt_attention, key) == DGT_NAN_IN_KEY, "NaN is reported", name_of(c) + ", key");
    Clustering queries(c, c.heads, c.queries, c.groups, query.real_queries);
    Clustering keys(c, c.heads, c.keys, 5, key.real_keys);
    dgt_problem problem = clustered_problem(query, queries, keys);
    expect(dgt_clustered_attention(&problem) == DGT_NAN_IN_QUERY, "NaN is reported", name_of(c) + ", clustered query");
    problem = clustered_problem(key, queries, keys);
    expect(dgt_clustered_attention(&problem) == DGT_NAN_IN_KEY, "NaN is reported", name_of(c) + ", clustered key");
}

// ---- cases ----------------------------------------------------------------------------------------------------------

Case sizes(int64_t images, int64_t heads, int64_t tokens, int64_t channels, int64_t groups, int64_t top_k,
           int64_t threads) {
    Case c;
    c.images = images;
    c.heads = heads;
    c.key_heads = heads;
    c.queries = tokens;
    c.keys = tokens;
    c.channels = channels;
    c.groups = groups;
    c.top_k = top_k;
    c.threads = threads;
    return c;
}

// A random combination of sizes and options.
Case random_case(std::mt19937& random) {
    auto from = [&](int64_t low, int64_t high) { return low + (int64_t)(random() % (uint64_t)(high - low + 1)); };
    auto one_in = [&](int64_t count) { return from(1, count) == 1; };
    const int64_t channels = one_in(3) ? from(1, 80) : 8 * from(1, 6);
    const int64_t heads = from(1, 4);
    Case c = sizes(from(1, 3), heads, from(1, 150), channels, from(1, 50), from(1, 170), from(1, 3));
    if (heads % 2 == 0 && one_in(3)) c.key_heads = heads / 2;
    if (one_in(3)) c.keys = from(1, 150);
    else if (one_in(3)) c.prefix = from(0, c.keys - 1);
    c.type = (dgt_type)from(0, 2);
    c.dense_mask = (dgt_mask_type)from(0, 3);
    do c.grid_columns = from(1, c.keys);
    while (c.keys % c.grid_columns != 0);
    c.whole = one_in(2);
    c.strided = one_in(2);
    c.masked = one_in(2);
    c.biased = one_in(2);
    c.residual_keys = one_in(4) ? from(0, 1) : from(2, 40);
    c.first_order = one_in(2);
    return c;
}

void check_large_cases() {
    const std::vector<Case> large = {
        sizes(2, 2, 196, 32, 48, 98, 1),
        sizes(1, 1, 2500, 17, 9, 64, 2),
        sizes(1, 1, 2100, 64, 3, 300, 2),
        sizes(1, 1, 70, 256, 5, 20, 2),
    };
    for (Case c : large) {
        check_groups_and_gradients(c);
        c.residual_keys = 20;
        for (bool first_order : {false, true}) {
            c.first_order = first_order;
            check_clustered(c);
        }
        check_residual(c);
    }
    Case ties = sizes(1, 1, 2500, 8, 5, 100, 2);
    ties.whole = true;
    check_groups_and_gradients(ties);
    check_dense(sizes(1, 1, 1100, 32, 1, 1, 2));
    for (dgt_type type : {DGT_FLOAT32, DGT_BFLOAT16, DGT_FLOAT16}) {
        for (int64_t columns : {14, 20, 28}) {  // of windows, and of a grid whose rows are no blocks
            Case grid = sizes(2, 3, 20 * columns, 64, 1, 1, 2);
            grid.type = type;
            grid.dense_mask = DGT_MASK_GRID;
            grid.grid_columns = columns;
            check_dense(grid);
        }
    }
    check_threads(sizes(1, 1, 2500, 17, 9, 64, 1));
    check_nan(sizes(1, 1, 2500, 16, 4, 98, 2));
}

// A region of more steps than there is room for ends the process, and says why.
void check_too_many_steps() {
    std::fflush(stdout);
    int ends[2];
    if (pipe(ends)) return expect(false, "a pipe", "too many steps");
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        dgt_problem problem = {};
        dgt::in_parallel(problem, 1, [](dgt::Member& member) {
            for (int step = 0; step <= dgt::MOST_STEPS; ++step) member.share(1, [](int64_t) {});
        });
        _exit(0);
    }
    close(ends[1]);
    char said[200] = {};
    expect(read(ends[0], said, sizeof said - 1) > 0, "a sentence", "too many steps");
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    expect(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT, "an abort", "too many steps");
    expect(std::strstr(said, "more steps than MOST_STEPS") != nullptr, said, "too many steps");
}

int run(bool reduced) {
    std::printf("%d lanes\n", dgt_lanes());
    expect(dgt_abi_version() == DGT_ABI_VERSION, "the version of the interface", "library");
    std::mt19937 random(11);
    const int cases = reduced ? 24 : 80;
    for (int n = 0; n < cases; ++n) {
        Case c = random_case(random);
        check_dense(c);
        check_clustered(c);
        c.dense_mask = DGT_NO_MASK;
        check_groups_and_gradients(c);
        check_residual(c);
    }
    check_threads(sizes(1, 2, 300, 32, 4, 98, 1));
    check_threads(sizes(4, 4, 60, 32, 4, 10, 1));
    check_nan(sizes(1, 1, 300, 32, 4, 98, 1));
    if (!reduced) check_large_cases();
    check_layers(reduced, expect);
    check_maps(reduced, expect);
    check_too_many_steps();
    std::printf("%s\n", failures ? "FAILED" : "all good");
    return failures != 0;
}

}  // namespace
}  // namespace native_check

int main(int count, char** words) {
#if defined(__x86_64__) && defined(__linux__)
    syscall(SYS_arch_prctl, 0x1023, 18);  // asks for the tiles of AMX, as library.py does; refused where there are none
#endif
    return native_check::run(count > 1 && std::strcmp(words[1], "reduced") == 0);
}
