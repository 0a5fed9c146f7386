// 3 x 3 depthwise convolutions over channels-last maps: a vector holds W channels of one position.
#pragma once

#include "elements.h"
#include "memory.h"

namespace dgt {

constexpr int TAPS = 9;

// The taps of all channels, transposed: (9, channels), padded to whole vectors.
struct Taps {
    float* at;
    int64_t stride;

    Taps(Arena& arena, int64_t channels)
        : at(arena.take<float>(TAPS * round_up(channels, W))), stride(round_up(channels, W)) {}

    void copy(const float* weight, int64_t channels) const {
        for (int64_t tap = 0; tap < TAPS; ++tap)
            for (int64_t c = 0; c < stride; ++c) at[tap * stride + c] = c < channels ? weight[c * TAPS + tap] : 0.0f;
    }
};

// A line of a map and its neighbors, from a channel on; null outside the map. Positions are `stride` elements apart.
template <class T>
struct Lines {
    const T* above;
    const T* here;
    const T* below;
    int64_t width;
    int64_t stride;

    // Of a contiguous (images, height, width, channels) map; lines are counted through all images.
    static Lines of(const T* map, int64_t line, int64_t height, int64_t width, int64_t channels, int64_t channel) {
        int64_t elements = width * channels;
        int64_t row = line % height;
        const T* here = map + line * elements + channel;
        return {row > 0 ? here - elements : nullptr, here, row + 1 < height ? here + elements : nullptr, width,
                channels};
    }
};

// Three positions in a column.
struct Column {
    Floats above;
    Floats here;
    Floats below;
};

template <class T, class How>
DGT_INLINE Column column_of(const Lines<T>& lines, int64_t place, How how) {
    if (place >= lines.width) return {Floats{}, Floats{}, Floats{}};
    int64_t at = place * lines.stride;
    return {lines.above ? how.load(lines.above + at) : Floats{}, how.load(lines.here + at),
            lines.below ? how.load(lines.below + at) : Floats{}};
}

// Visit the neighborhood of every position of a line: `visit(place, left, middle, right)`; zeros outside the map.
template <class T, class How, class Visit>
DGT_INLINE void for_each_neighborhood(const Lines<T>& lines, How how, const Visit& visit) {
    Column left{};
    Column middle = column_of(lines, 0, how);
    for (int64_t place = 0; place < lines.width; ++place) {
        Column right = column_of(lines, place + 1, how);
        visit(place, left, middle, right);
        left = middle;
        middle = right;
    }
}

// The sum of a neighborhood, weighted by taps in the order of lines.
DGT_INLINE Floats convolve(const Floats* tap, const Column& left, const Column& middle, const Column& right,
                           Floats sum) {
    sum += tap[0] * left.above;
    sum += tap[1] * middle.above;
    sum += tap[2] * right.above;
    sum += tap[3] * left.here;
    sum += tap[4] * middle.here;
    sum += tap[5] * right.here;
    sum += tap[6] * left.below;
    sum += tap[7] * middle.below;
    return sum + tap[8] * right.below;
}

// Convolve W channels of a line: `finish(place, input, convolved)`.
template <class T, class How, class Finish>
DGT_INLINE void convolve_vector(const Lines<T>& lines, const Taps& taps, int64_t channel, Floats bias, How how,
                                const Finish& finish) {
    Floats tap[TAPS];
#pragma GCC unroll 9
    for (int i = 0; i < TAPS; ++i) tap[i] = load(taps.at + i * taps.stride + channel);
    for_each_neighborhood(lines, how,
                          [&](int64_t place, const Column& left, const Column& middle, const Column& right) {
                              finish(place, middle.here, convolve(tap, left, middle, right, bias));
                          });
}

}  // namespace dgt
