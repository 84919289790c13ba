// The recurrences of layers with states: all tokens of a sequence, one after the other, in one thread block for each value head. Each
// result depends on its sequence alone.
//
// gated_delta_net_<type>      grid (sequences, value heads), value_dim * ceil(key_dim / 32) threads
// channel_delta_net_<type>    the same, with a decay of each row of S
// state_space_<type>          the same: Mamba-2
// short_convolution_<type>    grid (sequences, value heads), value_dim threads
// convolution_<type>          the same: the convolution of Mamba-1
// selective_scan_<type>       the same: its matrices, of up to 32 rows
//
// Numbers of threads are rounded up to whole warps. Thread t holds rows 32 p to 32 p + 31 of column j of the head's matrix S, with
// j = t % value_dim and p = t / value_dim; rows beyond the last are zero. The state of a head in a page is float32: the last kernel - 1
// inputs of the convolution, the oldest first, then S by rows.
//
// The last rows of a sequence can be drafts. They go on from the state in shared memory and registers, and no page is written.

#include <quire/export.cuh>
#include <math.h>

#include "vectors.cuh"

namespace quire {

constexpr uint32_t STATE_ROWS = 32;
constexpr uint32_t MAX_KEY_DIM = 256;
constexpr uint32_t MAX_VALUE_DIM = 128;
constexpr uint32_t MAX_CHANNELS = 2 * MAX_KEY_DIM + MAX_VALUE_DIM;
constexpr uint32_t MAX_TAIL = 7;
constexpr uint32_t STATE_THREADS = 512;

struct RecurrentShape {
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
    uint32_t head_state;     // floats of the state of a head
    float eps;               // of the norm
    float least_step;
    float greatest_step;
    float z_factor;          // of Mamba-2, as the next
    float step_factor;
};

// Weights of a layer, some of which a rule does not have: conv [kernel, channels]; conv_bias [channels]; decays, dt_bias, skip
// [value_heads]; norm [value_dim].
struct Weights {
    const float* conv;
    const float* conv_bias;
    const float* decays;
    const float* dt_bias;
    const float* skip;
    const float* norm;
};

// Where the states of sequences are, and the rows of each sequence.
struct Sequences {
    float* keys;
    float* values;
    const int32_t* tables;
    const uint32_t* context_lens;
    const uint32_t* query_starts;
    const uint32_t* drafts;
};

__device__ __forceinline__ float sigmoid(float x) {
    return 1.0f / (1.0f + expf(-x));
}

__device__ __forceinline__ float softplus(float x) {
    return x > 20.0f ? x : log1pf(expf(x));
}

// The rows of a sequence, and the state of one of its heads in a page.
struct Span {
    uint32_t context, first_row, rows, start;
    uint32_t certain;  // rows up to this position are no drafts
    float* states;
    const int32_t* table;

    __device__ Span(const Sequences& of, const RecurrentShape& shape, uint32_t seq, uint32_t head) {
        context = of.context_lens[seq];
        first_row = of.query_starts[seq];
        rows = of.query_starts[seq + 1] - first_row;
        // Sequences without a context have no rows before this one.
        start = context == 0 ? 0 : context - rows;
        certain = context == 0 ? 0 : context - of.drafts[seq];
        const bool in_keys = head < shape.heads_in_keys;
        const int64_t index = in_keys ? head : head - shape.heads_in_keys;
        states = (in_keys ? of.keys : of.values) + index * shape.head_state;
        table = of.tables + static_cast<int64_t>(seq) * shape.max_blocks;
    }

    // The state in the page of a block.
    __device__ __forceinline__ float* state(uint32_t block, const RecurrentShape& shape) const {
        return states + static_cast<int64_t>(table[block]) * shape.page;
    }

