// The feed-forward network in training and depthwise convolutions, with their gradients, against naive loops in double
// precision.
#pragma once

#include "convolution_check.h"

namespace native_check {

// Relative to 1 + the largest number: these are sums over all positions, and BatchNorm makes some of them cancel to
// zero.
constexpr double LAYER_GRADIENT_TOLERANCE = 1e-4;

inline double error_beside_largest(const Floats& found, const Doubles& expected) {
    double worst = 0;
    double largest = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
        const double error = std::abs(found[i] - expected[i]);
        worst = error <= worst ? worst : error;  // NaN counts as the worst
        largest = std::max(largest, std::abs(expected[i]));
    }
    return worst / (1 + largest);
}

inline double gelu_slope_of(double x) {
    return 0.5 * (1 + std::erf(x / std::sqrt(2.0))) + x * std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
}

inline Doubles map_of(const Doubles& x, double (*function)(double)) {
    Doubles found(x.size());
    for (size_t i = 0; i < x.size(); ++i) found[i] = function(x[i]);
    return found;
}

inline Doubles product_of(const Doubles& x, const Doubles& y) {
    Doubles found(x.size());
    for (size_t i = 0; i < x.size(); ++i) found[i] = x[i] * y[i];
    return found;
}

inline Doubles sum_of(const Doubles& x, const Doubles& y) {
    Doubles found(x.size());
    for (size_t i = 0; i < x.size(); ++i) found[i] = x[i] + y[i];
    return found;
}

// BatchNorm with the statistics of the batch.
struct BatchNormed {
    int64_t channels;
    Floats weight;
    Doubles mean;
    Doubles variance;
    Doubles standard;  // the input, standardized
    Doubles output;
    Doubles grad_weight;
    Doubles grad_bias;

    BatchNormed(const Doubles& x, const Floats& weight, const Floats& bias)
        : channels((int64_t)weight.size()),
          weight(weight),
          mean(channels),
          variance(channels),
          standard(x.size()),
          output(x.size()),
          grad_weight(channels),
          grad_bias(channels) {
        for (size_t i = 0; i < x.size(); ++i) mean[i % channels] += x[i] / count();
        for (size_t i = 0; i < x.size(); ++i) {
            const double apart = x[i] - mean[i % channels];
            variance[i % channels] += apart * apart / count();
        }
        for (size_t i = 0; i < x.size(); ++i) {
            const int64_t c = (int64_t)i % channels;
            standard[i] = (x[i] - mean[c]) / std::sqrt(variance[c] + 1e-5);
            output[i] = standard[i] * weight[c] + bias[c];
        }
    }

    double count() const { return (double)standard.size() / channels; }

    // The gradient with respect to the input.
    Doubles backward(const Doubles& grad) {
        for (size_t i = 0; i < grad.size(); ++i) {
            grad_bias[i % channels] += grad[i];
            grad_weight[i % channels] += grad[i] * standard[i];
        }
        Doubles found(grad.size());
        for (size_t i = 0; i < grad.size(); ++i) {
            const int64_t c = (int64_t)i % channels;
            const double rest = grad[i] - grad_bias[c] / count() - standard[i] * grad_weight[c] / count();
            found[i] = rest * weight[c] / std::sqrt(variance[c] + 1e-5);
        }
        return found;
    }
};

// Gradients of a layer with respect to its input, its weights, and its bias.
struct LayerGradients {
    Doubles input;
    Doubles weight;
    Doubles bias;
};

inline LayerGradients multiply_backward(const Doubles& grad, const Doubles& x, int64_t inputs, const Floats& weight) {
    const int64_t outputs = (int64_t)weight.size() / inputs;
    LayerGradients found = {Doubles(x.size()), Doubles(weight.size()), Doubles(outputs)};
    for (size_t place = 0; place < grad.size(); ++place) {
        const int64_t token = (int64_t)place / outputs;
        const int64_t o = (int64_t)place % outputs;
        found.bias[o] += grad[place];
        for (int64_t i = 0; i < inputs; ++i) {
            found.input[token * inputs + i] += grad[place] * weight[o * inputs + i];
            found.weight[o * inputs + i] += grad[place] * x[token * inputs + i];
        }
    }
    return found;
}

inline LayerGradients depthwise_backward(const Doubles& grad, const Doubles& x, const LayerCase& c,
                                         const Floats& weight) {
    LayerGradients found = {Doubles(x.size()), Doubles(weight.size()), Doubles(c.channels)};
    for (int64_t place = 0; place < (int64_t)grad.size(); ++place) {
        const int64_t channel = place % c.channels;
        const int64_t across = place / c.channels % c.width;
        const int64_t down = place / c.channels / c.width % c.height;
        found.bias[channel] += grad[place];
        for (int64_t tap = 0; tap < 9; ++tap) {
            const int64_t row = tap / 3 - 1;
            const int64_t column = tap % 3 - 1;
            if (row + down < 0 || row + down >= c.height || column + across < 0 || column + across >= c.width) continue;
            const int64_t from = place + (row * c.width + column) * c.channels;
            found.input[from] += grad[place] * weight[channel * 9 + tap];
            found.weight[channel * 9 + tap] += grad[place] * x[from];
        }
    }
    return found;
}

