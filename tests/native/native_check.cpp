// The native kernels against naive loops in double precision, without Python: for every instruction set, for
// sanitizers, and for other processors in emulation. It includes the source, so that one command builds it:
// `make test-native`, or the commands of CONTRIBUTING.md. `native_check reduced` tries small cases alone.

#include "../../src/dgt/ops/native/kernels/dgt_native.cpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace native_check {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;
using Ids = std::vector<int64_t>;

constexpr double OUTPUT_TOLERANCE = 1e-5;
constexpr double GRADIENT_TOLERANCE = 1e-4;  // relative, of sums over all queries of a key

int failures = 0;

void expect(bool good, const std::string& what, const std::string& name) {
    if (good) return;
    ++failures;
    std::printf("FAILED  %s: %s\n", name.c_str(), what.c_str());
}

struct Case {
    int64_t batch;
    int64_t heads;
    int64_t tokens;
    int64_t depth;
    int64_t groups;
    int64_t top_k;
    int32_t threads;
};

struct Form {
    bool whole;    // small whole numbers: their scores are exact, so that lists must be equal, ties included
    bool strided;  // (B, L, H, D) in memory, as views of a projection are
};

// Tensors of one case; query, key, value, output and its gradient share their strides.
struct Data {
    Case size;
    Form form;
    int64_t image_stride;
    int64_t head_stride;
    int64_t token_stride;
    float scale;
    Floats query, key, value, centroids, grad_out;
    Floats out;
    Ids group_ids;               // (B, H, L)
    Ids key_ids;                 // (B, H, G, k)
    Floats grad_query, grad_key, grad_value;  // contiguous (B, H, L, D)

    int64_t keys_in_list() const { return std::min(size.top_k, size.tokens); }
    bool dense() const { return size.top_k >= size.tokens; }
};

std::string name_of(const Data& data) {
    const Case& size = data.size;
    std::string name = "B " + std::to_string(size.batch);
    name += " H " + std::to_string(size.heads);
    name += " L " + std::to_string(size.tokens);
    name += " D " + std::to_string(size.depth);
    name += " G " + std::to_string(size.groups);
    name += " k " + std::to_string(size.top_k);
    name += " threads " + std::to_string(size.threads);
    if (data.form.whole) name += " whole";
    if (data.form.strided) name += " strided";
    return name;
}

Data make_data(const Case& size, const Form& form) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    auto numbers = [&](int64_t count) {
        Floats x(count);
        for (float& y : x) y = form.whole ? std::round(normal(random) * 1.5f) : normal(random);
        return x;
    };
    const int64_t head_size = size.tokens * size.depth;
    const int64_t all = size.batch * size.heads * head_size;
    Data data;
    data.size = size;
    data.form = form;
    data.image_stride = size.heads * head_size;
    data.head_stride = form.strided ? size.depth : head_size;
    data.token_stride = form.strided ? size.heads * size.depth : size.depth;
    data.scale = 1 / std::sqrt((float)size.depth);
    data.query = numbers(all);
    data.key = numbers(all);
    data.value = numbers(all);
    data.centroids = numbers(size.heads * size.groups * size.depth);
    data.grad_out = numbers(all);
    data.out.resize(all);
    data.group_ids.resize(size.batch * size.heads * size.tokens);
    data.key_ids.resize(size.batch * size.heads * size.groups * data.keys_in_list());
    data.grad_query.resize(all);
    data.grad_key.resize(all);
    data.grad_value.resize(all);
    return data;
}

// ---- the C interface: this is the only place that knows it -----------------------------------------------------------

// What torch_parallel_for does, with threads of its own.
int in_threads(int64_t begin, int64_t end, int64_t, Body body, void* context) {
    std::vector<std::thread> threads;
    for (int64_t i = begin; i < end; ++i) {
        threads.emplace_back([=] { body(i, i + 1, context); });
    }
    for (std::thread& thread : threads) thread.join();
    return 0;
}

