// What a layer does to its fused QKV rows before attention, in one pass: RMS norm of the query and key heads (Qwen3), rotary
// embedding (Su et al., "RoFormer", 2021; pairs (i, i + head_dim / 2)), for an 8-bit cache an offset of the
// keys, and the product with a Hadamard matrix where the cache stores keys so (KV_INT8_ROWS), then queries in place, keys and values into their cache slots. Entries qk_norm_rope_cache_<type>[_kv8]. Biases are in the rows already: the matrix product adds them.
//
// Grid (rows, ceil(heads / (128 / lanes))), 128 threads. `lanes` neighbouring threads, a power of two, share a head. Each has eight
// elements of the head's first half and the matching eight of its second half, so a head is read once and written once.

#include <quire/export.cuh>

#include "cache_args.cuh"
#include "vectors.cuh"

namespace quire {

constexpr uint32_t QK_THREADS = 128;

struct QkNormRopeCacheShape {
    int64_t qkv_stride;    // in elements, between rows
    int64_t block_stride;  // of the cache, in elements
    int64_t head_stride;
    int64_t token_stride;
    float eps;
    uint32_t num_heads;
    uint32_t num_kv_heads;
    uint32_t head_dim;  // even, at most 16 * lanes
    uint32_t lanes;     // 1 to 32
    uint32_t block_size;
    uint32_t kv_format;     // a KvFormat; an 8-bit one for the _kv8 entries
    uint32_t scale_stride;  // 0: one scale; 1: one per KV head
    uint32_t mixes;         // whether queries and keys are multiplied by a Hadamard matrix; head_dim is 16 * lanes then
    uint32_t reserved;
};
static_assert(sizeof(QkNormRopeCacheShape) == 72, "no hidden padding");

struct QkNormRopeCacheArgs : QkNormRopeCacheShape {
    void* qkv;                    // [rows, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values
    const float* query_norm;      // [head_dim], or null for no norm
    const float* key_norm;        // as query_norm
    const float* rope;            // [rows, head_dim]: cosines, then sines; null for no rotation
    const float* key_offset;      // [num_kv_heads, head_dim], subtracted from keys of an 8-bit cache; null for nothing
    void* keys;                   // null: keys and values stay in qkv, for another kernel to write
    void* values;
    const int64_t* slot_mapping;  // [rows]; negative: the row is not written. Unused if keys is null
    const float* k_scales;        // null (scale 1), [1] or [num_kv_heads]
    const float* v_scales;
};

// Quantises elements at..at+8 of half a head into an 8-bit cache.
__device__ __forceinline__ void store_bytes(uint8_t* to, uint32_t at, uint32_t half, bool whole, uint32_t format, float scale,
                                            const float (&from)[8]) {
    if (whole) {
        *reinterpret_cast<uint2*>(to + at) = quantise(format, from, scale);
    } else {
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) {
            if (at + i < half) to[at + i] = to_byte(format, __fdiv_rn(from[i], scale));
        }
    }
}

// Multiplies a head, of which each of `lanes` neighbouring threads has elements 8 * lane.. of both halves, by the Hadamard matrix of
// its size and by a factor: sums and differences of elements 1, 2, 4, ... apart. All 32 threads of a warp must call it.
__device__ __forceinline__ void mix(float (&low)[8], float (&high)[8], uint32_t lane, uint32_t lanes, float factor) {
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (i & distance) continue;
            const float a = low[i], b = low[i + distance], c = high[i], d = high[i + distance];
            low[i] = a + b, low[i + distance] = a - b;
            high[i] = c + d, high[i + distance] = c - d;
        }
    }
    for (uint32_t step = 1; step < lanes; step *= 2) {
        const bool second = lane & step;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float a = __shfl_xor_sync(~0u, low[i], step), b = __shfl_xor_sync(~0u, high[i], step);
            low[i] = second ? a - low[i] : low[i] + a;
            high[i] = second ? b - high[i] : high[i] + b;
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float a = low[i], b = high[i];
        low[i] = (a + b) * factor;
        high[i] = (a - b) * factor;
    }
}

