// Latent attention on tensor cores: a block of query rows against the latents of one partition, 32 tokens at a time. A latent is a
// token's key, and its first elements are the value, so each is read once and used twice.
//
// The loop, its order and its rules are those of tile.cuh, with two differences. A slot holds whole latents, which are multiplied as
// keys and then as values, while the next tile is in flight to the other slot. And a query row is too wide for registers, so the rows
// are in shared memory and each step over the elements loads its fragments.
//
//   slots    L0 | barrier, start L1 | L0 as keys | barrier | weights | barrier | L0 as values | barrier, start L2 | L1 as keys | ...
//
//   rows of a block   warps       sums of a warp   kernels
//   64                4 x 2       16 x 256         decode, where a multiprocessor has 164 KiB of shared memory
//   32                2 x 4       16 x 128         prefill there; decode of contexts that find no space for partial results
//   16                1 x 4       16 x 128         both where it has 100 KiB
//
// The sums of 64 rows leave no registers for those of the partitions before, so they are for one partition. The bits of a row are
// the same in all three.
#pragma once

#include "tile_rows.cuh"

namespace quire {

template <class T_, bool KV8_, int KEY_, int D_, int WM_, int WN_>
struct LatentShape {
    using T = T_;
    static constexpr bool KV8 = KV8_;
    static constexpr int D = D_, KEY = KEY_;  // elements of a value and of a key
    static constexpr int WM = WM_, WN = WN_, TILES = 1;
    static constexpr int THREADS = 32 * WM * WN;
    static constexpr int ROWS = 16 * WM;
    static constexpr int TOKENS = 32, PART = TOKENS;
    static constexpr int SCORES = TOKENS / WN / 8;
    static constexpr int SUMS = D / 16 / WN;
    static constexpr int PARTS = 1, ALL_PARTS = 1;
    static constexpr int SLOTS = 2;
    static constexpr bool SPARE = true;
    static constexpr bool FOLDS = WN == 4;  // has registers for sums of several partitions
    static_assert(SCORES == 1 || SCORES == 2, "keys are read 8 or 16 tokens at a time");
    static_assert(KEY % 32 == 0 && D % (16 * WN) == 0 && D <= KEY, "whole steps, and as many columns for each warp");

    using Element = std::conditional_t<KV8, uint8_t, T>;
    static constexpr int PITCH = KV8 ? (KEY / 16 | 1) * 16 : KEY + 8;  // as in TileShape
    using Slot = Element[PART][PITCH];

