// cuda.prefill_sm90: the function of paged_prefill.cu for Hopper only. Kernels prefill_sm90_<type>_h<head size>.
//
// Three warpgroups with different roles. One warp of the first loads tiles of 128 keys and values, box by box, into stages
// of shared memory. The other two take 64 rows each and multiply, in turns (ping-pong, as in FlashAttention-3, Shah et al.,
// 2024): a turn starts the products S = Q K^T of a tile and O += P V of the tile before, and passes on at once. So the tensor
// cores have the products of one warpgroup while the other computes the weights of its scores.
//
//   producer      K0 V0 K1 V1 K2 ...                    each waits until both consumers have freed its stage
//   consumer 0    S0 | weights 0 |      S1 O0 | weights 1 | ...
//   consumer 1         S0 | weights 0 |      S1 O0 | weights 1 | ...
//
// A stage has two mbarriers, `full` (the producer arrives, and the bytes of its boxes) and `free` (each consumer warp
// arrives). Scores and sums stay in registers; the weights are the first operand of the second product, from registers.
//
// Nothing can deadlock. Both consumers take a turn for each tile of the block, also for tiles that their rows do not see, so
// turn n of consumer 0 follows turn n - 1 of consumer 1, whose turn n follows turn n of consumer 0. Who has a turn waits for
// nothing. To take turn n one needs the keys of tile n and the values of tile n - 1, and after turn n, for the last tile of
// its rows or for one that they do not see, the values of tile n. The producer loads these when both consumers have freed the
// tile that is STAGES earlier, which they do after their turns up to n - STAGES + 1 without another one. With at least two
// stages these turns come before turn n, so every wait is for an earlier turn.
//
// A box has 64 elements of the tokens of one block, so block sizes divide 128. A slot past the context or a token before
// the window may contain NaN, and 0 * NaN is NaN. So the values of a block that is not seen whole are not loaded by a box:
// the producer's lanes store them, with zeros for what is not seen. Keys need no such care, because their scores are
// masked.
//
// A row's sums are one online softmax over the tiles from its first on, not merged by partitions of 512, and its tiles
// start where neighbouring rows start to see. So bits depend on how rows are split into chunks, and the variant is not
// row-invariant.
//
// Grid (rows * group / 128 + num_seqs, num_kv_heads) as in paged_prefill; 384 threads.

#include <quire/export.cuh>
#include <quire/wgmma.cuh>

#include "tile_rows.cuh"

namespace quire {

template <class T_, int D_>
struct HopperShape {
    using T = T_;
    static constexpr int D = D_, ROWS = 128, TOKENS = 128, STAGES = 256 / D, THREADS = 384;
    static constexpr int SCORES = TOKENS / 8, SUMS = D / 8, PANELS = D / 64;
    static constexpr uint32_t CONSUMER_WARPS = 8;
    static constexpr uint32_t TURNS = 3;  // first of the named barriers of the two consumers' turns
    static constexpr bool KV8 = false;
    static_assert(STAGES >= 2, "with one stage the turns of the consumers could wait for each other");

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

// The tiles of a block, which producer and consumers visit in the same order: those with a token that some row may see.
template <class Shape>
struct Tiles {
    const TileTask& task;
    Visible seen;            // by the rows of the block
    uint32_t tile, next;     // first tokens of a tile and of the one after it; from seen.end on: there is none
    uint32_t n = 0;          // index of the tile

