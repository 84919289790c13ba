// Arguments of the attention kernels. AttentionShape has the same layout in nvcc, g++ and Rust (src/cuda/parameters.rs).
#pragma once

#include <stdint.h>

namespace quire {

// Keys are reduced in partitions of this number of tokens, counted from the start of the sequence; those that are split over thread
// blocks possibly in smaller ones.
constexpr uint32_t PARTITION = 512;

// In place of a partition of the work list: the whole context, one partition after the other.
constexpr uint32_t ALL_PARTITIONS = 0xffffffff;

// In place of the partials of a sequence: it has none, because one thread block computes a row and head.
constexpr int32_t NO_PARTIALS = -0x7fffffff - 1;

// Most elements of a head that paged_generic and paged_reduce can process.
constexpr uint32_t WIDEST_HEAD = 576;

// Representation of cache elements. An element of 8 bits represents its value times a scale.
enum KvFormat : uint32_t {
    KV_SAME = 0,  // the type of the query
    KV_E4M3 = 1,
    KV_E5M2 = 2,
    KV_INT8 = 3,
    KV_INT8_ROWS = 4,  // as KV_INT8, with a scale for each row: a block and head has first the rows,
                       // [block_size, head_dim], then their scales, float [block_size]
};

// Sizes and settings, passed by value. Strides are in elements. Keys and values have the same shape and strides; every
// address that a kernel computes from them is a multiple of 16 bytes.
struct AttentionShape {
    int64_t query_stride;
    int64_t block_stride;
    int64_t head_stride;
    int64_t token_stride;
    float scale;     // score = scale * q·k
    float soft_cap;  // 0: none; else score = soft_cap * tanh(score / soft_cap)
    uint32_t num_seqs;
    uint32_t num_heads;
    uint32_t num_kv_heads;
    uint32_t head_dim;
    uint32_t value_dim;  // elements of a value: head_dim, or fewer (paged_generic, paged_reduce) if `values` are `keys`
    uint32_t block_size;
    uint32_t max_blocks;
    uint32_t first_seq;       // of the launch, in the batch
    uint32_t first_row;       // of first_seq, in the query and the output
    uint32_t query_len;       // most query rows of a sequence of the launch
    uint32_t query_head;      // elements from one head of a query to the next
    uint32_t window;          // 0: none; else position i sees positions i-window+1..=i
    uint32_t kv_format;       // a KvFormat
    uint32_t scale_stride;    // 0: one scale; 1: one per KV head
    uint32_t sparse_block;    // 0: attention is dense; else tokens of a sparse block, a multiple of block_size
    uint32_t sparse_local;    // blocks up to the query's own that every head sees
    uint32_t sparse_stride;   // distance between the further blocks that a head sees
    uint32_t sparse_step;     // by which the blocks of the next head differ, below the stride
    uint32_t sparse_first;    // heads, or KV heads, before the first of the launch, below the stride
    uint32_t sparse_by_kv_head;  // whether the blocks differ between KV heads instead of between heads
};
static_assert(sizeof(AttentionShape) == 120, "no hidden padding");

struct AttentionArgs : AttentionShape {
    const void* query;             // row t, head h at `t * query_stride + h * query_head`
    const void* keys;              // [num_blocks, num_kv_heads, block_size, head_dim]
    const void* values;            // as keys; in a latent cache the keys
    void* output;                  // [rows, num_heads, value_dim], type of the query
    float* lse;                    // null, or [rows, num_heads]: natural log of the sum of exp(score) and of exp(sink)
    float* partial_sums;           // [partials, num_heads, value_dim]: a partial is a partition of a row
    float* partial_states;         // [.., 2] with the same leading dimensions: greatest score (base 2), sum of weights
    const uint2* work;             // null: a block for each row and head. Else [0].x items, each a sequence of the batch and a
                                   // partition of [0].y tokens or ALL_PARTITIONS, from [1] on
    const int32_t* first_partials; // [sequences of the batch]: index of the partial of partition 0 (may be negative, if that
                                   // is not an item), or NO_PARTIALS
    const int32_t* block_tables;   // [num_seqs, max_blocks]
    const uint32_t* context_lens;  // [num_seqs], query rows included; 0: output rows are zero
    const uint32_t* query_starts;  // [num_seqs + 1]; null (decode only): one row for each sequence
    const float* k_scales;         // null: 1; else one, or one per KV head
    const float* v_scales;         // as k_scales
    const float* alibi_slopes;     // null, or [num_heads]
    const float* sinks;            // null, or [num_heads]: a logit of every softmax that has no value

    // For kernels of attention to chosen tokens, which have these as further parameters:
    const uint32_t* chosen = nullptr;  // [rows, most]: the tokens that a row attends to, ascending, in place of those it sees
    uint32_t most = 0;                 // a row that sees fewer tokens attends to them
};

}  // namespace quire

// Parameters of every attention kernel. Pointers are separate parameters, so that a launch can tell them from numbers.
#define QUIRE_ATTENTION_PARAMETERS                                                                                      \
    const void *query, const void *keys, const void *values, void *output, float *lse, float *partial_sums,             \
        float *partial_states, const uint2 *work, const int32_t *first_partials, const int32_t *block_tables,           \
        const uint32_t *context_lens, const uint32_t *query_starts, const float *k_scales,   \
        const float *v_scales, const float *alibi_slopes, const float *sinks, const quire::AttentionShape shape
#define QUIRE_CHOSEN_PARAMETERS QUIRE_ATTENTION_PARAMETERS, const uint32_t *chosen, uint32_t most
#define QUIRE_CHOSEN_ARGS                                                                                      \
    (quire::AttentionArgs{shape, query, keys, values, output, lse, partial_sums, partial_states, work,         \
                          first_partials, block_tables, context_lens, query_starts, k_scales,       \
                          v_scales, alibi_slopes, sinks, chosen, most})
#define QUIRE_ATTENTION_ARGS                                                                                   \
    (quire::AttentionArgs{shape, query, keys, values, output, lse, partial_sums, partial_states, work,         \
                          first_partials, block_tables, context_lens, query_starts, k_scales,       \
                          v_scales, alibi_slopes, sinks})
