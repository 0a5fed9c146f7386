// Products of bfloat16 in the matrix units of Intel's server processors (AMX): eight registers, tiles, of up to 16 rows
// of 64 bytes. One instruction adds the product of two tiles to a third,
//
//   C[r, j] += sum_p A[r, p] B[p, j]
//
// with pairs of bfloat16 numbers in A (16, 16) and B (16, W), and float32 sums in C (16, W). The columns of B are W
// tokens of a panel where scores are computed, W channels where values are weighted.
#pragma once

#include "bfloat16.h"
#include "lanes.h"
#include "memory.h"

namespace dgt {

// DGT_TILES multiplies by the loops below, for the check on any processor.
#if defined(__AMX_BF16__) || defined(DGT_TILES)
constexpr bool HAS_TILES = true;
#else
constexpr bool HAS_TILES = false;
#endif

constexpr int TILE_ROWS = 16;
constexpr int TILE_PAIRS = 16;
constexpr int TILE_COLUMNS = 4;  // C tiles beside each other: as many sums hide the latency of a product

// Which tile holds what; C begins at 0. The last step of a product may have fewer pairs.
constexpr int A_TILE = 4;
constexpr int B_TILE = 5;
constexpr int LAST_A_TILE = 6;
constexpr int LAST_B_TILE = 7;

// Rows, and bytes of a row, of all tiles, as the processor reads them.
struct alignas(64) TileShapes {
    uint8_t palette = 1;
    uint8_t reserved[15] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    TileShapes(int product_rows, int last_pairs) {
        for (int c = 0; c < TILE_COLUMNS; ++c) set(c, product_rows, W);
        set(A_TILE, product_rows, TILE_PAIRS);
        set(B_TILE, TILE_PAIRS, W);
        if (last_pairs == 0) return;
        set(LAST_A_TILE, product_rows, last_pairs);
        set(LAST_B_TILE, last_pairs, W);
    }

private:
    void set(int tile, int tile_rows, int words) {
        rows[tile] = (uint8_t)tile_rows;
        row_bytes[tile] = (uint16_t)(words * 4);
    }
};

#if !defined(__AMX_BF16__)

// Tiles in memory.
struct EmulatedTiles {
    TileShapes shapes = {0, 0};
    uint32_t words[8][TILE_ROWS][TILE_PAIRS];

    void multiply(int c, int a, int b) {
        for (int r = 0; r < shapes.rows[c]; ++r)
            for (int j = 0; j < W; ++j)
                for (int p = 0; p < shapes.rows[b]; ++p) add(words[c][r][j], words[a][r][p], words[b][p][j]);
    }

private:
    static float number(uint32_t bits) {
        float x;
        memcpy(&x, &bits, sizeof x);
        return x;
    }
    static void add(uint32_t& sum, uint32_t a, uint32_t b) {
        float x = number(sum) + number(a << 16) * number(b << 16);
        x += number(a & 0xFFFF0000u) * number(b & 0xFFFF0000u);
        memcpy(&sum, &x, sizeof x);
    }
};
static thread_local EmulatedTiles emulated;

inline void set_tile_shapes(const TileShapes& shapes) { emulated.shapes = shapes; }
inline void release_tiles() { emulated.shapes = {0, 0}; }
template <int TILE>
void clear_tile() {
    memset(emulated.words[TILE], 0, sizeof emulated.words[TILE]);
}
template <int TILE>
void load_tile(const void* from, int64_t stride) {
    for (int r = 0; r < emulated.shapes.rows[TILE]; ++r)
        memcpy(emulated.words[TILE][r], (const char*)from + r * stride, emulated.shapes.row_bytes[TILE]);
}
template <int TILE>
void store_tile(void* to, int64_t stride) {
    for (int r = 0; r < emulated.shapes.rows[TILE]; ++r)
        memcpy((char*)to + r * stride, emulated.words[TILE][r], emulated.shapes.row_bytes[TILE]);
}
template <int C, int A, int B>
void multiply_tiles() {
    emulated.multiply(C, A, B);
}

#else

// Not the compiler's intrinsics: GCC's take no template argument for a tile, and load without telling that they read
// memory.
DGT_INLINE void set_tile_shapes(const TileShapes& shapes) { __asm__ volatile("ldtilecfg %0" : : "m"(shapes)); }
DGT_INLINE void release_tiles() { __asm__ volatile("tilerelease"); }
template <int TILE>
DGT_INLINE void clear_tile() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(TILE));
}
template <int TILE>
DGT_INLINE void load_tile(const void* from, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
DGT_INLINE void store_tile(void* to, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(TILE) : "memory");
}
template <int C, int A, int B>
DGT_INLINE void multiply_tiles() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