    // Whether the state after this position is written to the page of its block.
    __device__ __forceinline__ bool ends(uint32_t position, const RecurrentShape& shape) const {
        const bool is_last = (position + 1) % shape.block_size == 0 || position + 1 == certain;
        return is_last && position < certain && table[position / shape.block_size] >= 0;
    }
};

// What a matrix is updated by.
enum class Rule { SPACE, DELTA, CHANNELS };

// projected: [rows, stride], a row is q, k, v, z, then b and a with DELTA, or dt with SPACE; with CHANNELS it is q, k, v, b, and steps:
// [rows, value_heads * key_dim], gates: [rows, value_heads * value_dim]. output: [rows, value_heads * value_dim].
template <class T, Rule RULE>
__device__ __forceinline__ void matrix_state(const T* projected, const T* steps, const T* gates, T* output, const Weights& weights,
                                             const Sequences& sequences, const RecurrentShape& shape) {
    constexpr bool DELTA = RULE != Rule::SPACE, CHANNELS = RULE == Rule::CHANNELS;
    // Decays of the rows of S.
    __shared__ float kept[CHANNELS ? MAX_KEY_DIM : 1];
    __shared__ float tail[MAX_TAIL * MAX_CHANNELS];
    // q, k and v; what lies between them is zero.
    __shared__ float qkv[MAX_CHANNELS];
    __shared__ float sums[STATE_THREADS], outs[STATE_THREADS];
    const uint32_t head = blockIdx.y, lane = threadIdx.x % 32;
    const uint32_t key_dim = shape.key_dim, value_dim = shape.value_dim;
    const uint32_t parts = (key_dim + STATE_ROWS - 1) / STATE_ROWS;
    const uint32_t column = threadIdx.x % value_dim, part = threadIdx.x / value_dim;
    const bool active = part < parts;
    const uint32_t first = active ? part * STATE_ROWS : 0, last = active ? key_dim : 0;
    const uint32_t all_values = shape.value_heads * value_dim;
    const uint32_t tail_rows = shape.kernel - 1, channels = 2 * key_dim + value_dim;
    const Span span(sequences, shape, blockIdx.x, head);
    if (span.context == 0) {
        for (uint32_t row = span.first_row; row < span.first_row + span.rows; row++) {
            if (part == 0) output[static_cast<int64_t>(row) * all_values + head * value_dim + column] = from_float<T>(0.0f);
        }
        return;
    }
    const uint32_t all_keys = shape.key_heads * key_dim, width = 2 * all_keys + all_values;
    const uint32_t key_head = head / (shape.value_heads / shape.key_heads);
    const float unit = rsqrtf(static_cast<float>(key_dim));
    float s[STATE_ROWS];
#pragma unroll
    for (uint32_t i = 0; i < STATE_ROWS; i++) s[i] = 0.0f;
    for (uint32_t i = threadIdx.x; i < MAX_CHANNELS; i += blockDim.x) qkv[i] = 0.0f;
    if constexpr (CHANNELS) {
        for (uint32_t i = threadIdx.x; i < MAX_KEY_DIM; i += blockDim.x) kept[i] = 0.0f;
    }
    if (span.start == 0) {
        for (uint32_t i = threadIdx.x; i < tail_rows * channels; i += blockDim.x) tail[i] = 0.0f;
    } else {
        const float* from = span.state((span.start - 1) / shape.block_size, shape);
        for (uint32_t i = threadIdx.x; i < tail_rows * channels; i += blockDim.x) tail[i] = from[i];
        from += tail_rows * channels + column;
#pragma unroll
        for (uint32_t i = 0; i < STATE_ROWS; i++) {
            if (first + i < last) s[i] = from[(first + i) * value_dim];
        }
    }
    const float *q = qkv, *k = qkv + MAX_KEY_DIM, *v = qkv + 2 * MAX_KEY_DIM;
    __syncthreads();
    for (uint32_t position = span.start; position < span.context; position++) {
        const int64_t row = span.first_row + (position - span.start);
        const T* const x = projected + row * shape.stride;
        for (uint32_t c = threadIdx.x; c < channels; c += blockDim.x) {
            const bool of_q = c < key_dim, of_k = c < 2 * key_dim;
            const uint32_t at = of_q ? c : of_k ? MAX_KEY_DIM + c - key_dim : 2 * MAX_KEY_DIM + c - 2 * key_dim;
            const uint32_t channel = of_q   ? key_head * key_dim + c
                                     : of_k ? all_keys + key_head * key_dim + c - key_dim
                                            : 2 * all_keys + head * value_dim + c - 2 * key_dim;
            const float newest = to_float(x[channel]);
            float sum = weights.conv_bias ? weights.conv_bias[channel] : 0.0f;
            for (uint32_t t = 0; t < tail_rows; t++) {
                const float input = tail[t * channels + c];
                sum += weights.conv[static_cast<int64_t>(t) * width + channel] * input;
                if (t > 0) tail[(t - 1) * channels + c] = input;
            }
            sum += weights.conv[static_cast<int64_t>(tail_rows) * width + channel] * newest;
            if (tail_rows > 0) tail[(tail_rows - 1) * channels + c] = newest;
            qkv[at] = sum / (1.0f + expf(-sum));
        }
        const int64_t of_head = row * shape.value_heads + head;
        if constexpr (CHANNELS) {
            for (uint32_t i = threadIdx.x; i < key_dim; i += blockDim.x) {
                const float step = softplus(to_float(steps[of_head * key_dim + i]) + weights.dt_bias[head * key_dim + i]);
                kept[i] = expf(weights.decays[head] * step);
            }
        }
        __syncthreads();
        float q_scale = 1.0f, skipped = 0.0f, decay = 1.0f, delta;
        const float after = to_float(x[(CHANNELS ? width : width + all_values) + head]);
        if constexpr (DELTA) {
            // Every warp computes both lengths.
            float q_squares = 0.0f, k_squares = 0.0f;
            for (uint32_t i = lane; i < key_dim; i += 32) {
                q_squares += q[i] * q[i];
                k_squares += k[i] * k[i];
            }
            q_scale = rsqrtf(sum_over(q_squares, 32) + 1e-6f) * unit;
            const float k_scale = rsqrtf(sum_over(k_squares, 32) + 1e-6f);
            if constexpr (CHANNELS) {
#pragma unroll
                for (uint32_t i = 0; i < STATE_ROWS; i++) s[i] *= kept[first + i];
            } else {
                const float a = to_float(x[width + all_values + shape.value_heads + head]) + weights.dt_bias[head];
                decay = expf(weights.decays[head] * softplus(a));
            }
            const float beta = sigmoid(after);
            float sum = 0.0f;
#pragma unroll
            for (uint32_t i = 0; i < STATE_ROWS; i++) sum += s[i] * k[first + i];
            sums[threadIdx.x] = sum;
            __syncthreads();
            float known = 0.0f;
            for (uint32_t p = 0; p < parts; p++) known += sums[p * value_dim + column];
            delta = beta * (v[column] - decay * known * k_scale) * k_scale;
        } else {
            const float dt = after * shape.step_factor + weights.dt_bias[head];
            const float step = fminf(fmaxf(softplus(dt), shape.least_step), shape.greatest_step);
            decay = expf(weights.decays[head] * step);
            delta = step * v[column];
            skipped = weights.skip[head] * v[column];
        }
        float out = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < STATE_ROWS; i++) {
            s[i] = s[i] * decay + k[first + i] * delta;
            out += s[i] * q[first + i];
        }
        outs[threadIdx.x] = out;
        __syncthreads();
        float own = 0.0f;
        for (uint32_t p = 0; p < parts; p++) own += outs[p * value_dim + column];
        if constexpr (DELTA) {
            float squares = 0.0f;
            for (uint32_t j = lane; j < value_dim; j += 32) {
                float o = 0.0f;
                for (uint32_t p = 0; p < parts; p++) o += outs[p * value_dim + j];
                o *= q_scale;
                squares += o * o;
            }
            const float scale = rsqrtf(sum_over(squares, 32) / static_cast<float>(value_dim) + shape.eps);
            own = own * q_scale * scale * weights.norm[column];
        } else {
            own += skipped;
        }
        if (part == 0) {
            if constexpr (CHANNELS) {
                const float z = to_float(gates[of_head * value_dim + column]);
                output[of_head * value_dim + column] = from_float<T>(own * sigmoid(z));
            } else {
                const float z = to_float(x[width + head * value_dim + column]) * shape.z_factor;
                output[of_head * value_dim + column] = from_float<T>(own * z / (1.0f + expf(-z)));
            }
        }
        if (span.ends(position, shape)) {
            float* to = span.state(position / shape.block_size, shape);
            for (uint32_t i = threadIdx.x; i < tail_rows * channels; i += blockDim.x) to[i] = tail[i];
            to += tail_rows * channels + column;
#pragma unroll
            for (uint32_t i = 0; i < STATE_ROWS; i++) {
                if (first + i < last) to[(first + i) * value_dim] = s[i];
            }
            // Another thread may own these channels of the tail.
            __syncthreads();
        }
    }
}

