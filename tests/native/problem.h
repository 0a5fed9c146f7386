// Random problems for the native kernels. Only this file of the check fills their C interface.
#pragma once

#include "../../src/dgt/ops/cpu/kernels/interface.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace native_check {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;
using Ids = std::vector<int64_t>;
using Bytes = std::vector<uint8_t>;

// Sizes and options of a problem; letters as in interface.h.
struct Case {
    int64_t images = 1;
    int64_t heads = 1;
    int64_t key_heads = 1;
    int64_t queries = 1;
    int64_t keys = 1;
    int64_t channels = 1;
    int64_t groups = 1;
    int64_t top_k = 1;
    int64_t prefix = 0;
    int64_t residual_keys = 0;
    int64_t threads = 1;
    dgt_type type = DGT_FLOAT32;
    dgt_mask_type dense_mask = DGT_NO_MASK;
    int64_t grid_columns = 1;  // of DGT_MASK_GRID: a divisor of the keys
    bool whole = false;        // small integers: scores are exact, so lists must be equal, including ties
    bool strided = false;      // (B, L, H, D) in memory, like views of a projection
    bool masked = false;       // some tokens are padding
    bool biased = false;       // key_bias
    bool first_order = false;  // what residual keys lose is added

    int64_t list_length() const { return prefix + std::min(top_k, keys - prefix); }
    int64_t all_heads() const { return images * heads; }
};

inline std::string name_of(const Case& c) {
    static const char* const types[] = {"float32", "bfloat16", "float16"};
    static const char* const masks[] = {"", " bool mask", " float mask", " grid"};
    std::string name = types[c.type];
    auto add = [&](const char* letter, int64_t number) { name += " " + std::string(letter) + std::to_string(number); };
    add("B", c.images);
    add("H", c.heads);
    if (c.key_heads != c.heads) add("of keys ", c.key_heads);
    add("L", c.queries);
    if (c.keys != c.queries) add("S", c.keys);
    add("D", c.channels);
    add("G", c.groups);
    add("k", c.top_k);
    if (c.prefix) add("P", c.prefix);
    if (c.residual_keys) add("M", c.residual_keys);
    if (c.first_order) name += " first order";
    add("threads ", c.threads);
    name += masks[c.dense_mask];
    if (c.dense_mask == DGT_MASK_GRID) add("columns ", c.grid_columns);
    if (c.whole) name += " whole";
    if (c.strided) name += " strided";
    if (c.masked) name += " masked";
    if (c.biased) name += " biased";
    return name;
}

// ---- 16-bit numbers: only those that the type represents exactly ----------------------------------------------------

inline float float_of_half(uint16_t bits, dgt_type type) {
    if (type == DGT_BFLOAT16) {
        const uint32_t wide = (uint32_t)bits << 16;
        float x;
        std::memcpy(&x, &wide, sizeof x);
        return x;
    }
    const int exponent = bits >> 10 & 31;
    const int fraction = bits & 1023;
    const float size = exponent ? std::ldexp(1024.0f + fraction, exponent - 25) : std::ldexp((float)fraction, -24);
    return bits >> 15 ? -size : size;
}

inline uint16_t half_of_float(float x, dgt_type type) {
    if (type == DGT_BFLOAT16) {
        uint32_t wide;
        std::memcpy(&wide, &x, sizeof wide);
        return (uint16_t)(wide >> 16);
    }
    if (x == 0) return 0;
    int exponent;
    const float fraction = std::frexp(std::abs(x), &exponent);  // in 0.5..1
    const int digits = (int)(fraction * 2048);
    return (uint16_t)((x < 0 ? 1 << 15 : 0) | ((exponent + 14) << 10) | (digits - 1024));
}

// The nearest number that the type represents; here float16 has steps of 1/256, below 8.
inline float representable(float x, dgt_type type) {
    if (type == DGT_BFLOAT16) return float_of_half(half_of_float(x, type), type);
    if (type == DGT_FLOAT16) return std::round(std::max(-7.0f, std::min(7.0f, x)) * 256) / 256;
    return x;
}

// A (B, H, N, D) tensor of one of the three types, contiguous or (B, N, H, D) in memory.
class Tensor {
public:
    Tensor() = default;
    Tensor(const Case& c, int64_t heads, int64_t tokens) : type_(c.type), heads_(heads) {
        image_stride_ = heads * tokens * c.channels;
        head_stride_ = c.strided ? c.channels : tokens * c.channels;
        token_stride_ = c.strided ? heads * c.channels : c.channels;
        size_ = c.images * image_stride_;
        if (type_ == DGT_FLOAT32) floats_.resize(size_);
        else halves_.resize(size_);
    }