// Means, 1 / standard deviations, variances, and gradients of a norm.
struct NormResults {
    Floats mean, scale, variance, grad_weight, grad_bias;

    explicit NormResults(int64_t channels)
        : mean(channels), scale(channels), variance(channels), grad_weight(channels), grad_bias(channels) {}

    dgt_training_norm described(const Norm& norm) {
        return {norm.weight.data(), norm.bias.data(), 1e-5, mean.data(), scale.data(), variance.data(),
                grad_weight.data(), grad_bias.data()};
    }
};

// What forward and backward passes write.
struct TrainingResults {
    Floats expanded, convolved, projected, output;
    Floats grad_input, grad_expand_weight, grad_expand_bias, grad_depthwise_weight, grad_depthwise_bias;
    Floats grad_project_weight, grad_project_bias;
    NormResults norm1, norm2, norm3;

    explicit TrainingResults(const LayerCase& c)
        : expanded(in_slices(c), NAN),
          convolved(in_slices(c), NAN),
          projected(c.places() * c.channels, NAN),
          output(c.places() * c.channels, NAN),
          grad_input(c.places() * c.channels, NAN),
          grad_expand_weight(c.outputs * c.channels, NAN),
          grad_expand_bias(c.outputs, NAN),
          grad_depthwise_weight(c.outputs * 9, NAN),
          grad_depthwise_bias(c.outputs, NAN),
          grad_project_weight(c.outputs * c.channels, NAN),
          grad_project_bias(c.channels, NAN),
          norm1(c.outputs),
          norm2(c.outputs),
          norm3(c.channels) {}

    static int64_t in_slices(const LayerCase& c) {
        const int64_t lanes = dgt_lanes();
        return (c.outputs + lanes - 1) / lanes * lanes * c.places();
    }

    // Everything that does not depend on the vector width.
    std::vector<Floats> all() const {
        return {output,
                grad_input,
                grad_expand_weight,
                grad_expand_bias,
                grad_depthwise_weight,
                grad_depthwise_bias,
                grad_project_weight,
                grad_project_bias,
                norm1.mean,
                norm1.variance,
                norm1.grad_weight,
                norm1.grad_bias,
                norm2.mean,
                norm2.variance,
                norm2.grad_weight,
                norm2.grad_bias,
                norm3.mean,
                norm3.variance,
                norm3.grad_weight,
                norm3.grad_bias};
    }
};

inline TrainingResults train(const LayerCase& c, const Floats& x, const Floats& grad, const Network& network,
                             const Bytes& mask, int64_t threads) {
    TrainingResults results(c);
    dgt_training_problem problem{};
    problem.images = c.images;
    problem.height = c.height;
    problem.width = c.width;
    problem.channels = c.channels;
    problem.hidden = c.outputs;
    problem.input = x.data();
    problem.mask = mask.data();
    problem.expand_weight = network.expand_weight.data();
    problem.expand_bias = network.expand_bias.data();
    problem.norm1 = results.norm1.described(network.norm1);
    problem.depthwise_weight = network.depthwise_weight.data();
    problem.depthwise_bias = network.depthwise_bias.data();
    problem.norm2 = results.norm2.described(network.norm2);
    problem.project_weight = network.project_weight.data();
    problem.project_bias = network.project_bias.data();
    problem.norm3 = results.norm3.described(network.norm3);
    problem.expanded = results.expanded.data();
    problem.convolved = results.convolved.data();
    problem.projected = results.projected.data();
    problem.output = results.output.data();
    problem.threads = threads;
    problem.parallel_for = in_threads;
    dgt_feed_forward_training(&problem);
    problem.grad_output = grad.data();
    problem.grad_input = results.grad_input.data();
    problem.grad_expand_weight = results.grad_expand_weight.data();
    problem.grad_expand_bias = results.grad_expand_bias.data();
    problem.grad_depthwise_weight = results.grad_depthwise_weight.data();
    problem.grad_depthwise_bias = results.grad_depthwise_bias.data();
    problem.grad_project_weight = results.grad_project_weight.data();
    problem.grad_project_bias = results.grad_project_bias.data();
    dgt_feed_forward_backward(&problem);
    return results;
}

