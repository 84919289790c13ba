// Arguments of the cache kernels: pointers as separate parameters, then the shape by value.
#pragma once

#include <stdint.h>

namespace quire {

// Write of new keys and values into their slots. Strides are in elements; the cache is laid out as for attention.
struct CacheWriteShape {
    int64_t source_stride;
    int64_t block_stride;
    int64_t head_stride;
    int64_t token_stride;
    uint32_t num_kv_heads;
    uint32_t head_dim;  // a multiple of 8
    uint32_t block_size;
    uint32_t kv_format;     // a KvFormat; of 8 bits for the _kv8 kernels
    uint32_t scale_stride;  // 0: one scale; 1: one per KV head
    uint32_t reserved;      // 0
};
static_assert(sizeof(CacheWriteShape) == 56, "no hidden padding");

struct CacheWriteArgs : CacheWriteShape {
    const void* new_keys;    // row t, head h at `t * source_stride + h * head_dim`
    const void* new_values;  // as new_keys; both may be parts of one fused buffer; null if `values` is
    void* keys;
    void* values;                 // null in a latent cache, whose values are in the keys
    const int64_t* slot_mapping;  // [tokens]: block * block_size + offset; negative: the row is skipped
    const float* k_scales;        // null: 1; else one, or one per KV head
    const float* v_scales;
};

// Copies of whole blocks of one pool into blocks of the same or another pool. The copies of a launch run concurrently, so
// no block may be the target of one copy and occur in another.
struct BlockCopyShape {
    int64_t source_stride;  // bytes from block to block
    int64_t target_stride;
    int64_t block_bytes;  // a multiple of 16
};
static_assert(sizeof(BlockCopyShape) == 24, "no hidden padding");

struct BlockCopyArgs : BlockCopyShape {
    const void* source_keys;
    const void* source_values;
    void* target_keys;
    void* target_values;
    const uint32_t* pairs;  // [num_pairs, 2]: source block, target block
};

// Conversion of elements between a float type and 8 bits. Element i has scale (i / elements_per_scale) % num_scales.
struct ConvertShape {
    int64_t elements;  // a multiple of 8, as is elements_per_scale
    int64_t elements_per_scale;
    uint32_t num_scales;
    uint32_t format;  // a KvFormat of 8 bits
};
static_assert(sizeof(ConvertShape) == 24, "no hidden padding");

struct ConvertArgs : ConvertShape {
    const void* source;
    void* target;
    const float* scales;  // null: 1; else [num_scales]
};

}  // namespace quire
