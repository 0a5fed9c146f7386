// Linear layers: tokens times weights, with the same product that computes attention scores.
//
// Weights are packed into panels: W outputs side by side, transposed, so that a vector holds the weights of one input
// for W outputs. Tokens are the rows. Each output is a single sum in the order of the inputs, however the work is
// divided.
#pragma once

#include "../../../ops/cpu/kernels/memory.h"
#include "../../../ops/cpu/kernels/products.h"

namespace dgt {

constexpr int LINEAR_ROWS = REGISTERS == 32 ? 6 : 4;
constexpr int LINEAR_VECTORS = vectors_beside(LINEAR_ROWS);
constexpr int64_t MOST_TILE = MOST_SUMS * W;      // floats
constexpr int64_t BLOCK_FLOATS = 98304;           // of the tokens multiplied with a panel; should stay in the cache
constexpr int64_t MOST_BLOCK = 42 * LINEAR_ROWS;  // tokens

struct Panels {
    float* at;  // (outputs / W, inputs, W)
    int64_t inputs;
    int64_t outputs;

    Panels(Arena& arena, int64_t inputs, int64_t outputs)
        : at(arena.take<float>(round_up(outputs, W) * inputs)), inputs(inputs), outputs(outputs) {}

    int64_t count() const { return divide_up(outputs, W); }
    int64_t groups() const { return divide_up(count(), LINEAR_VECTORS); }

    // Pack one panel of (outputs, inputs) weights; the lanes beyond the last output are never used.
    void pack(const float* weight, int64_t panel) const {
        const float* rows[W];
        for (int64_t i = 0; i < W; ++i) rows[i] = weight + min(panel * W + i, outputs - 1) * inputs;
        float* to = at + panel * inputs * W;
        for (int64_t first = 0; first < inputs; first += W) {
            transpose(rows, first, min<int64_t>(W, inputs - first), to + first * W);
        }
    }

    // Pack one panel of (outputs, channels, taps) weights, whose inputs become (taps, channels).
    void pack_taps(const float* weight, int64_t taps, int64_t panel) const {
        const float* rows[W];
        for (int64_t i = 0; i < W; ++i) rows[i] = weight + min(panel * W + i, outputs - 1) * inputs;
        float* to = at + panel * inputs * W;
        int64_t channels = inputs / taps;
        float columns[W * W];
        for (int64_t first = 0; first < inputs; first += W) {
            int64_t count = min<int64_t>(W, inputs - first);
            transpose(rows, first, count, columns);
            for (int64_t i = 0; i < count; ++i) {
                int64_t place = (first + i) % taps * channels + (first + i) / taps;
                store(to + place * W, load(columns + i * W));
            }
        }
    }
};

// Some tokens multiplied with some panels: the products of one tile, (rows, vectors, W).
struct Tile {
    int64_t first_token;
    int64_t rows;
    int64_t first_vector;
    int64_t vectors;
    const float* at;

    Floats vector(int64_t row, int64_t beside) const { return load(at + (row * vectors + beside) * W); }
};

// How tokens are divided into blocks that are multiplied with a group of panels one after another.
struct TokenBlocks {
    int64_t tokens;
    int64_t size;

    TokenBlocks(int64_t tokens, int64_t inputs) : tokens(tokens) {
        int64_t most = max<int64_t>(LINEAR_ROWS, min<int64_t>(MOST_BLOCK, BLOCK_FLOATS / inputs));
        size = round_up(divide_up(tokens, divide_up(tokens, most)), LINEAR_ROWS);
    }
    int64_t count() const { return divide_up(tokens, size); }
    int64_t first(int64_t i) const { return i * size; }
    int64_t length(int64_t i) const { return min(size, tokens - i * size); }
};

// Multiply a block of tokens, rows `stride` apart, with a group of panels; `finish(tile)` receives each tile of
// products.
template <class Finish>
DGT_INLINE void multiply(const float* x, int64_t stride, int64_t first, int64_t tokens, const Panels& panels,
                         int64_t group, const float* bias, const Finish& finish) {
    alignas(64) float products[MOST_TILE];
    int64_t vector = panels.count() * group / panels.groups();
    int64_t vectors = panels.count() * (group + 1) / panels.groups() - vector;
    int64_t pieces = divide_up(tokens, LINEAR_ROWS);
    for (int64_t i = 0; i < pieces; ++i) {
        int64_t token = first + tokens * i / pieces;
        int64_t rows = first + tokens * (i + 1) / pieces - token;
        SCORES[rows - 1][vectors - 1](x + token * stride, stride, panels.at + vector * panels.inputs * W, panels.inputs,
                                      bias + vector * W, products, vectors * W, nullptr);
        finish(Tile{token, rows, vector, vectors, products});
    }
}

// Write a vector of a row with `width` channels, starting at `channel`; lanes beyond the width are dropped.
DGT_INLINE void store_channels(float* row, int64_t channel, int64_t width, Floats x) {
    if (channel + W <= width) store(row + channel, x);
    else store_lanes(row + channel, x, first_lanes(width - channel));
}

// The memory of prepared weights, as an arena to lay them out in.
template <class Weights, class Problem>
Arena arena_of(const Problem& x) {
    return Arena((char*)x.prepared, bytes_of<Weights>(x));
}

// A per-channel parameter, padded to whole vectors.
inline float* take_channels(Arena& arena, int64_t channels) { return arena.take<float>(round_up(channels, W)); }

inline void copy_channels(const float* from, int64_t channels, float* to) {
    for (int64_t i = 0; i < round_up(channels, W); ++i) to[i] = from && i < channels ? from[i] : 0.0f;
}

}  // namespace dgt
