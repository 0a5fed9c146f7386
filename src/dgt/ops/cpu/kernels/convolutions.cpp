// The layers around attention in a block: linear layers, depthwise convolutions, and the feed-forward network.

#include "convolution.h"
#include "convolution_interface.h"
#include "depthwise.h"
#include "feed_forward.h"
#include "linear.h"
#include "parallel.h"
#include "training_backward.h"
#include "training_forward.h"

namespace dgt {
namespace {

// The weights of a linear layer in the kernel's layout.
struct LinearWeights {
    Panels panels;
    float* bias;

    LinearWeights(Arena& arena, const dgt_linear_problem& x)
        : panels(arena, x.inputs, x.outputs), bias(take_channels(arena, x.outputs)) {}

    void fill(const dgt_linear_problem& x, Member& member) const {
        member.share(panels.count() + 1, [&](int64_t i) {
            if (i == 0) copy_channels(x.bias, x.outputs, bias);
            else panels.pack(x.weight, i - 1);
        });
    }
};

int run_linear(const dgt_linear_problem& x) {
    size_t bytes = bytes_of<LinearWeights>(x);
    Block block(x.prepared ? 0 : bytes);
    if (block.failed()) return DGT_NO_MEMORY;
    Arena arena(x.prepared ? (char*)x.prepared : block.aligned(), bytes);
    LinearWeights weights(arena, x);
    TokenBlocks blocks(x.tokens, x.inputs);
    auto finish = [&](const Tile& tile) {
        for (int64_t r = 0; r < tile.rows; ++r) {
            float* to = x.output + (tile.first_token + r) * x.outputs;
            for (int64_t i = 0; i < tile.vectors; ++i)
                store_channels(to, (tile.first_vector + i) * W, x.outputs, tile.vector(r, i));
        }
    };
    in_parallel(x, thread_count(x), [&](Member& member) {
        if (!x.prepared) weights.fill(x, member);
        member.share(blocks.count() * weights.panels.groups(), [&](int64_t piece) {
            int64_t block = piece % blocks.count();
            multiply(x.input, x.inputs, blocks.first(block), blocks.length(block), weights.panels,
                     piece / blocks.count(), weights.bias, finish);
        });
    });
    return DGT_GOOD;
}

// ---- weights packed for many calls ----------------------------------------------------------------------------------

template <class Weights, class Problem>
int prepare(const Problem& x) {
    Arena arena((char*)x.prepared, bytes_of<Weights>(x));
    Weights weights(arena, x);
    in_parallel(x, thread_count(x), [&](Member& member) { weights.fill(x, member); });
    return DGT_GOOD;
}

// ---- depthwise convolutions --------------------------------------------------------------------------------------

// A line of a map and its neighbors, starting at a channel.
Lines lines_of(const dgt_depthwise_problem& x, const float* map, int64_t line, int64_t channel) {
    int64_t row = line % x.height;
    int64_t line_floats = x.width * x.channels;
    const float* here = map + line * line_floats + channel;
    return {row > 0 ? here - line_floats : nullptr, here, row + 1 < x.height ? here + line_floats : nullptr, x.width,
            x.channels};
}

// Convolve W channels of a line into another map.
template <class Load>
DGT_INLINE void convolve_channels(const dgt_depthwise_problem& x, const float* from, float* to, const Taps& taps,
                                  Floats bias, int64_t line, int64_t channel, const Load& load_vector) {
    float* to_line = to + line * x.width * x.channels;
    auto finish = [&](int64_t place, Floats input, Floats sum) {
        if (x.with_input) sum += input;
        store_channels(to_line + place * x.channels, channel, x.channels, sum);
    };
    convolve_vector(lines_of(x, from, line, channel), taps, channel, bias, load_vector, finish);
}

struct DepthwiseWeights {
    Taps taps;
    float* bias;

    DepthwiseWeights(Arena& arena, const dgt_depthwise_problem& x)
        : taps(arena, x.channels), bias(take_channels(arena, x.channels)) {}

