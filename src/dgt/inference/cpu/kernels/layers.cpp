// The layers around attention in a model that only predicts.

#include "layers.h"

#include "../../../ops/cpu/kernels/depthwise.h"
#include "../../../ops/cpu/kernels/parallel.h"
#include "convolution.h"
#include "feed_forward.h"
#include "linear.h"

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
    Arena prepared = arena_of<LinearWeights>(x);
    LinearWeights weights(prepared, x);
    TokenBlocks blocks(x.tokens, x.inputs);
    auto finish = [&](const Tile& tile) {
        for (int64_t r = 0; r < tile.rows; ++r) {
            float* to = x.output + (tile.first_token + r) * x.outputs;
            for (int64_t i = 0; i < tile.vectors; ++i)
                store_channels(to, (tile.first_vector + i) * W, x.outputs, tile.vector(r, i));
        }
    };
    in_parallel(x, thread_count(x), [&](Member& member) {
        member.share(blocks.count() * weights.panels.groups(), [&](int64_t piece) {
            int64_t block = piece % blocks.count();
            multiply(x.input, x.inputs, blocks.first(block), blocks.length(block), weights.panels,
                     piece / blocks.count(), weights.bias, finish);
        });
    });
    return DGT_GOOD;
}

// ---- depthwise convolutions --------------------------------------------------------------------------------------

struct DepthwiseWeights {
    Taps taps;
    float* bias;

    DepthwiseWeights(Arena& arena, const dgt_depthwise_problem& x)
        : taps(arena, x.channels), bias(take_channels(arena, x.channels)) {}

    void fill(const dgt_depthwise_problem& x, Member& member) const {
        member.share(1, [&](int64_t) {
            taps.copy(x.weight, x.channels);
            copy_channels(x.bias, x.channels, bias);
        });
    }

    // Convolve a line, and add it.
    void convolve_line(const dgt_depthwise_problem& x, int64_t line) const {
        float* to = x.output + line * x.width * x.channels;
        for_each_vector(x.channels, [&](int64_t channel, auto how) {
            Lines<float> lines = Lines<float>::of(x.input, line, x.height, x.width, x.channels, channel);
            convolve_vector(lines, taps, channel, load(bias + channel), how,
                            [&](int64_t place, Floats input, Floats sum) {
                                how.store(to + place * x.channels + channel, input + sum);
                            });
        });
    }
};

int run_depthwise(const dgt_depthwise_problem& x) {
    Arena prepared = arena_of<DepthwiseWeights>(x);
    DepthwiseWeights weights(prepared, x);
    in_parallel(x, thread_count(x), [&](Member& member) {
        member.share(x.images * x.height, [&](int64_t line) { weights.convolve_line(x, line); });
    });
    return DGT_GOOD;
}

// ---- weights in the kernels' layout ---------------------------------------------------------------------------------

template <class Weights, class Problem>
int prepare(const Problem& x) {
    Arena arena = arena_of<Weights>(x);
    Weights weights(arena, x);
    in_parallel(x, thread_count(x), [&](Member& member) { weights.fill(x, member); });
    return DGT_GOOD;
}

template <class Weights, class Problem>
int64_t count_bytes(const Problem& x) {
    return (int64_t)bytes_of<Weights>(x);
}

}  // namespace
}  // namespace dgt

int dgt_prepare_linear(const dgt_linear_problem* x) { return dgt::prepare<dgt::LinearWeights>(*x); }

int dgt_prepare_convolution(const dgt_convolution_problem* x) { return dgt::prepare<dgt::ConvolutionWeights>(*x); }

int dgt_prepare_depthwise(const dgt_depthwise_problem* x) { return dgt::prepare<dgt::DepthwiseWeights>(*x); }

int dgt_prepare_feed_forward(const dgt_feed_forward_problem* x) { return dgt::prepare<dgt::FeedForwardWeights>(*x); }

int dgt_linear_problem_size() { return (int)sizeof(dgt_linear_problem); }

int dgt_convolution_problem_size() { return (int)sizeof(dgt_convolution_problem); }

int dgt_depthwise_problem_size() { return (int)sizeof(dgt_depthwise_problem); }

int dgt_feed_forward_problem_size() { return (int)sizeof(dgt_feed_forward_problem); }

int64_t dgt_linear_bytes(const dgt_linear_problem* x) { return dgt::count_bytes<dgt::LinearWeights>(*x); }

int64_t dgt_convolution_bytes(const dgt_convolution_problem* x) {
    return dgt::count_bytes<dgt::ConvolutionWeights>(*x);
}

int64_t dgt_depthwise_bytes(const dgt_depthwise_problem* x) { return dgt::count_bytes<dgt::DepthwiseWeights>(*x); }

int64_t dgt_feed_forward_bytes(const dgt_feed_forward_problem* x) {
    return dgt::count_bytes<dgt::FeedForwardWeights>(*x);
}

int dgt_linear(const dgt_linear_problem* x) { return dgt::run_linear(*x); }

int dgt_convolution(const dgt_convolution_problem* x) { return dgt::run_convolution(*x); }

int dgt_depthwise(const dgt_depthwise_problem* x) { return dgt::run_depthwise(*x); }

int dgt_feed_forward(const dgt_feed_forward_problem* x) { return dgt::run_feed_forward(*x); }
