// The arithmetic of a draw, operation by operation as on the host (src/numbers.rs, src/draw.rs, src/philox.rs), so that
// the bits are equal. The `_rn` functions keep compilers from fusing a product with a sum.
#pragma once

#include "args.cuh"

namespace quire {

// Order-preserving integers. Equal numbers have equal keys: −0 becomes 0 first. No number has key 0.
__device__ __forceinline__ uint32_t key_of(float x) {
    const uint32_t bits = __float_as_uint(__fadd_rn(x, 0.0f));
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
__device__ __forceinline__ float of_key(uint32_t key) {
    return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key);
}

// A logit's key and its token in one number. The greatest is the likeliest token; of equal logits the lowest id.
__device__ __forceinline__ Mass pack(uint32_t key, uint32_t token) { return static_cast<Mass>(key) << 32 | ~token; }
__device__ __forceinline__ uint32_t token_of(Mass packed) { return ~static_cast<uint32_t>(packed); }
__device__ __forceinline__ float logit_of(Mass packed) { return of_key(static_cast<uint32_t>(packed >> 32)); }

constexpr int WEIGHT_BITS = 42;
constexpr double LN_2 = 0.693147180559945309417232121458;
constexpr float LARGEST = 3.40282347e38f;

// e^z in units of 2^-42 for z <= 0; see `weight` in numbers.rs.
__device__ __forceinline__ Mass weight(float z) {
    if (!(z > -30.0f)) return 0;
    constexpr float LN_2_HIGH = 355.0f / 512.0f, LN_2_LOW = static_cast<float>(LN_2 - 355.0 / 512.0);
    const int n = static_cast<int>(__fsub_rn(__fmul_rn(z, 1.44269504088896340736f), 0.5f));
    const float whole = static_cast<float>(n);
    const float r = __fsub_rn(__fsub_rn(z, __fmul_rn(whole, LN_2_HIGH)), __fmul_rn(whole, LN_2_LOW));
    float power = 1.0f / 5040.0f;
    power = __fadd_rn(__fmul_rn(power, r), 1.0f / 720.0f);
    power = __fadd_rn(__fmul_rn(power, r), 1.0f / 120.0f);
    power = __fadd_rn(__fmul_rn(power, r), 1.0f / 24.0f);
    power = __fadd_rn(__fmul_rn(power, r), 1.0f / 6.0f);
    power = __fadd_rn(__fmul_rn(power, r), 0.5f);
    power = __fadd_rn(__fmul_rn(power, r), 1.0f);
    power = __fadd_rn(__fmul_rn(power, r), 1.0f);
    const float unit = __uint_as_float(static_cast<uint32_t>(127 + WEIGHT_BITS + n) << 23);
    return static_cast<Mass>(static_cast<long long>(__fadd_rn(__fmul_rn(power, unit), 0.5f)));
}

// z e^z in the same units, rounded towards 0.
__device__ __forceinline__ long long weighted(float z) {
    const Mass e = weight(z);
    return e ? static_cast<long long>(__dmul_rn(static_cast<double>(e), static_cast<double>(z))) : 0;
}

// The least mass that is at least this share of `mass`; at least one unit.
__device__ __forceinline__ Mass share_of(Mass mass, float share) {
    const double part = ceil(__dmul_rn(static_cast<double>(share), static_cast<double>(mass)));
    return part >= 1.0 ? static_cast<Mass>(part) : 1;
}

// logit − largest of a raw row; −∞ for NaN.
__device__ __forceinline__ float relative(float logit, float largest) {
    const float none = __uint_as_float(0xff800000u);
    return logit > none ? __fsub_rn(fminf(logit, LARGEST), largest) : none;
}

// Natural logarithm of a normal positive number; see `ln` in numbers.rs.
__device__ __forceinline__ double ln(double x) {
    const long long bits = __double_as_longlong(x), root_of_half = __double_as_longlong(0.707106781186547524400844362104849039);
    const long long exponent = (bits - root_of_half) >> 52;
    const double m = __longlong_as_double(bits - exponent * (1ll << 52));
    const double s = __ddiv_rn(__dsub_rn(m, 1.0), __dadd_rn(m, 1.0));
    const double square = __dmul_rn(s, s);
    double series = 1.0 / 23.0;
#pragma unroll
    for (int odd = 21; odd >= 3; odd -= 2) series = __dadd_rn(__dmul_rn(series, square), 1.0 / odd);
    const double twice = __dadd_rn(s, s);
    const double of_m = __dadd_rn(twice, __dmul_rn(__dmul_rn(twice, square), series));
    return __dadd_rn(__dmul_rn(static_cast<double>(exponent), LN_2), of_m);
}

__device__ __forceinline__ double ln_mass(Mass mass) {
    return ln(__ddiv_rn(static_cast<double>(mass), static_cast<double>(1ull << WEIGHT_BITS)));
}

// The upper 52 bits of the first two words of Philox4x32-10 (Salmon et al., SC 2011), low word first.
__device__ __forceinline__ Mass uniform_bits(const RowParams& params, uint32_t output_index, uint32_t token) {
    uint32_t x0 = output_index, x1 = params.sequence, x2 = token, x3 = 0;
    uint32_t k0 = params.seed[0], k1 = params.seed[1];
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const uint32_t a_high = __umulhi(0xD2511F53u, x0), a_low = 0xD2511F53u * x0;
        const uint32_t b_high = __umulhi(0xCD9E8D57u, x2), b_low = 0xCD9E8D57u * x2;
        x0 = b_high ^ x1 ^ k0;
        x1 = b_low;
        x2 = a_high ^ x3 ^ k1;
        x3 = a_low;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (static_cast<Mass>(x1) << 32 | x0) >> 12;
}

// Upper bound of all noise.
constexpr double MAX_NOISE = 36.75;

__device__ __forceinline__ double gumbel(Mass bits) {
    const double uniform = __ddiv_rn(__dadd_rn(static_cast<double>(bits), 0.5), static_cast<double>(1ull << 52));
    return -ln(-ln(uniform));
}

// An upper bound of `gumbel(bits)` from the number of leading ones.
__device__ __forceinline__ double gumbel_bound(Mass bits) {
    const uint32_t high = static_cast<uint32_t>(bits >> 20);
    return high == NONE ? MAX_NOISE : (__clz(static_cast<int>(~high)) + 1) * LN_2 + 1e-9;
}

}  // namespace quire
