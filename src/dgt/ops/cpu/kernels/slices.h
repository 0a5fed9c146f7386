// Hidden maps in training: slices of W channels, (channels / W, places, W).
//
// A slice is everything that BatchNorm and a depthwise convolution see of a batch. One thread passes over it, so the
// batch statistics are known while the slice is still in the cache, and no sum depends on the number of threads. To a
// product that sums over positions, a slice is a panel.
#pragma once

#include "convolution_interface.h"
#include "depthwise.h"
#include "gelu.h"

namespace dgt {

struct Slices {
    float* at;
    int64_t places;

    float* slice(int64_t i) const { return at + i * places * W; }
    float* vector(int64_t i, int64_t place) const { return at + (i * places + place) * W; }
};

inline int64_t slices_of(int64_t channels) { return divide_up(channels, W); }

// The stride of rows of `channels` floats: an odd number of cache lines, or rows would compete for the same cache sets.
inline int64_t odd_stride(int64_t channels) { return (divide_up(channels, 16) | 1) * 16; }

// Means and variances of W channels, run by run: no sum has more terms than a run, or than there are runs.
class Moments {
public:
    void add(const float* values, int64_t count) {
        Floats sum{};
        for (int64_t i = 0; i < count; ++i) sum += load(values + i * W);
        Floats mean = sum / (float)count;
        Floats squares{};
        for (int64_t i = 0; i < count; ++i) {
            Floats apart = load(values + i * W) - mean;
            squares += apart * apart;
        }
        float before = (float)count_;
        float total = (float)(count_ + count);
        Floats apart = mean - mean_;
        mean_ += apart * ((float)count / total);
        squares_ += squares + apart * apart * (before * (float)count / total);
        count_ += count;
    }
    Floats mean() const { return mean_; }
    Floats variance() const { return squares_ / (float)count_; }

private:
    Floats mean_{};
    Floats squares_{};
    int64_t count_ = 0;
};

// BatchNorm of W channels with the statistics of the batch.
struct SliceNorm {
    Floats mean;
    Floats scale;  // 1 / standard deviation
    Floats weight;
    Floats bias;

    // From the statistics that a forward pass wrote.
    SliceNorm(const dgt_training_norm& norm, int64_t channel, int64_t channels)
        : mean(load_channels(norm.mean, channel, channels)),
          scale(load_channels(norm.scale, channel, channels)),
          weight(load_channels(norm.weight, channel, channels)),
          bias(load_channels(norm.bias, channel, channels)) {}

    // Write the statistics of the batch, then read them.
    SliceNorm(const dgt_training_norm& norm, int64_t channel, int64_t channels, const Moments& moments)
        : SliceNorm(written(norm, channel, channels, moments), channel, channels) {}

    Floats standard(Floats x) const { return (x - mean) * scale; }
    Floats apply(Floats x) const { return standard(x) * weight + bias; }

private:
    static const dgt_training_norm& written(const dgt_training_norm& norm, int64_t channel, int64_t channels,
                                            const Moments& moments) {
        Floats variance = moments.variance();
        Floats scale;
        for (int i = 0; i < W; ++i) scale[i] = (float)(1.0 / __builtin_sqrt(variance[i] + norm.epsilon));
        store_channels(norm.mean, channel, channels, moments.mean());
        store_channels(norm.variance, channel, channels, variance);
        store_channels(norm.scale, channel, channels, scale);
        return norm;
    }
};

// What the gradient of such a BatchNorm needs: sums over all positions.
struct SliceNormSums {
    Floats grads{};     // of the output
    Floats products{};  // of the output's gradient times the standardized input

    void add(const SliceNormSums& more) {
        grads += more.grads;
        products += more.products;
    }
    void write(const dgt_training_norm& norm, int64_t channel, int64_t channels) const {
        store_channels(norm.grad_weight, channel, channels, products);
        store_channels(norm.grad_bias, channel, channels, grads);
    }
};

// The gradient of BatchNorm with respect to its input, W channels.
struct SliceNormGradient {
    SliceNorm norm;
    Floats mean_grad;
    Floats mean_product;

    SliceNormGradient(const SliceNorm& norm, const SliceNormSums& sums, int64_t places)
        : norm(norm), mean_grad(sums.grads / (float)places), mean_product(sums.products / (float)places) {}

    Floats apply(Floats grad, Floats input) const {
        return norm.scale * norm.weight * (grad - mean_grad - norm.standard(input) * mean_product);
    }
};

// Three lines of a slice; the oldest is replaced by the next.
struct LineRing {
    float* at;
    int64_t width;

    LineRing(float* memory, int64_t width) : at(memory), width(width) {}

    static int64_t floats(int64_t width) { return 3 * width * W; }
    float* line(int64_t row) const { return at + row % 3 * width * W; }
    Lines around(int64_t row, int64_t height) const {
        return {row > 0 ? line(row - 1) : nullptr, line(row), row + 1 < height ? line(row + 1) : nullptr, width, W};
    }
};

// Transpose (tokens, channels) of a slice to (channels, tokens), rows `stride` apart.
inline void turn_slice(const float* from, int64_t tokens, int64_t channels, int64_t slice, float* to, int64_t stride) {
    int64_t channel = slice * W;
    int64_t count = min<int64_t>(W, channels - channel);
    float square[W * W];
    for (int64_t first = 0; first < tokens; first += W) {
        const float* rows[W];
        for (int64_t i = 0; i < W; ++i) rows[i] = from + min(first + i, tokens - 1) * channels;
        transpose(rows, channel, count, square);
        for (int64_t i = 0; i < count; ++i) {
            store_channels(to + (channel + i) * stride, first, tokens, load(square + i * W));
        }
    }
}

}  // namespace dgt
