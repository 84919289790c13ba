// cuda.prefill_128: causal attention of many query rows over their paged context on tensor cores, kernels
// prefill_128_<type>_h<head size>[_kv8] for heads up to 128. As paged_prefill, but a warp has 32 rows and a block 128: fragments of keys
// and values are loaded and widened once for twice as many products.
//
// A block adds its whole context in one sum. Sums of two partitions would not fit the registers, so its bits are not those of
// decode.
//
// Grid (rows * group / 128 + num_seqs, num_kv_heads), the division rounding down. 128 threads.

#include "instantiate.cuh"
#include "tile_rows.cuh"

namespace quire {

template <class T, bool KV8, int D>
using WideShape = TileShape<T, KV8, D, 4, 1, 2>;

template <class Shape>
__device__ __forceinline__ void prefill_128(const AttentionArgs& args, unsigned char* memory) {
    const PrefillTile block(args, Shape::TILES * Shape::ROWS);
    if (!block.exists) return;
    const uint32_t kv_head = blockIdx.y;
    auto& shared = *reinterpret_cast<typename Shape::Shared*>(memory);
    TileRows<Shape> tile(args, block.seq, kv_head, block.first_row);
    const uint32_t row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    TileSums<Shape> out[Shape::TILES];
#pragma unroll
    for (int t = 0; t < Shape::TILES; t++) {
        out[t].clear();
        stage_query<Shape>(shared.query[t], shared.units[t], args, tile.rows[t]);
        if (threadIdx.x % 4 == 0) shared.set_rows(t, row, tile.rows[t]);
    }
    __syncthreads();
    const uint32_t none[1][4] = {};
    attend<Shape>(out, shared, TileTask(args, block.seq, kv_head, tile.sparse), RowPair(), none, tile.visible);
#pragma unroll
    for (int t = 0; t < Shape::TILES; t++) {
        out[t].normalise(args.kv_format);
        const SoftmaxState states[2] = {out[t].state(0), out[t].state(1)};
        store_output(args, out[t], states, shared.rows(t, row, false));
    }
}

}  // namespace quire

#define PREFILL_128(name, T, KV8, D) QUIRE_TILE_KERNEL(name, quire::prefill_128, 2, quire::WideShape<T, KV8, D>)
QUIRE_EACH_NARROW_INSTANCE(PREFILL_128, prefill_128)
