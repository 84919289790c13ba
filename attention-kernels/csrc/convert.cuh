// Element types: conversion between floats and words of two 16-bit or four 8-bit elements.
//
// Every 8-bit format is exact in f16 and bf16, so widening is exact; scales are applied to scores and sums.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <quire/ptx.cuh>

#include "args.cuh"

namespace quire {

template <class To, class From>
__device__ __forceinline__ To bits(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits under another type");
    return reinterpret_cast<const To&>(from);
}

// Pairs of a 16-bit type in one word, the first element in the low half.
template <class T>
struct Pair;

template <>
struct Pair<__half> {
    static constexpr uint32_t ONES = 0x3c003c00;
    static __device__ __forceinline__ float2 widen(uint32_t word) { return __half22float2(bits<__half2>(word)); }
    static __device__ __forceinline__ uint32_t narrow(float low, float high) {
        return bits<uint32_t>(__floats2half2_rn(low, high));
    }
    static __device__ __forceinline__ uint32_t from_half(uint32_t word) { return word; }
    // Converts bytes 0 and 2. 1024 + (element + 128) has 1 as its last bit.
    static __device__ __forceinline__ uint32_t from_int8(uint32_t word) {
        const uint32_t biased = and_xor(word, 0x00ff00ff, 0x64806480);
        return bits<uint32_t>(__hsub2(bits<__half2>(biased), __float2half2_rn(1152.0f)));
    }
};

template <>
struct Pair<__nv_bfloat16> {
    static constexpr uint32_t ONES = 0x3f803f80;
    static __device__ __forceinline__ float2 widen(uint32_t word) { return __bfloat1622float2(bits<__nv_bfloat162>(word)); }
    static __device__ __forceinline__ uint32_t narrow(float low, float high) {
        return bits<uint32_t>(__floats2bfloat162_rn(low, high));
    }
    static __device__ __forceinline__ uint32_t from_half(uint32_t word) {
        const float2 pair = Pair<__half>::widen(word);
        return narrow(pair.x, pair.y);
    }
    // 128 + (the lower 7 bits) has 1 as its last bit. 128 or, if the element is negative, 256 is subtracted.
    static __device__ __forceinline__ uint32_t from_int8(uint32_t word) {
        const uint32_t biased = and_xor(word, 0x007f007f, 0x43004300), less = and_xor(word, 0x00800080, 0x43004300);
        return bits<uint32_t>(__hsub2(bits<__nv_bfloat162>(biased), bits<__nv_bfloat162>(less)));
    }
};

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float(float value) { return value; }
template <>
__device__ __forceinline__ __half from_float(float value) { return __float2half_rn(value); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float(float value) { return __float2bfloat16_rn(value); }

// Converts two 8-bit elements (low byte first) to a pair of f16. sm_89 and later have an instruction for e4m3. Before, the
// bits are moved to the position that they have in f16, which yields the number times 2^-8.
__device__ __forceinline__ uint32_t half_pair(uint32_t format, uint32_t two) {
    if (format >= KV_INT8) {
        return Pair<__half>::from_int8((two & 0xff) | (two & 0xff00) << 8);
    }
    const uint32_t upper = (two & 0xff) << 8 | (two & 0xff00) << 16;
    if (format == KV_E5M2) return upper;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3);
    return static_cast<uint32_t>(pair.y) << 16 | pair.x;
#else
    const uint32_t small = (upper & 0x80008000) | (upper & 0x7f007f00) >> 1;
    const __half2 number = __hmul2(bits<__half2>(small), __float2half2_rn(256.0f));
    // NaN has become 480, whose product overflows, unlike that of 448. Infinity times 0 is NaN.
    const __half2 product = __hmul2(number, __float2half2_rn(137.0f));
    return bits<uint32_t>(__hfma2(product, __float2half2_rn(0.0f), number));
#endif
}

// Returns the stored byte of `value`, which is already divided by its scale: clamped to the format's range, rounded to
// nearest, ties to even.
__device__ __forceinline__ uint8_t to_byte(uint32_t format, float value) {
    if (format >= KV_INT8) {
        return static_cast<uint8_t>(static_cast<int8_t>(__float2int_rn(fminf(fmaxf(value, -127.0f), 127.0f))));
    }
    return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, format == KV_E4M3 ? __NV_E4M3 : __NV_E5M2);
}

__device__ __forceinline__ float from_byte(uint32_t format, uint8_t byte) {
    return Pair<__half>::widen(half_pair(format, byte)).x;
}

// Returns a word of a 16-byte vector. The index is a constant once loops are unrolled.
__device__ __forceinline__ uint32_t word(const uint4& vector, int i) {
    return i == 0 ? vector.x : i == 1 ? vector.y : i == 2 ? vector.z : vector.w;
}

// Converts a 16-byte vector of a cache to floats: 8 elements of T, or 16 of an 8-bit format.
template <class T>
__device__ __forceinline__ void widen(uint32_t, const uint4& vector, float (&to)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = Pair<T>::widen(word(vector, i));
        to[2 * i] = pair.x;
        to[2 * i + 1] = pair.y;
    }
}
template <class T>
__device__ __forceinline__ void widen(uint32_t format, const uint4& vector, float (&to)[16]) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float2 pair = Pair<__half>::widen(half_pair(format, word(vector, i / 2) >> (16 * (i % 2)) & 0xffff));
        to[2 * i] = pair.x;
        to[2 * i + 1] = pair.y;
    }
}

// A format as a constant.
template <uint32_t format>
using Format = std::integral_constant<uint32_t, format>;

// Calls `body` with the format of the cache as a constant.
template <bool KV8, class Body>
__device__ __forceinline__ void with_format(uint32_t format, Body body) {
    if constexpr (!KV8) body(Format<KV_SAME>{});
    else if (format == KV_E4M3) body(Format<KV_E4M3>{});
    else if (format == KV_E5M2) body(Format<KV_E5M2>{});
    else if (format == KV_INT8) body(Format<KV_INT8>{});
    else body(Format<KV_INT8_ROWS>{});
}

// Converts four 8-bit elements to pairs of a 16-bit type: those of bytes 0 and 2, and of 1 and 3.
template <class T>
__device__ __forceinline__ void widen_word(uint32_t format, uint32_t word, uint32_t& even, uint32_t& odd) {
    if (format == KV_E5M2) {
        even = Pair<T>::from_half(word << 8 & 0xff00ff00);
        odd = Pair<T>::from_half(word & 0xff00ff00);
    } else if (format == KV_E4M3) {
        const uint32_t pairs = __byte_perm(word, 0, 0x3120);
        even = Pair<T>::from_half(half_pair(format, pairs & 0xffff));
        odd = Pair<T>::from_half(half_pair(format, pairs >> 16));
    } else {
        even = Pair<T>::from_int8(word);
        odd = Pair<T>::from_int8(word >> 8);
    }
}

}  // namespace quire
