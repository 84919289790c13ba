// linear_sm90: the function of linear.cu for Hopper only and more rows, of weights that are codes and not those of experts.
//
// order_rows                         grid any, 256 threads: rows of x in the order in which codes are stored
// linear_sm90_<form>_<type>_<rows>   grid (ceil(n / 128), ceil(rows of x / rows), slices of k), 256 threads
//
// A warpgroup multiplies 64 outputs, four panels, by `rows` rows of x. Codes become numbers in registers, once, and are factor A of
// wgmma; rows of x are factor B, in stages of two tiles of 64 inputs in shared memory, which one thread loads by TMA.
//
//   a warp        load codes t + 5 | convert codes t + 1 | ...   while the tensor cores have the products of tile t
//   one thread    x of stage s + STAGES - 1                      when all warps have freed stage s - 1
//
// A stage has two mbarriers, `full` (the thread arrives, and the bytes of the box) and `free` (each warp arrives). Nothing can
// deadlock: when the thread waits for stage s - 1, it has started the boxes up to stage s + STAGES - 2 and its own products of stage s,
// so every warp can free stage s - 1.
//
// The codes of a panel are in the order of linear/src/tiles.rs: of 32 inputs, lane 4 g + c has inputs 8 c..8 c + 8, as pairs of
// two steps of 16 inputs. order_rows brings x to that order: of the sixteen words of 32 inputs, word 4 c + i becomes word 4 i + c.
// It lies in memory that has whole blocks of rows. Rows past the last one are anything, and so are their sums, which are not stored.
//
// Order of a sum: inputs in steps of 16, in order, then the slices of k in order (add_slices), then the bias. It depends on the
// shape of the weights alone, so a row's bits do not depend on other rows.

#include <quire/export.cuh>
#include <quire/wgmma.cuh>

#include "linear_weights.cuh"

namespace quire {

// Tiles of an iteration of the loop; a slice of k has a multiple of them, except for the last one.
constexpr uint32_t WIDE_TILES = 4;

template <class T_, class Form_, int ROWS_>
struct WideShape {
    using T = T_;
    using Weights = Panel<T, Form_, true>;
    static constexpr uint32_t ROWS = ROWS_, WARPS = 8, THREADS = 32 * WARPS;
    // Blocks of a multiprocessor. With 128 rows two fit it if the products of a tile are complete before the next one is converted.
    static constexpr uint32_t BLOCKS = ROWS == 256 ? 1 : 2, SETS = ROWS == 128 ? 1 : 2;
    // Tiles of a stage of x, stages, and tiles whose codes a lane has loaded.
    static constexpr uint32_t TILES = 2, STAGES = ROWS >= 128 ? 3 : 4, DEPTH = Form_::VECTORS == 2 || ROWS == 128 ? 2 : 4;
    static constexpr uint32_t TILE_BYTES = ROWS * 128;

    struct alignas(1024) Shared {
        T x[STAGES][TILES][ROWS][TILE_INPUTS];  // rows of 128 bytes, swizzled
        uint64_t full[STAGES], free[STAGES];
    };
};

// SHORT: groups of 32 inputs, without zero points; else groups are not smaller than a tile.
template <class Shape, bool SHORT>
struct WideLinear {
    using T = typename Shape::T;
    using Weights = typename Shape::Weights;
    static constexpr uint32_t ROWS = Shape::ROWS, TILES = Shape::TILES, STAGES = Shape::STAGES, DEPTH = Shape::DEPTH;
    static constexpr uint32_t SETS = Shape::SETS;

    const LinearShape& shape;
    const TensorMap& x;
    const float* table;
    typename Shape::Shared& shared;
    const uint32_t first_row, first, tiles;  // of the block: its first row, its first tile of k, and their number
    const Weights panel;

    typename Weights::Vectors codes[DEPTH] = {};
    uint32_t scales[DEPTH][2] = {}, zeros[DEPTH] = {};
    typename Weights::Group groups[2];
    uint32_t a[SETS][4][4];
    float sums[ROWS / 8][4] = {};

    // Stages and tiles are counted from the first one. x is zero past its last input.
    __device__ __forceinline__ void load_x(uint32_t stage) const {
        uint64_t* full = &shared.full[stage % STAGES];
        mbarrier_wait(&shared.free[stage % STAGES], stage / STAGES % 2 ^ 1);
        mbarrier_arrive_expect(full, TILES * Shape::TILE_BYTES);
        load_box(&shared.x[stage % STAGES], x, 0, static_cast<int>(first_row), static_cast<int>(first + stage * TILES), 0, full);
    }

    __device__ __forceinline__ void load_codes(uint32_t slot, uint32_t tile) {
        if (tile >= tiles) return;
        const uint32_t at = first + tile, input = at * TILE_INPUTS;
        panel.load(codes[slot], at, shape);
        if (SHORT) {
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) scales[slot][half] = panel.load_pair(2 * at + half, shape);
        } else {
            scales[slot][0] = panel.load_scales(input, shape);
            zeros[slot] = panel.load_zeros(input, shape);
        }
    }

