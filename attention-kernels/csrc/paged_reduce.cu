// Second pass over split contexts: merges the partial results of a query row and head in the order of the partitions. Rows
// of sequences without partials are complete. Kernels paged_reduce_f16, paged_reduce_bf16 and paged_reduce_f32, for all variants that
// split contexts.
//
// Grid (rows * num_heads, ceil(value_dim / 128)), 128 threads, one for each element.
//
// The merge of a partition is one multiply-add on the sum of those before, so an element is a chain over the partitions. Nothing else
// need wait for it: the four warps compute the factors of 128 partitions at once, from the greatest score up to each, which a scan
// gives, and a thread has the numbers of 16 partitions in flight.
//
//   states of 128 partitions | scan of maxima: warp, block | factors in shared memory | 16 loads, 16 multiply-adds | 16 loads, ...

#include <quire/export.cuh>

#include "rows.cuh"
#include "softmax.cuh"

namespace quire {

constexpr uint32_t REDUCE_THREADS = 128;
constexpr uint32_t IN_FLIGHT = 16;

// What the merge of a partition multiplies by, and its sum of weights at the new base.
struct PartFactors {
    float old_part, new_part, sum;
};

struct ReduceShared {
    float maxima[REDUCE_THREADS / 32];  // of the partitions of each warp
    PartFactors parts[REDUCE_THREADS];
};

// Computes the factors of a thread's partition, as if all before it were merged one after the other into a state whose maximum is
// `greatest`, which becomes that of all. Its first barrier is behind all reads of the factors before.
__device__ __forceinline__ void find_factors(ReduceShared& shared, const SoftmaxState& part, float& greatest) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float up_to = fmaxf(part.max, -INFINITY);  // NaN, which no maximum keeps, is none
#pragma unroll
    for (uint32_t step = 1; step < 32; step *= 2) {
        const float before = __shfl_up_sync(0xffffffff, up_to, step);
        if (lane >= step) up_to = fmaxf(before, up_to);
    }
    if (lane == 31) shared.maxima[warp] = up_to;
    float before = __shfl_up_sync(0xffffffff, up_to, 1);
    if (lane == 0) before = -INFINITY;
    __syncthreads();
#pragma unroll
    for (uint32_t w = 0; w < REDUCE_THREADS / 32; w++) {
        if (w == warp) before = fmaxf(greatest, before);
        greatest = fmaxf(greatest, shared.maxima[w]);
    }
    SoftmaxState state;
    state.max = before;
    const Factors factors = merge(state, part);
    shared.parts[threadIdx.x] = {factors.old_part, factors.new_part, __fmul_rn(part.sum, factors.new_part)};
    __syncthreads();
}

template <class T>
__device__ __forceinline__ void paged_reduce(const AttentionArgs& args) {
    __shared__ ReduceShared shared;
    const uint32_t head = blockIdx.x % args.num_heads, d = blockIdx.y * REDUCE_THREADS + threadIdx.x;
    const Row row = Row::nth(args, blockIdx.x / args.num_heads);
    if (!row.exists || args.first_partials[args.first_seq + row.seq] == NO_PARTIALS) return;
    const bool has_element = d < args.value_dim;
    const uint32_t size = args.work[0].y;
    const uint32_t begin = row.visible.first / size, end = (row.visible.end + size - 1) / size;
    const int64_t first = partial_of(args, row.seq, 0, row.of_seq, head);
    const int64_t step = partial_of(args, row.seq, 1, row.of_seq, head) - first;
    const float* sums = args.partial_sums + (has_element ? d : 0);
    SoftmaxState state;
    float sum = 0.0f;
    for (uint32_t chunk = begin; chunk < end; chunk += REDUCE_THREADS) {
        const uint32_t own = chunk + threadIdx.x, count = min(end - chunk, REDUCE_THREADS);
        SoftmaxState part;  // past the last partition: nothing
        if (own < end) {
            const float* states = args.partial_states + 2 * (first + own * step);
            part.max = states[0];
            part.sum = states[1];
        }
        find_factors(shared, part, state.max);
        for (uint32_t p = 0; p < count; p += IN_FLIGHT) {
            float loaded[IN_FLIGHT];
#pragma unroll
            for (uint32_t i = 0; i < IN_FLIGHT; i++) {
                if (p + i < count) loaded[i] = sums[(first + (chunk + p + i) * step) * args.value_dim];
            }
#pragma unroll
            for (uint32_t i = 0; i < IN_FLIGHT; i++) {
                if (p + i >= count) break;
                const PartFactors factors = shared.parts[p + i];
                state.sum = __fmaf_rn(state.sum, factors.old_part, factors.sum);
                sum = Factors{factors.old_part, factors.new_part}.merge(sum, loaded[i]);
            }
        }
    }
    const Finished finished = finish(args, state, head);
    const int64_t index = static_cast<int64_t>(row.index) * args.num_heads + head;
    if (has_element) static_cast<T*>(args.output)[index * args.value_dim + d] = from_float<T>(sum * finished.factor);
    if (args.lse && d == 0) args.lse[index] = finished.lse;
}

}  // namespace quire

#define PAGED_REDUCE(name, T)                                           \
    extern "C" __global__ void __launch_bounds__(quire::REDUCE_THREADS) \
        name(QUIRE_ATTENTION_PARAMETERS) {                              \
        quire::wait_for_launches();                                     \
        quire::paged_reduce<T>(QUIRE_ATTENTION_ARGS);                   \
    }                                                                   \
    QUIRE_EXPORT_TILED(name, 0, quire::REDUCE_THREADS, 1);

PAGED_REDUCE(paged_reduce_f16, __half)
PAGED_REDUCE(paged_reduce_bf16, __nv_bfloat16)
PAGED_REDUCE(paged_reduce_f32, float)
