// BatchNorm in evaluation.
#pragma once

#include "layers.h"
#include "linear.h"

namespace dgt {

// A BatchNorm in evaluation as one scale and shift per channel.
struct Affine {
    float* scale;
    float* shift;
    int64_t channels;

    Affine(Arena& arena, int64_t channels)
        : scale(take_channels(arena, channels)), shift(take_channels(arena, channels)), channels(channels) {}

    void set(const dgt_batch_norm& norm) const {
        for (int64_t i = 0; i < round_up(channels, W); ++i) {
            bool is_normed = norm.weight && i < channels;
            double factor = is_normed ? norm.weight[i] / __builtin_sqrt(norm.variance[i] + norm.epsilon) : 1.0;
            scale[i] = (float)factor;
            shift[i] = is_normed ? (float)(norm.bias[i] - norm.mean[i] * factor) : 0.0f;
        }
    }

    Floats apply(Floats x, int64_t channel) const { return x * load(scale + channel) + load(shift + channel); }
};

}  // namespace dgt
