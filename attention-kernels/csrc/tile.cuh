// The tile loop on tensor cores: a block of query rows against the tokens of one partition, 64 (or 32) tokens at a time.
//
// A query row here is one head of one token. The rows of a block belong to one KV head, so each key and value is read once
// for all of them. The warps of a block form a grid, WM over the rows (16 each) and WN over the columns:
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
//   2 slots (decode)    K0 V0 | use K0 | barrier, start K1 | use V0 | barrier, start V1 | use K1 | ...
//   5 slots (prefill)   K0a K0b V0a V0b | start K1a, use K0a | start K1b, use K0b | start V1a, use V0a | ...
//
// Slots of prefill are halves of a tile, so that two blocks of heads of 128 fit a multiprocessor of sm_80. An 8-bit cache is
// widened on the way, by ordinary loads, and so has two slots.
#pragma once

#include <quire/ptx.cuh>

#include "rows.cuh"
#include "softmax.cuh"
#include "sparse.cuh"

namespace quire {

// Scales of the tokens of two tiles, for caches that may have them.
template <bool KV8, int TOKENS>
struct RowScales {};
template <int TOKENS>
struct RowScales<true, TOKENS> {
    float key_scales[2][TOKENS];
    float value_scales[2][TOKENS];
};

template <class T_, bool KV8_, int D_, int WM_, int WN_>
struct TileShape {
    using T = T_;
    static constexpr bool KV8 = KV8_;
    static constexpr int D = D_, WM = WM_, WN = WN_;
    static constexpr int THREADS = 32 * WM * WN;
    static constexpr int ROWS = 16 * WM;
    static constexpr int TOKENS = D <= 128 ? 64 : 32;
    static constexpr int SCORES = TOKENS / WN / 8;            // 8-token columns of scores of a warp
    static constexpr int SUMS = (D / 16 + WN - 1) / WN;       // 16-element columns of sums of a warp
    // Only warps that share no rows can do without the second barrier of a part.
    static constexpr bool SPARE = !KV8 && WN == 1;
    static constexpr int PARTS = SPARE ? 2 : 1;
    static constexpr int SLOTS = 2 * PARTS + SPARE;
    static constexpr int PART = TOKENS / PARTS;               // tokens of a part
    static_assert(SCORES % (2 * PARTS) == 0 && PARTITION % TOKENS == 0, "tiles fill partitions, keys are read 16 tokens at a time");

    // Rows are an odd multiple of 16 bytes, so that the eight rows of an ldmatrix are in different banks.
    struct alignas(16) Shared : RowScales<KV8, TOKENS> {
        T slots[SLOTS][PART][D + 8];
        T weights[WN > 1 ? ROWS : 1][TOKENS + 8];
        int64_t places[2][TOKENS];
        float maxima[WN][ROWS];
    };
};

// The two query rows of a lane: lane / 4, and 8 further down.
struct RowPair {
    static constexpr uint32_t NONE = 0xffffffff;

    uint32_t index[2] = {NONE, NONE};  // row * num_heads + head of the output
    uint32_t first[2] = {0, 0};
    uint32_t end[2] = {0, 0};          // of what the row sees; its own position + 1