    __device__ __forceinline__ Tiles(const TileTask& task, const Visible& seen)
        : task(task), seen(seen), tile(from(seen.first)), next(from(tile + Shape::TOKENS)) {}
    __device__ __forceinline__ uint32_t from(uint32_t token) const { return task.template tile_from<Shape::TOKENS>(token, seen.end); }
    __device__ __forceinline__ bool exists() const { return tile < seen.end; }
    __device__ __forceinline__ bool is_last() const { return next >= seen.end; }
    __device__ __forceinline__ void advance() {
        tile = next;
        next = from(next + Shape::TOKENS);
        n++;
    }
};

// Runs in one warp: lane i loads the i-th cache block of each tile. `context` is the end of what the cache contains.
template <class Shape>
__device__ __forceinline__ void produce(typename Shape::Shared& shared, Tiles<Shape> tiles, uint32_t context,
                                        const TensorMap& key_map, const TensorMap& value_map) {
    using T = typename Shape::T;
    constexpr uint32_t TOKENS = Shape::TOKENS, VECTORS = Shape::D / 8;
    const TileTask& task = tiles.task;
    const uint32_t lane = threadIdx.x % 32, size = task.args.block_size, blocks = TOKENS / size;
    const uint32_t block_bytes = size * Shape::D * sizeof(T);
    const int head = static_cast<int>(task.kv_head);

    for (; tiles.exists(); tiles.advance()) {
        const PipelineState<Shape> state(tiles.n);
        const uint32_t begin = tiles.tile + lane * size;
        // A sparse block has whole cache blocks.
        const bool seen = lane < blocks && begin < tiles.seen.end && begin + size > tiles.seen.first &&
                          task.sparse.see_token(task.args, begin);
        const bool whole = seen && begin >= tiles.seen.first && begin + size <= context;
        const int block = seen ? task.table[begin / size] : 0;

        mbarrier_wait(&shared.keys_free[state.stage], state.parity ^ 1);
        uint64_t* full = &shared.keys_full[state.stage];
        const uint32_t seen_blocks = __ballot_sync(0xffffffff, seen);
        if (lane == 0) mbarrier_arrive_expect(full, __popc(seen_blocks) * block_bytes);
        for (int p = 0; seen && p < Shape::PANELS; p++) {
            load_box(&shared.keys[state.stage][p][lane * size], key_map, p * 64, 0, head, block, full);
        }

        mbarrier_wait(&shared.values_free[state.stage], state.parity ^ 1);
        full = &shared.values_full[state.stage];
        const uint32_t whole_blocks = __ballot_sync(0xffffffff, whole);
        if (__popc(whole_blocks) < static_cast<int>(blocks)) {
            for (uint32_t v = lane; v < TOKENS * VECTORS; v += 32) {
                const uint32_t row = v / VECTORS, chunk = v % VECTORS, token = tiles.tile + row;
                if (whole_blocks >> row / size & 1) continue;
                const bool exists = seen_blocks >> row / size & 1 && token >= tiles.seen.first && token < tiles.seen.end;
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
    const RowPair& rows;
    Tiles<Shape> tiles;
    uint32_t which;  // 0 or 1
    uint64_t query;
    float max[2] = {-INFINITY, -INFINITY};
    float sum[2] = {0.0f, 0.0f};  // of this lane's columns
    float sums[Shape::SUMS][4] = {};
    float scores[Shape::SCORES][4] = {};
    uint32_t weights[Shape::TOKENS / 16][4] = {};

    // Waits for the turn of this tile. The first turn is that of consumer 0.
    __device__ __forceinline__ void take_turn() const {
        if (which > 0 || tiles.n > 0) named_barrier_sync(Shape::TURNS + which, 256);
    }
    // Passes the turn on. Nobody takes the one after the last.
    __device__ __forceinline__ void pass_turn() const {
        if (which == 0 || !tiles.is_last()) named_barrier_arrive(Shape::TURNS + (which ^ 1), 256);
    }

    // Frees a stage after all reads of this warp.
    static __device__ __forceinline__ void release(uint64_t* free) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(free);
    }
    __device__ __forceinline__ void await_keys(const PipelineState<Shape>& state) {
        mbarrier_wait(&shared.keys_full[state.stage], state.parity);
    }
    __device__ __forceinline__ void await_values(const PipelineState<Shape>& state) {
        mbarrier_wait(&shared.values_full[state.stage], state.parity);
    }

    // Starts the product of queries and keys of a tile.
    __device__ __forceinline__ void multiply_keys(const PipelineState<Shape>& state) {
        const uint64_t keys = matrix_in_128(shared.keys[state.stage], 16, 1024);
        wgmma_fence(scores);
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
        const uint64_t values = matrix_in_128(shared.values[state.stage], Shape::TOKENS * 128, 1024);
        wgmma_fence(sums, weights);
#pragma unroll
        for (int k = 0; k < Shape::TOKENS / 16; k++) {
            wgmma<T, Shape::D, Rows::COLUMNS>(sums, weights[k], matrix_from(values, k * 16 * 128), true);
        }
        wgmma_commit();
    }

    // Converts the products of the tile to weights, still in float. `rescale` receives the factors of the older sums.
    __device__ __forceinline__ void online_softmax(float (&rescale)[2]) {
        const TileTask& task = tiles.task;
        finish_scores<Shape>(scores, task, rows, tiles.tile);
        const float scale = task.scoring.left();
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float greatest = -INFINITY;
#pragma unroll
            for (int n = 0; n < Shape::SCORES; n++) greatest = fmaxf(greatest, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
            greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffff, greatest, 1));
            greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffff, greatest, 2));
            greatest = fmaxf(max[r], __fmul_rn(greatest, scale));
            const float base = base_of(greatest);
            rescale[r] = exp2_approx(__fsub_rn(max[r], base));
            max[r] = greatest;
            sum[r] = __fmul_rn(sum[r], rescale[r]);
#pragma unroll
            for (int n = 0; n < Shape::SCORES; n++) {
#pragma unroll
                for (int c = 2 * r; c < 2 * r + 2; c++) {
                    scores[n][c] = exp2_approx(__fmaf_rn(scores[n][c], scale, -base));
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

    // Computes the tiles with tokens of `own`, which the rows of this warpgroup see, and frees the others.
    __device__ __forceinline__ void attend(const Visible& own) {
        while (tiles.exists() && tiles.tile + Shape::TOKENS <= own.first) skip();
        if (tiles.tile < own.end) {
            float rescale[2];
            PipelineState<Shape> previous(tiles.n);
            await_keys(previous);
            take_turn();
            multiply_keys(previous);
            pass_turn();
            wgmma_wait<0>(scores);
            release(&shared.keys_free[previous.stage]);
            online_softmax(rescale);
            narrow_weights();
            for (tiles.advance(); tiles.tile < own.end; tiles.advance()) {
                const PipelineState<Shape> state(tiles.n);
                await_keys(state);
                await_values(previous);
                take_turn();
                multiply_keys(state);
                multiply_values(previous);
                pass_turn();
                wgmma_wait<1>(scores);  // the keys
                release(&shared.keys_free[state.stage]);
                online_softmax(rescale);
                wgmma_wait<0>(sums, weights);  // the values
                release(&shared.values_free[previous.stage]);
#pragma unroll
                for (int i = 0; i < Shape::SUMS; i++) {
#pragma unroll
                    for (int c = 0; c < 4; c++) sums[i][c] = __fmul_rn(sums[i][c], rescale[c / 2]);
                }
                narrow_weights();
                previous = state;
            }
            await_values(previous);
            multiply_values(previous);
            wgmma_wait<0>(sums);
            release(&shared.values_free[previous.stage]);
        }
        while (tiles.exists()) skip();
    }

    // Frees a tile that no row of this warpgroup sees. Waits for it first, so that no warp frees a stage twice in one phase.
    __device__ __forceinline__ void skip() {
        take_turn();
        pass_turn();
        const PipelineState<Shape> state(tiles.n);
        await_keys(state);
        release(&shared.keys_free[state.stage]);
        await_values(state);
        release(&shared.values_free[state.stage]);
        tiles.advance();
    }

    __device__ __forceinline__ void write() const {
        const AttentionArgs& args = tiles.task.args;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float total = __fadd_rn(sum[r], __shfl_xor_sync(0xffffffff, sum[r], 1));
            total = __fadd_rn(total, __shfl_xor_sync(0xffffffff, total, 2));
            if (rows.index[r] == RowPair::NONE) continue;
            SoftmaxState softmax;
            softmax.max = max[r];
            softmax.sum = total;
            const Finished finished = finish(args, softmax, rows.index[r] % args.num_heads);
            T* to = static_cast<T*>(args.output) + static_cast<int64_t>(rows.index[r]) * Shape::D + threadIdx.x % 4 * 2;
#pragma unroll
            for (int i = 0; i < Shape::SUMS; i++) {
                *reinterpret_cast<uint32_t*>(to + i * 8) =
                    Pair<T>::narrow(sums[i][2 * r] * finished.factor, sums[i][2 * r + 1] * finished.factor);
            }
            if (args.lse && threadIdx.x % 4 == 0) args.lse[rows.index[r]] = finished.lse;
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
    constexpr uint32_t ROWS = Shape::ROWS;
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

    // What the rows `from` and `to` - 1, and those between, see.
    const auto seen_by = [&](uint32_t from, uint32_t to) {
        const Visible first(args, context, tokens - 1 - from / group), last(args, context, tokens - 1 - (min(to, all) - 1) / group);
        return Visible(first.first, last.end);
    };
    const TileTask task(args, seq, kv_head, heads_of_rows(args, context, tokens, kv_head, first_row, min(first_row + ROWS, all)));
    const Tiles<Shape> tiles(task, seen_by(first_row, first_row + ROWS));

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

    // Without as many at entry, which kernels.toml demands of ptxas, take_registers would wait for ever.
    constexpr int ENTRY_REGISTERS = 168, PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
    static_assert(128 * PRODUCER_REGISTERS + 256 * CONSUMER_REGISTERS == Shape::THREADS * ENTRY_REGISTERS);
    if (threadIdx.x < 128) {
        give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x < 32) produce<Shape>(shared, tiles, context, key_map, value_map);
    } else {
        take_registers<CONSUMER_REGISTERS>();
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
        const Visible own = own_row < all ? seen_by(own_row, own_row + ROWS / 2) : Visible(0, 0);
        Consumer<Shape> work{shared, rows, tiles, consumer, matrix_in_128(shared.query[consumer], 16, 1024)};
        work.attend(own);
        work.write();
    }
}

}  // namespace quire

#define PREFILL_SM90(name, T, D)                                                                                          \
    extern "C" __global__ void __launch_bounds__((quire::HopperShape<T, D>::THREADS), 1)                                  \
        name(QUIRE_ATTENTION_PARAMETERS, const __grid_constant__ quire::TensorMap key_map,                                \
             const __grid_constant__ quire::TensorMap value_map) {                                                        \
        quire::wait_for_launches();                                                                                       \
        extern __shared__ __align__(1024) unsigned char smem[];                                                           \
        quire::prefill_sm90<quire::HopperShape<T, D>>(QUIRE_ATTENTION_ARGS, key_map, value_map, smem);                    \
    }                                                                                                                     \
    QUIRE_EXPORT_TILED(name, sizeof(quire::HopperShape<T, D>::Shared), (quire::HopperShape<T, D>::THREADS),                \
                       (quire::HopperShape<T, D>::ROWS));

PREFILL_SM90(prefill_sm90_f16_h64, __half, 64)
PREFILL_SM90(prefill_sm90_f16_h128, __half, 128)
PREFILL_SM90(prefill_sm90_bf16_h64, __nv_bfloat16, 64)
PREFILL_SM90(prefill_sm90_bf16_h128, __nv_bfloat16, 128)
