// cuda.paged_gqa: decode with grouped queries on tensor cores, kernels paged_gqa_<type>_h<head size>[_kv8]. A thread block
// takes 16 rows of one KV head (the heads of its group, of one query row or several) over one partition and writes a partial
// result for paged_reduce.cu, or over a whole context and writes the output. It reads each key and value once for 16 rows.
//
// Grid: as many blocks as run at once; they share the work list. 128 threads, 64 for heads over 128.

#include "instantiate.cuh"
#include "tile_rows.cuh"

namespace quire {

template <class T, bool KV8, int D>
using GqaShape = TileShape<T, KV8, D, 1, D <= 128 ? 4 : 2>;

template <class Shape>
__device__ __forceinline__ void paged_gqa(const AttentionArgs& args, unsigned char* memory) {
    auto& shared = *reinterpret_cast<TileShared<Shape>*>(memory);
    const uint32_t group = args.num_heads / args.num_kv_heads;
    const uint32_t tiles = (args.query_len * group + Shape::ROWS - 1) / Shape::ROWS;
    const uint32_t parts = tiles * args.num_kv_heads, units = Unit::count(args, parts);
    for (uint32_t i = blockIdx.x; i < units; i += gridDim.x) {
        const Unit unit(args, i, parts);
        if (unit.seq >= args.num_seqs) continue;
        const uint32_t kv_head = unit.part / tiles;
        TileRows<Shape> tile(args, unit.seq, kv_head, unit.part % tiles * Shape::ROWS);
        compute_rows(args, shared, TileTask(args, unit.seq, kv_head, tile.sparse), tile, unit.piece);
    }
}

}  // namespace quire

#define PAGED_GQA(name, T, KV8, D) \
    QUIRE_TILE_KERNEL(name, quire::paged_gqa, KV8 && (D == 96 || D == 112) ? 3 : 4, quire::GqaShape<T, KV8, D>)
QUIRE_EACH_INSTANCE(PAGED_GQA, paged_gqa)
