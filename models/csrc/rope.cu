// Cosines and sines of a step's positions, computed once for all layers: entry rope_table, grid (rows), 128 threads.
// Rotation of heads that qk_norm_rope_cache.cu does not cover (a part of the head, neighbours as pairs, growing queries): entries
// rotate_heads_<type>, grid (rows, heads), 128 threads.

#include <quire/export.cuh>
#include <math.h>
#include <stdint.h>

#include "vectors.cuh"

namespace quire {

constexpr uint32_t ROPE_THREADS = 128;

// positions: [rows]; frequencies: [half]; table: [rows, 2 * half], each row its cosines, then its sines, times
// the factor.
__device__ __forceinline__ void rope_table(const uint32_t* positions, const float* frequencies, float* table,
                                           uint32_t half, float factor) {
    const float position = static_cast<float>(positions[blockIdx.x]);
    float* row = table + static_cast<int64_t>(blockIdx.x) * 2 * half;
    for (uint32_t i = threadIdx.x; i < half; i += ROPE_THREADS) {
        const float angle = position * frequencies[i];
        row[i] = cosf(angle) * factor;
        row[half + i] = sinf(angle) * factor;
    }
}

struct RotateShape {
    uint32_t stride;     // elements between rows
    uint32_t head_dim;
    uint32_t dims;       // rotated elements of a head; 0: none
    uint32_t neighbours; // whether pairs are (2i, 2i + 1) instead of (i, i + dims / 2)
    uint32_t num_heads;  // query heads, which come first
    uint32_t original;   // 0: queries do not grow
    uint32_t first;      // number of position 0
    float beta;
};

// heads: rows of query heads, then key heads; table: [rows, dims]. Queries at position p are multiplied by
// 1 + beta * ln(1 + floor((p + first) / original)).
template <class T>
__device__ __forceinline__ void rotate_heads(T* heads, const float* table, const uint32_t* positions, const RotateShape& shape) {
    const uint32_t half = shape.dims / 2;
    T* head = heads + static_cast<int64_t>(blockIdx.x) * shape.stride + static_cast<int64_t>(blockIdx.y) * shape.head_dim;
    float growth = 1.0f;
    if (shape.original != 0 && blockIdx.y < shape.num_heads) {
        growth += shape.beta * logf(1.0f + static_cast<float>((positions[blockIdx.x] + shape.first) / shape.original));
    }
    const float* cosines = table + static_cast<int64_t>(blockIdx.x) * shape.dims;
    for (uint32_t i = threadIdx.x; i < half; i += ROPE_THREADS) {
        const uint32_t low = shape.neighbours ? 2 * i : i, high = shape.neighbours ? 2 * i + 1 : i + half;
        const float a = to_float(head[low]), b = to_float(head[high]), c = cosines[i], s = cosines[half + i];
        head[low] = from_float<T>((a * c - b * s) * growth);
        head[high] = from_float<T>((b * c + a * s) * growth);
    }
    if (growth == 1.0f) return;
    for (uint32_t i = shape.dims + threadIdx.x; i < shape.head_dim; i += ROPE_THREADS) {
        head[i] = from_float<T>(to_float(head[i]) * growth);
    }
}

}  // namespace quire

extern "C" __global__ void __launch_bounds__(quire::ROPE_THREADS)
    rope_table(const uint32_t* positions, const float* frequencies, float* table, const uint32_t half,
               const float factor) {
    quire::wait_for_launches();
    quire::rope_table(positions, frequencies, table, half, factor);
}
QUIRE_EXPORT_OVERLAPPED(rope_table, 0);

#define ROTATE_HEADS(name, T)                                                                              \
    extern "C" __global__ void __launch_bounds__(quire::ROPE_THREADS)                                      \
        name(void* heads, const float* table, const uint32_t* positions, const quire::RotateShape shape) { \
        quire::wait_for_launches();                                                                        \
        quire::rotate_heads<T>(static_cast<T*>(heads), table, positions, shape);                           \
    }                                                                                                      \
    QUIRE_EXPORT_OVERLAPPED(name, 0);

ROTATE_HEADS(rotate_heads_f16, __half)
ROTATE_HEADS(rotate_heads_bf16, __nv_bfloat16)
ROTATE_HEADS(rotate_heads_f32, float)
