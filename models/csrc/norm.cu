// RMS norm (Zhang & Sennrich, "Root Mean Square Layer Normalization", 2019) of rows, alone or behind the residual addition:
// entries rms_norm_<type> and add_norm_<type>; and that addition alone: add_<type>.
//
// Norms: grid (rows), 256 threads. A row's sum is one of the threads' shares in an order of its width alone.
// Addition: grid (rows, ceil(width / 2048)), 256 threads of eight elements each.

#include <quire/export.cuh>

#include "vectors.cuh"

namespace quire {

constexpr uint32_t NORM_THREADS = 256;
constexpr uint32_t NORM_WARPS = NORM_THREADS / 32;

struct NormShape {
    uint32_t width;
    float eps;
};
static_assert(sizeof(NormShape) == 8, "no hidden padding");

// The sum of every thread's value, for every thread.
__device__ __forceinline__ float sum_of_block(float value) {
    __shared__ float sums[NORM_WARPS];
    value = sum_over(value, 32);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (uint32_t warp = 0; warp < NORM_WARPS; warp++) total += sums[warp];
    return total;
}

// target = x / sqrt(mean(x²) + eps) * weight. With ADD: x += target first, rounded to T, and target becomes the norm of that.
template <class T, bool ADD>
__device__ __forceinline__ void norm(T* x, T* target, const float* weight, const NormShape& shape) {
    const uint32_t width = shape.width;
    const bool whole = width % 8 == 0;
    x += static_cast<int64_t>(blockIdx.x) * width;
    target += static_cast<int64_t>(blockIdx.x) * width;
    float squares = 0.0f, piece[8];
    for (uint32_t at = threadIdx.x * 8; at < width; at += NORM_THREADS * 8) {
        load_piece(x, at, width, whole, piece);
        if constexpr (ADD) {
            float added[8];
            load_piece(target, at, width, whole, added);
#pragma unroll
            for (uint32_t i = 0; i < 8; i++) piece[i] = rounded<T>(piece[i] + added[i]);
            store_piece(x, at, width, whole, piece);
        }
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) squares += piece[i] * piece[i];
    }
    const float factor = 1.0f / sqrtf(sum_of_block(squares) / static_cast<float>(width) + shape.eps);
    // What this thread wrote it also reads: no barrier.
    for (uint32_t at = threadIdx.x * 8; at < width; at += NORM_THREADS * 8) {
        float weights[8];
        load_piece(x, at, width, whole, piece);
        load_piece(weight, at, width, whole, weights);
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) piece[i] = piece[i] * factor * weights[i];
        store_piece(target, at, width, whole, piece);
    }
}

// x += y, rounded to T: the sum of norm<T, true>.
template <class T>
__device__ __forceinline__ void add(T* x, const T* y, const NormShape& shape) {
    const uint32_t width = shape.width, at = (blockIdx.y * NORM_THREADS + threadIdx.x) * 8;
    if (at >= width) return;
    const bool whole = width % 8 == 0;
    float sum[8], added[8];
    x += static_cast<int64_t>(blockIdx.x) * width;
    load_piece(x, at, width, whole, sum);
    load_piece(y + static_cast<int64_t>(blockIdx.x) * width, at, width, whole, added);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) sum[i] += added[i];
    store_piece(x, at, width, whole, sum);
}

}  // namespace quire

#define NORM(type, T)                                                                                     \
    extern "C" __global__ void __launch_bounds__(quire::NORM_THREADS)                                     \
        rms_norm_##type(void* x, void* target, const float* weight, const quire::NormShape shape) {       \
        quire::norm<T, false>(static_cast<T*>(x), static_cast<T*>(target), weight, shape);                \
    }                                                                                                     \
    QUIRE_EXPORT(rms_norm_##type);                                                                        \
    extern "C" __global__ void __launch_bounds__(quire::NORM_THREADS)                                     \
        add_norm_##type(void* x, void* target, const float* weight, const quire::NormShape shape) {       \
        quire::norm<T, true>(static_cast<T*>(x), static_cast<T*>(target), weight, shape);                 \
    }                                                                                                     \
    QUIRE_EXPORT(add_norm_##type);                                                                        \
    extern "C" __global__ void __launch_bounds__(quire::NORM_THREADS)                                     \
        add_##type(void* x, const void* y, const quire::NormShape shape) {                                \
        quire::add<T>(static_cast<T*>(x), static_cast<const T*>(y), shape);                               \
    }                                                                                                     \
    QUIRE_EXPORT(add_##type);

NORM(f16, __half)
NORM(bf16, __nv_bfloat16)
NORM(f32, float)
