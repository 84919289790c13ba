// cuda.prefill_sm90: the function of paged_prefill.cu for Hopper only. Kernels prefill_sm90_<type>_h<head size>.
//
// Three warpgroups with different roles. One warp of the first loads tiles of 128 keys and values, box by box, into stages
// of shared memory. The other two take 64 rows each and multiply:
//
//   producer      K0 V0 K1 V1 K2 ...                     each waits until both consumers have freed its stage
//   consumer      S0 | softmax S0 | S1, O += P0 V0 | softmax S1 (while V0 is summed) | O *= , S2, O += P1 V1 | ...
//
// A stage has two mbarriers, `full` (the producer arrives, and the bytes of its boxes) and `free` (each consumer warp
// arrives). Scores and sums stay in registers; the weights are the first operand of the second product, from registers.
//
// A box has 64 elements of the tokens of one block, so block sizes divide 128. A slot past the context may contain NaN,
// and 0 * NaN is NaN. So the values of the block in which the context ends are not loaded by a box: the producer's lanes
// store them, with zeros past the context. Keys need no such care, because their scores are masked.
//
// A row's sums are one online softmax over the tiles from its first on, not merged by partitions of 512, and its tiles
// start where neighbouring rows start to see. So bits depend on how rows are split into chunks, and the variant is not
// row-invariant.
//
// Grid (rows * group / 128 + num_seqs, num_kv_heads) as in paged_prefill; 384 threads.

#include <quire/export.cuh>
#include <quire/wgmma.cuh>

#include "tile.cuh"

namespace quire {

template <class T_, int D_>
struct HopperShape {
    using T = T_;
    static constexpr int D = D_, ROWS = 128, TOKENS = 128, STAGES = 256 / D, THREADS = 384;
    static constexpr int SCORES = TOKENS / 8, SUMS = D / 8, PANELS = D / 64;
    static constexpr uint32_t CONSUMER_WARPS = 8;
    static constexpr bool KV8 = false;

    // Panels of 64 elements: rows of 128 bytes, swizzled. Boxes start at multiples of 1024 bytes.
    struct alignas(1024) Shared {
        T query[2][PANELS][ROWS / 2][64];
        T keys[STAGES][PANELS][TOKENS][64];
        T values[STAGES][PANELS][TOKENS][64];
        uint64_t keys_full[STAGES], keys_free[STAGES], values_full[STAGES], values_free[STAGES];
    };
};

// Stage of the pipeline that a tile uses, and the parity of its phase there; `n` is the index of the tile in the block.
template <class Shape>
struct PipelineState {
    uint32_t stage, parity;

    __device__ __forceinline__ explicit PipelineState(uint32_t n) : stage(n % Shape::STAGES), parity(n / Shape::STAGES % 2) {}
};

// The tokens that a block's rows see, in whole tiles from `first_tile` on; `first` is the first that any row sees.
struct Tiles {
    uint32_t first_tile, first, end, context;
};

// Runs in one warp: lane i loads the i-th cache block of each tile.
template <class Shape>
__device__ __forceinline__ void produce(typename Shape::Shared& shared, const TileTask& task, const Tiles& tiles,
                                        const TensorMap& key_map, const TensorMap& value_map) {
    using T = typename Shape::T;
    constexpr uint32_t TOKENS = Shape::TOKENS, VECTORS = Shape::D / 8;
    const uint32_t lane = threadIdx.x % 32, size = task.args.block_size, blocks = TOKENS / size;
    const uint32_t block_bytes = size * Shape::D * sizeof(T);
    const int head = static_cast<int>(task.kv_head);

    uint32_t n = 0;
    for (uint32_t tile = tiles.first_tile; tile < tiles.end; tile += TOKENS, n++) {
        const PipelineState<Shape> state(n);
        const uint32_t begin = tile + lane * size;
        const bool seen = lane < blocks && begin < tiles.end && begin + size > tiles.first;
        const bool whole = seen && begin + size <= tiles.context;
        const int block = seen ? task.table[begin / size] : 0;

        mbarrier_wait(&shared.keys_free[state.stage], state.parity ^ 1);
        uint64_t* full = &shared.keys_full[state.stage];
        const uint32_t seen_blocks = __popc(__ballot_sync(0xffffffff, seen));
        if (lane == 0) mbarrier_arrive_expect(full, seen_blocks * block_bytes);
        for (int p = 0; seen && p < Shape::PANELS; p++) {
            load_box(&shared.keys[state.stage][p][lane * size], key_map, p * 64, 0, head, block, full);
        }

        mbarrier_wait(&shared.values_free[state.stage], state.parity ^ 1);
        full = &shared.values_full[state.stage];
        const uint32_t whole_blocks = __ballot_sync(0xffffffff, whole);
        if (__popc(whole_blocks) < static_cast<int>(blocks)) {
            for (uint32_t v = lane; v < TOKENS * VECTORS; v += 32) {
                const uint32_t row = v / VECTORS, chunk = v % VECTORS, token = tile + row;
                if (whole_blocks >> row / size & 1) continue;
                const bool exists = token >= tiles.first && token < tiles.end;
                const T* from = static_cast<const T*>(task.args.values) + chunk * 8;
                if (exists) from += task.head_offset + place_of(task.args, task.table, token);
                proxy_store(chunk_in_128(shared.values[state.stage][chunk / 8], row, chunk % 8),
                            exists ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0));
            }
            proxy_fence();
            __syncwarp();
        }
        if (lane == 0) mbarrier_arrive_expect(full, __popc(whole_blocks) * block_bytes);
        for (int p = 0; whole && p < Shape::PANELS; p++) {
            load_box(&shared.values[state.stage][p][lane * size], value_map, p * 64, 0, head, block, full);
        }
    }
}

