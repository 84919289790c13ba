// The tile loop on tensor cores: a block of query rows against the tokens of one partition, 64 (or 32) tokens at a time.
//
// A query row here is one head of one token. The rows of a block belong to one KV head, so each key and value is read once
// for all of them. The warps of a block form a grid, WM over the rows (16 each) and WN over the columns. A warp of prefill_128 has
// 16 rows of each of TILES = 2 such grids: it loads a fragment of keys or values once for both, and queries are in shared memory.
//
//               tokens (scores), then elements of the head (sums)
//             +---------------+---------------+
//   16 rows   | warp 0        | warp 1        |     WM = 2, WN = 2
//   16 rows   | warp 2        | warp 3        |
//             +---------------+---------------+
//
// With WN > 1 the warps of a row exchange maxima and weights through shared memory. The order of operations is the same
// for every WM and WN: a score or a sum is one chain of products, a maximum has no order, and the sum of the weights is
// one more column, of ones, in the second product. Tiles start at multiples of their size. So a row's bits depend neither
// on other rows nor on the shape, and paged_gqa and paged_prefill agree.
//
// Keys and values of a tile pass through shared memory in PARTS parts each, keys before values, in a ring of slots. The parts
// of a whole tile are in flight (cp.async) or in use at any time: when one is used up, the same part of the next tile starts.
// A spare slot lets that happen before the part is used, after the barrier that it waits for anyway:
//
//   2 slots (decode)          K0 V0 | use K0 | barrier, start K1 | use V0 | barrier, start V1 | use K1 | ...
//   3 slots (decode, 8 bits)  K0 V0 | start K1, use K0 | start V1, use V0 | start K2, use K1 | ...
//   2 or 3 slots (prefill_128)  as decode
//   5 slots (paged_prefill)   K0a K0b V0a V0b | start K1a, use K0a | start K1b, use K0b | start V1a, use V0a | ...
//
// Slots of paged_prefill are halves of a tile, so that two blocks of heads of 128 fit a multiprocessor of sm_80.
//
// The bytes of an 8-bit cache stay bytes in the slots. Registers of a fragment are widened after ldmatrix, which sees two bytes as
// one number of 16 bits: a lane gets bytes 4 c to 4 c + 3 of a key, c = lane % 4, or elements 2 g and 2 g + 1 of two values,
// g = lane / 4. `widen_word` makes pairs of bytes 0 and 2, and of 1 and 3:
//
//   keys     products add the elements of 16 in an order of their own, which the query has too (load_query)
//   values   of 16 columns, the first product has the even ones and the second the odd ones (TileSums::column)
//
// Bytes become f16 whatever T is, because that takes fewest instructions. A query row is multiplied by a power of 2 that brings its
// greatest element near the greatest of f16, and weights by 2^15, so nothing that matters is lost. Only where each value has a
// scale of its own, which multiplies its weight, weights and values are of T.
#pragma once

#include "tile_transfer.cuh"

