// Block-wide operations: folds, and the selection behind all cuts.
//
// All threads of the block must call each function. Sums are of integers, so their order does not matter.
#pragma once

#include "numbers.cuh"

namespace quire {

__device__ __forceinline__ Mass from_lane_xor(Mass value, int lanes) { return __shfl_xor_sync(0xffffffffu, value, lanes); }

// Returns the fold of all threads' values to every thread. `warp_values` is shared memory with one element per warp.
template <uint32_t THREADS, class V, class Fold>
__device__ __forceinline__ V block_fold(V value, V* warp_values, Fold fold) {
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) value = fold(value, from_lane_xor(value, lanes));
    __syncthreads();  // wait for the readers of the previous fold
    if (threadIdx.x % 32 == 0) warp_values[threadIdx.x / 32] = value;
    __syncthreads();
    V all = warp_values[0];
#pragma unroll
    for (uint32_t warp = 1; warp < THREADS / 32; warp++) all = fold(all, warp_values[warp]);
    return all;
}

struct Greater {
    __device__ __forceinline__ Mass operator()(Mass a, Mass b) const { return a > b ? a : b; }
};
struct Sum {
    __device__ __forceinline__ Mass operator()(Mass a, Mass b) const { return a + b; }
};

// Bins of a selection's histogram. The digits of a key have 11, 11 and 10 bits.
constexpr uint32_t BINS = 2048;

// Shared memory of a block that processes a whole row.
struct RowShared {
    Mass bins[BINS];
    Mass warp_values[ROW_THREADS / 32];
    Mass before[ROW_THREADS / 32];
    Mass above, at;
    uint32_t bin;
};

// Result of a selection.
struct Selected {
    bool found;    // whether the elements have the wanted mass
    uint32_t key;  // the least key needed
    Mass target;
    Mass above;    // mass of the greater keys: less than the target
    Mass at;       // mass of this key; above + at is at least the target
};

// Finds the greatest key such that it and the greater ones have the wanted mass: `target`, or the fraction `share` of
// the total mass if that is not 0. `element(i, key, mass)` returns whether element i of `count` takes part, and its key
// and mass.
//
// Builds a histogram per digit of the key, from the highest. Each histogram covers the bin in which the one before
// reached the mass.
template <class Element>
__device__ Selected select(RowShared& shared, uint32_t count, Mass target, float share, Element element) {
    Selected selected = {false, 0, target, 0, 0};
    uint32_t known = 0;  // bits of the key found so far
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
        // Each thread sums some neighbouring bins, thread 0 the highest.
        constexpr uint32_t OWN = BINS / ROW_THREADS;
        const uint32_t first = BINS - 1 - OWN * threadIdx.x;
        Mass own = 0;
#pragma unroll
        for (uint32_t i = 0; i < OWN; i++) own += shared.bins[first - i];
        Mass up_to = own;  // prefix sum over the threads
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes <<= 1) {
            const Mass other = __shfl_up_sync(0xffffffffu, up_to, lanes);
            if (threadIdx.x % 32 >= static_cast<uint32_t>(lanes)) up_to += other;
        }
        if (threadIdx.x % 32 == 31) shared.warp_values[threadIdx.x / 32] = up_to;
        __syncthreads();
        Mass all = 0;
#pragma unroll
        for (uint32_t warp = 0; warp < ROW_THREADS / 32; warp++) {
            if (warp == threadIdx.x / 32) up_to += all;
            all += shared.warp_values[warp];
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

// Returns the highest of the `count` lowest token ids for which `wanted(token)` holds. At least `count` tokens must
// satisfy it.
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
