// The inverted residual feed-forward network in training, backward.
//
// The forward pass keeps the input of each BatchNorm before its GELU; everything in between is recomputed where it is
// needed. The sums over the batch in the second BatchNorm's gradient follow from products of the projection's weights
// and their gradients, which are computed first:
//     sum over tokens of dz[c]        = sum over outputs o of W[o, c] (sum over tokens of dp[o])
//     sum over tokens of dz[c] h[c]   = sum over outputs o of W[o, c] (sum over tokens of dp[o] h[c])
// with the projection p = W z + b, its input z = weight h + bias, and h standardized. So dz passes through the
// BatchNorm and the GELU before it is written to memory.
#pragma once

#include "parallel.h"
#include "slices.h"

namespace dgt {

constexpr int64_t PANEL_TOKENS = 384;  // tokens per partial sum: the panels fit in the L2 cache

struct TrainingBackward {
    const dgt_training_problem& x;
    int64_t tokens;
    int64_t slices;  // of hidden channels
    Slices expanded;
    Slices convolved;
    Slices grads;    // of the convolution's output, then of the expansion's output
    Panels project;  // both transposed
    Panels expand;
    Taps taps;                  // in reverse order
    TokenBlocks blocks;         // tokens whose gradient passes through the projection
    TokenBlocks hidden_blocks;  // tokens whose gradient passes through the expansion
    int64_t row;                // stride between the tokens of such a block
    int64_t turned;             // stride between the rows of transposed tokens
    float* no_bias;
    float* grad_projected;    // (tokens, C)
    float* turned_projected;  // (C, turned): the same
    float* turned_input;      // (C, turned)
    float* weight_sums;       // (C, slices W): gradients of weights
    float* rows;              // (threads, block, row)
    float* panel;             // (threads, vectors, tokens, W)
    float* lines;             // (threads, three rings and a line)

    TrainingBackward(Arena& arena, const dgt_training_problem& x)
        : x(x),
          tokens(x.images * x.height * x.width),
          slices(slices_of(x.hidden)),
          expanded{x.expanded, tokens},
          convolved{x.convolved, tokens},
          grads{arena.take<float>(slices * tokens * W), tokens},
          project(arena, x.channels, x.hidden),
          expand(arena, x.hidden, x.channels),
          taps(arena, x.hidden),
          blocks(tokens, x.channels),
          hidden_blocks(tokens, 2 * x.hidden),
          row(odd_stride(slices * W)),
          turned(odd_stride(tokens)),
          no_bias(take_channels(arena, max(x.hidden, x.channels))),
          grad_projected(arena.take<float>(tokens * x.channels)),
          turned_projected(arena.take<float>(x.channels * turned)),
          turned_input(arena.take<float>(x.channels * turned)),
          weight_sums(arena.take<float>(x.channels * slices * W)),
          rows(arena.take<float>(thread_count(x) * hidden_blocks.size * row)),
          panel(arena.take<float>(thread_count(x) * panel_floats())),
          lines(arena.take<float>(thread_count(x) * line_floats())) {}

    static int64_t panel_floats() { return LINEAR_VECTORS * PANEL_TOKENS * W; }
    int64_t line_floats() const { return 3 * LineRing::floats(x.width); }
    int64_t slice_groups() const { return divide_up(slices, LINEAR_VECTORS); }

    void fill_weights(Member& member) const {
        member.share(expand.count() + project.count() + 1, [&](int64_t i) {
            if (i == 0) fill_small_weights();
            else if (i <= expand.count()) expand.pack_turned(x.expand_weight, i - 1);
            else project.pack_turned(x.project_weight, i - 1 - expand.count());
        });
    }

    void fill_small_weights() const {
        copy_channels(nullptr, max(x.hidden, x.channels), no_bias);
        taps.copy(x.depthwise_weight, x.hidden);
        taps.reverse();
    }

    // ---- the last BatchNorm --------------------------------------------------------------------------------------

    SliceNormSums output_sums(const SliceNorm& norm, int64_t channel) const {
        SliceNormSums sums;
        for (int64_t first = 0; first < tokens; first += x.width) {
            SliceNormSums run;
            for (int64_t token = first; token < first + x.width; ++token) {
                Floats grad = load_channels(x.grad_output + token * x.channels, channel, x.channels);
                Floats input = load_channels(x.projected + token * x.channels, channel, x.channels);
                run.grads += grad;
                run.products += grad * norm.standard(input);
            }
            sums.add(run);
        }
        return sums;
    }