// projected: [rows, stride], a row is v, z, and b with GATED; output: [rows, value_heads * value_dim]. A thread has a channel.
template <class T, bool GATED>
__device__ __forceinline__ void convolution(const T* projected, const T*, const T*, T* output, const Weights& weights,
                                                  const Sequences& sequences, const RecurrentShape& shape) {
    const uint32_t channels = shape.value_dim, width = shape.value_heads * channels, tail_rows = shape.kernel - 1;
    if (threadIdx.x >= channels) return;
    const uint32_t channel = blockIdx.y * channels + threadIdx.x;
    const Span span(sequences, shape, blockIdx.x, blockIdx.y);
    if (span.context == 0) {
        for (uint32_t row = span.first_row; row < span.first_row + span.rows; row++) {
            output[static_cast<int64_t>(row) * width + channel] = from_float<T>(0.0f);
        }
        return;
    }
    const float bias = weights.conv_bias ? weights.conv_bias[channel] : 0.0f;
    // Inputs and their factors, the newest last.
    float tail[MAX_TAIL + 1], conv[MAX_TAIL + 1];
    const float* from = span.start == 0 ? nullptr : span.state((span.start - 1) / shape.block_size, shape);
#pragma unroll
    for (uint32_t i = 0; i <= MAX_TAIL; i++) {
        const uint32_t skipped = MAX_TAIL - tail_rows;
        const bool has = i >= skipped;
        conv[i] = has ? weights.conv[static_cast<int64_t>(i - skipped) * width + channel] : 0.0f;
        tail[i] = has && from && i < MAX_TAIL ? from[(i - skipped) * channels + threadIdx.x] : 0.0f;
    }
    for (uint32_t position = span.start; position < span.context; position++) {
        const int64_t row = span.first_row + (position - span.start);
        const T* const x = projected + row * shape.stride + channel;
        tail[MAX_TAIL] = to_float(x[0]);
        if constexpr (GATED) tail[MAX_TAIL] *= to_float(x[2 * width]);
        float sum = bias;
#pragma unroll
        for (uint32_t i = 0; i <= MAX_TAIL; i++) {
            if (i + tail_rows >= MAX_TAIL) sum += conv[i] * tail[i];
        }
        const float result = GATED ? sum * to_float(x[width]) : sum / (1.0f + expf(-sum));
        output[row * width + channel] = from_float<T>(result);
#pragma unroll
        for (uint32_t i = 0; i < MAX_TAIL; i++) tail[i] = tail[i + 1];
        if (span.ends(position, shape)) {
            float* to = span.state(position / shape.block_size, shape);
#pragma unroll
            for (uint32_t i = 0; i < MAX_TAIL; i++) {
                if (i + tail_rows >= MAX_TAIL) to[(i + tail_rows - MAX_TAIL) * channels + threadIdx.x] = tail[i];
            }
        }
    }
}

