// cuda.paged_prefill: causal attention of many query rows over their paged context on tensor cores, kernels
// paged_prefill_<type>_h<head size>[_kv8]. A thread block takes one tile of rows (tile_rows.cuh) of one KV head and merges
// the partitions of its context.
//
// Grid (rows * group / ROWS + num_seqs, num_kv_heads), the division rounding down: the host reads no lengths, and blocks
// behind a sequence's tiles return at once. 128 threads.

#include "instantiate.cuh"
#include "tile_rows.cuh"

namespace quire {

template <class T, bool KV8, int D>
using PrefillShape = TileShape<T, KV8, D, D <= 128 ? 4 : 2, D <= 128 ? 1 : 2>;

template <class Shape>
__device__ __forceinline__ void paged_prefill(const AttentionArgs& args, unsigned char* memory) {
    const PrefillTile block(args, Shape::ROWS);
    if (!block.exists) return;
    const uint32_t kv_head = blockIdx.y;
    TileRows<Shape> tile(args, block.seq, kv_head, block.first_row);
    auto& shared = *reinterpret_cast<TileShared<Shape>*>(memory);
    compute_rows(args, shared, TileTask(args, block.seq, kv_head, tile.sparse), tile, Piece());
}

}  // namespace quire

#define PAGED_PREFILL(name, T, KV8, D) QUIRE_TILE_KERNEL(name, quire::paged_prefill, 2, quire::PrefillShape<T, KV8, D>)
QUIRE_EACH_INSTANCE(PAGED_PREFILL, paged_prefill)
