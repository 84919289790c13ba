// The host's stand-in for CUDA's header of this name: __nv_bfloat16 and __nv_bfloat162.
#pragma once

#include "cuda_runtime.h"
#include "host/formats.h"
#include "host/small_float.h"

struct alignas(2) __nv_bfloat16 {
    unsigned short __x;

    __nv_bfloat16() = default;
    __nv_bfloat16(float value) : __x(static_cast<unsigned short>(simt::Bfloat16::from_float(value))) {}
    __nv_bfloat16(double value) : __x(simt::round_double<simt::Bfloat16>(value)) {}
    template <class T, std::enable_if_t<std::is_integral_v<T>, int> = 0>
    __nv_bfloat16(T value) : __nv_bfloat16(static_cast<double>(value)) {}
    operator float() const { return simt::bfloat16_to_float(__x); }
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;

    __nv_bfloat162() = default;
    __nv_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) : x(x), y(y) {}
};
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

SIMT_SMALL_FLOAT_OPERATORS(__nv_bfloat16)
static inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
    return simt::bit_cast<__nv_bfloat16>(simt::round_double<simt::Bfloat16>(std::fma(double(float(a)), double(float(b)), double(float(c)))));
}
SIMT_SMALL_FLOAT_PAIRS(__nv_bfloat16, __nv_bfloat162)

static inline float __bfloat162float(__nv_bfloat16 value) { return value; }
static inline __nv_bfloat16 __float2bfloat16(float value) { return value; }
static inline __nv_bfloat16 __float2bfloat16_rn(float value) { return value; }
static inline __nv_bfloat16 __int2bfloat16_rn(int value) { return value; }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return simt::bit_cast<__nv_bfloat16>(bits); }
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.__x; }
static inline float2 __bfloat1622float2(__nv_bfloat162 value) { return {value.x, value.y}; }
static inline __nv_bfloat162 __float2bfloat162_rn(float value) { return {value, value}; }
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
static inline __nv_bfloat162 __float22bfloat162_rn(float2 value) { return {value.x, value.y}; }
static inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 value) { return {value, value}; }
static inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
static inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
static inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 value) { return value.x; }
static inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 value) { return value.y; }
