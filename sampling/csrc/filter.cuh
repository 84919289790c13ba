// Membership in the set of tokens that the filters keep.
#pragma once

#include "numbers.cuh"

namespace quire {

// Distance of a logit from the mean, for typical_p.
__device__ __forceinline__ float distance(float logit, float largest, float mean) {
    return fabsf(__fsub_rn(__fsub_rn(logit, largest), mean));
}

__device__ __forceinline__ bool kept(const Cut& cut, float logit, uint32_t token) {
    const uint32_t key = key_of(logit);
    return (key > cut.key || (key == cut.key && token <= cut.last)) && distance(logit, cut.largest, cut.mean) <= cut.reach;
}

}  // namespace quire