// projected: [rows, stride], a row is v, which is not read, and z; values and steps: [rows, width]; keys: [rows, 2 * key_dim], k and q;
// output: [rows, width]; decays: [key_dim, width]; skip: [width]; k_norm, q_norm: [key_dim]. A thread has a channel.
template <class T>
__device__ __forceinline__ void selective_scan(const T* projected, const T* values, const T* steps, const T* keys, T* output,
                                               const float* decays, const float* skip, const float* k_norm,
                                               const float* q_norm, const Sequences& sequences,
                                               const RecurrentShape& shape) {
    __shared__ float k[STATE_ROWS], q[STATE_ROWS];
    const uint32_t channels = shape.value_dim, width = shape.value_heads * channels, key_dim = shape.key_dim;
    const bool active = threadIdx.x < channels;
    const uint32_t own = active ? threadIdx.x : 0, channel = blockIdx.y * channels + own;
    const Span span(sequences, shape, blockIdx.x, blockIdx.y);
    if (span.context == 0) {
        for (uint32_t row = span.first_row; row < span.first_row + span.rows; row++) {
            if (active) output[static_cast<int64_t>(row) * width + channel] = from_float<T>(0.0f);
        }
        return;
    }
    const uint32_t before = (shape.kernel - 1) * channels + own;
    const float* from = span.start == 0 ? nullptr : span.state((span.start - 1) / shape.block_size, shape) + before;
    float s[STATE_ROWS], a[STATE_ROWS];
#pragma unroll
    for (uint32_t i = 0; i < STATE_ROWS; i++) {
        a[i] = i < key_dim ? decays[static_cast<int64_t>(i) * width + channel] : 0.0f;
        s[i] = i < key_dim && from ? from[i * channels] : 0.0f;
    }
    for (uint32_t position = span.start; position < span.context; position++) {
        const int64_t row = span.first_row + (position - span.start);
        for (uint32_t i = threadIdx.x; i < key_dim; i += blockDim.x) {
            k[i] = to_float(keys[row * 2 * key_dim + i]);
            q[i] = to_float(keys[row * 2 * key_dim + key_dim + i]);
        }
        __syncthreads();
        float k_squares = 0.0f, q_squares = 0.0f;
        for (uint32_t i = 0; i < key_dim; i++) {
            k_squares += k[i] * k[i];
            q_squares += q[i] * q[i];
        }
        const float k_scale = rsqrtf(k_squares / static_cast<float>(key_dim) + shape.eps);
        const float q_scale = rsqrtf(q_squares / static_cast<float>(key_dim) + shape.eps);
        const float step = softplus(to_float(steps[row * width + channel]));
        const float v = to_float(values[row * width + channel]), added = step * v;
        float out = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < STATE_ROWS; i++) {
            if (i < key_dim) {
                s[i] = s[i] * expf(a[i] * step) + added * (k[i] * k_scale * k_norm[i]);
                out += s[i] * (q[i] * q_scale * q_norm[i]);
            }
        }
        out += skip[channel] * v;
        const float z = to_float(projected[row * shape.stride + width + channel]);
        if (active) output[row * width + channel] = from_float<T>(out * z / (1.0f + expf(-z)));
        if (span.ends(position, shape)) {
            float* to = span.state(position / shape.block_size, shape) + before;
#pragma unroll
            for (uint32_t i = 0; i < STATE_ROWS; i++) {
                if (active && i < key_dim) to[i * channels] = s[i];
            }
        }
        __syncthreads();
    }
}

}  // namespace quire