Problem problem_of(Data& data) {
    Problem problem{};
    problem.query = data.query.data();
    problem.key = data.key.data();
    problem.value = data.value.data();
    problem.centroids = data.centroids.data();
    problem.out = data.out.data();
    problem.group_ids = data.group_ids.data();
    problem.key_ids = data.key_ids.data();
    problem.batch = data.size.batch;
    problem.heads = data.size.heads;
    problem.tokens = data.size.tokens;
    problem.depth = data.size.depth;
    problem.groups = data.size.groups;
    problem.top_k = data.size.top_k;
    for (int64_t* strides : {problem.q, problem.k, problem.v, problem.o}) {
        strides[0] = data.image_stride;
        strides[1] = data.head_stride;
        strides[2] = data.token_stride;
    }
    problem.scale = data.scale;
    problem.threads = data.size.threads;
    problem.parallel = in_threads;
    return problem;
}

int run_forward(Data& data) {
    Problem problem = problem_of(data);
    return dgt_forward(&problem);
}

void run_backward(Data& data) {
    Problem problem = problem_of(data);
    Backward gradients{};
    gradients.grad = data.grad_out.data();
    gradients.dq = data.grad_query.data();
    gradients.dk = data.grad_key.data();
    gradients.dv = data.grad_value.data();
    dgt_backward(&problem, &gradients);
}

constexpr int NAN_IN_QUERY = 1;
constexpr int NAN_IN_KEY = 2;

// ---- the naive loops -------------------------------------------------------------------------------------------------

double dot(const float* a, const float* b, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += (double)a[i] * b[i];
    return sum;
}

// One head of one image.
struct Head {
    const Data& data;
    int64_t index;  // image times heads plus head

    const Case& size() const { return data.size; }
    const float* row(const Floats& tensor, int64_t token) const {
        const int64_t image = index / size().heads;
        const int64_t head = index % size().heads;
        return tensor.data() + image * data.image_stride + head * data.head_stride + token * data.token_stride;
    }
    const float* centroid(int64_t group) const {
        return data.centroids.data() + (index % size().heads * size().groups + group) * size().depth;
    }
    double group_score(int64_t token, int64_t group) const {
        return dot(row(data.query, token), centroid(group), size().depth);
    }
    const int64_t* group_ids() const { return data.group_ids.data() + index * size().tokens; }
    const int64_t* key_ids(int64_t group) const {
        return data.key_ids.data() + (index * size().groups + group) * data.keys_in_list();
    }
};

// Whether all ids are in range, so that they can be followed.
bool check_ranges(const Head& head, const std::string& name) {
    bool good = true;
    for (int64_t token = 0; token < head.size().tokens; ++token) {
        const int64_t group = head.group_ids()[token];
        good = good && group >= 0 && group < head.size().groups;
    }
    expect(good, "group ids in range", name);
    for (int64_t i = 0; i < head.size().groups * head.data.keys_in_list(); ++i) {
        const int64_t key = head.key_ids(0)[i];
        good = good && key >= 0 && key < head.size().tokens;
    }
    expect(good, "key ids in range", name);
    return good;
}

// The group of the greatest score, ties to the lowest id.
void check_groups(const Head& head, const std::string& name) {
    for (int64_t token = 0; token < head.size().tokens; ++token) {
        int64_t best = 0;
        for (int64_t group = 1; group < head.size().groups; ++group) {
            if (head.group_score(token, group) > head.group_score(token, best)) best = group;
        }
        const int64_t ours = head.group_ids()[token];
        const double lost = head.group_score(token, best) - head.group_score(token, ours);
        expect(head.data.form.whole ? ours == best : lost < 1e-4, "the best group", name);
    }
}

