// What the tile loop computes with: the shape of a block and its shared memory, the rows of a lane, their sums, and the KV head that
// a block reads. tile.cuh describes the loop.
#pragma once

#include <quire/ptx.cuh>

#include "rows.cuh"
#include "softmax.cuh"
#include "sparse.cuh"

namespace quire {

// Weights of f16 are multiplied by 2 to this power, and those that are multiplied by scales of values by this factor: a product with
// a row's greatest magnitude fits T where the row did.
constexpr float HALF_WEIGHTS = 15.0f, WEIGHT_SCALE = 64.0f;

// Scales of the tokens of the tiles that are in flight, in use, or looked up, for caches that may have them.
constexpr uint32_t SCALED_TILES = 4;
template <bool KV8, int TOKENS>
struct RowScales {};
template <int TOKENS>
struct RowScales<true, TOKENS> {
    float key_scales[SCALED_TILES][TOKENS];
    float value_scales[SCALED_TILES][TOKENS];
};

// The two query rows of a lane: lane / 4, and 8 further down.
struct RowPair {
    static constexpr uint32_t NONE = 0xffffffff;

    uint32_t index[2] = {NONE, NONE};  // row * num_heads + head of the output
    uint32_t first[2] = {0, 0};
    uint32_t end[2] = {0, 0};          // of what the row sees; its own position + 1
    float unit[2] = {1.0f, 1.0f};      // of its loaded query, if the cache has 8 bits

    __device__ __forceinline__ void set(int i, const AttentionArgs& args, uint32_t row, uint32_t head,
                                        const Visible& visible) {
        index[i] = row * args.num_heads + head;
        first[i] = visible.first;
        end[i] = visible.end;
    }
};

// Query rows in shared memory, and what belongs to them. One tile has them in registers.
template <class T, int TILES, int ROWS, int PITCH>
struct QueryRows {
    T query[TILES][ROWS][PITCH];  // __half beside an 8-bit cache
    uint2 visible[TILES][ROWS];
    uint32_t index[TILES][ROWS];
    float units[TILES][ROWS];

    // Stores the rows of a lane, which are `row` and 8 further down. Four lanes have them; one stores.
    __device__ __forceinline__ void set_rows(int tile, uint32_t row, const RowPair& rows) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            visible[tile][row + 8 * r] = make_uint2(rows.first[r], rows.end[r]);
            index[tile][row + 8 * r] = rows.index[r];
        }
    }
    __device__ __forceinline__ RowPair rows(int tile, uint32_t row, bool has_units) const {
        RowPair rows;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint2 seen = visible[tile][row + 8 * r];
            rows.first[r] = seen.x;
            rows.end[r] = seen.y;
            rows.index[r] = index[tile][row + 8 * r];
            if (has_units) rows.unit[r] = units[tile][row + 8 * r];
        }
        return rows;
    }
};
template <class T, int ROWS, int PITCH>
struct QueryRows<T, 1, ROWS, PITCH> {};

template <class T_, bool KV8_, int D_, int WM_, int WN_, int TILES_ = 1>
struct TileShape {
    using T = T_;
    static constexpr bool KV8 = KV8_;
    static constexpr int D = D_, KEY = D_;  // elements of a value and of a key
    static constexpr int WM = WM_, WN = WN_;
    static constexpr int THREADS = 32 * WM * WN;
    static constexpr int TILES = TILES_;                      // of ROWS rows, with 16 of each for a warp
    static constexpr int ROWS = 16 * WM;
    static constexpr int TOKENS = D <= 128 ? 64 : 32;
    static constexpr int SCORES = TOKENS / WN / 8;            // 8-token columns of scores of a warp
    static constexpr int SUMS = (D / 16 + WN - 1) / WN;       // 16-element columns of sums of a warp
    static constexpr bool HALVES = WN == 1 && TILES == 1;
    static constexpr int PARTS = HALVES ? 2 : 1, ALL_PARTS = 2 * PARTS;  // of the keys, and with the values
    static constexpr int SLOTS = HALVES ? 5 : KV8 ? 3 : 2;
    static constexpr bool SPARE = SLOTS > ALL_PARTS;          // a slot is free while the parts of a tile are in flight or in use
    static constexpr int PART = TOKENS / PARTS;               // tokens of a part
    static_assert(TILES == 1 || WN == 1, "warps that share rows exchange the weights of one tile");
    static_assert(SCORES % (2 * PARTS) == 0 && PARTITION % TOKENS == 0, "tiles fill partitions, keys are read 16 tokens at a time");

    // Elements of the cache. Rows are an odd multiple of 16 bytes, so that the eight rows of an ldmatrix are in different banks.
    using Element = std::conditional_t<KV8, uint8_t, T>;
    static constexpr int PITCH = KV8 ? (D / 16 | 1) * 16 : D + 8;
    using Slot = Element[PART][PITCH];

