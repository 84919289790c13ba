// Attention of one query row and head by one thread block. cuda.paged_v1 and cuda.paged_v2 share this function.
//
// v1 (max_partitions = 0) merges the partitions of the context one after the other. v2 launches a thread block for each
// partition, which writes its result to the partial arrays; paged_reduce.cu merges them. Both use the code below for a
// partition and the same merge in the same order, so they agree in every bit.
//
//   partition   0                             1
//   tokens      0 ........................ 511 512 ...
//   warp        0  1  2  3  0  1  2  3  ...    0  1 ...      chunks of 32 tokens
#pragma once

#include "warp_rows.cuh"

namespace quire {

constexpr uint32_t DECODE_THREADS = 32 * WARPS;

// Merges the states of the warps into the state of the partition, the same in all threads.
__device__ __forceinline__ SoftmaxState merge_warps(const SoftmaxState (&warps)[WARPS], float (&factors)[WARPS]) {
    SoftmaxState whole;
#pragma unroll
    for (uint32_t w = 0; w < WARPS; w++) whole.max = fmaxf(whole.max, warps[w].max);
#pragma unroll
    for (uint32_t w = 0; w < WARPS; w++) {
        factors[w] = weight(warps[w].max, base_of(whole.max));
        whole.sum = __fmaf_rn(warps[w].sum, factors[w], whole.sum);
    }
    return whole;
}

template <class Rows>
__device__ __forceinline__ void paged_decode(const AttentionArgs& args) {
    constexpr int PER_THREAD = (Rows::MAX_HEAD + DECODE_THREADS - 1) / DECODE_THREADS;
    using T = typename Rows::Element;
    __shared__ float warp_sums[WARPS][Rows::MAX_HEAD];
    __shared__ float warp_max[WARPS], warp_sum[WARPS];

    const uint32_t head = blockIdx.x % args.num_heads;
    const uint32_t head_dim = Rows::head_dim(args), value_dim = Rows::value_dim(args), warp = threadIdx.x / 32;
    const Row row(args, blockIdx.x / args.num_heads);
    if (!row.exists) return;
    const int64_t index = static_cast<int64_t>(row.index) * args.num_heads + head;
    const bool split = args.max_partitions != 0;
    uint32_t partition = split ? blockIdx.y : row.visible.first / PARTITION;
    if (split && ((partition + 1) * PARTITION <= row.visible.first || partition * PARTITION >= row.visible.end)) return;

    const Task task(args, row, head);
    Rows rows;
    rows.load_query(args, static_cast<const T*>(args.query) + row.index * args.query_stride +
                              static_cast<int64_t>(head) * head_dim);
    SoftmaxState folded;
    float sums[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) sums[i] = 0.0f;

    for (; partition * PARTITION < row.visible.end; partition++) {
        const SoftmaxState mine = attend(rows, task, partition * PARTITION);
        rows.store_sums(args, warp_sums[warp]);
        if (threadIdx.x % 32 == 0) {
            warp_max[warp] = mine.max;
            warp_sum[warp] = mine.sum;
        }
        __syncthreads();
        SoftmaxState states[WARPS];
        float of_warp[WARPS];
#pragma unroll
        for (uint32_t w = 0; w < WARPS; w++) {
            states[w].max = warp_max[w];
            states[w].sum = warp_sum[w];
        }
        const SoftmaxState part = merge_warps(states, of_warp);
        const int64_t partial = static_cast<int64_t>(blockIdx.x) * args.max_partitions + partition;
        const Factors factors = merge(folded, part);
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            const uint32_t d = threadIdx.x + i * DECODE_THREADS;
            if (d >= value_dim) break;
            float sum = 0.0f;
#pragma unroll
            for (uint32_t w = 0; w < WARPS; w++) sum = __fmaf_rn(warp_sums[w][d], of_warp[w], sum);
            if (split) args.partial_sums[partial * value_dim + d] = sum;
            else sums[i] = factors.merge(sums[i], sum);
        }
        if (split) {
            if (threadIdx.x == 0) {
                args.partial_states[2 * partial] = part.max;
                args.partial_states[2 * partial + 1] = part.sum;
            }
            return;
        }
        __syncthreads();
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

}  // namespace quire
