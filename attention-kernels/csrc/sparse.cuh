// Block-sparse attention: which blocks of keys a head sees. src/sparse.rs defines the rule, and these functions agree with it.
#pragma once

#include "args.cuh"

namespace quire {

// Returns the offset of the columns of a head, below the stride.
__device__ __forceinline__ uint32_t sparse_offset(const AttentionArgs& args, uint32_t head) {
    const uint32_t stride = args.sparse_stride;
    const uint32_t index = args.sparse_by_kv_head ? head / (args.num_heads / args.num_kv_heads) : head;
    const uint64_t slid = static_cast<uint64_t>((args.sparse_first + index) % stride) * args.sparse_step + 1;
    return static_cast<uint32_t>(slid % stride);
}

// Whether a query in one sparse block sees the keys of another, as far as positions allow.
__device__ __forceinline__ bool sees_block(const AttentionArgs& args, uint32_t offset, uint32_t query_block, uint32_t key_block) {
    return key_block + args.sparse_local > query_block ||
           (static_cast<uint64_t>(key_block) + offset) % args.sparse_stride == 0;
}

// The blocks that at least one of some adjacent heads sees, from a query or from one after it.
struct SparseHeads {
    uint32_t first_head, heads;  // no heads: all blocks are seen
    uint32_t query_block;        // of the first query

    __device__ __forceinline__ bool see(const AttentionArgs& args, uint32_t key_block) const {
        if (key_block + args.sparse_local > query_block) return true;
        for (uint32_t i = 0; i < heads; i++) {
            if (sees_block(args, sparse_offset(args, first_head + i), query_block, key_block)) return true;
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
