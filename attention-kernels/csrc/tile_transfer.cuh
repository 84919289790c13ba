// How tiles of keys and values reach shared memory: the places of a tile's tokens, and the ring of slots that its parts pass through.
// tile.cuh shows the order.
#pragma once

#include "tile_shape.cuh"

namespace quire {

// In place of a place: no row sees the token. Without its sign it is a place in the cache.
constexpr int64_t NOT_SEEN = INT64_MIN;

// Computes the places of a tile's tokens, in bytes; NOT_SEEN for those that no row of the block sees, whose slots are not read. Starts
// the transfer of their scales (KV_INT8_ROWS) to those of the `tiles`-th tile.
template <class Shape>
__device__ __forceinline__ void find_places(typename Shape::Shared& shared, const TileTask& task, uint32_t which,
                                            [[maybe_unused]] uint32_t tiles, uint32_t tile, const Visible& visible) {
    if (threadIdx.x >= Shape::TOKENS) return;
    uint32_t token = tile + threadIdx.x;
    const bool seen = token >= visible.first && token < visible.end && task.sparse.see_token(task.args, token);
    if (task.chosen && seen) token = task.chosen[token];
    constexpr int64_t BYTES = sizeof(typename Shape::Element);
    shared.places[which][threadIdx.x] = seen ? (task.head_offset + place_of(task.args, task.table, token)) * BYTES : NOT_SEEN;
    if constexpr (Shape::KV8) {
        if (task.args.kv_format != KV_INT8_ROWS) return;
        const int64_t at = seen ? task.head_offset + scale_place_of(task.args, task.table, token) : 0;
        const uint32_t set = tiles % SCALED_TILES;
        cp_async4(&shared.key_scales[set][threadIdx.x], static_cast<const char*>(task.args.keys) + at, seen);
        cp_async4(&shared.value_scales[set][threadIdx.x], static_cast<const char*>(task.args.values) + at, seen);
    }
}

// Starts the transfer of a part of a tile to shared memory; zeros where a place is NOT_SEEN. A block spends a good part of its
// instructions here, so an address takes few: places of several copies are read at once, and are bytes.
template <class Shape>
__device__ __forceinline__ void load_part(typename Shape::Slot& to, const void* cache, const int64_t* places) {
    constexpr uint32_t ROW = Shape::KEY * sizeof(typename Shape::Element), VECTORS = ROW / 16, ALL = Shape::PART * VECTORS;
    constexpr uint32_t EACH = (ALL + Shape::THREADS - 1) / Shape::THREADS, AT_ONCE = EACH % 8 || Shape::KV8 ? EACH % 4 ? 1 : 4 : 8;
    constexpr bool EVEN = Shape::THREADS % VECTORS == 0;  // then a thread has the same vector of all its rows
    const auto row_of = [](uint32_t i) {
        return EVEN ? threadIdx.x / VECTORS + i * (Shape::THREADS / VECTORS) : (threadIdx.x + i * Shape::THREADS) / VECTORS;
    };
    const auto at_of = [](uint32_t i) { return (EVEN ? threadIdx.x : threadIdx.x + i * Shape::THREADS) % VECTORS * 16; };
    const auto exists = [](uint32_t i) { return ALL % Shape::THREADS == 0 || threadIdx.x + i * Shape::THREADS < ALL; };
#pragma unroll (AT_ONCE == 8 ? 2 : 1)
    for (uint32_t first = 0; first < EACH; first += AT_ONCE) {
        int64_t found[AT_ONCE];
#pragma unroll
        for (uint32_t i = 0; i < AT_ONCE; i++) found[i] = exists(first + i) ? places[row_of(first + i)] : NOT_SEEN;
#pragma unroll
        for (uint32_t i = 0; i < AT_ONCE; i++) {
            if (!exists(first + i)) break;
            char* target = reinterpret_cast<char*>(to[row_of(first + i)]) + at_of(first + i);
            const char* source = static_cast<const char*>(cache) + at_of(first + i) + (found[i] & ~NOT_SEEN);
            cp_async16(target, source, found[i] >= 0);
        }
    }
}

// Transfers the tiles of a partition through the slots. The parts of a tile are numbered: keys, then values.
template <class Shape>
struct Transfer {
    static constexpr int ALL = Shape::ALL_PARTS;               // parts of a tile
    static constexpr int FLIGHT = Shape::SLOTS - Shape::SPARE;  // parts that are started before the first is used

    typename Shape::Shared& shared;
    const TileTask& task;
    Visible visible;
    uint32_t tile;          // whose parts are started next; from visible.end on: there is none
    uint32_t next = 0;      // the one after it
    uint32_t tiles = 0;     // whose parts have been started; its last bit is the set of places of `tile`
    uint32_t start = 0, use = 0;  // slots of the parts that are started and used next

    __device__ __forceinline__ Transfer(typename Shape::Shared& shared, const TileTask& task, const Visible& visible)
        : shared(shared), task(task), visible(visible), tile(from(visible.first)) {}

    __device__ __forceinline__ uint32_t from(uint32_t token) const {
        return task.template tile_from<Shape::TOKENS>(token, visible.end);
    }

    // Starts the first parts. Passes a barrier before.
    __device__ __forceinline__ void begin() {
        // Other warps may still use scales of the tiles before, if a spare slot lets them.
        if constexpr (Shape::KV8) {
            if (task.args.kv_format == KV_INT8_ROWS) __syncthreads();
        }
        find_places<Shape>(shared, task, 0, 0, tile, visible);
#pragma unroll
        for (int part = 0; part < FLIGHT; part++) {
            if (part % ALL == 0) __syncthreads();
            start_part(part % ALL);
        }
    }

    // Starts a part of `tile`, and finds the places of the tile after it.
    __device__ __forceinline__ void start_part(int part) {
        const bool of_keys = part < Shape::PARTS;
        if (tile < visible.end) {
            load_part<Shape>(shared.slots[start], of_keys ? task.args.keys : task.args.values,
                             shared.places[tiles % 2] + part % Shape::PARTS * Shape::PART);
            if (part == 0) {
                next = from(tile + Shape::TOKENS);
                find_places<Shape>(shared, task, (tiles + 1) % 2, tiles + 1, next, visible);
            }
        }
        cp_async_commit();  // also an empty group, so that as many follow the oldest as always
        start = start + 1 == Shape::SLOTS ? 0 : start + 1;
        if (part == ALL - 1) {
            tile = next;
            tiles++;
        }
    }

    // Waits until a part, and everything that other threads stored, may be used. Returns its slot.
    __device__ __forceinline__ typename Shape::Slot& await(int part) {
        cp_async_wait<FLIGHT - 1>();
        __syncthreads();
        if constexpr (Shape::SPARE) start_part((part + FLIGHT) % ALL);
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

}  // namespace quire