    __device__ __forceinline__ void convert(uint32_t (&to)[4][4], uint32_t slot) {
#pragma unroll
        for (int s = 0; s < 4; s++) {
            if (s == 0 || (s == 2 && SHORT)) panel.load(groups, 0, scales[slot][s / 2], shape);
            if (s == 0 && !SHORT) Weights::set_zeros(groups, zeros[slot], shape);
            Weights::fragment(to[s], codes[slot], groups, s, table);
        }
    }

    __device__ __forceinline__ void multiply() {
        const uint32_t stages = (tiles + WIDE_TILES - 1) / WIDE_TILES * (WIDE_TILES / TILES);
        if (threadIdx.x == 0) {
            for (uint32_t stage = 0; stage < min(STAGES - 1, stages); stage++) load_x(stage);
        }
        __syncwarp();
        Weights::clear(groups, shape);
#pragma unroll
        for (uint32_t i = 0; i < DEPTH; i++) load_codes(i, i);
        convert(a[0], 0);
        load_codes(0, DEPTH);
        const uint64_t matrix = matrix_in_128(shared.x, 16, 1024);
        for (uint32_t stage = 0; stage < stages;) {
#pragma unroll
            for (uint32_t i = 0; i < WIDE_TILES; i++) {
                const uint32_t in_stage = i % TILES, slot = stage % STAGES, next = (i + 1) % DEPTH;
                uint32_t(&later)[4][4] = a[(i + 1) % SETS];
                const uint64_t rows = matrix_from(matrix, (slot * TILES + in_stage) * Shape::TILE_BYTES);
                if (in_stage == 0) mbarrier_wait(&shared.full[slot], stage / STAGES % 2);
                wgmma_fence(a[i % SETS]);
#pragma unroll
                for (uint32_t s = 0; s < 4; s++) {
                    wgmma<T, ROWS, Rows::K>(sums, a[i % SETS][s], matrix_from(rows, s * 32), true);
                }
                wgmma_commit();
                wgmma_wait<SETS - 1>(later);
                // With two sets, the products of the tile before are complete now.
                if (in_stage == (SETS == 1 ? TILES - 1 : 0) && (SETS == 1 || stage > 0)) {
                    __syncwarp();
                    if (threadIdx.x % 32 == 0) mbarrier_arrive(&shared.free[(stage + 1 - SETS) % STAGES]);
                }
                if (in_stage == TILES - 1) {
                    if (threadIdx.x == 0 && stage + STAGES - 1 < stages) load_x(stage + STAGES - 1);
                    __syncwarp();
                }
                convert(later, next);
                load_codes(next, stage * TILES + in_stage + 1 + DEPTH);
                if (in_stage == TILES - 1) stage++;
            }
        }
        wgmma_wait<0>(sums);
    }

    // Calls each(row, sums of outputs g and g + 8) for the rows of this lane, where lane is 4 g + c: 8 j + 2 c and the next.
    template <class Each>
    __device__ __forceinline__ void each_row(Each each) const {
        const uint32_t first = threadIdx.x % 4 * 2;
#pragma unroll
        for (uint32_t j = 0; j < ROWS / 8; j++) {
#pragma unroll
            for (uint32_t i = 0; i < 2; i++) each(8 * j + first + i, sums[j][i], sums[j][2 + i]);
        }
    }

    __device__ __forceinline__ void store(const void* bias, void* y, uint32_t first_output) const {
        const uint32_t g = threadIdx.x % 32 / 4, count = shape.rows - first_row;
        const int64_t to = (static_cast<int64_t>(blockIdx.z) * shape.rows + first_row) * shape.y_stride;
        if (shape.y_is_float) {
            const uint32_t output = first_output + g;
            const bool exists[2] = {output < shape.n, output + 8 < shape.n};
            float more[2] = {};
#pragma unroll
            for (int u = 0; u < 2; u++) {
                if (bias && exists[u]) more[u] = static_cast<const float*>(bias)[output + 8 * u];
            }
            float* const from = static_cast<float*>(y) + to + output;
            each_row([&](uint32_t row, float upper, float lower) {
                float* place = from + static_cast<uint64_t>(row) * shape.y_stride;
                if (row < count && exists[0]) place[0] = upper + more[0];
                if (row < count && exists[1]) place[8] = lower + more[1];
            });
        } else {
            // A lane exchanges one of its outputs with its neighbour, so that each stores two adjacent ones.
            const bool odd = g % 2;
            const uint32_t output = first_output + 8 * odd + (g & ~1u);
            const bool exists = output < shape.n;
            const float2 more = bias && exists ? Pair<T>::widen(static_cast<const uint32_t*>(bias)[output / 2]) : float2{};
            uint32_t* const from = static_cast<uint32_t*>(y) + (to + output) / 2;
            each_row([&](uint32_t row, float upper, float lower) {
                const float other = __shfl_xor_sync(~0u, odd ? upper : lower, 4);
                const uint32_t two = Pair<T>::narrow((odd ? other : upper) + more.x, (odd ? lower : other) + more.y);
                if (exists && row < count) from[static_cast<uint64_t>(row) * (shape.y_stride / 2)] = two;
            });
        }
    }
};

