// Which rows a block of the linear kernels multiplies, with experts and without.
#pragma once

#include <stdint.h>

#include "linear_args.cuh"

namespace quire {

// Rows, or assignments of an expert, that a block multiplies.
struct LinearPart {
    uint32_t expert;
    uint32_t first;
    uint32_t count;  // 0: there is no such part
};

// The part of a block where there are no experts, each of `most` rows but the last one.
__device__ __forceinline__ LinearPart part_of_rows(uint32_t most, const LinearShape& shape) {
    const uint32_t first = blockIdx.y * most;
    return {0, first, min(most, shape.rows - first)};
}

// All lanes of a warp must call it.
__device__ __forceinline__ LinearPart find_part(const uint32_t* starts, uint32_t most, const LinearShape& shape) {
    const uint32_t lane = threadIdx.x % 32, index = blockIdx.y;
    if (shape.experts == 0) return part_of_rows(most, shape);
    uint32_t before = 0;
    for (uint32_t block = 0; block < shape.experts; block += 32) {
        const uint32_t expert = min(block + lane, shape.experts - 1);
        const uint32_t begin = starts[expert], end = block + lane < shape.experts ? starts[expert + 1] : begin;
        const uint32_t parts = (end - begin + most - 1) / most;
        uint32_t sum = parts;
#pragma unroll
        for (uint32_t step = 1; step < 32; step *= 2) {
            const uint32_t other = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += other;
        }
        const uint32_t found = __ballot_sync(~0u, before + sum > index);
        if (found != 0) {
            const int holder = __ffs(static_cast<int>(found)) - 1;
            const uint32_t at = begin + (index - (before + sum - parts)) * most;
            const uint32_t first = __shfl_sync(~0u, at, holder), last = __shfl_sync(~0u, end, holder);
            return {block + holder, first, min(most, last - first)};
        }
        before += __shfl_sync(~0u, sum, 31);
    }
    return {0, 0, 0};
}

}  // namespace quire