    void convolve_line(const dgt_depthwise_problem& x, const float* from, float* to, int64_t line) const {
        int64_t channel = 0;
        for (; channel + W <= x.channels; channel += W) {
            convolve_channels(x, from, to, taps, load(bias + channel), line, channel,
                              [](const float* at) { return load(at); });
        }
        if (channel == x.channels) return;
        Bits lanes = first_lanes(x.channels - channel);
        convolve_channels(x, from, to, taps, load(bias + channel), line, channel,
                          [&](const float* at) { return load_lanes(at, lanes); });
    }
};

int run_depthwise(const dgt_depthwise_problem& x) {
    size_t bytes = bytes_of<DepthwiseWeights>(x);
    Block block(bytes);
    if (block.failed()) return DGT_NO_MEMORY;
    Arena arena(block.aligned(), bytes);
    DepthwiseWeights own(arena, x);
    own.taps.copy(x.weight, x.channels);
    copy_channels(x.bias, x.channels, own.bias);
    in_parallel(x, thread_count(x), [&](Member& member) {
        member.share(x.images * x.height, [&](int64_t line) { own.convolve_line(x, x.input, x.output, line); });
    });
    return DGT_GOOD;
}

// Gradients of the taps of W channels, accumulated line by line.
void sum_taps(const dgt_depthwise_problem& x, int64_t channel) {
    TapSums sums;
    Bits lanes = first_lanes(x.channels - channel);
    for (int64_t line = 0; line < x.images * x.height; ++line) {
        Lines inputs = lines_of(x, x.input, line, channel);
        const float* grads = x.grad_output + line * x.width * x.channels + channel;
        if (channel + W <= x.channels) sums.add(grads, x.channels, inputs, [](const float* at) { return load(at); });
        else sums.add(grads, x.channels, inputs, [&](const float* at) { return load_lanes(at, lanes); });
    }
    sums.write(x.grad_weight, x.grad_bias, channel, x.channels);
}

int run_depthwise_backward(const dgt_depthwise_problem& x) {
    size_t bytes = bytes_of<DepthwiseWeights>(x);
    Block block(bytes);
    if (block.failed()) return DGT_NO_MEMORY;
    Arena arena(block.aligned(), bytes);
    DepthwiseWeights own(arena, x);
    own.taps.copy(x.weight, x.channels);
    own.taps.reverse();
    copy_channels(nullptr, x.channels, own.bias);
    int64_t lines = x.grad_input ? x.images * x.height : 0;
    int64_t vectors = x.grad_weight ? divide_up(x.channels, W) : 0;
    in_parallel(x, thread_count(x), [&](Member& member) {
        member.share(lines + vectors, [&](int64_t i) {
            if (i < vectors) sum_taps(x, i * W);
            else own.convolve_line(x, x.grad_output, x.grad_input, i - vectors);
        });
    });
    return DGT_GOOD;
}

}  // namespace
}  // namespace dgt

int dgt_linear(const dgt_linear_problem* problem) { return dgt::run_linear(*problem); }

int dgt_convolution(const dgt_convolution_problem* problem) { return dgt::run_convolution(*problem); }

int dgt_depthwise_convolution(const dgt_depthwise_problem* problem) { return dgt::run_depthwise(*problem); }

int dgt_depthwise_backward(const dgt_depthwise_problem* problem) { return dgt::run_depthwise_backward(*problem); }

int dgt_feed_forward(const dgt_feed_forward_problem* problem) { return dgt::run_feed_forward(*problem); }

int dgt_feed_forward_training(const dgt_training_problem* problem) { return dgt::run_training_forward(*problem); }

int dgt_feed_forward_backward(const dgt_training_problem* problem) { return dgt::run_training_backward(*problem); }

int64_t dgt_linear_bytes(const dgt_linear_problem* problem) {
    return (int64_t)dgt::bytes_of<dgt::LinearWeights>(*problem);
}

int64_t dgt_feed_forward_bytes(const dgt_feed_forward_problem* problem) {
    return (int64_t)dgt::bytes_of<dgt::FeedForwardWeights>(*problem);
}

int dgt_prepare_linear(const dgt_linear_problem* problem) { return dgt::prepare<dgt::LinearWeights>(*problem); }

int dgt_prepare_feed_forward(const dgt_feed_forward_problem* problem) {
    return dgt::prepare<dgt::FeedForwardWeights>(*problem);
}
