// linear: y = x Wᵀ + bias by tensor cores, with weights that are numbers or codes. Codes become numbers in registers.
//
// linear_<form>_<type>_few       grid (ceil(n / 16), parts), 256 threads: 16 outputs of up to 8 rows
// linear_<form>_<type>_several   the same of up to 16 rows
// linear_<form>_<type>_many      the same of up to 32 rows
// linear_f32                     grid (ceil(n / 8), max(experts, 1)), 256 threads: a warp per output, eight rows at a time
// unpack_<form>_<type>           grid (ceil(n / 16), any), 256 threads: weights become numbers, a warp for 16 outputs x 64 inputs
//
// A part is consecutive rows, or, with experts, consecutive assignments of one expert: those of expert e are
// order[starts[e]..starts[e + 1]]. A block finds its part from `starts`, so the grid depends on shapes alone. Assignment a is row
// a / top_k of x and row a of y.
//
// Weights are factor A of mma.m16n8k16 (16 outputs x 16 inputs), rows of x factor B (16 inputs x 8 rows). Within 32 inputs, lane
// 4 g + c holds inputs 8 c..8 c + 8 of a row: 16 bytes of x, and codes in the same order (linear/src/tiles.rs). So two
// products take inputs in an order of their own, the same for both factors.
//
// Order of a sum: warp w adds inputs 128 i..128 (i + 1) for i = w, w + 8, ... in order; then the sums of the eight warps are added
// in order, then the bias. It depends on k alone, so a row's bits depend neither on other rows nor on the kernel that serves them.

#include <quire/export.cuh>

#include "linear_parts.cuh"
#include "linear_weights.cuh"

namespace quire {

constexpr uint32_t LINEAR_WARPS = 8, LINEAR_THREADS = 32 * LINEAR_WARPS;

// A row of sums is padded, so that lanes which write to it at once use different banks.
template <int COLUMNS>
using LinearSums = float[LINEAR_WARPS][8 * COLUMNS][PANEL + 4];

// Adds the sums of all warps and the bias, and stores them.
template <class T, int COLUMNS>
__device__ __forceinline__ void store_sums(const LinearSums<COLUMNS>& sums, const LinearPart& part, const void* bias, void* y,
                                           const uint32_t* order, const LinearShape& shape) {
    for (uint32_t i = threadIdx.x; i < part.count * PANEL; i += LINEAR_THREADS) {
        const uint32_t row = i / PANEL, output = blockIdx.x * PANEL + i % PANEL;
        if (output >= shape.n) continue;
        float sum = 0.0f;
#pragma unroll
        for (uint32_t w = 0; w < LINEAR_WARPS; w++) sum += sums[w][row][i % PANEL];
        const int64_t of_bias = static_cast<int64_t>(part.expert) * shape.n + output;
        const uint32_t of_y = shape.experts ? order[part.first + row] : part.first + row;
        const int64_t to = static_cast<int64_t>(of_y) * shape.y_stride + output;
        if (shape.y_is_float) {
            static_cast<float*>(y)[to] = sum + (bias ? static_cast<const float*>(bias)[of_bias] : 0.0f);
        } else {
            static_cast<T*>(y)[to] = from_float<T>(sum + (bias ? to_float(static_cast<const T*>(bias)[of_bias]) : 0.0f));
        }
    }
}

// The row of x that is row `index` of a part; its last one from there on, so that what is loaded exists.
template <class T>
__device__ __forceinline__ const T* row_of(const T* x, const uint32_t* order, const LinearPart& part, uint32_t index,
                                           const LinearShape& shape) {
    const uint32_t row = part.first + min(index, part.count - 1);
    return x + static_cast<int64_t>(shape.experts ? order[row] / shape.top_k : row) * shape.k;
}

// table: 16 numbers that codes are indices of, or null; bias: [experts, n] of y's type, or null; all: shared, the sums of all warps.
template <class T, class Form, int COLUMNS, bool PLAIN>
__device__ __forceinline__ void linear(const T* x, const void* weights, const float* table, const void* bias, void* y,
                                       const uint32_t* order, const uint32_t* starts, const LinearShape& shape,
                                       LinearSums<COLUMNS>& all) {
    using Weights = Panel<T, Form, PLAIN>;
    const LinearPart part = find_part(starts, 8 * COLUMNS, shape);
    if (part.count == 0) return;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, in_row = lane % 4 * 8;
    const uint32_t tiles = (shape.k + TILE_INPUTS - 1) / TILE_INPUTS;
    const Weights panel(weights, part.expert, blockIdx.x, shape);

    const T* rows[COLUMNS];
#pragma unroll
    for (uint32_t j = 0; j < COLUMNS; j++) rows[j] = row_of(x, order, part, j * 8 + lane / 4, shape);
    // Groups that begin within a slice are loaded for each half of a tile, others for the slice.
    const bool has_short_groups = (SLICE_INPUTS >> shape.group_shift) > 1;

    // What memory has of a slice. Each half is loaded again, for the next slice of the warp, as soon as it is used up.
    typename Weights::Vectors codes[2];
    uint32_t scales[4];
    const auto load = [&](uint32_t t, uint32_t tile) {
        if (tile >= tiles) return;
        panel.load(codes[t], tile, shape);
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            if (!has_short_groups && t + half != 0) break;
            scales[2 * t + half] = panel.load_scales(tile * TILE_INPUTS + half * 32 + in_row, shape);
        }
    };

