// linear: y = x Wᵀ + bias by tensor cores, with weights that are numbers or codes. Codes become numbers in registers.
//
// linear_<form>_<type>_few    grid (ceil(n / 16), parts), 256 threads: 16 outputs of up to 8 rows
// linear_<form>_<type>_many   grid (ceil(n / 64), parts), 256 threads: 64 outputs of up to 32 rows
// linear_f32                  grid (ceil(n / 8), max(experts, 1)), 256 threads: a warp per output, eight rows at a time
// unpack_<form>_<type>        grid (ceil(n / 16), any), 256 threads: weights become numbers, a warp for 16 outputs x 64 inputs
//
// A part is consecutive rows, or, with experts, consecutive assignments of one expert: those of expert e are
// order[starts[e]..starts[e + 1]]. A block finds its part from `starts`, so the grid depends on shapes alone. Assignment a is row
// a / top_k of x and row a of y.
//
// Weights are factor A of mma.m16n8k16 (16 outputs x 16 inputs), rows of x factor B (16 inputs x 8 rows). Within 32 inputs, lane
// 4 g + c holds inputs 8 c..8 c + 8 of a row: 16 bytes of x, and codes in the same order (linear/src/tiles.rs). So two
// products take inputs in an order of their own, the same for both factors.
//
// Order of a sum: warp w adds inputs 128 i..128 (i + 1) for i = w, w + 8, ... in order; then the sums of the eight warps are added
// in order, then the bias. It depends on k alone, so a row's bits depend neither on other rows nor on the kernel that serves them.
// A weight is rounded to T once, from the float32 number that its format defines, as if it had been unpacked before.

#include <quire/export.cuh>
#include <quire/ptx.cuh>

#include "eight.cuh"
#include "linear_args.cuh"

