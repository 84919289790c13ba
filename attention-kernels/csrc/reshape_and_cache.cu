// cuda.reshape_and_cache: writes new keys and values into the slots of the paged cache, kernels
// reshape_and_cache_<type>[_kv8]. An 8-bit cache stores value / scale.
//
// Grid (tokens), 128 threads; a thread moves 8 elements at a time. With a scale for each row, a warp takes a row.

#include <quire/export.cuh>

#include "cache_args.cuh"
#include "eight.cuh"

namespace quire {

constexpr uint32_t WRITE_THREADS = 128;

// Writes keys and values in KV_INT8_ROWS. A warp reads a row twice: for its scale, and to store it.
template <class T>
__device__ __forceinline__ void write_scaled_rows(const CacheWriteArgs& args, int64_t slot) {
    const uint32_t lane = threadIdx.x % 32, at = slot % args.block_size;
    const uint32_t parts = args.values ? 2 : 1;
    for (uint32_t i = threadIdx.x / 32; i < parts * args.num_kv_heads; i += WRITE_THREADS / 32) {
        const uint32_t head = i / parts, is_value = i % parts;
        const T* from = static_cast<const T*>(is_value ? args.new_values : args.new_keys) +
                        blockIdx.x * args.source_stride + static_cast<int64_t>(head) * args.head_dim;
        uint8_t* to = static_cast<uint8_t*>(is_value ? args.values : args.keys) + slot / args.block_size * args.block_stride +
                      head * args.head_stride;
        const auto each_eight = [&](auto use) {
            for (uint32_t d = lane * 8; d < args.head_dim; d += 32 * 8) {
                float numbers[8];
                Eight<T> eight;
                eight.load(from + d);
                eight.get(numbers);
                use(d, numbers);
            }
        };
        uint32_t greatest = 0;
        each_eight([&](uint32_t, const float (&numbers)[8]) { greatest = max(greatest, greatest_magnitude(numbers)); });
        const RowScale row(greatest_over(greatest, 32));
        each_eight([&](uint32_t d, const float (&numbers)[8]) {
            *reinterpret_cast<uint2*>(to + at * args.token_stride + d) = quantise(KV_INT8, numbers, row.divisor);
        });
        if (lane == 0) reinterpret_cast<float*>(to + args.block_size * args.head_dim)[at] = row.scale;
    }
}

template <class T, bool KV8>
__device__ __forceinline__ void reshape_and_cache(const CacheWriteArgs& args) {
    const int64_t slot = args.slot_mapping[blockIdx.x];
    if (slot < 0) return;
    if constexpr (KV8) {
        if (args.kv_format == KV_INT8_ROWS) return write_scaled_rows<T>(args, slot);
    }
    const int64_t to = slot / args.block_size * args.block_stride + slot % args.block_size * args.token_stride;
    const uint32_t pieces = args.head_dim / 8;
    for (uint32_t i = threadIdx.x; i < args.num_kv_heads * pieces; i += WRITE_THREADS) {
        const uint32_t head = i / pieces, offset = i % pieces * 8;
        const int64_t source = blockIdx.x * args.source_stride + static_cast<int64_t>(head) * args.head_dim + offset;
        const int64_t target = to + head * args.head_stride + offset;
        Eight<T> key, value;
        key.load(static_cast<const T*>(args.new_keys) + source);
        if (args.values) value.load(static_cast<const T*>(args.new_values) + source);
        if constexpr (KV8) {
            const uint32_t scale = head * args.scale_stride;
            float numbers[8];
            key.get(numbers);
            *reinterpret_cast<uint2*>(static_cast<uint8_t*>(args.keys) + target) =
                quantise(args.kv_format, numbers, args.k_scales ? args.k_scales[scale] : 1.0f);
            if (!args.values) continue;
            value.get(numbers);
            *reinterpret_cast<uint2*>(static_cast<uint8_t*>(args.values) + target) =
                quantise(args.kv_format, numbers, args.v_scales ? args.v_scales[scale] : 1.0f);
        } else {
            key.store(static_cast<T*>(args.keys) + target);
            if (args.values) value.store(static_cast<T*>(args.values) + target);
        }
    }
}

}  // namespace quire

#define RESHAPE_AND_CACHE(name, T, KV8)                                                                                  \
    extern "C" __global__ void __launch_bounds__(quire::WRITE_THREADS)                                                   \
        name(const void* new_keys, const void* new_values, void* keys, void* values, const int64_t* slot_mapping,        \
             const float* k_scales, const float* v_scales, const quire::CacheWriteShape shape) {                         \
        quire::wait_for_launches();                                                                                      \
        quire::reshape_and_cache<T, KV8>({shape, new_keys, new_values, keys, values, slot_mapping, k_scales, v_scales}); \
    }                                                                                                                    \
    QUIRE_EXPORT_OVERLAPPED(name, 0);

RESHAPE_AND_CACHE(reshape_and_cache_f16, __half, false)
RESHAPE_AND_CACHE(reshape_and_cache_f16_kv8, __half, true)
RESHAPE_AND_CACHE(reshape_and_cache_bf16, __nv_bfloat16, false)
RESHAPE_AND_CACHE(reshape_and_cache_bf16_kv8, __nv_bfloat16, true)
RESHAPE_AND_CACHE(reshape_and_cache_f32, float, false)
RESHAPE_AND_CACHE(reshape_and_cache_f32_kv8, float, true)
