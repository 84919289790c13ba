// Gathers rows of a matrix by index, times a factor (token embeddings, hidden states of chosen rows): entries gather_rows_<type>.
// Adds gathered rows (position embeddings): entries add_gathered_rows_<type>.
//
// Grid (rows), 128 threads.

#include <quire/export.cuh>

#include "vectors.cuh"

namespace quire {

constexpr uint32_t GATHER_THREADS = 128;

struct GatherShape {
    uint32_t width;
    uint32_t offset;  // added to the indices
    float scale;      // of the gathered rows
};

// source: [any, width]; indices: [rows], row numbers of the source; target: [rows, width].
template <class T, bool ADD>
__device__ __forceinline__ void gather_rows(const T* source, const uint32_t* indices, T* target, const GatherShape& shape) {
    const uint32_t width = shape.width;
    const bool whole = width % 8 == 0;
    const T* from = source + (static_cast<int64_t>(indices[blockIdx.x]) + shape.offset) * width;
    T* to = target + static_cast<int64_t>(blockIdx.x) * width;
    for (uint32_t at = threadIdx.x * 8; at < width; at += GATHER_THREADS * 8) {
        float piece[8];
        load_piece(from, at, width, whole, piece);
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) piece[i] = __fmul_rn(piece[i], shape.scale);
        if constexpr (ADD) {
            float sum[8];
            load_piece(to, at, width, whole, sum);
#pragma unroll
            for (uint32_t i = 0; i < 8; i++) piece[i] += sum[i];
        }
        store_piece(to, at, width, whole, piece);
    }
}

}  // namespace quire

#define GATHER_ROWS(name, T, ADD)                                                                                \
    extern "C" __global__ void __launch_bounds__(quire::GATHER_THREADS)                                          \
        name(const void* source, const uint32_t* indices, void* target, const quire::GatherShape shape) {        \
        quire::wait_for_launches();                                                                              \
        quire::gather_rows<T, ADD>(static_cast<const T*>(source), indices, static_cast<T*>(target), shape);      \
    }                                                                                                            \
    QUIRE_EXPORT_OVERLAPPED(name, 0);

GATHER_ROWS(gather_rows_f16, __half, false)
GATHER_ROWS(gather_rows_bf16, __nv_bfloat16, false)
GATHER_ROWS(gather_rows_f32, float, false)
GATHER_ROWS(add_gathered_rows_f16, __half, true)
GATHER_ROWS(add_gathered_rows_bf16, __nv_bfloat16, true)
GATHER_ROWS(add_gathered_rows_f32, float, true)
