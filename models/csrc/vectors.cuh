// Loads and stores of up to eight neighbouring elements of a row, as one vector where the address allows it.
//
// A row is `whole` if its width is a multiple of eight elements: then it starts at a multiple of 16 bytes, and every piece has
// eight elements.
#pragma once

#include "eight.cuh"

namespace quire {

// Loads elements at..at+8 of a row of `width`; zeros past its end.
template <class T>
__device__ __forceinline__ void load_piece(const T* row, uint32_t at, uint32_t width, bool whole, float (&to)[8]) {
    if (whole) {
        Eight<T> piece;
        piece.load(row + at);
        piece.get(to);
    } else {
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) to[i] = at + i < width ? to_float(row[at + i]) : 0.0f;
    }
}

template <class T>
__device__ __forceinline__ void store_piece(T* row, uint32_t at, uint32_t width, bool whole, const float (&from)[8]) {
    if (whole) {
        Eight<T> piece;
        piece.set(from);
        piece.store(row + at);
    } else {
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) {
            if (at + i < width) row[at + i] = from_float<T>(from[i]);
        }
    }
}

// Rounds to T.
template <class T>
__device__ __forceinline__ float rounded(float value) {
    return to_float(from_float<T>(value));
}

// Sums over `lanes` neighbouring threads of a warp, a power of two, in an order that depends on `lanes` alone. All 32 threads
// of the warp must call it.
__device__ __forceinline__ float sum_over(float value, uint32_t lanes) {
    for (uint32_t step = lanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

// Returns the sum of the values of all threads of a block of `WARPS` warps to every thread. Between two calls the block must wait.
template <uint32_t WARPS>
__device__ __forceinline__ float sum_of_block(float value) {
    __shared__ float sums[WARPS];
    value = sum_over(value, 32);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (uint32_t warp = 0; warp < WARPS; warp++) total += sums[warp];
    return total;
}

}  // namespace quire
