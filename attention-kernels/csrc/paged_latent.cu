// cuda.latent_64 and cuda.latent_16: latent attention on tensor cores. A thread block takes so many rows of a KV head: the heads of a
// query row, or of several.
//
//   latent_decode_<rows>_<type>_h<key>[_kv8]    one partition of a context, whose result is for paged_reduce.cu, or a whole context; the
//                                               blocks share the work list, as those of paged_gqa.cu
//   latent_prefill_<rows>_<type>_h<key>[_kv8]   all partitions; the grid is that of paged_prefill.cu
//   latent_chosen_<rows>_<type>_h<key>[_kv8]    heads of one query row over the tokens that an indexer chose for it; grid (query rows,
//                                               ceil(heads / rows))

#include "instantiate.cuh"
#include "latent_tile.cuh"

namespace quire {

// The elements of a key that a rotary embedding turns, which are no part of the value, as in all published models.
constexpr int ROTATED = 64;

// 64, 32 and 16 rows.
template <class T, bool KV8, int KEY>
using Latents64 = LatentShape<T, KV8, KEY, KEY - ROTATED, 4, 2>;
template <class T, bool KV8, int KEY>
using Latents32 = LatentShape<T, KV8, KEY, KEY - ROTATED, 2, 4>;
template <class T, bool KV8, int KEY>
using Latents16 = LatentShape<T, KV8, KEY, KEY - ROTATED, 1, 4>;

// Computes the rows of a unit of the work list. Sums of several partitions take the smaller tiles.
template <class Wide, class Narrow>
__device__ __forceinline__ void latent_unit(const AttentionArgs& args, unsigned char* memory, uint32_t seq, uint32_t kv_head,
                                            uint32_t first_row, const Piece& piece) {
    TileRows<Wide> tile(args, seq, kv_head, first_row);
    const bool one = tile.visible.first / PARTITION == (max(tile.visible.end, 1u) - 1) / PARTITION;
    if (Wide::FOLDS || piece.is_split() || one) {
        auto& shared = *reinterpret_cast<typename Wide::Shared*>(memory);
        compute_latent_rows<Wide>(args, shared, TileTask(args, seq, kv_head, tile.sparse), tile, piece);
        return;
    }
    if constexpr (!Wide::FOLDS) {
        auto& shared = *reinterpret_cast<typename Narrow::Shared*>(memory);
#pragma unroll 1
        for (uint32_t row = first_row; row < first_row + Wide::ROWS; row += Narrow::ROWS) {
            TileRows<Narrow> part(args, seq, kv_head, row);
            compute_latent_rows<Narrow>(args, shared, TileTask(args, seq, kv_head, part.sparse), part, piece);
        }
    }
}

template <class Wide, class Narrow>
struct LatentDecode {
    using Shape = Wide;
    static_assert(Wide::THREADS == Narrow::THREADS && sizeof(typename Narrow::Shared) <= sizeof(typename Wide::Shared),
                  "a block computes either");

    static __device__ __forceinline__ void run(const AttentionArgs& args, unsigned char* memory) {
        const uint32_t group = args.num_heads / args.num_kv_heads;
        const uint32_t tiles = (args.query_len * group + Wide::ROWS - 1) / Wide::ROWS;
        const uint32_t parts = tiles * args.num_kv_heads, units = Unit::count(args, parts);
        for (uint32_t i = blockIdx.x; i < units; i += gridDim.x) {
            const Unit unit(args, i, parts);
            if (unit.seq >= args.num_seqs) continue;
            if (!Wide::FOLDS) __syncthreads();  // the unit before may have divided shared memory otherwise
            const uint32_t first_row = unit.part % tiles * Wide::ROWS;
            latent_unit<Wide, Narrow>(args, memory, unit.seq, unit.part / tiles, first_row, unit.piece);
        }
    }
};

template <class Shape_>
struct LatentPrefill {
    using Shape = Shape_;

    static __device__ __forceinline__ void run(const AttentionArgs& args, unsigned char* memory) {
        const PrefillTile block(args, Shape::ROWS);
        if (!block.exists) return;
        const uint32_t kv_head = blockIdx.y;
        TileRows<Shape> tile(args, block.seq, kv_head, block.first_row);
        auto& shared = *reinterpret_cast<typename Shape::Shared*>(memory);
        compute_latent_rows<Shape>(args, shared, TileTask(args, block.seq, kv_head, tile.sparse), tile, Piece());
    }
};

template <class Shape_>
struct LatentChosen {
    using Shape = Shape_;

