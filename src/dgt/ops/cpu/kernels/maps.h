// The C interface of the operators on channels-last maps that a training step on a CPU consists of, besides products
// and attention: GELU with BatchNorm, and a map plus its depthwise convolution. ops/cpu/structures.py mirrors this
// structure in ctypes; the two must change together, and DGT_ABI_VERSION with them.
//
// Letters: B images, H rows, W columns, C channels. Maps are (B, H, W, C) and contiguous.
#pragma once

#include "interface.h"

// What an operator reads and writes; fields that it does not need are zero or null.
struct dgt_map_problem {
    int64_t images;
    int64_t height;
    int64_t width;
    int64_t channels;
    dgt_type type;        // of the four maps
    double epsilon;       // of BatchNorm, added to the variance
    const void* input;    // (B, H, W, C)
    const float* weight;  // (C) of BatchNorm, (C, 3, 3) of a convolution
    const float* bias;    // (C)
    double* statistics;   // (2, C): mean and variance of gelu(input), not corrected by N - 1
    void* output;         // (B, H, W, C)

    const void* grad_output;  // (B, H, W, C)
    void* grad_input;         // (B, H, W, C)
    float* grad_weight;       // as weight
    float* grad_bias;         // (C)

    int64_t threads;
    dgt_parallel_for parallel_for;
};

DGT_EXPORT int dgt_map_problem_size();  // bytes of the structure

// Each returns a dgt_status.
//
// BatchNorm of GELU in training, with the statistics of the batch: output = norm(gelu(input)).
DGT_EXPORT int dgt_gelu_norm(const dgt_map_problem* problem);           // -> statistics, output
DGT_EXPORT int dgt_gelu_norm_again(const dgt_map_problem* problem);     // statistics -> the same output
DGT_EXPORT int dgt_gelu_norm_backward(const dgt_map_problem* problem);  // statistics -> the gradients
// A 3 x 3 depthwise convolution with zero padding, and a residual: output = input + convolution + bias. The gradients
// need no bias.
DGT_EXPORT int dgt_add_depthwise(const dgt_map_problem* problem);           // -> output
DGT_EXPORT int dgt_add_depthwise_backward(const dgt_map_problem* problem);  // -> the gradients