namespace quire {

// Returns the first element of a query row and head.
template <class T>
__device__ __forceinline__ const T* query_at(const AttentionArgs& args, uint32_t index) {
    const int64_t row = index / args.num_heads, head = index % args.num_heads;
    return static_cast<const T*>(args.query) + row * args.query_stride + head * args.query_head;
}

// Copies 16 query rows of each warp to shared memory; zeros for absent rows. Warps that share rows copy a part each. Beside an 8-bit
// cache they become f16, and `units` gets their units. All threads must pass a barrier before they are used.
template <class Shape, int PITCH>
__device__ __forceinline__ void stage_query(typename Shape::T (*to)[PITCH], [[maybe_unused]] float* units,
                                            const AttentionArgs& args, const RowPair& rows) {
    using T = typename Shape::T;
    constexpr uint32_t ROWS = 16 / Shape::WN, VECTORS = Shape::KEY / 8;
    const uint32_t lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 / Shape::WN * 16;
    const uint32_t first = threadIdx.x / 32 % Shape::WN * ROWS;
    const auto index_of = [&](uint32_t row) {
        const uint32_t upper = __shfl_sync(0xffffffff, rows.index[0], row % 8 * 4);
        const uint32_t lower = __shfl_sync(0xffffffff, rows.index[1], row % 8 * 4);
        return row < 8 ? upper : lower;
    };
    if constexpr (!Shape::KV8) {
#pragma unroll(Shape::KEY > 256 ? 2 : 8)  // wide rows have many vectors
        for (uint32_t v = lane; v < (ROWS * VECTORS + 31) / 32 * 32; v += 32) {
            const uint32_t row = min(first + v / VECTORS, 15u), column = v % VECTORS * 8, index = index_of(row);
            if (v >= ROWS * VECTORS) continue;
            uint4 vector = make_uint4(0, 0, 0, 0);
            if (index != RowPair::NONE) vector = *reinterpret_cast<const uint4*>(query_at<T>(args, index) + column);
            *reinterpret_cast<uint4*>(&to[warp_row + row][column]) = vector;
        }
    } else {
        constexpr uint32_t EACH = (VECTORS + 31) / 32;
#pragma unroll 1
        for (uint32_t row = first; row < first + ROWS; row++) {
            const uint32_t index = index_of(row);
            float numbers[EACH][8], greatest = 0.0f;
#pragma unroll
            for (uint32_t i = 0; i < EACH; i++) {
                const uint32_t v = lane + 32 * i;
                uint4 vector = make_uint4(0, 0, 0, 0);
                if (index != RowPair::NONE && v < VECTORS) {
                    vector = *reinterpret_cast<const uint4*>(query_at<T>(args, index) + v * 8);
                }
                widen<T>(KV_SAME, vector, numbers[i]);
#pragma unroll
                for (int e = 0; e < 8; e++) greatest = fmaxf(greatest, fabsf(numbers[i][e]));
            }
#pragma unroll
            for (int offset = 16; offset; offset /= 2) {
                greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffff, greatest, offset));
            }
            const HalfUnit unit(greatest);
            if (lane == 0) units[warp_row + row] = unit.unit;
#pragma unroll
            for (uint32_t i = 0; i < EACH; i++) {
                const uint32_t v = lane + 32 * i;
                if (v >= VECTORS) continue;
                const auto two = [&](int a, int b) { return unit.narrow(numbers[i][a], numbers[i][b]); };
                // In each group of 16, elements 4 c to 4 c + 3 have the order in which widen_word reads the bytes of a word.
                auto* of_row = &to[warp_row + row][v / 2 * 16 + v % 2 * 4];
                *reinterpret_cast<uint2*>(of_row) = make_uint2(two(0, 2), two(4, 6));
                *reinterpret_cast<uint2*>(of_row + 8) = make_uint2(two(1, 3), two(5, 7));
            }
        }
    }
}

// Loads the query rows of a warp as fragments of mma's a; zeros for absent rows. Warps that share rows load a part each, by way
// of shared memory; all threads must pass a barrier before it is used again.
template <class Shape>
__device__ __forceinline__ void load_query(uint32_t (&query)[Shape::D / 16][4], typename Shape::Shared& shared,
                                           const AttentionArgs& args, RowPair& rows) {
    static_assert(Shape::TILES == 1, "two tiles of rows do not fit the registers");
    using T = typename Shape::T;
    const auto place = [&](uint32_t index) { return query_at<T>(args, index); };
    if constexpr (Shape::KV8) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const bool absent = rows.index[r] == RowPair::NONE;
            const T* from = place(absent ? 0 : rows.index[r]) + threadIdx.x % 4 * 4;
            float greatest = 0.0f;
#pragma unroll
            for (int k = 0; k < Shape::D / 16; k++) {
                const uint2 four = absent ? make_uint2(0, 0) : *reinterpret_cast<const uint2*>(from + k * 16);
                query[k][r] = four.x;
                query[k][r + 2] = four.y;
                const float2 low = Pair<T>::widen(four.x), high = Pair<T>::widen(four.y);
                greatest = fmaxf(greatest, fmaxf(fmaxf(fabsf(low.x), fabsf(low.y)), fmaxf(fabsf(high.x), fabsf(high.y))));
            }
            greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffff, greatest, 1));
            greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffff, greatest, 2));
            const HalfUnit of_row(greatest);
            rows.unit[r] = of_row.unit;
