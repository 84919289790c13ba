// RMS norm (Zhang & Sennrich, "Root Mean Square Layer Normalization", 2019) of rows, alone or fused with the residual addition:
// entries rms_norm_<type> and fused_add_rms_norm_<type>; and the residual addition alone: add_<type>.
//
// Norms: grid (rows), 256 threads. The order in which a row is summed depends on its width alone.
// Addition: grid (rows, ceil(width / 2048)), 256 threads of eight elements each.

#include <quire/export.cuh>

#include "vectors.cuh"

namespace quire {

constexpr uint32_t NORM_THREADS = 256;
constexpr uint32_t NORM_WARPS = NORM_THREADS / 32;

// Returns the sum of the values of all threads to every thread.
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

// target = x / sqrt(mean(x²) + eps) * weight. With ADD: x += target first, rounded to T, then target = the norm of x.
template <class T, bool ADD>
__device__ __forceinline__ void rms_norm(T* x, T* target, const float* weight, uint32_t width, float eps) {
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
    const float factor = 1.0f / sqrtf(sum_of_block(squares) / static_cast<float>(width) + eps);
    // Each thread reads only elements that it wrote itself, so no barrier is needed.
    for (uint32_t at = threadIdx.x * 8; at < width; at += NORM_THREADS * 8) {
        float weights[8];
        load_piece(x, at, width, whole, piece);
        load_piece(weight, at, width, whole, weights);
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) piece[i] = piece[i] * factor * weights[i];
        store_piece(target, at, width, whole, piece);
    }
}

// x += y, rounded to T: the sum of rms_norm<T, true>.
template <class T>
__device__ __forceinline__ void add(T* x, const T* y, uint32_t width) {
    const uint32_t at = (blockIdx.y * NORM_THREADS + threadIdx.x) * 8;
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

#define RMS_NORM(name, T, ADD)                                                                    \
    extern "C" __global__ void __launch_bounds__(quire::NORM_THREADS)                             \
        name(void* x, void* target, const float* weight, const uint32_t width, const float eps) { \
        quire::rms_norm<T, ADD>(static_cast<T*>(x), static_cast<T*>(target), weight, width, eps); \
    }                                                                                             \
    QUIRE_EXPORT(name);

#define ADD_ROWS(name, T)                                                   \
    extern "C" __global__ void __launch_bounds__(quire::NORM_THREADS)       \
        name(void* x, const void* y, const uint32_t width) {                \
        quire::add<T>(static_cast<T*>(x), static_cast<const T*>(y), width); \
    }                                                                       \
    QUIRE_EXPORT(name);

RMS_NORM(rms_norm_f16, __half, false)
RMS_NORM(rms_norm_bf16, __nv_bfloat16, false)
RMS_NORM(rms_norm_f32, float, false)
RMS_NORM(fused_add_rms_norm_f16, __half, true)
RMS_NORM(fused_add_rms_norm_bf16, __nv_bfloat16, true)
RMS_NORM(fused_add_rms_norm_f32, float, true)
ADD_ROWS(add_f16, __half)
ADD_ROWS(add_bf16, __nv_bfloat16)
ADD_ROWS(add_f32, float)
