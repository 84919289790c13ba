// Up to eight neighbouring elements of a row, in one vector where the row's address allows it, else one by one.
//
// A row is `whole` when it starts at a multiple of 16 bytes and every piece of it has eight elements: when its width, and so
// every row's start, is a multiple of eight elements. Widths are a model's; any will do.
#pragma once

#include "eight.cuh"

namespace quire {

// Elements at..at+8 of a row of `width`; zero past its end.
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

// What stays of a float in a T.
template <class T>
__device__ __forceinline__ float rounded(float value) {
    return to_float(from_float<T>(value));
}

// The sum over `lanes` neighbouring threads of a warp, a power of two, in an order that depends on `lanes` alone. All 32
// take part.
__device__ __forceinline__ float sum_over(float value, uint32_t lanes) {
    for (uint32_t step = lanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

}  // namespace quire
