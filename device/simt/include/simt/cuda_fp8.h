// Replacement for CUDA's header of this name: e4m3 and e5m2, always saturating, as Quire uses them.
#pragma once

#include "cuda_bf16.h"
#include "cuda_fp16.h"

using __nv_fp8_storage_t = unsigned char;
using __nv_fp8x2_storage_t = unsigned short;
using __nv_fp8x4_storage_t = unsigned;
enum __nv_saturation_t { __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };

static inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float value, __nv_saturation_t, __nv_fp8_interpretation_t kind) {
    const unsigned code = kind == __NV_E4M3 ? simt::E4m3::from_float(value) : simt::E5m2::from_float(value);
    return static_cast<__nv_fp8_storage_t>(code);
}
static inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 value, __nv_saturation_t saturation,
                                                            __nv_fp8_interpretation_t kind) {
    const unsigned low = __nv_cvt_float_to_fp8(value.x, saturation, kind);
    const unsigned high = __nv_cvt_float_to_fp8(value.y, saturation, kind);
    return static_cast<__nv_fp8x2_storage_t>(high << 8 | low);
}
// Exact, because every fp8 number is an f16 number.
static inline __half_raw __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t code, __nv_fp8_interpretation_t kind) {
    return __half(kind == __NV_E4M3 ? simt::e4m3_to_float(code) : simt::e5m2_to_float(code));
}
static inline __half2_raw __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t codes, __nv_fp8_interpretation_t kind) {
    const __nv_fp8_storage_t low = codes & 0xff, high = codes >> 8;
    return {__nv_cvt_fp8_to_halfraw(low, kind).x, __nv_cvt_fp8_to_halfraw(high, kind).x};
}

#define SIMT_FP8(name, kind, to_float)                                                                              \
    struct __nv_fp8_##name {                                                                                        \
        __nv_fp8_storage_t __x;                                                                                     \
        __nv_fp8_##name() = default;                                                                                \
        explicit __nv_fp8_##name(float value) : __x(__nv_cvt_float_to_fp8(value, __NV_SATFINITE, kind)) {}          \
        explicit __nv_fp8_##name(__half value) : __nv_fp8_##name(float(value)) {}                                   \
        explicit __nv_fp8_##name(__nv_bfloat16 value) : __nv_fp8_##name(float(value)) {}                            \
        explicit operator float() const { return to_float(__x); }                                                   \
        explicit operator __half() const { return to_float(__x); }                                                  \
        explicit operator __nv_bfloat16() const { return to_float(__x); }                                           \
    };                                                                                                              \
    struct alignas(2) __nv_fp8x2_##name {                                                                           \
        __nv_fp8x2_storage_t __x;                                                                                   \
        __nv_fp8x2_##name() = default;                                                                              \
        explicit __nv_fp8x2_##name(float2 value) : __x(__nv_cvt_float2_to_fp8x2(value, __NV_SATFINITE, kind)) {}    \
        explicit operator float2() const { return __half22float2(__half2(*this)); }                                 \
        explicit operator __half2() const { return __nv_cvt_fp8x2_to_halfraw2(__x, kind); }                         \
    };                                                                                                              \
    struct alignas(4) __nv_fp8x4_##name {                                                                           \
        __nv_fp8x4_storage_t __x;                                                                                   \
        __nv_fp8x4_##name() = default;                                                                              \
        explicit __nv_fp8x4_##name(float4 v)                                                                        \
            : __x(static_cast<unsigned>(__nv_fp8x2_##name(float2{v.z, v.w}).__x) << 16 |                            \
                  __nv_fp8x2_##name(float2{v.x, v.y}).__x) {}                                                       \
        explicit operator float4() const {                                                                          \
            return {to_float(__x & 0xff), to_float(__x >> 8 & 0xff), to_float(__x >> 16 & 0xff), to_float(__x >> 24)}; \
        }                                                                                                           \
    };

SIMT_FP8(e4m3, __NV_E4M3, simt::e4m3_to_float)
SIMT_FP8(e5m2, __NV_E5M2, simt::e5m2_to_float)
#undef SIMT_FP8