    template <class Draw>
    void fill(const Draw& draw) {
        for (int64_t i = 0; i < size_; ++i) set(i, representable(draw(), type_));
    }
    void set(int64_t place, float x) {
        if (type_ == DGT_FLOAT32) floats_[place] = x;
        else halves_[place] = half_of_float(x, type_);
    }
    // Of head `index` (image times heads plus head).
    float at(int64_t index, int64_t token, int64_t channel) const {
        const int64_t head = index / heads_ * image_stride_ + index % heads_ * head_stride_;
        const int64_t place = head + token * token_stride_ + channel;
        return type_ == DGT_FLOAT32 ? floats_[place] : float_of_half(halves_[place], type_);
    }
    // The (N, D) numbers of a head, which naive loops read many times.
    Doubles of_head(int64_t index, int64_t tokens, int64_t channels) const {
        Doubles numbers(tokens * channels);
        for (int64_t i = 0; i < tokens * channels; ++i) numbers[i] = at(index, i / channels, i % channels);
        return numbers;
    }
    dgt_tokens tokens() {
        void* data = type_ == DGT_FLOAT32 ? (void*)floats_.data() : (void*)halves_.data();
        return {data, image_stride_, head_stride_, token_stride_};
    }
    bool operator==(const Tensor& other) const { return floats_ == other.floats_ && halves_ == other.halves_; }

private:
    dgt_type type_ = DGT_FLOAT32;
    int64_t heads_ = 1;
    int64_t image_stride_ = 0;
    int64_t head_stride_ = 0;
    int64_t token_stride_ = 0;
    int64_t size_ = 0;
    Floats floats_;
    std::vector<uint16_t> halves_;
};

// ---- what a problem reads and writes --------------------------------------------------------------------------------

struct Data {
    Case size;
    float scale;
    Tensor query, key, value, grad_output;
    Floats centroids;  // (H, G, D), or (B, H, G, D)
    Floats key_bias;
    Bytes real_queries, real_keys;
    Bytes bool_mask;    // (B, H, L, S), shared by heads
    Floats float_mask;  // the same
    Floats bias_rows;   // (B, L, H, rows): the numbers of a query's heads stand side by side
    Floats bias_columns;
    Floats grad_logsumexp;

    Ids group_ids, key_ids;
    Tensor output;
    Floats logsumexp;
    Floats group_sums, group_counts;
    Floats grad_query, grad_key, grad_value, grad_key_bias;
};

// Every fifth token is padding, and in the second image all but one, so lists have empty places.
inline Bytes real_tokens(const Case& c, int64_t tokens) {
    Bytes real(c.images * tokens, 1);
    if (!c.masked) return real;
    for (int64_t image = 0; image < c.images; ++image) {
        for (int64_t i = 0; i < tokens; ++i) real[image * tokens + i] = image == 1 ? i == tokens / 2 : i % 5 != 2;
    }
    return real;
}

inline Data make_data(const Case& c) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    auto draw = [&] { return c.whole ? std::round(normal(random) * 1.5f) : normal(random); };
    auto numbers = [&](int64_t count) {
        Floats x(count);
        for (float& y : x) y = draw();
        return x;
    };
    Data data;
    data.size = c;
    data.scale = 1 / std::sqrt((float)c.channels);
    data.query = Tensor(c, c.heads, c.queries);
    data.key = Tensor(c, c.key_heads, c.keys);
    data.value = Tensor(c, c.key_heads, c.keys);
    data.grad_output = Tensor(c, c.heads, c.queries);
    for (Tensor* tensor : {&data.query, &data.key, &data.value, &data.grad_output}) tensor->fill(draw);
    data.centroids = numbers(c.heads * c.groups * c.channels);
    data.key_bias = numbers(c.all_heads() * c.keys);
    data.real_queries = real_tokens(c, c.queries);
    data.real_keys = real_tokens(c, c.keys);
    data.bool_mask.resize(c.images * c.queries * c.keys);
    for (uint8_t& sees : data.bool_mask) sees = random() % 3 != 0;
    for (int64_t j = 0; j < c.keys; ++j) data.bool_mask[j] = 0;  // the first query sees nothing
    data.float_mask = numbers(c.images * c.queries * c.keys);
    data.bias_rows = numbers(c.all_heads() * c.queries * (c.keys / c.grid_columns));
    data.bias_columns = numbers(c.all_heads() * c.queries * c.grid_columns);
    data.grad_logsumexp = numbers(c.all_heads() * c.queries);

    data.group_ids.resize(c.all_heads() * c.queries);
    data.key_ids.resize(c.all_heads() * c.groups * c.list_length());
    data.output = Tensor(c, c.heads, c.queries);
    data.logsumexp.resize(c.all_heads() * c.queries);
    data.group_sums.resize(c.all_heads() * c.groups * c.channels);
    data.group_counts.resize(c.all_heads() * c.groups);
    data.grad_query.resize(c.all_heads() * c.queries * c.channels);
    data.grad_key.resize(c.all_heads() * c.keys * c.channels);
    data.grad_value.resize(c.all_heads() * c.keys * c.channels);
    data.grad_key_bias.resize(c.all_heads() * c.keys);
    return data;
}

