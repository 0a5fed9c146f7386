// 3 x 3 convolutions over channels-last maps.
//
// The nine neighbors of an output position are gathered into one row, and rows are multiplied by panels as tokens are
// (linear.h). A thread gathers a block of rows, which stays in its cache, and applies GELU, BatchNorm, and mask to each
// tile of products right away.
#pragma once

#include "../../../ops/cpu/kernels/depthwise.h"
#include "../../../ops/cpu/kernels/gelu.h"
#include "../../../ops/cpu/kernels/parallel.h"
#include "batch_norm.h"
#include "layers.h"
#include "linear.h"

namespace dgt {

// The weights in the kernel's layout.
struct ConvolutionWeights {
    Panels panels;
    Affine norm;
    float* bias;

    ConvolutionWeights(Arena& arena, const dgt_convolution_problem& x)
        : panels(arena, TAPS * x.channels, x.outputs), norm(arena, x.outputs), bias(take_channels(arena, x.outputs)) {}

    void fill(const dgt_convolution_problem& x, Member& member) const {
        member.share(panels.count() + 1, [&](int64_t i) {
            if (i > 0) return panels.pack_taps(x.weight, TAPS, i - 1);
            norm.set(x.norm);
            copy_channels(x.bias, x.outputs, bias);
        });
    }
};

// Working memory of a call, and how the work is divided.
struct Convolution {
    const dgt_convolution_problem& x;
    const ConvolutionWeights& weights;
    int64_t threads;
    int64_t height;  // of the output
    int64_t width;
    int64_t inputs;  // per row
    int64_t row;     // stride between rows: an odd number of cache lines
    TokenBlocks blocks;
    int64_t chunks;   // of the groups of panels, if there are fewer blocks than threads
    float* gathered;  // (threads, block, row)

    Convolution(Arena& arena, const dgt_convolution_problem& x, const ConvolutionWeights& weights)
        : x(x),
          weights(weights),
          threads(thread_count(x)),
          height((x.height - 1) / x.stride + 1),
          width((x.width - 1) / x.stride + 1),
          inputs(TAPS * x.channels),
          row((divide_up(inputs, 16) | 1) * 16),
          blocks(x.images * height * width, inputs),
          chunks(min(weights.panels.groups(), divide_up(4 * threads, blocks.count()))),
          gathered(arena.take<float>(threads * blocks.size * row)) {}

    // Gather the neighbors of one output position, zeros outside the map.
    void gather_row(int64_t token, float* to) const {
        int64_t left = token % width * x.stride - 1;
        int64_t top = token / width % height * x.stride - 1;
        const float* image = x.input + token / (width * height) * x.height * x.width * x.channels;
        for (int64_t i = 0; i < TAPS; ++i) {
            int64_t across = left + i % 3;
            int64_t down = top + i / 3;
            bool is_inside = across >= 0 && across < x.width && down >= 0 && down < x.height;
            copy_row(is_inside ? image + (down * x.width + across) * x.channels : nullptr, to + i * x.channels);
        }
    }

    void copy_row(const float* from, float* to) const {
        int64_t i = 0;
        for (; i + W <= x.channels; i += W) store(to + i, from ? load(from + i) : Floats{});
        for (; i < x.channels; ++i) to[i] = from ? from[i] : 0.0f;
    }

    void finish(const Tile& tile, int64_t first) const {
        for (int64_t r = 0; r < tile.rows; ++r) {
            int64_t token = first + tile.first_token + r;
            bool is_real = !x.mask || x.mask[token];
            for (int64_t i = 0; i < tile.vectors; ++i) {
                int64_t channel = (tile.first_vector + i) * W;
                Floats y = tile.vector(r, i);
                y = weights.norm.apply(x.with_gelu ? gelu(y) : y, channel);
                store_channels(x.output + token * x.outputs, channel, x.outputs, is_real ? y : Floats{});
            }
        }
    }

    void run(Member& member) const {
        float* rows = gathered + member.seat() * blocks.size * row;
        member.share(blocks.count() * chunks, [&](int64_t piece) {
            int64_t block = piece / chunks;
            int64_t chunk = piece % chunks;
            for (int64_t i = 0; i < blocks.length(block); ++i) gather_row(blocks.first(block) + i, rows + i * row);
            int64_t groups = weights.panels.groups();
            int64_t end = groups * (chunk + 1) / chunks;
            for (int64_t group = groups * chunk / chunks; group < end; ++group) {
                multiply(rows, row, 0, blocks.length(block), weights.panels, group, weights.bias,
                         [&](const Tile& tile) { finish(tile, blocks.first(block)); });
            }
        });
    }
};

inline int run_convolution(const dgt_convolution_problem& x) {
    Arena prepared = arena_of<ConvolutionWeights>(x);
    ConvolutionWeights weights(prepared, x);
    Arena measure;
    Convolution measured(measure, x, weights);
    Block block(measure.used());
    if (block.failed()) return DGT_NO_MEMORY;
    Arena arena(block.aligned(), measure.used());
    Convolution convolution(arena, x, weights);
    in_parallel(x, convolution.threads, [&](Member& member) { convolution.run(member); });
    return DGT_GOOD;
}

}  // namespace dgt
