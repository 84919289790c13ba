// Barriers and the collectives of a warp: shuffles, votes and reductions.
//
// As on the device, a shuffle, vote or reduction orders no memory: only __syncwarp and the barriers of the block do. The
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
    simt::gather(mask, nullptr, 0, simt::Collective::sync, at);
}

// All fibers run on one processor, so it is enough that the compiler does not reorder accesses.
static inline void __threadfence() { asm volatile("" ::: "memory"); }
static inline void __threadfence_block() { asm volatile("" ::: "memory"); }

namespace simt {

template <class T>
T row(Rows rows, unsigned lane) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= ROW_BYTES, "a row of a collective has at most 64 bytes");
    T value;
    std::memcpy(&value, rows.first + lane * sizeof(T), sizeof(T));
    return value;
}

// Returns the lane that `lane` reads from in a segment of `width` lanes; itself at the end of the segment.
inline unsigned source_lane(Collective kind, unsigned lane, int by, int width) {
    const unsigned segment = static_cast<unsigned>(width), first = lane & ~(segment - 1);
    const unsigned offset = static_cast<unsigned>(by);
    switch (kind) {
        case Collective::shuffle_xor: return (lane ^ offset) < first + segment ? lane ^ offset : lane;
        case Collective::shuffle_down: return lane - first + offset < segment ? lane + offset : lane;
        case Collective::shuffle_up: return lane - first >= offset ? lane - offset : lane;
        default: return first + (offset & (segment - 1));
    }
}

template <class T>
T shuffle(Collective kind, unsigned mask, T value, int by, int width, Place at) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    if (width < 1 || width > 32 || (width & (width - 1))) fail(Fault::bad_lane, "the width of a shuffle is not a power of two up to 32", at);
    const Rows rows = gather(mask, &value, sizeof(T), kind, at);
    const unsigned source = source_lane(kind, rows.lane, by, width);
    if (!(mask >> source & 1)) fail(Fault::bad_lane, "a shuffle reads from a lane outside of its mask", at);
    return row<T>(rows, source);
}

// Folds the values of the lanes of `mask`, from the lowest lane up.
template <class T, class Fold>
T reduce(unsigned mask, T value, Place at, Fold fold) {
    const Rows rows = gather(mask, &value, sizeof(T), Collective::reduce, at);
    unsigned left = mask & (mask - 1);
    T total = row<T>(rows, static_cast<unsigned>(__builtin_ctz(mask)));
    for (; left; left &= left - 1) total = fold(total, row<T>(rows, static_cast<unsigned>(__builtin_ctz(left))));
    return total;
}

// Returns the lanes of `mask` whose value satisfies `holds`.
template <class T, class Holds>
unsigned lanes_where(Collective kind, unsigned mask, T value, Place at, Holds holds) {
    const Rows rows = gather(mask, &value, sizeof value, kind, at);
    unsigned found = 0;
    for (unsigned left = mask; left; left &= left - 1) {
        const unsigned lane = static_cast<unsigned>(__builtin_ctz(left));
        found |= static_cast<unsigned>(holds(row<T>(rows, lane))) << lane;
    }
    return found;
}

template <class T>
using Int32 = std::enable_if_t<std::is_integral_v<T> && sizeof(T) == 4, T>;

}  // namespace simt

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32, simt::Place at = simt::here()) {
    return simt::shuffle(simt::Collective::shuffle, mask, value, lane, width, at);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, simt::Place at = simt::here()) {
    return simt::shuffle(simt::Collective::shuffle_xor, mask, value, lanes, width, at);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, simt::Place at = simt::here()) {
    return simt::shuffle(simt::Collective::shuffle_down, mask, value, static_cast<int>(by), width, at);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, simt::Place at = simt::here()) {
    return simt::shuffle(simt::Collective::shuffle_up, mask, value, static_cast<int>(by), width, at);
}

static inline unsigned __ballot_sync(unsigned mask, int vote, simt::Place at = simt::here()) {
    return simt::lanes_where(simt::Collective::vote, mask, vote, at, [](int vote) { return vote != 0; });
}
static inline int __any_sync(unsigned mask, int vote, simt::Place at = simt::here()) {
    return __ballot_sync(mask, vote, at) != 0;
}
static inline int __all_sync(unsigned mask, int vote, simt::Place at = simt::here()) {
    return __ballot_sync(mask, vote, at) == mask;
}
// Returns the lanes of `mask` with the same value as this one.
template <class T>
unsigned __match_any_sync(unsigned mask, T value, simt::Place at = simt::here()) {
    return simt::lanes_where(simt::Collective::match, mask, value, at, [=](T other) { return other == value; });
}
// The device may return fewer lanes; code that is correct for any result is correct for this one.
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
