// Mixtures of experts: the choice of experts for each row, and the weighted sum of their results. Their products are those of
// linear.cu of attention-kernels.
//
// route_experts_<type>     grid (rows), 32 threads: scores, groups and choice of one row
// group_by_expert          grid (experts), 256 threads: the assignments (row, choice) of an expert, by ascending number
// scale_inputs_<type>      grid (assignments, ceil(width / 2048)), 256 threads of eight elements each
// sum_experts_<type>       grid (rows, ceil(width / 2048)), 256 threads of eight elements each
//
// Assignment a is choice a % top_k of row a / top_k. Each result depends on its row alone.

#include <quire/export.cuh>
#include <math.h>

#include "vectors.cuh"

namespace quire {

constexpr uint32_t GROUP_THREADS = 256;
constexpr uint32_t SUM_THREADS = 256;

enum Scores : uint32_t { SOFTMAX, SIGMOID, LOGITS, SPARSE_MIXER };

struct RouteShape {
    uint32_t experts;
    uint32_t stride;       // elements between rows of logits
    uint32_t top_k;
    uint32_t scores;       // a Scores
    uint32_t groups;       // of experts; 1: none
    uint32_t top_groups;
    uint32_t by_two;       // whether a group is ranked by its two best scores
    uint32_t renormalise;
    float scale;
    float threshold;       // of SPARSE_MIXER
};

// Returns the greatest value of the warp and, of those that have it, the least number.
__device__ __forceinline__ void first_best(float& value, uint32_t& number) {
    for (uint32_t step = 16; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(~0u, value, step);
        const uint32_t at = __shfl_xor_sync(~0u, number, step);
        if (other > value || (other == value && at < number)) {
            value = other;
            number = at;
        }
    }
}

__device__ __forceinline__ float warp_max(float value) {
    for (uint32_t step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
    return value;
}

// logits: [rows, stride]; bias, factors: [experts] or null; scores, ranked: scratch [rows, experts]; chosen, weights: [rows, top_k].
template <class T>
__device__ __forceinline__ void route_experts(const T* logits, const float* bias, const float* factors, float* scores,
                                              float* ranked, uint32_t* chosen, float* weights, const RouteShape& shape) {
    const uint32_t lane = threadIdx.x, experts = shape.experts;
    logits += static_cast<int64_t>(blockIdx.x) * shape.stride;
    scores += static_cast<int64_t>(blockIdx.x) * experts;
    ranked += static_cast<int64_t>(blockIdx.x) * experts;
    chosen += static_cast<int64_t>(blockIdx.x) * shape.top_k;
    weights += static_cast<int64_t>(blockIdx.x) * shape.top_k;
    float greatest = -INFINITY, sum = 0.0f;
    if (shape.scores == SOFTMAX) {
        for (uint32_t e = lane; e < experts; e += 32) greatest = fmaxf(greatest, to_float(logits[e]));
        greatest = warp_max(greatest);
        for (uint32_t e = lane; e < experts; e += 32) sum += expf(to_float(logits[e]) - greatest);
        sum = sum_over(sum, 32);
    }
    for (uint32_t e = lane; e < experts; e += 32) {
        const float x = to_float(logits[e]);
        const float score = shape.scores == SOFTMAX   ? expf(x - greatest) / sum
                            : shape.scores == SIGMOID ? 1.0f / (1.0f + expf(-x))
                                                      : x;
        scores[e] = score;
        ranked[e] = score + (bias ? bias[e] : 0.0f);
    }
    __syncwarp();
    // Ranks of groups take the place of weights that are not known yet: at most top_groups are kept, one after the other.
    if (shape.groups > 1) {
        const uint32_t size = experts / shape.groups;
        for (uint32_t excluded = shape.groups - shape.top_groups; excluded > 0; excluded--) {
            // The worst group that is left; of equal ones the last.
            float worst = -INFINITY;
            uint32_t at = ~0u;
            for (uint32_t g = lane; g < shape.groups; g += 32) {
                float best = -INFINITY, second = -INFINITY;
                for (uint32_t i = 0; i < size; i++) {
                    const float x = ranked[g * size + i];
                    second = x > best ? best : fmaxf(second, x);
                    best = fmaxf(best, x);
                }
                if (best == -INFINITY) continue;
                const float rank = -(shape.by_two ? best + second : best);
                if (at == ~0u || rank >= worst) {
                    worst = rank;
                    at = shape.groups - 1 - g;
                }
            }
            first_best(worst, at);
            const uint32_t group = shape.groups - 1 - at;
            __syncwarp();
            for (uint32_t i = lane; i < size; i += 32) ranked[group * size + i] = -INFINITY;
            __syncwarp();
        }
    }
    float total = 0.0f, first = 0.0f;
    for (uint32_t choice = 0; choice < shape.top_k; choice++) {
        float best = -INFINITY;
        uint32_t expert = ~0u;
        for (uint32_t e = lane; e < experts; e += 32) {
            if (expert == ~0u || ranked[e] > best) {
                best = ranked[e];
                expert = e;
            }
        }
        first_best(best, expert);
        if (expert >= experts) expert = 0;
        float weight = scores[expert];
        if (shape.scores == LOGITS) {
            if (choice == 0) first = weight;
            weight = expf(weight - first);
        } else if (shape.scores == SPARSE_MIXER) {
            float near = 0.0f;
            for (uint32_t e = lane; e < experts; e += 32) {
                const float x = ranked[e];
                const bool far = (weight - x) / fmaxf(fabsf(x), weight) > shape.threshold;
                if (x > -INFINITY && !far) near += expf(x - weight);
            }
            weight = 1.0f / sum_over(near, 32);
        }
        total += weight;
        __syncwarp();
        if (lane == 0) {
            chosen[choice] = expert;
            weights[choice] = weight;
            ranked[expert] = -INFINITY;
        }
        __syncwarp();
    }
    const float divisor = shape.scores == LOGITS ? total : shape.renormalise ? total + 1e-20f : 1.0f;
    for (uint32_t choice = lane; choice < shape.top_k; choice += 32) {
        const float factor = factors ? factors[chosen[choice]] : 1.0f;
        weights[choice] = weights[choice] / divisor * shape.scale * factor;
    }
}

// chosen: [assignments]; order: [assignments], the assignments of expert 0, then of expert 1, …; starts: [experts + 1]. A block
// orders those of one expert: it counts the assignments of the experts before, then gives each of its own its place. Each block
// reads all assignments twice, 256 at a time, mostly from L2.
__device__ __forceinline__ void group_by_expert(const uint32_t* chosen, uint32_t* order, uint32_t* starts, uint32_t assignments,
                                                uint32_t experts) {
    constexpr uint32_t WARPS = GROUP_THREADS / 32;
    // Two rounds alternate, so that a round needs one barrier.
    __shared__ uint32_t of_warps[2][WARPS];
    const uint32_t expert = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t before = 0;
    for (uint32_t a = threadIdx.x; a < assignments; a += GROUP_THREADS) before += chosen[a] < expert;
#pragma unroll
    for (uint32_t step = 16; step > 0; step /= 2) before += __shfl_xor_sync(~0u, before, step);
    if (lane == 0) of_warps[1][warp] = before;
    __syncthreads();
    uint32_t place = 0;
#pragma unroll
    for (uint32_t w = 0; w < WARPS; w++) place += of_warps[1][w];
    if (threadIdx.x == 0) {
        starts[expert] = place;
        if (expert + 1 == experts) starts[experts] = assignments;
    }
    uint32_t round = 0;
    for (uint32_t first = 0; first < assignments; first += GROUP_THREADS) {
        const uint32_t a = first + threadIdx.x;
        const bool is_own = a < assignments && chosen[a] == expert;
        const uint32_t own = __ballot_sync(~0u, is_own);
        if (lane == 0) of_warps[round][warp] = __popc(own);
        __syncthreads();
        uint32_t in_front = 0, all = 0;
#pragma unroll
        for (uint32_t w = 0; w < WARPS; w++) {
            in_front += w < warp ? of_warps[round][w] : 0;
            all += of_warps[round][w];
        }
        if (is_own) order[place + in_front + __popc(own & ((1u << lane) - 1))] = a;
        place += all;
        round ^= 1;
    }
}

// x: [assignments, width] *= weights: [assignments]. The products of scaled inputs are the scaled products.
template <class T>
__device__ __forceinline__ void scale_inputs(T* x, const float* weights, uint32_t width) {
    const uint32_t at = (blockIdx.y * SUM_THREADS + threadIdx.x) * 8;
    if (at >= width) return;
    const bool whole = width % 8 == 0;
    const float weight = weights[blockIdx.x];
    float piece[8];
    x += static_cast<int64_t>(blockIdx.x) * width;
    load_piece(x, at, width, whole, piece);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) piece[i] *= weight;
    store_piece(x, at, width, whole, piece);
}

struct SumShape {
    uint32_t width;
    uint32_t top_k;
    uint32_t shared;  // 0: no shared network; 1: mixed holds its output; 2: that output has a gate
    uint32_t stride;  // elements between rows of logits, the last of which is the gate
};

// mixed = [sigmoid(gate) *] mixed + sum of weights * outputs. outputs: [rows, top_k, width]; without weights they are 1.
template <class T>
__device__ __forceinline__ void sum_experts(const T* outputs, const float* weights, const T* logits, T* mixed,
                                            const SumShape& shape) {
    const uint32_t at = (blockIdx.y * SUM_THREADS + threadIdx.x) * 8, width = shape.width;
    if (at >= width) return;
    const bool whole = width % 8 == 0;
    const int64_t row = blockIdx.x;
    float sum[8] = {}, piece[8];
    if (shape.shared) {
        load_piece(mixed + row * width, at, width, whole, sum);
        if (shape.shared == 2) {
            const float gate = 1.0f / (1.0f + expf(-to_float(logits[(row + 1) * shape.stride - 1])));
#pragma unroll
            for (uint32_t i = 0; i < 8; i++) sum[i] *= gate;
        }
    }
    for (uint32_t choice = 0; choice < shape.top_k; choice++) {
        const float weight = weights ? weights[row * shape.top_k + choice] : 1.0f;
        load_piece(outputs + (row * shape.top_k + choice) * width, at, width, whole, piece);
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) sum[i] += piece[i] * weight;
    }
    store_piece(mixed + row * width, at, width, whole, sum);
}

}  // namespace quire

