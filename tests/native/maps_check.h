// Operators on maps in training against naive loops in double precision.
#pragma once

#include "../../src/dgt/ops/cpu/kernels/maps.h"
#include "layers_check.h"

namespace native_check {

// A map of one of the three types, whose numbers the type represents.
struct Map {
    static constexpr uint16_t NAN_OF_HALF = 0x7FFF;  // of both types
    dgt_type type;
    Floats floats;
    std::vector<uint16_t> halves;

    Map(dgt_type type, int64_t size)
        : type(type), floats(type == DGT_FLOAT32 ? size : 0, NAN), halves(size, NAN_OF_HALF) {}
    Map(dgt_type type, const Floats& values) : Map(type, (int64_t)values.size()) {
        for (size_t i = 0; i < values.size(); ++i) set(i, representable(values[i], type));
    }

    void* data() { return type == DGT_FLOAT32 ? (void*)floats.data() : (void*)halves.data(); }
    int64_t size() const { return (int64_t)halves.size(); }
    void set(int64_t i, float x) {
        if (type == DGT_FLOAT32) floats[i] = x;
        else halves[i] = std::isnan(x) ? NAN_OF_HALF : half_of_float(x, type);
    }
    double at(int64_t i) const {
        if (type == DGT_FLOAT32) return floats[i];
        if (type == DGT_FLOAT16 && (halves[i] & 0x7FFF) > 0x7C00) return NAN;
        return float_of_half(halves[i], type);
    }
    bool operator==(const Map& other) const {
        return std::memcmp(floats.data(), other.floats.data(), floats.size() * sizeof(float)) == 0 &&
               halves == other.halves;
    }
};

// The largest error relative to 1 + |x|; NaN counts as the worst.
inline double map_error(const Map& found, const Doubles& expected) {
    double worst = 0;
    for (int64_t i = 0; i < found.size(); ++i) {
        const double error = std::abs(found.at(i) - expected[i]) / (1 + std::abs(expected[i]));
        worst = error <= worst ? worst : error;
    }
    return worst;
}

// Rounding to the type, and the error of sums in float32.
inline double map_tolerance(dgt_type type) {
    if (type == DGT_BFLOAT16) return 1.0 / 256;
    if (type == DGT_FLOAT16) return 1.0 / 2048;
    return 1e-5;
}

struct MapCase {
    int64_t positions;
    int64_t channels;
    dgt_type type;
    double mean;  // of the input, whose deviation is 1
    int64_t threads;
};

inline std::string name_of(const MapCase& c) {
    static const char* const types[] = {"float32", "bfloat16", "float16"};
    return std::string(types[c.type]) + " map " + std::to_string(c.positions) + " " + std::to_string(c.channels) +
           " mean " + std::to_string(c.mean) + " threads " + std::to_string(c.threads);
}

// What GELU and BatchNorm give, and their gradients.
struct ExpectedGeluNorm {
    Doubles mean, variance, output, grad_input, grad_weight, grad_bias;

    ExpectedGeluNorm(const MapCase& c, const Map& x, const Floats& weight, const Floats& bias, double epsilon,
                     const Map& grad)
        : mean(c.channels),
          variance(c.channels),
          output(x.size()),
          grad_input(x.size()),
          grad_weight(c.channels),
          grad_bias(c.channels) {
        for (int64_t i = 0; i < c.channels; ++i) {
            auto value = [&](int64_t row) { return gelu_of(x.at(row * c.channels + i)); };
            const double count = (double)c.positions;
            for (int64_t row = 0; row < c.positions; ++row) mean[i] += value(row) / count;
            for (int64_t row = 0; row < c.positions; ++row)
                variance[i] += (value(row) - mean[i]) * (value(row) - mean[i]) / count;
            const double deviation = std::sqrt(variance[i] + epsilon);
            for (int64_t row = 0; row < c.positions; ++row) {
                const double normed = (value(row) - mean[i]) / deviation;
                output[row * c.channels + i] = normed * weight[i] + bias[i];
                grad_bias[i] += grad.at(row * c.channels + i);
                grad_weight[i] += grad.at(row * c.channels + i) * normed;
            }
            for (int64_t row = 0; row < c.positions; ++row) {
                const double at = x.at(row * c.channels + i);
                const double normed = (value(row) - mean[i]) / deviation;
                const double of_norm =
                    grad.at(row * c.channels + i) - grad_bias[i] / count - normed * grad_weight[i] / count;
                const double slope = 0.5 * (1 + std::erf(at / std::sqrt(2.0))) +
                                     at * std::exp(-at * at / 2) / std::sqrt(2 * 3.14159265358979323846);
                grad_input[row * c.channels + i] = of_norm * weight[i] / deviation * slope;
            }
        }
    }
};

// What an operator on maps reads and writes.
struct MapOperands {
    Map input, grad;
    Floats weight, bias;
    Map output, grad_input;
    Floats grad_weight, grad_bias;

