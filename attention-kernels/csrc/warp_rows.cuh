// One warp's part of a partition for one query row and head: every WARPS-th chunk of 32 tokens.
//
// Two classes with one interface distribute a token's head over the lanes. VectorRows reads 16 bytes per lane and is
// compiled for each head size; GenericRows reads single elements, for any head size. Scores, weights and
// the running maximum share one implementation: lane i owns token i of a chunk, so each exp2 is computed once.
#pragma once

#include "rows.cuh"
#include "softmax.cuh"
#include "sparse.cuh"

namespace quire {

constexpr uint32_t ALL_LANES = 0xffffffff;
constexpr uint32_t WARPS = 4;  // per thread block of the decode kernel

// Properties of one query row and head that all warps of the block share.
struct Task {
    const AttentionArgs& args;
    const int32_t* table;
    uint32_t kv_head;
    int64_t head_offset;
    Visible visible;
    SparseHeads sparse;  // this head alone
    Scoring scoring;
    float slope;
    const uint32_t* chosen;

    __device__ __forceinline__ Task(const AttentionArgs& args, const Row& row, uint32_t head)
        : args(args),
          table(table_of(args, row.seq)),
          kv_head(head / (args.num_heads / args.num_kv_heads)),
          head_offset(kv_head * args.head_stride),
          visible(row.visible),
          sparse(args, head, 1, row.visible.end - 1),
          scoring(args, kv_head),
          slope(slope_of(args, head)),
          chosen(chosen_of(args, row)) {}
};

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int offset = 16; offset; offset /= 2) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, offset));
    return value;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int offset = 16; offset; offset /= 2) value = __fadd_rn(value, __shfl_xor_sync(ALL_LANES, value, offset));
    return value;
}

// LANES lanes hold a token, PER_LANE vectors each, so 32 / LANES tokens are read at once. Step `step` of group g reads
// token g * LANES + step of the chunk, which lane `step` of the group owns.
template <class T, bool KV8, int D>
struct VectorRows {
    using Element = T;
    static constexpr bool BYTES = KV8;
    static constexpr int MAX_HEAD = D;
    static constexpr int WIDTH = KV8 ? 16 : 8;
    static constexpr int VECTORS = D / WIDTH;
    static constexpr int LANES = VECTORS >= 32 ? 32 : VECTORS >= 16 ? 16 : VECTORS >= 8 ? 8 : VECTORS >= 4 ? 4 : 2;
    static constexpr int PER_LANE = (VECTORS + LANES - 1) / LANES;
    static constexpr int BATCH = LANES < 4 / PER_LANE ? LANES : 4 / PER_LANE;  // steps whose loads are in flight at once
    static constexpr int MIN_BLOCKS = KV8 && PER_LANE > 1 ? 3 : 4;  // per multiprocessor: what the registers allow

    float query[PER_LANE][WIDTH];
    float sums[PER_LANE][WIDTH];

    static __device__ __forceinline__ uint32_t value_dim(const AttentionArgs&) { return D; }
    // Returns the index of this lane's i-th vector of the head.
    static __device__ __forceinline__ int vector(int i) { return threadIdx.x % LANES + i * LANES; }