    // From the gradient of the output to that of W projected channels.
    void pass_output(int64_t slice) const {
        int64_t channel = slice * W;
        SliceNorm norm(x.norm3, channel, x.channels);
        SliceNormSums sums = output_sums(norm, channel);
        sums.write(x.norm3, channel, x.channels);
        SliceNormGradient gradient(norm, sums, tokens);
        Floats bias_grad{};
        for (int64_t first = 0; first < tokens; first += x.width) {
            Floats run{};
            for (int64_t token = first; token < first + x.width; ++token) {
                int64_t at = token * x.channels;
                Floats grad = gradient.apply(load_channels(x.grad_output + at, channel, x.channels),
                                             load_channels(x.projected + at, channel, x.channels));
                run += grad;
                store_channels(grad_projected + at, channel, x.channels, grad);
            }
            bias_grad += run;
        }
        store_channels(x.grad_project_bias, channel, x.channels, bias_grad);
        turn_slice(grad_projected, tokens, x.channels, slice, turned_projected, turned);
        if (x.grad_expand_weight) turn_slice(x.input, tokens, x.channels, slice, turned_input, turned);
    }

    // ---- gradients of weights ------------------------------------------------------------------------------------

    // Compute weight_sums of a group of slices: sums over tokens of (C, tokens) rows times what `fill(slice, first,
    // count, to)` writes.
    template <class Fill>
    void sum_over_tokens(const float* from, int64_t group, float* memory, const Fill& fill) const {
        int64_t first_slice = slices * group / slice_groups();
        int64_t vectors = slices * (group + 1) / slice_groups() - first_slice;
        for (int64_t first = 0; first < tokens; first += PANEL_TOKENS) {
            int64_t count = min(PANEL_TOKENS, tokens - first);
            for (int64_t i = 0; i < vectors; ++i) fill(first_slice + i, first, count, memory + i * count * W);
            auto finish = [&](const Tile& tile) {
                for (int64_t r = 0; r < tile.rows; ++r) {
                    float* to = weight_sums + (tile.first_token + r) * slices * W + first_slice * W;
                    for (int64_t i = 0; i < tile.vectors; ++i) {
                        Floats before = first ? load(to + i * W) : Floats{};
                        store(to + i * W, before + tile.vector(r, i));
                    }
                }
            };
            multiply(from + first, turned, 0, x.channels, Panels(memory, count, vectors * W), 0, no_bias, finish);
        }
    }

    // Sums of the projection's gradient times the standardized input of its BatchNorm.
    void sum_project_weights(int64_t group, float* memory) const {
        sum_over_tokens(turned_projected, group, memory, [&](int64_t slice, int64_t first, int64_t count, float* to) {
            SliceNorm norm(x.norm2, slice * W, x.hidden);
            const float* from = convolved.vector(slice, first);
            for (int64_t i = 0; i < count; ++i) store(to + i * W, norm.standard(gelu(load(from + i * W))));
        });
    }

    void sum_expand_weights(int64_t group, float* memory) const {
        sum_over_tokens(turned_input, group, memory, [&](int64_t slice, int64_t first, int64_t count, float* to) {
            memcpy(to, grads.vector(slice, first), (size_t)(count * W) * sizeof(float));
        });
        for (int64_t slice = slices * group / slice_groups(); slice < slices * (group + 1) / slice_groups(); ++slice)
            write_expand_weights(slice);
    }

    // Write (C, W) sums as W rows of (R C, C).
    void write_expand_weights(int64_t slice) const {
        float square[W * W];
        for (int64_t first = 0; first < x.channels; first += W) {
            const float* from[W];
            for (int64_t i = 0; i < W; ++i) from[i] = weight_sums + min(first + i, x.channels - 1) * slices * W;
            transpose(from, slice * W, W, square);
            for (int64_t i = 0; i < min<int64_t>(W, x.hidden - slice * W); ++i) {
                float* to = x.grad_expand_weight + (slice * W + i) * x.channels;
                store_channels(to, first, x.channels, load(square + i * W));
            }
        }
    }

