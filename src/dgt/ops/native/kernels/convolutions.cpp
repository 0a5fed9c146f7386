// What stands around attention in a block: linear layers, depthwise convolutions, and the feed-forward network.

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

// The weights of a linear layer, as the kernel reads them.
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

// ---- weights for many calls --------------------------------------------------------------------------------------

template <class Weights, class Problem>
int prepare(const Problem& x) {
    Arena arena((char*)x.prepared, bytes_of<Weights>(x));
    Weights weights(arena, x);
    in_parallel(x, thread_count(x), [&](Member& member) { weights.fill(x, member); });
    return DGT_GOOD;
}

// ---- depthwise convolutions --------------------------------------------------------------------------------------

// Convolve W channels of a line of the map.
template <class Load>
DGT_INLINE void convolve_channels(const dgt_depthwise_problem& x, const Taps& taps, const float* bias, int64_t line,
                                  int64_t channel, const Load& load_vector) {
    int64_t row = line % x.height;
    int64_t line_floats = x.width * x.channels;
    const float* here = x.input + line * line_floats + channel;
    Lines lines = {row > 0 ? here - line_floats : nullptr, here, row + 1 < x.height ? here + line_floats : nullptr,
                   x.width, x.channels};
    auto finish = [&](int64_t place, Floats input, Floats sum) {
        if (x.with_input) sum += input;
        store_channels(x.output + line * line_floats + place * x.channels, channel, x.channels, sum);
    };
    convolve_vector(lines, taps, channel, load(bias + channel), load_vector, finish);
}

struct DepthwiseWeights {
    Taps taps;
    float* bias;

    DepthwiseWeights(Arena& arena, const dgt_depthwise_problem& x)
        : taps(arena, x.channels), bias(take_channels(arena, x.channels)) {}
};

int run_depthwise(const dgt_depthwise_problem& x) {
    size_t bytes = bytes_of<DepthwiseWeights>(x);
    Block block(bytes);
    if (block.failed()) return DGT_NO_MEMORY;
    Arena arena(block.aligned(), bytes);
    DepthwiseWeights own(arena, x);
    own.taps.copy(x.weight, x.channels);
    copy_channels(x.bias, x.channels, own.bias);
    Bits last_lanes = first_lanes(x.channels % W);
    in_parallel(x, thread_count(x), [&](Member& member) {
        member.share(x.images * x.height, [&](int64_t line) {
            int64_t channel = 0;
            for (; channel + W <= x.channels; channel += W) {
                convolve_channels(x, own.taps, own.bias, line, channel, [](const float* from) { return load(from); });
            }
            if (channel == x.channels) return;
            auto load_last = [&](const float* from) { return load_lanes(from, last_lanes); };
            convolve_channels(x, own.taps, own.bias, line, channel, load_last);
        });
    });
    return DGT_GOOD;
}

}  // namespace
}  // namespace dgt

int dgt_linear(const dgt_linear_problem* problem) { return dgt::run_linear(*problem); }

int dgt_convolution(const dgt_convolution_problem* problem) { return dgt::run_convolution(*problem); }

int dgt_depthwise_convolution(const dgt_depthwise_problem* problem) { return dgt::run_depthwise(*problem); }

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