// Like torch_parallel_for, with threads of its own.
inline int in_threads(int64_t begin, int64_t end, int64_t, dgt_body body, void* context) {
    std::vector<std::thread> threads;
    for (int64_t i = begin; i < end; ++i) threads.emplace_back([=] { body(i, i + 1, context); });
    for (std::thread& thread : threads) thread.join();
    return 0;
}

inline dgt_tokens contiguous_tokens(Floats& data, int64_t heads, int64_t tokens, int64_t channels) {
    return {data.data(), heads * tokens * channels, tokens * channels, channels};
}

inline dgt_problem problem_of(Data& data) {
    const Case& c = data.size;
    dgt_problem problem{};
    problem.images = c.images;
    problem.heads = c.heads;
    problem.key_heads = c.key_heads;
    problem.queries = c.queries;
    problem.keys = c.keys;
    problem.channels = c.channels;
    problem.groups = c.groups;
    problem.list_length = c.list_length();
    problem.prefix = c.prefix;
    problem.type = c.type;

    problem.query = data.query.tokens();
    problem.key = data.key.tokens();
    problem.value = data.value.tokens();
    problem.centroids = data.centroids.data();
    problem.query_mask = c.masked ? data.real_queries.data() : nullptr;
    problem.key_mask = c.masked ? data.real_keys.data() : nullptr;
    problem.key_bias = c.biased ? data.key_bias.data() : nullptr;
    problem.mask_type = c.dense_mask;
    if (c.dense_mask == DGT_MASK_BOOL) problem.mask = data.bool_mask.data();
    if (c.dense_mask == DGT_MASK_FLOAT) problem.mask = data.float_mask.data();
    problem.mask_strides[0] = c.queries * c.keys;
    problem.mask_strides[2] = c.keys;
    problem.mask_strides[3] = 1;
    auto table = [&](Floats& numbers, int64_t count) -> dgt_tokens {
        return {numbers.data(), c.heads * c.queries * count, count, c.heads * count};
    };
    if (c.dense_mask == DGT_MASK_GRID) {
        problem.bias_rows = table(data.bias_rows, c.keys / c.grid_columns);
        problem.bias_columns = table(data.bias_columns, c.grid_columns);
        problem.grid_columns = c.grid_columns;
    }
    problem.scale = data.scale;

    problem.group_ids = data.group_ids.data();
    problem.key_ids = data.key_ids.data();
    problem.output = data.output.tokens();
    problem.logsumexp = data.logsumexp.data();
    problem.group_sums = data.group_sums.data();
    problem.group_counts = data.group_counts.data();
    problem.grad_output = data.grad_output.tokens();
    problem.grad_logsumexp = data.grad_logsumexp.data();
    problem.grad_query = contiguous_tokens(data.grad_query, c.heads, c.queries, c.channels);
    problem.grad_key = contiguous_tokens(data.grad_key, c.heads, c.keys, c.channels);
    problem.grad_value = contiguous_tokens(data.grad_value, c.heads, c.keys, c.channels);
    problem.grad_key_bias = c.biased ? data.grad_key_bias.data() : nullptr;

    problem.threads = c.threads;
    problem.parallel_for = in_threads;
    return problem;
}

// Call a function of the interface on a problem.
inline int call(int (*function)(const dgt_problem*), Data& data) {
    const dgt_problem problem = problem_of(data);
    return function(&problem);
}

}  // namespace native_check
