/* Kernel plug-ins for Quire, ABI version 1.
 *
 * A plug-in is a shared library that exports quire_kernels_plugin(). It is named in the configuration:
 *
 *     [kernels]
 *     decode = "my.decode"
 *     [[kernels.plugin]]
 *     path = "libmy_kernels.so"
 *
 * Its variants stand in the registry beside those of the tree, are chosen by name or by rank, and are listed by
 * `quire kernels`. A library is opened once and never closed.
 *
 * Rules. Everything that the plug-in returns lives as long as the process. Functions may be called from any thread, and
 * by several at once. No exception or panic may leave one: it returns another number than 0, and last_error() says why
 * in one line. Nothing is kept of what a call is given. Whoever allocates memory frees it.
 *
 * Structures begin with their size, and grow only at their end: a reader looks at no more than the size that it finds.
 * A change of what stands here changes QUIRE_KERNELS_ABI, and the host refuses any other number than its own. */
#ifndef QUIRE_KERNELS_H
#define QUIRE_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define QUIRE_KERNELS_ABI 1u
/* "QUIREKRN", read as a little-endian number. */
#define QUIRE_KERNELS_MAGIC 0x4e524b4552495551ull

/* What a variant does; its arguments are the structure behind the comma. */
enum {
    QUIRE_DECODE = 0,      /* attention, quire_attention with one query row a sequence */
    QUIRE_PREFILL = 1,     /* attention, quire_attention with any number of them */
    QUIRE_CACHE_WRITE = 2, /* new keys and values into their slots, quire_cache_write */
    QUIRE_BLOCK_COPY = 3   /* whole blocks, quire_block_copy */
};

/* Numbers of types and layouts; in a variant's capabilities, bits 1 << number. */
enum { QUIRE_F32 = 0, QUIRE_F16 = 1, QUIRE_BF16 = 2 };
enum { QUIRE_KV_SAME = 0, QUIRE_KV_FP8_E4M3 = 1, QUIRE_KV_FP8_E5M2 = 2, QUIRE_KV_INT8 = 3 };
enum {
    QUIRE_HND = 0, /* [num_blocks, num_kv_heads, block_size, head_dim] */
    QUIRE_NHD = 1  /* [num_blocks, block_size, num_kv_heads, head_dim] */
};

/* What a variant can do beyond the plain. */
enum { QUIRE_WINDOW = 1, QUIRE_SOFT_CAP = 2, QUIRE_ALIBI = 4, QUIRE_LSE = 8 };

/* What the host offers. `pool` is handed back to parallel_for, which calls task(context, 0) .. task(context, tasks - 1),
 * each once, on `threads` threads, and returns when all have. */
typedef struct {
    uint32_t size;
    uint32_t threads;
    void *pool;
    void (*parallel_for)(void *pool, uint64_t tasks, void (*task)(void *context, uint64_t index), void *context);
} quire_host;

/* The paged keys and values of one layer. Strides are in elements. An element of 8 bits stands for itself times its scale;
 * k_scales and v_scales are null (1), or one number, or one for each KV head. */
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

/* Attention of the sequences first_seq .. first_seq + num_seqs of a batch. The query rows of sequence s are
 * query_starts[s] .. query_starts[s + 1] and are the last tokens of its context; a context of 0 gives zero rows. Entries of
 * a block table past the context, and before the first block of a window, are not to be read, nor slots past the context. */
typedef struct {
    uint32_t size;
    uint32_t num_heads;           /* head h reads KV head h / (num_heads / num_kv_heads) */
    const void *query;            /* row t, head h at t * query_stride + h * head_dim */
    uint64_t query_stride;
    void *output;                 /* [rows, num_heads, head_dim] */
    float *lse;                   /* null, or [rows, num_heads]: natural log of the sum of exp(score) */
    quire_cache cache;
    const uint32_t *query_starts; /* [sequences of the batch + 1] */
    const uint32_t *context_lens; /* [sequences], query rows included */
    const int32_t *block_tables;  /* [sequences, max_blocks] */
    uint64_t max_blocks;
    uint64_t first_seq;
    uint64_t num_seqs;
    uint64_t window;              /* 0: none; else position i sees i-window+1..=i */
    float scale;                  /* score = scale * q·k */
    float soft_cap;               /* 0: none; else score = soft_cap * tanh(score / soft_cap) */
    const float *alibi_slopes;    /* null, or [num_heads]: slope * (key position - query position) is added */
} quire_attention;

/* Row t of the source goes to slot slot_mapping[t] = block * block_size + offset; a negative slot is skipped. */
typedef struct {
    uint32_t size;
    uint32_t reserved;
    const void *keys;   /* row t, KV head h at t * source_stride + h * head_dim */
    const void *values;
    uint64_t source_stride;
    const int64_t *slot_mapping;
    uint64_t rows;
    quire_cache cache;
} quire_cache_write;

/* Block pairs[2 i] to block pairs[2 i + 1], in order. */
typedef struct {
    uint32_t size;
    uint32_t reserved;
    const uint32_t *pairs;
    uint64_t num_pairs;
    quire_cache cache;
} quire_block_copy;

typedef struct {
    uint32_t size;
    uint32_t operation;
    const char *name;         /* "owner.kind", not that of another variant */
    const char *device;       /* "cpu" */
    uint32_t dtypes;          /* bits of QUIRE_F32 .. */
    uint32_t kv_dtypes;       /* bits of QUIRE_KV_SAME .. */
    uint32_t layouts;         /* bits of QUIRE_HND .. */
    uint32_t features;        /* QUIRE_WINDOW | .. */
    uint32_t max_head_dim;    /* greatest head size; sizes are multiples of head_dim_step */
    uint32_t head_dim_step;
    uint32_t max_block_size;  /* block sizes are multiples of block_size_step */
    uint32_t block_size_step;
    uint64_t max_query_len;   /* greatest number of query rows of a sequence */
    const char *row_invariant;/* null, or a family: variants of equal names here agree in every bit, whatever the batch */
    uint32_t rank;            /* "auto" takes the greatest that can serve; those of the tree are 0 to 40 */
    uint32_t reserved;
    int32_t (*run)(const quire_host *host, const void *arguments);
} quire_variant;

typedef struct {
    uint64_t magic; /* QUIRE_KERNELS_MAGIC */
    uint32_t abi;   /* QUIRE_KERNELS_ABI */
    uint32_t size;
    const char *name;
    uint64_t num_variants;
    const quire_variant *const *variants;
    /* Writes the last error of the calling thread, with a 0 behind it, cut to `capacity` bytes. */
    void (*last_error)(char *buffer, size_t capacity);
} quire_plugin;

/* The one symbol that a plug-in exports. */
const quire_plugin *quire_kernels_plugin(void);

#ifdef __cplusplus
}
#endif
#endif
