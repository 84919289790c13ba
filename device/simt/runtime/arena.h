// Memory for the threads of a block: stacks with a guard page below each, and the collectives in progress of each warp.
//
// It is mapped once, used by one launch at a time, and kept for later launches. It is not heap memory, because the thread
// sanitizer would treat allocations inside of fibers as writes of the kernel.
#pragma once

#include <cstddef>

#include "../include/simt/host/runtime.h"

namespace simt {

constexpr unsigned WARP = 32;

// A range of memory.
struct Span {
    unsigned char *begin, *end;

    bool contains(const void* at) const { return begin <= at && at < end; }
};

// A collective of some lanes of a warp: lanes arrive until all of `mask` are there, then they leave until none is left.
struct Slot {
    unsigned mask, arrived, left;
    Collective collective;
    unsigned bytes;
    Place at;
    char order;  // its address identifies the ordering by a sync
    alignas(64) unsigned char rows[WARP * ROW_BYTES];
};

// A lane is in at most one collective, so a warp never needs more slots than lanes.
struct Warp {
    unsigned live;  // lanes that have not exited
    unsigned used;  // slots in use
    Slot slots[WARP];
};

class Arena {
   public:
    explicit Arena(unsigned threads);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // Returns a cached arena or a new one; `release` caches it. After a fault the caller deletes it instead.
    static Arena* acquire(unsigned threads);
    static void release(Arena* arena);

    // Returns the lowest usable address of the stack of a thread.
    unsigned char* stack(unsigned thread) const;
    Warp& warp(unsigned index) const { return warps_[index]; }
    Span span() const { return {memory_, memory_ + bytes_}; }

    // Enough for the large frames of a sanitizer build; pages that are never touched cost nothing.
    static constexpr size_t STACK_BYTES = 256 * 1024;

   private:
    unsigned threads_;
    size_t bytes_;
    unsigned char* memory_;
    Warp* warps_;
};

}  // namespace simt
