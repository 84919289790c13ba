// What the threads of a block find out together: folds, and the selection that all cuts are made of.
//
// Every function here is called by all threads of the block. Sums are of integers, so no order matters.
#pragma once

#include "numbers.cuh"

namespace quire {

__device__ __forceinline__ Mass from_lane_xor(Mass value, int lanes) { return __shfl_xor_sync(0xffffffffu, value, lanes); }

// The fold of all threads' values, for all of them. `of_warps` is shared memory, one for each warp.
template <uint32_t THREADS, class V, class Fold>
__device__ __forceinline__ V block_fold(V value, V* of_warps, Fold fold) {
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) value = fold(value, from_lane_xor(value, lanes));
    __syncthreads();  // whoever reads the last fold's has done so
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    V all = of_warps[0];
#pragma unroll
    for (uint32_t warp = 1; warp < THREADS / 32; warp++) all = fold(all, of_warps[warp]);
    return all;
}

struct Greater {
    __device__ __forceinline__ Mass operator()(Mass a, Mass b) const { return a > b ? a : b; }
};
struct Sum {
    __device__ __forceinline__ Mass operator()(Mass a, Mass b) const { return a + b; }
};

// Digits of a selection: 11, 11 and 10 bits of a key.
constexpr uint32_t BINS = 2048;

// Shared memory of a block that has a whole row.
struct RowShared {
    Mass bins[BINS];
    Mass of_warps[ROW_THREADS / 32];
    Mass before[ROW_THREADS / 32];
    Mass above, at;
    uint32_t bin;
};

// Where a selection ended.
struct Selected {
    bool found;    // the elements are enough
    uint32_t key;  // the least key that is needed
    Mass target;
    Mass above;    // mass of the greater keys: less than the target
    Mass at;       // mass of this key: what is above and at it is at least the target
};

// The greatest key such that it and the greater ones have the wanted mass: `target`, or where `share` is not 0 that share
// of the mass of all. `element(i, key, mass)` says whether number i of `count` takes part, its key and its mass.
//
// A histogram for each digit of the key, from the highest: the bin where the mass is reached is what the next one looks into.
template <class Element>
__device__ Selected select(RowShared& shared, uint32_t count, Mass target, float share, Element element) {
    Selected selected = {false, 0, target, 0, 0};
    uint32_t known = 0;  // bits of the key that are
#pragma unroll 1
    for (int digit = 0; digit < 3; digit++) {
        const int shift = digit == 0 ? 21 : digit == 1 ? 10 : 0;
        const uint32_t digits = digit == 2 ? 1023 : 2047;
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < BINS; i += ROW_THREADS) shared.bins[i] = 0;
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < count; i += ROW_THREADS) {
            uint32_t key;
            Mass mass;
            if (element(i, key, mass) && (key & known) == selected.key) atomicAdd(&shared.bins[key >> shift & digits], mass);
        }
        __syncthreads();
        // A thread has some neighbouring bins, thread 0 the highest.
        constexpr uint32_t OWN = BINS / ROW_THREADS;
        const uint32_t first = BINS - 1 - OWN * threadIdx.x;
        Mass own = 0;
#pragma unroll
        for (uint32_t i = 0; i < OWN; i++) own += shared.bins[first - i];
        Mass up_to = own;  // with all threads before
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes <<= 1) {
            const Mass other = __shfl_up_sync(0xffffffffu, up_to, lanes);
            if (threadIdx.x % 32 >= static_cast<uint32_t>(lanes)) up_to += other;
        }
        if (threadIdx.x % 32 == 31) shared.of_warps[threadIdx.x / 32] = up_to;
        __syncthreads();
        Mass all = 0;
#pragma unroll
        for (uint32_t warp = 0; warp < ROW_THREADS / 32; warp++) {
            if (warp == threadIdx.x / 32) up_to += all;
            all += shared.of_warps[warp];
        }
        if (digit == 0) {
            if (share != 0.0f) selected.target = share_of(all, share);
            if (all < selected.target) return selected;
        }
        const Mass wanted = selected.target - selected.above;
        if (up_to >= wanted && up_to - own < wanted) {
            Mass above = up_to - own;
            uint32_t bin = first;
            while (above + shared.bins[bin] < wanted) above += shared.bins[bin--];
            shared.bin = bin;
            shared.above = above;
            shared.at = shared.bins[bin];
        }
        __syncthreads();
        selected.key |= shared.bin << shift;
        selected.above += shared.above;
        selected.at = shared.at;
        known |= digits << shift;
    }
    selected.found = true;
    return selected;
}

// The highest of the `count` lowest token ids for which `wanted(token)`; there are as many.
template <class Wanted>
__device__ uint32_t last_of_lowest(RowShared& shared, uint32_t vocab, Mass count, Wanted wanted) {
    const Selected selected = select(shared, vocab, count, 0.0f, [&](uint32_t token, uint32_t& key, Mass& mass) {
        key = ~token;
        mass = 1;
        return wanted(token);
    });
    return ~selected.key;
}

}  // namespace quire
