// The inverted residual feed-forward network in training, forward (Eq. 10).
//
// BatchNorm needs the statistics of the whole batch before anything can be normalized, so the hidden maps are written
// to memory twice, before each GELU; the backward pass needs them there anyway. GELU and BatchNorm are recomputed
// wherever these maps are read; their results are never stored.
#pragma once

#include "parallel.h"
#include "slices.h"

namespace dgt {

struct TrainingForward {
    const dgt_training_problem& x;
    int64_t tokens;
    int64_t slices;  // of hidden channels
    Slices expanded;
    Slices convolved;
    Panels expand;
    Panels project;
    Taps taps;
    float* expand_bias;
    float* project_bias;
    TokenBlocks blocks;         // to expand
    TokenBlocks hidden_blocks;  // to project
    int64_t row;                // stride between the tokens of such a block
    float* rows;                // (threads, block, row)
    float* lines;               // (threads, a ring of lines and one more)

    TrainingForward(Arena& arena, const dgt_training_problem& x)
        : x(x),
          tokens(x.images * x.height * x.width),
          slices(slices_of(x.hidden)),
          expanded{x.expanded, tokens},
          convolved{x.convolved, tokens},
          expand(arena, x.channels, x.hidden),
          project(arena, x.hidden, x.channels),
          taps(arena, x.hidden),
          expand_bias(take_channels(arena, x.hidden)),
          project_bias(take_channels(arena, x.channels)),
          blocks(tokens, x.channels),
          hidden_blocks(tokens, 2 * x.hidden),
          row(odd_stride(slices * W)),
          rows(arena.take<float>(thread_count(x) * hidden_blocks.size * row)),
          lines(arena.take<float>(thread_count(x) * line_floats())) {}

    int64_t line_floats() const { return LineRing::floats(x.width) + x.width * W; }

    void fill_weights(Member& member) const {
        member.share(expand.count() + project.count() + 1, [&](int64_t i) {
            if (i == 0) fill_small_weights();
            else if (i <= expand.count()) expand.pack(x.expand_weight, i - 1);
            else project.pack(x.project_weight, i - 1 - expand.count());
        });
    }

    void fill_small_weights() const {
        taps.copy(x.depthwise_weight, x.hidden);
        copy_channels(x.expand_bias, x.hidden, expand_bias);
        copy_channels(x.project_bias, x.channels, project_bias);
    }

    void expand_block(int64_t piece) const {
        int64_t block = piece % blocks.count();
        auto finish = [&](const Tile& tile) {
            for (int64_t r = 0; r < tile.rows; ++r)
                for (int64_t i = 0; i < tile.vectors; ++i)
                    store(expanded.vector(tile.first_vector + i, tile.first_token + r), tile.vector(r, i));
        };
        multiply(x.input, x.channels, blocks.first(block), blocks.length(block), expand, piece / blocks.count(),
                 expand_bias, finish);
    }

    // Statistics of W channels after the first GELU.
    Moments activated_moments(int64_t slice, float* activated) const {
        Moments moments;
        for (int64_t line = 0; line < x.images * x.height; ++line) {
            const float* from = expanded.vector(slice, line * x.width);
            for (int64_t i = 0; i < x.width; ++i) store(activated + i * W, gelu(load(from + i * W)));
            moments.add(activated, x.width);
        }
        return moments;
    }

    // norm1(gelu(.)) of a line, zero where there is only padding.
    void normalize_line(int64_t slice, const SliceNorm& norm, int64_t line, float* to) const {
        const float* from = expanded.vector(slice, line * x.width);
        const uint8_t* mask = x.mask ? x.mask + line * x.width : nullptr;
        for (int64_t i = 0; i < x.width; ++i) {
            Floats y = norm.apply(gelu(load(from + i * W)));
            store(to + i * W, mask && !mask[i] ? Floats{} : y);
        }
    }

