// Around a product: round_rows and scale_rows where factors have 8 bits, add_slices where k is cut into slices, order_rows for those of
// wide_linear.cuh.
//
// round_rows_<type>   grid (rows), 256 threads: rows of x become bytes (int8 or e4m3) and a scale each
// scale_rows_<type>   grid of any size, 256 threads: y = sum * scale of the output * scale of the row + bias
// add_slices_<type>   grid of any size, 256 threads: y = sums of the slices, added in order, + bias
// order_rows          grid of any size, 256 threads: rows of x, or those of assignments, in the order in which codes are stored
//
// Rows of x and y are multiples of 16 elements; behind slices, rows of y are multiples of 4. A row's scale is max |x| / 127 (int8) or / 448 (e4m3), or one that is given. A row with a
// NaN or an infinity has the scale NaN, and so has its whole result.

#include <quire/export.cuh>

#include "eight.cuh"
#include "linear_args.cuh"

namespace quire {

constexpr uint32_t ROUND_THREADS = 256, ROUND_WARPS = ROUND_THREADS / 32;
constexpr uint32_t INFINITE = 0x7f800000;

template <class T>
__device__ __forceinline__ void round_rows(const T* x, uint8_t* codes, float* scales, const RoundShape& shape) {
    __shared__ uint32_t of_warps[ROUND_WARPS];
    x += static_cast<int64_t>(blockIdx.x) * shape.k;
    codes += static_cast<int64_t>(blockIdx.x) * shape.k;
    float scale = shape.scale;
    Eight<T> eight;
    float numbers[8];
    if (scale == 0.0f) {
        uint32_t greatest = 0;
        for (uint32_t i = threadIdx.x * 8; i < shape.k; i += ROUND_THREADS * 8) {
            eight.load(x + i);
            eight.get(numbers);
            greatest = max(greatest, greatest_magnitude(numbers));
        }
        greatest = greatest_over(greatest, 32);
        if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = greatest;
        __syncthreads();
#pragma unroll
        for (uint32_t warp = 0; warp < ROUND_WARPS; warp++) greatest = max(greatest, of_warps[warp]);
        scale = greatest < INFINITE ? __fdiv_rn(bits<float>(greatest), shape.format == KV_INT8 ? 127.0f : 448.0f) : NAN;
    }
    // Zeros, and what underflows.
    const float divisor = scale == 0.0f ? INFINITY : scale;
    for (uint32_t i = threadIdx.x * 8; i < shape.k; i += ROUND_THREADS * 8) {
        eight.load(x + i);
        eight.get(numbers);
        *reinterpret_cast<uint2*>(codes + i) = quantise(shape.format, numbers, divisor);
    }
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
}

// Writes y[4 i..4 i + 4], outputs 4 `of_bias`.. of a row: the sums + bias. bias: [n] of y's type, or null.
template <class T>
__device__ __forceinline__ void store_four(float4 sum, const void* bias, void* y, uint32_t i, uint32_t of_bias, bool y_is_float) {
    if (y_is_float) {
        const float4 add = bias ? static_cast<const float4*>(bias)[of_bias] : float4{0.0f, 0.0f, 0.0f, 0.0f};
        static_cast<float4*>(y)[i] = make_float4(sum.x + add.x, sum.y + add.y, sum.z + add.z, sum.w + add.w);
        return;
    }
    const uint2 words = bias ? static_cast<const uint2*>(bias)[of_bias] : uint2{0, 0};
    const float2 low = Pair<T>::widen(words.x), high = Pair<T>::widen(words.y);
    static_cast<uint2*>(y)[i] =
        make_uint2(Pair<T>::narrow(sum.x + low.x, sum.y + low.y), Pair<T>::narrow(sum.z + high.x, sum.w + high.y));
}

// sums: [slices, rows, n].
template <class T>
__device__ __forceinline__ void add_slices(const float4* sums, const void* bias, void* y, const SliceShape& shape) {
    const uint32_t fours = shape.n / 4, all = shape.rows * fours;
    for (uint32_t i = blockIdx.x * ROUND_THREADS + threadIdx.x; i < all; i += gridDim.x * ROUND_THREADS) {
        float4 sum = sums[i];
        for (uint32_t slice = 1; slice < shape.slices; slice++) {
            const float4 more = sums[static_cast<int64_t>(slice) * all + i];
            sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
        }
        store_four<T>(sum, bias, y, i, i % fours, shape.y_is_float);
    }
}

// Four outputs at a time.
template <class T>
__device__ __forceinline__ void scale_rows(const void* sums, const float* row_scales, const float* scales, const void* bias,
                                           void* y, const ScaleShape& shape) {
    const uint32_t fours = shape.n / 4;
    for (uint32_t i = blockIdx.x * ROUND_THREADS + threadIdx.x; i < shape.rows * fours; i += gridDim.x * ROUND_THREADS) {
        const uint32_t row = i / fours, output = i % fours;
        const float row_scale = row_scales[row];
        const float4 of_outputs = reinterpret_cast<const float4*>(scales)[output];
        float4 sum;
        if (shape.format == KV_INT8) {
            const int4 whole = static_cast<const int4*>(sums)[i];
            sum = {__int2float_rn(whole.x), __int2float_rn(whole.y), __int2float_rn(whole.z), __int2float_rn(whole.w)};
        } else {
            sum = static_cast<const float4*>(sums)[i];
        }
        sum = {sum.x * of_outputs.x * row_scale, sum.y * of_outputs.y * row_scale, sum.z * of_outputs.z * row_scale,
               sum.w * of_outputs.w * row_scale};
        store_four<T>(sum, bias, y, i, output, shape.y_is_float);
    }
}

// Brings rows to the order of codes: of the sixteen words of 32 inputs, word 4 c + i becomes word 4 i + c. to: rows of `width` vectors,
// `count` in all, a multiple of four. Row r is row r of x, or row order[r] / top_k. Four lanes transpose their vectors, so that loads and
// stores are whole sectors. All threads of a block take part.
__device__ __forceinline__ void order_rows(const uint4* x, uint4* to, const uint32_t* order, uint32_t count, uint32_t width,
                                           uint32_t top_k) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    for (uint32_t first = blockIdx.x * ROUND_THREADS; first < count; first += gridDim.x * ROUND_THREADS) {
        const uint32_t i = min(first + threadIdx.x, count - 1);
        uint4 v = x[order ? static_cast<uint64_t>(order[i / width] / top_k) * width + i % width : i];
        uint32_t a = __shfl_xor_sync(~0u, odd ? v.x : v.y, 1), b = __shfl_xor_sync(~0u, odd ? v.z : v.w, 1);
        v = odd ? make_uint4(a, v.y, b, v.w) : make_uint4(v.x, a, v.z, b);
        a = __shfl_xor_sync(~0u, upper ? v.x : v.z, 2), b = __shfl_xor_sync(~0u, upper ? v.y : v.w, 2);
        v = upper ? make_uint4(a, b, v.z, v.w) : make_uint4(v.x, v.y, a, b);
        if (first + threadIdx.x < count) to[i] = v;
    }
}

}  // namespace quire