#pragma unroll
            for (int k = 0; k < Shape::D / 16; k++) {
                const float2 low = Pair<T>::widen(query[k][r]), high = Pair<T>::widen(query[k][r + 2]);
                // Elements 4 c to 4 c + 3 of 16 in the order in which widen_word takes bytes of a word.
                query[k][r] = of_row.narrow(low.x, high.x);
                query[k][r + 2] = of_row.narrow(low.y, high.y);
            }
        }
    } else if constexpr (Shape::WN > 1) {
        const uint32_t lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 / Shape::WN * 16;
        stage_query<Shape>(shared.slots[1], nullptr, args, rows);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < Shape::D / 16; k++) {
            ldmatrix(query[k], &shared.slots[1][warp_row + lane % 16][k * 16 + lane / 16 * 8]);
        }
    } else {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const bool absent = rows.index[r] == RowPair::NONE;
            const T* from = place(absent ? 0 : rows.index[r]) + threadIdx.x % 4 * 2;
#pragma unroll
            for (int k = 0; k < Shape::D / 16; k++) {
                query[k][r] = absent ? 0 : *reinterpret_cast<const uint32_t*>(from + k * 16);
                query[k][r + 2] = absent ? 0 : *reinterpret_cast<const uint32_t*>(from + k * 16 + 8);
            }
        }
    }
}

// Scales of the rows of the `used`-th tile, if each row has one, otherwise null: of the keys of this warp, and of all values.
template <class Shape>
struct TileScales {
    const float *keys = nullptr, *values = nullptr;

    __device__ __forceinline__ TileScales([[maybe_unused]] const typename Shape::Shared& shared, uint32_t kv_format, uint32_t used) {
        if constexpr (Shape::KV8) {
            if (kv_format != KV_INT8_ROWS) return;
            keys = shared.key_scales[used % SCALED_TILES] + threadIdx.x / 32 % Shape::WN * Shape::SCORES * 8;
            values = shared.value_scales[used % SCALED_TILES];
        }
    }
};

// Multiplies the weights of 16 tokens, as mma's a, by the scales of their values, which start at the lane's first token.
template <class T>
__device__ __forceinline__ void scale_weights(uint32_t (&row)[4], const float* scales) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 scale = *reinterpret_cast<const float2*>(scales + i / 2 * 8), pair = Pair<T>::widen(row[i]);
        row[i] = Pair<T>::narrow(__fmul_rn(pair.x, scale.x * WEIGHT_SCALE), __fmul_rn(pair.y, scale.y * WEIGHT_SCALE));
    }
}

