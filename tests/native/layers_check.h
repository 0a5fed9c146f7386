// Linear layers, convolutions, and the feed-forward network against naive loops in double precision.
#pragma once

#include "../../src/dgt/inference/cpu/kernels/layers.h"
#include "problem.h"

#include <functional>

namespace native_check {

using Doubles = std::vector<double>;

constexpr double LAYER_TOLERANCE = 1e-5;  // relative to 1 + |x|

// A map and the layers that it passes through.
struct LayerCase {
    int64_t images;
    int64_t height;
    int64_t width;
    int64_t channels;
    int64_t outputs;  // or hidden channels
    int64_t stride;
    int64_t threads;

    int64_t places() const { return images * height * width; }
};

inline std::string name_of(const LayerCase& c) {
    std::string name = std::to_string(c.images) + " maps";
    for (int64_t size : {c.height, c.width, c.channels, c.outputs, c.stride}) name += " " + std::to_string(size);
    return name + " threads " + std::to_string(c.threads);
}

inline Floats random_floats(std::mt19937& random, int64_t count, double low, double high) {
    std::uniform_real_distribution<float> values((float)low, (float)high);
    Floats floats(count);
    for (float& x : floats) x = values(random);
    return floats;
}

inline double gelu_of(double x) { return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0))); }

// BatchNorm in evaluation.
struct Norm {
    Floats weight;
    Floats bias;
    Floats mean;
    Floats variance;

    Norm(std::mt19937& random, int64_t channels)
        : weight(random_floats(random, channels, -1, 1)),
          bias(random_floats(random, channels, -1, 1)),
          mean(random_floats(random, channels, -1, 1)),
          variance(random_floats(random, channels, 0.5, 2)) {}

    dgt_batch_norm described() const { return {weight.data(), bias.data(), mean.data(), variance.data(), 1e-5}; }
    double of(double x, int64_t i) const { return (x - mean[i]) / std::sqrt(variance[i] + 1e-5) * weight[i] + bias[i]; }
};

// Tokens times (outputs, inputs) weights.
inline Doubles multiply(const Doubles& x, int64_t inputs, const Floats& weight, const Floats& bias) {
    const int64_t outputs = (int64_t)bias.size();
    const int64_t tokens = (int64_t)x.size() / inputs;
    Doubles found(tokens * outputs);
    for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t o = 0; o < outputs; ++o) {
            double sum = bias[o];
            for (int64_t i = 0; i < inputs; ++i) sum += x[t * inputs + i] * weight[o * inputs + i];
            found[t * outputs + o] = sum;
        }
    }
    return found;
}

// Convolve maps with (outputs, channels, 3, 3) weights, or each channel with its own kernel from (channels, 3, 3).
inline Doubles convolve(const Doubles& x, const LayerCase& c, const Floats& weight, const Floats& bias,
                        bool depthwise) {
    const int64_t outputs = (int64_t)bias.size();
    const int64_t height = (c.height - 1) / c.stride + 1;
    const int64_t width = (c.width - 1) / c.stride + 1;
    Doubles found(c.images * height * width * outputs);
    for (int64_t place = 0; place < c.images * height * width; ++place) {
        const int64_t across = place % width * c.stride;
        const int64_t down = place / width % height * c.stride;
        const int64_t image = place / (width * height);
        for (int64_t o = 0; o < outputs; ++o) {
            double sum = bias[o];
            for (int64_t tap = 0; tap < 9; ++tap) {
                const int64_t row = down + tap / 3 - 1;
                const int64_t column = across + tap % 3 - 1;
                if (row < 0 || row >= c.height || column < 0 || column >= c.width) continue;
                const double* at = &x[((image * c.height + row) * c.width + column) * c.channels];
                if (depthwise) {
                    sum += at[o] * weight[o * 9 + tap];
                    continue;
                }
                for (int64_t i = 0; i < c.channels; ++i) sum += at[i] * weight[(o * c.channels + i) * 9 + tap];
            }
            found[place * outputs + o] = sum;
        }
    }
    return found;
}

inline double layer_error(const Floats& found, const Doubles& expected) {
    double worst = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
        const double error = std::abs(found[i] - expected[i]) / (1 + std::abs(expected[i]));
        worst = error <= worst ? worst : error;  // NaN counts as the worst
    }
    return worst;
}

inline Doubles as_doubles(const Floats& x) { return Doubles(x.begin(), x.end()); }

// Memory for prepared weights, aligned as the interface requires.
struct PreparedMemory {
    explicit PreparedMemory(int64_t bytes) : memory(bytes + 64) {}
    void* aligned() { return (void*)(((uintptr_t)memory.data() + 63) / 64 * 64); }
    std::vector<char> memory;
};