    __device__ __forceinline__ void load_query(const AttentionArgs&, const T* from) {
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
#pragma unroll
            for (int part = 0; part < WIDTH / 8; part++) {
                uint4 raw = make_uint4(0, 0, 0, 0);
                if (vector(i) < VECTORS) raw = *reinterpret_cast<const uint4*>(from + vector(i) * WIDTH + part * 8);
                float eight[8];
                widen<T>(KV_SAME, raw, eight);
#pragma unroll
                for (int e = 0; e < 8; e++) query[i][part * 8 + e] = eight[e];
            }
        }
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
#pragma unroll
            for (int e = 0; e < WIDTH; e++) sums[i][e] = 0.0f;
        }
    }
    __device__ __forceinline__ void rescale(float factor) {
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
#pragma unroll
            for (int e = 0; e < WIDTH; e++) sums[i][e] = __fmul_rn(sums[i][e], factor);
        }
    }

    // Loads the vectors of one token; zeros if its place is negative.
    static __device__ __forceinline__ void load(uint4 (&to)[PER_LANE], const void* cache, int64_t place) {
        const unsigned char* from = static_cast<const unsigned char*>(cache) + place * (KV8 ? 1 : 2);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const bool valid = place >= 0 && vector(i) < VECTORS;
            to[i] = valid ? *reinterpret_cast<const uint4*>(from + vector(i) * 16) : make_uint4(0, 0, 0, 0);
        }
    }

    // Calls `use(step, vectors)` for the vectors of each of a group's tokens. Each lane passes the place of its own.
    template <class Use>
    static __device__ __forceinline__ void each_token(const void* cache, int64_t place, Use use) {
#pragma unroll 1  // BATCH loads are in flight; more would take registers and so reduce occupancy
        for (int first = 0; first < LANES; first += BATCH) {
            uint4 raw[BATCH][PER_LANE];
#pragma unroll
            for (int b = 0; b < BATCH; b++) load(raw[b], cache, __shfl_sync(ALL_LANES, place, first + b, LANES));
#pragma unroll
            for (int b = 0; b < BATCH; b++) use(first + b, raw[b]);
        }
    }

    // Returns q·k of the token that this lane owns, which is stored at `place`.
    __device__ __forceinline__ float product(const Task& task, int64_t place) const {
        float mine = 0.0f;
        each_token(task.args.keys, place, [&](int step, const uint4 (&raw)[PER_LANE]) {
            float dot = 0.0f;
#pragma unroll
            for (int i = 0; i < PER_LANE; i++) {
                float key[WIDTH];
                widen<T>(task.args.kv_format, raw[i], key);
#pragma unroll
                for (int e = 0; e < WIDTH; e++) dot = __fmaf_rn(query[i][e], key[e], dot);
            }
#pragma unroll
            for (int offset = LANES / 2; offset; offset /= 2) dot = __fadd_rn(dot, __shfl_xor_sync(ALL_LANES, dot, offset));
            if (static_cast<int>(threadIdx.x % LANES) == step) mine = dot;
        });
        return mine;
    }

    // Adds the weighted values of the chunk. Each lane passes the weight and place of its token.
    __device__ __forceinline__ void accumulate(const Task& task, int64_t place, float weight) {
        each_token(task.args.values, place, [&](int step, const uint4 (&raw)[PER_LANE]) {
            const float factor = __shfl_sync(ALL_LANES, weight, step, LANES);
#pragma unroll
            for (int i = 0; i < PER_LANE; i++) {
                float value[WIDTH];
                widen<T>(task.args.kv_format, raw[i], value);
#pragma unroll
                for (int e = 0; e < WIDTH; e++) sums[i][e] = __fmaf_rn(factor, value[e], sums[i][e]);
            }
        });
    }

    // Stores the sums over all lanes to `to[0..D]` in shared memory.
    __device__ __forceinline__ void store_sums(const AttentionArgs&, float* to) {
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
#pragma unroll
            for (int e = 0; e < WIDTH; e++) {
#pragma unroll
                for (int offset = 16; offset >= LANES; offset /= 2) {
                    sums[i][e] = __fadd_rn(sums[i][e], __shfl_xor_sync(ALL_LANES, sums[i][e], offset));
                }
                if (threadIdx.x % 32 < LANES && vector(i) < VECTORS) to[vector(i) * WIDTH + e] = sums[i][e];
            }
        }
    }
};

// All lanes hold one token; lane i has the elements i, i + 32, …. The cache has elements of T or of any 8-bit format.
template <class T, int MAX_HEAD_>
struct GenericRows {
    using Element = T;
    static constexpr bool BYTES = true;  // the format is known at run time
    static constexpr int MAX_HEAD = MAX_HEAD_;
    static constexpr int PER_LANE = MAX_HEAD / 32;

    float query[PER_LANE];
    float sums[PER_LANE];

    static __device__ __forceinline__ uint32_t value_dim(const AttentionArgs& args) { return args.value_dim; }