// Converts products to scores: scale (unless it is deferred), cap, bias, mask. `first` is the token of the warp's first
// column. `scales`, for keys with a scale each, starts at the same token.
template <class Shape>
__device__ __forceinline__ void finish_scores(float (&scores)[Shape::SCORES][4], const TileTask& task,
                                              const RowPair& rows, uint32_t first, const float* scales = nullptr) {
    const auto each = [&](auto change) {
#pragma unroll
        for (int n = 0; n < Shape::SCORES; n++) {
#pragma unroll
            for (int c = 0; c < 4; c++) scores[n][c] = change(scores[n][c], c / 2, n * 8 + c % 2);
        }
    };
    const uint32_t token = first + threadIdx.x % 4 * 2;
    if constexpr (Shape::KV8) {
        each([&](float score, int r, int) { return __fmul_rn(score, rows.unit[r]); });
        if (scales) {
            each([&](float score, int, int offset) { return __fmul_rn(score, scales[threadIdx.x % 4 * 2 + offset]); });
        }
    }
    if (!task.scoring.deferred) each([&](float score, int, int) { return task.scoring.scaled(score); });
    if (task.scoring.cap != 0.0f) each([&](float score, int, int) { return task.scoring.capped(score); });
    if (task.args.alibi_slopes) {
        const float nearest[2] = {static_cast<float>(token) - static_cast<float>(rows.end[0] - 1),
                                  static_cast<float>(token) - static_cast<float>(rows.end[1] - 1)};
        const float slope[2] = {slope_of(task.args, rows.index[0] % task.args.num_heads),
                                slope_of(task.args, rows.index[1] % task.args.num_heads)};
        each([&](float score, int r, int offset) { return Scoring::biased(score, slope[r], nearest[r] + offset); });
    }
    const Visible seen[2] = {Visible(rows.first[0], rows.end[0]), Visible(rows.first[1], rows.end[1])};
    const uint32_t past = first + Shape::SCORES * 8;
    if (first < seen[0].first || first < seen[1].first || past > seen[0].end || past > seen[1].end) {
        each([&](float score, int r, int offset) {
            return token + offset >= seen[r].first && token + offset < seen[r].end ? score : -INFINITY;
        });
    }
    if (task.sparse.heads) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (rows.index[r] == RowPair::NONE) continue;
            const uint32_t block = task.args.sparse_block, query_block = (rows.end[r] - 1) / block;
            const uint32_t offset = sparse_offset(task.args, rows.index[r] % task.args.num_heads);
            uint32_t hidden = 0;  // a bit for each score of the row
            static_assert(Shape::SCORES <= 16, "two bits for each column of scores");
#pragma unroll 1  // the divisions of several tokens at once would take registers that the sums need
            for (uint32_t i = 0; i < Shape::SCORES * 2; i++) {
                const uint32_t key_block = (token + i / 2 * 8 + i % 2) / block;
                hidden |= static_cast<uint32_t>(!sees_block(task.args, offset, query_block, key_block)) << i;
            }
#pragma unroll
            for (int i = 0; i < Shape::SCORES * 2; i++) {
                if (hidden >> i & 1) scores[i / 2][2 * r + i % 2] = -INFINITY;
            }
        }
    }
}

// Sets `max` to the greatest scores of a lane's rows among the tokens of the warp, and tells the other warps of the rows.
template <class Shape>
__device__ __forceinline__ void share_maxima(float (&max)[2], typename Shape::Shared& shared,
                                             const float (&scores)[Shape::SCORES][4]) {
    const uint32_t lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 / Shape::WN * 16;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        max[r] = -INFINITY;
#pragma unroll
        for (int n = 0; n < Shape::SCORES; n++) max[r] = fmaxf(max[r], fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
        max[r] = fmaxf(max[r], __shfl_xor_sync(0xffffffff, max[r], 1));
        max[r] = fmaxf(max[r], __shfl_xor_sync(0xffffffff, max[r], 2));
        if (Shape::WN > 1 && lane % 4 == 0) {
            shared.maxima[threadIdx.x / 32 % Shape::WN][warp_row + lane / 4 + 8 * r] = max[r];
        }
    }
}

// Makes weights of scores, in shared memory if several warps have the rows, and brings the sums to the new maxima. Those of
// `share_maxima` are behind a barrier. `half`: weights are f16, multiplied by a power of 2.
template <class Shape>
__device__ __forceinline__ void make_weights(uint32_t (&weights)[Shape::SCORES][2], TileSums<Shape>& out,
                                             typename Shape::Shared& shared, const float (&scores)[Shape::SCORES][4],
                                             float (&max)[2], float scale, bool half) {
    using T = typename Shape::T;
    const uint32_t lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 / Shape::WN * 16;
    const float lift = half ? HALF_WEIGHTS : 0.0f;
    float rescale[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if constexpr (Shape::WN > 1) {
#pragma unroll
            for (int w = 0; w < Shape::WN; w++) max[r] = fmaxf(max[r], shared.maxima[w][warp_row + lane / 4 + 8 * r]);
        }
        max[r] = fmaxf(out.max[r], __fmul_rn(max[r], scale));
        const float base = base_of(max[r]);
        rescale[r] = exp2_approx(__fsub_rn(out.max[r], base));
        out.max[r] = max[r];
        const auto weight = [=](float score) { return exp2_approx(__fmaf_rn(score, scale, lift - base)); };
        const auto narrow = [=](float low, float high) {
            return half ? Pair<__half>::narrow(low, high) : Pair<T>::narrow(low, high);
        };
#pragma unroll
        for (int n = 0; n < Shape::SCORES; n++) {
            weights[n][r] = narrow(weight(scores[n][2 * r]), weight(scores[n][2 * r + 1]));
            if constexpr (Shape::WN > 1) {
                const uint32_t column = (threadIdx.x / 32 % Shape::WN * Shape::SCORES + n) * 8 + lane % 4 * 2;
                *reinterpret_cast<uint32_t*>(&shared.weights[warp_row + lane / 4 + 8 * r][column]) = weights[n][r];
            }
        }
    }
    out.rescale(rescale[0], rescale[1]);
}

