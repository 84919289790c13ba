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

// The tokens first..end that a row sees. The row's own is end - 1.
struct Visible {
    uint32_t first, end;

    __device__ __forceinline__ Visible(uint32_t first, uint32_t end) : first(first), end(end) {}
    // `after` is the number of query rows of the sequence that follow this one.
    __device__ __forceinline__ Visible(const AttentionArgs& args, uint32_t context, uint32_t after) {
        end = context > after ? context - after : 0;
        first = args.window && end > args.window ? end - args.window : 0;
    }
};

// The query rows of a sequence of the launch.
struct Queries {
    uint32_t start, count;  // start: in the query and the output

    __device__ __forceinline__ Queries(const AttentionArgs& args, uint32_t seq) : start(args.first_row + seq), count(1) {
        if (!args.query_starts) return;
        start = args.query_starts[seq];
        count = args.query_starts[seq + 1] - start;
    }

    __device__ __forceinline__ Visible visible(const AttentionArgs& args, uint32_t context, uint32_t of_seq) const {
        return Visible(args, context, count - of_seq - 1);
    }
};

// A query row. `exists` is false if its sequence has fewer.
struct Row {
    uint32_t seq;
    uint32_t of_seq;  // which row of the sequence
    uint32_t index;   // in the query and the output
    bool exists;
    Visible visible;

    __device__ __forceinline__ Row() : visible(0, 0) {}
    __device__ __forceinline__ Row(const AttentionArgs& args, uint32_t seq, uint32_t of_seq)
        : seq(seq), of_seq(of_seq), visible(0, 0) {
        const Queries queries(args, seq);
        index = queries.start + of_seq;
        exists = of_seq < queries.count;
        if (exists) visible = queries.visible(args, args.context_lens[seq], of_seq);
        if (args.chosen) visible.end = min(visible.end, args.most);
    }

    // Returns the n-th row of the launch.
    static __device__ __forceinline__ Row nth(const AttentionArgs& args, uint32_t n) {
        const uint32_t* starts = args.query_starts;
        if (!starts) return Row(args, n, 0);
        const uint32_t index = args.first_row + n;
        const uint32_t seq = last_at_most(args.num_seqs, index, [=](uint32_t s) { return starts[s]; });
        return Row(args, seq, index - starts[seq]);
    }
};

// The tokens of a context that a thread block computes at a time: a partition of the work list, or all.
struct Piece {
    uint32_t partition = ALL_PARTITIONS;
    uint32_t first = 0, end = 0xffffffff;

    Piece() = default;
    __device__ __forceinline__ Piece(const AttentionArgs& args, uint32_t partition) : partition(partition) {
        if (!is_split()) return;
        const uint32_t size = args.work[0].y;
        first = partition * size;
        end = first + size;
    }
    __device__ __forceinline__ bool is_split() const { return partition != ALL_PARTITIONS; }
};

// What a thread block computes at a time: `part` of `parts` of an item of the work list. A launch has as many blocks as the
// device runs at once, and each takes every gridDim.x-th unit, so one grid serves any lengths.
struct Unit {
    uint32_t seq, part;
    Piece piece;

    __device__ __forceinline__ Unit(const AttentionArgs& args, uint32_t unit, uint32_t parts) {
        const uint2 item = args.work[1 + unit / parts];
        seq = item.x - args.first_seq;
        piece = Piece(args, item.y);
        part = unit % parts;
    }
    static __device__ __forceinline__ uint32_t count(const AttentionArgs& args, uint32_t parts) {
        return args.work[0].x * parts;
    }
};

// Returns the index of the first number of a row and head in `partial_states`, in pairs.
__device__ __forceinline__ int64_t partial_of(const AttentionArgs& args, uint32_t seq, uint32_t partition, uint32_t of_seq,
                                              uint32_t head) {
    const int64_t rows = Queries(args, seq).count;
    return (args.first_partials[args.first_seq + seq] + partition * rows + of_seq) * args.num_heads + head;
}

// Returns the tokens that a row attends to, by number, and their positions; null: a number is a position.
__device__ __forceinline__ const uint32_t* chosen_of(const AttentionArgs& args, const Row& row) {
    return args.chosen ? args.chosen + static_cast<int64_t>(row.index) * args.most : nullptr;
}

// Returns the offset of a token, in elements from the start of a KV head, in the sequence whose block table is `table`.
// Reads the table, so the token must be visible.
__device__ __forceinline__ int64_t place_of(const AttentionArgs& args, const int32_t* table, uint32_t token) {
    const uint32_t block = token / args.block_size;
    return table[block] * args.block_stride + (token - block * args.block_size) * args.token_stride;
}

// Returns the same offset for the scale of the token's row, in bytes (KV_INT8_ROWS).
__device__ __forceinline__ int64_t scale_place_of(const AttentionArgs& args, const int32_t* table, uint32_t token) {
    const uint32_t block = token / args.block_size;
    return table[block] * args.block_stride + args.block_size * args.token_stride +
           (token - block * args.block_size) * sizeof(float);
}

__device__ __forceinline__ float float_at(const void* cache, int64_t place) {
    return *reinterpret_cast<const float*>(static_cast<const char*>(cache) + place);
}

__device__ __forceinline__ const int32_t* table_of(const AttentionArgs& args, uint32_t seq) {
    return args.block_tables + static_cast<int64_t>(seq) * args.max_blocks;
}

}  // namespace quire
