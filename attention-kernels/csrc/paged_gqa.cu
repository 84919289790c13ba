// cuda.paged_gqa: decode with grouped queries on tensor cores, kernels paged_gqa_<type>_h<head size>[_kv8]. A thread block
// takes up to 16 query heads of one KV head over one partition and writes a partial result for paged_reduce.cu.
//
// Grid (rows * num_kv_heads * ceil(group / 16), max_partitions), group = num_heads / num_kv_heads; 128 threads, 64 for
// heads over 128.

#include "instantiate.cuh"
#include "tile.cuh"

namespace quire {

template <class T, bool KV8, int D>
using GqaShape = TileShape<T, KV8, D, 1, D <= 128 ? 4 : 2>;

template <class Shape>
__device__ __forceinline__ void paged_gqa(const AttentionArgs& args, unsigned char* memory) {
    const uint32_t group = args.num_heads / args.num_kv_heads, tiles = (group + 15) / 16;
    const uint32_t first_head = blockIdx.x % tiles * 16, kv_head = blockIdx.x / tiles % args.num_kv_heads;
    const uint32_t n = blockIdx.x / tiles / args.num_kv_heads, start = blockIdx.y * PARTITION;
    const Row row(args, n);
    if (!row.exists || start + PARTITION <= row.visible.first || start >= row.visible.end) return;

    RowPair rows;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const uint32_t head = first_head + threadIdx.x % 32 / 4 + 8 * r;
        if (head < group) rows.set(r, args, row.index, kv_head * group + head, row.visible);
    }
    const TileTask task(args, row.seq, kv_head);
    uint32_t query[Shape::D / 16][4];
    load_query<Shape>(query, args, rows);
    Visible visible = row.visible;
    visible.first = max(visible.first, start);
    visible.end = min(visible.end, start + PARTITION);
    TileSums<Shape> out;
    out.clear();
    attend<Shape>(out, *reinterpret_cast<typename Shape::Shared*>(memory), task, rows, query, visible);

#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (rows.index[r] == RowPair::NONE) continue;
        const uint32_t of_launch = rows.index[r] - (row.index - n) * args.num_heads;
        const int64_t partial = static_cast<int64_t>(of_launch) * args.max_partitions + blockIdx.y;
        if (threadIdx.x / 32 == 0 && threadIdx.x % 4 == 0) {
            const SoftmaxState state = out.state(r);
            args.partial_states[2 * partial] = state.max;
            args.partial_states[2 * partial + 1] = state.sum;
        }
#pragma unroll
        for (int i = 0; i < Shape::SUMS; i++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const uint32_t column = out.column(i, j);
                if (column >= Shape::D) continue;
                *reinterpret_cast<float2*>(args.partial_sums + partial * Shape::D + column) =
                    make_float2(out.sums[i][j][2 * r], out.sums[i][j][2 * r + 1]);
            }
        }
    }
}

}  // namespace quire

#define PAGED_GQA(name, T, KV8, D)                                                         \
    extern "C" __global__ void                                                             \
        __launch_bounds__((quire::GqaShape<T, KV8, D>::THREADS), KV8 && D > 96 ? 3 : 4)    \
        name(QUIRE_ATTENTION_PARAMETERS) {                                                 \
        extern __shared__ __align__(16) unsigned char smem[];                              \
        quire::paged_gqa<quire::GqaShape<T, KV8, D>>(QUIRE_ATTENTION_ARGS, smem);          \
    }                                                                                      \
    QUIRE_EXPORT_SHARED(name, sizeof(quire::GqaShape<T, KV8, D>::Shared));

QUIRE_EACH_INSTANCE(PAGED_GQA, paged_gqa)
