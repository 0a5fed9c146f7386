// The inverted residual feed-forward network in evaluation, in one pass over the image (Eq. 10).
//
// Process a band of lines at a time: expand its tokens, convolve the hidden map, project. The hidden map is R times as
// wide as the input, so it is kept for one band only, which stays in the cache, and never written to memory.
#pragma once

#include "../../../ops/cpu/kernels/depthwise.h"
#include "../../../ops/cpu/kernels/gelu.h"
#include "../../../ops/cpu/kernels/parallel.h"
#include "batch_norm.h"
#include "layers.h"

namespace dgt {

constexpr int64_t BAND_BYTES = (int64_t)1700 << 10;  // of the hidden map

// Consecutive lines of a batch, from one image or from whole images.
struct Band {
    int64_t first;
    int64_t end;
    int64_t first_hidden;  // including the neighbors of its first and last line
    int64_t end_hidden;
};

// How the lines of a batch are divided into bands.
struct Bands {
    int64_t height;
    int64_t lines;
    int64_t most;       // lines per band
    int64_t per_image;  // bands; 0 if a band holds whole images

    explicit Bands(const dgt_feed_forward_problem& x) : height(x.height), lines(x.images * x.height) {
        int64_t fitting = max<int64_t>(1, BAND_BYTES / (x.width * x.hidden * (int64_t)sizeof(float)));
        per_image = fitting >= height ? 0 : divide_up(height, fitting);
        most = per_image ? divide_up(height, per_image) : min(fitting / height * height, lines);
    }
    int64_t count() const { return per_image ? lines / height * per_image : divide_up(lines, most); }
    int64_t most_hidden() const { return per_image ? min(most + 2, height) : most; }
    Band band(int64_t i) const {
        if (!per_image) {
            int64_t end = min(lines, (i + 1) * most);
            return {i * most, end, i * most, end};
        }
        int64_t image = i / per_image * height;
        int64_t first = image + height * (i % per_image) / per_image;
        int64_t end = image + height * (i % per_image + 1) / per_image;
        return {first, end, max(image, first - 1), min(image + height, end + 1)};
    }
};

// The weights in the kernel's layout.
struct FeedForwardWeights {
    Panels expand;
    Panels project;
    Taps taps;
    Affine norm1;
    Affine norm2;
    Affine norm3;
    float* expand_bias;
    float* depthwise_bias;
    float* project_bias;

    FeedForwardWeights(Arena& arena, const dgt_feed_forward_problem& x)
        : expand(arena, x.channels, x.hidden),
          project(arena, x.hidden, x.channels),
          taps(arena, x.hidden),
          norm1(arena, x.hidden),
          norm2(arena, x.hidden),
          norm3(arena, x.channels),
          expand_bias(take_channels(arena, x.hidden)),
          depthwise_bias(take_channels(arena, x.hidden)),
          project_bias(take_channels(arena, x.channels)) {}

    void fill(const dgt_feed_forward_problem& x, Member& member) const {
        int64_t panels = expand.count() + project.count();
        member.share(panels + 1, [&](int64_t i) {
            if (i == 0) copy_small(x);
            else if (i <= expand.count()) expand.pack(x.expand_weight, i - 1);
            else project.pack(x.project_weight, i - 1 - expand.count());
        });
    }

private:
    void copy_small(const dgt_feed_forward_problem& x) const {
        taps.copy(x.depthwise_weight, x.hidden);
        norm1.set(x.norm1);
        norm2.set(x.norm2);
        norm3.set(x.norm3);
        copy_channels(x.expand_bias, x.hidden, expand_bias);
        copy_channels(x.depthwise_bias, x.hidden, depthwise_bias);
        copy_channels(x.project_bias, x.channels, project_bias);
    }
};

// Working memory of a call, and how the work is divided.
struct FeedForward {
    const dgt_feed_forward_problem& x;
    const FeedForwardWeights* weights = nullptr;
    Bands bands;
    int64_t stride;    // between hidden positions: an odd number of cache lines, to spread over the cache sets
    float* expanded;   // the hidden map of a band and its neighbors
    float* convolved;  // of a band

    FeedForward(Arena& arena, const dgt_feed_forward_problem& x)
        : x(x),
          bands(x),
          stride((divide_up(x.hidden, 16) | 1) * 16),
          expanded(arena.take<float>(bands.most_hidden() * x.width * stride)),
          convolved(arena.take<float>(bands.most * x.width * stride)) {}