// The same in double precision, in the order of `TrainingResults::all`.
inline std::vector<Doubles> train_naively(const LayerCase& c, const Floats& x, const Floats& grad,
                                          const Network& network, const Bytes& mask) {
    LayerCase hidden = c;
    hidden.channels = c.outputs;
    hidden.stride = 1;
    Doubles is_real(c.places() * c.outputs);
    for (size_t i = 0; i < is_real.size(); ++i) is_real[i] = mask[i / c.outputs];
    const Doubles expanded = multiply(as_doubles(x), c.channels, network.expand_weight, network.expand_bias);
    BatchNormed norm1(map_of(expanded, gelu_of), network.norm1.weight, network.norm1.bias);
    const Doubles mixed = product_of(norm1.output, is_real);
    const Doubles convolved =
        sum_of(mixed, convolve(mixed, hidden, network.depthwise_weight, network.depthwise_bias, true));
    BatchNormed norm2(map_of(convolved, gelu_of), network.norm2.weight, network.norm2.bias);
    BatchNormed norm3(multiply(norm2.output, c.outputs, network.project_weight, network.project_bias),
                      network.norm3.weight, network.norm3.bias);

    const LayerGradients project =
        multiply_backward(norm3.backward(as_doubles(grad)), norm2.output, c.outputs, network.project_weight);
    const Doubles in_convolved = product_of(norm2.backward(project.input), map_of(convolved, gelu_slope_of));
    const LayerGradients depthwise = depthwise_backward(in_convolved, mixed, hidden, network.depthwise_weight);
    const Doubles in_mixed = product_of(sum_of(in_convolved, depthwise.input), is_real);
    const Doubles in_expanded = product_of(norm1.backward(in_mixed), map_of(expanded, gelu_slope_of));
    const LayerGradients expand = multiply_backward(in_expanded, as_doubles(x), c.channels, network.expand_weight);
    return {norm3.output,      expand.input,    expand.weight,  expand.bias,       depthwise.weight,
            depthwise.bias,    project.weight,  project.bias,   norm1.mean,        norm1.variance,
            norm1.grad_weight, norm1.grad_bias, norm2.mean,     norm2.variance,    norm2.grad_weight,
            norm2.grad_bias,   norm3.mean,      norm3.variance, norm3.grad_weight, norm3.grad_bias};
}

inline void check_training(const LayerCase& c, std::mt19937& random, const Expect& expect) {
    const Floats x = random_floats(random, c.places() * c.channels, -1, 1);
    const Floats grad = random_floats(random, c.places() * c.channels, -1, 1);
    const Network network(random, c.channels, c.outputs);
    Bytes mask(c.places(), 1);
    mask[c.places() - 1] = 0;
    const std::vector<Floats> found = train(c, x, grad, network, mask, c.threads).all();
    const std::vector<Doubles> expected = train_naively(c, x, grad, network, mask);
    double worst = 0;
    for (size_t i = 0; i < found.size(); ++i) {
        const double error = error_beside_largest(found[i], expected[i]);
        worst = error <= worst ? worst : error;
    }
    expect(worst <= LAYER_GRADIENT_TOLERANCE, "feed-forward network in training", name_of(c));
    const bool is_same = train(c, x, grad, network, mask, 1).all() == found;
    expect(is_same, "feed-forward network in training, one thread", name_of(c));
}

inline void check_depthwise_gradients(const LayerCase& c, std::mt19937& random, const Expect& expect) {
    const Floats x = random_floats(random, c.places() * c.channels, -1, 1);
    const Floats grad = random_floats(random, c.places() * c.channels, -1, 1);
    const Floats weight = random_floats(random, c.channels * 9, -1, 1);
    Floats grad_input(x.size(), NAN);
    Floats grad_weight(weight.size(), NAN);
    Floats grad_bias(c.channels, NAN);
    dgt_depthwise_problem problem{};
    problem.images = c.images;
    problem.height = c.height;
    problem.width = c.width;
    problem.channels = c.channels;
    problem.with_input = 1;
    problem.input = x.data();
    problem.weight = weight.data();
    problem.grad_output = grad.data();
    problem.grad_input = grad_input.data();
    problem.grad_weight = grad_weight.data();
    problem.grad_bias = grad_bias.data();
    problem.threads = c.threads;
    problem.parallel_for = in_threads;
    dgt_depthwise_backward(&problem);
    LayerGradients expected = depthwise_backward(as_doubles(grad), as_doubles(x), c, weight);
    expected.input = sum_of(expected.input, as_doubles(grad));
    const double worst =
        std::max({error_beside_largest(grad_input, expected.input), error_beside_largest(grad_weight, expected.weight),
                  error_beside_largest(grad_bias, expected.bias)});
    expect(worst <= LAYER_GRADIENT_TOLERANCE, "gradients of a depthwise convolution", name_of(c));
}

inline void check_layers_in_training(bool reduced, const Expect& expect) {
    std::mt19937 random(7);
    std::vector<LayerCase> cases = {
        {2, 3, 5, 7, 19, 1, 2},
        {1, 1, 9, 3, 1, 1, 1},
        {1, 7, 7, 33, 64, 1, 3},
        {3, 2, 9, 16, 17, 1, 2},
    };
    if (!reduced) {
        cases.push_back({2, 14, 14, 24, 96, 1, 2});
        cases.push_back({3, 13, 11, 40, 70, 1, 2});  // more tokens than fit in one panel
    }
    for (const LayerCase& c : cases) {
        check_training(c, random, expect);
        check_depthwise_gradients(c, random, expect);
    }
}

}  // namespace native_check