using Expect = std::function<void(bool, const char*, const std::string&)>;

inline void check_linear(const LayerCase& c, std::mt19937& random, const Expect& expect) {
    const Floats x = random_floats(random, c.places() * c.channels, -1, 1);
    const Floats weight = random_floats(random, c.outputs * c.channels, -0.1, 0.1);
    const Floats bias = random_floats(random, c.outputs, -1, 1);
    Floats output(c.places() * c.outputs, NAN);
    dgt_linear_problem problem{};
    problem.tokens = c.places();
    problem.inputs = c.channels;
    problem.outputs = c.outputs;
    problem.input = x.data();
    problem.weight = weight.data();
    problem.bias = bias.data();
    problem.output = output.data();
    problem.threads = c.threads;
    problem.parallel_for = in_threads;
    PreparedMemory memory(dgt_linear_bytes(&problem));
    problem.prepared = memory.aligned();
    dgt_prepare_linear(&problem);
    problem.weight = problem.bias = nullptr;
    dgt_linear(&problem);
    const Doubles expected = multiply(as_doubles(x), c.channels, weight, bias);
    expect(layer_error(output, expected) <= LAYER_TOLERANCE, "linear", name_of(c));
    const Floats first = output;
    problem.threads = 1;
    dgt_linear(&problem);
    expect(output == first, "linear, one thread", name_of(c));
}

inline void check_convolution(const LayerCase& c, std::mt19937& random, const Expect& expect) {
    const int64_t places = c.images * ((c.height - 1) / c.stride + 1) * ((c.width - 1) / c.stride + 1);
    const Floats x = random_floats(random, c.places() * c.channels, -1, 1);
    const Floats weight = random_floats(random, c.outputs * c.channels * 9, -0.1, 0.1);
    const Floats bias = random_floats(random, c.outputs, -1, 1);
    const Norm norm(random, c.outputs);
    Bytes mask(places, 1);
    mask[places / 2] = 0;
    Floats output(places * c.outputs, NAN);
    dgt_convolution_problem problem{};
    problem.images = c.images;
    problem.height = c.height;
    problem.width = c.width;
    problem.channels = c.channels;
    problem.outputs = c.outputs;
    problem.stride = c.stride;
    problem.with_gelu = 1;
    problem.input = x.data();
    problem.mask = mask.data();
    problem.weight = weight.data();
    problem.bias = bias.data();
    problem.norm = norm.described();
    problem.output = output.data();
    problem.threads = c.threads;
    problem.parallel_for = in_threads;
    PreparedMemory memory(dgt_convolution_bytes(&problem));
    problem.prepared = memory.aligned();
    dgt_prepare_convolution(&problem);
    problem.weight = problem.bias = nullptr;
    problem.norm = {};
    dgt_convolution(&problem);
    Doubles expected = convolve(as_doubles(x), c, weight, bias, false);
    for (int64_t i = 0; i < (int64_t)expected.size(); ++i)
        expected[i] = mask[i / c.outputs] ? norm.of(gelu_of(expected[i]), i % c.outputs) : 0.0;
    expect(layer_error(output, expected) <= LAYER_TOLERANCE, "convolution", name_of(c));
    const Floats first = output;
    problem.threads = 1;
    dgt_convolution(&problem);
    expect(output == first, "convolution, one thread", name_of(c));
}

inline void check_depthwise(const LayerCase& c, std::mt19937& random, const Expect& expect) {
    const Floats x = random_floats(random, c.places() * c.channels, -1, 1);
    const Floats weight = random_floats(random, c.channels * 9, -1, 1);
    const Floats bias = random_floats(random, c.channels, -1, 1);
    Floats output(x.size(), NAN);
    dgt_depthwise_problem problem{};
    problem.images = c.images;
    problem.height = c.height;
    problem.width = c.width;
    problem.channels = c.channels;
    problem.input = x.data();
    problem.weight = weight.data();
    problem.bias = bias.data();
    problem.output = output.data();
    problem.threads = c.threads;
    problem.parallel_for = in_threads;
    PreparedMemory memory(dgt_depthwise_bytes(&problem));
    problem.prepared = memory.aligned();
    dgt_prepare_depthwise(&problem);
    problem.weight = problem.bias = nullptr;
    dgt_depthwise(&problem);
    LayerCase plain = c;
    plain.stride = 1;
    Doubles expected = convolve(as_doubles(x), plain, weight, bias, true);
    for (size_t i = 0; i < x.size(); ++i) expected[i] += x[i];
    expect(layer_error(output, expected) <= LAYER_TOLERANCE, "depthwise convolution", name_of(c));
}

