// The C interface of the layers around attention in a model that only predicts: linear layers, convolutions, and CMT's
// feed-forward network (IRFFN), which combines both. inference/cpu/interface.py fills these structures through ctypes;
// the two must change together, and DGT_ABI_VERSION with them.
//
// Letters: B images, H x W positions in a map, C channels, R C hidden channels. Everything is float32. A map is (B, H,
// W, C) and contiguous, so its positions are tokens and no layout has to change between layers.
#pragma once

#include "../../../ops/cpu/kernels/interface.h"

// BatchNorm in evaluation, one value per output channel; all null if there is none.
struct dgt_batch_norm {
    const float* weight;
    const float* bias;
    const float* mean;
    const float* variance;
    double epsilon;
};

// Tokens times weights: output = input weight^T + bias.
struct dgt_linear_problem {
    int64_t tokens;
    int64_t inputs;
    int64_t outputs;
    const float* input;   // (tokens, inputs)
    const float* weight;  // (outputs, inputs)
    const float* bias;    // (outputs), or null
    void* prepared;       // weights in the kernel's layout
    float* output;        // (tokens, outputs)
    int64_t threads;
    dgt_parallel_for parallel_for;
};

// A 3 x 3 convolution with zero padding: output = norm(gelu(convolution + bias)).
struct dgt_convolution_problem {
    int64_t images;
    int64_t height;  // of the input
    int64_t width;
    int64_t channels;
    int64_t outputs;      // channels
    int64_t stride;       // 1 or 2: (H' - 1) stride + 1 <= H
    int64_t with_gelu;    // 0: no GELU
    const float* input;   // (B, H, W, C)
    const uint8_t* mask;  // (B, H', W'), 0 where the output is zero, or null
    const float* weight;  // (outputs, C, 3, 3)
    const float* bias;    // (outputs), or null
    dgt_batch_norm norm;
    void* prepared;  // weights in the kernel's layout
    float* output;   // (B, H', W', outputs)
    int64_t threads;
    dgt_parallel_for parallel_for;
};

// A 3 x 3 depthwise convolution with zero padding, and a residual: output = input + convolution + bias.
struct dgt_depthwise_problem {
    int64_t images;
    int64_t height;
    int64_t width;
    int64_t channels;
    const float* input;   // (B, H, W, C)
    const float* weight;  // (C, 3, 3)
    const float* bias;    // (C), or null
    void* prepared;       // weights in the kernel's layout
    float* output;        // (B, H, W, C)
    int64_t threads;
    dgt_parallel_for parallel_for;
};

// The inverted residual feed-forward network in evaluation (Eq. 10):
//   y = norm1(gelu(expand(x)));  y = norm2(gelu(y + depthwise(y)));  output = norm3(project(y))
struct dgt_feed_forward_problem {
    int64_t images;
    int64_t height;
    int64_t width;
    int64_t channels;
    int64_t hidden;
    const float* input;             // (B, H, W, C)
    const uint8_t* mask;            // (B, H, W), 1 where a token is real, or null: all are
    const float* expand_weight;     // (R C, C)
    const float* expand_bias;       // (R C), or null, as all biases
    dgt_batch_norm norm1;           // R C
    const float* depthwise_weight;  // (R C, 3, 3)
    const float* depthwise_bias;    // (R C)
    dgt_batch_norm norm2;           // R C
    const float* project_weight;    // (C, R C)
    const float* project_bias;      // (C)
    dgt_batch_norm norm3;           // C
    void* prepared;                 // weights in the kernel's layout
    float* output;                  // (B, H, W, C)
    int64_t threads;
    dgt_parallel_for parallel_for;
};

// Bytes of each structure.
DGT_EXPORT int dgt_linear_problem_size();
DGT_EXPORT int dgt_convolution_problem_size();
DGT_EXPORT int dgt_depthwise_problem_size();
DGT_EXPORT int dgt_feed_forward_problem_size();

// Write the weights of a problem, in the kernels' layout, to `prepared`, which is aligned to 64 bytes and has the size
// that the functions below return. Each returns a dgt_status.
DGT_EXPORT int dgt_prepare_linear(const dgt_linear_problem* problem);
DGT_EXPORT int dgt_prepare_convolution(const dgt_convolution_problem* problem);
DGT_EXPORT int dgt_prepare_depthwise(const dgt_depthwise_problem* problem);
DGT_EXPORT int dgt_prepare_feed_forward(const dgt_feed_forward_problem* problem);

DGT_EXPORT int64_t dgt_linear_bytes(const dgt_linear_problem* problem);
DGT_EXPORT int64_t dgt_convolution_bytes(const dgt_convolution_problem* problem);
DGT_EXPORT int64_t dgt_depthwise_bytes(const dgt_depthwise_problem* problem);
DGT_EXPORT int64_t dgt_feed_forward_bytes(const dgt_feed_forward_problem* problem);

// Compute the output from the input and what was prepared; weights themselves are not read. Each returns a dgt_status.
DGT_EXPORT int dgt_linear(const dgt_linear_problem* problem);
DGT_EXPORT int dgt_convolution(const dgt_convolution_problem* problem);
DGT_EXPORT int dgt_depthwise(const dgt_depthwise_problem* problem);
DGT_EXPORT int dgt_feed_forward(const dgt_feed_forward_problem* problem);
