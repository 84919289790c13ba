// The query rows of a tile: what they see, their sums over several partitions, and their output. Decode (paged_gqa.cu) and
// prefill (paged_prefill.cu) share this code.
//
// The rows of a sequence and KV head are numbered token by token, and within a token head by head of its group.
//
//   rows of a sequence, group of 4:   token 0: h0 h1 h2 h3   token 1: h0 h1 h2 h3   ...
//   tiles of 64 rows:                 |-- tokens 0..16 --|-- tokens 16..32 --| ...
#pragma once

#include <quire/export.cuh>

#include "tile.cuh"

namespace quire {

// Returns the heads of the rows `first` to `end` - 1 of a KV head and of a sequence of `tokens` query tokens.
__device__ __forceinline__ SparseHeads heads_of_rows(const AttentionArgs& args, uint32_t context, uint32_t tokens,
                                                     uint32_t kv_head, uint32_t first, uint32_t end) {
    const uint32_t group = args.num_heads / args.num_kv_heads;
    const bool one_token = first / group == (end - 1) / group;
    const uint32_t seen = Visible(args, context, tokens - 1 - first / group).end;
    return SparseHeads(args, kv_head * group + (one_token ? first % group : 0), one_token ? end - first : group,
                       seen ? seen - 1 : 0);
}

// The tile's buffers, and the sums of the partitions so far, which do not fit the registers together with those of the
// current one.
template <class Shape>
struct TileShared {
    typename Shape::Shared tile;
    float folded[Shape::SUMS * 2 * 4][Shape::THREADS];

    // The calling thread's element of `folded` for `sums[i][j][c]`.
    __device__ __forceinline__ float& of_thread(int i, int j, int c) { return folded[(i * 2 + j) * 4 + c][threadIdx.x]; }
};

// Up to TILES * ROWS rows of a sequence and KV head from `first_row` on: those of the calling lane, and what any of them sees.
template <class Shape>
struct TileRows {
    uint32_t seq;
    RowPair rows[Shape::TILES];
    Visible visible;
    SparseHeads sparse;

    __device__ __forceinline__ TileRows(const AttentionArgs& args, uint32_t seq, uint32_t kv_head, uint32_t first_row)
        : seq(seq), visible(0, 0) {
        const uint32_t group = args.num_heads / args.num_kv_heads, context = args.context_lens[seq];
        const Queries queries(args, seq);
        const uint32_t count = queries.count * group;
        if (first_row >= count) return;
#pragma unroll
        for (int r = 0; r < 2 * Shape::TILES; r++) {
            const uint32_t of_tile = threadIdx.x / 32 / Shape::WN * 16 + threadIdx.x % 32 / 4 + r % 2 * 8;
            const uint32_t row = first_row + r / 2 * Shape::ROWS + of_tile;
            if (row >= count) continue;
            const Visible own = queries.visible(args, context, row / group);
            rows[r / 2].set(r % 2, args, queries.start + row / group, kv_head * group + row % group, own);
        }
        const uint32_t last_row = min(first_row + Shape::TILES * Shape::ROWS, count) - 1;
        visible.first = queries.visible(args, context, first_row / group).first;
        visible.end = queries.visible(args, context, last_row / group).end;
        sparse = heads_of_rows(args, context, queries.count, kv_head, first_row, last_row + 1);
    }
    // Heads of one row, from `first_head` on, over the tokens that an indexer chose.
    __device__ __forceinline__ TileRows(const AttentionArgs& args, const Row& row, uint32_t first_head)
        : seq(row.seq), visible(row.visible) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint32_t head = first_head + threadIdx.x / 32 / Shape::WN * 16 + threadIdx.x % 32 / 4 + 8 * r;
            if (head < args.num_heads) rows[0].set(r, args, row.index, head, visible);
        }
    }
};

// The tile of rows of a block of prefill: sequence s has the blocks from (starts[s] - starts[0]) * group / ROWS + s on, which suffice
// for its tiles. The last blocks of a sequence have the longest contexts, so they start first.
struct PrefillTile {
    uint32_t seq, first_row;
    bool exists;

    __device__ __forceinline__ PrefillTile(const AttentionArgs& args, uint32_t rows) {
        const uint32_t group = args.num_heads / args.num_kv_heads, block = gridDim.x - 1 - blockIdx.x;
        const uint32_t* starts = args.query_starts;
        const auto first_block = [=](uint32_t s) { return (starts[s] - starts[0]) * group / rows + s; };
        seq = last_at_most(args.num_seqs, block, first_block);
        first_row = (block - first_block(seq)) * rows;
        exists = first_row < (starts[seq + 1] - starts[seq]) * group;
    }
};