#endif

// The tiles of a thread for the time of a call. Other libraries shape them in their own way in between.
class TileUse {
public:
    TileUse() {
        if (HAS_TILES) rows_ = 0;
    }
    TileUse(const TileUse&) = delete;
    TileUse& operator=(const TileUse&) = delete;
    ~TileUse() {
        if (HAS_TILES) release_tiles();
    }

    // Shape the tiles for products of so many rows by so many pairs. A product of whole steps has no last one, whatever
    // its shape is: shaping takes as long as ten products.
    static void shape(int rows, int64_t pairs) {
        int last = (int)(pairs % TILE_PAIRS);
        if (rows == rows_ && (last == 0 || last == last_)) return;
        set_tile_shapes(TileShapes(rows, last));
        rows_ = rows;
        last_ = last;
    }

private:
    static inline thread_local int rows_ = 0;  // 0: not yet in this call
    static inline thread_local int last_ = 0;
};

// A and B of a product, in pairs: `stride` from a row to the next, and `next` from W columns of B to the W beside them.
struct TileProduct {
    const Bf16x2* a;
    int64_t a_stride;
    const Bf16x2* b;
    int64_t b_stride;
    int64_t next;
};

template <int COLUMNS, int A, int B, int C = 0>
DGT_INLINE void add_step(const TileProduct& product, int64_t p) {
    if constexpr (C == 0) load_tile<A>(product.a + p, product.a_stride * 4);
    load_tile<B>(product.b + p * product.b_stride + C * product.next, product.b_stride * 4);
    multiply_tiles<C, A, B>();
    if constexpr (C + 1 < COLUMNS) add_step<COLUMNS, A, B, C + 1>(product, p);
}

template <int COLUMNS, int C = 0>
DGT_INLINE void start_sums(const float* c, int64_t c_stride) {
    if (c) load_tile<C>(c + C * W, c_stride * 4);
    else clear_tile<C>();
    if constexpr (C + 1 < COLUMNS) start_sums<COLUMNS, C + 1>(c, c_stride);
}

template <int COLUMNS, int C = 0>
DGT_INLINE void store_sums(float* c, int64_t c_stride) {
    store_tile<C>(c + C * W, c_stride * 4);
    if constexpr (C + 1 < COLUMNS) store_sums<COLUMNS, C + 1>(c, c_stride);
}

// C = A B, or C += A B, of COLUMNS times W numbers beside each other.
template <int COLUMNS>
void multiply_beside(const TileProduct& product, int64_t pairs, bool adds, float* c, int64_t c_stride) {
    start_sums<COLUMNS>(adds ? c : nullptr, c_stride);
    int64_t p = 0;
    for (; p + TILE_PAIRS <= pairs; p += TILE_PAIRS) add_step<COLUMNS, A_TILE, B_TILE>(product, p);
    if (p < pairs) add_step<COLUMNS, LAST_A_TILE, LAST_B_TILE>(product, p);
    store_sums<COLUMNS>(c, c_stride);
}

constexpr decltype(&multiply_beside<1>) MULTIPLY_BESIDE[TILE_COLUMNS] = {multiply_beside<1>, multiply_beside<2>,
                                                                         multiply_beside<3>, multiply_beside<4>};

// The same of any number of vectors beside each other, and up to TILE_ROWS rows.
DGT_INLINE void multiply_rows(TileProduct product, int rows, int64_t vectors, int64_t pairs, bool adds, float* c,
                              int64_t c_stride) {
    TileUse::shape(rows, pairs);
    for (int64_t first = 0; first < vectors; first += TILE_COLUMNS) {
        int64_t beside = min<int64_t>(TILE_COLUMNS, vectors - first);
        MULTIPLY_BESIDE[beside - 1](product, pairs, adds, c + first * W, c_stride);
        product.b += TILE_COLUMNS * product.next;
    }
}

}  // namespace dgt