    struct alignas(16) Shared : RowScales<KV8, TOKENS>, QueryRows<T, TILES, ROWS, D + 8> {
        Slot slots[SLOTS];
        T weights[WN > 1 ? ROWS : 1][TOKENS + 8];
        int64_t places[2][TOKENS];
        float maxima[WN][ROWS];
    };
};

// The power of 2 that a query row is divided by beside an 8-bit cache, so that its greatest magnitude is below 2^15. Infinity remains
// infinity.
struct HalfUnit {
    float unit, factor;

    __device__ __forceinline__ explicit HalfUnit(float greatest) {
        const uint32_t exponent = min(max(bits<uint32_t>(greatest) >> 23, 15u), 253u);
        factor = bits<float>((268 - exponent) << 23);
        unit = bits<float>((exponent - 14) << 23);
    }
    __device__ __forceinline__ uint32_t narrow(float low, float high) const {
        return Pair<__half>::narrow(__fmul_rn(low, factor), __fmul_rn(high, factor));
    }
};

// Sums of a warp's rows in a partition, in the layout of mma's d.
template <class Shape>
struct TileSums {
    float sums[Shape::SUMS][2][4];
    float weights[4];  // [0] and [2]: the sum of the weights of the lane's rows
    float max[2];

    __device__ __forceinline__ void clear() {
        max[0] = max[1] = -INFINITY;
        each([](float&, int) { return 0.0f; });
    }
    __device__ __forceinline__ void rescale(float upper, float lower) {
        each([=](float sum, int row) { return __fmul_rn(sum, row ? lower : upper); });
    }
    // Replaces every number by `change` of it and of its row, 0 or 1.
    template <class Change>
    __device__ __forceinline__ void each(Change change) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            weights[c] = change(weights[c], c / 2);
#pragma unroll
            for (int i = 0; i < Shape::SUMS; i++) {
#pragma unroll
                for (int j = 0; j < 2; j++) sums[i][j][c] = change(sums[i][j][c], c / 2);
            }
        }
    }
    __device__ __forceinline__ SoftmaxState state(int row) const {
        SoftmaxState state;
        state.max = max[row];
        state.sum = weights[2 * row];
        return state;
    }

    // Takes back the factors of weights and of what they multiply, once a partition is complete.
    __device__ __forceinline__ void normalise(uint32_t format) {
        if constexpr (!Shape::KV8) return;
        const bool has_scales = format == KV_INT8_ROWS;
        const float of_weights = has_scales ? 1.0f : exp2_approx(-HALF_WEIGHTS);
        const float of_sums = has_scales ? 1.0f / WEIGHT_SCALE : of_weights;
#pragma unroll
        for (int i = 0; i < Shape::SUMS * 8; i++) sums[i / 8][i / 4 % 2][i % 4] *= of_sums;
        weights[0] *= of_weights;
        weights[2] *= of_weights;
    }

    // Returns pair j (0 or 1) of a row's sums of columns i. It is that of elements column(i, j) and the next.
    __device__ __forceinline__ float2 pair(int i, int j, int row) const {
        if constexpr (Shape::KV8) return {sums[i][0][2 * row + j], sums[i][1][2 * row + j]};
        else return {sums[i][j][2 * row], sums[i][j][2 * row + 1]};
    }
    // Returns an element of the head; D or more: there is none.
    static __device__ __forceinline__ uint32_t column(int i, int j) {
        const uint32_t first = (threadIdx.x / 32 % Shape::WN * Shape::SUMS + i) * 16, c = threadIdx.x % 4;
        return first + (Shape::KV8 ? 4 * c + 2 * j : 8 * j + 2 * c);
    }
};

// The KV head of one sequence, which a block reads.
struct TileTask {
    const AttentionArgs& args;
    const int32_t* table;
    uint32_t kv_head;
    int64_t head_offset;
    SparseHeads sparse;  // the heads of the tile's rows
    Scoring scoring;
    const uint32_t* chosen = nullptr;  // as chosen_of

    __device__ __forceinline__ TileTask(const AttentionArgs& args, uint32_t seq, uint32_t kv_head, const SparseHeads& sparse)
        : args(args),
          table(table_of(args, seq)),
          kv_head(kv_head),
          head_offset(kv_head * args.head_stride),
          sparse(sparse),
          scoring(args, kv_head) {}

    // Returns the first token of the tile of the first token from `token` on that some row sees; from `end` on: there is none.
    template <uint32_t TOKENS>
    __device__ __forceinline__ uint32_t tile_from(uint32_t token, uint32_t end) const {
        return sparse.next(args, token, end) / TOKENS * TOKENS;
    }
};

}  // namespace quire