    struct alignas(16) Shared : RowScales<KV8, TOKENS> {
        Slot slots[SLOTS];
        T query[ROWS][KEY + 8];  // __half beside an 8-bit cache
        T weights[ROWS][TOKENS + 8];
        int64_t places[2][TOKENS];
        float maxima[WN][ROWS];
        float units[KV8 ? ROWS : 1];  // of query rows
    };
};

// Adds products of the query rows of a warp and the keys of its tokens to `scores`.
template <class Shape, uint32_t format>
__device__ __forceinline__ void add_scores(Format<format>, float (&scores)[Shape::SCORES][4],
                                           const typename Shape::Shared& shared, const typename Shape::Slot& keys) {
    using Factor = std::conditional_t<Shape::KV8, __half, typename Shape::T>;
    constexpr int STEP = 2 / Shape::SCORES;  // steps over the elements for which keys are read at once
    const uint32_t lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 / Shape::WN * 16;
    const auto* own = keys + threadIdx.x / 32 % Shape::WN * Shape::SCORES * 8;
#pragma unroll 4
    for (int k = 0; k < Shape::KEY / 16; k += STEP) {
        uint32_t key[4];  // of two products: two groups of tokens, or two steps
        const uint32_t token = Shape::SCORES == 2 ? lane / 16 * 8 : 0, element = Shape::SCORES == 2 ? 0 : lane / 16 * 16;
        if constexpr (Shape::KV8) {
            uint32_t bytes[2];
            const uint32_t second = lane / 8 % 2;
            ldmatrix(bytes, &own[lane % 8 + (Shape::SCORES == 2 ? second * 8 : 0)][(k + (Shape::SCORES == 2 ? 0 : second)) * 16]);
            widen_word<Factor>(format, bytes[0], key[0], key[1]);
            widen_word<Factor>(format, bytes[1], key[2], key[3]);
        } else {
            ldmatrix(key, &own[token + lane % 8][k * 16 + element + lane / 8 % 2 * 8]);
        }
#pragma unroll
        for (int step = 0; step < STEP; step++) {
            uint32_t query[4];
            ldmatrix(query, &shared.query[warp_row + lane % 16][(k + step) * 16 + lane / 16 * 8]);
            if constexpr (Shape::SCORES == 2) {
                mma_m16n8k16<Factor>(scores[0], query, {key[0], key[1]});
                mma_m16n8k16<Factor>(scores[Shape::SCORES - 1], query, {key[2], key[3]});
            } else {
                mma_m16n8k16<Factor>(scores[0], query, {key[2 * step], key[2 * step + 1]});
            }
        }
    }
}

// Adds the tokens `visible`, all in one partition, to `out`. The query rows are stored, and threads need not have passed a barrier
// since.
template <class Shape>
__device__ __forceinline__ void attend_latents(TileSums<Shape> (&out)[1], typename Shape::Shared& shared, const TileTask& task,
                                               RowPair& rows, const Visible& visible) {
    const uint32_t lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 / Shape::WN * 16;
    const uint32_t warp_column = threadIdx.x / 32 % Shape::WN;
    const bool half_weights = Shape::KV8 && task.args.kv_format != KV_INT8_ROWS;

    Transfer<Shape> transfer(shared, task, visible);
    uint32_t tile = transfer.tile;
    if (tile >= visible.end) {
        __syncthreads();
        return;
    }
    transfer.begin();
    if constexpr (Shape::KV8) {
#pragma unroll
        for (int r = 0; r < 2; r++) rows.unit[r] = shared.units[warp_row + lane / 4 + 8 * r];
    }
    for (uint32_t used = 0; tile < visible.end; used++) {
        const uint32_t next = transfer.tile;
        const TileScales<Shape> scales(shared, task.args.kv_format, used);
        const auto& latents = transfer.await(0);
        float scores[Shape::SCORES][4] = {};
        with_format<Shape::KV8>(task.args.kv_format, [&](auto format) { add_scores<Shape>(format, scores, shared, latents); });

        float max[2];
        finish_scores<Shape>(scores, task, rows, tile + warp_column * Shape::SCORES * 8, scales.keys);
        share_maxima<Shape>(max, shared, scores);
        __syncthreads();
        uint32_t weights[Shape::SCORES][2];
        make_weights<Shape>(weights, out[0], shared, scores, max, task.scoring.left(), half_weights);
        __syncthreads();
        with_format<Shape::KV8>(task.args.kv_format, [&](auto format) {
#pragma unroll 1  // two steps at once would spill
            for (int first = 0; first < Shape::TOKENS; first += 16) {
                uint32_t row[1][4];
                ldmatrix(row[0], &shared.weights[warp_row + lane % 16][first + lane / 16 * 8]);
                add_values<Shape>(format, out, row, &latents[first], scales.values, first);
            }
        });
        tile = next;
    }
}

// Computes what the rows see of a partition of the work list and stores the partial results, or merges all partitions and stores the
// output. All threads may reuse shared memory before and after.
template <class Shape>
__device__ __forceinline__ void compute_latent_rows(const AttentionArgs& args, typename Shape::Shared& shared,
                                                    const TileTask& task, TileRows<Shape>& tile, const Piece& piece) {
    const uint32_t first = max(tile.visible.first, piece.first), end = min(tile.visible.end, piece.end);
    if (piece.is_split() && first >= end) return;
    if (first < end) stage_query<Shape>(shared.query, shared.units, args, tile.rows[0]);
    SoftmaxState states[2];
    TileSums<Shape> of_tiles[1];
    TileSums<Shape>& out = of_tiles[0];
    [[maybe_unused]] float folded[Shape::FOLDS ? Shape::SUMS * 2 : 1][4] = {};
    out.clear();
    for (uint32_t start = first / PARTITION * PARTITION; start < end; start += PARTITION) {
        out.clear();
        attend_latents<Shape>(of_tiles, shared, task, tile.rows[0], Visible(max(first, start), min(end, start + PARTITION)));
        out.normalise(args.kv_format);
        if (piece.is_split()) {
            store_partials(args, out, tile, piece.partition);
            return;
        }
        const Factors factors[2] = {merge(states[0], out.state(0)), merge(states[1], out.state(1))};
#pragma unroll
        for (int i = 0; i < Shape::SUMS * 2; i++) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                float& sum = out.sums[i / 2][i % 2][c];
                if constexpr (Shape::FOLDS) sum = folded[i][c] = factors[c / 2].merge(folded[i][c], sum);
                else sum = factors[c / 2].merge(0.0f, sum);
            }
        }
    }
    store_output(args, out, states, tile.rows[0]);
}

}  // namespace quire
