// The choice of an indexer ("DeepSeek-V3.2", DeepSeek-AI, 2025): score_tokens_<type> scores the tokens that a query row sees, and
// choose_tokens lists the best of them. The kernels of attention to the list are those of paged_generic.cu and paged_latent.cu.
//
// score_tokens: grid (blocks of a row, rows of the pass), 128 threads. A block takes every gridDim.x-th 32 tokens: a thread multiplies
// a token's key with every fourth query of the indexer, then a warp adds the products of the heads in order. Products and sums are
// those of a CPU (src/cpu/chosen.rs), in its order, so equal inputs give equal scores, and equal scores equal choices.
//
// choose_tokens: grid (rows of the pass), 256 threads. Scores become numbers that have their order, and of these the least that is
// chosen is found byte by byte, from the highest on, with a histogram each time. Then the block goes over the tokens once more and writes
// those that are above it, and the first of those that are equal to it, in the order of their positions.

#include <quire/export.cuh>

#include "chosen_args.cuh"
#include "convert.cuh"
#include "rows.cuh"

namespace quire {

constexpr uint32_t SCORE_THREADS = 128, SCORE_TOKENS = 32, SCORE_WARPS = SCORE_THREADS / 32;
constexpr uint32_t CHOOSE_THREADS = 256, BINS = 256;
constexpr uint32_t LANES = 16;  // of the sums of a product on a CPU

// Shared memory of score_tokens, in floats: queries, keys, and the products of the heads.
struct ScoreMemory {
    uint32_t pitch;  // of a key: odd, so that the threads of a warp read different banks
    float *queries, *keys, *products;