// State of one consumer warpgroup.
template <class Shape>
struct Consumer {
    using T = typename Shape::T;
    using Shared = typename Shape::Shared;

    Shared& shared;
    const TileTask& task;
    const RowPair& rows;
    uint64_t query;
    float max[2] = {-INFINITY, -INFINITY};
    float sum[2] = {0.0f, 0.0f};  // of this lane's columns
    float sums[Shape::SUMS][4] = {};
    float scores[Shape::SCORES][4] = {};
    uint32_t weights[Shape::TOKENS / 16][4] = {};

    // Frees a stage after all reads of this warp.
    static __device__ __forceinline__ void release(uint64_t* free) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(free);
    }

    // Starts the product of queries and keys of a tile.
    __device__ __forceinline__ void multiply_keys(const PipelineState<Shape>& state) {
        mbarrier_wait(&shared.keys_full[state.stage], state.parity);
        const uint64_t keys = matrix_in_128(shared.keys[state.stage], 16, 1024);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < Shape::D / 16; k++) {
            const uint32_t within = k % 4 * 32;
            wgmma<T, Shape::TOKENS, Rows::K>(scores, matrix_from(query, k / 4 * (Shape::ROWS / 2) * 128 + within),
                                             matrix_from(keys, k / 4 * Shape::TOKENS * 128 + within), k > 0);
        }
        wgmma_commit();
    }

    // Starts the product of weights and values of a tile.
    __device__ __forceinline__ void multiply_values(const PipelineState<Shape>& state) {
        mbarrier_wait(&shared.values_full[state.stage], state.parity);
        const uint64_t values = matrix_in_128(shared.values[state.stage], Shape::TOKENS * 128, 1024);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < Shape::TOKENS / 16; k++) {
            wgmma<T, Shape::D, Rows::COLUMNS>(sums, weights[k], matrix_from(values, k * 16 * 128), true);
        }
        wgmma_commit();
    }

    // Converts scores to weights, still in float. `rescale` receives the factors of the older sums.
    __device__ __forceinline__ void online_softmax(uint32_t tile, float (&rescale)[2]) {
        finish_scores<Shape>(scores, task, rows, tile);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float greatest = max[r];
#pragma unroll
            for (int n = 0; n < Shape::SCORES; n++) greatest = fmaxf(greatest, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
            greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffff, greatest, 1));
            greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffff, greatest, 2));
            const float base = base_of(greatest);
            rescale[r] = exp2_approx(__fsub_rn(max[r], base));
            max[r] = greatest;
            sum[r] = __fmul_rn(sum[r], rescale[r]);