template <class Shape, bool SHORT>
__device__ __forceinline__ void linear_sm90(const TensorMap& x, const void* weights, const float* table, const void* bias, void* y,
                                            const LinearShape& shape, typename Shape::Shared& shared) {
    const uint32_t tiles = shape.k / TILE_INPUTS, panel = blockIdx.x * Shape::WARPS + threadIdx.x / 32;
    const uint32_t in_slice = (tiles + gridDim.z * WIDE_TILES - 1) / (gridDim.z * WIDE_TILES) * WIDE_TILES;
    const uint32_t first = min(blockIdx.z * in_slice, tiles);
    WideLinear<Shape, SHORT> work{shape,
                                  x,
                                  table,
                                  shared,
                                  blockIdx.y * Shape::ROWS,
                                  first,
                                  min(in_slice, tiles - first),
                                  {weights, 0, min(panel, (shape.n - 1) / PANEL), shape}};
    work.multiply();
    work.store(bias, y, panel * PANEL);
}

template <class Shape>
__device__ __forceinline__ void linear_sm90(const TensorMap& x, const void* weights, const float* table, const void* bias, void* y,
                                            const LinearShape& shape, unsigned char* memory) {
    auto& shared = *reinterpret_cast<typename Shape::Shared*>(memory);
    // Swizzling depends on addresses, so shared memory must start at a multiple of the pattern.
    if (matrix_in_128(memory, 0, 0) & 0x3f) __trap();
    if (threadIdx.x == 0) {
        for (uint32_t stage = 0; stage < Shape::STAGES; stage++) {
            mbarrier_init(&shared.full[stage], 1);
            mbarrier_init(&shared.free[stage], Shape::WARPS);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    if (shape.group_shift == 5) linear_sm90<Shape, true>(x, weights, table, bias, y, shape, shared);
    else linear_sm90<Shape, false>(x, weights, table, bias, y, shape, shared);
}

constexpr uint32_t ORDER_THREADS = 256;

// Transposes the words of each four vectors; count: of such fours.
__device__ __forceinline__ void order(const uint4* x, uint4* to, uint32_t count) {
    for (uint32_t i = blockIdx.x * ORDER_THREADS + threadIdx.x; i < count; i += gridDim.x * ORDER_THREADS) {
        uint4 v[4];
#pragma unroll
        for (int c = 0; c < 4; c++) v[c] = x[4 * i + c];
#pragma unroll
        for (int w = 0; w < 4; w++) to[4 * i + w] = make_uint4(word(v[0], w), word(v[1], w), word(v[2], w), word(v[3], w));
    }
}

}  // namespace quire

#define LINEAR_SM90(form, Form, type, T, rows)                                                                                  \
    extern "C" __global__ void __launch_bounds__((quire::WideShape<T, quire::Form, rows>::THREADS),                             \
                                                 (quire::WideShape<T, quire::Form, rows>::BLOCKS))                              \
        linear_sm90_##form##_##type##_##rows(const void* weights, const float* table, const void* bias, void* y,                \
                                             const quire::LinearShape shape, const __grid_constant__ quire::TensorMap x) {      \
        quire::wait_for_launches();                                                                                             \
        extern __shared__ __align__(1024) unsigned char smem[];                                                                 \
        quire::linear_sm90<quire::WideShape<T, quire::Form, rows>>(x, weights, table, bias, y, shape, smem);                    \
    }                                                                                                                           \
    QUIRE_EXPORT_TILED(linear_sm90_##form##_##type##_##rows, sizeof(quire::WideShape<T, quire::Form, rows>::Shared),            \
                       (quire::WideShape<T, quire::Form, rows>::THREADS), rows);
#define LINEAR_SM90_ROWS(form, Form, type, T)   \
    LINEAR_SM90(form, Form, type, T, 16)        \
    LINEAR_SM90(form, Form, type, T, 32)        \
    LINEAR_SM90(form, Form, type, T, 64)        \
    LINEAR_SM90(form, Form, type, T, 128)       \
    LINEAR_SM90(form, Form, type, T, 256)
#ifndef LINEAR_SM90_FORMS
#define LINEAR_SM90_FORMS(type, T)              \
    LINEAR_SM90_ROWS(narrow4, Narrow4, type, T) \
    LINEAR_SM90_ROWS(codes4, Codes4, type, T)   \
    LINEAR_SM90_ROWS(table4, Table4, type, T)   \
    LINEAR_SM90_ROWS(codes8, Codes8, type, T)   \
    LINEAR_SM90_ROWS(e4m3, E4m3, type, T)
#endif

#ifdef QUIRE_F16
extern "C" __global__ void __launch_bounds__(quire::ORDER_THREADS)
    order_rows(const uint4* x, uint4* to, uint32_t count) {
    quire::wait_for_launches();
    quire::order(x, to, count);
}
QUIRE_EXPORT_OVERLAPPED(order_rows, 0);
LINEAR_SM90_FORMS(f16, __half)
#endif
#ifdef QUIRE_BF16
LINEAR_SM90_FORMS(bf16, __nv_bfloat16)
LINEAR_SM90_ROWS(split4, Split4, bf16, __nv_bfloat16)
#endif
