// The operators and functions that __half and __nv_bfloat16 share, written once: each result is the exact one, rounded.
//
// Sums, products and quotients through float are so: it has more than twice the bits and two more, so that rounding
// twice rounds once. A fused product and sum is exact in double wherever its rounding could be in doubt.
#pragma once

#define SIMT_SMALL_FLOAT_OPERATORS(T)                                                                       \
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