    MapOperands(std::mt19937& random, dgt_type type, int64_t size, int64_t channels, int64_t weights, double mean,
                double spread)
        : input(type, random_floats(random, size, mean - spread, mean + spread)),
          grad(type, random_floats(random, size, -1, 1)),
          weight(random_floats(random, weights, -1, 1)),
          bias(random_floats(random, channels, -1, 1)),
          output(type, size),
          grad_input(type, size),
          grad_weight(weights, NAN),
          grad_bias(channels, NAN) {}

    dgt_map_problem problem(int64_t images, int64_t height, int64_t width, int64_t threads) {
        dgt_map_problem problem{};
        problem.images = images;
        problem.height = height;
        problem.width = width;
        problem.channels = (int64_t)bias.size();
        problem.type = input.type;
        problem.input = input.data();
        problem.weight = weight.data();
        problem.bias = bias.data();
        problem.output = output.data();
        problem.grad_output = grad.data();
        problem.grad_input = grad_input.data();
        problem.grad_weight = grad_weight.data();
        problem.grad_bias = grad_bias.data();
        problem.threads = threads;
        problem.parallel_for = in_threads;
        return problem;
    }
};

using MapKernel = int (*)(const dgt_map_problem*);

inline void check_other_threads(const MapOperands& x, dgt_map_problem problem, MapKernel forward, MapKernel backward,
                                const Expect& expect, const std::string& name) {
    const MapOperands first = x;
    problem.threads = 4 - problem.threads;
    forward(&problem);
    backward(&problem);
    expect(x.output == first.output, "the same output with other threads, bit for bit", name);
    expect(x.grad_input == first.grad_input, "the same gradient in input", name);
    expect(x.grad_weight == first.grad_weight, "the same gradient in weight", name);
}

inline void check_gelu_norm(const MapCase& c, std::mt19937& random, const Expect& expect) {
    const std::string name = name_of(c) + " gelu and norm";
    const int64_t size = c.positions * c.channels;
    MapOperands x(random, c.type, size, c.channels, c.channels, c.mean, 1.7);
    Doubles statistics(2 * c.channels);
    dgt_map_problem problem = x.problem(1, c.positions, 1, c.threads);
    problem.epsilon = 1e-3;
    problem.statistics = statistics.data();
    expect(dgt_gelu_norm(&problem) == DGT_GOOD, "returns 0", name);
    expect(dgt_gelu_norm_backward(&problem) == DGT_GOOD, "its gradients return 0", name);

    const ExpectedGeluNorm expected(c, x.input, x.weight, x.bias, problem.epsilon, x.grad);
    // GELU itself has an error of 1e-7 of its value, which the deviation magnifies.
    const double tolerance = map_tolerance(c.type) + 3e-6 * std::abs(c.mean);
    Doubles found(statistics.begin(), statistics.begin() + c.channels);
    expect(layer_error(Floats(found.begin(), found.end()), expected.mean) <= 1e-6, "mean", name);
    found.assign(statistics.begin() + c.channels, statistics.end());
    expect(layer_error(Floats(found.begin(), found.end()), expected.variance) <= 1e-5, "variance", name);
    expect(map_error(x.output, expected.output) <= tolerance, "output", name);
    expect(map_error(x.grad_input, expected.grad_input) <= tolerance, "gradient in input", name);
    const double of_sums = 1e-6 * (double)c.positions + 3e-6 * std::abs(c.mean);
    expect(layer_error(x.grad_weight, expected.grad_weight) <= of_sums, "gradient in weight", name);
    expect(layer_error(x.grad_bias, expected.grad_bias) <= of_sums, "gradient in bias", name);

    const Map first = x.output;
    expect(dgt_gelu_norm_again(&problem) == DGT_GOOD, "again returns 0", name);
    expect(x.output == first, "again the same output", name);
    check_other_threads(x, problem, dgt_gelu_norm, dgt_gelu_norm_backward, expect, name);

    x.input.set(size - 1, NAN);  // in the last channel
    dgt_gelu_norm(&problem);
    dgt_gelu_norm_backward(&problem);
    bool kept = true;
    for (int64_t i = 0; i < size; ++i) {
        const bool last = i % c.channels == c.channels - 1;
        kept = kept && std::isnan(x.output.at(i)) == last && std::isnan(x.grad_input.at(i)) == last;
    }
    expect(kept, "NaN stays in its channel", name);
}

inline void check_add_depthwise(const LayerCase& c, dgt_type type, std::mt19937& random, const Expect& expect) {
    const std::string name = name_of(c) + (type == DGT_FLOAT32 ? "" : type == DGT_BFLOAT16 ? " bfloat16" : " float16");
    const int64_t size = c.places() * c.channels;
    MapOperands x(random, type, size, c.channels, c.channels * 9, 0, 1);
    dgt_map_problem problem = x.problem(c.images, c.height, c.width, c.threads);
    expect(dgt_add_depthwise(&problem) == DGT_GOOD, "returns 0", name);
    expect(dgt_add_depthwise_backward(&problem) == DGT_GOOD, "its gradients return 0", name);

    Doubles input(size);
    for (int64_t i = 0; i < size; ++i) input[i] = x.input.at(i);
    Doubles expected = convolve(input, c, x.weight, x.bias, true);
    Doubles of_input(size);
    Doubles of_weight(c.channels * 9);
    Doubles of_bias(c.channels);
    for (int64_t i = 0; i < size; ++i) {
        const int64_t channel = i % c.channels;
        const int64_t place = i / c.channels;
        expected[i] += input[i];
        of_input[i] += x.grad.at(i);
        of_bias[channel] += x.grad.at(i);
        for (int64_t tap = 0; tap < 9; ++tap) {
            const int64_t row = place / c.width % c.height + tap / 3 - 1;
            const int64_t column = place % c.width + tap % 3 - 1;
            if (row < 0 || row >= c.height || column < 0 || column >= c.width) continue;
            const int64_t neighbor = i + ((tap / 3 - 1) * c.width + tap % 3 - 1) * c.channels;
            of_input[neighbor] += x.grad.at(i) * x.weight[channel * 9 + tap];
            of_weight[channel * 9 + tap] += x.grad.at(i) * input[neighbor];
        }
    }
    expect(map_error(x.output, expected) <= map_tolerance(type), "output", name);
    expect(map_error(x.grad_input, of_input) <= map_tolerance(type), "gradient in input", name);
    const double of_sums = 1e-6 * (double)c.places();
    expect(layer_error(x.grad_weight, of_weight) <= of_sums, "gradient in weight", name);
    expect(layer_error(x.grad_bias, of_bias) <= of_sums, "gradient in bias", name);

    check_other_threads(x, problem, dgt_add_depthwise, dgt_add_depthwise_backward, expect, name);
}

inline void check_maps(bool reduced, const Expect& expect) {
    std::mt19937 random(5);
    for (dgt_type type : {DGT_FLOAT32, DGT_BFLOAT16, DGT_FLOAT16}) {
        check_gelu_norm({2, 1, type, 0, 1}, random, expect);
        check_gelu_norm({70, 33, type, 0, 3}, random, expect);
        check_gelu_norm({131, 16, type, -1, 2}, random, expect);
        check_add_depthwise({1, 1, 1, 1, 1, 1, 1}, type, random, expect);
        check_add_depthwise({2, 5, 3, 19, 19, 1, 3}, type, random, expect);
        check_add_depthwise({2, 9, 40, 8, 8, 1, 2}, type, random, expect);
        if (reduced) continue;
        check_gelu_norm({5000, 48, type, 0, 2}, random, expect);
        check_gelu_norm({2100, 130, type, 0, 3}, random, expect);
        check_add_depthwise({3, 20, 13, 300, 300, 1, 2}, type, random, expect);
    }
    check_gelu_norm({300, 20, DGT_FLOAT32, 1000, 2}, random, expect);  // a mean of many deviations
}

}  // namespace native_check
