// What a layer does to its fused QKV rows before attention, in one pass: RMS norm of query and key heads (Qwen3), rotary embedding (Su
// et al., "RoFormer", 2021; pairs (i, i + head_dim / 2)), queries back in place, keys and values to their slots: entries
// heads_<type>[_kv8]. Biases are in the rows already: the product adds them.
//
// Grid (rows, ceil(heads / (128 / lanes))), 128 threads: `lanes` neighbouring ones, a power of two, share a head, and each has
// eight elements of its first half and the eight beside them of its second. So a head is read once and written once.

#include <quire/export.cuh>

#include "cache_args.cuh"
#include "vectors.cuh"

namespace quire {

constexpr uint32_t HEADS_THREADS = 128;

struct HeadsShape {
    int64_t qkv_stride;    // elements from row to row
    int64_t block_stride;  // the cache's, in elements
    int64_t head_stride;
    int64_t token_stride;
    float eps;
    uint32_t num_heads;
    uint32_t num_kv_heads;
    uint32_t head_dim;  // even, at most 16 * lanes
    uint32_t lanes;     // 1 to 32
    uint32_t block_size;
    uint32_t kv_format;     // a KvFormat; of 8 bits for the _kv8 entries
    uint32_t scale_stride;  // 0: one scale; 1: one per KV head
};
static_assert(sizeof(HeadsShape) == 64, "no hidden padding");

struct HeadsArgs : HeadsShape {
    void* qkv;                    // [rows, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values
    const float* query_norm;      // null, or [head_dim]
    const float* key_norm;        // as the query's
    const float* rope;            // [rows, head_dim]: cosines, then sines
    void* keys;                   // null: keys and values stay in their rows, for another to write
    void* values;
    const int64_t* slot_mapping;  // [rows]; negative: nothing is written to the cache. Not read without keys
    const float* k_scales;        // null: 1; else one, or one per KV head
    const float* v_scales;
};

// Elements at..at+8 of half a head into an 8-bit cache.
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

template <class T, bool KV8>
__device__ __forceinline__ void heads(const HeadsArgs& args) {
    const uint32_t lane = threadIdx.x % args.lanes, at = lane * 8, half = args.head_dim / 2;
    const uint32_t head = blockIdx.y * (HEADS_THREADS / args.lanes) + threadIdx.x / args.lanes;
    const uint32_t keyed = args.num_heads + args.num_kv_heads;
    // Threads without a head or without elements of one still meet the others of their warp.
    const bool busy = head < keyed + args.num_kv_heads && at < half;
    const bool whole = half % 8 == 0;
    T* row = static_cast<T*>(args.qkv) + blockIdx.x * args.qkv_stride + static_cast<int64_t>(head) * args.head_dim;
    float low[8] = {}, high[8] = {};
    if (busy) {
        load_piece(row, at, half, whole, low);
        load_piece(row + half, at, half, whole, high);
    }
    const float* weight = head < args.num_heads ? args.query_norm : head < keyed ? args.key_norm : nullptr;
    if (args.query_norm || args.key_norm) {
        float squares = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) squares += low[i] * low[i];
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) squares += high[i] * high[i];
        const float factor = 1.0f / sqrtf(sum_over(squares, args.lanes) / static_cast<float>(args.head_dim) + args.eps);
        if (weight && busy) {
            float weights[8];
            load_piece(weight, at, half, whole, weights);
#pragma unroll
            for (uint32_t i = 0; i < 8; i++) low[i] = low[i] * factor * weights[i];
            load_piece(weight + half, at, half, whole, weights);
#pragma unroll
            for (uint32_t i = 0; i < 8; i++) high[i] = high[i] * factor * weights[i];
        }
    }
    if (busy && head < keyed) {
        const float* table = args.rope + static_cast<int64_t>(blockIdx.x) * args.head_dim;
        float cosine[8], sine[8];
        load_piece(table, at, half, whole, cosine);
        load_piece(table + half, at, half, whole, sine);
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) {
            const float turned = low[i] * cosine[i] - high[i] * sine[i];
            high[i] = high[i] * cosine[i] + low[i] * sine[i];
            low[i] = turned;
        }
    }
    uint32_t greatest = 0;
    if constexpr (KV8) {
        if (args.keys && head >= args.num_heads) {
            // As if they had been stored in between: a cache does not tell who wrote it.
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
    if (!busy) return;
    if (head < args.num_heads || !args.keys) {
        store_piece(row, at, half, whole, low);
        store_piece(row + half, at, half, whole, high);
        return;
    }
    const int64_t slot = args.slot_mapping[blockIdx.x];
    if (slot < 0) return;
    const bool is_key = head < keyed;
    const uint32_t kv_head = head - (is_key ? args.num_heads : keyed);
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

#define HEADS(name, T, KV8)                                                                                             \
    extern "C" __global__ void __launch_bounds__(quire::HEADS_THREADS)                                                  \
        name(void* qkv, const float* query_norm, const float* key_norm, const float* rope, void* keys, void* values,    \
             const int64_t* slot_mapping, const float* k_scales, const float* v_scales,                                 \
             const quire::HeadsShape shape) {                                                                           \
        quire::heads<T, KV8>(                                                                                           \
            {shape, qkv, query_norm, key_norm, rope, keys, values, slot_mapping, k_scales, v_scales});                  \
    }                                                                                                                   \
    QUIRE_EXPORT(name);

HEADS(heads_f16, __half, false)
HEADS(heads_f16_kv8, __half, true)
HEADS(heads_bf16, __nv_bfloat16, false)
HEADS(heads_bf16_kv8, __nv_bfloat16, true)
HEADS(heads_f32, float, false)
HEADS(heads_f32_kv8, float, true)
