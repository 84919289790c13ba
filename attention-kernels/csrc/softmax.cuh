// Scores and the online softmax: how a product becomes a score, how two parts of a context are merged, how a row ends.
//
// Scores are kept in base 2 (times log2 e) from the start, so that a weight is one exp2. Products and sums that reach the
// result go through the _rn intrinsics: the compiler may not fuse them one way here and another way there, which is
// what makes kernels that cut a context differently agree bit for bit.
#pragma once

#include "convert.cuh"

namespace quire {

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

// From a product q·k of one KV head to its score.
struct Scoring {
    float scale, cap, inverse_cap;

    __device__ __forceinline__ Scoring(const AttentionArgs& args, uint32_t kv_head) {
        const float k_scale = args.k_scales ? args.k_scales[kv_head * args.scale_stride] : 1.0f;
        scale = args.scale * k_scale * LOG2_E;
        cap = args.soft_cap * LOG2_E;
        inverse_cap = cap == 0.0f ? 0.0f : 1.0f / cap;
    }

    __device__ __forceinline__ float scaled(float product) const { return __fmul_rn(product, scale); }
    __device__ __forceinline__ float capped(float score) const {
        return __fmul_rn(cap, tanhf(__fmul_rn(score, inverse_cap)));
    }
    // `slope` is ALiBi's times log2 e, `distance` the key's position less the query's.
    static __device__ __forceinline__ float biased(float score, float slope, float distance) {
        return __fmaf_rn(slope, distance, score);
    }
};

__device__ __forceinline__ float slope_of(const AttentionArgs& args, uint32_t head) {
    return args.alibi_slopes ? args.alibi_slopes[head] * LOG2_E : 0.0f;
}

// What is known of the tokens seen so far: the greatest score, and the sum of the weights exp2(score - max).
struct SoftmaxState {
    float max = -INFINITY;
    float sum = 0.0f;
};

// The reference that weights are taken against: where nothing is visible yet, 0, so that -inf - -inf never happens.
__device__ __forceinline__ float base_of(float max) { return max == -INFINITY ? 0.0f : max; }

__device__ __forceinline__ float weight(float score, float base) { return exp2f(__fsub_rn(score, base)); }

// The factors that bring two sums of weighted values to one reference.
struct Factors {
    float old_part, new_part;

    __device__ __forceinline__ float merge(float old_sum, float new_sum) const {
        return __fmaf_rn(old_sum, old_part, __fmul_rn(new_sum, new_part));
    }
};

// Merges `part` into `state`. Called once per partition, in the order of the partitions.
__device__ __forceinline__ Factors merge(SoftmaxState& state, const SoftmaxState& part) {
    const float max = fmaxf(state.max, part.max);
    const Factors factors{weight(state.max, base_of(max)), weight(part.max, base_of(max))};
    state.sum = factors.merge(state.sum, part.sum);
    state.max = max;
    return factors;
}

// What a row's sums are multiplied with in the end. Nothing visible gives zeros; a NaN stays one.
__device__ __forceinline__ float finish(const AttentionArgs& args, const SoftmaxState& state, uint32_t kv_head) {
    const float v_scale = args.v_scales ? args.v_scales[kv_head * args.scale_stride] : 1.0f;
    return state.sum == 0.0f ? 0.0f : v_scale / state.sum;
}

__device__ __forceinline__ float lse_of(const SoftmaxState& state) { return (state.max + log2f(state.sum)) * LN_2; }

}  // namespace quire