    static __device__ __forceinline__ void run(const AttentionArgs& args, unsigned char* memory) {
        const Row row = Row::nth(args, blockIdx.x);
        if (!row.exists) return;
        TileRows<Shape> tile(args, row, blockIdx.y * Shape::ROWS);
        TileTask task(args, row.seq, 0, tile.sparse);
        task.chosen = chosen_of(args, row);
        auto& shared = *reinterpret_cast<typename Shape::Shared*>(memory);
        compute_latent_rows<Shape>(args, shared, task, tile, Piece());
    }
};

}  // namespace quire

#define LATENT_KERNEL(name, PARAMETERS, ARGS, ...)                                                        \
    static_assert(sizeof(__VA_ARGS__::Shape::Shared) <= ((__VA_ARGS__::Shape::ROWS) > 16 ? 163 : 99) << 10, \
                  "a block fits a multiprocessor of sm_80, or of sm_86");                                   \
    extern "C" __global__ void __launch_bounds__((__VA_ARGS__::Shape::THREADS), 1) name(PARAMETERS) {       \
        quire::wait_for_launches();                                                                         \
        extern __shared__ __align__(16) unsigned char smem[];                                               \
        __VA_ARGS__::run(ARGS, smem);                                                                       \
    }                                                                                                       \
    QUIRE_EXPORT_TILED(name, sizeof(__VA_ARGS__::Shape::Shared), (__VA_ARGS__::Shape::THREADS),             \
                       (__VA_ARGS__::Shape::ROWS));
#define LATENT_ATTENTION(name, ...) LATENT_KERNEL(name, QUIRE_ATTENTION_PARAMETERS, QUIRE_ATTENTION_ARGS, __VA_ARGS__)
#define LATENT_CHOSEN(name, ...) LATENT_KERNEL(name, QUIRE_CHOSEN_PARAMETERS, QUIRE_CHOSEN_ARGS, __VA_ARGS__)
#define LATENT_DECODE_64(name, T, KV8, KEY) \
    LATENT_ATTENTION(name, quire::LatentDecode<quire::Latents64<T, KV8, KEY>, quire::Latents32<T, KV8, KEY>>)
#define LATENT_DECODE_16(name, T, KV8, KEY) \
    LATENT_ATTENTION(name, quire::LatentDecode<quire::Latents16<T, KV8, KEY>, quire::Latents16<T, KV8, KEY>>)
#define LATENT_PREFILL_32(name, T, KV8, KEY) LATENT_ATTENTION(name, quire::LatentPrefill<quire::Latents32<T, KV8, KEY>>)
#define LATENT_PREFILL_16(name, T, KV8, KEY) LATENT_ATTENTION(name, quire::LatentPrefill<quire::Latents16<T, KV8, KEY>>)
#define LATENT_CHOSEN_32(name, T, KV8, KEY) LATENT_CHOSEN(name, quire::LatentChosen<quire::Latents32<T, KV8, KEY>>)
#define LATENT_CHOSEN_16(name, T, KV8, KEY) LATENT_CHOSEN(name, quire::LatentChosen<quire::Latents16<T, KV8, KEY>>)

// The elements of a key.
#define EACH_LATENT_SIZE(X, ...) X(576, __VA_ARGS__)

QUIRE_INSTANCES(EACH_LATENT_SIZE, LATENT_DECODE_64, latent_decode_64)
QUIRE_INSTANCES(EACH_LATENT_SIZE, LATENT_DECODE_16, latent_decode_16)
QUIRE_INSTANCES(EACH_LATENT_SIZE, LATENT_PREFILL_32, latent_prefill_32)
QUIRE_INSTANCES(EACH_LATENT_SIZE, LATENT_PREFILL_16, latent_prefill_16)
QUIRE_INSTANCES(EACH_LATENT_SIZE, LATENT_CHOSEN_32, latent_chosen_32)
QUIRE_INSTANCES(EACH_LATENT_SIZE, LATENT_CHOSEN_16, latent_chosen_16)
