// Second pass over split contexts: merges the partial results of a query row and head in the order of the partitions. Rows
// of sequences without partials are complete. Kernels paged_reduce_f16, paged_reduce_bf16 and paged_reduce_f32, for
// cuda.paged_v2, cuda.paged_gqa and cuda.generic.
//
// Grid (rows * num_heads), 128 threads; thread i computes the elements i, i + 128, … of the value.

#include <quire/export.cuh>

#include "rows.cuh"
#include "softmax.cuh"

namespace quire {

constexpr uint32_t REDUCE_THREADS = 128;
constexpr uint32_t PER_THREAD = (WIDEST_HEAD + REDUCE_THREADS - 1) / REDUCE_THREADS;

template <class T>
__device__ __forceinline__ void paged_reduce(const AttentionArgs& args) {
    const uint32_t head = blockIdx.x % args.num_heads;
    const Row row = Row::nth(args, blockIdx.x / args.num_heads);
    if (!row.exists || args.first_partials[args.first_seq + row.seq] == NO_PARTIALS) return;
    const int64_t index = static_cast<int64_t>(row.index) * args.num_heads + head;
    const uint32_t begin = row.visible.first / PARTITION, end = row.visible.end;
    SoftmaxState state;
    float sums[PER_THREAD] = {};
    for (uint32_t p = begin; p * PARTITION < end; p++) {
        const int64_t partial = partial_of(args, row.seq, p, row.of_seq, head);
        SoftmaxState part;
        part.max = args.partial_states[2 * partial];
        part.sum = args.partial_states[2 * partial + 1];
        const Factors factors = merge(state, part);
#pragma unroll
        for (uint32_t i = 0; i < PER_THREAD; i++) {
            const uint32_t d = threadIdx.x + i * REDUCE_THREADS;
            if (d < args.value_dim) {
                sums[i] = factors.merge(sums[i], args.partial_sums[partial * args.value_dim + d]);
            }
        }
    }
    const Finished finished = finish(args, state, head);
#pragma unroll
    for (uint32_t i = 0; i < PER_THREAD; i++) {
        const uint32_t d = threadIdx.x + i * REDUCE_THREADS;
        if (d < args.value_dim) {
            static_cast<T*>(args.output)[index * args.value_dim + d] = from_float<T>(sums[i] * finished.factor);
        }
    }
    if (args.lse && threadIdx.x == 0) args.lse[index] = finished.lse;
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
