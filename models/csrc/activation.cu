// Activations of a feed-forward network, with or without a gate: entries activate_<type>. Gates of the output of attention:
// entries gate_<type>. Clamping of queries, keys and values: entries clamp_<type>. Factors of rows: entries scale_<type>. Scale and
// cap of logits: entry finish_logits.
//
// Grid (rows, ceil(width / 2048)), 256 threads of eight elements each.

#include <quire/export.cuh>
#include <math.h>

#include "vectors.cuh"

namespace quire {

constexpr uint32_t ACTIVATION_THREADS = 256;

enum Activation : uint32_t { SILU, GELU, GELU_TANH, RELU, RELU2, CLAMPED_SWIGLU, XIELU };

struct ActivationShape {
    uint32_t width;
    uint32_t gate_stride;  // elements between rows
    uint32_t up_stride;
    uint32_t activation;   // an Activation
    float limit;           // of CLAMPED_SWIGLU; of XIELU the factor of the square
    float negative;        // of XIELU: factor of the integral, slope at 0, greatest exponent
    float beta;
    float eps;
};

// exp(-|x|) never overflows.
__device__ __forceinline__ float sigmoid(float x) {
    const float e = expf(-fabsf(x));
    return (x >= 0.0f ? 1.0f : e) / (1.0f + e);
}

__device__ __forceinline__ float activate(float gate, float up, const ActivationShape& shape) {
    switch (shape.activation) {
        case SILU: return up * (gate * sigmoid(gate));
        // Hendrycks & Gimpel, "Gaussian Error Linear Units", 2016: exact, and the approximation with tanh.
        case GELU: return up * (0.5f * gate * (1.0f + erff(gate * 0.7071067811865476f)));
        case GELU_TANH: {
            const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
            return up * (0.5f * gate * (1.0f + tanhf(inner)));
        }
        case RELU: return up * fmaxf(gate, 0.0f);
        case RELU2: return up * (fmaxf(gate, 0.0f) * fmaxf(gate, 0.0f));
        case XIELU: {
            const float x = gate;
            const float curve = x > 0.0f ? shape.limit * x * x : shape.negative * (expm1f(fminf(x, shape.eps)) - x);
            return up * (curve + shape.beta * x);
        }
        default: {
            const float g = fminf(gate, shape.limit), u = fminf(fmaxf(up, -shape.limit), shape.limit);
            return (u + 1.0f) * (g * sigmoid(1.702f * g));
        }
    }
}

// gates, ups: rows of width elements; without ups they are 1; target: [rows, width].
template <class T>
__device__ __forceinline__ void activate_rows(const T* gates, const T* ups, T* target, const ActivationShape& shape) {
    const uint32_t at = (blockIdx.y * ACTIVATION_THREADS + threadIdx.x) * 8, width = shape.width;
    if (at >= width) return;
    const int64_t row = blockIdx.x;
    const bool whole = width % 8 == 0 && shape.gate_stride % 8 == 0;
    float gate[8], up[8];
    load_piece(gates + row * shape.gate_stride, at, width, whole, gate);
    if (ups) {
        // The ups of a layer may begin anywhere in their rows.
        const T* from = ups + row * shape.up_stride;
        load_piece(from, at, width, whole && reinterpret_cast<uintptr_t>(from) % (8 * sizeof(T)) == 0, up);
    } else {
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) up[i] = 1.0f;
    }
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) up[i] = activate(gate[i], up[i], shape);
    store_piece(target + row * width, at, width, width % 8 == 0, up);
}

// x: [rows, width] *= sigmoid of the last elements of the rows of gates, [rows, stride].
template <class T>
__device__ __forceinline__ void gate_rows(T* x, const T* gates, uint32_t width, uint32_t stride) {
    const uint32_t at = (blockIdx.y * ACTIVATION_THREADS + threadIdx.x) * 8;
    if (at >= width) return;
    const bool whole = width % 8 == 0 && stride % 8 == 0;
    float gate[8], piece[8];
    x += static_cast<int64_t>(blockIdx.x) * width;
    load_piece(gates + static_cast<int64_t>(blockIdx.x + 1) * stride - width, at, width, whole, gate);
    load_piece(x, at, width, whole, piece);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) piece[i] *= sigmoid(gate[i]);
    store_piece(x, at, width, whole, piece);
}