#pragma unroll
            for (int n = 0; n < Shape::SCORES; n++) {
#pragma unroll
                for (int c = 2 * r; c < 2 * r + 2; c++) {
                    scores[n][c] = exp2_approx(__fsub_rn(scores[n][c], base));
                    sum[r] = __fadd_rn(sum[r], scores[n][c]);
                }
            }
        }
    }

    // Rounds the weights into registers, as the first operand of the second product.
    __device__ __forceinline__ void narrow_weights() {
#pragma unroll
        for (int k = 0; k < Shape::TOKENS / 16; k++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* pair = &scores[2 * k + i / 2][i % 2 * 2];
                weights[k][i] = Pair<T>::narrow(pair[0], pair[1]);
            }
        }
    }

    // Processes the tiles `low..high` of the block's `all` tiles and frees the others.
    __device__ __forceinline__ void attend(const Tiles& tiles, uint32_t low, uint32_t high, uint32_t all) {
        skip(0, low);
        if (low < high) {
            float rescale[2];
            PipelineState<Shape> previous(low);
            multiply_keys(previous);
            wgmma_wait<0>();
            release(&shared.keys_free[previous.stage]);
            online_softmax(tiles.first_tile + low * Shape::TOKENS, rescale);
            narrow_weights();
            for (uint32_t n = low + 1; n < high; n++) {
                const PipelineState<Shape> state(n);
                multiply_keys(state);
                multiply_values(previous);
                wgmma_wait<1>();  // the keys
                release(&shared.keys_free[state.stage]);
                online_softmax(tiles.first_tile + n * Shape::TOKENS, rescale);
                wgmma_wait<0>();  // the values
                release(&shared.values_free[previous.stage]);
#pragma unroll
                for (int i = 0; i < Shape::SUMS; i++) {
#pragma unroll
                    for (int c = 0; c < 4; c++) sums[i][c] = __fmul_rn(sums[i][c], rescale[c / 2]);
                }
                narrow_weights();
                previous = state;
            }
            multiply_values(previous);
            wgmma_wait<0>();
            release(&shared.values_free[previous.stage]);
        }
        skip(high, all);
    }

    // Frees tiles that no row of this warpgroup sees. Waits for them first, so that no warp frees a stage twice in one
    // phase.
    __device__ __forceinline__ void skip(uint32_t from, uint32_t to) {
        for (uint32_t n = from; n < to; n++) {
            const PipelineState<Shape> state(n);
            mbarrier_wait(&shared.keys_full[state.stage], state.parity);
            release(&shared.keys_free[state.stage]);
            mbarrier_wait(&shared.values_full[state.stage], state.parity);
            release(&shared.values_free[state.stage]);
        }
    }

    __device__ __forceinline__ void write() const {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float total = __fadd_rn(sum[r], __shfl_xor_sync(0xffffffff, sum[r], 1));
            total = __fadd_rn(total, __shfl_xor_sync(0xffffffff, total, 2));
            if (rows.index[r] == RowPair::NONE) continue;
            SoftmaxState softmax;
            softmax.max = max[r];
            softmax.sum = total;
            const Finished finished = finish(task.args, softmax, rows.index[r] % task.args.num_heads);
            T* to = static_cast<T*>(task.args.output) + static_cast<int64_t>(rows.index[r]) * Shape::D + threadIdx.x % 4 * 2;
#pragma unroll
            for (int i = 0; i < Shape::SUMS; i++) {
                *reinterpret_cast<uint32_t*>(to + i * 8) =
                    Pair<T>::narrow(sums[i][2 * r] * finished.factor, sums[i][2 * r + 1] * finished.factor);
            }
            if (task.args.lse && threadIdx.x % 4 == 0) task.args.lse[rows.index[r]] = finished.lse;
        }
    }
};

// Stores the 64 query rows of a warpgroup, from row `first_row` of the sequence's `all` rows on, into shared memory; zeros
// past the end.
template <class Shape>
__device__ __forceinline__ void store_query(typename Shape::T (&to)[Shape::PANELS][Shape::ROWS / 2][64], const TileTask& task,
                                            uint32_t seq_start, uint32_t first_row, uint32_t all, uint32_t group) {
    constexpr uint32_t VECTORS = Shape::D / 8;
    for (uint32_t v = threadIdx.x % 128; v < Shape::ROWS / 2 * VECTORS; v += 128) {
        const uint32_t row = first_row + v / VECTORS, chunk = v % VECTORS;
        const int64_t at = static_cast<int64_t>(seq_start + row / group) * task.args.query_stride +
                           static_cast<int64_t>(task.kv_head * group + row % group) * Shape::D + chunk * 8;
        const auto* from = static_cast<const typename Shape::T*>(task.args.query) + at;
        proxy_store(chunk_in_128(to[chunk / 8], v / VECTORS, chunk % 8),
                    row < all ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0));
    }
    proxy_fence();
}

