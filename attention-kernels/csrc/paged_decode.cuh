// Attention of one query row and head by one thread block. cuda.paged_v1 and cuda.paged_v2 share this code.
//
// v1 (no work list) merges the partitions of the context one after the other. v2 has a work list: an item is one partition,
// whose result goes to the partial arrays for paged_reduce.cu, or a whole context as in v1. Both use the same code for a
// partition and the same merge in the same order, so they agree in every bit.
//
//   partition   0                             1
//   tokens      0 ........................ 511 512 ...
//   warp        0  1  2  3  0  1  2  3  ...    0  1 ...      chunks of 32 tokens
#pragma once

#include "warp_rows.cuh"

namespace quire {

constexpr uint32_t DECODE_THREADS = 32 * WARPS;

// Results of the warps of a block for one partition.
template <class Rows>
struct WarpResults {
    float sums[WARPS][Rows::MAX_HEAD];
    float max[WARPS];     // of a SoftmaxState
    float weights[WARPS]; // its sum
};

// Merges the states of the warps into the state of the partition, the same in all threads.
template <class Rows>
__device__ __forceinline__ SoftmaxState merge_warps(const WarpResults<Rows>& warps, float (&factors)[WARPS]) {
    SoftmaxState whole;
#pragma unroll
    for (uint32_t w = 0; w < WARPS; w++) whole.max = fmaxf(whole.max, warps.max[w]);
#pragma unroll
    for (uint32_t w = 0; w < WARPS; w++) {
        factors[w] = weight(warps.max[w], base_of(whole.max));
        whole.sum = __fmaf_rn(warps.weights[w], factors[w], whole.sum);
    }
    return whole;
}

// Computes a piece of the context of a row and head. All threads may reuse `shared` before and after.
template <class Rows>
__device__ __forceinline__ void decode(const AttentionArgs& args, WarpResults<Rows>& shared, const Row& row, uint32_t head,
                                       const Piece& piece) {
    constexpr int PER_THREAD = (Rows::MAX_HEAD + DECODE_THREADS - 1) / DECODE_THREADS;
    using T = typename Rows::Element;
    const uint32_t value_dim = Rows::value_dim(args), warp = threadIdx.x / 32;
    const bool split = piece.is_split();
    const uint32_t first = max(row.visible.first, piece.first), end = min(row.visible.end, piece.end);
    if (!row.exists || (split && first >= end)) return;
    const int64_t index = static_cast<int64_t>(row.index) * args.num_heads + head;

    const Task task(args, row, head);
    Rows rows;
    rows.load_query(args, static_cast<const T*>(args.query) + row.index * args.query_stride +
                              static_cast<int64_t>(head) * args.query_head);
    SoftmaxState folded;
    float sums[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) sums[i] = 0.0f;

    for (uint32_t start = split ? piece.first : first / PARTITION * PARTITION; start < end; start += PARTITION) {
        const SoftmaxState mine = attend(rows, task, start, min(end, start + PARTITION));
        rows.store_sums(args, shared.sums[warp]);
        if (threadIdx.x % 32 == 0) {
            shared.max[warp] = mine.max;
            shared.weights[warp] = mine.sum;
        }
        __syncthreads();
        float of_warp[WARPS];
        const SoftmaxState part = merge_warps(shared, of_warp);
        const int64_t partial = split ? partial_of(args, row.seq, piece.partition, row.of_seq, head) : 0;
        const Factors factors = merge(folded, part);
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            const uint32_t d = threadIdx.x + i * DECODE_THREADS;
            if (d >= value_dim) break;
            float sum = 0.0f;
#pragma unroll
            for (uint32_t w = 0; w < WARPS; w++) sum = __fmaf_rn(shared.sums[w][d], of_warp[w], sum);
            if (split) args.partial_sums[partial * value_dim + d] = sum;
            else sums[i] = factors.merge(sums[i], sum);
        }
        __syncthreads();
        if (split) {
            if (threadIdx.x == 0) {
                args.partial_states[2 * partial] = part.max;
                args.partial_states[2 * partial + 1] = part.sum;
            }
            return;
        }
    }

    const Finished finished = finish(args, folded, head);
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const uint32_t d = threadIdx.x + i * DECODE_THREADS;
        if (d < value_dim) {
            static_cast<T*>(args.output)[index * value_dim + d] = from_float<T>(sums[i] * finished.factor);
        }
    }
    if (args.lse && threadIdx.x == 0) args.lse[index] = finished.lse;
}

template <class Rows>
__device__ __forceinline__ void paged_decode(const AttentionArgs& args) {
    __shared__ WarpResults<Rows> shared;
    const uint32_t parts = args.query_len * args.num_heads;
    const uint32_t units = args.work ? Unit::count(args, parts) : gridDim.x;
    for (uint32_t i = blockIdx.x; i < units; i += gridDim.x) {
        Piece piece;
        Row row;
        if (args.work) {
            const Unit unit(args, i, parts);
            if (unit.seq >= args.num_seqs) continue;
            row = Row(args, unit.seq, unit.part / args.num_heads);
            piece = unit.piece;
        } else {
            row = Row::nth(args, i / args.num_heads);
        }
        decode(args, shared, row, i % args.num_heads, piece);
    }
}

}  // namespace quire
