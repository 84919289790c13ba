// cuda.paged_v1 and cuda.paged_v2 for f16 and bf16: kernels paged_decode_<type>_h<head size>[_kv8].
//
// Grid: rows * num_heads, or with a work list as many blocks as run at once; 128 threads. The blocks of one KV head are
// adjacent, so all but the first of a group find its keys in the L2 cache.

#include "instantiate.cuh"
#include "paged_decode.cuh"

#define PAGED_DECODE(name, T, KV8, D)                                                                             \
    extern "C" __global__ void __launch_bounds__(quire::DECODE_THREADS, quire::VectorRows<T, KV8, D>::MIN_BLOCKS) \
        name(QUIRE_ATTENTION_PARAMETERS) {                                                                        \
        quire::wait_for_launches();                                                                               \
        quire::paged_decode<quire::VectorRows<T, KV8, D>>(QUIRE_ATTENTION_ARGS);                                  \
    }                                                                                                             \
    QUIRE_EXPORT_TILED(name, 0, quire::DECODE_THREADS, 1);

QUIRE_EACH_INSTANCE(PAGED_DECODE, paged_decode)
