// Functions of device code without an include: fast mathematics, bits, conversions and loads with cache hints.
//
// The fast functions (__expf and others) are those of the C library here: their error on the device, a few ulp, is not
// modelled.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "runtime.h"

using std::isfinite;
using std::isinf;
using std::isnan;
using std::max;
using std::min;

// Macros, because the C library declares some of these names.
#define __expf(x) expf(x)
#define __exp2f(x) exp2f(x)
#define __exp10f(x) powf(10.0f, x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __powf(x, y) powf(x, y)
#define __tanhf(x) tanhf(x)

static inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
static inline float __fdividef(float x, float y) { return x / y; }
static inline float __fdiv_rn(float x, float y) { return x / y; }
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline float __fsub_rn(float x, float y) { return x - y; }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fsqrt_rn(float x) { return std::sqrt(x); }
static inline double __dadd_rn(double x, double y) { return x + y; }
static inline double __dsub_rn(double x, double y) { return x - y; }
static inline double __dmul_rn(double x, double y) { return x * y; }
static inline double __ddiv_rn(double x, double y) { return x / y; }
static inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }  // NaN becomes 0

namespace simt {

template <class To, class From>
To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits in another type");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// Converts to an integer: saturates, and NaN becomes 0.
template <class T>
T to_integer(float whole) {
    const double low = static_cast<double>(std::numeric_limits<T>::min());
    const double high = static_cast<double>(std::numeric_limits<T>::max());
    if (std::isnan(whole)) return 0;
    if (whole <= low) return std::numeric_limits<T>::min();
    return whole >= high ? std::numeric_limits<T>::max() : static_cast<T>(whole);
}

}  // namespace simt

static inline float __uint_as_float(unsigned x) { return simt::bit_cast<float>(x); }
static inline float __int_as_float(int x) { return simt::bit_cast<float>(x); }
static inline unsigned __float_as_uint(float x) { return simt::bit_cast<unsigned>(x); }
static inline int __float_as_int(float x) { return simt::bit_cast<int>(x); }
static inline double __longlong_as_double(long long x) { return simt::bit_cast<double>(x); }
static inline long long __double_as_longlong(double x) { return simt::bit_cast<long long>(x); }

static inline int __float2int_rn(float x) { return simt::to_integer<int>(std::nearbyint(x)); }
static inline int __float2int_rz(float x) { return simt::to_integer<int>(std::trunc(x)); }
static inline int __float2int_rd(float x) { return simt::to_integer<int>(std::floor(x)); }
static inline int __float2int_ru(float x) { return simt::to_integer<int>(std::ceil(x)); }
static inline unsigned __float2uint_rn(float x) { return simt::to_integer<unsigned>(std::nearbyint(x)); }
static inline unsigned __float2uint_rz(float x) { return simt::to_integer<unsigned>(std::trunc(x)); }
static inline float __int2float_rn(int x) { return static_cast<float>(x); }
static inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline unsigned __umulhi(unsigned x, unsigned y) {
    return static_cast<unsigned>(static_cast<uint64_t>(x) * y >> 32);
}
static inline int __mulhi(int x, int y) { return static_cast<int>(static_cast<int64_t>(x) * y >> 32); }
// Returns four of the eight bytes of y:x, each selected by a digit of `selector`.
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
    unsigned result = 0;
    for (unsigned i = 0; i < 4; i++) {
        const unsigned choice = selector >> (4 * i) & 15;
        unsigned byte = static_cast<unsigned>(bytes >> (8 * (choice & 7))) & 0xff;
        if (choice & 8) byte = byte & 0x80 ? 0xff : 0;
        result |= byte << (8 * i);
    }
    return result;
}

// Cache hints have no effect here.
template <class T> T __ldg(const T* at) { return *at; }
template <class T> T __ldcs(const T* at) { return *at; }
template <class T> T __ldcg(const T* at) { return *at; }
template <class T> T __ldca(const T* at) { return *at; }
template <class T> void __stcs(T* at, T value) { *at = value; }
template <class T> void __stcg(T* at, T value) { *at = value; }

[[noreturn]] static inline void __trap(simt::Place at = simt::here()) { simt::fail(simt::Fault::trap, "__trap()", at); }
