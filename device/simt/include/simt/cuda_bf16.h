// Replacement for CUDA's header of this name: __nv_bfloat16 and __nv_bfloat162.
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

SIMT_SMALL_FLOAT_OPERATORS(__nv_bfloat16, simt::Bfloat16)
SIMT_SMALL_FLOAT_PAIRS(__nv_bfloat16, __nv_bfloat162)
SIMT_SMALL_FLOAT_CONVERSIONS(__nv_bfloat16, __nv_bfloat162, bfloat16)