namespace quire {

constexpr uint32_t LINEAR_WARPS = 8, LINEAR_THREADS = 32 * LINEAR_WARPS;
constexpr uint32_t PANEL = 16;
// Inputs of a tile of codes, and those that a warp adds before the next warp's.
constexpr uint32_t TILE_INPUTS = 64, SLICE_INPUTS = 128;
// A float from here on has integers as its last bits.
constexpr float MAGIC = 1 << 23;
constexpr uint32_t MAGIC_BITS = 0x4b000000;

// What codes of a group become numbers with, for an output.
struct WideGroup {
    float scale;
    float less;     // subtracted from 2^23 + code
    float minimum;  // added to the product
};
struct NarrowGroup {
    uint32_t scale;  // twice, of type T
    uint32_t less;   // twice, of type T: subtracted from the number that has the code as its last bits
};

// The number of a code before scale and offset, and the pair of codes `p` (a register of the fragment) of step `s` of a tile.
struct Codes4 {
    static constexpr int VECTORS = 1;
    static constexpr bool NARROW = false, INTEGERS = true;
    static __device__ __forceinline__ uint2 pair(const uint4 (&codes)[1], int s, int p) {
        const uint32_t two = word(codes[0], s) >> (4 * p);
        return {two & 15, two >> 16 & 15};
    }
    static __device__ __forceinline__ float2 numbers(uint2 two, const float*) {
        return {bits<float>(MAGIC_BITS | two.x), bits<float>(MAGIC_BITS | two.y)};
    }
};
struct Narrow4 : Codes4 {
    static constexpr bool NARROW = true;
};
struct Table4 : Codes4 {
    static constexpr bool INTEGERS = false;
    static __device__ __forceinline__ float2 numbers(uint2 two, const float* table) { return {table[two.x], table[two.y]}; }
};
struct Codes8 {
    static constexpr int VECTORS = 2;
    static constexpr bool NARROW = false, INTEGERS = true;
    static __device__ __forceinline__ uint2 pair(const uint4 (&codes)[2], int s, int p) {
        const uint32_t two = word(codes[s / 2], s % 2 * 2 + p / 2) >> (16 * (p % 2));
        return {two & 255, two >> 8 & 255};
    }
    static __device__ __forceinline__ float2 numbers(uint2 two, const float*) { return Codes4::numbers(two, nullptr); }
};
struct E4m3 : Codes8 {
    static constexpr bool INTEGERS = false;
    static __device__ __forceinline__ float2 numbers(uint2 two, const float*) {
        return Pair<__half>::widen(half_pair(KV_E4M3, two.x | two.y << 8));
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

// Loads elements at..at+8 of a row; zeros past its end. `whole`: rows are multiples of eight elements.
template <class T>
__device__ __forceinline__ uint4 load_eight(const T* row, uint32_t at, uint32_t width, bool whole) {
    if (whole) return at < width ? *reinterpret_cast<const uint4*>(row + at) : uint4{};
    uint32_t words[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t low = at + 2 * i < width ? bits<uint16_t>(row[at + 2 * i]) : 0;
        const uint32_t high = at + 2 * i + 1 < width ? bits<uint16_t>(row[at + 2 * i + 1]) : 0;
        words[i] = high << 16 | low;
    }
    return {words[0], words[1], words[2], words[3]};
}

// The codes of a panel, their scales and offsets.
template <class T, class Form>
struct Panel {
    using Vectors = uint4[Form::VECTORS];
    using Group = std::conditional_t<Form::NARROW, NarrowGroup, WideGroup>;
    const unsigned char* start;

    __device__ __forceinline__ Panel(const void* weights, uint32_t expert, uint32_t panel, const LinearShape& shape)
        : start(static_cast<const unsigned char*>(weights) +
                (static_cast<int64_t>(expert) * (shape.n / PANEL) + panel) * shape.panel_bytes) {}

    __device__ __forceinline__ void load(Vectors& codes, uint32_t tile, uint32_t tiles, const LinearShape&) const {
#pragma unroll
        for (int v = 0; v < Form::VECTORS; v++) {
            const uint32_t at = (tile * Form::VECTORS + v) * 32 + threadIdx.x % 32;
            codes[v] = tile < tiles ? reinterpret_cast<const uint4*>(start)[at] : uint4{};
        }
    }

    // The group of an input, for outputs g and g + 8 of the panel, which lie side by side.
    __device__ __forceinline__ void load(Group (&groups)[2], uint32_t input, const LinearShape& shape) const {
        const uint32_t group = min(input >> shape.group_shift, shape.groups - 1);
        const uint32_t at = group * (PANEL / 2) + threadIdx.x % 32 / 4;
        const unsigned char *scales = start + shape.scales, *offsets = start + shape.offsets;
        const uint32_t zeros = shape.offset_type == OFFSET_ZERO ? reinterpret_cast<const uint16_t*>(offsets)[at] : 0;
        const float less[2] = {static_cast<float>(shape.zero + (zeros & 255)), static_cast<float>(shape.zero + (zeros >> 8))};
        if constexpr (Form::NARROW) {
            const uint32_t two = reinterpret_cast<const uint32_t*>(scales)[at];
            const float one = to_float(biased_one<T>());
            groups[0] = {(two & 0xffff) * 0x10001u, Pair<T>::narrow(one + less[0], one + less[0])};
            groups[1] = {(two >> 16) * 0x10001u, Pair<T>::narrow(one + less[1], one + less[1])};
        } else {
            const float2 two = shape.scale_type == SCALE_F32 ? reinterpret_cast<const float2*>(scales)[at]
                               : shape.scale_type == SCALE_F16
                                   ? Pair<__half>::widen(reinterpret_cast<const uint32_t*>(scales)[at])
                                   : Pair<__nv_bfloat16>::widen(reinterpret_cast<const uint32_t*>(scales)[at]);
            const bool added = shape.offset_type == OFFSET_MINIMUM;
            const float2 minima = added ? reinterpret_cast<const float2*>(offsets)[at] : float2{0.0f, 0.0f};
            groups[0] = {two.x, Form::INTEGERS ? MAGIC + less[0] : 0.0f, minima.x};
            groups[1] = {two.y, Form::INTEGERS ? MAGIC + less[1] : 0.0f, minima.y};
        }
    }

    // Factor A of step s of a tile.
    static __device__ __forceinline__ void fragment(uint32_t (&a)[4], const Vectors& codes, const Group (&groups)[2], int s,
                                                    const float* table) {
#pragma unroll
        for (int p = 0; p < 4; p++) {
            const auto& group = groups[p % 2];
            if constexpr (Form::NARROW) {
                const uint32_t biased = (word(codes[0], s) >> (4 * p) & 0x000f000f) | bits<uint16_t>(biased_one<T>()) * 0x10001u;
                using Two = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
                a[p] = bits<uint32_t>(__hmul2(bits<Two>(group.scale), __hsub2(bits<Two>(biased), bits<Two>(group.less))));
            } else {
                const float2 two = Form::numbers(Form::pair(codes, s, p), table);
                // The difference is exact, so each weight is rounded as product and sum of the format are.
                a[p] = Pair<T>::narrow(__fmaf_rn(group.scale, two.x - group.less, group.minimum),
                                       __fmaf_rn(group.scale, two.y - group.less, group.minimum));
            }
        }
    }
};

// Sixteen rows of weights that are numbers.
template <class T>
struct Panel<T, Numbers> {
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

    __device__ __forceinline__ void load(Vectors& vectors, uint32_t tile, uint32_t, const LinearShape& shape) const {
#pragma unroll
        for (uint32_t v = 0; v < Numbers::VECTORS; v++) {
            const uint32_t at = tile * TILE_INPUTS + v / 2 * 32 + threadIdx.x % 4 * 8;
            vectors[v] = load_eight(rows[v % 2], at, shape.k, shape.k % 8 == 0);
        }
    }

    __device__ __forceinline__ void load(Group (&)[2], uint32_t, const LinearShape&) const {}

    static __device__ __forceinline__ void fragment(uint32_t (&a)[4], const Vectors& vectors, const Group (&)[2], int s,
                                                    const float*) {
#pragma unroll
        for (int p = 0; p < 4; p++) a[p] = word(vectors[s / 2 * 2 + p % 2], s % 2 * 2 + p / 2);
    }
};

// Rows, or assignments of an expert, that a block multiplies.
struct LinearPart {
    uint32_t expert;
    uint32_t first;
    uint32_t count;  // 0: there is no such part
};

// All lanes of a warp must call it.
__device__ __forceinline__ LinearPart find_part(const uint32_t* starts, uint32_t most, const LinearShape& shape) {
    const uint32_t lane = threadIdx.x % 32, index = blockIdx.y;
    if (shape.experts == 0) return {0, index * most, min(most, shape.rows - index * most)};
    uint32_t before = 0;
    for (uint32_t block = 0; block < shape.experts; block += 32) {
        const uint32_t expert = min(block + lane, shape.experts - 1);
        const uint32_t begin = starts[expert], end = block + lane < shape.experts ? starts[expert + 1] : begin;
        const uint32_t parts = (end - begin + most - 1) / most;
        uint32_t sum = parts;
#pragma unroll
        for (uint32_t step = 1; step < 32; step *= 2) {
            const uint32_t other = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += other;
        }
        const uint32_t found = __ballot_sync(~0u, before + sum > index);
        if (found != 0) {
            const int holder = __ffs(static_cast<int>(found)) - 1;
            const uint32_t at = begin + (index - (before + sum - parts)) * most;
            const uint32_t first = __shfl_sync(~0u, at, holder), last = __shfl_sync(~0u, end, holder);
            return {block + holder, first, min(most, last - first)};
        }
        before += __shfl_sync(~0u, sum, 31);
    }
    return {0, 0, 0};
}

template <int PANELS, int COLUMNS>
constexpr uint32_t linear_shared_bytes() {
    // A row of sums is padded, so that lanes which write to it at once use different banks.
    return LINEAR_WARPS * 8 * COLUMNS * (PANEL * PANELS + 4) * 4;
}

// table: 16 numbers that codes are indices of, or null; bias: [experts, n] of y's type, or null; all: shared memory for the sums of
// all warps.
template <class T, class Form, int PANELS, int COLUMNS>
__device__ __forceinline__ void linear(const T* x, const void* weights, const float* table, const void* bias, void* y,
                                       const uint32_t* order, const uint32_t* starts, const LinearShape& shape, float* all) {
    using Weights = Panel<T, Form>;
    constexpr uint32_t ROWS = 8 * COLUMNS, OUTPUTS = PANEL * PANELS, STRIDE = OUTPUTS + 4;
    // Tiles of codes that are loaded before the first is used, so that a lane has several loads in flight.
    constexpr int AHEAD = PANELS * Form::VECTORS <= 4 ? 2 : 1;
    const LinearPart part = find_part(starts, ROWS, shape);
    if (part.count == 0) return;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, in_row = lane % 4 * 8;
    const bool whole = shape.k % 8 == 0;
    const uint32_t tiles = (shape.k + TILE_INPUTS - 1) / TILE_INPUTS, panels = (shape.n + PANEL - 1) / PANEL;

    // Numbers of rows take half of the registers of their addresses.
    constexpr uint32_t NONE = ~0u;
    uint32_t rows[COLUMNS];
#pragma unroll
    for (uint32_t j = 0; j < COLUMNS; j++) {
        const uint32_t row = j * 8 + lane / 4;
        rows[j] = row >= part.count ? NONE : shape.experts ? order[part.first + row] / shape.top_k : part.first + row;
    }
    float sums[PANELS][COLUMNS][4] = {};
    for (uint32_t tile = 2 * warp; tile < tiles; tile += 2 * LINEAR_WARPS) {
        typename Weights::Group groups[PANELS][2];
#pragma unroll
        for (int first = 0; first < 2; first += AHEAD) {
            typename Weights::Vectors codes[AHEAD][PANELS];
#pragma unroll
            for (int t = 0; t < AHEAD; t++) {
#pragma unroll
                for (uint32_t m = 0; m < PANELS; m++) {
                    const uint32_t panel = min(blockIdx.x * PANELS + m, panels - 1);
                    Weights(weights, part.expert, panel, shape).load(codes[t][m], tile + first + t, tiles, shape);
                }
            }
#pragma unroll
            for (int t = 0; t < AHEAD; t++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const uint32_t input = (tile + first + t) * TILE_INPUTS + half * 32 + in_row;
                    uint4 pieces[COLUMNS];
#pragma unroll
                    for (uint32_t j = 0; j < COLUMNS; j++) {
                        const int64_t first = static_cast<int64_t>(rows[j]) * shape.k;
                        pieces[j] = rows[j] != NONE ? load_eight(x + first, input, shape.k, whole) : uint4{};
                    }
#pragma unroll
                    for (uint32_t m = 0; m < PANELS; m++) {
                        if (first + t + half == 0 || (SLICE_INPUTS >> shape.group_shift) > 1) {
                            const uint32_t panel = min(blockIdx.x * PANELS + m, panels - 1);
                            Weights(weights, part.expert, panel, shape).load(groups[m], input, shape);
                        }
#pragma unroll
                        for (int s = 0; s < 2; s++) {
                            uint32_t a[4];
                            Weights::fragment(a, codes[t][m], groups[m], 2 * half + s, table);
#pragma unroll
                            for (uint32_t j = 0; j < COLUMNS; j++) {
                                if (j * 8 >= part.count) break;
                                const uint32_t b[2] = {word(pieces[j], 2 * s), word(pieces[j], 2 * s + 1)};
                                mma_m16n8k16<T>(sums[m][j], a, b);
                            }
                        }
                    }
                }
            }
        }
    }

#pragma unroll
    for (uint32_t m = 0; m < PANELS; m++) {
#pragma unroll
        for (uint32_t j = 0; j < COLUMNS; j++) {
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                const uint32_t row = j * 8 + lane % 4 * 2 + i % 2, output = m * PANEL + lane / 4 + i / 2 * 8;
                all[(warp * ROWS + row) * STRIDE + output] = sums[m][j][i];
            }
        }
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < part.count * OUTPUTS; i += LINEAR_THREADS) {
        const uint32_t row = i / OUTPUTS, in_block = i % OUTPUTS, output = blockIdx.x * OUTPUTS + in_block;
        if (output >= shape.n) continue;
        float sum = 0.0f;
#pragma unroll
        for (uint32_t w = 0; w < LINEAR_WARPS; w++) sum += all[(w * ROWS + row) * STRIDE + in_block];
        const int64_t of_bias = static_cast<int64_t>(part.expert) * shape.n + output;
        const uint32_t of_y = shape.experts ? order[part.first + row] : part.first + row;
        const int64_t to = static_cast<int64_t>(of_y) * shape.y_stride + output;
        if (shape.y_is_float) {
            static_cast<float*>(y)[to] = sum + (bias ? static_cast<const float*>(bias)[of_bias] : 0.0f);
        } else {
            static_cast<T*>(y)[to] = from_float<T>(sum + (bias ? to_float(static_cast<const T*>(bias)[of_bias]) : 0.0f));
        }
    }
}

// Writes the weights of a panel as rows of numbers [n, k], for a product with many rows. k is a multiple of 8. Each number is the factor
// that `linear` multiplies.
template <class T, class Form>
__device__ __forceinline__ void unpack(const void* weights, const float* table, T* numbers, const LinearShape& shape) {
    using Weights = Panel<T, Form>;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, tiles = (shape.k + TILE_INPUTS - 1) / TILE_INPUTS;
    const Weights panel(weights, 0, blockIdx.x, shape);
    for (uint32_t tile = blockIdx.y * LINEAR_WARPS + warp; tile < tiles; tile += gridDim.y * LINEAR_WARPS) {
        typename Weights::Vectors codes;
        typename Weights::Group groups[2];
        panel.load(codes, tile, tiles, shape);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t input = tile * TILE_INPUTS + half * 32 + lane % 4 * 8;
            if (input >= shape.k) break;
            panel.load(groups, input, shape);
            uint32_t a[2][4];
#pragma unroll
            for (int s = 0; s < 2; s++) Weights::fragment(a[s], codes, groups, 2 * half + s, table);
#pragma unroll
            for (uint32_t u = 0; u < 2; u++) {
                const uint32_t output = blockIdx.x * PANEL + 8 * u + lane / 4;
                if (output >= shape.n) break;
                const uint4 eight = make_uint4(a[0][u], a[0][u + 2], a[1][u], a[1][u + 2]);
                *reinterpret_cast<uint4*>(numbers + static_cast<int64_t>(output) * shape.k + input) = eight;
            }
        }
    }
}

