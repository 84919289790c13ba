// Block-sparse attention: which blocks of keys a head sees. src/sparse.rs defines the rule, and these functions agree with it.
#pragma once

#include "args.cuh"

namespace quire {

// Returns a + b modulo the stride; both are below it.
__device__ __forceinline__ uint32_t slide(const AttentionArgs& args, uint32_t a, uint32_t b) {
    const uint32_t sum = a + b;
    return sum < a || sum >= args.sparse_stride ? sum - args.sparse_stride : sum;
}

// Returns the offset of the columns of a head, below the stride: (first + index) * step + 1. By doubling, because a remainder of
// 64-bit numbers is a function, around which a kernel spills registers.
__device__ __forceinline__ uint32_t sparse_offset(const AttentionArgs& args, uint32_t head) {
    const uint32_t stride = args.sparse_stride;
    const uint32_t index = args.sparse_by_kv_head ? head / (args.num_heads / args.num_kv_heads) : head;
    uint32_t offset = 1 % stride, step = args.sparse_step;
#pragma unroll 1
    for (uint32_t times = slide(args, args.sparse_first, index % stride); times; times /= 2) {
        if (times % 2) offset = slide(args, offset, step);
        step = slide(args, step, step);
    }
    return offset;
}

// Whether a query in one sparse block sees the keys of another, as far as positions allow.
__device__ __forceinline__ bool sees_block(const AttentionArgs& args, uint32_t offset, uint32_t query_block, uint32_t key_block) {
    return key_block + args.sparse_local > query_block ||
           key_block % args.sparse_stride == (offset ? args.sparse_stride - offset : 0);
}

// The blocks that at least one of some adjacent heads of a KV head sees, from a query or from one after it.
struct SparseHeads {
    uint32_t heads = 0;        // none: all blocks are seen
    uint32_t offset = 0;       // of the first
    uint32_t query_block = 0;  // of the first query

    SparseHeads() = default;
    // `position`: of the first query.
    __device__ __forceinline__ SparseHeads(const AttentionArgs& args, uint32_t first, uint32_t count, uint32_t position) {
        if (!args.sparse_block) return;
        heads = count;
        offset = sparse_offset(args, first);
        query_block = position / args.sparse_block;
    }

    __device__ __forceinline__ bool see(const AttentionArgs& args, uint32_t key_block) const {
        if (key_block + args.sparse_local > query_block) return true;
        uint32_t of_head = offset;
#pragma unroll 1
        for (uint32_t i = 0; i < heads; i++) {
            if (sees_block(args, of_head, query_block, key_block)) return true;
            if (!args.sparse_by_kv_head) of_head = slide(args, of_head, args.sparse_step);
        }
        return false;
    }

    // Whether a token is in such a block.
    __device__ __forceinline__ bool see_token(const AttentionArgs& args, uint32_t token) const {
        return heads == 0 || see(args, token / args.sparse_block);
    }

    // Returns the first token from `token` on that is in such a block, or one from `end` on.
    __device__ __forceinline__ uint32_t next(const AttentionArgs& args, uint32_t token, uint32_t end) const {
        if (heads == 0) return token;
        uint32_t block = token / args.sparse_block;
        if (see(args, block)) return token;
        do block++;
        while (block * args.sparse_block < end && !see(args, block));
        return block * args.sparse_block;
    }
};

}  // namespace quire
