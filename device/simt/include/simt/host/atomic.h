// Atomic operations. They are relaxed, as on the device: they order no other memory, which the thread sanitizer sees.
//
// With a seed, other threads may run before each of them, so that code that is correct in one order only fails.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "runtime.h"

namespace simt {

// Excludes a parameter from template argument deduction, so that `atomicAdd(&unsigned, 1)` compiles as under nvcc.
template <class T>
struct Plain {
    using type = T;
};
template <class T>
using plain = typename Plain<T>::type;

// Replaces *at by next(*at) and returns the old value.
template <class T, class Next>
T update(T* at, Next next) {
    static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8, "an atomic operation is 2, 4 or 8 bytes wide");
    using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
    maybe_yield();
    Bits* bits = reinterpret_cast<Bits*>(at);
    Bits before = __atomic_load_n(bits, __ATOMIC_RELAXED), after;
    T old;
    do {
        std::memcpy(&old, &before, sizeof(T));
        const T value = next(old);
        std::memcpy(&after, &value, sizeof(T));
    } while (!__atomic_compare_exchange_n(bits, &before, after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}

}  // namespace simt

template <class T>
T atomicAdd(T* at, simt::plain<T> value) {
    return simt::update(at, [=](T old) { return static_cast<T>(old + value); });
}
template <class T>
T atomicSub(T* at, simt::plain<T> value) {
    return simt::update(at, [=](T old) { return static_cast<T>(old - value); });
}
template <class T>
T atomicMax(T* at, simt::plain<T> value) {
    return simt::update(at, [=](T old) { return old < value ? value : old; });
}
template <class T>
T atomicMin(T* at, simt::plain<T> value) {
    return simt::update(at, [=](T old) { return value < old ? value : old; });
}
template <class T>
T atomicAnd(T* at, simt::plain<T> value) {
    return simt::update(at, [=](T old) { return old & value; });
}
template <class T>
T atomicOr(T* at, simt::plain<T> value) {
    return simt::update(at, [=](T old) { return old | value; });
}
template <class T>
T atomicXor(T* at, simt::plain<T> value) {
    return simt::update(at, [=](T old) { return old ^ value; });
}
template <class T>
T atomicExch(T* at, simt::plain<T> value) {
    return simt::update(at, [=](T) { return value; });
}
template <class T>
T atomicCAS(T* at, simt::plain<T> expected, simt::plain<T> value) {
    return simt::update(at, [=](T old) { return old == expected ? value : old; });
}
// Counts up to `last`, then wraps to 0.
static inline unsigned atomicInc(unsigned* at, unsigned last) {
    return simt::update(at, [=](unsigned old) { return old >= last ? 0 : old + 1; });
}
