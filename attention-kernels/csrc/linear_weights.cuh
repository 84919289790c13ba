// Weights of linear.cu: panels of 16 outputs, whose codes become factor A of mma.m16n8k16 in registers.
//
// A weight is rounded to T once, from the float32 number that its format defines, as if it had been unpacked before. How codes
// become numbers, for an output and a pair of codes:
//
//   narrow4   (code - zero) * scale in T: code and scale are exact there, and the product is rounded once
//   split4    the same for T of 8 bits and a scale of 11: code * first + code * rest, where both sum up to the scale, the second
//             product is exact, and the sum of both is rounded once (fma)
//   others    scale * (code - zero) + minimum in float32, then rounded to T
//
// Operations in T take half of the instructions of those in float32, and bits are set and masked in one (and_xor): kernels with few
// rows are bound by the number of instructions as much as by memory.
#pragma once

#include <quire/ptx.cuh>

#include "eight.cuh"
#include "linear_args.cuh"

namespace quire {

constexpr uint32_t PANEL = 16;
// Inputs of a tile of codes, and those that a warp adds before the next warp's.
constexpr uint32_t TILE_INPUTS = 64, SLICE_INPUTS = 128;
// A float from here on has integers as its last bits.
constexpr uint32_t MAGIC_BITS = 0x4b000000;

// What codes of a group become numbers with, for an output.
struct WideGroup {
    float scale;
    float less;     // subtracted from 2^23 + code; 2^23 has 1 as its last bit
    float minimum;  // added to the product
};
struct NarrowGroup {
    uint32_t scale;  // twice, of type T
    uint32_t rest;   // twice, of type T: what the scale lacks (Split4)
    uint32_t less;   // twice, of type T: subtracted from the number that has the code as its last bits
};

// The numbers of the codes of a pair (register `p` of the fragment, step `s` of a tile), before scale and offset.
struct Codes4 {
    static constexpr int VECTORS = 1;
    static constexpr bool NARROW = false, SPLIT = false, INTEGERS = true;
    static __device__ __forceinline__ float2 numbers(const uint4 (&codes)[1], int s, int p, const float*) {
        const uint32_t two = word(codes[0], s) >> (4 * p);
        return {bits<float>(and_xor(two, 15, MAGIC_BITS)), bits<float>(and_xor(two >> 16, 15, MAGIC_BITS))};
    }
};
// Code and scale are exact in T, and so is their product in twice its bits.
struct Narrow4 : Codes4 {
    static constexpr bool NARROW = true;
};
// The scale has 11 bits, T has 8. The scale is a sum of two numbers of T, and a code times the second is exact.
struct Split4 : Narrow4 {
    static constexpr bool SPLIT = true;
};
struct Table4 : Codes4 {
    static constexpr bool INTEGERS = false;
    static __device__ __forceinline__ float2 numbers(const uint4 (&codes)[1], int s, int p, const float* table) {
        const uint32_t two = word(codes[0], s) >> (4 * p);
        return {table[two & 15], table[two >> 16 & 15]};
    }
};
struct Codes8 {
    static constexpr int VECTORS = 2;
    static constexpr bool NARROW = false, SPLIT = false, INTEGERS = true;
    static __device__ __forceinline__ uint32_t of(const uint4 (&codes)[2], int s, int p) {
        return word(codes[s / 2], s % 2 * 2 + p / 2);
    }
    static __device__ __forceinline__ float2 numbers(const uint4 (&codes)[2], int s, int p, const float*) {
        const uint32_t four = of(codes, s, p), first = 2 * (p % 2);
        return {bits<float>(__byte_perm(four, MAGIC_BITS, 0x7440 + first)),
                bits<float>(__byte_perm(four, MAGIC_BITS, 0x7441 + first))};
    }
};
struct E4m3 : Codes8 {
    static constexpr bool INTEGERS = false;
    static __device__ __forceinline__ float2 numbers(const uint4 (&codes)[2], int s, int p, const float*) {
        return Pair<__half>::widen(half_pair(KV_E4M3, of(codes, s, p) >> (16 * (p % 2)) & 0xffff));
    }
};
// Not codes: numbers of T.
struct Numbers {
    static constexpr int VECTORS = 4;
};

template <class T>
__device__ __forceinline__ T biased_one();
template <>
__device__ __forceinline__ __half biased_one() { return __ushort_as_half(0x6400); }  // 1024
template <>
__device__ __forceinline__ __nv_bfloat16 biased_one() { return __ushort_as_bfloat16(0x4300); }  // 128

// Loads elements at..at+8 of a row; zeros past its end. PLAIN: it does not end there.
template <bool PLAIN, class T>
__device__ __forceinline__ uint4 load_eight(const T* row, uint32_t at, uint32_t width) {
    if (PLAIN || width % 8 == 0) return PLAIN || at < width ? *reinterpret_cast<const uint4*>(row + at) : uint4{};
    uint4 eight{};
#pragma unroll 1  // rare, so that registers matter more
    for (uint32_t i = at; i < at + 8; i++) {
        const uint32_t last = i < width ? bits<uint16_t>(row[i]) : 0;
        eight.x = eight.x >> 16 | eight.y << 16;
        eight.y = eight.y >> 16 | eight.z << 16;
        eight.z = eight.z >> 16 | eight.w << 16;
        eight.w = eight.w >> 16 | last << 16;
    }
    return eight;
}

// Whether codes need neither minima, nor scales of 32 bits, nor zero points of short groups, nor checks for the end of a row.
template <class Form>
__device__ __forceinline__ bool is_plain(const LinearShape& shape) {
    if constexpr (std::is_same_v<Form, Numbers>) return false;
    const bool has_few_zeros = shape.offset_type == OFFSET_ZERO && SLICE_INPUTS >> shape.group_shift <= 1;
    return shape.k % SLICE_INPUTS == 0 && shape.scale_type != SCALE_F32 && (shape.offset_type == OFFSET_NONE || has_few_zeros);
}

// The codes of a panel, their scales and offsets.
template <class T, class Form, bool PLAIN>
struct Panel {
    using Vectors = uint4[Form::VECTORS];
    using Group = std::conditional_t<Form::NARROW, NarrowGroup, WideGroup>;
    const unsigned char* start;

