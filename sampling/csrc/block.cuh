// Block-wide operations: folds, passes over a row, and the selection behind all cuts.
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

// Returns the sum of the values of the threads before this one, and in `all` that of all threads.
template <uint32_t THREADS>
__device__ __forceinline__ Mass block_scan(Mass own, Mass* warp_values, Mass& all) {
    const uint32_t lane = threadIdx.x % 32;
    Mass up_to = own;
#pragma unroll
    for (uint32_t lanes = 1; lanes < 32; lanes <<= 1) {
        const Mass other = __shfl_up_sync(0xffffffffu, up_to, lanes);
        if (lane >= lanes) up_to += other;
    }
    __syncthreads();  // wait for the readers of the previous fold
    if (lane == 31) warp_values[threadIdx.x / 32] = up_to;
    __syncthreads();
    all = 0;
#pragma unroll
    for (uint32_t warp = 0; warp < THREADS / 32; warp++) {
        if (warp == threadIdx.x / 32) up_to += all;
        all += warp_values[warp];
    }
    return up_to - own;
}

// Calls `use(at, token, values)` for the positions `begin` to `end` of a row, which are multiples of 16 bytes or the end
// of the row: each thread loads 16 bytes at a time, at position `at`, of which `token` is the token. Of a load across an
// end of the row, values outside are 0. Skips rounds for which `wanted(round)` is false; that must not differ within a warp.
template <uint32_t THREADS, class T, class Wanted, class Use>
__device__ __forceinline__ void each_vector(const Values<T>& row, uint32_t begin, uint32_t end, Wanted wanted, Use use) {
    constexpr uint32_t WIDTH = Values<T>::WIDTH;
    for (uint32_t first = begin, round = 0; first < end; first += THREADS * WIDTH, round++) {
        if (!wanted(round)) continue;
        const uint32_t at = first + threadIdx.x * WIDTH, token = at - row.phase;
        alignas(16) T values[WIDTH] = {};
        if (row.whole(token)) {
            *reinterpret_cast<uint4*>(values) = *reinterpret_cast<const uint4*>(row.tokens + token);
        } else {
#pragma unroll
            for (uint32_t i = 0; i < WIDTH; i++) {
                if (token + i < row.vocab) values[i] = row[token + i];
            }
        }
        use(at, token, values);
    }
}

// Calls `use(token, value)` for the tokens at the positions `begin` to `end` of a row.
template <uint32_t THREADS, class T, class Wanted, class Use>
__device__ __forceinline__ void each_token(const Values<T>& row, uint32_t begin, uint32_t end, Wanted wanted, Use use) {
    each_vector<THREADS>(row, begin, end, wanted, [&](uint32_t, uint32_t token, const auto& values) {
#pragma unroll
        for (uint32_t i = 0; i < Values<T>::WIDTH; i++) {
            if (token + i < row.vocab) use(token + i, to_float(values[i]));
        }
    });
}

struct Always {
    __device__ __forceinline__ bool operator()(uint32_t) const { return true; }
};

// The same for all tokens of a row.
template <class T, class Use>
__device__ __forceinline__ void each_token(const Values<T>& row, Use use) {
    each_token<ROW_THREADS>(row, 0, row.end(), Always(), use);
}

// A histogram in shared memory. Sums have two words, because shared memory has no atomic addition of 64 bits.
template <uint32_t BINS>
struct Bins {
    uint32_t low[BINS], high[BINS];

    template <uint32_t THREADS>
    __device__ __forceinline__ void clear() {
        for (uint32_t i = threadIdx.x; i < BINS; i += THREADS) low[i] = high[i] = 0;
    }
    __device__ __forceinline__ void add(uint32_t bin, Mass mass) {
        if (!mass) return;
        const uint32_t part = static_cast<uint32_t>(mass), before = atomicAdd(&low[bin], part);
        const uint32_t rest = static_cast<uint32_t>(mass >> 32) + (before + part < part);
        if (rest) atomicAdd(&high[bin], rest);
    }
    __device__ __forceinline__ Mass operator[](uint32_t bin) const { return static_cast<Mass>(high[bin]) << 32 | low[bin]; }
};

// Shared memory of a block that processes a whole row. The digits of a key have 11, 11 and 10 bits.
struct RowShared {
    Bins<2048> bins;
    Mass warp_values[ROW_THREADS / 32];
    Mass above, at;
    uint32_t bin;
};

// Result of a selection.
struct Selected {
    bool found;    // whether the elements have the wanted mass
    uint32_t key;  // the least key needed
    Mass above;    // mass of the greater keys: less than the target
    Mass at;       // mass of this key; above + at is at least the target
};

// Finds the greatest key such that it and the greater ones have the mass `target`. `each_element(use)` calls
// `use(key, mass)` for the elements of this thread.
//
// Builds a histogram per digit of the key, from the highest. Each histogram covers the bin in which the one before
// reached the mass.
template <class EachElement>
__device__ Selected select(RowShared& shared, Mass target, EachElement each_element) {
    Selected selected = {false, 0, 0, 0};
    uint32_t known = 0;  // bits of the key found so far
#pragma unroll 1
    for (int digit = 0; digit < 3; digit++) {
        const int shift = digit == 0 ? 21 : digit == 1 ? 10 : 0;
        const uint32_t digits = digit == 2 ? 1023 : 2047;
        __syncthreads();
        shared.bins.clear<ROW_THREADS>();
        __syncthreads();
        each_element([&](uint32_t key, Mass mass) {
            if ((key & known) == selected.key) shared.bins.add(key >> shift & digits, mass);
        });
        __syncthreads();
        // Each thread sums some neighbouring bins, thread 0 the highest.
        constexpr uint32_t OWN = 2048 / ROW_THREADS;
        const uint32_t first = 2047 - OWN * threadIdx.x;
        Mass own = 0, all;
#pragma unroll
        for (uint32_t i = 0; i < OWN; i++) own += shared.bins[first - i];
        Mass above = block_scan<ROW_THREADS>(own, shared.warp_values, all);
        if (digit == 0 && all < target) return selected;
        const Mass wanted = target - selected.above;
        if (above < wanted && above + own >= wanted) {
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

// Returns the highest of the `count` lowest token ids. `each_id(use)` calls `use(token)` for those of this thread, of which
// there are at least `count` in all.
template <class EachId>
__device__ uint32_t last_of_lowest(RowShared& shared, Mass count, EachId each_id) {
    const Selected selected = select(shared, count, [&](const auto& use) {
        each_id([&](uint32_t token) { use(~token, Mass(1)); });
    });
    return ~selected.key;
}

}  // namespace quire