#define ROUNDED(type, T)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(quire::ROUND_THREADS)                                                      \
        round_rows_##type(const void* x, uint8_t* codes, float* scales, const quire::RoundShape shape) {                    \
        quire::wait_for_launches();                                                                                         \
        quire::round_rows<T>(static_cast<const T*>(x), codes, scales, shape);                                               \
    }                                                                                                                       \
    QUIRE_EXPORT_OVERLAPPED(round_rows_##type, 0);                                                                          \
    extern "C" __global__ void __launch_bounds__(quire::ROUND_THREADS)                                                      \
        scale_rows_##type(const void* sums, const float* row_scales, const float* scales, const void* bias, void* y,        \
                          const quire::ScaleShape shape) {                                                                  \
        quire::wait_for_launches();                                                                                         \
        quire::scale_rows<T>(sums, row_scales, scales, bias, y, shape);                                                     \
    }                                                                                                                       \
    QUIRE_EXPORT_OVERLAPPED(scale_rows_##type, 0);                                                                          \
    extern "C" __global__ void __launch_bounds__(quire::ROUND_THREADS)                                                      \
        add_slices_##type(const float* sums, const void* bias, void* y, const quire::SliceShape shape) {                    \
        quire::wait_for_launches();                                                                                         \
        quire::add_slices<T>(reinterpret_cast<const float4*>(sums), bias, y, shape);                                        \
    }                                                                                                                       \
    QUIRE_EXPORT_OVERLAPPED(add_slices_##type, 0);

ROUNDED(f16, __half)
ROUNDED(bf16, __nv_bfloat16)

extern "C" __global__ void __launch_bounds__(quire::ROUND_THREADS)
    order_rows(const uint4* x, uint4* to, const uint32_t* order, uint32_t count, uint32_t width, uint32_t top_k) {
    quire::wait_for_launches();
    quire::order_rows(x, to, order, count, width, top_k);
}
QUIRE_EXPORT_OVERLAPPED(order_rows, 0);