    typename Weights::Group groups[2];
    Weights::clear(groups, shape);
    float sums[COLUMNS][4] = {};
#pragma unroll
    for (uint32_t t = 0; t < 2; t++) load(t, 2 * warp + t);
    for (uint32_t tile = 2 * warp; tile < tiles; tile += 2 * LINEAR_WARPS) {
#pragma unroll
        for (uint32_t quarter = 0; quarter < 4; quarter++) {
            if (!PLAIN && tile + quarter / 2 >= tiles) break;
            const uint32_t input = tile * TILE_INPUTS + quarter * 32 + in_row;
            if (has_short_groups || quarter == 0) {
                panel.load(groups, input, scales[quarter], shape);
                if (!PLAIN || quarter == 0) Weights::set_zeros(groups, panel.load_zeros(input, shape), shape);
            }
            uint32_t a[2][4];
#pragma unroll
            for (uint32_t s = 0; s < 2; s++) {
                Weights::fragment(a[s], codes[quarter / 2], groups, quarter % 2 * 2 + s, table);
            }
#pragma unroll
            for (uint32_t j = 0; j < COLUMNS; j++) {
                const uint4 piece = load_eight<PLAIN>(rows[j], input, shape.k);
                mma_m16n8k16<T>(sums[j], a[0], {piece.x, piece.y});
                mma_m16n8k16<T>(sums[j], a[1], {piece.z, piece.w});
            }
            if (quarter % 2) load(quarter / 2, tile + quarter / 2 + 2 * LINEAR_WARPS);
        }
    }
#pragma unroll
    for (uint32_t j = 0; j < COLUMNS; j++) {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) all[warp][j * 8 + lane % 4 * 2 + i % 2][lane / 4 + i / 2 * 8] = sums[j][i];
    }
    __syncthreads();
    store_sums<T, COLUMNS>(all, part, bias, y, order, shape);
}

// Writes the weights of a panel as rows of numbers [n, k], for a product with many rows. k is a multiple of 8. Each number is the factor
// that `linear` multiplies.
template <class T, class Form>
__device__ __forceinline__ void unpack(const void* weights, const float* table, T* numbers, const LinearShape& shape) {
    using Weights = Panel<T, Form, false>;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, tiles = (shape.k + TILE_INPUTS - 1) / TILE_INPUTS;
    const Weights panel(weights, 0, blockIdx.x, shape);
    for (uint32_t tile = blockIdx.y * LINEAR_WARPS + warp; tile < tiles; tile += gridDim.y * LINEAR_WARPS) {
        typename Weights::Vectors codes;
        typename Weights::Group groups[2];
        Weights::clear(groups, shape);
        panel.load(codes, tile, shape);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t input = tile * TILE_INPUTS + half * 32 + lane % 4 * 8;
            if (input >= shape.k) break;
            panel.load(groups, input, panel.load_scales(input, shape), shape);
            Weights::set_zeros(groups, panel.load_zeros(input, shape), shape);
            uint32_t a[2][4];
#pragma unroll
            for (int s = 0; s < 2; s++) Weights::fragment(a[s], codes, groups, 2 * half + s, table);
#pragma unroll
            for (uint32_t u = 0; u < 2; u++) {
                const uint32_t output = blockIdx.x * PANEL + 8 * u + lane / 4;
                if (output >= shape.n) break;
                const uint4 eight = make_uint4(a[0][u], a[0][u + 2], a[1][u], a[1][u + 2]);
                *reinterpret_cast<uint4*>(numbers + static_cast<int64_t>(output) * shape.k + input) = eight;
            }
        }
    }
}

