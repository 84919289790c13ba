// The cut of a row: bins of the histogram, and membership in the set of tokens that the filters keep.
#pragma once

#include "numbers.cuh"

namespace quire {

// Bins of a row's histogram, by the distance of a logit from the largest. All that is farther is in FAR.
//
//     largest                    first_bin   last_bin                       k_bin
//        │ 0 │ 1 │ .... kept .... │ undecided │ ... dropped by top_p ... │ undecided │ ... dropped .... │ FAR │
//
// They cover 41 units, or the range of the logits if that is smaller. A token of FAR has no mass, and cannot win a draw in
// which the likeliest token takes part: noise is between -3.7 and MAX_NOISE.
constexpr uint32_t BINS = 1024, FAR = BINS - 1;
constexpr float LEAST_BINS_PER_UNIT = 25.0f;
static_assert(FAR / LEAST_BINS_PER_UNIT > MAX_NOISE + 3.7, "the distance at which no token can win");
static_assert(2 * BINS <= LIST, "the histogram is in the memory of the list");

__device__ __forceinline__ float bins_per_unit(float range) {
    return fminf(fmaxf(__fdiv_rn(FAR - 1, range), LEAST_BINS_PER_UNIT), 1e30f);
}

__device__ __forceinline__ uint32_t bin_of(const Cut& cut, float logit) {
    const float bin = __fmul_rn(__fsub_rn(cut.largest, logit), cut.bins_per_unit);
    return bin < FAR ? static_cast<uint32_t>(bin) : FAR;
}

__device__ __forceinline__ bool undecided(const Cut& cut, uint32_t bin) {
    return bin >= cut.first_bin && (bin <= cut.last_bin || bin == cut.k_bin);
}

// Distance of a logit from the mean, for typical_p.
__device__ __forceinline__ float distance(float logit, float largest, float mean) {
    return fabsf(__fsub_rn(__fsub_rn(logit, largest), mean));
}

__device__ __forceinline__ bool kept(const Cut& cut, float logit, uint32_t token) {
    const uint32_t key = key_of(logit);
    return (key > cut.key || (key == cut.key && token <= cut.last)) && distance(logit, cut.largest, cut.mean) <= cut.reach;
}

// Which rounds of a pass of this warp over its chunk of `scaled` have a peak for which `wanted(key)` holds. A round is one
// load per lane, which is one segment per warp.
struct Rounds {
    uint32_t mask;

    template <class Wanted>
    __device__ __forceinline__ Rounds(const uint32_t* peaks, uint32_t begin, uint32_t end, Wanted wanted) {
        const uint32_t lane = threadIdx.x % 32, at = begin + (lane * CHUNK_THREADS / 32 + threadIdx.x / 32) * SEGMENT;
        mask = __ballot_sync(0xffffffffu, at < min(begin + CHUNK, end) && wanted(peaks[at / SEGMENT]));
    }
    __device__ __forceinline__ bool operator()(uint32_t round) const { return mask >> round & 1; }
};

}  // namespace quire
