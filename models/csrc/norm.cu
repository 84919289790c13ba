// RMS norm (Zhang & Sennrich, "Root Mean Square Layer Normalization", 2019) and layer norm (Ba et al., 2016) of rows, or of groups
// of their elements, alone or fused with the residual addition: entries [fused_add_]{rms,layer}_norm_<type>; and the residual
// addition alone: add_<type>.
//
// Norms: grid (rows, groups), 256 threads. The order in which a group is summed depends on its width alone.
// Addition: grid (rows, ceil(width / 2048)), 256 threads of eight elements each.

#include <quire/export.cuh>

#include "vectors.cuh"

namespace quire {

constexpr uint32_t NORM_THREADS = 256;
constexpr uint32_t NORM_WARPS = NORM_THREADS / 32;

struct NormShape {
    uint32_t width;    // elements of a group
    uint32_t stride;   // elements between rows
    uint32_t weights;  // number of weights: width, or as many as all groups have elements
    float eps;
    float scale;  // of what is added
};

// target = (x - mean) / sqrt(mean((x - mean)²) + eps) * weight + bias, where the mean is 0 without LAYER.
// With ADD: x += scale * target first, rounded to T after each operation, then target = the norm of x.
template <class T, bool ADD, bool LAYER>
__device__ __forceinline__ void norm(T* x, T* target, const float* weight, const float* bias, const NormShape& shape) {
    const uint32_t width = shape.width, group = blockIdx.y * width;
    const bool whole = width % 8 == 0 && shape.stride % 8 == 0;
    x += static_cast<int64_t>(blockIdx.x) * shape.stride + group;
    target += static_cast<int64_t>(blockIdx.x) * shape.stride + group;
    weight += group % shape.weights;
    if (bias) bias += group % shape.weights;
    float squares = 0.0f, sum = 0.0f, piece[8];
    for (uint32_t at = threadIdx.x * 8; at < width; at += NORM_THREADS * 8) {
        load_piece(x, at, width, whole, piece);
        if constexpr (ADD) {
            float added[8];
            load_piece(target, at, width, whole, added);
#pragma unroll
            for (uint32_t i = 0; i < 8; i++) piece[i] = rounded<T>(piece[i] + rounded<T>(__fmul_rn(added[i], shape.scale)));
            store_piece(x, at, width, whole, piece);
        }
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) {
            if constexpr (LAYER) sum += piece[i];
            else squares += piece[i] * piece[i];
        }
    }
    float mean = 0.0f;
    // Each thread reads only elements that it wrote itself, so no barrier is needed for them.
    if constexpr (LAYER) {
        mean = sum_of_block<NORM_WARPS>(sum) / static_cast<float>(width);
        for (uint32_t at = threadIdx.x * 8; at < width; at += NORM_THREADS * 8) {
            load_piece(x, at, width, whole, piece);
#pragma unroll
            for (uint32_t i = 0; i < 8; i++) {
                const float difference = at + i < width ? piece[i] - mean : 0.0f;
                squares += difference * difference;
            }
        }
        // The sums of the mean have been read before they are overwritten.
        __syncthreads();
    }
    const float factor = 1.0f / sqrtf(sum_of_block<NORM_WARPS>(squares) / static_cast<float>(width) + shape.eps);
    for (uint32_t at = threadIdx.x * 8; at < width; at += NORM_THREADS * 8) {
        float weights[8];
        load_piece(x, at, width, whole, piece);
        load_piece(weight, at, width, whole, weights);
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) piece[i] = (piece[i] - mean) * factor * weights[i];
        if (bias) {
            load_piece(bias, at, width, whole, weights);
#pragma unroll
            for (uint32_t i = 0; i < 8; i++) piece[i] += weights[i];
        }
        store_piece(target, at, width, whole, piece);
    }
}

// x += scale * y, rounded to T: the sum of norm<T, true, ..>.
template <class T>
__device__ __forceinline__ void add(T* x, const T* y, uint32_t width, float scale) {
    const uint32_t at = (blockIdx.y * NORM_THREADS + threadIdx.x) * 8;
    if (at >= width) return;
    const bool whole = width % 8 == 0;
    float sum[8], added[8];
    x += static_cast<int64_t>(blockIdx.x) * width;
    load_piece(x, at, width, whole, sum);
    load_piece(y + static_cast<int64_t>(blockIdx.x) * width, at, width, whole, added);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) sum[i] += rounded<T>(__fmul_rn(added[i], scale));
    store_piece(x, at, width, whole, sum);
}

}  // namespace quire

#define NORM(name, T, ADD, LAYER)                                                                                   \
    extern "C" __global__ void __launch_bounds__(quire::NORM_THREADS)                                               \
        name(void* x, void* target, const float* weight, const float* bias, const quire::NormShape shape) {         \
        quire::wait_for_launches();                                                                                 \
        quire::norm<T, ADD, LAYER>(static_cast<T*>(x), static_cast<T*>(target), weight, bias, shape);               \
    }                                                                                                               \
    QUIRE_EXPORT_OVERLAPPED(name, 0);

#define ADD_ROWS(name, T)                                                          \
    extern "C" __global__ void __launch_bounds__(quire::NORM_THREADS)              \
        name(void* x, const void* y, const uint32_t width, const float scale) {    \
        quire::wait_for_launches();                                                \
        quire::add<T>(static_cast<T*>(x), static_cast<const T*>(y), width, scale); \
    }                                                                              \
    QUIRE_EXPORT_OVERLAPPED(name, 0);

#define NORMS(type, T)                                     \
    NORM(rms_norm_##type, T, false, false)                 \
    NORM(layer_norm_##type, T, false, true)                \
    NORM(fused_add_rms_norm_##type, T, true, false)        \
    NORM(fused_add_layer_norm_##type, T, true, true)       \
    ADD_ROWS(add_##type, T)

NORMS(f16, __half)
NORMS(bf16, __nv_bfloat16)
NORMS(f32, float)