    // y + depthwise(y) of W channels, and the statistics on both sides of it.
    void convolve_slice(int64_t slice, float* memory) const {
        int64_t channel = slice * W;
        LineRing ring(memory, x.width);
        float* activated = memory + LineRing::floats(x.width);
        SliceNorm norm(x.norm1, channel, x.hidden, activated_moments(slice, activated));
        Floats bias = x.depthwise_bias ? load_channels(x.depthwise_bias, channel, x.hidden) : Floats{};
        auto load_vector = [](const float* from) { return load(from); };
        Moments moments;
        for (int64_t line = 0; line < x.images * x.height; ++line) {
            int64_t height_row = line % x.height;
            if (height_row == 0) normalize_line(slice, norm, line, ring.line(0));
            if (height_row + 1 < x.height) normalize_line(slice, norm, line + 1, ring.line(height_row + 1));
            float* to = convolved.vector(slice, line * x.width);
            auto finish = [&](int64_t place, Floats input, Floats sum) {
                Floats y = input + sum;
                store(to + place * W, y);
                store(activated + place * W, gelu(y));
            };
            convolve_vector(ring.around(height_row, x.height), taps, channel, bias, load_vector, finish);
            moments.add(activated, x.width);
        }
        SliceNorm(x.norm2, channel, x.hidden, moments);
    }

    // project(norm2(gelu(.))) of a block of tokens.
    void project_block(int64_t block, float* memory) const {
        int64_t first = hidden_blocks.first(block);
        int64_t count = hidden_blocks.length(block);
        for (int64_t slice = 0; slice < slices; ++slice) {
            SliceNorm norm(x.norm2, slice * W, x.hidden);
            const float* from = convolved.vector(slice, first);
            for (int64_t i = 0; i < count; ++i)
                store(memory + i * row + slice * W, norm.apply(gelu(load(from + i * W))));
        }
        auto finish = [&](const Tile& tile) {
            for (int64_t r = 0; r < tile.rows; ++r) {
                float* to = x.projected + (first + tile.first_token + r) * x.channels;
                for (int64_t i = 0; i < tile.vectors; ++i)
                    store_channels(to, (tile.first_vector + i) * W, x.channels, tile.vector(r, i));
            }
        };
        for (int64_t group = 0; group < project.groups(); ++group)
            multiply(memory, row, 0, count, project, group, project_bias, finish);
    }

    // norm3 of W channels.
    void normalize_output(int64_t slice, float* memory) const {
        int64_t channel = slice * W;
        Moments moments;
        for (int64_t first = 0; first < tokens; first += x.width) {
            for (int64_t i = 0; i < x.width; ++i)
                store(memory + i * W, load_channels(x.projected + (first + i) * x.channels, channel, x.channels));
            moments.add(memory, x.width);
        }
        SliceNorm norm(x.norm3, channel, x.channels, moments);
        for (int64_t token = 0; token < tokens; ++token) {
            Floats y = norm.apply(load_channels(x.projected + token * x.channels, channel, x.channels));
            store_channels(x.output + token * x.channels, channel, x.channels, y);
        }
    }

    void run(Member& member) const {
        float* own_rows = rows + member.seat() * hidden_blocks.size * row;
        float* own_lines = lines + member.seat() * line_floats();
        fill_weights(member);
        member.share(blocks.count() * expand.groups(), [&](int64_t i) { expand_block(i); });
        member.share(slices, [&](int64_t i) { convolve_slice(i, own_lines); });
        member.share(hidden_blocks.count(), [&](int64_t i) { project_block(i, own_rows); });
        member.share(slices_of(x.channels), [&](int64_t i) { normalize_output(i, own_lines); });
    }
};

inline int run_training_forward(const dgt_training_problem& x) {
    size_t bytes = bytes_of<TrainingForward>(x);
    Block block(bytes);
    if (block.failed()) return DGT_NO_MEMORY;
    Arena arena(block.aligned(), bytes);
    TrainingForward network(arena, x);
    size_t hidden_bytes = (size_t)(network.slices * network.tokens * W) * sizeof(float);
    expect_huge_pages(x.expanded, hidden_bytes);
    expect_huge_pages(x.convolved, hidden_bytes);
    in_parallel(x, thread_count(x), [&](Member& member) { network.run(member); });
    return DGT_GOOD;
}

}  // namespace dgt
