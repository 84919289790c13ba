// Scores and the online softmax: from products to scores, merging of partitions, and the final result.
//
// Scores are in base 2 (multiplied by log2 e), so a weight is one exp2. Products and sums that affect the result use the
// _rn intrinsics, which the compiler does not fuse differently in different places. So kernels that split a context
// differently agree in every bit.
#pragma once

#include "convert.cuh"

namespace quire {

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

// Converts products q·k of one KV head to scores.
struct Scoring {
    float scale, cap, inverse_cap;
    bool deferred;  // the tile kernels scale a product where they subtract the maximum from it, in one operation

    __device__ __forceinline__ Scoring(const AttentionArgs& args, uint32_t kv_head) {
        const float k_scale = args.k_scales ? args.k_scales[kv_head * args.scale_stride] : 1.0f;
        scale = args.scale * k_scale * LOG2_E;
        cap = args.soft_cap * LOG2_E;
        inverse_cap = cap == 0.0f ? 0.0f : 1.0f / cap;
        // The greatest product has the greatest score only if the scale is positive.
        deferred = cap == 0.0f && !args.alibi_slopes && scale > 0.0f;
    }

    // Returns the factor that is left to multiply a number by, after finish_scores.
    __device__ __forceinline__ float left() const { return deferred ? scale : 1.0f; }

    __device__ __forceinline__ float scaled(float product) const { return __fmul_rn(product, scale); }
    __device__ __forceinline__ float capped(float score) const {
        return __fmul_rn(cap, tanhf(__fmul_rn(score, inverse_cap)));
    }
    // `slope` is the ALiBi slope times log2 e, `distance` the key's position minus the query's.
    static __device__ __forceinline__ float biased(float score, float slope, float distance) {
        return __fmaf_rn(slope, distance, score);
    }
};

__device__ __forceinline__ float slope_of(const AttentionArgs& args, uint32_t head) {
    return args.alibi_slopes ? args.alibi_slopes[head] * LOG2_E : 0.0f;
}

// State of the tokens seen so far: the greatest score, and the sum of the weights exp2(score - max).
struct SoftmaxState {
    float max = -INFINITY;
    float sum = 0.0f;
};

// Returns the base of weights: 0 if nothing is visible yet, to avoid -inf - -inf.
__device__ __forceinline__ float base_of(float max) { return max == -INFINITY ? 0.0f : max; }

__device__ __forceinline__ float weight(float score, float base) { return exp2f(__fsub_rn(score, base)); }

// Factors that bring two sums of weighted values to the same base.
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

// The result of a row and head whose partitions are merged.
struct Finished {
    float factor;  // of its sums: zero if nothing is visible; NaN remains NaN
    float lse;
};

// Called once for each row and head, so the head's sink enters its softmax once, however the context is split.
__device__ __forceinline__ Finished finish(const AttentionArgs& args, SoftmaxState state, uint32_t head) {
    float share = 1.0f;
    if (args.sinks && state.sum != 0.0f) share = merge(state, {args.sinks[head] * LOG2_E, 1.0f}).old_part;
    const uint32_t kv_head = head / (args.num_heads / args.num_kv_heads);
    const float v_scale = args.v_scales ? args.v_scales[kv_head * args.scale_stride] : 1.0f;
    const float factor = state.sum == 0.0f ? 0.0f : v_scale / state.sum * share;
    return {factor, (state.max + log2f(state.sum)) * LN_2};
}

}  // namespace quire