template <class Shape>
__device__ __forceinline__ void prefill_sm90(const AttentionArgs& args, const TensorMap& key_map, const TensorMap& value_map,
                                             unsigned char* memory) {
    constexpr uint32_t ROWS = Shape::ROWS, TOKENS = Shape::TOKENS;
    auto& shared = *reinterpret_cast<typename Shape::Shared*>(memory);
    // Swizzling depends on addresses, so shared memory must start at a multiple of the pattern.
    if (matrix_in_128(memory, 0, 0) & 0x3f) __trap();
    const uint32_t group = args.num_heads / args.num_kv_heads, kv_head = blockIdx.y;
    const uint32_t block = gridDim.x - 1 - blockIdx.x;  // the longest contexts first
    const uint32_t* starts = args.query_starts;
    const auto first_block = [=](uint32_t s) { return (starts[s] - starts[0]) * group / ROWS + s; };
    const uint32_t seq = last_at_most(args.num_seqs, block, first_block);
    const uint32_t first_row = (block - first_block(seq)) * ROWS, seq_start = starts[seq];
    const uint32_t tokens = starts[seq + 1] - seq_start, all = tokens * group, context = args.context_lens[seq];
    if (first_row >= all) return;

    // First token that row `from` sees, and end of what the last row before `to` sees.
    const auto first_of = [&](uint32_t from) { return Visible(args, context, tokens - 1 - from / group).first; };
    const auto end_of = [&](uint32_t to) { return Visible(args, context, tokens - 1 - (min(to, all) - 1) / group).end; };
    Tiles tiles;
    tiles.first = first_of(first_row);
    tiles.end = end_of(first_row + ROWS);
    tiles.first_tile = tiles.first / TOKENS * TOKENS;
    tiles.context = context;

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < Shape::STAGES; stage++) {
            mbarrier_init(&shared.keys_full[stage], 1);
            mbarrier_init(&shared.values_full[stage], 1);
            mbarrier_init(&shared.keys_free[stage], Shape::CONSUMER_WARPS);
            mbarrier_init(&shared.values_free[stage], Shape::CONSUMER_WARPS);
        }
        mbarrier_init_fence();
    }
    __syncthreads();

    const TileTask task(args, seq, kv_head, SparseHeads{0, 0, 0});
    if (threadIdx.x < 128) {
        give_registers<40>();
        if (threadIdx.x < 32) produce<Shape>(shared, task, tiles, key_map, value_map);
    } else {
        take_registers<232>();
        const uint32_t consumer = threadIdx.x / 128 - 1, own_row = first_row + consumer * ROWS / 2;
        store_query<Shape>(shared.query[consumer], task, seq_start, own_row, all, group);
        named_barrier_sync(1 + consumer, 128);

        RowPair rows;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint32_t row = own_row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r;
            if (row >= all) continue;
            const Visible visible(args, context, tokens - 1 - row / group);
            rows.set(r, args, seq_start + row / group, kv_head * group + row % group, visible);
        }
        const auto tile_of = [&](uint32_t token) { return (token - tiles.first_tile) / TOKENS; };
        const uint32_t count = tile_of(tiles.end + TOKENS - 1);
        const bool idle = own_row >= all;
        const uint32_t low = idle ? 0 : tile_of(first_of(own_row));
        const uint32_t high = idle ? 0 : tile_of(end_of(own_row + ROWS / 2) + TOKENS - 1);
        Consumer<Shape> work{shared, task, rows, matrix_in_128(shared.query[consumer], 16, 1024)};
        work.attend(tiles, low, high, count);
        work.write();
    }
}

}  // namespace quire

#define PREFILL_SM90(name, T, D)                                                                                          \
    extern "C" __global__ void __launch_bounds__((quire::HopperShape<T, D>::THREADS), 1)                                  \
        name(QUIRE_ATTENTION_PARAMETERS, const __grid_constant__ quire::TensorMap key_map,                                \
             const __grid_constant__ quire::TensorMap value_map) {                                                        \
        extern __shared__ __align__(1024) unsigned char smem[];                                                           \
        quire::prefill_sm90<quire::HopperShape<T, D>>(QUIRE_ATTENTION_ARGS, key_map, value_map, smem);                    \
    }                                                                                                                     \
    QUIRE_EXPORT_SHARED(name, sizeof(quire::HopperShape<T, D>::Shared));

PREFILL_SM90(prefill_sm90_f16_h64, __half, 64)
PREFILL_SM90(prefill_sm90_f16_h128, __half, 128)
PREFILL_SM90(prefill_sm90_bf16_h64, __nv_bfloat16, 64)
PREFILL_SM90(prefill_sm90_bf16_h128, __nv_bfloat16, 128)