    __device__ __forceinline__ ScoreMemory(float* memory, const IndexShape& index) : pitch(index.dim | 1) {
        queries = memory;
        keys = queries + index.heads * index.dim;
        products = keys + SCORE_TOKENS * pitch;
    }
};

// Returns an element of the key of the token at `place`.
template <class T>
__device__ __forceinline__ float key_element(const AttentionArgs& args, int64_t place, uint32_t element, float scale) {
    if (args.kv_format == KV_SAME) return to_float(static_cast<const T*>(args.keys)[place + element]);
    return __fmul_rn(from_byte(args.kv_format, static_cast<const uint8_t*>(args.keys)[place + element]), scale);
}

// A product of vectors: sixteen sums that are added at the end, then the elements that are left.
__device__ __forceinline__ float index_product(const float* query, const float* key, uint32_t dim) {
    float sums[LANES] = {};
    const uint32_t whole = dim / LANES * LANES;
    for (uint32_t d = 0; d < whole; d += LANES) {
#pragma unroll
        for (uint32_t i = 0; i < LANES; i++) sums[i] = __fadd_rn(sums[i], __fmul_rn(query[d + i], key[d + i]));
    }
    float sum = -0.0f, tail = -0.0f;
#pragma unroll
    for (uint32_t i = 0; i < LANES; i++) sum = __fadd_rn(sum, sums[i]);
    for (uint32_t d = whole; d < dim; d++) tail = __fadd_rn(tail, __fmul_rn(query[d], key[d]));
    return __fadd_rn(sum, tail);
}

template <class T>
__device__ __forceinline__ void score_tokens(const AttentionArgs& args, const void* queries, const void* weights, float* scores,
                                             const IndexShape& index, float* memory) {
    const Row row = Row::nth(args, index.first_row + blockIdx.y);
    if (!row.exists || row.visible.end <= index.most || blockIdx.x * SCORE_TOKENS >= row.visible.end) return;
    const ScoreMemory shared(memory, index);
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, all = index.heads * index.dim;
    const T* own = static_cast<const T*>(queries) + static_cast<int64_t>(row.index) * all;
    const T* factors = static_cast<const T*>(weights) + static_cast<int64_t>(row.index) * index.heads;
    const int32_t* table = table_of(args, row.seq);
    scores += static_cast<int64_t>(blockIdx.y) * index.stride;
    for (uint32_t i = threadIdx.x; i < all; i += SCORE_THREADS) shared.queries[i] = to_float(own[i]);
    for (uint32_t first = blockIdx.x * SCORE_TOKENS; first < row.visible.end; first += gridDim.x * SCORE_TOKENS) {
        for (uint32_t t = warp; t < SCORE_TOKENS; t += SCORE_WARPS) {
            const uint32_t token = first + t;
            if (token >= row.visible.end) break;
            const int64_t place = place_of(args, table, token) + index.first;
            const float given = args.k_scales ? args.k_scales[0] : 1.0f;
            const float scale =
                args.kv_format == KV_INT8_ROWS ? float_at(args.keys, scale_place_of(args, table, token)) : given;
            for (uint32_t d = lane; d < index.dim; d += 32) {
                shared.keys[t * shared.pitch + d] = key_element<T>(args, place, d, scale);
            }
        }
        __syncthreads();
        const float* key = shared.keys + lane * shared.pitch;
        if (first + lane < row.visible.end) {
            for (uint32_t h = warp; h < index.heads; h += SCORE_WARPS) {
                const float product = fmaxf(index_product(shared.queries + h * index.dim, key, index.dim), 0.0f);
                shared.products[h * SCORE_TOKENS + lane] = __fmul_rn(to_float(factors[h]), product);
            }
        }
        __syncthreads();
        if (warp == 0 && first + lane < row.visible.end) {
            float score = -0.0f;
            for (uint32_t h = 0; h < index.heads; h++) score = __fadd_rn(score, shared.products[h * SCORE_TOKENS + lane]);
            scores[first + lane] = score;
        }
    }
}

// Returns a number that has the order of the scores: NaN with a sign first, then -infinity, ... -0, 0, ... infinity, NaN.
__device__ __forceinline__ uint32_t order_of(float score) {
    const uint32_t word = bits<uint32_t>(score);
    return word ^ (word >> 31 ? 0xffffffff : 0x80000000);
}

struct ChooseShared {
    uint32_t bins[BINS];
    uint32_t least, ties;  // the bits of the least chosen that are known, and how many are chosen of those that have them
    uint2 of_warp[CHOOSE_THREADS / 32];
};

// Finds the least chosen of the scores of `tokens` tokens, and the number of chosen tokens with that score.
__device__ __forceinline__ void find_least(ChooseShared& shared, const float* scores, uint32_t tokens, uint32_t most) {
    if (threadIdx.x == 0) shared.least = 0, shared.ties = most;
#pragma unroll 1
    for (uint32_t shift = 32; shift > 0; shift -= 8) {
        shared.bins[threadIdx.x] = 0;
        __syncthreads();
        const uint32_t least = shared.least;
        for (uint32_t i = threadIdx.x; i < tokens; i += CHOOSE_THREADS) {
            const uint32_t order = order_of(scores[i]);
            const bool is_like = shift == 32 || (order ^ least) >> shift == 0;
            if (is_like) atomicAdd(&shared.bins[order >> (shift - 8) & (BINS - 1)], 1u);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            uint32_t left = shared.ties, bin = BINS - 1;
            while (shared.bins[bin] < left) left -= shared.bins[bin--];
            shared.least |= bin << (shift - 8);
            shared.ties = left;
        }
        __syncthreads();
    }
}

__device__ __forceinline__ void choose_tokens(const AttentionArgs& args, const float* scores, uint32_t* chosen,
                                              const IndexShape& index) {
    __shared__ ChooseShared shared;
    const Row row = Row::nth(args, index.first_row + blockIdx.x);
    if (!row.exists) return;
    const uint32_t tokens = row.visible.end, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    chosen += static_cast<int64_t>(row.index) * index.most;
    if (tokens <= index.most) {
        for (uint32_t i = threadIdx.x; i < tokens; i += CHOOSE_THREADS) chosen[i] = i;
        return;
    }
    scores += static_cast<int64_t>(blockIdx.x) * index.stride;
    find_least(shared, scores, tokens, index.most);
    const uint32_t least = shared.least, ties = shared.ties, before = (1u << lane) - 1;
    uint32_t above = 0, equal = 0;  // of the tokens before `first`
    for (uint32_t first = 0; first < tokens; first += CHOOSE_THREADS) {
        const uint32_t token = first + threadIdx.x;
        const uint32_t order = token < tokens ? order_of(scores[token]) : 0;
        const uint32_t are_above = __ballot_sync(0xffffffff, token < tokens && order > least);
        const uint32_t are_equal = __ballot_sync(0xffffffff, token < tokens && order == least);
        if (lane == 0) shared.of_warp[warp] = make_uint2(__popc(are_above), __popc(are_equal));
        __syncthreads();
        uint32_t above_before = above + __popc(are_above & before), equal_before = equal + __popc(are_equal & before);
#pragma unroll
        for (uint32_t w = 0; w < CHOOSE_THREADS / 32; w++) {
            const uint2 counts = shared.of_warp[w];
            if (w < warp) above_before += counts.x, equal_before += counts.y;
            above += counts.x, equal += counts.y;
        }
        const bool is_chosen = are_above >> lane & 1 || (are_equal >> lane & 1 && equal_before < ties);
        if (is_chosen) chosen[above_before + min(equal_before, ties)] = token;
        __syncthreads();
    }
}

}  // namespace quire

#define SCORE_TOKENS_OF(name, T)                                                                                            \
    extern "C" __global__ void __launch_bounds__(quire::SCORE_THREADS)                                                      \
        name(QUIRE_ATTENTION_PARAMETERS, const void* queries, const void* weights, float* scores,                          \
             const quire::IndexShape index) {                                                                               \
        quire::wait_for_launches();                                                                                         \
        extern __shared__ __align__(16) unsigned char smem[];                                                               \
        quire::score_tokens<T>(QUIRE_ATTENTION_ARGS, queries, weights, scores, index, reinterpret_cast<float*>(smem));      \
    }                                                                                                                       \
    QUIRE_EXPORT_TILED(name, 0, quire::SCORE_THREADS, quire::SCORE_TOKENS);

SCORE_TOKENS_OF(score_tokens_f16, __half)
SCORE_TOKENS_OF(score_tokens_bf16, __nv_bfloat16)
SCORE_TOKENS_OF(score_tokens_f32, float)

extern "C" __global__ void __launch_bounds__(quire::CHOOSE_THREADS)
    choose_tokens(QUIRE_ATTENTION_PARAMETERS, const float* scores, uint32_t* chosen, const quire::IndexShape index) {
    quire::wait_for_launches();
    quire::choose_tokens(QUIRE_ATTENTION_ARGS, scores, chosen, index);
}
QUIRE_EXPORT_TILED(choose_tokens, 0, quire::CHOOSE_THREADS, 1);
