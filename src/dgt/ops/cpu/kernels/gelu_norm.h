// GELU and then BatchNorm in training, over channels-last maps, forward and backward.
//
// Nothing is kept between the passes over memory, of which there are as many as the statistics of the batch need: two
// forward, two backward. Each computes GELU again, which is cheaper than to read it.
//
// Sums are taken of blocks of rows in float32, around the first row of the block, so that a mean that is large beside
// the deviation costs no digits; sums of blocks are added in double precision, by chunks of rows that do not depend on
// the number of threads.
#pragma once

#include "elements.h"
#include "gelu.h"
#include "maps.h"
#include "memory.h"
#include "parallel.h"

namespace dgt {

constexpr int64_t BLOCK_ROWS = 32;
constexpr int64_t ROWS_AT_A_TIME = 4;  // whose sum is in registers

// Two sums over a block of rows for a vector of channels: of numbers around a center, and of squares, or products.
struct BlockSums {
    Floats center;
    Floats first;
    Floats second;

    // Add them, around zero, to sums of more blocks.
    DGT_INLINE void add(const BlockSums& from, int64_t rows, double* first, double* second) {
        for (int i = 0; i < W; ++i) {
            double center = from.center[i];
            double apart = from.first[i];
            first[i] += apart + center * rows;
            second[i] += from.second[i] + center * (2 * apart + center * rows);
        }
    }
};

template <class T>
struct GeluNorm {
    const dgt_map_problem& x;
    int64_t positions;   // of all images
    int64_t padded;      // channels in whole vectors
    int64_t chunk_rows;  // whole blocks
    int64_t chunks;
    double* sums;           // (chunks, 2, padded)
    BlockSums* block_sums;  // (threads, padded / W)
    float* mean;            // (padded), as all below
    float* scale;           // of gelu(input) around the mean, or of the gradient
    float* shift;           // added to it
    float* grad_scale;      // in the gradient, of gelu(input) around the mean
    float* grad_shift;      // added to it

    GeluNorm(Arena& arena, const dgt_map_problem& x)
        : x(x),
          positions(x.images * x.height * x.width),
          padded(round_up(x.channels, W)),
          chunk_rows(round_up(divide_up(positions, MOST_CHUNKS), BLOCK_ROWS)),
          chunks(divide_up(positions, chunk_rows)),
          sums(arena.take<double>(chunks * 2 * padded)),
          block_sums(arena.take<BlockSums>(thread_count(x) * padded / W)),
          mean(arena.take<float>(padded)),
          scale(arena.take<float>(padded)),
          shift(arena.take<float>(padded)),
          grad_scale(arena.take<float>(padded)),
          grad_shift(arena.take<float>(padded)) {}

    const T* input(int64_t row, int64_t channel) const { return (const T*)x.input + row * x.channels + channel; }
    const T* grad_output(int64_t row, int64_t channel) const {
        return (const T*)x.grad_output + row * x.channels + channel;
    }
    double variance(int64_t i) const { return x.statistics[x.channels + i] + x.epsilon; }

    // ---- the steps, each divided among threads ----

    void find_statistics(Member& member) const {
        sum_chunks(member, [&](int64_t row, int64_t rows, int64_t channel, auto how, BlockSums& to) {
            const T* from = input(row, channel);
            if (row % BLOCK_ROWS == 0) to.center = gelu(how.load(from));
            for (int64_t r = 0; r < rows; ++r) {
                prefetch_later_row(from + r * x.channels);
                Floats y = gelu(how.load(from + r * x.channels)) - to.center;
                to.first += y;
                to.second += y * y;
            }
        });
        each_total(member, [&](int64_t i, double sum, double squares) {
            double center = sum / positions;
            double spread = squares / positions - center * center;
            x.statistics[i] = center;
            x.statistics[x.channels + i] = spread < 0 ? 0 : spread;  // NaN stays NaN
        });
    }

    void use_statistics(Member& member) const {
        each_channels(member, x.channels, [&](int64_t first, int64_t end) {
            for (int64_t i = first; i < end; ++i) {
                double factor = x.weight[i] / __builtin_sqrt(variance(i));
                mean[i] = (float)x.statistics[i];
                scale[i] = (float)factor;
                shift[i] = (float)(x.bias[i] + (mean[i] - x.statistics[i]) * factor);
            }
        });
    }

    void write_output(Member& member) const {
        each_vector(member, [&](int64_t row, int64_t channel, auto how) {
            Floats y = gelu(how.load(input(row, channel))) - load(mean + channel);
            y = y * load(scale + channel) + load(shift + channel);
            how.store((T*)x.output + row * x.channels + channel, y);
        });
    }

