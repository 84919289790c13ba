// Gathers rows of a matrix by index (token embeddings, hidden states of chosen rows): entries gather_rows_<type>.
//
// Grid (rows), 128 threads.

#include <quire/export.cuh>

#include "vectors.cuh"

namespace quire {

constexpr uint32_t GATHER_THREADS = 128;

// source: [any, width]; indices: [rows], row numbers of the source; target: [rows, width].
template <class T>
__device__ __forceinline__ void gather_rows(const T* source, const uint32_t* indices, T* target, uint32_t width) {
    const bool whole = width % 8 == 0;
    const T* from = source + static_cast<int64_t>(indices[blockIdx.x]) * width;
    T* to = target + static_cast<int64_t>(blockIdx.x) * width;
    for (uint32_t at = threadIdx.x * 8; at < width; at += GATHER_THREADS * 8) {
        float piece[8];
        load_piece(from, at, width, whole, piece);
        store_piece(to, at, width, whole, piece);
    }
}

}  // namespace quire

#define GATHER_ROWS(name, T)                                                                           \
    extern "C" __global__ void __launch_bounds__(quire::GATHER_THREADS)                                \
        name(const void* source, const uint32_t* indices, void* target, const uint32_t width) {        \
        quire::gather_rows<T>(static_cast<const T*>(source), indices, static_cast<T*>(target), width); \
    }                                                                                                  \
    QUIRE_EXPORT(name);

GATHER_ROWS(gather_rows_f16, __half)
GATHER_ROWS(gather_rows_bf16, __nv_bfloat16)
GATHER_ROWS(gather_rows_f32, float)
