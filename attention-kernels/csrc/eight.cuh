// Conversion of eight elements at a time between the float types and the 8-bit formats.
#pragma once

#include "convert.cuh"

namespace quire {

// Eight elements of T, read and written in 16-byte vectors.
template <class T>
struct Eight {
    uint4 raw;

    __device__ __forceinline__ void load(const T* from) { raw = *reinterpret_cast<const uint4*>(from); }
    __device__ __forceinline__ void store(T* to) const { *reinterpret_cast<uint4*>(to) = raw; }
    __device__ __forceinline__ void get(float (&to)[8]) const { widen<T>(KV_SAME, raw, to); }
    __device__ __forceinline__ void set(const float (&from)[8]) {
        raw = make_uint4(Pair<T>::narrow(from[0], from[1]), Pair<T>::narrow(from[2], from[3]),
                         Pair<T>::narrow(from[4], from[5]), Pair<T>::narrow(from[6], from[7]));
    }
};

template <>
struct Eight<float> {
    float4 low, high;

    __device__ __forceinline__ void load(const float* from) {
        low = reinterpret_cast<const float4*>(from)[0];
        high = reinterpret_cast<const float4*>(from)[1];
    }
    __device__ __forceinline__ void store(float* to) const {
        reinterpret_cast<float4*>(to)[0] = low;
        reinterpret_cast<float4*>(to)[1] = high;
    }
    __device__ __forceinline__ void get(float (&to)[8]) const {
        to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
        to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
    }
    __device__ __forceinline__ void set(const float (&from)[8]) {
        low = make_float4(from[0], from[1], from[2], from[3]);
        high = make_float4(from[4], from[5], from[6], from[7]);
    }
};

// Returns the stored bytes of eight values: divided by the scale, clamped, rounded to nearest, ties to even.
__device__ __forceinline__ uint2 quantise(uint32_t format, const float (&values)[8], float scale) {
    uint32_t words[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        words[i / 4] |= static_cast<uint32_t>(to_byte(format, __fdiv_rn(values[i], scale))) << (8 * (i % 4));
    }
    return make_uint2(words[0], words[1]);
}

// Scale of a row of KV_INT8_ROWS. `greatest` is the greatest magnitude of the row as bits, which have the order of the
// numbers, with NaN above all. A row of zeros, or of numbers that underflow, has scale 0 and stores zeros.
struct RowScale {
    float scale, divisor;

    __device__ __forceinline__ explicit RowScale(uint32_t greatest)
        : scale(__fdiv_rn(bits<float>(greatest), 127.0f)), divisor(scale == 0.0f ? INFINITY : scale) {}
};

__device__ __forceinline__ uint32_t greatest_magnitude(const float (&values)[8]) {
    uint32_t greatest = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) greatest = max(greatest, bits<uint32_t>(values[i]) & 0x7fffffff);
    return greatest;
}

// Returns the maximum over `lanes` (a power of two) adjacent threads of a warp. All 32 threads must call it.
__device__ __forceinline__ uint32_t greatest_over(uint32_t value, uint32_t lanes) {
    for (uint32_t step = lanes / 2; step > 0; step /= 2) value = max(value, __shfl_xor_sync(~0u, value, step));
    return value;
}

__device__ __forceinline__ void dequantise(uint32_t format, const uint2& bytes, float scale, float (&to)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t word = i < 4 ? bytes.x : bytes.y;
        to[i] = from_byte(format, static_cast<uint8_t>(word >> (8 * (i % 4)) & 0xff)) * scale;
    }
}

}  // namespace quire
