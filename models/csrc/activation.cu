// Gated activations of a feed-forward network: entries silu_and_mul_<type> and gelu_tanh_and_mul_<type>.
//
// Grid (rows, ceil(width / 2048)), 256 threads of eight elements each.

#include <quire/export.cuh>
#include <math.h>

#include "vectors.cuh"

namespace quire {

constexpr uint32_t ACTIVATION_THREADS = 256;

// x * sigmoid(x). exp(-|x|) never overflows.
__device__ __forceinline__ float silu(float x) {
    const float e = expf(-fabsf(x));
    return x * ((x >= 0.0f ? 1.0f : e) / (1.0f + e));
}

// Hendrycks & Gimpel, "Gaussian Error Linear Units", 2016: the approximation with tanh.
__device__ __forceinline__ float gelu_tanh(float x) {
    const float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + tanhf(inner));
}

// gate_up: [rows, 2 * width], each row its gate values, then its up values; target: [rows, width].
template <class T, float (*activate)(float)>
__device__ __forceinline__ void act_and_mul(const T* gate_up, T* target, uint32_t width) {
    const uint32_t at = (blockIdx.y * ACTIVATION_THREADS + threadIdx.x) * 8;
    if (at >= width) return;
    const bool whole = width % 8 == 0;
    const T* gates = gate_up + static_cast<int64_t>(blockIdx.x) * 2 * width;
    float gate[8], up[8];
    load_piece(gates, at, width, whole, gate);
    load_piece(gates + width, at, width, whole, up);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) up[i] *= activate(gate[i]);
    store_piece(target + static_cast<int64_t>(blockIdx.x) * width, at, width, whole, up);
}

}  // namespace quire

#define ACT_AND_MUL(activation, type, T)                                                       \
    extern "C" __global__ void __launch_bounds__(quire::ACTIVATION_THREADS)                    \
        activation##_and_mul_##type(const void* gate_up, void* target, const uint32_t width) { \
        quire::act_and_mul<T, quire::activation>(                                              \
            static_cast<const T*>(gate_up), static_cast<T*>(target), width);                   \
    }                                                                                          \
    QUIRE_EXPORT(activation##_and_mul_##type);

ACT_AND_MUL(silu, f16, __half)
ACT_AND_MUL(silu, bf16, __nv_bfloat16)
ACT_AND_MUL(silu, f32, float)
ACT_AND_MUL(gelu_tanh, f16, __half)
ACT_AND_MUL(gelu_tanh, bf16, __nv_bfloat16)
ACT_AND_MUL(gelu_tanh, f32, float)