// The same for float32, whose weights are numbers, without tensor cores: eight rows or assignments at a time.
__device__ __forceinline__ void linear(const float* x, const float* weights, const float* bias, float* y, const uint32_t* order,
                                       const uint32_t* starts, const LinearShape& shape) {
    constexpr uint32_t ROWS = 8;
    const uint32_t expert = blockIdx.y, lane = threadIdx.x % 32, output = blockIdx.x * LINEAR_WARPS + threadIdx.x / 32;
    const uint32_t begin = starts ? starts[expert] : 0, end = starts ? starts[expert + 1] : shape.rows;
    if (begin == end || output >= shape.n) return;
    const int64_t of_bias = static_cast<int64_t>(expert) * shape.n + output;
    for (uint32_t first = begin; first < end; first += ROWS) {
        const uint32_t count = min(ROWS, end - first);
        float sums[ROWS] = {};
        for (uint32_t at = lane; at < shape.k; at += 32) {
            const float weight = weights[of_bias * shape.k + at];
#pragma unroll
            for (uint32_t r = 0; r < ROWS; r++) {
                if (r >= count) break;
                const uint32_t row = order ? order[first + r] / shape.top_k : first + r;
                sums[r] += weight * x[static_cast<int64_t>(row) * shape.k + at];
            }
        }
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++) {
            for (uint32_t step = 16; step > 0; step /= 2) sums[r] += __shfl_xor_sync(~0u, sums[r], step);
            if (lane == 0 && r < count) {
                const uint32_t row = order ? order[first + r] : first + r;
                y[static_cast<int64_t>(row) * shape.y_stride + output] = sums[r] + (bias ? bias[of_bias] : 0.0f);
            }
        }
    }
}

}  // namespace quire

#define LINEAR_INSTANCE(name, Form, T, COLUMNS, BLOCKS)                                                                     \
    extern "C" __global__ void __launch_bounds__(quire::LINEAR_THREADS, BLOCKS)                                             \
        name(const void* x, const void* weights, const float* table, const void* bias, void* y, const uint32_t* order,      \
             const uint32_t* starts, const quire::LinearShape shape) {                                                      \
        quire::wait_for_launches();                                                                                         \
        extern __shared__ __align__(16) unsigned char smem[];                                                               \
        const auto of_x = static_cast<const T*>(x);                                                                         \
        auto& sums = *reinterpret_cast<quire::LinearSums<COLUMNS>*>(smem);                                                  \
        if (quire::is_plain<Form>(shape)) {                                                                                 \
            quire::linear<T, Form, COLUMNS, true>(of_x, weights, table, bias, y, order, starts, shape, sums);               \
        } else {                                                                                                            \
            quire::linear<T, Form, COLUMNS, false>(of_x, weights, table, bias, y, order, starts, shape, sums);              \
        }                                                                                                                   \
    }                                                                                                                       \
    QUIRE_EXPORT_OVERLAPPED(name, sizeof(quire::LinearSums<COLUMNS>));
// FEW, SEVERAL, MANY: blocks of a multiprocessor, as many as registers suffice for.
#define LINEAR_SIZES(form, Form, type, T, FEW, SEVERAL, MANY)                       \
    LINEAR_INSTANCE(linear_##form##_##type##_few, quire::Form, T, 1, FEW)           \
    LINEAR_INSTANCE(linear_##form##_##type##_several, quire::Form, T, 2, SEVERAL)   \
    LINEAR_INSTANCE(linear_##form##_##type##_many, quire::Form, T, 4, MANY)
#define LINEAR_CODES(form, Form, type, T, FEW, SEVERAL, MANY)                                                               \
    LINEAR_SIZES(form, Form, type, T, FEW, SEVERAL, MANY)                                                                   \
    extern "C" __global__ void __launch_bounds__(quire::LINEAR_THREADS, 1)                                                  \
        unpack_##form##_##type(const void* weights, const float* table, void* numbers, const quire::LinearShape shape) {    \
        quire::wait_for_launches();                                                                                         \
        quire::unpack<T, quire::Form>(weights, table, static_cast<T*>(numbers), shape);                                     \
    }                                                                                                                       \
    QUIRE_EXPORT_OVERLAPPED(unpack_##form##_##type, 0);
#define LINEAR_FORMS(type, T)                           \
    LINEAR_SIZES(numbers, Numbers, type, T, 3, 2, 2)    \
    LINEAR_CODES(narrow4, Narrow4, type, T, 3, 2, 2)    \
    LINEAR_CODES(codes4, Codes4, type, T, 3, 2, 2)      \
    LINEAR_CODES(table4, Table4, type, T, 2, 2, 1)      \
    LINEAR_CODES(codes8, Codes8, type, T, 3, 2, 1)      \
    LINEAR_CODES(e4m3, E4m3, type, T, 3, 2, 2)

#ifdef QUIRE_F16
LINEAR_FORMS(f16, __half)
#endif
#ifdef QUIRE_BF16
LINEAR_FORMS(bf16, __nv_bfloat16)
LINEAR_CODES(split4, Split4, bf16, __nv_bfloat16, 3, 2, 2)
#endif
#ifdef QUIRE_F32
extern "C" __global__ void __launch_bounds__(quire::LINEAR_THREADS, 1)
    linear_f32(const float* x, const float* weights, const float* bias, float* y, const uint32_t* order, const uint32_t* starts,
               const quire::LinearShape shape) {
    quire::wait_for_launches();
    quire::linear(x, weights, bias, y, order, starts, shape);
}
QUIRE_EXPORT_OVERLAPPED(linear_f32, 0);
#endif
