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

}  // namespace dgt