// The k keys of the greatest scores, ties to the lowest id, in ascending order.
void check_keys(const Head& head, const std::string& name) {
    const int64_t k = head.data.keys_in_list();
    for (int64_t group = 0; group < head.size().groups; ++group) {
        Doubles score(head.size().tokens);
        for (int64_t token = 0; token < head.size().tokens; ++token) {
            score[token] = dot(head.centroid(group), head.row(head.data.key, token), head.size().depth);
        }
        Ids order(head.size().tokens);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return score[a] > score[b]; });
        const int64_t* ids = head.key_ids(group);
        double ours = 0;
        double best = 0;
        bool ascending = true;
        for (int64_t j = 0; j < k; ++j) {
            ours += score[ids[j]];
            best += score[order[j]];
            ascending = ascending && (j == 0 || ids[j] > ids[j - 1]);
        }
        expect(ascending, "key ids ascend", name);
        expect(std::abs(ours - best) <= (head.data.form.whole ? 0 : 1e-5 * k), "the k best keys", name);
        std::sort(order.begin(), order.begin() + k);
        if (head.data.form.whole) expect(std::equal(ids, ids + k, order.begin()), "ties to the lowest id", name);
    }
}

// Output and gradients of one head, contiguous (L, D), over the keys of our lists, or over all.
struct Expected {
    Doubles out, grad_query, grad_key, grad_value;
};

Expected expected_of(const Head& head) {
    const Data& data = head.data;
    const int64_t depth = head.size().depth;
    const int64_t all = head.size().tokens * depth;
    Expected expected{Doubles(all), Doubles(all), Doubles(all), Doubles(all)};
    for (int64_t token = 0; token < head.size().tokens; ++token) {
        const int64_t* list = data.dense() ? nullptr : head.key_ids(head.group_ids()[token]);
        const int64_t count = data.keys_in_list();
        auto key_at = [&](int64_t j) { return list ? list[j] : j; };
        const float* query = head.row(data.query, token);
        const float* grad = head.row(data.grad_out, token);

        Doubles weight(count);
        for (int64_t j = 0; j < count; ++j) weight[j] = data.scale * dot(query, head.row(data.key, key_at(j)), depth);
        const double top = *std::max_element(weight.begin(), weight.end());
        double sum = 0;
        for (double& w : weight) {
            w = std::exp(w - top);
            sum += w;
        }
        for (double& w : weight) w /= sum;

        double* out = expected.out.data() + token * depth;
        for (int64_t j = 0; j < count; ++j) {
            for (int64_t d = 0; d < depth; ++d) out[d] += weight[j] * head.row(data.value, key_at(j))[d];
        }
        double mean = 0;
        for (int64_t d = 0; d < depth; ++d) mean += out[d] * grad[d];
        for (int64_t j = 0; j < count; ++j) {
            const int64_t key = key_at(j);
            const double grad_score = data.scale * weight[j] * (dot(grad, head.row(data.value, key), depth) - mean);
            for (int64_t d = 0; d < depth; ++d) {
                expected.grad_query[token * depth + d] += grad_score * head.row(data.key, key)[d];
                expected.grad_key[key * depth + d] += grad_score * query[d];
                expected.grad_value[key * depth + d] += weight[j] * grad[d];
            }
        }
    }
    return expected;
}

double output_error(const Head& head, const Expected& expected) {
    double worst = 0;
    for (int64_t token = 0; token < head.size().tokens; ++token) {
        const float* ours = head.row(head.data.out, token);
        for (int64_t d = 0; d < head.size().depth; ++d) {
            worst = std::max(worst, std::abs(ours[d] - expected.out[token * head.size().depth + d]));
        }
    }
    return worst;
}

double gradient_error(const Head& head, const Floats& ours, const Doubles& expected) {
    const int64_t all = head.size().tokens * head.size().depth;
    double worst = 0;
    for (int64_t i = 0; i < all; ++i) {
        const double difference = std::abs(ours[head.index * all + i] - expected[i]);
        worst = std::max(worst, difference / (1 + std::abs(expected[i])));
    }
    return worst;
}

// ---- the checks ------------------------------------------------------------------------------------------------------