// The parameters of a feed-forward network.
struct Network {
    Floats expand_weight;
    Floats expand_bias;
    Floats depthwise_weight;
    Floats depthwise_bias;
    Floats project_weight;
    Floats project_bias;
    Norm norm1;
    Norm norm2;
    Norm norm3;

    Network(std::mt19937& random, int64_t channels, int64_t hidden)
        : expand_weight(random_floats(random, hidden * channels, -0.1, 0.1)),
          expand_bias(random_floats(random, hidden, -1, 1)),
          depthwise_weight(random_floats(random, hidden * 9, -0.3, 0.3)),
          depthwise_bias(random_floats(random, hidden, -1, 1)),
          project_weight(random_floats(random, hidden * channels, -0.1, 0.1)),
          project_bias(random_floats(random, channels, -1, 1)),
          norm1(random, hidden),
          norm2(random, hidden),
          norm3(random, channels) {}

    Doubles of(const Floats& x, const LayerCase& c, const Bytes& mask) const {
        LayerCase hidden = c;
        hidden.channels = c.outputs;
        hidden.stride = 1;
        Doubles y = multiply(as_doubles(x), c.channels, expand_weight, expand_bias);
        for (int64_t i = 0; i < (int64_t)y.size(); ++i)
            y[i] = mask[i / c.outputs] ? norm1.of(gelu_of(y[i]), i % c.outputs) : 0.0;
        const Doubles mixed = convolve(y, hidden, depthwise_weight, depthwise_bias, true);
        for (int64_t i = 0; i < (int64_t)y.size(); ++i) y[i] = norm2.of(gelu_of(y[i] + mixed[i]), i % c.outputs);
        Doubles found = multiply(y, c.outputs, project_weight, project_bias);
        for (int64_t i = 0; i < (int64_t)found.size(); ++i) found[i] = norm3.of(found[i], i % c.channels);
        return found;
    }

    void describe(dgt_feed_forward_problem& problem) const {
        problem.expand_weight = expand_weight.data();
        problem.expand_bias = expand_bias.data();
        problem.norm1 = norm1.described();
        problem.depthwise_weight = depthwise_weight.data();
        problem.depthwise_bias = depthwise_bias.data();
        problem.norm2 = norm2.described();
        problem.project_weight = project_weight.data();
        problem.project_bias = project_bias.data();
        problem.norm3 = norm3.described();
    }
};

inline void check_feed_forward(const LayerCase& c, std::mt19937& random, const Expect& expect) {
    const Floats x = random_floats(random, c.places() * c.channels, -1, 1);
    const Network network(random, c.channels, c.outputs);
    Bytes mask(c.places(), 1);
    mask[c.places() - 1] = 0;
    Floats output(x.size(), NAN);
    dgt_feed_forward_problem problem{};
    problem.images = c.images;
    problem.height = c.height;
    problem.width = c.width;
    problem.channels = c.channels;
    problem.hidden = c.outputs;
    problem.input = x.data();
    problem.mask = mask.data();
    network.describe(problem);
    problem.output = output.data();
    problem.threads = c.threads;
    problem.parallel_for = in_threads;
    PreparedMemory memory(dgt_feed_forward_bytes(&problem));
    problem.prepared = memory.aligned();
    dgt_prepare_feed_forward(&problem);
    dgt_feed_forward(&problem);
    expect(layer_error(output, network.of(x, c, mask)) <= LAYER_TOLERANCE, "feed-forward network", name_of(c));
    const Floats first = output;
    problem.threads = 1;
    dgt_feed_forward(&problem);
    expect(output == first, "feed-forward network, one thread", name_of(c));
}

inline void check_layers(bool reduced, const Expect& expect) {
    std::mt19937 random(5);
    std::vector<LayerCase> cases = {
        {1, 1, 1, 1, 1, 1, 1},
        {2, 3, 5, 7, 19, 2, 2},
        {1, 7, 7, 33, 64, 1, 3},
        {3, 2, 9, 16, 17, 1, 2},
    };
    if (!reduced) {
        cases.push_back({2, 14, 14, 64, 256, 2, 2});
        cases.push_back({1, 90, 40, 8, 200, 1, 2});   // bands within an image
        cases.push_back({9, 13, 11, 16, 300, 1, 2});  // bands of several images
    }
    for (const LayerCase& c : cases) {
        check_linear(c, random, expect);
        check_convolution(c, random, expect);
        check_depthwise(c, random, expect);
        check_feed_forward(c, random, expect);
    }
}

}  // namespace native_check
