// The loop of linear_sm90.cu and experts_sm90.cu: a warpgroup multiplies 64 outputs, four panels, by `ROWS` rows of x. Codes become
// numbers in registers, once, and are factor A of wgmma; rows of x are factor B, in stages of two tiles of 64 inputs in shared memory,
// which one thread loads by TMA.
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
// It lies in memory that has whole blocks of rows. Rows of a block past its part are anything, and so are their sums, which are not
// stored.
//
// Order of a sum: inputs in steps of 16, in order, then the slices of k in order (add_slices), then the bias. It depends on the
// shape of the weights alone, so a row's bits do not depend on other rows.
#pragma once

#include <quire/export.cuh>
#include <quire/wgmma.cuh>

#include "linear_parts.cuh"
#include "linear_weights.cuh"

namespace quire {

// Tiles of an iteration of the loop; a slice of k has a multiple of them, except for the last one.
constexpr uint32_t WIDE_TILES = 4;

template <class T_, class Form_, int ROWS_>
struct WideShape {
    using T = T_;
    using Form = Form_;
    using Weights = Panel<T, Form, true>;
    static constexpr uint32_t ROWS = ROWS_, WARPS = 8, THREADS = 32 * WARPS;
    // Blocks of a multiprocessor. With 128 rows two fit it if the products of a tile are complete before the next one is converted, and
    // weights are not numbers.
    static constexpr bool FULL = ROWS == 256 || (ROWS == 128 && std::is_same_v<Form, Numbers>);
    static constexpr uint32_t BLOCKS = FULL ? 1 : 2, SETS = ROWS == 128 && !FULL ? 1 : 2;
    // Tiles of a stage of x, stages, and tiles whose codes a lane has loaded.
    static constexpr uint32_t TILES = 2, STAGES = ROWS >= 128 ? 3 : 4, DEPTH = Form::VECTORS >= 2 || ROWS == 128 ? 2 : 4;
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
    const LinearPart part;
    const uint32_t first, tiles;  // of the block: its first tile of k, and their number
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
        load_box(&shared.x[stage % STAGES], x, 0, static_cast<int>(part.first), static_cast<int>(first + stage * TILES), 0, full);
    }

    __device__ __forceinline__ void load_codes(uint32_t slot, uint32_t tile) {
        if (tile >= tiles) return;
        const uint32_t at = first + tile, input = at * TILE_INPUTS;
        panel.load(codes[slot], at, shape);
        if constexpr (SHORT) {
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

    // order: the row of y of each row of x, or null if it is the same.
    __device__ __forceinline__ void store(const void* bias, void* y, const uint32_t* order, uint32_t first_output) const {
        const uint32_t g = threadIdx.x % 32 / 4, count = part.count;
        const int64_t to = order ? 0 : (static_cast<int64_t>(blockIdx.z) * shape.rows + part.first) * shape.y_stride;
        const uint32_t of_bias = part.expert * shape.n;
        const auto row_of_y = [&](uint32_t row) -> uint64_t { return order ? order[part.first + row] : row; };
        if (shape.y_is_float) {
            const uint32_t output = first_output + g;
            const bool exists[2] = {output < shape.n, output + 8 < shape.n};
            float more[2] = {};
#pragma unroll
            for (int u = 0; u < 2; u++) {
                if (bias && exists[u]) more[u] = static_cast<const float*>(bias)[of_bias + output + 8 * u];
            }
            float* const from = static_cast<float*>(y) + to + output;
            each_row([&](uint32_t row, float upper, float lower) {
                if (row >= count) return;
                float* place = from + row_of_y(row) * shape.y_stride;
                if (exists[0]) place[0] = upper + more[0];
                if (exists[1]) place[8] = lower + more[1];
            });
        } else {
            // A lane exchanges one of its outputs with its neighbour, so that each stores two adjacent ones.
            const bool odd = g % 2;
            const uint32_t output = first_output + 8 * odd + (g & ~1u);
            const bool exists = output < shape.n;
            const float2 more = bias && exists ? Pair<T>::widen(static_cast<const uint32_t*>(bias)[(of_bias + output) / 2]) : float2{};
            uint32_t* const from = static_cast<uint32_t*>(y) + (to + output) / 2;
            each_row([&](uint32_t row, float upper, float lower) {
                const float other = __shfl_xor_sync(~0u, odd ? upper : lower, 4);
                const uint32_t two = Pair<T>::narrow((odd ? other : upper) + more.x, (odd ? lower : other) + more.y);
                if (exists && row < count) from[row_of_y(row) * (shape.y_stride / 2)] = two;
            });
        }
    }
};

template <class Shape, bool SHORT>
__device__ __forceinline__ void linear_sm90(const TensorMap& x, const void* weights, const float* table, const void* bias, void* y,
                                            const uint32_t* order, const LinearPart& part, const LinearShape& shape,
                                            typename Shape::Shared& shared) {
    const uint32_t tiles = shape.k / TILE_INPUTS, panel = blockIdx.x * Shape::WARPS + threadIdx.x / 32;
    const uint32_t in_slice = (tiles + gridDim.z * WIDE_TILES - 1) / (gridDim.z * WIDE_TILES) * WIDE_TILES;
    const uint32_t first = min(blockIdx.z * in_slice, tiles);
    WideLinear<Shape, SHORT> work{shape,
                                  x,
                                  table,
                                  shared,
                                  part,
                                  first,
                                  min(in_slice, tiles - first),
                                  {weights, part.expert, min(panel, (shape.n - 1) / PANEL), shape}};
    work.multiply();
    work.store(bias, y, order, panel * PANEL);
}

// All threads of a block must call it with the same part, which has rows.
template <class Shape>
__device__ __forceinline__ void linear_sm90(const TensorMap& x, const void* weights, const float* table, const void* bias, void* y,
                                            const uint32_t* order, const LinearPart& part, const LinearShape& shape,
                                            unsigned char* memory) {
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
    if constexpr (!std::is_same_v<typename Shape::Form, Numbers>) {
        if (shape.group_shift == 5) return linear_sm90<Shape, true>(x, weights, table, bias, y, order, part, shape, shared);
    }
    linear_sm90<Shape, false>(x, weights, table, bias, y, order, part, shape, shared);
}

}  // namespace quire