// The same for float32, whose weights are numbers, without tensor cores: eight rows or assignments at a time.
__device__ __forceinline__ void linear(const float* x, const float* weights, const float* bias, float* y, const uint32_t* order,
                                       const uint32_t* starts, const LinearShape& shape) {
    constexpr uint32_t ROWS = 8;
    const uint32_t expert = blockIdx.y, lane = threadIdx.x % 32, output = blockIdx.x * LINEAR_WARPS + threadIdx.x / 32;
    const uint32_t begin = starts ? starts[expert] : 0, end = starts ? starts[expert + 1] : shape.rows;
    if (begin == end || output >= shape.n) return;
    const int64_t of_bias = static_cast<int64_t>(expert) * shape.n + output;
    for (uint32_t first = begin; first < end; first += ROWS) {
        const uint32_t count = min(ROWS, end - first);
        float sums[ROWS] = {};
        for (uint32_t at = lane; at < shape.k; at += 32) {
            const float weight = weights[of_bias * shape.k + at];
#pragma unroll
            for (uint32_t r = 0; r < ROWS; r++) {
                if (r >= count) break;
                const uint32_t row = order ? order[first + r] / shape.top_k : first + r;
                sums[r] += weight * x[static_cast<int64_t>(row) * shape.k + at];
            }
        }
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++) {
            for (uint32_t step = 16; step > 0; step /= 2) sums[r] += __shfl_xor_sync(~0u, sums[r], step);
            if (lane == 0 && r < count) {
                const uint32_t row = order ? order[first + r] : first + r;
                y[static_cast<int64_t>(row) * shape.y_stride + output] = sums[r] + (bias ? bias[of_bias] : 0.0f);
            }
        }
    }
}

}  // namespace quire