template <class T, bool KV8>
__device__ __forceinline__ void qk_norm_rope_cache(const QkNormRopeCacheArgs& args) {
    const uint32_t lane = threadIdx.x % args.lanes, at = lane * 8, half = args.head_dim / 2;
    const uint32_t head = blockIdx.y * (QK_THREADS / args.lanes) + threadIdx.x / args.lanes;
    const uint32_t first_value = args.num_heads + args.num_kv_heads;
    // Threads without work still take part in the shuffles of their warp.
    const bool active = head < first_value + args.num_kv_heads && at < half;
    const bool whole = half % 8 == 0;
    T* row = static_cast<T*>(args.qkv) + blockIdx.x * args.qkv_stride + static_cast<int64_t>(head) * args.head_dim;
    float low[8] = {}, high[8] = {};
    if (active) {
        load_piece(row, at, half, whole, low);
        load_piece(row + half, at, half, whole, high);
    }
    const float* weight = head < args.num_heads ? args.query_norm : head < first_value ? args.key_norm : nullptr;
    if (args.query_norm || args.key_norm) {
        float squares = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) squares += low[i] * low[i];
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) squares += high[i] * high[i];
        const float factor = 1.0f / sqrtf(sum_over(squares, args.lanes) / static_cast<float>(args.head_dim) + args.eps);
        if (weight && active) {
            float weights[8];
            load_piece(weight, at, half, whole, weights);
#pragma unroll
            for (uint32_t i = 0; i < 8; i++) low[i] = low[i] * factor * weights[i];
            load_piece(weight + half, at, half, whole, weights);
#pragma unroll
            for (uint32_t i = 0; i < 8; i++) high[i] = high[i] * factor * weights[i];
        }
    }
    if (active && args.rope && head < first_value) {
        const float* table = args.rope + static_cast<int64_t>(blockIdx.x) * args.head_dim;
        float cosine[8], sine[8];
        load_piece(table, at, half, whole, cosine);
        load_piece(table + half, at, half, whole, sine);
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) {
            const float rotated = low[i] * cosine[i] - high[i] * sine[i];
            high[i] = high[i] * cosine[i] + low[i] * sine[i];
            low[i] = rotated;
        }
    }
    uint32_t greatest = 0;
    if constexpr (KV8) {
        if (active && args.key_offset && head >= args.num_heads && head < first_value) {
            const float* offset = args.key_offset + static_cast<int64_t>(head - args.num_heads) * args.head_dim;
            float less[8];
            load_piece(offset, at, half, whole, less);
#pragma unroll
            for (uint32_t i = 0; i < 8; i++) low[i] -= less[i];
            load_piece(offset + half, at, half, whole, less);
#pragma unroll
            for (uint32_t i = 0; i < 8; i++) high[i] -= less[i];
        }
        if (args.mixes) {
            // Heads of one warp can be queries, keys and values: all take part in the shuffles.
            const uint32_t halvings = __ffs(args.head_dim) - 1, of_key = halvings / 2;
            const uint32_t exponent = head < args.num_heads ? halvings - of_key : of_key;
            float mixed_low[8], mixed_high[8];
#pragma unroll
            for (uint32_t i = 0; i < 8; i++) mixed_low[i] = low[i], mixed_high[i] = high[i];
            mix(mixed_low, mixed_high, lane, args.lanes, 1.0f / static_cast<float>(1u << exponent));
            if (head < first_value) {
#pragma unroll
                for (uint32_t i = 0; i < 8; i++) low[i] = mixed_low[i], high[i] = mixed_high[i];
            }
        }
        if (args.keys && head >= args.num_heads) {
            // Round as if the row had been stored first, so that the bytes equal those of the separate cache write.
#pragma unroll
            for (uint32_t i = 0; i < 8; i++) {
                low[i] = rounded<T>(low[i]);
                high[i] = rounded<T>(high[i]);
            }
        }
        if (args.kv_format == KV_INT8_ROWS) {
            greatest = greatest_over(max(greatest_magnitude(low), greatest_magnitude(high)), args.lanes);
        }
    }
    if (!active) return;
    if (head < args.num_heads || !args.keys) {
        store_piece(row, at, half, whole, low);
        store_piece(row + half, at, half, whole, high);
        return;
    }
    const int64_t slot = args.slot_mapping[blockIdx.x];
    if (slot < 0) return;
    const bool is_key = head < first_value;
    const uint32_t kv_head = head - (is_key ? args.num_heads : first_value);
    void* cache = is_key ? args.keys : args.values;
    const int64_t unit = slot / args.block_size * args.block_stride + kv_head * args.head_stride;
    const int64_t to = unit + slot % args.block_size * args.token_stride;
    if constexpr (KV8) {
        const float* scales = is_key ? args.k_scales : args.v_scales;
        float scale = scales ? scales[kv_head * args.scale_stride] : 1.0f;
        if (args.kv_format == KV_INT8_ROWS) {
            const RowScale row(greatest);
            scale = row.divisor;
            float* of_rows = reinterpret_cast<float*>(static_cast<uint8_t*>(cache) + unit + args.block_size * args.head_dim);
            if (lane == 0) of_rows[slot % args.block_size] = row.scale;
        }
        store_bytes(static_cast<uint8_t*>(cache) + to, at, half, whole, args.kv_format, scale, low);
        store_bytes(static_cast<uint8_t*>(cache) + to + half, at, half, whole, args.kv_format, scale, high);
    } else {
        store_piece(static_cast<T*>(cache) + to, at, half, whole, low);
        store_piece(static_cast<T*>(cache) + to + half, at, half, whole, high);
    }
}

}  // namespace quire

#define QK_NORM_ROPE_CACHE(name, T, KV8)                                                                             \
    extern "C" __global__ void __launch_bounds__(quire::QK_THREADS)                                                  \
        name(void* qkv, const float* query_norm, const float* key_norm, const float* rope, const float* key_offset, \
             void* keys, void* values, const int64_t* slot_mapping, const float* k_scales, const float* v_scales,   \
             const quire::QkNormRopeCacheShape shape) {                                                              \
        quire::wait_for_launches();                                                                                  \
        quire::qk_norm_rope_cache<T, KV8>(                                                                           \
            {shape, qkv, query_norm, key_norm, rope, key_offset, keys, values, slot_mapping, k_scales, v_scales});   \
    }                                                                                                                \
    QUIRE_EXPORT_OVERLAPPED(name, 0);

QK_NORM_ROPE_CACHE(qk_norm_rope_cache_f16, __half, false)
QK_NORM_ROPE_CACHE(qk_norm_rope_cache_f16_kv8, __half, true)
QK_NORM_ROPE_CACHE(qk_norm_rope_cache_bf16, __nv_bfloat16, false)
QK_NORM_ROPE_CACHE(qk_norm_rope_cache_bf16_kv8, __nv_bfloat16, true)
QK_NORM_ROPE_CACHE(qk_norm_rope_cache_f32, float, false)
QK_NORM_ROPE_CACHE(qk_norm_rope_cache_f32_kv8, float, true)
