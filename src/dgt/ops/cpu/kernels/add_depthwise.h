// A map and its 3 x 3 depthwise convolution, added, in training: forward, and all gradients in one pass.
//
// The gradient in the input is the same sum of neighbors with the taps reversed. The gradient of a tap is the input
// times those neighbors, which are in registers by then. It is summed up by chunks of lines that do not depend on the
// number of threads: in float32 within a chunk, then in double precision.
#pragma once

#include "depthwise.h"
#include "elements.h"
#include "maps.h"
#include "memory.h"
#include "parallel.h"

namespace dgt {

template <class T>
struct AddDepthwise {
    static constexpr int64_t SUMS = TAPS + 1;        // a channel: those of the taps, and of the bias
    static constexpr int64_t LEAST_POSITIONS = 256;  // of a chunk: many sums would cost more than they are worth
    static constexpr int64_t CHANNELS_OF_PIECE = 256;

    const dgt_map_problem& x;
    int64_t padded;  // channels in whole vectors
    int64_t lines;
    int64_t chunk_lines;
    int64_t chunks;
    Taps taps;
    float* bias;  // (padded)
    float* sums;  // (chunks, SUMS, padded)

    AddDepthwise(Arena& arena, const dgt_map_problem& x)
        : x(x),
          padded(round_up(x.channels, W)),
          lines(x.images * x.height),
          chunk_lines(max(divide_up(lines, MOST_CHUNKS), divide_up(LEAST_POSITIONS, x.width))),
          chunks(divide_up(lines, chunk_lines)),
          taps(arena, x.channels),
          bias(arena.take<float>(padded)),
          sums(arena.take<float>(chunks * SUMS * padded)) {}

    Lines<T> lines_of(const void* map, int64_t line, int64_t channel) const {
        return Lines<T>::of((const T*)map, line, x.height, x.width, x.channels, channel);
    }
    T* line_of(void* map, int64_t line, int64_t channel) const {
        return (T*)map + line * x.width * x.channels + channel;
    }

    void read_parameters(Member& member) const {
        member.share(1, [&](int64_t) {
            taps.copy(x.weight, x.channels);
            for (int64_t i = 0; i < padded; ++i) bias[i] = x.bias && i < x.channels ? x.bias[i] : 0.0f;
        });
    }

    void write_output(Member& member) const {
        member.share(lines, [&](int64_t line) {
            for_each_vector(x.channels, [&](int64_t channel, auto how) {
                prefetch<0>(x.input, line + 2, channel);
                prefetch<1>(x.output, line + 1, channel);
                T* to = line_of(x.output, line, channel);
                convolve_vector(
                    lines_of(x.input, line, channel), taps, channel, load(bias + channel), how,
                    [&](int64_t place, Floats input, Floats sum) { how.store(to + place * x.channels, input + sum); });
            });
        });
    }

    void write_gradients(Member& member) const {
        int64_t pieces = divide_up(padded, CHANNELS_OF_PIECE);
        member.share(chunks * pieces, [&](int64_t piece) {
            int64_t chunk = piece / pieces;
            int64_t first = piece % pieces * CHANNELS_OF_PIECE;
            int64_t count = min(CHANNELS_OF_PIECE, x.channels - first);
            float* to = sums + chunk * SUMS * padded + first;
            for (int64_t i = 0; i < SUMS; ++i)
                memset(to + i * padded, 0, (size_t)min(CHANNELS_OF_PIECE, padded - first) * sizeof(float));
            int64_t end = min(lines, (chunk + 1) * chunk_lines);
            for (int64_t line = chunk * chunk_lines; line < end; ++line)
                for_each_vector(
                    count, [&](int64_t channel, auto how) { write_line(line, first + channel, how, to + channel); });
        });
        each_channels(member, x.channels, [&](int64_t first, int64_t end) {
            double totals[SUMS][CHANNELS_AT_A_TIME] = {};
            for (int64_t chunk = 0; chunk < chunks; ++chunk)
                for (int64_t which = 0; which < SUMS; ++which)
                    for (int64_t i = first; i < end; ++i)
                        totals[which][i - first] += sums[(chunk * SUMS + which) * padded + i];
            for (int64_t i = first; i < end; ++i) {
                for (int64_t tap = 0; tap < TAPS; ++tap) x.grad_weight[i * TAPS + tap] = (float)totals[tap][i - first];
                x.grad_bias[i] = (float)totals[TAPS][i - first];
            }
        });
    }

private:
    // Bring a line into the second cache, or what belongs to W channels if it is divided among all: computing takes a
    // line by channels, whose places are far apart, and memory is faster in order.
    template <int written>
    void prefetch(const void* map, int64_t line, int64_t channel) const {
        if (line >= lines) return;
        const char* from = (const char*)((const T*)map + (line * x.channels + channel) * x.width);
        for (int64_t i = 0; i < W * x.width * (int64_t)sizeof(T); i += 64) __builtin_prefetch(from + i, written, 2);
    }

    // The gradient in W channels of a line, and what it adds to the sums of its chunk.
    template <class How>
    inline __attribute__((always_inline)) void write_line(int64_t line, int64_t channel, How how, float* to) const {
        Floats tap[TAPS];
        Floats sum[SUMS];
#pragma GCC unroll 9
        for (int i = 0; i < TAPS; ++i) tap[i] = load(taps.at + (TAPS - 1 - i) * taps.stride + channel);
#pragma GCC unroll 10
        for (int i = 0; i < SUMS; ++i) sum[i] = load(to + i * padded);
        prefetch<0>(x.grad_output, line + 2, channel);
        prefetch<0>(x.input, line + 1, channel);
        prefetch<1>(x.grad_input, line + 1, channel);
        const T* from = line_of((void*)x.input, line, channel);
        T* grads = line_of(x.grad_input, line, channel);
        for_each_neighborhood(lines_of(x.grad_output, line, channel), how,
                              [&](int64_t place, const Column& left, const Column& middle, const Column& right) {
                                  Floats input = how.load(from + place * x.channels);
                                  sum[8] += input * left.above;
                                  sum[7] += input * middle.above;
                                  sum[6] += input * right.above;
                                  sum[5] += input * left.here;
                                  sum[4] += input * middle.here;
                                  sum[3] += input * right.here;
                                  sum[2] += input * left.below;
                                  sum[1] += input * middle.below;
                                  sum[0] += input * right.below;
                                  sum[9] += middle.here;
                                  Floats grad = convolve(tap, left, middle, right, middle.here);
                                  how.store(grads + place * x.channels, grad);
                              });
#pragma GCC unroll 10
        for (int i = 0; i < SUMS; ++i) store(to + i * padded, sum[i]);
    }
};

}  // namespace dgt