    // norm1(gelu(expand(x))) of a block of tokens, zero where there is only padding.
    void expand_block(const Band& band, const TokenBlocks& blocks, int64_t piece) const {
        int64_t block = piece % blocks.count();
        int64_t first = band.first_hidden * x.width;
        const uint8_t* mask = x.mask ? x.mask + first : nullptr;
        const float* from = x.input + first * x.channels;
        auto finish = [&](const Tile& tile) {
            for (int64_t r = 0; r < tile.rows; ++r) {
                int64_t token = tile.first_token + r;
                float* to = expanded + token * stride;
                for (int64_t i = 0; i < tile.vectors; ++i) {
                    int64_t channel = (tile.first_vector + i) * W;
                    Floats y = weights->norm1.apply(gelu(tile.vector(r, i)), channel);
                    store(to + channel, mask && !mask[token] ? Floats{} : y);
                }
            }
        };
        multiply(from, x.channels, blocks.first(block), blocks.length(block), weights->expand, piece / blocks.count(),
                 weights->expand_bias, finish);
    }

    // norm2(gelu(y + depthwise(y))) of a line.
    void convolve_line(const Band& band, int64_t line) const {
        int64_t row = line % x.height;
        int64_t line_floats = x.width * stride;
        const float* here = expanded + (line - band.first_hidden) * line_floats;
        const float* above = row > 0 ? here - line_floats : nullptr;
        const float* below = row + 1 < x.height ? here + line_floats : nullptr;
        float* to = convolved + (line - band.first) * line_floats;
        for (int64_t channel = 0; channel < x.hidden; channel += W) {
            Lines<float> lines = {above ? above + channel : nullptr, here + channel, below ? below + channel : nullptr,
                                  x.width, stride};
            auto finish = [&](int64_t place, Floats input, Floats sum) {
                store(to + place * stride + channel, weights->norm2.apply(gelu(input + sum), channel));
            };
            convolve_vector(lines, weights->taps, channel, load(weights->depthwise_bias + channel), WholeVector{},
                            finish);
        }
    }

    // norm3(project(y)) of a block of tokens.
    void project_block(const Band& band, const TokenBlocks& blocks, int64_t piece) const {
        int64_t block = piece % blocks.count();
        int64_t first = band.first * x.width;
        auto finish = [&](const Tile& tile) {
            for (int64_t r = 0; r < tile.rows; ++r) {
                int64_t offset = (first + tile.first_token + r) * x.channels;
                for (int64_t i = 0; i < tile.vectors; ++i) {
                    int64_t channel = (tile.first_vector + i) * W;
                    Floats y = weights->norm3.apply(tile.vector(r, i), channel);
                    store_channels(x.output + offset, channel, x.channels, y);
                }
            }
        };
        multiply(convolved, stride, blocks.first(block), blocks.length(block), weights->project, piece / blocks.count(),
                 weights->project_bias, finish);
    }

    // Process one band with all threads together.
    void run(Member& member, const Band& band) const {
        TokenBlocks hidden((band.end_hidden - band.first_hidden) * x.width, x.channels);
        member.share(hidden.count() * weights->expand.groups(), [&](int64_t i) { expand_block(band, hidden, i); });
        member.share(band.end - band.first, [&](int64_t i) { convolve_line(band, band.first + i); });
        TokenBlocks own((band.end - band.first) * x.width, x.hidden);
        member.share(own.count() * weights->project.groups(), [&](int64_t i) { project_block(band, own, i); });
    }
};

inline int run_feed_forward(const dgt_feed_forward_problem& x) {
    Arena prepared = arena_of<FeedForwardWeights>(x);
    FeedForwardWeights weights(prepared, x);
    size_t bytes = bytes_of<FeedForward>(x);
    Block block(bytes);
    if (block.failed()) return DGT_NO_MEMORY;
    Arena arena(block.aligned(), bytes);
    FeedForward network(arena, x);
    network.weights = &weights;
    for (int64_t i = 0; i < network.bands.count(); ++i) {
        in_parallel(x, thread_count(x), [&](Member& member) { network.run(member, network.bands.band(i)); });
    }
    return DGT_GOOD;
}

}  // namespace dgt