    __device__ __forceinline__ void set(int i, const AttentionArgs& args, uint32_t row, uint32_t head,
                                        const Visible& visible) {
        index[i] = row * args.num_heads + head;
        first[i] = visible.first;
        end[i] = visible.end;
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

    // Returns the first of the two adjacent elements of the head that sums[i][j] holds for each row; D or more: none.
    static __device__ __forceinline__ uint32_t column(int i, int j) {
        return (threadIdx.x / 32 % Shape::WN * Shape::SUMS + i) * 16 + j * 8 + threadIdx.x % 4 * 2;
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

// Loads the query rows of a warp as fragments of mma's a; zeros for absent rows. Warps that share rows load a part each, by way
// of shared memory; all threads must pass a barrier before it is used again.
template <class Shape>
__device__ __forceinline__ void load_query(uint32_t (&query)[Shape::D / 16][4], typename Shape::Shared& shared,
                                           const AttentionArgs& args, const RowPair& rows) {
    using T = typename Shape::T;
    const auto place = [&](uint32_t index) {
        const int64_t row = index / args.num_heads, head = index % args.num_heads;
        return static_cast<const T*>(args.query) + row * args.query_stride + head * Shape::D;
    };
    if constexpr (Shape::WN > 1) {
        constexpr uint32_t ROWS = 16 / Shape::WN, VECTORS = Shape::D / 8;
        const uint32_t lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 / Shape::WN * 16;
        const uint32_t first = threadIdx.x / 32 % Shape::WN * ROWS;
#pragma unroll (Shape::KV8 && Shape::D == 80 ? 1 : 8)  // more at once would spill there
        for (uint32_t v = lane; v < (ROWS * VECTORS + 31) / 32 * 32; v += 32) {
            const uint32_t row = min(first + v / VECTORS, 15u), column = v % VECTORS * 8;
            const uint32_t upper = __shfl_sync(0xffffffff, rows.index[0], row % 8 * 4);
            const uint32_t lower = __shfl_sync(0xffffffff, rows.index[1], row % 8 * 4);
            const uint32_t index = row < 8 ? upper : lower;
            if (v >= ROWS * VECTORS) continue;
            uint4 vector = make_uint4(0, 0, 0, 0);
            if (index != RowPair::NONE) vector = *reinterpret_cast<const uint4*>(place(index) + column);
            *reinterpret_cast<uint4*>(&shared.slots[1][warp_row + row][column]) = vector;
        }
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

// Computes the places of a tile's tokens; -1 for those that no row of the block sees, whose slots are not read. Loads their
// scales (KV_INT8_ROWS).
template <class Shape>
__device__ __forceinline__ void find_places(typename Shape::Shared& shared, const TileTask& task, uint32_t which,
                                            uint32_t tile, const Visible& visible) {
    if (threadIdx.x >= Shape::TOKENS) return;
    const uint32_t token = tile + threadIdx.x;
    const bool seen = token >= visible.first && token < visible.end && task.sparse.see_token(task.args, token);
    shared.places[which][threadIdx.x] = seen ? task.head_offset + place_of(task.args, task.table, token) : -1;
    if constexpr (Shape::KV8) {
        if (task.args.kv_format != KV_INT8_ROWS) return;
        const int64_t at = seen ? task.head_offset + scale_place_of(task.args, task.table, token) : 0;
        shared.key_scales[which][threadIdx.x] = seen ? float_at(task.args.keys, at) : 0.0f;
        shared.value_scales[which][threadIdx.x] = seen ? float_at(task.args.values, at) : 0.0f;
    }
}

// Starts (16-bit cache) or performs (8-bit) the transfer of a part of a tile to shared memory; zeros where a place is -1. With
// `scales` each row is multiplied by its own.
template <class Shape>
__device__ __forceinline__ void load_part(typename Shape::T (&to)[Shape::PART][Shape::D + 8], const TileTask& task,
                                          const void* cache, const int64_t* places, const float* scales) {
    using T = typename Shape::T;
    constexpr int WIDTH = Shape::KV8 ? 16 : 8, VECTORS = Shape::D / WIDTH, ALL = Shape::PART * VECTORS;
    constexpr int EACH = (ALL + Shape::THREADS - 1) / Shape::THREADS;
    if constexpr (Shape::KV8) {
        constexpr int AT_ONCE = EACH < 5 ? EACH : 4;
#pragma unroll 1
        for (int first = threadIdx.x; first < EACH * Shape::THREADS; first += AT_ONCE * Shape::THREADS) {
            uint4 raw[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int v = first + i * Shape::THREADS;
                const int64_t place = v < ALL ? places[v / VECTORS] : -1;
                const uint8_t* from = static_cast<const uint8_t*>(cache) + place + v % VECTORS * WIDTH;
                raw[i] = place < 0 ? make_uint4(0, 0, 0, 0) : *reinterpret_cast<const uint4*>(from);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int v = first + i * Shape::THREADS;
                if (v >= ALL) break;
                uint4* target = reinterpret_cast<uint4*>(&to[v / VECTORS][v % VECTORS * WIDTH]);
                target[0] = widen_bytes<T>(task.args.kv_format, raw[i].x, raw[i].y);
                target[1] = widen_bytes<T>(task.args.kv_format, raw[i].z, raw[i].w);
                if (scales) {
                    target[0] = scaled<T>(target[0], scales[v / VECTORS]);
                    target[1] = scaled<T>(target[1], scales[v / VECTORS]);
                }
            }
        }
    } else {
#pragma unroll 2  // more addresses at once would take registers that the sums need
        for (int i = 0; i < EACH; i++) {
            const int v = threadIdx.x + i * Shape::THREADS;
            if (v >= ALL) break;
            const int64_t place = places[v / VECTORS];
            const int64_t at = place < 0 ? 0 : place + v % VECTORS * WIDTH;
            cp_async16(&to[v / VECTORS][v % VECTORS * WIDTH], static_cast<const T*>(cache) + at, place >= 0);
        }
    }
}

// Transfers the tiles of a partition through the slots. The parts of a tile are numbered: keys, then values.
template <class Shape>
struct Transfer {
    static constexpr int ALL = 2 * Shape::PARTS;  // parts of a tile

    typename Shape::Shared& shared;
    const TileTask& task;
    Visible visible;
    uint32_t tile;          // whose parts are started next; from visible.end on: there is none
    uint32_t next = 0;      // the one after it
    uint32_t which = 0;     // of the two sets of places and scales: that of `tile`
    uint32_t start = 0, use = 0;  // slots of the parts that are started and used next

    __device__ __forceinline__ Transfer(typename Shape::Shared& shared, const TileTask& task, const Visible& visible)
        : shared(shared), task(task), visible(visible), tile(from(visible.first)) {}

    __device__ __forceinline__ uint32_t from(uint32_t token) const {
        return task.template tile_from<Shape::TOKENS>(token, visible.end);
    }

    // Starts all parts of the first tile. Passes a barrier before.
    __device__ __forceinline__ void begin() {
        find_places<Shape>(shared, task, 0, tile, visible);
        __syncthreads();
#pragma unroll
        for (int part = 0; part < ALL; part++) start_part(part);
    }

    // Starts a part of `tile`, and finds the places of the tile after it.
    __device__ __forceinline__ void start_part(int part) {
        const bool of_keys = part < Shape::PARTS;
        if (tile < visible.end) {
            const float* scales = nullptr;
            if constexpr (Shape::KV8) {
                // A key's scale multiplies its score.
                if (!of_keys && task.args.kv_format == KV_INT8_ROWS) scales = shared.value_scales[which];
            }
            load_part<Shape>(shared.slots[start], task, of_keys ? task.args.keys : task.args.values,
                             shared.places[which] + part % Shape::PARTS * Shape::PART, scales);
            if (part == 0) {
                next = from(tile + Shape::TOKENS);
                find_places<Shape>(shared, task, which ^ 1, next, visible);
            }
        }
        if constexpr (!Shape::KV8) cp_async_commit();  // also an empty group, so that as many follow the oldest as always
        start = start + 1 == Shape::SLOTS ? 0 : start + 1;
        if (part == ALL - 1) {
            tile = next;
            which ^= 1;
        }
    }

    // Waits until a part, and everything that other threads stored, may be used. Returns its slot.
    __device__ __forceinline__ typename Shape::T (&await(int part))[Shape::PART][Shape::D + 8] {
        if constexpr (!Shape::KV8) cp_async_wait<ALL - 1>();
        __syncthreads();
        if constexpr (Shape::SPARE) start_part(part);
        auto& slot = shared.slots[use];
        use = use + 1 == Shape::SLOTS ? 0 : use + 1;
        return slot;
    }

    // Called after the last use of a part.
    __device__ __forceinline__ void end(int part) {
        if constexpr (!Shape::SPARE) {
            __syncthreads();
            start_part(part);
        }
    }
};

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

// Adds the tokens at the positions `visible`, all in one partition, to `out`. All
// threads may reuse shared memory before, and if there is no spare slot also after; otherwise `attend` may follow.
template <class Shape>
__device__ __forceinline__ void attend(TileSums<Shape>& out, typename Shape::Shared& shared, const TileTask& task,
                                       const RowPair& rows, const uint32_t (&query)[Shape::D / 16][4],
                                       const Visible& visible) {
    using T = typename Shape::T;
    constexpr int WN = Shape::WN, PARTS = Shape::PARTS, COLUMNS = Shape::SCORES / PARTS, STEPS = Shape::PART / 16;
    const uint32_t lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 / WN * 16, warp_column = threadIdx.x / 32 % WN;
    const float scale = task.scoring.left();

    Transfer<Shape> transfer(shared, task, visible);
    uint32_t tile = transfer.tile;
    if (tile >= visible.end) {
        __syncthreads();
        return;
    }
    transfer.begin();
    while (tile < visible.end) {
        const uint32_t next = transfer.tile;
        const float* scales = nullptr;  // of the keys, if each has one
        if constexpr (Shape::KV8) {
            const uint32_t column = warp_column * Shape::SCORES * 8;
            if (task.args.kv_format == KV_INT8_ROWS) scales = shared.key_scales[transfer.which ^ 1] + column;
        }

        float scores[Shape::SCORES][4];
#pragma unroll
        for (int n = 0; n < Shape::SCORES; n++) scores[n][0] = scores[n][1] = scores[n][2] = scores[n][3] = 0.0f;
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            auto& keys = transfer.await(part);
#pragma unroll
            for (int k = 0; k < Shape::D / 16; k++) {
#pragma unroll
                for (int n = 0; n < COLUMNS; n += 2) {
                    uint32_t key[4];
                    const uint32_t token = (warp_column * COLUMNS + n) * 8 + lane % 8 + lane / 16 * 8;
                    ldmatrix(key, &keys[token][k * 16 + lane / 8 % 2 * 8]);
                    mma_m16n8k16<T>(scores[part * COLUMNS + n], query[k], {key[0], key[1]});
                    mma_m16n8k16<T>(scores[part * COLUMNS + n + 1], query[k], {key[2], key[3]});
                }
            }
        }

        float max[2] = {-INFINITY, -INFINITY};
        finish_scores<Shape>(scores, task, rows, tile + warp_column * Shape::SCORES * 8, scales);
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int n = 0; n < Shape::SCORES; n++) max[r] = fmaxf(max[r], fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
            max[r] = fmaxf(max[r], __shfl_xor_sync(0xffffffff, max[r], 1));
            max[r] = fmaxf(max[r], __shfl_xor_sync(0xffffffff, max[r], 2));
            if (WN > 1 && lane % 4 == 0) shared.maxima[warp_column][warp_row + lane / 4 + 8 * r] = max[r];
        }
        transfer.end(PARTS - 1);  // also a barrier before other warps' maxima

        uint32_t weights[Shape::SCORES][2];
        float rescale[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if constexpr (WN > 1) {
#pragma unroll
                for (int w = 0; w < WN; w++) max[r] = fmaxf(max[r], shared.maxima[w][warp_row + lane / 4 + 8 * r]);
            }
            max[r] = fmaxf(out.max[r], __fmul_rn(max[r], scale));
            const float base = base_of(max[r]);
            rescale[r] = exp2_approx(__fsub_rn(out.max[r], base));
            out.max[r] = max[r];
            const auto weight = [=](float score) { return exp2_approx(__fmaf_rn(score, scale, -base)); };
#pragma unroll
            for (int n = 0; n < Shape::SCORES; n++) {
                weights[n][r] = Pair<T>::narrow(weight(scores[n][2 * r]), weight(scores[n][2 * r + 1]));
                if constexpr (WN > 1) {
                    const uint32_t column = (warp_column * Shape::SCORES + n) * 8 + lane % 4 * 2;
                    *reinterpret_cast<uint32_t*>(&shared.weights[warp_row + lane / 4 + 8 * r][column]) = weights[n][r];
                }
            }
        }
        out.rescale(rescale[0], rescale[1]);

#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            auto& values = transfer.await(PARTS + part);  // and the weights of other warps
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                const int k = part * STEPS + step;
                uint32_t row[4];
                if constexpr (WN > 1) {
                    ldmatrix(row, &shared.weights[warp_row + lane % 16][k * 16 + lane / 16 * 8]);
                } else {
                    row[0] = weights[2 * k][0];
                    row[1] = weights[2 * k][1];
                    row[2] = weights[2 * k + 1][0];
                    row[3] = weights[2 * k + 1][1];
                }
                mma_m16n8k16<T>(out.weights, row, {Pair<T>::ONES, Pair<T>::ONES});
#pragma unroll
                for (int i = 0; i < Shape::SUMS; i++) {
                    const uint32_t column = warp_column * Shape::SUMS + i;
                    if (Shape::SUMS * WN * 16 > Shape::D && column >= Shape::D / 16) break;  // the same for the whole warp
                    uint32_t value[4];
                    ldmatrix_trans(value, &values[step * 16 + lane % 16][column * 16 + lane / 16 * 8]);
                    mma_m16n8k16<T>(out.sums[i][0], row, {value[0], value[1]});
                    mma_m16n8k16<T>(out.sums[i][1], row, {value[2], value[3]});
                }
            }
            transfer.end(PARTS + part);
        }
        tile = next;
    }
}

}  // namespace quire