// x: [rows, width] *= factor.
template <class T>
__device__ __forceinline__ void scale_rows(T* x, uint32_t width, float factor) {
    const uint32_t at = (blockIdx.y * ACTIVATION_THREADS + threadIdx.x) * 8;
    if (at >= width) return;
    const bool whole = width % 8 == 0;
    float piece[8];
    x += static_cast<int64_t>(blockIdx.x) * width;
    load_piece(x, at, width, whole, piece);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) piece[i] *= factor;
    store_piece(x, at, width, whole, piece);
}

// The first elements of each row, clamped to -limit..=limit.
template <class T>
__device__ __forceinline__ void clamp_rows(T* x, uint32_t width, uint32_t stride, float limit) {
    const uint32_t at = (blockIdx.y * ACTIVATION_THREADS + threadIdx.x) * 8;
    if (at >= width) return;
    const bool whole = width % 8 == 0 && stride % 8 == 0;
    float piece[8];
    x += static_cast<int64_t>(blockIdx.x) * stride;
    load_piece(x, at, width, whole, piece);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) piece[i] = fminf(fmaxf(piece[i], -limit), limit);
    store_piece(x, at, width, whole, piece);
}

}  // namespace quire

#define ACTIVATIONS(type, T)                                                                                    \
    extern "C" __global__ void __launch_bounds__(quire::ACTIVATION_THREADS)                                     \
        activate_##type(const void* gates, const void* ups, void* target, const quire::ActivationShape shape) { \
        quire::wait_for_launches();                                                                             \
        const T *gate = static_cast<const T*>(gates), *up = static_cast<const T*>(ups);                         \
        quire::activate_rows<T>(gate, up, static_cast<T*>(target), shape);                                      \
    }                                                                                                           \
    QUIRE_EXPORT_OVERLAPPED(activate_##type, 0);                                                                \
    extern "C" __global__ void __launch_bounds__(quire::ACTIVATION_THREADS)                                     \
        gate_##type(void* x, const void* gates, const uint32_t width, const uint32_t stride) {                  \
        quire::wait_for_launches();                                                                             \
        quire::gate_rows<T>(static_cast<T*>(x), static_cast<const T*>(gates), width, stride);                   \
    }                                                                                                           \
    QUIRE_EXPORT_OVERLAPPED(gate_##type, 0);                                                                    \
    extern "C" __global__ void __launch_bounds__(quire::ACTIVATION_THREADS)                                     \
        clamp_##type(void* x, const uint32_t width, const uint32_t stride, const float limit) {                 \
        quire::wait_for_launches();                                                                             \
        quire::clamp_rows<T>(static_cast<T*>(x), width, stride, limit);                                         \
    }                                                                                                           \
    QUIRE_EXPORT_OVERLAPPED(clamp_##type, 0);                                                                   \
    extern "C" __global__ void __launch_bounds__(quire::ACTIVATION_THREADS)                                     \
        scale_##type(void* x, const uint32_t width, const float factor) {                                       \
        quire::wait_for_launches();                                                                             \
        quire::scale_rows<T>(static_cast<T*>(x), width, factor);                                                \
    }                                                                                                           \
    QUIRE_EXPORT_OVERLAPPED(scale_##type, 0);

ACTIVATIONS(f16, __half)
ACTIVATIONS(bf16, __nv_bfloat16)
ACTIVATIONS(f32, float)

// logits: [count] *= scale, then capped to cap * tanh(x / cap) unless cap is 0. Grid (ceil(count / 256)), 256 threads.
extern "C" __global__ void __launch_bounds__(quire::ACTIVATION_THREADS)
    finish_logits(float* logits, const uint64_t count, const float scale, const float cap) {
    quire::wait_for_launches();
    const uint64_t at = static_cast<uint64_t>(blockIdx.x) * quire::ACTIVATION_THREADS + threadIdx.x;
    if (at >= count) return;
    const float x = logits[at] * scale;
    logits[at] = cap > 0.0f ? cap * tanhf(x / cap) : x;
}
QUIRE_EXPORT_OVERLAPPED(finish_logits, 0);