    __device__ __forceinline__ void load_query(const AttentionArgs& args, const T* from) {
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const uint32_t at = threadIdx.x % 32 + 32 * i;
            query[i] = at < args.head_dim ? to_float(from[at]) : 0.0f;
        }
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) sums[i] = 0.0f;
    }

    __device__ __forceinline__ void rescale(float factor) {
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) sums[i] = __fmul_rn(sums[i], factor);
    }

    // Loads the first `dim` elements of a key or value.
    static __device__ __forceinline__ void load(float (&to)[PER_LANE], const AttentionArgs& args, const void* cache,
                                                int64_t place, uint32_t dim) {
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const uint32_t at = threadIdx.x % 32 + 32 * i;
            if (at >= dim) to[i] = 0.0f;
            else if (args.kv_format == KV_SAME) to[i] = to_float(static_cast<const T*>(cache)[place + at]);
            else to[i] = from_byte(args.kv_format, static_cast<const uint8_t*>(cache)[place + at]);
        }
    }

    __device__ __forceinline__ float product(const Task& task, int64_t place) const {
        float mine = 0.0f;
        for (int step = 0; step < 32; step++) {
            const int64_t at = __shfl_sync(ALL_LANES, place, step);
            if (at < 0) continue;
            float key[PER_LANE], dot = 0.0f;
            load(key, task.args, task.args.keys, at, task.args.head_dim);
#pragma unroll
            for (int i = 0; i < PER_LANE; i++) dot = __fmaf_rn(query[i], key[i], dot);
            dot = warp_sum(dot);
            if (static_cast<int>(threadIdx.x % 32) == step) mine = dot;
        }
        return mine;
    }

    __device__ __forceinline__ void accumulate(const Task& task, int64_t place, float weight) {
        for (int step = 0; step < 32; step++) {
            const int64_t at = __shfl_sync(ALL_LANES, place, step);
            const float factor = __shfl_sync(ALL_LANES, weight, step);
            if (at < 0) continue;
            float value[PER_LANE];
            load(value, task.args, task.args.values, at, task.args.value_dim);
#pragma unroll
            for (int i = 0; i < PER_LANE; i++) sums[i] = __fmaf_rn(factor, value[i], sums[i]);
        }
    }

    __device__ __forceinline__ void store_sums(const AttentionArgs& args, float* to) {
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const uint32_t at = threadIdx.x % 32 + 32 * i;
            if (at < args.value_dim) to[at] = sums[i];
        }
    }
};

// Processes this warp's chunks of the tokens `start` to `end` - 1 of a partition. Leaves their weighted values in `rows.sums` of the
// lanes and returns the softmax state, which is the same in all lanes.
template <class Rows>
__device__ __forceinline__ SoftmaxState attend(Rows& rows, const Task& task, uint32_t start, uint32_t end) {
    const uint32_t lane = threadIdx.x % 32, first = task.visible.first;
    const bool is_sparse = task.sparse.heads;
    SoftmaxState state;
    rows.clear();
    for (uint32_t chunk = start + threadIdx.x / 32 * 32; chunk < end; chunk += WARPS * 32) {
        if (chunk + 32 <= first) continue;
        const uint32_t token = chunk + lane;
        const bool visible = token >= first && token < end && task.sparse.see_token(task.args, token);
        const uint32_t stored = task.chosen && visible ? task.chosen[token] : token;
        if (is_sparse && !__any_sync(ALL_LANES, visible)) continue;
        const int64_t place = visible ? task.head_offset + place_of(task.args, task.table, stored) : -1;
        float k_scale = 1.0f, v_scale = 1.0f;
        if (Rows::BYTES && task.args.kv_format == KV_INT8_ROWS && visible) {
            const int64_t at = task.head_offset + scale_place_of(task.args, task.table, stored);
            k_scale = float_at(task.args.keys, at);
            v_scale = float_at(task.args.values, at);
        }
        float score = task.scoring.scaled(__fmul_rn(rows.product(task, place), k_scale));
        if (task.scoring.cap != 0.0f) score = task.scoring.capped(score);
        score = Scoring::biased(score, task.slope, static_cast<float>(token) - static_cast<float>(task.visible.end - 1));
        if (!visible) score = -INFINITY;
        const float max = fmaxf(state.max, warp_max(score));
        const float rescale = weight(state.max, base_of(max)), mine = weight(score, base_of(max));
        state.max = max;
        state.sum = __fmaf_rn(state.sum, rescale, mine);
        rows.rescale(rescale);
        rows.accumulate(task, place, __fmul_rn(mine, v_scale));
    }
    state.sum = warp_sum(state.sum);
    return state;
}

}  // namespace quire
