// read_memory: measures the read bandwidth of a GPU for `quire bench`. The engine does not launch it.
//
// Grid of any size, 256 threads: threads read 16 bytes at a time, with four vectors in flight. Each block writes the xor
// of all words that it has read to its own word of `sums`, so no read can be optimised away.

#include <quire/export.cuh>

#include <stdint.h>

namespace quire {

constexpr uint32_t READ_THREADS = 256, IN_FLIGHT = 4;

__device__ __forceinline__ uint32_t fold(const uint4& vector) { return vector.x ^ vector.y ^ vector.z ^ vector.w; }

__device__ __forceinline__ void read_memory(const uint4* source, uint32_t* sums, int64_t vectors) {
    __shared__ uint32_t of_warp[READ_THREADS / 32];
    const int64_t threads = static_cast<int64_t>(gridDim.x) * READ_THREADS;
    int64_t i = static_cast<int64_t>(blockIdx.x) * READ_THREADS + threadIdx.x;
    uint32_t sum = 0;
    for (; i + (IN_FLIGHT - 1) * threads < vectors; i += IN_FLIGHT * threads) {
        uint4 read[IN_FLIGHT];
#pragma unroll
        for (uint32_t k = 0; k < IN_FLIGHT; k++) read[k] = source[i + k * threads];
#pragma unroll
        for (uint32_t k = 0; k < IN_FLIGHT; k++) sum ^= fold(read[k]);
    }
    for (; i < vectors; i += threads) sum ^= fold(source[i]);
#pragma unroll
    for (int offset = 16; offset; offset /= 2) sum ^= __shfl_xor_sync(0xffffffff, sum, offset);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (uint32_t w = 1; w < READ_THREADS / 32; w++) sum ^= of_warp[w];
        sums[blockIdx.x] = sum;
    }
}

}  // namespace quire

extern "C" __global__ void __launch_bounds__(quire::READ_THREADS)
    read_memory(const void* source, uint32_t* sums, const int64_t vectors) {
    quire::read_memory(static_cast<const uint4*>(source), sums, vectors);
}
QUIRE_EXPORT(read_memory);
