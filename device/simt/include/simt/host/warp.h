// Barriers, shuffles, votes and reductions: the places where threads meet.
//
// A shuffle, vote or reduction orders no memory, as on the device: only __syncwarp and the barriers of the block do. The
// thread sanitizer sees exactly that.
#pragma once

#include <cstring>
#include <type_traits>

#include "runtime.h"

static inline void __syncthreads(simt::Place at = simt::here()) { simt::barrier(false, at); }
static inline int __syncthreads_count(int vote, simt::Place at = simt::here()) {
    return static_cast<int>(simt::barrier(vote != 0, at).yes);
}
static inline int __syncthreads_or(int vote, simt::Place at = simt::here()) {
    return simt::barrier(vote != 0, at).yes != 0;
}
static inline int __syncthreads_and(int vote, simt::Place at = simt::here()) {
    const simt::Votes votes = simt::barrier(vote != 0, at);
    return votes.yes == votes.threads;
}
static inline void __syncwarp(unsigned mask = ~0u, simt::Place at = simt::here()) {
    simt::meet(mask, nullptr, 0, simt::Meeting::sync, at);
}

// All fibers share one processor, so that the compiler must not move accesses is all that there is to do.
static inline void __threadfence() { asm volatile("" ::: "memory"); }
static inline void __threadfence_block() { asm volatile("" ::: "memory"); }

namespace simt {

template <class T>
T row(Rows rows, unsigned lane) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= ROW_BYTES, "a row of a meeting holds 64 bytes");
    T value;
    std::memcpy(&value, rows.first + lane * sizeof(T), sizeof(T));
    return value;
}

// The lane that `lane` reads from in a segment of `width` lanes; itself where the segment ends.
inline unsigned source_lane(Meeting kind, unsigned lane, int by, int width) {
    const unsigned segment = static_cast<unsigned>(width), first = lane & ~(segment - 1);
    const unsigned offset = static_cast<unsigned>(by);
    switch (kind) {
        case Meeting::shuffle_xor: return (lane ^ offset) < first + segment ? lane ^ offset : lane;
        case Meeting::shuffle_down: return lane - first + offset < segment ? lane + offset : lane;
        case Meeting::shuffle_up: return lane - first >= offset ? lane - offset : lane;
        default: return first + (offset & (segment - 1));
    }
}

template <class T>
T shuffle(Meeting kind, unsigned mask, T value, int by, int width, Place at) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    if (width < 1 || width > 32 || (width & (width - 1))) fail(Fault::bad_lane, "the width of a shuffle is no power of two up to 32", at);
    const Rows rows = meet(mask, &value, sizeof(T), kind, at);
    const unsigned source = source_lane(kind, rows.lane, by, width);
    if (!(mask >> source & 1)) fail(Fault::bad_lane, "a shuffle reads from a lane outside of its mask", at);
    return row<T>(rows, source);
}

// Folds what the lanes of `mask` brought, from the lowest lane up.
template <class T, class Fold>
T reduce(unsigned mask, T value, Place at, Fold fold) {
    const Rows rows = meet(mask, &value, sizeof(T), Meeting::reduce, at);
    unsigned left = mask & (mask - 1);
    T total = row<T>(rows, static_cast<unsigned>(__builtin_ctz(mask)));
    for (; left; left &= left - 1) total = fold(total, row<T>(rows, static_cast<unsigned>(__builtin_ctz(left))));
    return total;
}

template <class T>
using Int32 = std::enable_if_t<std::is_integral_v<T> && sizeof(T) == 4, T>;

}  // namespace simt

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32, simt::Place at = simt::here()) {
    return simt::shuffle(simt::Meeting::shuffle, mask, value, lane, width, at);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, simt::Place at = simt::here()) {
    return simt::shuffle(simt::Meeting::shuffle_xor, mask, value, lanes, width, at);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, simt::Place at = simt::here()) {
    return simt::shuffle(simt::Meeting::shuffle_down, mask, value, static_cast<int>(by), width, at);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, simt::Place at = simt::here()) {
    return simt::shuffle(simt::Meeting::shuffle_up, mask, value, static_cast<int>(by), width, at);
}

static inline unsigned __ballot_sync(unsigned mask, int vote, simt::Place at = simt::here()) {
    const simt::Rows rows = simt::meet(mask, &vote, sizeof vote, simt::Meeting::vote, at);
    unsigned yes = 0;
    for (unsigned left = mask; left; left &= left - 1) {
        const unsigned lane = static_cast<unsigned>(__builtin_ctz(left));
        yes |= static_cast<unsigned>(simt::row<int>(rows, lane) != 0) << lane;
    }
    return yes;
}
static inline int __any_sync(unsigned mask, int vote, simt::Place at = simt::here()) {
    return __ballot_sync(mask, vote, at) != 0;
}
static inline int __all_sync(unsigned mask, int vote, simt::Place at = simt::here()) {
    return __ballot_sync(mask, vote, at) == mask;
}
// Lanes of `mask` that brought the same value as this one.
template <class T>
unsigned __match_any_sync(unsigned mask, T value, simt::Place at = simt::here()) {
    const simt::Rows rows = simt::meet(mask, &value, sizeof value, simt::Meeting::match, at);
    unsigned same = 0;
    for (unsigned left = mask; left; left &= left - 1) {
        const unsigned lane = static_cast<unsigned>(__builtin_ctz(left));
        same |= static_cast<unsigned>(simt::row<T>(rows, lane) == value) << lane;
    }
    return same;
}
// The device may answer with fewer lanes; code that is right with any answer is right with this one.
static inline unsigned __activemask() { return simt::live_lanes(); }

template <class T>
simt::Int32<T> __reduce_add_sync(unsigned mask, T value, simt::Place at = simt::here()) {
    return static_cast<T>(simt::reduce(mask, static_cast<unsigned>(value), at, [](unsigned a, unsigned b) { return a + b; }));
}
template <class T>
simt::Int32<T> __reduce_min_sync(unsigned mask, T value, simt::Place at = simt::here()) {
    return simt::reduce(mask, value, at, [](T a, T b) { return b < a ? b : a; });
}
template <class T>
simt::Int32<T> __reduce_max_sync(unsigned mask, T value, simt::Place at = simt::here()) {
    return simt::reduce(mask, value, at, [](T a, T b) { return a < b ? b : a; });
}
