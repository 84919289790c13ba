// low_rank: y += (s x Aᵀ) Bᵀ for the rows of a step that have an adapter, all adapters at once (LoRA, Hu et al., 2021; SGMV of
// Punica, Chen et al., "Multi-Tenant LoRA Serving", 2023).
//
// shrink_low_rank_<type>   grid (panels of 16 ranks of the widest slot, tasks), 256 threads: t = s x Aᵀ for a panel
// expand_low_rank_<type>   grid (ceil(outputs / 128), tasks), 128 threads: y += t Bᵀ, a thread per output
//
// A task is at most 16 rows of one slot, so a block reads factors once for several rows. The grid has as many tasks as a step of
// its rows can have; blocks past the step's own return at once. t is float [rows with an adapter, width], in the order of the tasks.
//
// A sum depends on its row and the slot's factors alone: shrink sums k = i, i + 128, ... in thread pair i, then over the pairs of a
// warp, then over warps; expand sums over ranks in order. Rows without an adapter are neither read nor written.

#include <quire/export.cuh>

#include "eight.cuh"
#include "low_rank_args.cuh"

namespace quire {

constexpr uint32_t SHRINK_THREADS = 256, SHRINK_WARPS = SHRINK_THREADS / 32;
constexpr uint32_t EXPAND_THREADS = 128;
constexpr uint32_t RANKS_PER_PANEL = 16;
// Rows whose sums a thread holds at a time.
constexpr uint32_t LOW_RANK_ROWS = 8;

// A task in the table (`low_rank_args.cuh`).
struct LowRankTask {
    const unsigned char* slot;
    const uint32_t* rows;
    uint32_t first;
    uint32_t count;  // 0: there is no such task, or the slot adds nothing

    __device__ __forceinline__ LowRankTask(const uint32_t* table, const void* slots, const LowRankShape& shape)
        : slot(nullptr), rows(nullptr), first(0), count(0) {
        const uint32_t tasks = table[0];
        if (blockIdx.y >= tasks) return;
        const uint32_t* task = table + 1 + 3 * blockIdx.y;
        slot = static_cast<const unsigned char*>(slots) + task[0] * shape.slot_bytes;
        first = task[1];
        rows = table + 1 + 3 * tasks + first;
        if (header().panels > 0) count = task[2];
    }

