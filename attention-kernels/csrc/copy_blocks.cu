// cuda.copy_blocks: copies whole blocks of keys and values of any type from one pool to the same or another
// (copy-on-write). Kernel copy_blocks.
//
// Grid (num_pairs, 2, splits): keys or values, and `splits` blocks for each pair; 256 threads, 16 bytes each at a time.

#include <quire/export.cuh>

#include "cache_args.cuh"

namespace quire {

constexpr uint32_t COPY_THREADS = 256;

__device__ __forceinline__ void copy_block(const BlockCopyArgs& args) {
    const uint32_t from = args.pairs[2 * blockIdx.x], to = args.pairs[2 * blockIdx.x + 1];
    const void* source_pool = blockIdx.y ? args.source_values : args.source_keys;
    void* target_pool = blockIdx.y ? args.target_values : args.target_keys;
    const uint4* source = reinterpret_cast<const uint4*>(static_cast<const char*>(source_pool) + from * args.source_stride);
    uint4* target = reinterpret_cast<uint4*>(static_cast<char*>(target_pool) + to * args.target_stride);
    const int64_t vectors = args.block_bytes / 16, step = gridDim.z * COPY_THREADS;
    for (int64_t i = blockIdx.z * COPY_THREADS + threadIdx.x; i < vectors; i += step) target[i] = source[i];
}

}  // namespace quire

extern "C" __global__ void __launch_bounds__(quire::COPY_THREADS)
    copy_blocks(const void* source_keys, const void* source_values, void* target_keys, void* target_values,
                const uint32_t* pairs, const quire::BlockCopyShape shape) {
    quire::wait_for_launches();
    quire::copy_block({shape, source_keys, source_values, target_keys, target_values, pairs});
}
QUIRE_EXPORT_OVERLAPPED(copy_blocks, 0);
