// The draw: argmax of logit + Gumbel noise over the kept tokens.
#pragma once

#include "block.cuh"
#include "filter.cuh"

namespace quire {

// The greatest logit + noise so far, and its token.
struct Winner {
    double sum;
    uint32_t token;
};
struct GreaterSum {
    __device__ __forceinline__ Winner operator()(Winner a, Winner b) const {
        return b.sum > a.sum || (b.sum == a.sum && b.token < a.token) ? b : a;
    }
};
__device__ __forceinline__ Winner from_lane_xor(Winner value, int lanes) {
    return {__shfl_xor_sync(0xffffffffu, value.sum, lanes), __shfl_xor_sync(0xffffffffu, value.token, lanes)};
}

// A thread's part of a draw. Noise is computed only for tokens that can still win.
struct Draw {
    const RowParams& params;
    uint32_t output_len;
    double bound;  // lower bound of the winning sum
    Winner best = {-static_cast<double>(__uint_as_float(0x7f800000u)), NONE};

    __device__ __forceinline__ bool hopeless(float logit) const { return static_cast<double>(logit) + MAX_NOISE < bound; }

    __device__ __forceinline__ void add(uint32_t token, float scaled) {
        if (hopeless(scaled)) return;
        const double logit = static_cast<double>(scaled);
        const Mass bits = uniform_bits(params, output_len, token);
        if (logit + gumbel_bound(bits) < bound) return;
        best = GreaterSum()(best, {__dadd_rn(logit, gumbel(bits)), token});
        bound = best.sum > bound ? best.sum : bound;
    }

    // Adds the tokens between two positions of the scaled row for which `takes_part(token, logit)` holds.
    template <uint32_t THREADS, class Wanted, class TakesPart>
    __device__ __forceinline__ void add_each(const Values<float>& scaled, uint32_t begin, uint32_t end, Wanted wanted, TakesPart takes_part) {
        each_vector<THREADS>(scaled, begin, end, wanted, [&](uint32_t, uint32_t token, const auto& logits) {
            uint32_t left = 0;
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                if (token + i < scaled.vocab && takes_part(token + i, logits[i]) && !hopeless(logits[i])) left |= 1u << i;
            }
#pragma unroll 1
            for (; left; left &= left - 1) {
                const uint32_t i = __ffs(static_cast<int>(left)) - 1;
                add(token + i, i < 2 ? (i ? logits[1] : logits[0]) : (i == 2 ? logits[2] : logits[3]));
            }
        });
    }
};

}  // namespace quire
