// What include/simt/host/runtime.h offers to device code: barriers, meetings of a warp, copies, and the end by a fault.
#include <cstdio>
#include <cstdlib>

#include "block.h"

namespace simt {

namespace {

// Number by number: the sanitizers watch memcpy, and this is no access of the kernel's.
template <class T>
void copy(unsigned char* to, const void* from, unsigned bytes) {
    for (unsigned i = 0; i < bytes / sizeof(T); i++) {
        reinterpret_cast<volatile T*>(to)[i] = static_cast<const volatile T*>(from)[i];
    }
}

// Apart from `meet`, whose frame is on every stack and should be small.
[[noreturn]] __attribute__((noinline)) void diverge(const Slot& slot, Place at) {
    char why[384];
    std::snprintf(why, sizeof why, "divergent warp operation: other lanes of mask %#x wait at %s:%d", slot.mask, slot.at.file,
                  slot.at.line);
    fail(Fault::divergent_collective, why, at);
}

}  // namespace

void fail(Fault code, const char* why, Place at) {
    Worker& worker = current();
    worker.home->fault = say(code, worker.home->kernel, &worker, at, "%s", why);
    leave(worker);
    std::abort();  // a launch that failed resumes nobody
}

Votes barrier(bool vote, Place at) {
    Worker& worker = current();
    Block& block = *worker.home;
    char* order = &block.barrier_order[block.barriers % 2];
    block.yes += vote;
    release_order(order);
    worker.state = State::at_barrier;
    worker.at = at;
    leave(worker);
    acquire_order(order);
    return block.votes;
}

unsigned live_lanes() { return current().home->arena.warp(self->warp).live; }

Rows meet(unsigned mask, const void* value, unsigned bytes, Meeting meeting, Place at) {
    Worker& worker = current();
    Block& block = *worker.home;
    Warp& warp = block.arena.warp(worker.warp);
    const unsigned me = 1u << worker.lane;
    if (!(mask & me)) fail(Fault::bad_mask, "the mask of this warp operation lacks the lane that calls it", at);
    if (mask & ~warp.live) fail(Fault::bad_mask, "the mask of this warp operation names lanes that have left the kernel or never were", at);

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
        slot->meeting = meeting;
        slot->bytes = bytes;
        slot->at = at;
    } else if (slot->meeting != meeting || slot->bytes != bytes || slot->at.line != at.line) {
        diverge(*slot, at);
    }

    unsigned char* row = slot->rows + worker.lane * bytes;
    bytes % 4 == 0 ? copy<uint32_t>(row, value, bytes) : copy<unsigned char>(row, value, bytes);
    slot->arrived |= me;
    if (meeting == Meeting::sync) release_order(&slot->order);
    if (slot->arrived != mask) {
        worker.state = State::in_meeting;
        worker.at = at;
        leave(worker);
    } else {
        block.wake_lanes(worker.warp, mask & ~me);
    }
    if (meeting == Meeting::sync) acquire_order(&slot->order);
    // What they brought stays in place until a fiber that enters a later meeting takes the slot.
    slot->left |= me;
    if (slot->left == mask) warp.used &= ~(1u << (slot - warp.slots));
    return {slot->rows, worker.lane};
}

void maybe_yield() {
    Worker& worker = current();
    Block& block = *worker.home;
    if (!block.grid.seed || block.draw() % 4 != 0) return;
    block.ready.push_back(&worker);
    leave(worker);
}

void async_begin(const AsyncCopy& copy) { current().copies.emplace_back(current().open_group, copy); }

void async_commit() { current().open_group++; }

bool async_landed(unsigned groups, AsyncCopy& copy) {
    Worker& worker = current();
    if (worker.landed == worker.copies.size()) {
        worker.copies.clear();
        worker.landed = 0;
        return false;
    }
    const auto& [group, oldest] = worker.copies[worker.landed];
    if (group + groups >= worker.open_group) return false;
    copy = oldest;
    worker.landed++;
    return true;
}

}  // namespace simt
