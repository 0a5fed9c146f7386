// 3 x 3 depthwise convolutions over channels-last maps: a vector holds W channels of one position.
#pragma once

#include "linear.h"

namespace dgt {

constexpr int TAPS = 9;

// The taps of all channels, transposed: (9, channels), padded to whole vectors.
struct Taps {
    float* at;
    int64_t stride;

    Taps(Arena& arena, int64_t channels)
        : at(take_channels(arena, TAPS * round_up(channels, W))), stride(round_up(channels, W)) {}

    void copy(const float* weight, int64_t channels) const {
        for (int64_t tap = 0; tap < TAPS; ++tap)
            for (int64_t c = 0; c < stride; ++c) at[tap * stride + c] = c < channels ? weight[c * TAPS + tap] : 0.0f;
    }

    // From here on, the taps of the transposed convolution, which propagates gradients.
    void reverse() const {
        for (int64_t tap = 0; tap < TAPS / 2; ++tap) {
            for (int64_t c = 0; c < stride; ++c) {
                float kept = at[tap * stride + c];
                at[tap * stride + c] = at[(TAPS - 1 - tap) * stride + c];
                at[(TAPS - 1 - tap) * stride + c] = kept;
            }
        }
    }
};

// A line of a map and its neighbors; null outside the map. Positions are `stride` floats apart.
struct Lines {
    const float* above;
    const float* here;
    const float* below;
    int64_t width;
    int64_t stride;
};

// Three positions in a column.
struct Column {
    Floats above;
    Floats here;
    Floats below;
};

template <class Load>
DGT_INLINE Column column_of(const Lines& lines, int64_t place, const Load& load_vector) {
    if (place < 0 || place >= lines.width) return {Floats{}, Floats{}, Floats{}};
    int64_t at = place * lines.stride;
    return {lines.above ? load_vector(lines.above + at) : Floats{}, load_vector(lines.here + at),
            lines.below ? load_vector(lines.below + at) : Floats{}};
}

// Convolve W channels of a line: `finish(position, input, convolved)`.
template <class Load, class Finish>
DGT_INLINE void convolve_vector(const Lines& lines, const Taps& taps, int64_t channel, Floats bias,
                                const Load& load_vector, const Finish& finish) {
    Floats tap[TAPS];
#pragma GCC unroll 9
    for (int i = 0; i < TAPS; ++i) tap[i] = load(taps.at + i * taps.stride + channel);
    Column left = column_of(lines, -1, load_vector);
    Column middle = column_of(lines, 0, load_vector);
    for (int64_t place = 0; place < lines.width; ++place) {
        Column right = column_of(lines, place + 1, load_vector);
        Floats sum = bias;
        sum += tap[0] * left.above;
        sum += tap[1] * middle.above;
        sum += tap[2] * right.above;
        sum += tap[3] * left.here;
        sum += tap[4] * middle.here;
        sum += tap[5] * right.here;
        sum += tap[6] * left.below;
        sum += tap[7] * middle.below;
        sum += tap[8] * right.below;
        finish(place, middle.here, sum);
        left = middle;
        middle = right;
    }
}

// The gradients of the taps and the bias of W channels.
struct TapSums {
    Floats taps[TAPS];
    Floats bias;

    TapSums() : taps{}, bias{} {}

    // Add a line: its gradients, W floats per position, and the input of the convolution around it.
    void add(const float* grads, const Lines& inputs) {
        add(grads, W, inputs, [](const float* from) { return load(from); });
    }

    // The same for any stride and number of lanes.
    template <class Load>
    void add(const float* grads, int64_t stride, const Lines& inputs, const Load& load_vector) {
        Floats sum[TAPS] = {};
        Floats sum_of_grads{};
        Column left = column_of(inputs, -1, load_vector);
        Column middle = column_of(inputs, 0, load_vector);
        for (int64_t place = 0; place < inputs.width; ++place) {
            Column right = column_of(inputs, place + 1, load_vector);
            Floats grad = load_vector(grads + place * stride);
            sum[0] += grad * left.above;
            sum[1] += grad * middle.above;
            sum[2] += grad * right.above;
            sum[3] += grad * left.here;
            sum[4] += grad * middle.here;
            sum[5] += grad * right.here;
            sum[6] += grad * left.below;
            sum[7] += grad * middle.below;
            sum[8] += grad * right.below;
            sum_of_grads += grad;
            left = middle;
            middle = right;
        }
#pragma GCC unroll 9
        for (int i = 0; i < TAPS; ++i) taps[i] += sum[i];
        bias += sum_of_grads;
    }

    void add(const TapSums& more) {
        for (int i = 0; i < TAPS; ++i) taps[i] += more.taps[i];
        bias += more.bias;
    }

    // Write to (channels, 3, 3) and (channels).
    void write(float* weight_grad, float* bias_grad, int64_t channel, int64_t channels) const {
        for (int64_t c = 0; c < min<int64_t>(W, channels - channel); ++c)
            for (int64_t i = 0; i < TAPS; ++i) weight_grad[(channel + c) * TAPS + i] = taps[i][c];
        store_channels(bias_grad, channel, channels, bias);
    }
};

}  // namespace dgt
