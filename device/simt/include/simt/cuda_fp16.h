// The host's stand-in for CUDA's header of this name: __half and __half2.
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

SIMT_SMALL_FLOAT_OPERATORS(__half)
static inline __half __hfma(__half a, __half b, __half c) {
    return simt::bit_cast<__half>(simt::round_double<simt::Half>(std::fma(double(float(a)), double(float(b)), double(float(c)))));
}
SIMT_SMALL_FLOAT_PAIRS(__half, __half2)

static inline float __half2float(__half value) { return value; }
static inline __half __float2half(float value) { return value; }
static inline __half __float2half_rn(float value) { return value; }
static inline __half __int2half_rn(int value) { return value; }
static inline __half __ushort_as_half(unsigned short bits) { return simt::bit_cast<__half>(bits); }
static inline unsigned short __half_as_ushort(__half value) { return value.__x; }
static inline float2 __half22float2(__half2 value) { return {value.x, value.y}; }
static inline __half2 __float2half2_rn(float value) { return {value, value}; }
static inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
static inline __half2 __float22half2_rn(float2 value) { return {value.x, value.y}; }
static inline __half2 __half2half2(__half value) { return {value, value}; }
static inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
static inline __half2 make_half2(__half x, __half y) { return {x, y}; }
static inline __half __low2half(__half2 value) { return value.x; }
static inline __half __high2half(__half2 value) { return value.y; }
