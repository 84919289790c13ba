// Kernels that are wrong on purpose. A comment `// here: <name>` marks the line that the report must name.
#include <cuda_fp16.h>
#include <quire/export.cuh>
#include <quire/ptx.cuh>

// The dynamic shared memory of the block.
__device__ __forceinline__ unsigned char* dynamic_shared() {
    extern __shared__ __align__(16) unsigned char smem[];
    return smem;
}

extern "C" __global__ void divergent_barrier(int* out) {
    if (threadIdx.x < 64) {
        __syncthreads();
    } else {
        __syncthreads();  // here: divergent_barrier
    }
    out[threadIdx.x] = 1;
}
QUIRE_EXPORT(divergent_barrier);

extern "C" __global__ void barrier_after_exit(int* out) {
    if (threadIdx.x >= 100) return;
    __syncthreads();  // here: barrier_after_exit
    out[threadIdx.x] = 1;
}
QUIRE_EXPORT(barrier_after_exit);

extern "C" __global__ void deadlock(int* out) {
    if (threadIdx.x % 2) {
        __syncwarp();  // here: deadlock
    } else {
        __syncthreads();
    }
    out[threadIdx.x] = 1;
}
QUIRE_EXPORT(deadlock);

extern "C" __global__ void exited_lane(int* out) {
    if (threadIdx.x == 5) return;
    __syncwarp(0xffffffdfu);
    out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 1);  // here: exited_lane
}
QUIRE_EXPORT(exited_lane);

extern "C" __global__ void not_in_mask(int* out) {
    out[threadIdx.x] = __any_sync(0x0000ffffu, 1);  // here: not_in_mask
}
QUIRE_EXPORT(not_in_mask);

extern "C" __global__ void divergent_shuffle(int* out, int length) {
    int value = static_cast<int>(threadIdx.x);
    if (static_cast<int>(threadIdx.x) < length) {
        value += __shfl_down_sync(0xffffffffu, value, 1);
    } else {
        value += __shfl_up_sync(0xffffffffu, value, 1);
    }
    out[threadIdx.x] = value;
}
QUIRE_EXPORT(divergent_shuffle);

extern "C" __global__ void lane_outside(int* out) {
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffffu, 1, 20);  // here: lane_outside
}
QUIRE_EXPORT(lane_outside);

extern "C" __global__ void misaligned_copy(int* out) {
    quire::cp_async16(dynamic_shared(), out + 1);  // here: misaligned_copy
}
QUIRE_EXPORT(misaligned_copy);

extern "C" __global__ void trap(int* out) {
    if (out[0] == 0) __trap();  // here: trap
}
QUIRE_EXPORT(trap);

// Each thread writes a number for its neighbour.
extern "C" __global__ void read_too_early(float* out) {
    __shared__ float left[128];
    left[threadIdx.x] = static_cast<float>(threadIdx.x);  // here: read_too_early
    out[threadIdx.x] = left[(threadIdx.x + 1) % blockDim.x];
}
QUIRE_EXPORT(read_too_early);

// The first number is read in the same round in which the next one is written.
extern "C" __global__ void write_too_early(float* out) {
    __shared__ float first;
    float sum = 0.0f;
    for (int round = 0; round < 4; round++) {
        if (threadIdx.x == 0) first = static_cast<float>(round);  // here: write_too_early
        __syncthreads();
        sum += first;
    }
    out[threadIdx.x] = sum;
}
QUIRE_EXPORT(write_too_early);

extern "C" __global__ void no_wait(float* out, const float* in) {
    float* copied = reinterpret_cast<float*>(dynamic_shared()) + 4 * threadIdx.x;
    quire::cp_async16(copied, in + 4 * threadIdx.x);
    quire::cp_async_commit();
    out[threadIdx.x] = copied[0];
}
QUIRE_EXPORT(no_wait);

extern "C" __global__ void waits_first(int* out, const int* in) {
    quire::wait_for_launches();
    out[threadIdx.x] = in[threadIdx.x];
}
QUIRE_EXPORT_TILED(waits_first, 0, 96, 7);

extern "C" __global__ void waits_after_a_read(int* out, const int* in) {
    const int value = in[threadIdx.x];
    quire::wait_for_launches();
    out[threadIdx.x] = value;
}
QUIRE_EXPORT_OVERLAPPED(waits_after_a_read, 0);

// A thread without work leaves.
extern "C" __global__ void one_never_waits(int* out, const int* in) {
    if (threadIdx.x == 5) return;
    quire::wait_for_launches();
    out[threadIdx.x] = in[threadIdx.x];
}
QUIRE_EXPORT_OVERLAPPED(one_never_waits, 0);

extern "C" __global__ void beyond_global(int* out, int offset) {
    out[threadIdx.x + static_cast<unsigned>(offset)] = 1;  // here: beyond_global
}
QUIRE_EXPORT(beyond_global);

extern "C" __global__ void beyond_dynamic_shared(int* out) {
    int* values = reinterpret_cast<int*>(dynamic_shared());
    values[threadIdx.x + 1] = 1;  // here: beyond_dynamic_shared
    out[threadIdx.x] = values[threadIdx.x + 1];
}
QUIRE_EXPORT(beyond_dynamic_shared);

extern "C" __global__ void beyond_fixed_shared(int* out, int offset) {
    __shared__ int values[128];
    values[threadIdx.x + static_cast<unsigned>(offset)] = 1;  // here: beyond_fixed_shared
    out[threadIdx.x] = values[threadIdx.x];
}
QUIRE_EXPORT(beyond_fixed_shared);

extern "C" __global__ void misaligned_load(int* out, int offset) {
    const uint4 four = *reinterpret_cast<const uint4*>(out + offset);  // here: misaligned_load
    out[threadIdx.x] = static_cast<int>(four.x);
}
QUIRE_EXPORT(misaligned_load);