    __device__ __forceinline__ Panel(const void* weights, uint32_t expert, uint32_t panel, const LinearShape& shape)
        : start(static_cast<const unsigned char*>(weights) +
                (static_cast<int64_t>(expert) * (shape.n / PANEL) + panel) * shape.panel_bytes) {}

    __device__ __forceinline__ void load(Vectors& codes, uint32_t tile, const LinearShape&) const {
#pragma unroll
        for (int v = 0; v < Form::VECTORS; v++) {
            codes[v] = reinterpret_cast<const uint4*>(start)[(tile * Form::VECTORS + v) * 32 + threadIdx.x % 32];
        }
    }
    // Returns the scales of a group, for outputs g and g + 8, if they have 16 bits.
    __device__ __forceinline__ uint32_t load_scales(uint32_t input, const LinearShape& shape) const {
        if (!PLAIN && shape.scale_type == SCALE_F32) return 0;
        return reinterpret_cast<const uint32_t*>(start + shape.scales)[pair_of(input, shape)];
    }
    // The same for a group, given its index.
    __device__ __forceinline__ uint32_t load_pair(uint32_t group, const LinearShape& shape) const {
        return reinterpret_cast<const uint32_t*>(start + shape.scales)[group * (PANEL / 2) + threadIdx.x % 32 / 4];
    }

    // The pair of outputs g and g + 8 in a group's scales and offsets, counted from the first group.
    static __device__ __forceinline__ uint32_t pair_of(uint32_t input, const LinearShape& shape) {
        const uint32_t group = input >> shape.group_shift;
        return (PLAIN ? group : min(group, shape.groups - 1)) * (PANEL / 2) + threadIdx.x % 32 / 4;
    }

    // The group of an input, for outputs g and g + 8 of the panel, which lie side by side, given what load_scales returned.
    __device__ __forceinline__ void load(Group (&groups)[2], uint32_t input, uint32_t halves, const LinearShape& shape) const {
        if constexpr (Form::NARROW) {
            const float2 scales = Pair<std::conditional_t<Form::SPLIT, __half, T>>::widen(halves);
#pragma unroll
            for (int u = 0; u < 2; u++) {
                const float scale = u ? scales.y : scales.x;
                groups[u].scale = Pair<T>::narrow(scale, scale);
                const float rest = scale - Pair<T>::widen(groups[u].scale).x;
                if (Form::SPLIT) groups[u].rest = Pair<T>::narrow(rest, rest);
            }
        } else {
            const float2 scales = !PLAIN && shape.scale_type == SCALE_F32
                                      ? reinterpret_cast<const float2*>(start + shape.scales)[pair_of(input, shape)]
                                  : shape.scale_type == SCALE_F16 ? Pair<__half>::widen(halves)
                                                                  : Pair<__nv_bfloat16>::widen(halves);
            const bool added = !PLAIN && shape.offset_type == OFFSET_MINIMUM;
            const float2 minima = added ? reinterpret_cast<const float2*>(start + shape.offsets)[pair_of(input, shape)] : float2{};
            groups[0].scale = scales.x, groups[0].minimum = minima.x;
            groups[1].scale = scales.y, groups[1].minimum = minima.y;
        }
    }

