// Which tokens a query row sees, and where they lie.
#pragma once

#include "args.cuh"

namespace quire {

// The last i < n with key(i) <= x, for a key that does not decrease and starts at or under x.
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

// The tokens first..end of a sequence. A row's own position is end - 1.
struct Visible {
    uint32_t first, end;

    // `after`: how many query rows of the sequence follow this one.
    __device__ __forceinline__ Visible(const AttentionArgs& args, uint32_t context, uint32_t after) {
        end = context > after ? context - after : 0;
        first = args.window && end > args.window ? end - args.window : 0;
    }
};

// The sequence of the launch's n-th query row and what it sees there; nothing where the row belongs to no sequence.
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

// Elements from the start of a KV head to a token of the sequence whose block table is `table`. Reads the table's entry:
// to be called for visible tokens only.
__device__ __forceinline__ int64_t place_of(const AttentionArgs& args, const int32_t* table, uint32_t token) {
    const uint32_t block = token / args.block_size;
    return table[block] * args.block_stride + (token - block * args.block_size) * args.token_stride;
}

// The same for the scale of the token's row, in bytes (KV_INT8_ROWS).
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
