// Indices, barriers, shuffles, votes, atomics and shared memory. Every kernel writes what its threads observe.
#include <quire/export.cuh>
#include <stdint.h>

__device__ __forceinline__ int linear_thread() {
    const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    return block * static_cast<int>(blockDim.x * blockDim.y * blockDim.z) + thread;
}

// The dynamic shared memory of the block.
__device__ __forceinline__ unsigned char* dynamic_shared() {
    extern __shared__ __align__(16) unsigned char smem[];
    return smem;
}

// Reverses a block's values at the end of dynamic shared memory, of which the kernel itself says how much it needs.
constexpr uint32_t OWN_SHARED = 64 << 10;
extern "C" __global__ void reverse_in_own_shared(int32_t* values) {
    int32_t* end = reinterpret_cast<int32_t*>(dynamic_shared() + OWN_SHARED);
    end[-1 - static_cast<int>(threadIdx.x)] = values[threadIdx.x];
    __syncthreads();
    values[threadIdx.x] = (end - blockDim.x)[threadIdx.x];
}
QUIRE_EXPORT_SHARED(reverse_in_own_shared, OWN_SHARED);

// A struct passed by value, with explicit padding.
struct Affine {
    int64_t offset;
    int32_t factor;
    int32_t padding;
};
extern "C" __global__ void indices(int64_t* out, Affine map, float ignored) {
    out[linear_thread()] = static_cast<int64_t>(linear_thread()) * map.factor + map.offset + (ignored > 0);
}
QUIRE_EXPORT(indices);

// Sums the values of the block through both kinds of shared memory, 8 times.
extern "C" __global__ void block_sums(int* out, const int* in) {
    __shared__ int of_warp[32];
    int* values = reinterpret_cast<int*>(dynamic_shared());
    int total = 0;
    for (int round = 0; round < 8; round++) {
        values[threadIdx.x] = in[linear_thread()] + round;
        __syncthreads();
        int sum = values[blockDim.x - 1 - threadIdx.x];
#pragma unroll
        for (int lanes = 16; lanes; lanes >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
        __syncthreads();
        for (unsigned warp = 0; warp < blockDim.x / 32; warp++) total += of_warp[warp];
        __syncthreads();
    }
    out[linear_thread()] = total;
}
QUIRE_EXPORT(block_sums);

// Reads shared memory before it is written. `write` leaves values for the next block.
extern "C" __global__ void fresh_shared(float* out, int write) {
    __shared__ float fixed[32];
    float* dynamic = reinterpret_cast<float*>(dynamic_shared());
    out[2 * linear_thread()] = fixed[threadIdx.x];
    out[2 * linear_thread() + 1] = dynamic[threadIdx.x];
    if (write) fixed[threadIdx.x] = dynamic[threadIdx.x] = 1.0f;
}
QUIRE_EXPORT(fresh_shared);

// Eight results per lane: every kind of shuffle of 32 and 64 bits, of whole warps and of segments.
extern "C" __global__ void shuffles(int64_t* out, int by, int width) {
    const int value = static_cast<int>(threadIdx.x) * 3 + 1;
    const int64_t wide = (static_cast<int64_t>(value) << 33) + 5;
    int64_t* mine = out + 8 * threadIdx.x;
    mine[0] = __shfl_sync(0xffffffffu, value, by, width);
    mine[1] = __shfl_xor_sync(0xffffffffu, value, by, width);
    mine[2] = __shfl_down_sync(0xffffffffu, value, by, width);
    mine[3] = __shfl_up_sync(0xffffffffu, value, by, width);
    mine[4] = __shfl_sync(0xffffffffu, wide, by, width);
    mine[5] = __shfl_xor_sync(0xffffffffu, wide, by, width);
    mine[6] = __shfl_down_sync(0xffffffffu, wide, by, width);
    mine[7] = static_cast<int64_t>(__shfl_up_sync(0xffffffffu, static_cast<float>(value), by, width));
}
QUIRE_EXPORT(shuffles);

// Groups of eight lanes reduce separately; group 3 runs one more round than the others.
extern "C" __global__ void groups(int* out) {
    const unsigned group = threadIdx.x / 8, mask = 0xffu << (8 * group);
    int value = static_cast<int>(threadIdx.x);
    for (int lanes = 4; lanes; lanes >>= 1) value += __shfl_xor_sync(mask, value, lanes);
    if (group == 3) value = __shfl_sync(mask, value + static_cast<int>(threadIdx.x), 31, 8);
    __syncwarp();
    out[threadIdx.x] = value;
}
QUIRE_EXPORT(groups);

extern "C" __global__ void votes(unsigned* out) {
    const int odd = threadIdx.x & 1, lane = static_cast<int>(threadIdx.x % 32);
    unsigned* mine = out + 8 * threadIdx.x;
    mine[0] = __ballot_sync(0xffffffffu, odd);
    mine[1] = static_cast<unsigned>(__any_sync(0xffffffffu, lane == 7));
    mine[2] = static_cast<unsigned>(__all_sync(0xffffffffu, lane < 31));
    mine[3] = static_cast<unsigned>(__syncthreads_count(odd));
    mine[4] = static_cast<unsigned>(__syncthreads_or(threadIdx.x == 40));
    mine[5] = static_cast<unsigned>(__syncthreads_and(threadIdx.x != 40));
    mine[6] = __match_any_sync(0xffffffffu, lane % 5);
    mine[7] = static_cast<unsigned>(__reduce_max_sync(0xffffffffu, lane ^ 21)) +
              (__reduce_add_sync(0xffffffffu, 2u) << 8);
}
QUIRE_EXPORT(votes);

// All threads of all blocks count, add, compare and swap; the last block to arrive detects that it is the last.
extern "C" __global__ void atomics(unsigned* counts, float* sum, int* extremes, unsigned long long* bits) {
    __shared__ unsigned arrived;
    if (threadIdx.x == 0) arrived = 0;
    __syncthreads();
    atomicAdd(&arrived, 1);
    atomicAdd(&counts[threadIdx.x % 4], 1);
    atomicAdd(sum, 0.5f);
    atomicMax(&extremes[0], linear_thread());
    atomicMin(&extremes[1], -linear_thread());
    atomicOr(bits, 1ull << (threadIdx.x % 64));
    // A lock-free multiplication, modulo 2^32.
    unsigned seen = 0, expected;
    do {
        expected = seen;
        seen = atomicCAS(&counts[4], expected, expected * 3);
    } while (seen != expected);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        if (atomicAdd(&counts[5], arrived) == arrived * (gridDim.x - 1)) atomicExch(&counts[6], 77);
        atomicInc(&counts[7], 2);
    }
}
QUIRE_EXPORT(atomics);

// Adds one in place, for launches from several threads at once.
extern "C" __global__ void add_one(int* values) { values[linear_thread()]++; }
QUIRE_EXPORT(add_one);
