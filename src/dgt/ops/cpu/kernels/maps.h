// The C interface of the operators on channels-last maps that a training step on a CPU consists of, besides products
// and attention: GELU with BatchNorm, and a map plus its depthwise convolution. ops/cpu/maps.py mirrors these
// structures in ctypes; the two must change together, and DGT_ABI_VERSION with them.
//
// Letters: N positions of all images, C channels. Maps are (N, C) and contiguous.
#pragma once

#include "interface.h"

// BatchNorm of GELU in training, with the statistics of the batch: output = norm(gelu(input)).
struct dgt_gelu_norm_problem {
    int64_t positions;    // N
    int64_t channels;     // C
    dgt_type type;        // of the four maps
    double epsilon;       // added to the variance
    const void* input;    // (N, C)
    const float* weight;  // (C)
    const float* bias;    // (C)
    double* statistics;   // (2, C): mean and variance of gelu(input), not corrected by N - 1
    void* output;         // (N, C)

    const void* grad_output;  // (N, C)
    void* grad_input;         // (N, C)
    float* grad_weight;       // (C)
    float* grad_bias;         // (C)

    int64_t threads;
    dgt_parallel_for parallel_for;
};

// A 3 x 3 depthwise convolution with zero padding, and a residual: output = input + convolution + bias.
struct dgt_add_depthwise_problem {
    int64_t images;
    int64_t height;
    int64_t width;
    int64_t channels;
    dgt_type type;        // of the four maps
    const void* input;    // (B, H, W, C)
    const float* weight;  // (C, 3, 3)
    const float* bias;    // (C); not needed for the gradients
    void* output;         // (B, H, W, C)

    const void* grad_output;  // (B, H, W, C)
    void* grad_input;         // (B, H, W, C)
    float* grad_weight;       // (C, 3, 3)
    float* grad_bias;         // (C)

    int64_t threads;
    dgt_parallel_for parallel_for;
};

// Bytes of each structure.
DGT_EXPORT int dgt_gelu_norm_problem_size();
DGT_EXPORT int dgt_add_depthwise_problem_size();

// Each returns a dgt_status.
DGT_EXPORT int dgt_gelu_norm(const dgt_gelu_norm_problem* problem);                   // -> statistics, output
DGT_EXPORT int dgt_gelu_norm_again(const dgt_gelu_norm_problem* problem);             // statistics -> the same output
DGT_EXPORT int dgt_gelu_norm_backward(const dgt_gelu_norm_problem* problem);          // statistics -> the gradients
DGT_EXPORT int dgt_add_depthwise(const dgt_add_depthwise_problem* problem);           // -> output
DGT_EXPORT int dgt_add_depthwise_backward(const dgt_add_depthwise_problem* problem);  // -> the gradients
