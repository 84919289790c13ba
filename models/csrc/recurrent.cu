// The recurrence of gated delta nets (Yang et al., 2024): all tokens of a sequence, one after the other, in one thread block for
// each value head. Each result depends on its sequence alone.
//
// gated_delta_net_<type>   grid (sequences, value heads), value_dim * key_dim / 32 threads
//
// Thread t holds rows 32 p to 32 p + 31 of column j of the head's matrix S, with j = t % value_dim and p = t / value_dim. The state
// of a head in a page is float32: the last kernel - 1 inputs of the convolution, the oldest first, then S by rows.
//
// The last rows of a sequence can be drafts. They go on from the state in shared memory and registers, and no page is written.

#include <quire/export.cuh>
#include <math.h>

#include "vectors.cuh"

namespace quire {

constexpr uint32_t STATE_ROWS = 32;
constexpr uint32_t MAX_DIM = 128;
constexpr uint32_t MAX_CHANNELS = 3 * MAX_DIM;
constexpr uint32_t MAX_TAIL = 7;
constexpr uint32_t STATE_THREADS = MAX_DIM * MAX_DIM / STATE_ROWS;

struct DeltaShape {
    uint32_t key_heads;
    uint32_t value_heads;
    uint32_t key_dim;
    uint32_t value_dim;
    uint32_t kernel;         // tokens that the convolution reads
    uint32_t stride;         // elements between rows of projections
    uint32_t block_size;
    uint32_t max_blocks;     // entries of a block table
    uint32_t page;           // floats between pages
    uint32_t heads_in_keys;  // heads whose states lie in the keys of a page
    float eps;               // of the norm
};

// projected: [rows, stride], a row is q, k, v, z, b, a; output: [rows, value_heads * value_dim]; conv: [kernel, channels];
// decay, dt_bias: [value_heads]; norm: [value_dim].
template <class T>
__device__ __forceinline__ void gated_delta_net(const T* projected, T* output, const float* conv, const float* decays,
                                                const float* dt_bias, const float* norm, float* keys, float* values,
                                                const int32_t* tables, const uint32_t* context_lens,
                                                const uint32_t* query_starts, const uint32_t* drafts,
                                                const DeltaShape& shape) {
    __shared__ float tail[MAX_TAIL * MAX_CHANNELS];
    __shared__ float qkv[MAX_CHANNELS];
    __shared__ float sums[STATE_THREADS], outs[STATE_THREADS];
    const uint32_t seq = blockIdx.x, head = blockIdx.y, lane = threadIdx.x % 32;
    const uint32_t key_dim = shape.key_dim, value_dim = shape.value_dim, parts = key_dim / STATE_ROWS;
    const uint32_t column = threadIdx.x % value_dim, part = threadIdx.x / value_dim;
    const uint32_t context = context_lens[seq], first_row = query_starts[seq], rows = query_starts[seq + 1] - first_row;
    const uint32_t all_values = shape.value_heads * value_dim;
    if (context == 0) {
        for (uint32_t row = first_row; row < first_row + rows; row++) {
            if (part == 0) output[static_cast<int64_t>(row) * all_values + head * value_dim + column] = from_float<T>(0.0f);
        }
        return;
    }
    // Rows up to this position are no drafts.
    const uint32_t certain = context - drafts[seq];
    const uint32_t start = context - rows, tail_rows = shape.kernel - 1, channels = 2 * key_dim + value_dim;
    const uint32_t all_keys = shape.key_heads * key_dim, width = 2 * all_keys + all_values;
    const uint32_t key_head = head / (shape.value_heads / shape.key_heads);
    const uint32_t size = tail_rows * channels + key_dim * value_dim;
    const bool in_keys = head < shape.heads_in_keys;
    float* const states = (in_keys ? keys : values) + static_cast<int64_t>(in_keys ? head : head - shape.heads_in_keys) * size;
    const int32_t* const table = tables + static_cast<int64_t>(seq) * shape.max_blocks;
    const float unit = rsqrtf(static_cast<float>(key_dim));
    float s[STATE_ROWS];
    if (start == 0) {
        for (uint32_t i = threadIdx.x; i < tail_rows * channels; i += blockDim.x) tail[i] = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < STATE_ROWS; i++) s[i] = 0.0f;
    } else {
        const float* from = states + static_cast<int64_t>(table[(start - 1) / shape.block_size]) * shape.page;
        for (uint32_t i = threadIdx.x; i < tail_rows * channels; i += blockDim.x) tail[i] = from[i];
        from += tail_rows * channels + (part * STATE_ROWS) * value_dim + column;
#pragma unroll
        for (uint32_t i = 0; i < STATE_ROWS; i++) s[i] = from[i * value_dim];
    }
    __syncthreads();
    for (uint32_t position = start; position < context; position++) {
        const int64_t row = first_row + (position - start);
        const T* const x = projected + row * shape.stride;
        for (uint32_t c = threadIdx.x; c < channels; c += blockDim.x) {
            const uint32_t channel = c < key_dim       ? key_head * key_dim + c
                                     : c < 2 * key_dim ? all_keys + key_head * key_dim + c - key_dim
                                                       : 2 * all_keys + head * value_dim + c - 2 * key_dim;
            const float newest = to_float(x[channel]);
            float sum = 0.0f;
            for (uint32_t t = 0; t < tail_rows; t++) {
                const float input = tail[t * channels + c];
                sum += conv[static_cast<int64_t>(t) * width + channel] * input;
                if (t > 0) tail[(t - 1) * channels + c] = input;
            }
            sum += conv[static_cast<int64_t>(tail_rows) * width + channel] * newest;
            if (tail_rows > 0) tail[(tail_rows - 1) * channels + c] = newest;
            qkv[c] = sum / (1.0f + expf(-sum));
        }
        __syncthreads();
        const float *q = qkv, *k = qkv + key_dim, *v = qkv + 2 * key_dim;
        // Every warp computes both lengths.
        float q_squares = 0.0f, k_squares = 0.0f;
        for (uint32_t i = lane; i < key_dim; i += 32) {
            q_squares += q[i] * q[i];
            k_squares += k[i] * k[i];
        }
        const float q_scale = rsqrtf(sum_over(q_squares, 32) + 1e-6f) * unit;
        const float k_scale = rsqrtf(sum_over(k_squares, 32) + 1e-6f);
        const float a = to_float(x[width + all_values + shape.value_heads + head]) + dt_bias[head];
        const float b = to_float(x[width + all_values + head]);
        const float decay = expf(decays[head] * (a > 20.0f ? a : log1pf(expf(a))));
        const float beta = 1.0f / (1.0f + expf(-b));
        float sum = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < STATE_ROWS; i++) sum += s[i] * k[part * STATE_ROWS + i];
        sums[threadIdx.x] = sum;
        __syncthreads();
        float known = 0.0f;
        for (uint32_t p = 0; p < parts; p++) known += sums[p * value_dim + column];
        const float delta = beta * (v[column] - decay * known * k_scale) * k_scale;
        float out = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < STATE_ROWS; i++) {
            s[i] = s[i] * decay + k[part * STATE_ROWS + i] * delta;
            out += s[i] * q[part * STATE_ROWS + i];
        }
        outs[threadIdx.x] = out;
        __syncthreads();
        float squares = 0.0f, own = 0.0f;
        for (uint32_t j = lane; j < value_dim; j += 32) {
            float o = 0.0f;
            for (uint32_t p = 0; p < parts; p++) o += outs[p * value_dim + j];
            o *= q_scale;
            squares += o * o;
        }
        const float scale = rsqrtf(sum_over(squares, 32) / static_cast<float>(value_dim) + shape.eps);
        if (part == 0) {
            for (uint32_t p = 0; p < parts; p++) own += outs[p * value_dim + column];
            const float z = to_float(x[width + head * value_dim + column]);
            const float normed = own * q_scale * scale * norm[column];
            output[row * all_values + head * value_dim + column] = from_float<T>(normed * z / (1.0f + expf(-z)));
        }
        const uint32_t block = position / shape.block_size;
        const bool is_last = (position + 1) % shape.block_size == 0 || position + 1 == certain;
        if (is_last && position < certain && table[block] >= 0) {
            float* to = states + static_cast<int64_t>(table[block]) * shape.page;
            for (uint32_t i = threadIdx.x; i < tail_rows * channels; i += blockDim.x) to[i] = tail[i];
            to += tail_rows * channels + (part * STATE_ROWS) * value_dim + column;
#pragma unroll
            for (uint32_t i = 0; i < STATE_ROWS; i++) to[i * value_dim] = s[i];
            // Another thread may own these channels of the tail.
            __syncthreads();
        }
    }
}

}  // namespace quire

#define DELTA_NET(type, T)                                                                                                \
    extern "C" __global__ void __launch_bounds__(quire::STATE_THREADS, 1)                                                 \
        gated_delta_net_##type(const void* projected, void* output, const float* conv, const float* decays,               \
                               const float* dt_bias, const float* norm, void* keys, void* values, const int32_t* tables,  \
                               const uint32_t* context_lens, const uint32_t* query_starts, const uint32_t* drafts,        \
                               const quire::DeltaShape shape) {                                                           \
        quire::wait_for_launches();                                                                                       \
        quire::gated_delta_net<T>(static_cast<const T*>(projected), static_cast<T*>(output), conv, decays, dt_bias, norm, \
                                  static_cast<float*>(keys), static_cast<float*>(values), tables, context_lens,           \
                                  query_starts, drafts, shape);                                                           \
    }                                                                                                                     \
    QUIRE_EXPORT_OVERLAPPED(gated_delta_net_##type, 0);

DELTA_NET(f16, __half)
DELTA_NET(bf16, __nv_bfloat16)
DELTA_NET(f32, float)
