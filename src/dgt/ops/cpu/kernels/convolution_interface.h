// The C interface of the kernels around attention: linear layers, depthwise convolutions, and CMT's feed-forward
// network (IRFFN), which combines both. ops/cpu/convolution_interface.py fills these structures through ctypes; the
// two must change together, and DGT_ABI_VERSION with them.
//
// Letters: B images, H x W positions in a map, C channels, R C hidden channels. Everything is float32. A map is (B, H,
// W, C) and contiguous, so its positions are tokens and no layout has to change between layers.
#pragma once

#include "interface.h"

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
    void* prepared;       // what dgt_prepare_linear wrote, or null: weights are packed in every call
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
    const float* weight;  // (outputs, C, 3, 3), or (outputs, 3, 3, C)
    int64_t taps_last;    // 1 for the former
    const float* bias;    // (outputs), or null
    dgt_batch_norm norm;
    float* output;  // (B, H', W', outputs)
    int64_t threads;
    dgt_parallel_for parallel_for;
};

// A 3 x 3 depthwise convolution, stride 1, with zero padding: output = convolution + bias (+ input).
struct dgt_depthwise_problem {
    int64_t images;
    int64_t height;
    int64_t width;
    int64_t channels;
    int64_t with_input;        // whether the input is added: a residual
    const float* input;        // (B, H, W, C)
    const float* weight;       // (C, 3, 3)
    const float* bias;         // (C), or null
    float* output;             // (B, H, W, C); forward pass only
    const float* grad_output;  // (B, H, W, C); from here on, backward pass only
    float* grad_input;         // (B, H, W, C), or null: not needed
    float* grad_weight;        // (C, 3, 3), or null: neither this nor the bias's is needed
    float* grad_bias;          // (C)
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
    void* prepared;                 // what dgt_prepare_feed_forward wrote, or null
    float* output;                  // (B, H, W, C)
    int64_t threads;
    dgt_parallel_for parallel_for;
};

// BatchNorm with the statistics of the batch.
struct dgt_training_norm {
    const float* weight;
    const float* bias;
    double epsilon;
    float* mean;         // forward writes and backward reads
    float* scale;        // 1 / standard deviation, the same
    float* variance;     // the biased one; forward pass only
    float* grad_weight;  // backward writes
    float* grad_bias;
};

// The same network in training, forward and backward. Hidden maps are stored as slices of W = dgt_lanes() channels: (R
// C / W rounded up, B H W, W).
struct dgt_training_problem {
    int64_t images;
    int64_t height;
    int64_t width;
    int64_t channels;
    int64_t hidden;
    const float* input;             // (B, H, W, C)
    const uint8_t* mask;            // (B, H, W), 1 where a token is real, or null: all are
    const float* expand_weight;     // (R C, C)
    const float* expand_bias;       // (R C), or null, as all biases
    dgt_training_norm norm1;        // R C
    const float* depthwise_weight;  // (R C, 3, 3)
    const float* depthwise_bias;    // (R C)
    dgt_training_norm norm2;        // R C
    const float* project_weight;    // (C, R C)
    const float* project_bias;      // (C)
    dgt_training_norm norm3;        // C
    float* expanded;                // forward writes and backward reads: slices, before GELU
    float* convolved;               // slices, with the residual, before GELU
    float* projected;               // (B, H, W, C), before BatchNorm
    float* output;                  // (B, H, W, C); forward pass only
    const float* grad_output;       // (B, H, W, C); from here on, backward pass only
    float* grad_input;              // (B, H, W, C), or null: not needed
    float* grad_expand_weight;      // (R C, C), or null: not needed
    float* grad_expand_bias;        // (R C)
    float* grad_depthwise_weight;   // (R C, 3, 3)
    float* grad_depthwise_bias;     // (R C)
    float* grad_project_weight;     // (C, R C)
    float* grad_project_bias;       // (C)
    int64_t threads;
    dgt_parallel_for parallel_for;
};

// Each returns a dgt_status.
DGT_EXPORT int dgt_feed_forward_training(const dgt_training_problem* problem);
DGT_EXPORT int dgt_feed_forward_backward(const dgt_training_problem* problem);
DGT_EXPORT int dgt_linear(const dgt_linear_problem* problem);
DGT_EXPORT int dgt_convolution(const dgt_convolution_problem* problem);
DGT_EXPORT int dgt_depthwise_convolution(const dgt_depthwise_problem* problem);
DGT_EXPORT int dgt_depthwise_backward(const dgt_depthwise_problem* problem);
DGT_EXPORT int dgt_feed_forward(const dgt_feed_forward_problem* problem);

// Weights in the kernels' layout, for many calls: `prepared` is aligned to 64 bytes and has the size that these return.
DGT_EXPORT int64_t dgt_linear_bytes(const dgt_linear_problem* problem);
DGT_EXPORT int64_t dgt_feed_forward_bytes(const dgt_feed_forward_problem* problem);
DGT_EXPORT int dgt_prepare_linear(const dgt_linear_problem* problem);              // -> prepared
DGT_EXPORT int dgt_prepare_feed_forward(const dgt_feed_forward_problem* problem);  // -> prepared
