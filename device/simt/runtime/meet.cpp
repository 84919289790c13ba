// Functions of include/simt/host/runtime.h: barriers, collectives of a warp, copies, and faults.
#include <cstdio>
#include <cstdlib>

#include "block.h"

namespace simt {

namespace {

// Copies number by number: the sanitizers intercept memcpy, and this is not an access by the kernel.
template <class T>
void copy(unsigned char* to, const void* from, unsigned bytes) {
    for (unsigned i = 0; i < bytes / sizeof(T); i++) {
        reinterpret_cast<volatile T*>(to)[i] = static_cast<const volatile T*>(from)[i];
    }
}

// A separate function, because the frame of `gather` is on every stack and should be small.
[[noreturn]] __attribute__((noinline)) void diverge(const Slot& slot, Place at) {
    char why[384];
    std::snprintf(why, sizeof why, "divergent warp operation: other lanes of mask %#x wait at %s:%d", slot.mask, slot.at.file,
                  slot.at.line);
    fail(Fault::divergent_collective, why, at);
}

}  // namespace

void fail(Fault code, const char* why, Place at) {
    Worker& worker = current();
    worker.block->fault = report_fault(code, worker.block->kernel, &worker, at, "%s", why);
    suspend(worker);
    std::abort();  // a failed launch resumes no thread
}

Votes barrier(bool vote, Place at) {
    Worker& worker = current();
    Block& block = *worker.block;
    char* order = &block.barrier_order[block.barriers % 2];
    block.yes += vote;
    release_order(order);
    worker.state = State::at_barrier;
    worker.at = at;
    suspend(worker);
    acquire_order(order);
    return block.votes;
}

unsigned live_lanes() { return current().block->arena.warp(self->warp).live; }

Rows gather(unsigned mask, const void* value, unsigned bytes, Collective collective, Place at) {
    Worker& worker = current();
    Block& block = *worker.block;
    Warp& warp = block.arena.warp(worker.warp);
    const unsigned me = 1u << worker.lane;
    if (!(mask & me)) fail(Fault::bad_mask, "the mask of this warp operation excludes the calling lane", at);
    if (mask & ~warp.live) fail(Fault::bad_mask, "the mask of this warp operation names lanes that have exited or do not exist", at);

    Slot* slot = nullptr;
    for (unsigned used = warp.used; used && !slot; used &= used - 1) {
        Slot& candidate = warp.slots[__builtin_ctz(used)];
        if (candidate.mask == mask && candidate.arrived != mask) slot = &candidate;
    }
    if (!slot) {
        const int free = __builtin_ctz(~warp.used);
        warp.used |= 1u << free;
        slot = &warp.slots[free];
        slot->mask = mask;
        slot->arrived = slot->left = 0;
        slot->collective = collective;
        slot->bytes = bytes;
        slot->at = at;
    } else if (slot->collective != collective || slot->bytes != bytes || slot->at.line != at.line) {
        diverge(*slot, at);
    }

    unsigned char* row = slot->rows + worker.lane * bytes;
    bytes % 4 == 0 ? copy<uint32_t>(row, value, bytes) : copy<unsigned char>(row, value, bytes);
    slot->arrived |= me;
    if (collective == Collective::sync) release_order(&slot->order);
    if (slot->arrived != mask) {
        worker.state = State::in_collective;
        worker.at = at;
        suspend(worker);
    } else {
        if (block.counter) block.counter->meet(worker.warp, mask == warp.live, collective);
        block.wake_lanes(worker.warp, mask & ~me);
    }
    if (collective == Collective::sync) acquire_order(&slot->order);
    // The data stays valid until a fiber reuses the slot for a later collective.
    slot->left |= me;
    if (slot->left == mask) warp.used &= ~(1u << (slot - warp.slots));
    return {slot->rows, worker.lane};
}

void maybe_yield() {
    Worker& worker = current();
    Block& block = *worker.block;
    if (!block.grid.seed || block.draw() % 4 != 0) return;
    block.ready.push_back(&worker);
    suspend(worker);
}

void async_begin(const AsyncCopy& copy) { current().copies.items.emplace_back(current().open_group, copy); }

void async_commit() { current().open_group++; }

bool next_due_copy(unsigned groups, AsyncCopy& copy) {
    return current().copies.take(copy, current().open_group, groups);
}

}  // namespace simt