// Stores the sums of one partition.
template <class Shape>
__device__ __forceinline__ void store_partials(const AttentionArgs& args, const TileSums<Shape>& out,
                                               const TileRows<Shape>& tile, uint32_t partition) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (tile.rows[0].index[r] == RowPair::NONE) continue;
        const uint32_t head = tile.rows[0].index[r] % args.num_heads;
        const uint32_t of_seq = tile.rows[0].index[r] / args.num_heads - Queries(args, tile.seq).start;
        const int64_t partial = partial_of(args, tile.seq, partition, of_seq, head);
        if (threadIdx.x / 32 % Shape::WN == 0 && threadIdx.x % 4 == 0) {
            const SoftmaxState state = out.state(r);
            args.partial_states[2 * partial] = state.max;
            args.partial_states[2 * partial + 1] = state.sum;
        }
#pragma unroll
        for (int i = 0; i < Shape::SUMS; i++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const uint32_t column = out.column(i, j);
                if (column >= Shape::D) continue;
                *reinterpret_cast<float2*>(args.partial_sums + partial * Shape::D + column) = out.pair(i, j, r);
            }
        }
    }
}

// Stores the output of the rows.
template <class Shape>
__device__ __forceinline__ void store_output(const AttentionArgs& args, const TileSums<Shape>& out,
                                             const SoftmaxState (&states)[2], const RowPair& rows) {
    using T = typename Shape::T;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (rows.index[r] == RowPair::NONE) continue;
        const Finished finished = finish(args, states[r], rows.index[r] % args.num_heads);
        T* to = static_cast<T*>(args.output) + static_cast<int64_t>(rows.index[r]) * Shape::D;
#pragma unroll
        for (int i = 0; i < Shape::SUMS; i++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const uint32_t column = out.column(i, j);
                if (column >= Shape::D) continue;
                const float2 pair = out.pair(i, j, r);
                *reinterpret_cast<uint32_t*>(to + column) = Pair<T>::narrow(pair.x * finished.factor, pair.y * finished.factor);
            }
        }
        if (args.lse && threadIdx.x / 32 % Shape::WN == 0 && threadIdx.x % 4 == 0) {
            args.lse[rows.index[r]] = finished.lse;
        }
    }
}

// Computes what the rows see of a partition of the work list and stores the partial results, or merges all partitions and stores the
// output. All threads may reuse shared memory before and after.
template <class Shape>
__device__ __forceinline__ void compute_rows(const AttentionArgs& args, TileShared<Shape>& shared, const TileTask& task,
                                             TileRows<Shape>& tile, const Piece& piece) {
    const uint32_t first = max(tile.visible.first, piece.first), end = min(tile.visible.end, piece.end);
    if (piece.is_split() && first >= end) return;
    uint32_t query[Shape::D / 16][4];
    // `attend` passes the barrier that shared memory then needs.
    if (first < end) load_query<Shape>(query, shared.tile, args, tile.rows[0]);
    SoftmaxState states[2];
    TileSums<Shape> of_tiles[1];
    TileSums<Shape>& out = of_tiles[0];
    out.clear();
    for (uint32_t start = first / PARTITION * PARTITION; start < end; start += PARTITION) {
        out.clear();
        attend<Shape>(of_tiles, shared.tile, task, tile.rows[0], query, Visible(max(first, start), min(end, start + PARTITION)));
        out.normalise(args.kv_format);
        if (piece.is_split()) {
            store_partials(args, out, tile, piece.partition);
            return;
        }
        const Factors factors[2] = {merge(states[0], out.state(0)), merge(states[1], out.state(1))};
        const bool old = start > first, more = start + PARTITION < end;
#pragma unroll
        for (int i = 0; i < Shape::SUMS; i++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    float& sum = out.sums[i][j][c];
                    sum = factors[c / 2].merge(old ? shared.of_thread(i, j, c) : 0.0f, sum);
                    if (more) shared.of_thread(i, j, c) = sum;
                }
            }
        }
    }
    store_output(args, out, states, tile.rows[0]);
}

// Shared memory of a block. Sums of several partitions are merged only where a warp has one tile of rows.
template <class Shape>
using BlockMemory = std::conditional_t<Shape::TILES == 1, TileShared<Shape>, typename Shape::Shared>;

}  // namespace quire

// Defines and exports the kernel `name`, which calls run<shape>(arguments, shared memory). A multiprocessor shall have space for `blocks`
// blocks. The shape is last because it contains commas.
#define QUIRE_TILE_KERNEL(name, run, blocks, ...)                                                        \
    extern "C" __global__ void __launch_bounds__((__VA_ARGS__::THREADS), blocks)                         \
        name(QUIRE_ATTENTION_PARAMETERS) {                                                               \
        quire::wait_for_launches();                                                                      \
        extern __shared__ __align__(16) unsigned char smem[];                                            \
        run<__VA_ARGS__>(QUIRE_ATTENTION_ARGS, smem);                                                    \
    }                                                                                                    \
    QUIRE_EXPORT_TILED(name, sizeof(quire::BlockMemory<__VA_ARGS__>), (__VA_ARGS__::THREADS),            \
                       (__VA_ARGS__::TILES * __VA_ARGS__::ROWS));
