// The tokens that a query row sees, and where they are stored.
#pragma once

#include "args.cuh"

namespace quire {

// Returns the last i < n with key(i) <= x. The key does not decrease, and key(0) <= x.
template <class Key>
__device__ __forceinline__ uint32_t last_at_most(uint32_t n, uint32_t x, Key key) {
    uint32_t low = 0, high = n;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (key(middle) <= x) low = middle;
        else high = middle;
    }
    return low;
}

// The tokens first..end of a sequence that a row sees. The row's own position is end - 1.
struct Visible {
    uint32_t first, end;

    // `after` is the number of query rows of the sequence that follow this one.
    __device__ __forceinline__ Visible(const AttentionArgs& args, uint32_t context, uint32_t after) {
        end = context > after ? context - after : 0;
        first = args.window && end > args.window ? end - args.window : 0;
    }
};

// The n-th query row of the launch: its sequence and what it sees. `exists` is false for rows of no sequence.
struct Row {
    uint32_t index;  // in the query and the output
    uint32_t seq;
    Visible visible;
    bool exists = true;

    __device__ __forceinline__ Row(const AttentionArgs& args, uint32_t n) : index(n), seq(n), visible(args, 0, 0) {
        const uint32_t* starts = args.query_starts;
        uint32_t after = 0;
        if (starts) {
            const uint32_t row = index = starts[0] + n;
            seq = last_at_most(args.num_seqs, row, [=](uint32_t s) { return starts[s]; });
            exists = row < starts[seq + 1];
            if (!exists) return;
            after = starts[seq + 1] - 1 - row;
        }
        visible = Visible(args, args.context_lens[seq], after);
    }
};

// Returns the offset of a token, in elements from the start of a KV head, in the sequence whose block table is `table`.
// Reads the table, so the token must be visible.
__device__ __forceinline__ int64_t place_of(const AttentionArgs& args, const int32_t* table, uint32_t token) {
    const uint32_t block = token / args.block_size;
    return table[block] * args.block_stride + (token - block * args.block_size) * args.token_stride;
}

// Returns the same offset for the scale of the token's row, in bytes (KV_INT8_ROWS).
__device__ __forceinline__ int64_t scale_place_of(const AttentionArgs& args, const int32_t* table, uint32_t token) {
    const uint32_t block = token / args.block_size;
    return table[block] * args.block_stride + args.block_size * args.head_dim +
           (token - block * args.block_size) * sizeof(float);
}

__device__ __forceinline__ float float_at(const void* cache, int64_t place) {
    return *reinterpret_cast<const float*>(static_cast<const char*>(cache) + place);
}

__device__ __forceinline__ const int32_t* table_of(const AttentionArgs& args, uint32_t seq) {
    return args.block_tables + static_cast<int64_t>(seq) * args.max_blocks;
}

}  // namespace quire