// Adds the values of 16 tokens, times their weights `row`, to the sums of a warp. `scales`, for values with a scale each, has that of
// the first token at `first`.
template <class Shape, uint32_t format, int TILES, int PITCH>
__device__ __forceinline__ void add_values(Format<format>, TileSums<Shape> (&out)[TILES], uint32_t (&row)[TILES][4],
                                           const typename Shape::Element (*values)[PITCH], const float* scales, int first) {
    using T = typename Shape::T;
    using Value = std::conditional_t<Shape::KV8 && format != KV_INT8_ROWS, __half, T>;
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        mma_m16n8k16<Value>(out[t].weights, row[t], {Pair<Value>::ONES, Pair<Value>::ONES});
        if constexpr (format == KV_INT8_ROWS) scale_weights<T>(row[t], scales + first + lane % 4 * 2);
    }
#pragma unroll
    for (int i = 0; i < Shape::SUMS; i++) {
        const uint32_t column = threadIdx.x / 32 % Shape::WN * Shape::SUMS + i;
        if (Shape::SUMS * Shape::WN * 16 > Shape::D && column >= Shape::D / 16) break;  // the same for the whole warp
        auto* from = &values[lane % 16][column * 16];
        uint32_t value[4];
        if constexpr (Shape::KV8) {
            uint32_t bytes[2];
            ldmatrix_trans(bytes, from);
            widen_word<Value>(format, bytes[0], value[0], value[2]);
            widen_word<Value>(format, bytes[1], value[1], value[3]);
        } else {
            ldmatrix_trans(value, from + lane / 16 * 8);
        }
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            mma_m16n8k16<Value>(out[t].sums[i][0], row[t], {value[0], value[1]});
            mma_m16n8k16<Value>(out[t].sums[i][1], row[t], {value[2], value[3]});
        }
    }
}

