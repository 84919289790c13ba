// Operations on several residual streams (Baykal et al., "Alternating Updates for Efficient Transformers", 2023): the first in rows
// of its own, the others side by side; and sparse gates.
//
// rescale_streams_<type>   grid (rows, others), 256 threads
// mix_streams_<type>, correct_streams_<type>, add_to_streams_<type>, mean_of_streams_<type>   grid (rows, ceil(width / 256)), 256 threads
// sparsify_<type>          grid (rows), 256 threads

#include <quire/export.cuh>
#include <math.h>

#include "vectors.cuh"

namespace quire {

constexpr uint32_t STREAM_THREADS = 256;
constexpr uint32_t STREAM_WARPS = STREAM_THREADS / 32;
constexpr uint32_t MAX_STREAMS = 8;

struct StreamShape {
    uint32_t width;  // elements of a row of a stream
    uint32_t count;  // streams but the first
};

template <class T>
__device__ __forceinline__ float mean_square(const T* x, uint32_t width) {
    float squares = 0.0f, piece[8];
    for (uint32_t at = threadIdx.x * 8; at < width; at += STREAM_THREADS * 8) {
        load_piece(x, at, width, width % 8 == 0, piece);
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) squares += piece[i] * piece[i];
    }
    const float sum = sum_of_block<STREAM_WARPS>(squares);
    // The sums have been read before the next ones overwrite them.
    __syncthreads();
    return sum / static_cast<float>(width);
}

// Scales a row of another stream to the root mean square of that of the first.
template <class T>
__device__ __forceinline__ void rescale(const T* stream, T* others, const StreamShape& shape) {
    const uint32_t width = shape.width;
    const int64_t row = blockIdx.x;
    T* const other = others + (row * shape.count + blockIdx.y) * width;
    const float target = sqrtf(mean_square(stream + row * width, width));
    const float factor = target / sqrtf(fmaxf(mean_square(other, width), 1e-5f));
    float piece[8];
    for (uint32_t at = threadIdx.x * 8; at < width; at += STREAM_THREADS * 8) {
        load_piece(other, at, width, width % 8 == 0, piece);
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) piece[i] *= factor;
        store_piece(other, at, width, width % 8 == 0, piece);
    }
}

// The product of one row of weights and the hyperbolic tangents of the scores of a row of streams.
template <class T>
__device__ __forceinline__ float product_of_scores(const float* weights, const T* scores, uint32_t streams) {
    float sum = 0.0f;
    for (uint32_t i = 0; i < streams; i++) sum += weights[i] * tanhf(to_float(scores[i]));
    return sum;
}

// weights: [streams * streams, streams]; scores: [rows, streams]. The mixed first stream is written to `mixture` too.
template <class T>
__device__ __forceinline__ void mix(T* stream, T* others, T* mixture, const T* scores, const float* weights,
                                    const StreamShape& shape) {
    __shared__ float factors[MAX_STREAMS * MAX_STREAMS];
    const uint32_t streams = shape.count + 1, width = shape.width;
    const int64_t row = blockIdx.x;
    if (threadIdx.x < streams * streams) {
        factors[threadIdx.x] = product_of_scores(weights + threadIdx.x * streams, scores + row * streams, streams);
    }
    __syncthreads();
    const uint32_t at = blockIdx.y * STREAM_THREADS + threadIdx.x;
    if (at >= width) return;
    T* const first = stream + row * width + at;
    T* const other = others + row * shape.count * width + at;
    float x[MAX_STREAMS];
    x[0] = to_float(*first);
#pragma unroll
    for (uint32_t i = 1; i < MAX_STREAMS; i++) x[i] = i < streams ? to_float(other[(i - 1) * width]) : 0.0f;
#pragma unroll
    for (uint32_t j = 0; j < MAX_STREAMS; j++) {
        if (j < streams) {
            float sum = x[j];
#pragma unroll
            for (uint32_t i = 0; i < MAX_STREAMS; i++) {
                if (i < streams) sum += factors[j * streams + i] * x[i];
            }
            const T mixed = from_float<T>(sum);
            if (j > 0) {
                other[(j - 1) * width] = mixed;
            } else {
                *first = mixed;
                mixture[row * width + at] = mixed;
            }
        }
    }
}

// weights: [streams, streams]; scale: [width]; branch: [rows, width], the corrected first stream times the scale.
template <class T>
__device__ __forceinline__ void correct(T* stream, T* others, const T* mixture, T* branch, const T* scores, const float* weights,
                                        const float* scale, const StreamShape& shape) {
    __shared__ float gains[MAX_STREAMS];
    const uint32_t streams = shape.count + 1, width = shape.width;
    const int64_t row = blockIdx.x;
    if (threadIdx.x < streams) {
        gains[threadIdx.x] = 1.0f + product_of_scores(weights + threadIdx.x * streams, scores + row * streams, streams);
    }
    __syncthreads();
    const uint32_t at = blockIdx.y * STREAM_THREADS + threadIdx.x;
    if (at >= width) return;
    const int64_t own = row * width + at;
    T* const other = others + row * shape.count * width + at;
    const float before = to_float(mixture[own]), change = to_float(stream[own]) - before;
    const T corrected = from_float<T>(before + gains[0] * change);
    stream[own] = corrected;
    branch[own] = from_float<T>(to_float(corrected) * scale[at]);
    for (uint32_t j = 1; j < streams; j++) {
        T* const x = other + (j - 1) * width;
        *x = from_float<T>(to_float(*x) + gains[j] * change);
    }
}

