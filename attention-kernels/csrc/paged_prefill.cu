// cuda.paged_prefill: causal attention of many query rows over their paged context on tensor cores, kernels
// paged_prefill_<type>_h<head size>[_kv8]. The rows of a sequence, token by token and within a token head by head of a
// group, are split into tiles. A thread block takes one tile of one KV head and merges the partitions of its context.
//
//   rows of a sequence, group of 4:   token 0: h0 h1 h2 h3   token 1: h0 h1 h2 h3   ...
//   tiles of 64 rows:                 |-- tokens 0..16 --|-- tokens 16..32 --| ...
//
// Grid (rows * group / ROWS + num_seqs, num_kv_heads), the division rounding down: the host reads no lengths, and blocks
// behind a sequence's tiles return at once. 128 threads.

#include "instantiate.cuh"
#include "tile.cuh"

namespace quire {

template <class T, bool KV8, int D>
using PrefillShape = TileShape<T, KV8, D, D <= 128 ? 4 : 2, D <= 128 ? 1 : 2>;

// The tile, and the sums of the partitions so far, which do not fit the registers together with those of the current one.
template <class Shape>
struct PrefillShared {
    typename Shape::Shared tile;
    float folded[Shape::SUMS * 2 * 4][Shape::THREADS];

    // The calling thread's element of `folded` for `sums[i][j][c]`.
    __device__ __forceinline__ float& of_thread(int i, int j, int c) { return folded[(i * 2 + j) * 4 + c][threadIdx.x]; }
};

template <class Shape>
__device__ __forceinline__ void paged_prefill(const AttentionArgs& args, unsigned char* memory) {
    using T = typename Shape::T;
    constexpr uint32_t ROWS = Shape::ROWS;
    const uint32_t group = args.num_heads / args.num_kv_heads, kv_head = blockIdx.y;
    // Sequence s has the blocks from (starts[s] - starts[0]) * group / ROWS + s on, which suffice for its tiles. The last
    // blocks of a sequence have the longest contexts, so they start first.
    const uint32_t block = gridDim.x - 1 - blockIdx.x;
    const uint32_t* starts = args.query_starts;
    const auto first_block = [=](uint32_t s) { return (starts[s] - starts[0]) * group / ROWS + s; };
    const uint32_t seq = last_at_most(args.num_seqs, block, first_block);
    const uint32_t first_row = (block - first_block(seq)) * ROWS, seq_start = starts[seq];
    const uint32_t tokens = starts[seq + 1] - seq_start, context = args.context_lens[seq];
    if (first_row >= tokens * group) return;

    RowPair rows;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const uint32_t row = first_row + threadIdx.x / 32 / Shape::WN * 16 + threadIdx.x % 32 / 4 + 8 * r;
        if (row >= tokens * group) continue;
        const Visible visible(args, context, tokens - 1 - row / group);
        rows.set(r, args, seq_start + row / group, kv_head * group + row % group, visible);
    }
    const TileTask task(args, seq, kv_head);
    uint32_t query[Shape::D / 16][4];
    load_query<Shape>(query, args, rows);

    auto& shared = *reinterpret_cast<PrefillShared<Shape>*>(memory);
    const uint32_t last_row = min(first_row + ROWS, tokens * group) - 1;
    const uint32_t first = Visible(args, context, tokens - 1 - first_row / group).first;
    const uint32_t end = Visible(args, context, tokens - 1 - last_row / group).end;
    SoftmaxState states[2];
    TileSums<Shape> out;
    out.clear();
    for (uint32_t start = first / PARTITION * PARTITION; start < end; start += PARTITION) {
        out.clear();
        Visible visible(args, 0, 0);
        visible.first = max(first, start);
        visible.end = min(end, start + PARTITION);
        attend<Shape>(out, shared.tile, task, rows, query, visible);
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
                *reinterpret_cast<uint32_t*>(to + column) =
                    Pair<T>::narrow(out.sums[i][j][2 * r] * finished.factor, out.sums[i][j][2 * r + 1] * finished.factor);
            }
        }
        if (args.lse && threadIdx.x / 32 % Shape::WN == 0 && threadIdx.x % 4 == 0) {
            args.lse[rows.index[r]] = finished.lse;
        }
    }
}

}  // namespace quire

#define PAGED_PREFILL(name, T, KV8, D)                                                         \
    extern "C" __global__ void __launch_bounds__((quire::PrefillShape<T, KV8, D>::THREADS), 2) \
        name(QUIRE_ATTENTION_PARAMETERS) {                                                     \
        extern __shared__ __align__(16) unsigned char smem[];                                  \
        quire::paged_prefill<quire::PrefillShape<T, KV8, D>>(QUIRE_ATTENTION_ARGS, smem);      \
    }                                                                                          \
    QUIRE_EXPORT_SHARED(name, sizeof(quire::PrefillShared<quire::PrefillShape<T, KV8, D>>));

QUIRE_EACH_INSTANCE(PAGED_PREFILL, paged_prefill)
