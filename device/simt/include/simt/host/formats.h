// Small floating-point formats: rounding a float to fewer bits, and widening it.
//
// All formats round to nearest, ties to even, bit for bit as the cvt instructions of the device.
#pragma once

#include <cstdint>

#include "intrinsics.h"

namespace simt {

// A format with E bits of exponent and M bits of mantissa. Numbers that round to more than `largest` become `overflow`; NaN
// becomes `nan`, without its sign.
template <int E, int M, unsigned largest, unsigned overflow, unsigned nan>
struct Format {
    static constexpr int bias = (1 << (E - 1)) - 1;
    static constexpr int smallest_exponent = 1 - bias;  // of a normal number
    static constexpr unsigned sign = 1u << (E + M);

    static unsigned from_float(float value) {
        const uint32_t bits = bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffff;
        if (magnitude > 0x7f800000) return nan;
        // value = mantissa * 2^(exponent - 23)
        const int field = static_cast<int>(magnitude >> 23);
        const int exponent = field ? field - 127 : -126;
        const uint32_t mantissa = (magnitude & 0x7fffff) | (field ? 0x800000 : 0);
        const int below = exponent < smallest_exponent ? smallest_exponent - exponent : 0;
        const int dropped = 23 - M + below;
        uint32_t code = 0;
        if (dropped <= 24) {  // otherwise less than half of the smallest number
            const uint32_t rest = mantissa & ((1u << dropped) - 1), half = 1u << (dropped - 1);
            code = mantissa >> dropped;
            code += rest > half || (rest == half && (code & 1));
        }
        // The leading bit of a normal mantissa and a carry of the rounding both increment the exponent.
        code += static_cast<uint32_t>(exponent + below - smallest_exponent) << M;
        return (bits >> 31 ? sign : 0) | (code > largest ? overflow : code);
    }

    // Moves exponent and mantissa to their places in a float, and multiplies by the difference of the biases: exact, for
    // subnormal numbers too.
    static float finite_to_float(unsigned code) {
        const float magnitude = bit_cast<float>((code & (sign - 1)) << (23 - M)) * bit_cast<float>((254u - bias) << 23);
        return bit_cast<float>(bit_cast<uint32_t>(magnitude) | (code & sign ? 0x80000000u : 0));
    }
};

using Half = Format<5, 10, 0x7bff, 0x7c00, 0x7fff>;
using Bfloat16 = Format<8, 7, 0x7f7f, 0x7f80, 0x7fff>;
using E4m3 = Format<4, 3, 0x7e, 0x7e, 0x7f>;  // saturates
using E5m2 = Format<5, 2, 0x7b, 0x7b, 0x7f>;  // saturates

// Rounds an exact double to a format of at most 16 bits. It is first rounded to float, to odd, so that the second rounding
// gives the same result as a single one (Boldo and Melquiond, 2005).
template <class F>
uint16_t round_double(double value) {
    float narrow = static_cast<float>(value);
    const double error = value - static_cast<double>(narrow);
    if (error != 0 && narrow != 0 && !std::isinf(narrow)) {
        uint32_t bits = bit_cast<uint32_t>(narrow);
        if (!(bits & 1)) bits += ((error > 0) == (narrow > 0)) ? 1u : ~0u;
        narrow = bit_cast<float>(bits);
    }
    return static_cast<uint16_t>(F::from_float(narrow));
}

inline float half_to_float(uint16_t code) {
    if ((code & 0x7c00) != 0x7c00) return Half::finite_to_float(code);
    const uint32_t quiet = code & 0x3ff ? 0x400000 : 0;
    return bit_cast<float>((code & 0x8000u) << 16 | 0x7f800000 | quiet | (code & 0x3ffu) << 13);
}
inline float bfloat16_to_float(uint16_t code) { return bit_cast<float>(static_cast<uint32_t>(code) << 16); }
inline float e4m3_to_float(uint8_t code) {
    return (code & 0x7f) == 0x7f ? bit_cast<float>(0x7fffffffu) : E4m3::finite_to_float(code);
}
// e5m2 is the upper half of an f16.
inline float e5m2_to_float(uint8_t code) { return half_to_float(static_cast<uint16_t>(code << 8)); }

}  // namespace simt
