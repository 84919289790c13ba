// Element types: conversion between floats and words of two 16-bit or four 8-bit elements.
//
// Every 8-bit format is exact in f16 and bf16, so widening is exact; scales are applied to scores and sums.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

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
    if (format >= KV_INT8) {  // 1024 + (element + 128) in f16, whose last bit is 1 there
        const uint32_t biased = ((two & 0xff) | (two & 0xff00) << 8) ^ 0x64806480;
        return bits<uint32_t>(__hsub2(bits<__half2>(biased), __float2half2_rn(1152.0f)));
    }
    const uint32_t upper = (two & 0xff) << 8 | (two & 0xff00) << 16;
    if (format == KV_E5M2) return upper;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3);
    return static_cast<uint32_t>(pair.y) << 16 | pair.x;
#else
    const uint32_t small = (upper & 0x80008000) | (upper & 0x7f007f00) >> 1;
    const uint32_t nan = ((two & 0x7f) == 0x7f ? 0x7fff : 0) | ((two & 0x7f00) == 0x7f00 ? 0x7fff0000 : 0);
    return bits<uint32_t>(__hmul2(bits<__half2>(small), __float2half2_rn(256.0f))) | nan;
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

// Converts eight 8-bit elements to a 16-bit type.
template <class T>
__device__ __forceinline__ uint4 widen_bytes(uint32_t format, uint32_t low, uint32_t high) {
    const auto pair = [=](uint32_t two) { return Pair<T>::from_half(half_pair(format, two)); };
    return make_uint4(pair(low & 0xffff), pair(low >> 16), pair(high & 0xffff), pair(high >> 16));
}

// Multiplies eight elements of a 16-bit type by `factor` and rounds.
template <class T>
__device__ __forceinline__ uint4 scaled(const uint4& eight, float factor) {
    const auto times = [=](uint32_t two) {
        const float2 pair = Pair<T>::widen(two);
        return Pair<T>::narrow(__fmul_rn(pair.x, factor), __fmul_rn(pair.y, factor));
    };
    return make_uint4(times(eight.x), times(eight.y), times(eight.z), times(eight.w));
}

}  // namespace quire
