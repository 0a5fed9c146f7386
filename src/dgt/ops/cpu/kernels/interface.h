// The C interface of the native CPU kernels: plain structures and functions, no Python, no PyTorch, no C++ library.
//
// Letters: B images, H query heads, L queries, S keys, D channels per head, G groups, K places in a list of keys, P
// prefix tokens. Sizes and strides count elements. ops/cpu/structures.py mirrors these structures in ctypes; the
// two must change together, and DGT_ABI_VERSION with them.
#pragma once

#include <stdint.h>

#define DGT_ABI_VERSION 15

#if defined(_WIN32)
#define DGT_EXPORT extern "C" __declspec(dllexport)
#else
#define DGT_EXPORT extern "C" __attribute__((visibility("default")))
#endif

// PyTorch's `torch_parallel_for`: calls `body` on parts of begin..end, on the threads of the host program.
typedef void (*dgt_body)(int64_t begin, int64_t end, void* context);
typedef int (*dgt_parallel_for)(int64_t begin, int64_t end, int64_t grain, dgt_body body, void* context);

enum dgt_type : int64_t { DGT_FLOAT32 = 0, DGT_BFLOAT16 = 1, DGT_FLOAT16 = 2 };

enum dgt_mask_type : int64_t { DGT_NO_MASK = 0, DGT_MASK_BOOL = 1, DGT_MASK_FLOAT = 2, DGT_MASK_GRID = 3 };

enum dgt_status : int {
    DGT_GOOD = 0,
    DGT_NAN_IN_QUERY = 1,  // or infinities that cancel in a score
    DGT_NAN_IN_KEY = 2,
    DGT_NO_MEMORY = 3,
};

// A (B, H, N, D) tensor of tokens with contiguous channels; null if absent.
struct dgt_tokens {
    void* data;
    int64_t image_stride;
    int64_t head_stride;
    int64_t token_stride;
};

// Clusters of each head's N tokens after the prefix: Lloyd's k-means.
struct dgt_clusters {
    int64_t count;               // per head
    int64_t steps;               // iterations on a sample of the tokens, before one on all
    int64_t every;               // one in this many real tokens is in the sample
    const int32_t* order;        // (B, N): the real tokens, spread evenly, then the others; null: ids are given
    int64_t order_image_stride;  // 0 if images share it
    float* centroids;            // (B, H, count, D): means of the members
    int64_t* ids;                // (B, H, N), -1 where a token is hidden; null if not needed
    int64_t ids_image_stride;
    int64_t ids_head_stride;
};

// What the functions below read and write. Pointers that a function does not need may be null.
struct dgt_problem {
    // Sizes.
    int64_t images;       // B
    int64_t heads;        // H
    int64_t key_heads;    // heads of keys and values, a divisor of H
    int64_t queries;      // L
    int64_t keys;         // S
    int64_t channels;     // D
    int64_t groups;       // G
    int64_t list_length;  // K: P and the number of keys to select
    int64_t prefix;       // the first tokens, which are in no group, attend to all and are attended to by all
    dgt_type type;        // of query, key, value, output and grad_output

    // Inputs.
    dgt_tokens query;           // (B, H, L, D)
    dgt_tokens key;             // (B, key_heads, S, D)
    dgt_tokens value;           // (B, key_heads, S, D)
    const float* centroids;     // (G, D) of each head, contiguous
    const uint8_t* query_mask;  // (B, L), 1 where a query is real; null: all are
    const uint8_t* key_mask;    // (B, S)
    const float* key_bias;      // (B, H, S), added to the scores of a key; null: nothing
    const void* mask;           // of dense attention, (B, H, L, S): bool, 1 where a query sees a key, or float, added
    dgt_mask_type mask_type;
    int64_t mask_strides[4];  // of image, head, query, key
    // DGT_MASK_GRID: keys are a grid, row by row; added is the number of a key's row and that of its column.
    dgt_tokens bias_rows;     // (B, H, L, S / grid_columns), float
    dgt_tokens bias_columns;  // (B, H, L, grid_columns), float
    int64_t grid_columns;
    double scale;  // of the scores

    // Results; inputs of the steps that follow.
    int64_t* group_ids;  // (B, H, L), -1 for a query in no group
    int64_t* key_ids;    // (B, H, G, K), ascending, the prefix first; -1 in empty places
    dgt_tokens output;   // (B, H, L, D)
    float* logsumexp;    // (B, H, L): log of the sum of exponentials, -inf where a query sees no key; or null

    // Groups and clusters found in the tokens.
    dgt_clusters query_clusters;  // groups of queries
    dgt_clusters key_clusters;    // of keys, one residual key each; with 0 none, with 1 all keys are in one cluster
    int64_t first_order;          // 1: with what residual keys lose to first order

    // Residual keys of given groups, which attend writes, unless they are null, and its gradients read.
    float* residual_keys;    // (B, H, G, M, 2, D): keys and their values; M is key_clusters.count
    float* residual_biases;  // (B, H, G, M): added to their scores; -inf where a cluster has no keys left

    // Statistics of Eq. 3.
    float* group_sums;    // (B, H, G, D): sums of the normalized queries of each group
    float* group_counts;  // (B, H, G)

    // Gradients.
    dgt_type grad_type;           // of grad_query, grad_key and grad_value: type, or float32
    dgt_tokens grad_output;       // (B, H, L, D)
    const float* grad_logsumexp;  // (B, H, L), or null
    dgt_tokens grad_query;        // (B, H, L, D)
    dgt_tokens grad_key;          // (B, H, S, D): per query head
    dgt_tokens grad_value;        // (B, H, S, D)
    float* grad_key_bias;         // (B, H, S), contiguous, or null

    // Threads.
    int64_t threads;                // maximum to use
    dgt_parallel_for parallel_for;  // null: everything runs on the calling thread
};

// Each returns a dgt_status.
DGT_EXPORT int dgt_group_queries(const dgt_problem* problem);  // -> group_ids
DGT_EXPORT int dgt_select_keys(const dgt_problem* problem);    // -> key_ids (Eq. 1)
// With key_clusters, the next three attend to residual keys as well; without prefix.
DGT_EXPORT int dgt_attend(const dgt_problem* problem);               // group_ids, key_ids -> output, logsumexp (Eq. 2)
DGT_EXPORT int dgt_attention(const dgt_problem* problem);            // the three steps together
DGT_EXPORT int dgt_attend_backward(const dgt_problem* problem);      // -> gradients of attend, or of attention
DGT_EXPORT int dgt_cluster_tokens(const dgt_problem* problem);       // of query -> query_clusters
DGT_EXPORT int dgt_clustered_attention(const dgt_problem* problem);  // all steps -> output
DGT_EXPORT int dgt_dense(const dgt_problem* problem);                // all keys, under a mask -> output, logsumexp
DGT_EXPORT int dgt_dense_backward(const dgt_problem* problem);       // -> its gradients
DGT_EXPORT int dgt_group_statistics(const dgt_problem* problem);     // group_ids -> group_sums, group_counts (Eq. 3)

DGT_EXPORT int dgt_abi_version();   // DGT_ABI_VERSION of the library
DGT_EXPORT int dgt_problem_size();  // bytes of a dgt_problem
DGT_EXPORT int dgt_lanes();         // floats per vector