// MEAN: the first stream becomes the mean of all. Otherwise it is added to the others.
template <class T, bool MEAN>
__device__ __forceinline__ void join(T* first, T* others, const StreamShape& shape) {
    const uint32_t at = blockIdx.y * STREAM_THREADS + threadIdx.x, width = shape.width;
    if (at >= width) return;
    const int64_t row = blockIdx.x;
    T* const other = others + row * shape.count * width + at;
    float sum = to_float(first[row * width + at]);
    for (uint32_t j = 0; j < shape.count; j++) {
        if constexpr (MEAN) sum += to_float(other[j * width]);
        else other[j * width] = from_float<T>(to_float(other[j * width]) + sum);
    }
    if constexpr (MEAN) first[row * width + at] = from_float<T>(sum / static_cast<float>(shape.count + 1));
}

// x: [rows, 2 * width], of which the first half are gates.
template <class T>
__device__ __forceinline__ void sparsify(T* x, uint32_t width, float deviations) {
    const bool whole = width % 8 == 0;
    x += static_cast<int64_t>(blockIdx.x) * 2 * width;
    float sum = 0.0f, squares = 0.0f, piece[8];
    for (uint32_t at = threadIdx.x * 8; at < width; at += STREAM_THREADS * 8) {
        load_piece(x, at, width, whole, piece);
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) sum += piece[i];
    }
    const float mean = sum_of_block<STREAM_WARPS>(sum) / static_cast<float>(width);
    for (uint32_t at = threadIdx.x * 8; at < width; at += STREAM_THREADS * 8) {
        load_piece(x, at, width, whole, piece);
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) {
            const float difference = at + i < width ? piece[i] - mean : 0.0f;
            squares += difference * difference;
        }
    }
    // The sums of the mean have been read before they are overwritten.
    __syncthreads();
    const float deviation = sqrtf(sum_of_block<STREAM_WARPS>(squares) / static_cast<float>(width));
    const float least = mean + deviations * deviation;
    for (uint32_t at = threadIdx.x * 8; at < width; at += STREAM_THREADS * 8) {
        load_piece(x, at, width, whole, piece);
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) piece[i] = fmaxf(piece[i] - least, 0.0f);
        store_piece(x, at, width, whole, piece);
    }
}

}  // namespace quire

#define STREAM_ENTRY(name, parameters, call)                                                            \
    extern "C" __global__ void __launch_bounds__(quire::STREAM_THREADS) name parameters {               \
        quire::wait_for_launches();                                                                     \
        call;                                                                                           \
    }                                                                                                   \
    QUIRE_EXPORT_OVERLAPPED(name, 0);

#define STREAMS(type, T)                                                                                                      \
    STREAM_ENTRY(rescale_streams_##type, (const void* stream, void* others, const quire::StreamShape shape),                  \
                 quire::rescale<T>(static_cast<const T*>(stream), static_cast<T*>(others), shape))                            \
    STREAM_ENTRY(mix_streams_##type,                                                                                          \
                 (void* stream, void* others, void* mixture, const void* scores, const float* weights,                        \
                  const quire::StreamShape shape),                                                                            \
                 quire::mix<T>(static_cast<T*>(stream), static_cast<T*>(others), static_cast<T*>(mixture),                    \
                               static_cast<const T*>(scores), weights, shape))                                                \
    STREAM_ENTRY(correct_streams_##type,                                                                                      \
                 (void* stream, void* others, const void* mixture, void* branch, const void* scores, const float* weights,    \
                  const float* scale, const quire::StreamShape shape),                                                        \
                 quire::correct<T>(static_cast<T*>(stream), static_cast<T*>(others), static_cast<const T*>(mixture),          \
                                   static_cast<T*>(branch), static_cast<const T*>(scores), weights, scale, shape))            \
    STREAM_ENTRY(add_to_streams_##type, (void* branch, void* others, const quire::StreamShape shape),                         \
                 (quire::join<T, false>(static_cast<T*>(branch), static_cast<T*>(others), shape)))                            \
    STREAM_ENTRY(mean_of_streams_##type, (void* stream, void* others, const quire::StreamShape shape),                        \
                 (quire::join<T, true>(static_cast<T*>(stream), static_cast<T*>(others), shape)))                             \
    STREAM_ENTRY(sparsify_##type, (void* x, const uint32_t width, const float deviations),                                    \
                 quire::sparsify<T>(static_cast<T*>(x), width, deviations))

STREAMS(f16, __half)
STREAMS(bf16, __nv_bfloat16)
STREAMS(f32, float)