#define LINEAR_INSTANCE(form, Form, type, T, size, PANELS, COLUMNS)                                                         \
    extern "C" __global__ void __launch_bounds__(quire::LINEAR_THREADS, (PANELS) == 1 ? 2 : 1)                              \
        linear_##form##_##type##_##size(const void* x, const void* weights, const float* table, const void* bias, void* y,  \
                                        const uint32_t* order, const uint32_t* starts, const quire::LinearShape shape) {    \
        quire::wait_for_launches();                                                                                         \
        extern __shared__ __align__(16) unsigned char smem[];                                                               \
        quire::linear<T, quire::Form, PANELS, COLUMNS>(static_cast<const T*>(x), weights, table, bias, y, order, starts,    \
                                                       shape, reinterpret_cast<float*>(smem));                              \
    }                                                                                                                       \
    QUIRE_EXPORT_OVERLAPPED(linear_##form##_##type##_##size, (quire::linear_shared_bytes<PANELS, COLUMNS>()));
#define LINEAR_SIZES(form, Form, type, T)                  \
    LINEAR_INSTANCE(form, Form, type, T, few, 1, 1)        \
    LINEAR_INSTANCE(form, Form, type, T, many, 4, 4)
#define LINEAR_CODES(form, Form, type, T)                                                                                   \
    LINEAR_SIZES(form, Form, type, T)                                                                                       \
    extern "C" __global__ void __launch_bounds__(quire::LINEAR_THREADS, 1)                                                  \
        unpack_##form##_##type(const void* weights, const float* table, void* numbers, const quire::LinearShape shape) {    \
        quire::wait_for_launches();                                                                                         \
        quire::unpack<T, quire::Form>(weights, table, static_cast<T*>(numbers), shape);                                     \
    }                                                                                                                       \
    QUIRE_EXPORT_OVERLAPPED(unpack_##form##_##type, 0);
#define LINEAR_FORMS(type, T)                  \
    LINEAR_SIZES(numbers, Numbers, type, T)    \
    LINEAR_CODES(narrow4, Narrow4, type, T)    \
    LINEAR_CODES(codes4, Codes4, type, T)      \
    LINEAR_CODES(table4, Table4, type, T)      \
    LINEAR_CODES(codes8, Codes8, type, T)      \
    LINEAR_CODES(e4m3, E4m3, type, T)

#ifdef QUIRE_F16
LINEAR_FORMS(f16, __half)
#endif
#ifdef QUIRE_BF16
LINEAR_FORMS(bf16, __nv_bfloat16)
#endif
#ifdef QUIRE_F32
extern "C" __global__ void __launch_bounds__(quire::LINEAR_THREADS, 1)
    linear_f32(const float* x, const float* weights, const float* bias, float* y, const uint32_t* order, const uint32_t* starts,
               const quire::LinearShape shape) {
    quire::wait_for_launches();
    quire::linear(x, weights, bias, y, order, starts, shape);
}
QUIRE_EXPORT_OVERLAPPED(linear_f32, 0);
#endif