void check(const Case& size, const Form& form) {
    Data data = make_data(size, form);
    const std::string name = name_of(data);
    expect(run_forward(data) == 0, "returns 0", name);
    if (!data.dense()) run_backward(data);
    double wrong_out = 0;
    double wrong_grad = 0;
    for (int64_t i = 0; i < size.batch * size.heads; ++i) {
        const Head head{data, i};
        if (!data.dense()) {
            if (!check_ranges(head, name)) return;
            check_groups(head, name);
            check_keys(head, name);
        }
        const Expected expected = expected_of(head);
        wrong_out = std::max(wrong_out, output_error(head, expected));
        if (data.dense()) continue;
        wrong_grad = std::max(wrong_grad, gradient_error(head, data.grad_query, expected.grad_query));
        wrong_grad = std::max(wrong_grad, gradient_error(head, data.grad_key, expected.grad_key));
        wrong_grad = std::max(wrong_grad, gradient_error(head, data.grad_value, expected.grad_value));
    }
    expect(wrong_out < OUTPUT_TOLERANCE, "output", name);
    expect(wrong_grad < GRADIENT_TOLERANCE, "gradients", name);
    std::printf("%-60s output %.1e gradients %.1e\n", name.c_str(), wrong_out, wrong_grad);
}

// The same bits, however many threads there are.
void check_threads(const Case& size) {
    Data one = make_data(size, {false, false});
    one.size.threads = 1;
    Data more = one;
    more.size.threads = 3;
    for (Data* data : {&one, &more}) {
        run_forward(*data);
        run_backward(*data);
    }
    const std::string name = name_of(more);
    expect(one.key_ids == more.key_ids && one.group_ids == more.group_ids, "ids of one thread", name);
    expect(one.out == more.out, "the output of one thread, bit for bit", name);
    expect(one.grad_query == more.grad_query, "query's gradient of one thread, bit for bit", name);
    expect(one.grad_key == more.grad_key, "key's gradient of one thread, bit for bit", name);
    expect(one.grad_value == more.grad_value, "value's gradient of one thread, bit for bit", name);
}

void check_nan() {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const size_t place = 250 * 32 + 3;
    Data query = make_data({1, 1, 300, 32, 4, 98, 1}, {false, false});
    Data key = query;
    query.query[place] = nan;
    key.key[place] = nan;
    expect(run_forward(query) == NAN_IN_QUERY, "NaN is reported", "query");
    expect(run_forward(key) == NAN_IN_KEY, "NaN is reported", "key");
}

const std::vector<Case> SMALL = {
    {1, 1, 5, 3, 2, 1, 1},      {2, 3, 33, 8, 4, 5, 1},    {1, 2, 100, 20, 7, 99, 2},
    {1, 1, 197, 24, 50, 13, 2}, {4, 2, 49, 32, 48, 24, 2}, {1, 2, 100, 20, 7, 100, 2},
};
const std::vector<Case> LARGE = {
    {2, 2, 196, 32, 48, 98, 1},
    {1, 1, 2500, 17, 9, 64, 2},
    {1, 1, 2100, 64, 3, 300, 2},
    {2, 4, 77, 33, 1, 99, 1},
};

int run(bool reduced) {
    std::vector<Case> cases = SMALL;
    if (!reduced) cases.insert(cases.end(), LARGE.begin(), LARGE.end());
    std::printf("%d lanes\n", dgt_lanes());
    for (const Case& size : cases) {
        for (bool whole : {false, true}) {
            for (bool strided : {false, true}) check(size, {whole, strided});
        }
    }
    check_threads({1, 2, 300, 32, 4, 98, 0});
    if (!reduced) check_threads({1, 1, 2500, 17, 9, 64, 0});
    check_nan();
    std::printf("%s\n", failures ? "FAILED" : "all good");
    return failures != 0;
}

}  // namespace native_check

int main(int count, char** words) {
    return native_check::run(count > 1 && std::strcmp(words[1], "reduced") == 0);
}