    __device__ __forceinline__ const LowRankHeader& header() const {
        return *reinterpret_cast<const LowRankHeader*>(slot);
    }
    __device__ __forceinline__ const LowRankPart& part(uint32_t i) const {
        return reinterpret_cast<const LowRankPart*>(slot + sizeof(LowRankHeader))[i];
    }
};

template <class T>
__device__ __forceinline__ void shrink_low_rank(const T* x, const void* slots, const uint32_t* table, float* t,
                                                const LowRankShape& shape) {
    __shared__ float of_warps[SHRINK_WARPS][LOW_RANK_ROWS][RANKS_PER_PANEL];
    const LowRankTask task(table, slots, shape);
    const uint32_t panel = blockIdx.x, half = threadIdx.x % 2 * 8, warp = threadIdx.x / 32;
    if (task.count == 0 || panel >= task.header().panels) return;
    const T* down = reinterpret_cast<const T*>(task.slot + task.header().down) +
                    static_cast<int64_t>(panel) * shape.inputs * RANKS_PER_PANEL + half;
    const float* scales = reinterpret_cast<const float*>(task.slot + task.header().scales) + panel * RANKS_PER_PANEL;
    for (uint32_t first = 0; first < task.count; first += LOW_RANK_ROWS) {
        const uint32_t count = min(LOW_RANK_ROWS, task.count - first);
        float sums[LOW_RANK_ROWS][8] = {};
        for (uint32_t k = threadIdx.x / 2; k < shape.inputs; k += SHRINK_THREADS / 2) {
            Eight<T> piece;
            float weights[8];
            piece.load(down + static_cast<int64_t>(k) * RANKS_PER_PANEL);
            piece.get(weights);
#pragma unroll
            for (uint32_t r = 0; r < LOW_RANK_ROWS; r++) {
                if (r >= count) break;
                const float value = to_float(x[static_cast<int64_t>(task.rows[first + r]) * shape.inputs + k]);
#pragma unroll
                for (uint32_t i = 0; i < 8; i++) sums[r][i] += value * weights[i];
            }
        }
#pragma unroll
        for (uint32_t r = 0; r < LOW_RANK_ROWS; r++) {
            if (r >= count) break;
#pragma unroll
            for (uint32_t i = 0; i < 8; i++) {
                float sum = sums[r][i];
#pragma unroll
                for (uint32_t step = 16; step > 1; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
                if (threadIdx.x % 32 < 2) of_warps[warp][r][half + i] = sum;
            }
        }
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < count * RANKS_PER_PANEL; i += SHRINK_THREADS) {
            const uint32_t r = i / RANKS_PER_PANEL, rank = i % RANKS_PER_PANEL;
            float sum = 0.0f;
#pragma unroll
            for (uint32_t w = 0; w < SHRINK_WARPS; w++) sum += of_warps[w][r][rank];
            const int64_t row = static_cast<int64_t>(task.first + first + r) * shape.width;
            t[row + panel * RANKS_PER_PANEL + rank] = sum * scales[rank];
        }
        __syncthreads();
    }
}

template <class T>
__device__ __forceinline__ void expand_low_rank(const float* t, const void* slots, const uint32_t* table, T* y,
                                                const LowRankShape& shape) {
    const LowRankTask task(table, slots, shape);
    const uint32_t output = blockIdx.x * EXPAND_THREADS + threadIdx.x;
    if (task.count == 0 || output >= shape.outputs) return;
    for (uint32_t p = 0; p < task.header().parts; p++) {
        const LowRankPart& part = task.part(p);
        const uint32_t ranks = part.ranks;
        if (output < part.first_output || output - part.first_output >= part.outputs) continue;
        const uint32_t at = output - part.first_output;
        const T* up = reinterpret_cast<const T*>(task.slot + part.up) +
                      static_cast<int64_t>(at / RANKS_PER_PANEL) * ranks * RANKS_PER_PANEL + at % RANKS_PER_PANEL;
        for (uint32_t first = 0; first < task.count; first += LOW_RANK_ROWS) {
            const uint32_t count = min(LOW_RANK_ROWS, task.count - first);
            const float* of_rows = t + static_cast<int64_t>(task.first + first) * shape.width + part.first_rank;
            float sums[LOW_RANK_ROWS] = {};
            for (uint32_t rank = 0; rank < ranks; rank++) {
                const float weight = to_float(up[static_cast<int64_t>(rank) * RANKS_PER_PANEL]);
#pragma unroll
                for (uint32_t r = 0; r < LOW_RANK_ROWS; r++) {
                    if (r >= count) break;
                    sums[r] += of_rows[static_cast<int64_t>(r) * shape.width + rank] * weight;
                }
            }
#pragma unroll
            for (uint32_t r = 0; r < LOW_RANK_ROWS; r++) {
                if (r >= count) break;
                T& to = y[static_cast<int64_t>(task.rows[first + r]) * shape.outputs + output];
                to = from_float<T>(to_float(to) + sums[r]);
            }
        }
    }
}

}  // namespace quire

#define LOW_RANK(type, T)                                                                         \
    extern "C" __global__ void __launch_bounds__(quire::SHRINK_THREADS)                           \
        shrink_low_rank_##type(const void* x, const void* slots, const uint32_t* table, float* t, \
                               const quire::LowRankShape shape) {                                 \
        quire::wait_for_launches();                                                               \
        quire::shrink_low_rank<T>(static_cast<const T*>(x), slots, table, t, shape);              \
    }                                                                                             \
    QUIRE_EXPORT_OVERLAPPED(shrink_low_rank_##type, 0);                                           \
    extern "C" __global__ void __launch_bounds__(quire::EXPAND_THREADS, 4)                        \
        expand_low_rank_##type(const float* t, const void* slots, const uint32_t* table, void* y, \
                               const quire::LowRankShape shape) {                                 \
        quire::wait_for_launches();                                                               \
        quire::expand_low_rank<T>(t, slots, table, static_cast<T*>(y), shape);                    \
    }                                                                                             \
    QUIRE_EXPORT_OVERLAPPED(expand_low_rank_##type, 0);

LOW_RANK(f16, __half)
LOW_RANK(bf16, __nv_bfloat16)
LOW_RANK(f32, float)