    // Returns the zero points of the same group, if there are any.
    __device__ __forceinline__ uint32_t load_zeros(uint32_t input, const LinearShape& shape) const {
        if (shape.offset_type != OFFSET_ZERO) return 0;
        return reinterpret_cast<const uint16_t*>(start + shape.offsets)[pair_of(input, shape)];
    }
    static __device__ __forceinline__ void set_zeros(Group (&groups)[2], uint32_t zeros, const LinearShape& shape) {
        if (shape.offset_type != OFFSET_ZERO) return;
        groups[0].less = less_of(shape.zero + (zeros & 255));
        groups[1].less = less_of(shape.zero + (zeros >> 8));
    }

    // What is subtracted from a code with `zero`, as a number with the code as its last bits.
    static __device__ __forceinline__ auto less_of(uint32_t zero) {
        if constexpr (Form::NARROW) {
            const float less = to_float(biased_one<T>()) + static_cast<float>(zero);
            return Pair<T>::narrow(less, less);
        } else {
            return Form::INTEGERS ? bits<float>(MAGIC_BITS + zero) : 0.0f;
        }
    }
    // Sets what is the same for all groups of a matrix without zero points.
    static __device__ __forceinline__ void clear(Group (&groups)[2], const LinearShape& shape) {
        groups[0].less = groups[1].less = less_of(shape.zero);
    }

    // Factor A of step s of a tile.
    static __device__ __forceinline__ void fragment(uint32_t (&a)[4], const Vectors& codes, const Group (&groups)[2], int s,
                                                    const float* table) {
#pragma unroll
        for (int p = 0; p < 4; p++) {
            const auto& group = groups[p % 2];
            if constexpr (Form::NARROW) {
                constexpr uint32_t ONES = std::is_same_v<T, __half> ? 0x64006400 : 0x43004300;  // biased_one, twice
                using Two = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
                const uint32_t biased = and_xor(word(codes[0], s) >> (4 * p), 0x000f000f, ONES);
                const Two code = __hsub2(bits<Two>(biased), bits<Two>(group.less)), scale = bits<Two>(group.scale);
                if constexpr (Form::SPLIT) a[p] = bits<uint32_t>(__hfma2(code, scale, __hmul2(code, bits<Two>(group.rest))));
                else a[p] = bits<uint32_t>(__hmul2(code, scale));
            } else {
                const float2 two = Form::numbers(codes, s, p, table);
                // The difference is exact, so each weight is rounded as product and sum of the format are.
                a[p] = Pair<T>::narrow(__fmaf_rn(group.scale, two.x - group.less, group.minimum),
                                       __fmaf_rn(group.scale, two.y - group.less, group.minimum));
            }
        }
    }
};

// Sixteen rows of weights that are numbers.
template <class T, bool PLAIN>
struct Panel<T, Numbers, PLAIN> {
    using Vectors = uint4[Numbers::VECTORS];
    struct Group {};
    const T* rows[2];

    __device__ __forceinline__ Panel(const void* weights, uint32_t expert, uint32_t panel, const LinearShape& shape) {
        const uint32_t output = panel * PANEL + threadIdx.x % 32 / 4;
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const int64_t row = static_cast<int64_t>(expert) * shape.n + min(output + 8 * i, shape.n - 1);
            rows[i] = static_cast<const T*>(weights) + row * shape.k;
        }
    }

    __device__ __forceinline__ void load(Vectors& vectors, uint32_t tile, const LinearShape& shape) const {
#pragma unroll
        for (uint32_t v = 0; v < Numbers::VECTORS; v++) {
            const uint32_t at = tile * TILE_INPUTS + v / 2 * 32 + threadIdx.x % 4 * 8;
            vectors[v] = load_eight<PLAIN>(rows[v % 2], at, shape.k);
        }
    }
    __device__ __forceinline__ uint32_t load_scales(uint32_t, const LinearShape&) const { return 0; }
    __device__ __forceinline__ void load(Group (&)[2], uint32_t, uint32_t, const LinearShape&) const {}
    __device__ __forceinline__ uint32_t load_zeros(uint32_t, const LinearShape&) const { return 0; }
    static __device__ __forceinline__ void set_zeros(Group (&)[2], uint32_t, const LinearShape&) {}
    static __device__ __forceinline__ void clear(Group (&)[2], const LinearShape&) {}

    static __device__ __forceinline__ void fragment(uint32_t (&a)[4], const Vectors& vectors, const Group (&)[2], int s,
                                                    const float*) {
#pragma unroll
        for (int p = 0; p < 4; p++) a[p] = word(vectors[s / 2 * 2 + p % 2], s % 2 * 2 + p / 2);
    }
};

}  // namespace quire
