// Replacement for CUDA's header of this name: __half and __half2.
#pragma once

#include "cuda_runtime.h"
#include "host/formats.h"
#include "host/small_float.h"

struct __half_raw {
    unsigned short x;
};
struct alignas(2) __half {
    unsigned short __x;

    __half() = default;
    __half(float value) : __x(static_cast<unsigned short>(simt::Half::from_float(value))) {}
    __half(double value) : __x(simt::round_double<simt::Half>(value)) {}
    template <class T, std::enable_if_t<std::is_integral_v<T>, int> = 0>
    __half(T value) : __half(static_cast<double>(value)) {}
    __half(const __half_raw& raw) : __x(raw.x) {}
    operator float() const { return simt::half_to_float(__x); }
    operator __half_raw() const { return {__x}; }
};
struct __half2_raw {
    unsigned short x, y;
};
struct alignas(4) __half2 {
    __half x, y;

    __half2() = default;
    __half2(__half x, __half y) : x(x), y(y) {}
    __half2(const __half2_raw& raw) : x(__half_raw{raw.x}), y(__half_raw{raw.y}) {}
};
using half = __half;
using half2 = __half2;

SIMT_SMALL_FLOAT_OPERATORS(__half, simt::Half)
SIMT_SMALL_FLOAT_PAIRS(__half, __half2)
SIMT_SMALL_FLOAT_CONVERSIONS(__half, __half2, half)
