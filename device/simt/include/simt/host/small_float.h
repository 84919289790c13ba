// Operators and functions that __half and __nv_bfloat16 share; each result is the exact result, rounded once.
//
// Sums, products and quotients are computed in float, which has more than twice the bits and two more, so that rounding
// twice equals rounding once. A fused multiply-add is exact in double wherever its rounding could be in doubt.
#pragma once

#define SIMT_SMALL_FLOAT_OPERATORS(T, Format)                                                               \
    static inline T operator+(T a, T b) { return T(float(a) + float(b)); }                                  \
    static inline T operator-(T a, T b) { return T(float(a) - float(b)); }                                  \
    static inline T operator*(T a, T b) { return T(float(a) * float(b)); }                                  \
    static inline T operator/(T a, T b) { return T(float(a) / float(b)); }                                  \
    static inline T operator-(T a) { return T(-float(a)); }                                                 \
    static inline T& operator+=(T& a, T b) { return a = a + b; }                                            \
    static inline T& operator-=(T& a, T b) { return a = a - b; }                                            \
    static inline T& operator*=(T& a, T b) { return a = a * b; }                                            \
    static inline T& operator/=(T& a, T b) { return a = a / b; }                                            \
    static inline bool operator==(T a, T b) { return float(a) == float(b); }                                \
    static inline bool operator!=(T a, T b) { return float(a) != float(b); }                                \
    static inline bool operator<(T a, T b) { return float(a) < float(b); }                                  \
    static inline bool operator>(T a, T b) { return float(a) > float(b); }                                  \
    static inline bool operator<=(T a, T b) { return float(a) <= float(b); }                                \
    static inline bool operator>=(T a, T b) { return float(a) >= float(b); }                                \
    static inline T __hadd(T a, T b) { return a + b; }                                                      \
    static inline T __hsub(T a, T b) { return a - b; }                                                      \
    static inline T __hmul(T a, T b) { return a * b; }                                                      \
    static inline T __hneg(T a) { return -a; }                                                              \
    static inline T __hfma(T a, T b, T c) {                                                                 \
        const double sum = std::fma(double(float(a)), double(float(b)), double(float(c)));                  \
        return simt::bit_cast<T>(simt::round_double<Format>(sum));                                          \
    }                                                                                                       \
    static inline T __habs(T a) { return T(std::fabs(float(a))); }                                          \
    static inline T __hmax(T a, T b) { return T(std::fmax(float(a), float(b))); }                           \
    static inline T __hmin(T a, T b) { return T(std::fmin(float(a), float(b))); }                           \
    static inline bool __hisnan(T a) { return std::isnan(float(a)); }                                       \
    static inline T __ldg(const T* at) { return *at; }

#define SIMT_SMALL_FLOAT_PAIRS(T, T2)                                                                       \
    static inline T2 __hadd2(T2 a, T2 b) { return {a.x + b.x, a.y + b.y}; }                                 \
    static inline T2 __hsub2(T2 a, T2 b) { return {a.x - b.x, a.y - b.y}; }                                 \
    static inline T2 __hmul2(T2 a, T2 b) { return {a.x * b.x, a.y * b.y}; }                                 \
    static inline T2 __hfma2(T2 a, T2 b, T2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }   \
    static inline T2 __hmax2(T2 a, T2 b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }                   \
    static inline T2 __hmin2(T2 a, T2 b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; }                   \
    static inline float __low2float(T2 a) { return a.x; }                                                   \
    static inline float __high2float(T2 a) { return a.y; }

// Functions whose names contain `name`, which is half or bfloat16.
#define SIMT_SMALL_FLOAT_CONVERSIONS(T, T2, name)                                                           \
    static inline float __##name##2float(T value) { return value; }                                         \
    static inline T __float2##name(float value) { return value; }                                           \
    static inline T __float2##name##_rn(float value) { return value; }                                      \
    static inline T __int2##name##_rn(int value) { return value; }                                          \
    static inline T __ushort_as_##name(unsigned short bits) { return simt::bit_cast<T>(bits); }             \
    static inline unsigned short __##name##_as_ushort(T value) { return value.__x; }                        \
    static inline float2 __##name##22float2(T2 value) { return {value.x, value.y}; }                        \
    static inline T2 __float2##name##2_rn(float value) { return {value, value}; }                           \
    static inline T2 __floats2##name##2_rn(float x, float y) { return {x, y}; }                             \
    static inline T2 __float22##name##2_rn(float2 value) { return {value.x, value.y}; }                     \
    static inline T2 __##name##2##name##2(T value) { return {value, value}; }                               \
    static inline T2 __halves2##name##2(T x, T y) { return {x, y}; }                                        \
    static inline T2 make_##name##2(T x, T y) { return {x, y}; }                                            \
    static inline T __low2##name(T2 value) { return value.x; }                                              \
    static inline T __high2##name(T2 value) { return value.y; }
