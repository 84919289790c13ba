// Rows of latent attention: a product of each head with its own matrix, entries head_linear_<type>, grid (ceil(n / 8), heads), 256
// threads: a warp per output, eight rows at a time; and copies of parts of heads, entries copy_heads_<type>, grid (rows, heads), 128
// threads.
//
// Each result depends on its row alone.

#include <quire/export.cuh>

#include "vectors.cuh"

namespace quire {

constexpr uint32_t HEAD_WARPS = 8;
constexpr uint32_t HEAD_ROWS = 8;
constexpr uint32_t COPY_THREADS = 128;

// Where the heads of rows lie: elements between rows, and between heads.
struct HeadStrides {
    uint32_t row;
    uint32_t head;
};

struct HeadLinearShape {
    uint32_t rows;
    uint32_t n;  // outputs of a head
    uint32_t k;  // inputs of a head
    HeadStrides from;
    HeadStrides to;
};

// y = x·Wᵀ for each head. weights: [heads, n, k].
template <class T>
__device__ __forceinline__ void head_linear(const T* x, const T* weights, T* y, const HeadLinearShape& shape) {
    const uint32_t head = blockIdx.y, lane = threadIdx.x % 32, k = shape.k;
    const uint32_t output = blockIdx.x * HEAD_WARPS + threadIdx.x / 32;
    if (output >= shape.n) return;
    const bool whole = k % 8 == 0, aligned = whole && shape.from.row % 8 == 0 && shape.from.head % 8 == 0;
    const T* row = weights + (static_cast<int64_t>(head) * shape.n + output) * k;
    x += static_cast<int64_t>(head) * shape.from.head;
    y += static_cast<int64_t>(head) * shape.to.head + output;
    for (uint32_t first = 0; first < shape.rows; first += HEAD_ROWS) {
        float sums[HEAD_ROWS] = {};
        for (uint32_t at = lane * 8; at < k; at += 32 * 8) {
            float w[8], piece[8];
            load_piece(row, at, k, whole, w);
#pragma unroll
            for (uint32_t r = 0; r < HEAD_ROWS; r++) {
                if (first + r >= shape.rows) break;
                load_piece(x + static_cast<int64_t>(first + r) * shape.from.row, at, k, aligned, piece);
#pragma unroll
                for (uint32_t i = 0; i < 8; i++) sums[r] += w[i] * piece[i];
            }
        }
#pragma unroll
        for (uint32_t r = 0; r < HEAD_ROWS; r++) {
            const float sum = sum_over(sums[r], 32);
            if (lane == 0 && first + r < shape.rows) y[static_cast<int64_t>(first + r) * shape.to.row] = from_float<T>(sum);
        }
    }
}

struct CopyHeadsShape {
    uint32_t width;  // elements of a head to copy
    HeadStrides from;
    HeadStrides to;
};

template <class T>
__device__ __forceinline__ void copy_heads(const T* from, T* to, const CopyHeadsShape& shape) {
    from += static_cast<int64_t>(blockIdx.x) * shape.from.row + static_cast<int64_t>(blockIdx.y) * shape.from.head;
    to += static_cast<int64_t>(blockIdx.x) * shape.to.row + static_cast<int64_t>(blockIdx.y) * shape.to.head;
    for (uint32_t i = threadIdx.x; i < shape.width; i += COPY_THREADS) to[i] = from[i];
}

}  // namespace quire

#define HEADS(type, T)                                                                                              \
    extern "C" __global__ void __launch_bounds__(32 * quire::HEAD_WARPS, 1)                                         \
        head_linear_##type(const void* x, const void* weights, void* y, const quire::HeadLinearShape shape) {       \
        quire::wait_for_launches();                                                                                 \
        quire::head_linear<T>(static_cast<const T*>(x), static_cast<const T*>(weights), static_cast<T*>(y), shape); \
    }                                                                                                               \
    QUIRE_EXPORT_OVERLAPPED(head_linear_##type, 0);                                                                 \
    extern "C" __global__ void __launch_bounds__(quire::COPY_THREADS)                                               \
        copy_heads_##type(const void* from, void* to, const quire::CopyHeadsShape shape) {                          \
        quire::wait_for_launches();                                                                                 \
        quire::copy_heads<T>(static_cast<const T*>(from), static_cast<T*>(to), shape);                              \
    }                                                                                                               \
    QUIRE_EXPORT_OVERLAPPED(copy_heads_##type, 0);

HEADS(f16, __half)
HEADS(bf16, __nv_bfloat16)
HEADS(f32, float)