    // Finish the second BatchNorm's sums and the gradient of the projection's weights.
    void finish_project_weights(int64_t slice) const {
        int64_t channel = slice * W;
        SliceNorm norm(x.norm2, channel, x.hidden);
        SliceNormSums sums;
        for (int64_t output = 0; output < x.channels; ++output) {
            int64_t at = output * x.hidden;
            Floats weight = load_channels(x.project_weight + at, channel, x.hidden);
            Floats product = load(weight_sums + output * slices * W + channel);
            Floats grad = all(x.grad_project_bias[output]);
            sums.grads += weight * grad;
            sums.products += weight * product;
            store_channels(x.grad_project_weight + at, channel, x.hidden, norm.weight * product + norm.bias * grad);
        }
        sums.write(x.norm2, channel, x.hidden);
    }

    // ---- the hidden maps -----------------------------------------------------------------------------------------

    // The gradient of the convolution's output, for a block of tokens and a group of panels.
    void pass_projection(int64_t piece) const {
        int64_t block = piece % blocks.count();
        auto finish = [&](const Tile& tile) {
            for (int64_t i = 0; i < tile.vectors; ++i) {
                int64_t slice = tile.first_vector + i;
                SliceNormSums sums;
                sums.grads = load_channels(x.norm2.grad_bias, slice * W, x.hidden);
                sums.products = load_channels(x.norm2.grad_weight, slice * W, x.hidden);
                SliceNormGradient gradient(SliceNorm(x.norm2, slice * W, x.hidden), sums, tokens);
                for (int64_t r = 0; r < tile.rows; ++r) {
                    int64_t token = tile.first_token + r;
                    Gelu activated(load(convolved.vector(slice, token)));
                    Floats grad = gradient.apply(tile.vector(r, i), activated.value) * activated.slope;
                    store(grads.vector(slice, token), grad);
                }
            }
        };
        multiply(grad_projected, x.channels, blocks.first(block), blocks.length(block), project, piece / blocks.count(),
                 no_bias, finish);
    }

    // Gradients of W channels of the depthwise convolution and of the BatchNorm before it; `grads` become those of the
    // expansion's output.
    void pass_convolution(int64_t slice, float* memory) const {
        int64_t channel = slice * W;
        SliceNorm norm(x.norm1, channel, x.hidden);
        SliceNormSums sums;
        TapSums taps_grad;
        ConvolutionLines rings(memory, x.width);
        for (int64_t line = 0; line < x.images * x.height; ++line) {
            int64_t height_row = line % x.height;
            if (height_row == 0) read_line(slice, norm, line, 0, rings);
            if (height_row + 1 < x.height) read_line(slice, norm, line + 1, height_row + 1, rings);
            Lines grad_lines = rings.grads.around(height_row, x.height);
            taps_grad.add(grad_lines.here, rings.inputs.around(height_row, x.height));
            sums.add(pass_line(slice, line, grad_lines, rings.standard.line(height_row)));
        }
        taps_grad.write(x.grad_depthwise_weight, x.grad_depthwise_bias, channel, x.hidden);
        sums.write(x.norm1, channel, x.hidden);
        pass_activation(slice, SliceNormGradient(norm, sums, tokens));
    }

    // What a line needs from its neighbors: gradients, the input of the convolution, and that input standardized.
    struct ConvolutionLines {
        LineRing grads;
        LineRing inputs;
        LineRing standard;

        ConvolutionLines(float* memory, int64_t width)
            : grads(memory, width),
              inputs(memory + LineRing::floats(width), width),
              standard(memory + 2 * LineRing::floats(width), width) {}
    };

    void read_line(int64_t slice, const SliceNorm& norm, int64_t line, int64_t height_row,
                   const ConvolutionLines& to) const {
        const float* from = expanded.vector(slice, line * x.width);
        const uint8_t* mask = x.mask ? x.mask + line * x.width : nullptr;
        memcpy(to.grads.line(height_row), grads.vector(slice, line * x.width), (size_t)(x.width * W) * sizeof(float));
        for (int64_t i = 0; i < x.width; ++i) {
            Floats standard = norm.standard(gelu(load(from + i * W)));
            Floats y = standard * norm.weight + norm.bias;
            store(to.standard.line(height_row) + i * W, standard);
            store(to.inputs.line(height_row) + i * W, mask && !mask[i] ? Floats{} : y);
        }
    }