// Adds the tokens `visible` to `out`, in one sum: all are of one partition, or the kernel is not row-invariant. All threads may reuse
// shared memory before, and if there is no spare slot also after; otherwise `attend` may follow. `rows` and their fragments `query`
// are in registers if there is one tile; two are in shared memory.
template <class Shape, int STEPS_OF_HEAD>
__device__ __forceinline__ void attend(TileSums<Shape> (&out)[Shape::TILES], typename Shape::Shared& shared, const TileTask& task,
                                       const RowPair& rows, const uint32_t (&query)[STEPS_OF_HEAD][4],
                                       const Visible& visible) {
    using T = typename Shape::T;
    constexpr int WN = Shape::WN, TILES = Shape::TILES;
    constexpr int PARTS = Shape::PARTS, COLUMNS = Shape::SCORES / PARTS, STEPS = Shape::PART / 16;
    const uint32_t lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 / WN * 16, warp_column = threadIdx.x / 32 % WN;
    const float scale = task.scoring.left();
    const bool half_weights = Shape::KV8 && task.args.kv_format != KV_INT8_ROWS;
    using Factor = std::conditional_t<Shape::KV8, __half, T>;

    const auto rows_of = [&](int t) {
        if constexpr (TILES > 1) return shared.rows(t, warp_row + lane / 4, Shape::KV8);
        else return rows;
    };

    Transfer<Shape> transfer(shared, task, visible);
    uint32_t tile = transfer.tile;
    if (tile >= visible.end) {
        __syncthreads();
        return;
    }
    transfer.begin();
    for (uint32_t used = 0; tile < visible.end; used++) {
        const uint32_t next = transfer.tile;
        const TileScales<Shape> scales(shared, task.args.kv_format, used);

        float scores[TILES][Shape::SCORES][4] = {};
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            auto& keys = transfer.await(part);
            const auto add = [&](auto format) {
#pragma unroll (TILES > 1 && (Shape::KV8 || Shape::D == 112) ? 2 : Shape::D / 16)  // more at once would spill there
                for (int k = 0; k < Shape::D / 16; k++) {
                    uint32_t own[TILES][4];
#pragma unroll
                    for (int t = 0; t < TILES; t++) {
                        if constexpr (TILES > 1) {
                            ldmatrix(own[t], &shared.query[t][warp_row + lane % 16][k * 16 + lane / 16 * 8]);
                        } else {
#pragma unroll
                            for (int i = 0; i < 4; i++) own[t][i] = query[k][i];
                        }
                    }
#pragma unroll
                    for (int n = 0; n < COLUMNS; n += 2) {
                        const uint32_t token = (warp_column * COLUMNS + n) * 8;
                        uint32_t key[4];
                        if constexpr (Shape::KV8) {
                            uint32_t bytes[2];
                            ldmatrix(bytes, &keys[token + lane % 16][k * 16]);
                            widen_word<Factor>(format, bytes[0], key[0], key[1]);
                            widen_word<Factor>(format, bytes[1], key[2], key[3]);
                        } else {
                            ldmatrix(key, &keys[token + lane % 8 + lane / 16 * 8][k * 16 + lane / 8 % 2 * 8]);
                        }
#pragma unroll
                        for (int t = 0; t < TILES; t++) {
                            mma_m16n8k16<Factor>(scores[t][part * COLUMNS + n], own[t], {key[0], key[1]});
                            mma_m16n8k16<Factor>(scores[t][part * COLUMNS + n + 1], own[t], {key[2], key[3]});
                        }
                    }
                }
            };
            with_format<Shape::KV8>(task.args.kv_format, add);
        }

        float max[TILES][2];
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            finish_scores<Shape>(scores[t], task, rows_of(t), tile + warp_column * Shape::SCORES * 8, scales.keys);
            share_maxima<Shape>(max[t], shared, scores[t]);
        }
        transfer.end(PARTS - 1);  // also a barrier before other warps' maxima
        if constexpr (WN > 1 && Shape::SPARE) __syncthreads();

        uint32_t weights[TILES][Shape::SCORES][2];
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            make_weights<Shape>(weights[t], out[t], shared, scores[t], max[t], scale, half_weights);
        }

#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            auto& values = transfer.await(PARTS + part);  // and the weights of other warps
            const auto add = [&](auto format) {
#pragma unroll (Shape::KV8 && Shape::D > 128 ? 1 : STEPS)  // more at once would spill there
                for (int step = 0; step < STEPS; step++) {
                    const int k = part * STEPS + step;
                    uint32_t row[TILES][4];
#pragma unroll
                    for (int t = 0; t < TILES; t++) {
                        if constexpr (WN > 1) {
                            ldmatrix(row[t], &shared.weights[warp_row + lane % 16][k * 16 + lane / 16 * 8]);
                        } else {
#pragma unroll
                            for (int i = 0; i < 4; i++) row[t][i] = weights[t][2 * k + i / 2][i % 2];
                        }
                    }
                    add_values<Shape>(format, out, row, &values[step * 16], scales.values, k * 16);
                }
            };
            with_format<Shape::KV8>(task.args.kv_format, add);
            transfer.end(PARTS + part);
        }
        tile = next;
    }
}

}  // namespace quire
