// The memory of a block's threads: stacks with a guard page below each, and the meeting places of the warps.
//
// Mapped once, lent to one launch at a time, and kept for the next. It is no heap memory, because the thread sanitizer
// would take allocations inside of fibers for writes of theirs.
#pragma once

#include <cstddef>

#include "../include/simt/host/runtime.h"

namespace simt {

constexpr unsigned WARP = 32;

// One meeting of some lanes of a warp: it gathers until all of `mask` have arrived, then drains until all have left.
struct Slot {
    unsigned mask, arrived, left;
    Meeting meeting;
    unsigned bytes;
    Place at;
    char order;  // its address stands for the order that a sync gives
    alignas(64) unsigned char rows[WARP * ROW_BYTES];
};

// A lane is in at most one meeting, so a warp never needs more slots than lanes.
struct Warp {
    unsigned live;  // lanes that have not left the kernel
    unsigned used;  // slots that gather or drain
    Slot slots[WARP];
};

class Arena {
   public:
    explicit Arena(unsigned threads);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // One from the shelf, or a new one; and back onto the shelf. An arena that a fault left in disorder is deleted.
    static Arena* take(unsigned threads);
    static void put_back(Arena* arena);

    // The stack of a thread, at its lowest usable address.
    unsigned char* stack(unsigned thread) const;
    Warp& warp(unsigned index) const { return warps_[index]; }

    // Room for deep frames of a sanitizer build; untouched pages cost nothing.
    static constexpr size_t STACK_BYTES = 256 * 1024;

   private:
    unsigned threads_;
    size_t bytes_;
    unsigned char* memory_;
    Warp* warps_;
};

}  // namespace simt