    // Write the gradient of a line of the convolution's input to `grads`; returns its part of the BatchNorm's sums.
    SliceNormSums pass_line(int64_t slice, int64_t line, const Lines& grad_lines, const float* standard) const {
        float* to = grads.vector(slice, line * x.width);
        const uint8_t* mask = x.mask ? x.mask + line * x.width : nullptr;
        SliceNormSums run;
        auto load_vector = [](const float* from) { return load(from); };
        auto finish = [&](int64_t place, Floats grad, Floats sum) {
            Floats y = mask && !mask[place] ? Floats{} : grad + sum;
            run.grads += y;
            run.products += y * load(standard + place * W);
            store(to + place * W, y);
        };
        convolve_vector(grad_lines, taps, slice * W, Floats{}, load_vector, finish);
        return run;
    }

    // Through the first BatchNorm and GELU, with the gradient of the expansion's bias.
    void pass_activation(int64_t slice, const SliceNormGradient& gradient) const {
        Floats bias_grad{};
        for (int64_t line = 0; line < x.images * x.height; ++line) {
            const float* from = expanded.vector(slice, line * x.width);
            float* to = grads.vector(slice, line * x.width);
            Floats run{};
            for (int64_t i = 0; i < x.width; ++i) {
                Gelu activated(load(from + i * W));
                Floats grad = gradient.apply(load(to + i * W), activated.value) * activated.slope;
                run += grad;
                store(to + i * W, grad);
            }
            bias_grad += run;
        }
        store_channels(x.grad_expand_bias, slice * W, x.hidden, bias_grad);
    }

    // The gradient of the input, for a block of tokens.
    void pass_expansion(int64_t block, float* memory) const {
        int64_t first = hidden_blocks.first(block);
        int64_t count = hidden_blocks.length(block);
        for (int64_t slice = 0; slice < slices; ++slice) {
            const float* from = grads.vector(slice, first);
            for (int64_t i = 0; i < count; ++i) store(memory + i * row + slice * W, load(from + i * W));
        }
        auto finish = [&](const Tile& tile) {
            for (int64_t r = 0; r < tile.rows; ++r) {
                float* to = x.grad_input + (first + tile.first_token + r) * x.channels;
                for (int64_t i = 0; i < tile.vectors; ++i)
                    store_channels(to, (tile.first_vector + i) * W, x.channels, tile.vector(r, i));
            }
        };
        for (int64_t group = 0; group < expand.groups(); ++group)
            multiply(memory, row, 0, count, expand, group, no_bias, finish);
    }

    void run(Member& member) const {
        float* own_rows = rows + member.seat() * hidden_blocks.size * row;
        float* own_panel = panel + member.seat() * panel_floats();
        float* own_lines = lines + member.seat() * line_floats();
        fill_weights(member);
        member.share(slices_of(x.channels), [&](int64_t i) { pass_output(i); });
        member.share(slice_groups(), [&](int64_t i) { sum_project_weights(i, own_panel); });
        member.share(slices, [&](int64_t i) { finish_project_weights(i); });
        member.share(blocks.count() * project.groups(), [&](int64_t i) { pass_projection(i); });
        member.share(slices, [&](int64_t i) { pass_convolution(i, own_lines); });
        if (x.grad_expand_weight) {
            member.share(slice_groups(), [&](int64_t i) { sum_expand_weights(i, own_panel); });
        }
        if (x.grad_input) {
            member.share(hidden_blocks.count(), [&](int64_t i) { pass_expansion(i, own_rows); });
        }
    }
};

inline int run_training_backward(const dgt_training_problem& x) {
    size_t bytes = bytes_of<TrainingBackward>(x);
    Block block(bytes);
    if (block.failed()) return DGT_NO_MEMORY;
    Arena arena(block.aligned(), bytes);
    TrainingBackward network(arena, x);
    in_parallel(x, thread_count(x), [&](Member& member) { network.run(member); });
    return DGT_GOOD;
}

}  // namespace dgt