#define EXPERTS(type, T)                                                                                                \
    extern "C" __global__ void __launch_bounds__(32)                                                                    \
        route_experts_##type(const void* logits, const float* bias, const float* factors, float* scores, float* ranked, \
                             uint32_t* chosen, float* weights, const quire::RouteShape shape) {                         \
        quire::wait_for_launches();                                                                                     \
        const T* rows = static_cast<const T*>(logits);                                                                  \
        quire::route_experts<T>(rows, bias, factors, scores, ranked, chosen, weights, shape);                           \
    }                                                                                                                   \
    QUIRE_EXPORT_OVERLAPPED(route_experts_##type, 0);                                                                   \
    extern "C" __global__ void __launch_bounds__(quire::SUM_THREADS)                                                    \
        scale_inputs_##type(void* x, const float* weights, const uint32_t width) {                                      \
        quire::wait_for_launches();                                                                                     \
        quire::scale_inputs<T>(static_cast<T*>(x), weights, width);                                                     \
    }                                                                                                                   \
    QUIRE_EXPORT_OVERLAPPED(scale_inputs_##type, 0);                                                                    \
    extern "C" __global__ void __launch_bounds__(quire::SUM_THREADS)                                                    \
        sum_experts_##type(const void* outputs, const float* weights, const void* logits, void* mixed,                  \
                           const quire::SumShape shape) {                                                               \
        quire::wait_for_launches();                                                                                     \
        quire::sum_experts<T>(static_cast<const T*>(outputs), weights, static_cast<const T*>(logits),                   \
                              static_cast<T*>(mixed), shape);                                                           \
    }                                                                                                                   \
    QUIRE_EXPORT_OVERLAPPED(sum_experts_##type, 0);

EXPERTS(f16, __half)
EXPERTS(bf16, __nv_bfloat16)
EXPERTS(f32, float)

extern "C" __global__ void __launch_bounds__(quire::GROUP_THREADS)
    group_by_expert(const uint32_t* chosen, uint32_t* order, uint32_t* starts, const uint32_t assignments,
                    const uint32_t experts) {
    quire::wait_for_launches();
    quire::group_by_expert(chosen, order, starts, assignments, experts);
}
QUIRE_EXPORT_OVERLAPPED(group_by_expert, 0);