#define RECURRENCE(name, function, type, T)                                                                                  \
    extern "C" __global__ void __launch_bounds__(quire::STATE_THREADS, 1)                                                    \
        name##_##type(const void* projected, void* output, const float* conv, const float* conv_bias, const float* decays,   \
                      const float* dt_bias, const float* skip, const float* norm, void* keys, void* values,                  \
                      const int32_t* tables, const uint32_t* context_lens, const uint32_t* query_starts,                     \
                      const uint32_t* drafts, const quire::RecurrentShape shape) {                                           \
        quire::wait_for_launches();                                                                                          \
        const quire::Weights weights{conv, conv_bias, decays, dt_bias, skip, norm};                                          \
        const quire::Sequences sequences{static_cast<float*>(keys), static_cast<float*>(values), tables, context_lens,       \
                                         query_starts, drafts};                                                              \
        const T* const none = nullptr;                                                                                       \
        function(static_cast<const T*>(projected), none, none, static_cast<T*>(output), weights, sequences, shape);          \
    }                                                                                                                        \
    QUIRE_EXPORT_OVERLAPPED(name##_##type, 0);

#define CHANNEL_DELTA(type, T)                                                                                               \
    extern "C" __global__ void __launch_bounds__(quire::STATE_THREADS, 1)                                                    \
        channel_delta_net_##type(const void* projected, const void* steps, const void* gates, void* output,                  \
                                 const float* conv, const float* decays, const float* dt_bias, const float* norm,            \
                                 void* keys, void* values, const int32_t* tables, const uint32_t* context_lens,              \
                                 const uint32_t* query_starts, const uint32_t* drafts, const quire::RecurrentShape shape) {  \
        quire::wait_for_launches();                                                                                          \
        const quire::Weights weights{conv, nullptr, decays, dt_bias, nullptr, norm};                                         \
        const quire::Sequences sequences{static_cast<float*>(keys), static_cast<float*>(values), tables, context_lens,       \
                                         query_starts, drafts};                                                              \
        quire::matrix_state<T, quire::Rule::CHANNELS>(                                                                       \
            static_cast<const T*>(projected), static_cast<const T*>(steps), static_cast<const T*>(gates),                    \
            static_cast<T*>(output), weights, sequences, shape);                                                             \
    }                                                                                                                        \
    QUIRE_EXPORT_OVERLAPPED(channel_delta_net_##type, 0);

#define SELECTIVE_SCAN(type, T)                                                                                              \
    extern "C" __global__ void __launch_bounds__(quire::STATE_THREADS, 1)                                                    \
        selective_scan_##type(const void* projected, const void* values, const void* steps, const void* keys, void* output,  \
                              const float* decays, const float* skip, const float* k_norm, const float* q_norm,              \
                              void* key_pages, void* value_pages, const int32_t* tables, const uint32_t* context_lens,       \
                              const uint32_t* query_starts, const uint32_t* drafts, const quire::RecurrentShape shape) {     \
        quire::wait_for_launches();                                                                                          \
        const quire::Sequences sequences{static_cast<float*>(key_pages), static_cast<float*>(value_pages), tables,           \
                                         context_lens, query_starts, drafts};                                                \
        quire::selective_scan<T>(static_cast<const T*>(projected), static_cast<const T*>(values),                            \
                                 static_cast<const T*>(steps), static_cast<const T*>(keys), static_cast<T*>(output), decays, \
                                 skip, k_norm, q_norm, sequences, shape);                                                    \
    }                                                                                                                        \
    QUIRE_EXPORT_OVERLAPPED(selective_scan_##type, 0);

#define RECURRENCES(type, T)                                   \
    RECURRENCE(gated_delta_net, (quire::matrix_state<T, quire::Rule::DELTA>), type, T) \
    RECURRENCE(state_space, (quire::matrix_state<T, quire::Rule::SPACE>), type, T)    \
    CHANNEL_DELTA(type, T) \
    RECURRENCE(short_convolution, (quire::convolution<T, true>), type, T) \
    RECURRENCE(convolution, (quire::convolution<T, false>), type, T) \
    SELECTIVE_SCAN(type, T)

RECURRENCES(f16, __half)
RECURRENCES(bf16, __nv_bfloat16)
RECURRENCES(f32, float)