    void find_parameter_gradients(Member& member) const {
        sum_chunks(member, [&](int64_t row, int64_t rows, int64_t channel, auto how, BlockSums& to) {
            const T* from = input(row, channel);
            const T* grads = grad_output(row, channel);
            Floats center = load(mean + channel);
            for (int64_t r = 0; r < rows; ++r) {
                prefetch_later_row(from + r * x.channels);
                prefetch_later_row(grads + r * x.channels);
                Floats grad = how.load(grads + r * x.channels);
                to.first += grad;
                to.second += grad * (gelu(how.load(from + r * x.channels)) - center);
            }
        });
        each_total(member, [&](int64_t i, double sum, double around) {
            double deviation = __builtin_sqrt(variance(i));
            double rounding = mean[i] - x.statistics[i];  // from the mean to what products were taken around
            double products = around + rounding * sum;
            x.grad_bias[i] = (float)sum;
            x.grad_weight[i] = (float)(products / deviation);
            double factor = x.weight[i] / deviation;
            double slope = -factor * products / (variance(i) * positions);
            grad_scale[i] = (float)slope;
            grad_shift[i] = (float)(slope * rounding - factor * sum / positions);
        });
    }

    void write_input_gradient(Member& member) const {
        each_vector(member, [&](int64_t row, int64_t channel, auto how) {
            GeluSlope y = gelu_with_slope<T>(how.load(input(row, channel)));
            Floats grad = how.load(grad_output(row, channel)) * load(scale + channel);
            grad += (y.value - load(mean + channel)) * load(grad_scale + channel) + load(grad_shift + channel);
            how.store((T*)x.grad_input + row * x.channels + channel, grad * y.slope);
        });
    }

private:
    // Bring a row after those at hand into the second cache: the processor does not foresee several rows at once.
    void prefetch_later_row(const T* from) const { __builtin_prefetch(from + ROWS_AT_A_TIME * x.channels, 0, 2); }

    // Sums of every chunk: `add(row, rows, channel, how, sums)` adds a few rows to those of their block.
    template <class Add>
    void sum_chunks(Member& member, const Add& add) const {
        BlockSums* own = block_sums + member.seat() * (padded / W);
        member.share(chunks, [&](int64_t chunk) {
            double* to = sums + chunk * 2 * padded;
            memset(to, 0, (size_t)(2 * padded) * sizeof(double));
            int64_t end = min(positions, (chunk + 1) * chunk_rows);
            for (int64_t first = chunk * chunk_rows; first < end; first += BLOCK_ROWS) {
                int64_t end_of_block = min(end, first + BLOCK_ROWS);
                memset((void*)own, 0, (size_t)(padded / W) * sizeof(BlockSums));
                for (int64_t row = first; row < end_of_block; row += ROWS_AT_A_TIME) {
                    int64_t rows = min(ROWS_AT_A_TIME, end_of_block - row);
                    for_each_vector(x.channels, [&](int64_t channel, auto how) {
                        BlockSums added = own[channel / W];
                        add(row, rows, channel, how, added);
                        own[channel / W] = added;
                    });
                }
                for (int64_t i = 0; i < padded; i += W)
                    BlockSums::add(own[i / W], end_of_block - first, to + i, to + padded + i);
            }
        });
    }

    // `work(channel, first sum, second sum)` of all chunks for every channel. Chunks are added one after the other:
    // the sums of a channel are far apart.
    template <class Work>
    void each_total(Member& member, const Work& work) const {
        each_channels(member, x.channels, [&](int64_t first, int64_t end) {
            for (int64_t chunk = 1; chunk < chunks; ++chunk)
                for (int64_t which = 0; which < 2; ++which)
                    for (int64_t i = first; i < end; ++i)
                        sums[which * padded + i] += sums[(chunk * 2 + which) * padded + i];
            for (int64_t i = first; i < end; ++i) work(i, sums[i], sums[padded + i]);
        });
    }

    // `work(row, channel, how)` for every vector of the map.
    template <class Work>
    void each_vector(Member& member, const Work& work) const {
        member.share(chunks, [&](int64_t chunk) {
            int64_t end = min(positions, (chunk + 1) * chunk_rows);
            for (int64_t row = chunk * chunk_rows; row < end; ++row)
                for_each_vector(x.channels, [&](int64_t channel, auto how) { work(row, channel, how); });
        });
    }
};

}  // namespace dgt
