// Attention of one row to the rows of its sequence, before and behind it, without a cache (encoders): entries attend_both_<type>, grid
// (rows, query heads), 128 threads.
//
// The warps of a block share the keys of a row: each takes every fourth and keeps a softmax of its own (Milakov & Gimelshein, 2018);
// the four are merged in order. So the result of a row depends on its sequence alone.

#include <quire/export.cuh>

#include "vectors.cuh"

namespace quire {

constexpr uint32_t BOTH_WARPS = 4;
constexpr uint32_t BOTH_MOST_DIM = 512;
constexpr uint32_t BOTH_PIECES = BOTH_MOST_DIM / 32;

struct BothShape {
    uint32_t stride;  // elements between rows, which begin with queries, keys and values
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t head_dim;
    uint32_t window;  // a row sees those less than so many positions away; 0: all
    uint32_t reach;   // greatest distance with a bias of its own
    float scale;
    float soft_cap;  // 0: none
};

// ends: [rows], the row behind the last of each row's sequence. positions: [rows], within the sequence. by_distance: [heads, 2 reach + 1]
// or null; slopes: [heads] or null. out: [rows, heads, head_dim].
template <class T>
__device__ __forceinline__ void attend_both(const T* qkv, const uint32_t* positions, const uint32_t* ends,
                                            const float* by_distance, const float* slopes, T* out, const BothShape& shape) {
    __shared__ float values[BOTH_WARPS][BOTH_MOST_DIM];
    __shared__ float greatests[BOTH_WARPS], totals[BOTH_WARPS];
    const uint32_t row = blockIdx.x, head = blockIdx.y, dim = shape.head_dim, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t of_group = head / (shape.heads / shape.kv_heads) * dim;
    uint32_t from = row - positions[row], to = ends[row];
    if (shape.window > 0) {
        from = max(from + shape.window, row + 1) - shape.window;
        to = min(to, row + shape.window);
    }
    const T* query = qkv + static_cast<int64_t>(row) * shape.stride + head * dim;
    const T* keys = qkv + shape.heads * dim + of_group;
    const T* of_values = keys + shape.kv_heads * dim;
    float q[BOTH_PIECES], sums[BOTH_PIECES];
#pragma unroll
    for (uint32_t i = 0; i < BOTH_PIECES; i++) {
        q[i] = lane + 32 * i < dim ? to_float(query[lane + 32 * i]) : 0.0f;
        sums[i] = 0.0f;
    }
    float greatest = -INFINITY, total = 0.0f;
    for (uint32_t at = from + warp; at < to; at += BOTH_WARPS) {
        const int64_t start = static_cast<int64_t>(at) * shape.stride;
        float dot = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < BOTH_PIECES; i++) {
            if (lane + 32 * i < dim) dot += q[i] * to_float(keys[start + lane + 32 * i]);
        }
        float score = sum_over(dot, 32) * shape.scale;
        if (shape.soft_cap > 0.0f) score = shape.soft_cap * tanhf(score / shape.soft_cap);
        if (by_distance != nullptr) {
            const uint32_t behind = max(at + shape.reach, row) - row;
            score += by_distance[head * (2 * shape.reach + 1) + min(behind, 2 * shape.reach)];
        } else if (slopes != nullptr) {
            score -= slopes[head] * static_cast<float>(at > row ? at - row : row - at);
        }
        const float next = fmaxf(greatest, score);
        const float kept = expf(greatest - next), weight = expf(score - next);
        greatest = next;
        total = total * kept + weight;
#pragma unroll
        for (uint32_t i = 0; i < BOTH_PIECES; i++) {
            if (lane + 32 * i < dim) sums[i] = sums[i] * kept + weight * to_float(of_values[start + lane + 32 * i]);
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < BOTH_PIECES; i++) {
        if (lane + 32 * i < dim) values[warp][lane + 32 * i] = sums[i];
    }
    if (lane == 0) {
        greatests[warp] = greatest;
        totals[warp] = total;
    }
    __syncthreads();
    float all = greatests[0];
#pragma unroll
    for (uint32_t w = 1; w < BOTH_WARPS; w++) all = fmaxf(all, greatests[w]);
    float factors[BOTH_WARPS], sum = 0.0f;
#pragma unroll
    for (uint32_t w = 0; w < BOTH_WARPS; w++) {
        // A warp without a key has -inf: its factor is 0.
        factors[w] = expf(greatests[w] - all);
        sum += factors[w] * totals[w];
    }
    out += (static_cast<int64_t>(row) * shape.heads + head) * dim;
    for (uint32_t e = threadIdx.x; e < dim; e += 32 * BOTH_WARPS) {
        float value = 0.0f;
#pragma unroll
        for (uint32_t w = 0; w < BOTH_WARPS; w++) value += factors[w] * values[w][e];
        out[e] = from_float<T>(value / sum);
    }
}

}  // namespace quire

#define ATTEND_BOTH(type, T)                                                                                            \
    extern "C" __global__ void __launch_bounds__(32 * quire::BOTH_WARPS)                                                \
        attend_both_##type(const void* qkv, const uint32_t* positions, const uint32_t* ends, const float* by_distance,  \
                           const float* slopes, void* out, const quire::BothShape shape) {                              \
        quire::wait_for_launches();                                                                                     \
        quire::attend_both<T>(static_cast<const T*>(qkv), positions, ends, by_distance, slopes, static_cast<T*>(out), shape); \
    }                                                                                                                   \
    QUIRE_EXPORT_OVERLAPPED(attend_both_##type, 0);

ATTEND_BOTH(f16, __half)
ATTEND_BOTH(bf16, __nv_bfloat16)
ATTEND_BOTH(f32, float)
