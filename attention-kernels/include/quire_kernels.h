/* Kernel plug-ins for Quire, ABI version 1.3.
 *
 * A plug-in is a shared library that exports quire_kernels_plugin(). The configuration names it:
 *
 *     [kernels]
 *     decode = "my.decode"
 *     [[kernels.plugin]]
 *     path = "libmy_kernels.so"
 *
 * Quire adds the variants of a plug-in to its own, selects them by name or by rank, and lists them in `quire kernels`. A
 * library is opened once and never closed.
 *
 * Lifetime: everything that the plug-in returns must stay valid until the process ends. A function must not keep pointers
 * to its arguments after it has returned. Memory is freed by the side that allocated it.
 *
 * Threads: any thread may call the functions of a plug-in, and several threads may call them concurrently.
 *
 * Errors: a function returns 0 if it succeeds. Otherwise it returns another number, and last_error() must then describe the
 * error in one line. No exception or panic may propagate out of a function.
 *
 * Versions: a structure that contains its own size grows only at its end, and a reader accesses no more than that size. An
 * incompatible change increments QUIRE_KERNELS_ABI; the host rejects plug-ins with any other number than its own. A
 * compatible addition increments QUIRE_KERNELS_ABI_MINOR, which the host does not check: a variant is never called with a
 * feature that it does not state. */
#ifndef QUIRE_KERNELS_H
#define QUIRE_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define QUIRE_KERNELS_ABI 1u
/* 1: QUIRE_SINKS and quire_attention.sinks. 2: QUIRE_BLOCK_SPARSE and the fields of quire_attention from sparse_block_size on. */
#define QUIRE_KERNELS_ABI_MINOR 2u
/* "QUIREKRN" as a little-endian number. */
#define QUIRE_KERNELS_MAGIC 0x4e524b4552495551ull

/* Operation of a variant. `arguments` of its function points to the structure named here. */
enum {
    QUIRE_DECODE = 0,      /* attention with one query row per sequence: quire_attention */
    QUIRE_PREFILL = 1,     /* attention with any number of query rows: quire_attention */
    QUIRE_CACHE_WRITE = 2, /* write of new keys and values into their slots: quire_cache_write */
    QUIRE_BLOCK_COPY = 3   /* copies of whole blocks: quire_block_copy */
};

/* Numbers of types and layouts. In quire_variant a set of them has the bits 1 << number. */
enum { QUIRE_F32 = 0, QUIRE_F16 = 1, QUIRE_BF16 = 2 };
enum { QUIRE_KV_SAME = 0, QUIRE_KV_FP8_E4M3 = 1, QUIRE_KV_FP8_E5M2 = 2, QUIRE_KV_INT8 = 3 };
enum {
    QUIRE_HND = 0, /* [num_blocks, num_kv_heads, block_size, head_dim] */
    QUIRE_NHD = 1  /* [num_blocks, block_size, num_kv_heads, head_dim] */
};

/* Optional features of attention, as bits. */
enum {
    QUIRE_WINDOW = 1,
    QUIRE_SOFT_CAP = 2,
    QUIRE_ALIBI = 4,
    QUIRE_LSE = 8,
    QUIRE_SINKS = 16,
    QUIRE_BLOCK_SPARSE = 32
};

/* Services of the host. parallel_for, which takes `pool` as its first argument, calls task(context, 0) ..
 * task(context, tasks - 1), each once, on up to `threads` threads, and returns after the last call has returned. */
typedef struct {
    uint32_t size;
    uint32_t threads;
    void *pool;
    void (*parallel_for)(void *pool, uint64_t tasks, void (*task)(void *context, uint64_t index), void *context);
} quire_host;

/* Paged keys and values of one layer. Strides are in elements. An element of 8 bits represents its value times a scale.
 * k_scales and v_scales are null (a scale of 1), or contain one number, or one for each KV head if scales_per_head is 1. */
typedef struct {
    void *keys;
    void *values;
    const float *k_scales;
    const float *v_scales;
    uint32_t scales_per_head;
    uint32_t dtype;
    uint32_t kv_dtype;
    uint32_t layout;
    uint64_t num_blocks;
    uint64_t num_kv_heads;
    uint64_t block_size;
    uint64_t head_dim;
    uint64_t block_stride;
    uint64_t head_stride;
    uint64_t token_stride;
} quire_cache;

/* Attention of the sequences first_seq <= s < first_seq + num_seqs of a batch. The query rows of sequence s are
 * query_starts[s] <= t < query_starts[s + 1]; they are the last tokens of its context. If the context is 0, the output rows
 * must be set to zero and their lse to -infinity. Rows of other sequences must not be written. The function must not read
 * entries of a block table past the context or before the first block of a window, nor slots past the context. */
