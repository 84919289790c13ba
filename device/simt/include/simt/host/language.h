// Extensions of CUDA C++: qualifiers, built-in variables and vector types.
#pragma once

#include "runtime.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
// thread_local is the storage class of C++ that is static inside of a function, may follow `extern`, and has one copy per
// operating system thread, so that concurrent launches do not share it. The runtime fills all of it with NaN before each block.
#define __shared__ thread_local

#define threadIdx (simt::self->thread_idx)
#define blockIdx (simt::self->block_idx)
#define blockDim (simt::self->block_dim)
#define gridDim (simt::self->grid_dim)
static constexpr int warpSize = 32;

// Vector types with the alignment that 8- and 16-byte loads need.
#define SIMT_VECTORS(T, name, align2, align4)                                       \
    struct name##1 {                                                                \
        T x;                                                                        \
    };                                                                              \
    struct alignas(align2) name##2 {                                                \
        T x, y;                                                                     \
    };                                                                              \
    struct name##3 {                                                                \
        T x, y, z;                                                                  \
    };                                                                              \
    struct alignas(align4) name##4 {                                                \
        T x, y, z, w;                                                               \
    };                                                                              \
    static inline name##2 make_##name##2(T x, T y) { return {x, y}; }               \
    static inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }       \
    static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }

SIMT_VECTORS(signed char, char, 2, 4)
SIMT_VECTORS(unsigned char, uchar, 2, 4)
SIMT_VECTORS(short, short, 4, 8)
SIMT_VECTORS(unsigned short, ushort, 4, 8)
SIMT_VECTORS(int, int, 8, 16)
SIMT_VECTORS(float, float, 8, 16)
SIMT_VECTORS(long long, longlong, 16, 16)
SIMT_VECTORS(unsigned long long, ulonglong, 16, 16)
SIMT_VECTORS(double, double, 16, 16)
#undef SIMT_VECTORS

// `uint3` is defined in runtime.h.
struct uint1 {
    unsigned x;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
