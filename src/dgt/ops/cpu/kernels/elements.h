// Elements of a map in memory, of a type that is known when a kernel is compiled; arithmetic is in float32. How maps
// and channels are divided among threads.
#pragma once

#include "parallel.h"
#include "tokens.h"

namespace dgt {

struct Bfloat16 {
    uint16_t bits;
};

struct Float16 {
    uint16_t bits;
};

DGT_INLINE Floats floats_of(Halves x, Bfloat16) { return floats_of_bfloat16(x); }
DGT_INLINE Floats floats_of(Halves x, Float16) { return floats_of_float16(x); }
DGT_INLINE Halves halves_of(Floats x, Bfloat16) { return bfloat16_of_floats(x); }
DGT_INLINE Halves halves_of(Floats x, Float16) { return float16_of_floats(x); }

// How a vector of channels is read and written where all W are there.
struct WholeVector {
    DGT_INLINE Floats load(const float* from) { return dgt::load(from); }
    DGT_INLINE void store(float* to, Floats x) { dgt::store(to, x); }
    template <class T>
    DGT_INLINE Floats load(const T* from) {
        return floats_of(*(const UnalignedHalves*)from, T{});
    }
    template <class T>
    DGT_INLINE void store(T* to, Floats x) {
        *(UnalignedHalves*)to = halves_of(x, T{});
    }
};

// The same where there are fewer; the other lanes are zero.
struct PartOfVector {
    int64_t count;

    Floats load(const float* from) const { return load_lanes(from, first_lanes(count)); }
    void store(float* to, Floats x) const { store_lanes(to, x, first_lanes(count)); }
    template <class T>
    Floats load(const T* from) const {
        return floats_of(load_halves((const uint16_t*)from, count), T{});
    }
    template <class T>
    void store(T* to, Floats x) const {
        Halves halves = halves_of(x, T{});
        for (int64_t i = 0; i < count; ++i) to[i].bits = halves[i];
    }
};

// Visit the vectors of a row of channels: `visit(channel, how)`, with the first channel of each.
template <class Visit>
DGT_INLINE void for_each_vector(int64_t channels, const Visit& visit) {
    int64_t channel = 0;
    for (; channel + W <= channels; channel += W) visit(channel, WholeVector{});
    if (channel < channels) visit(channel, PartOfVector{channels - channel});
}

constexpr int64_t MOST_CHUNKS = 64;  // of a map, each summed up apart, however many threads there are
constexpr int64_t CHANNELS_AT_A_TIME = 64;

// `work(first, end)` for channels, a few at a time, divided among threads.
template <class Work>
void each_channels(Member& member, int64_t channels, const Work& work) {
    member.share(divide_up(channels, CHANNELS_AT_A_TIME), [&](int64_t piece) {
        int64_t first = piece * CHANNELS_AT_A_TIME;
        work(first, min(channels, first + CHANNELS_AT_A_TIME));
    });
}

// Call `run(T{})` with the type of the elements.
template <class Run>
int with_type(dgt_type type, const Run& run) {
    if (type == DGT_FLOAT32) return run(float{});
    return type == DGT_BFLOAT16 ? run(Bfloat16{}) : run(Float16{});
}

}  // namespace dgt
