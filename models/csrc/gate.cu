// The gated activation of a feed-forward layer: entries gate_mul_<type>.
//
// Grid (rows, ceil(width / 2048)), 256 threads of eight elements each.

#include <quire/export.cuh>
#include <math.h>

#include "vectors.cuh"

namespace quire {

constexpr uint32_t GATE_THREADS = 256;

// What a gate passes through.
enum Activation : uint32_t {
    SILU = 0,       // x * sigmoid(x)
    GELU_TANH = 1,  // Hendrycks & Gimpel, "Gaussian Error Linear Units", 2016, by its tanh formula
};

struct GateShape {
    uint32_t width;
    uint32_t activation;  // an Activation
};
static_assert(sizeof(GateShape) == 8, "no hidden padding");

__device__ __forceinline__ float activate(uint32_t activation, float x) {
    if (activation == GELU_TANH) {
        const float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
        return 0.5f * x * (1.0f + tanhf(inner));
    }
    // exp(-|x|) never overflows.
    const float e = expf(-fabsf(x));
    return x * ((x >= 0.0f ? 1.0f : e) / (1.0f + e));
}

// gate_up: [rows, 2 * width], a row's gates, then what they multiply; target: [rows, width].
template <class T>
__device__ __forceinline__ void gate_mul(const T* gate_up, T* target, const GateShape& shape) {
    const uint32_t width = shape.width, at = (blockIdx.y * GATE_THREADS + threadIdx.x) * 8;
    if (at >= width) return;
    const bool whole = width % 8 == 0;
    const T* gates = gate_up + static_cast<int64_t>(blockIdx.x) * 2 * width;
    float gate[8], up[8];
    load_piece(gates, at, width, whole, gate);
    load_piece(gates + width, at, width, whole, up);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) up[i] *= activate(shape.activation, gate[i]);
    store_piece(target + static_cast<int64_t>(blockIdx.x) * width, at, width, whole, up);
}

}  // namespace quire

#define GATE_MUL(name, T)                                                                       \
    extern "C" __global__ void __launch_bounds__(quire::GATE_THREADS)                           \
        name(const void* gate_up, void* target, const quire::GateShape shape) {                 \
        quire::gate_mul<T>(static_cast<const T*>(gate_up), static_cast<T*>(target), shape);     \
    }                                                                                           \
    QUIRE_EXPORT(name);

GATE_MUL(gate_mul_f16, __half)
GATE_MUL(gate_mul_bf16, __nv_bfloat16)
GATE_MUL(gate_mul_f32, float)