typedef struct {
    uint32_t size;
    uint32_t num_heads;           /* head h reads KV head h / (num_heads / num_kv_heads) */
    const void *query;            /* head h of row t starts at t * query_stride + h * head_dim */
    uint64_t query_stride;
    void *output;                 /* [rows, num_heads, head_dim] */
    float *lse;                   /* null, or output [rows, num_heads]: natural log of the sum of exp(score) and of
                                     exp(sink) */
    quire_cache cache;
    const uint32_t *query_starts; /* [sequences of the batch + 1] */
    const uint32_t *context_lens; /* [sequences], query rows included */
    const int32_t *block_tables;  /* [sequences, max_blocks] */
    uint64_t max_blocks;
    uint64_t first_seq;
    uint64_t num_seqs;
    uint64_t window;              /* 0: none; else position i sees positions i - window + 1 to i */
    float scale;                  /* score = scale * q·k */
    float soft_cap;               /* 0: none; else score = soft_cap * tanh(score / soft_cap) */
    const float *alibi_slopes;    /* null, or [num_heads]: slope * (key position - query position) is added */
    /* Since version 1.1: */
    const float *sinks;           /* null, or [num_heads]: a logit of the softmax that has no value, not scaled or capped */
    /* Since version 1.2, block-sparse attention: of the positions that it may see, a query in sparse block q (its position /
     * sparse_block_size) sees those in each sparse block k with k > q - local_blocks or (k + offset) % vertical_stride == 0.
     * The offset of head h of KV head g is (first_head + h) * head_sliding_step + 1, or with a negative step
     * (first_kv_head + g) * -head_sliding_step + 1. The function must not read blocks that no head of a KV head sees. */
    uint64_t sparse_block_size;   /* 0: none; else a multiple of the cache's block size, and the next two are at least 1 */
    uint64_t local_blocks;
    uint64_t vertical_stride;     /* at most 2^32 - 1 */
    uint64_t first_head;          /* query heads, and KV heads, of tensor-parallel ranks before this one */
    uint64_t first_kv_head;
    int32_t head_sliding_step;
    uint32_t reserved;
} quire_attention;

/* Write of row t into slot slot_mapping[t] = block * block_size + offset. A row with a negative slot is skipped. No slot
 * occurs twice. */
typedef struct {
    uint32_t size;
    uint32_t reserved;
    const void *keys;   /* KV head h of row t starts at t * source_stride + h * head_dim */
    const void *values; /* as keys */
    uint64_t source_stride;
    const int64_t *slot_mapping;
    uint64_t rows;
    quire_cache cache;
} quire_cache_write;

/* Copies of block pairs[2 * i] to block pairs[2 * i + 1], to be made in order. */
typedef struct {
    uint32_t size;
    uint32_t reserved;
    const uint32_t *pairs;
    uint64_t num_pairs;
    quire_cache cache;
} quire_block_copy;

/* One implementation of one operation. */
typedef struct {
    uint32_t size;
    uint32_t operation;
    const char *name;         /* "owner.kind"; no other variant of the operation may have the name */
    const char *device;       /* "cpu"; other devices are not supported */
    uint32_t dtypes;          /* bits of QUIRE_F32 .. */
    uint32_t kv_dtypes;       /* bits of QUIRE_KV_SAME .. */
    uint32_t layouts;         /* bits of QUIRE_HND .. */
    uint32_t features;        /* QUIRE_WINDOW | .. */
    uint32_t max_head_dim;    /* largest head size; sizes are multiples of head_dim_step */
    uint32_t head_dim_step;
    uint32_t max_block_size;  /* largest block size; sizes are multiples of block_size_step */
    uint32_t block_size_step;
    uint64_t max_query_len;   /* most query rows per sequence */
    const char *row_invariant;/* null, or the name of a family: its variants compute equal bits, whatever the batch */
    uint32_t rank;            /* "auto" selects the highest rank that can serve; the CPU variants of Quire have ranks 0 to 3 */
    uint32_t reserved;
    int32_t (*run)(const quire_host *host, const void *arguments);
} quire_variant;

/* Description of a plug-in. */
typedef struct {
    uint64_t magic; /* QUIRE_KERNELS_MAGIC */
    uint32_t abi;   /* QUIRE_KERNELS_ABI */
    uint32_t size;
    const char *name;
    uint64_t num_variants;
    const quire_variant *const *variants;
    /* Writes the last error of the calling thread as a zero-terminated string, truncated to `capacity` bytes in total. */
    void (*last_error)(char *buffer, size_t capacity);
} quire_plugin;

/* The symbol that a plug-in must export. Returns its description. */
const quire_plugin *quire_kernels_plugin(void);

#ifdef __cplusplus
}
#endif
#endif
