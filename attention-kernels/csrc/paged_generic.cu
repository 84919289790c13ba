// cuda.generic: queries of every type and head size up to 576, over a cache of the same type or any 8-bit format. Kernels
// paged_generic_<type> for heads of up to 256 elements, and paged_generic_<type>_wide; paged_chosen_<type>[_wide] for the tokens that an
// indexer chose. Grid and threads as in paged_decode.cu.

#include <quire/export.cuh>

#include "paged_decode.cuh"

// One block per multiprocessor suffices: wide heads may take all registers that they need.
#define PAGED_ROWS(name, PARAMETERS, ARGS, T, MAX_HEAD)                                         \
    extern "C" __global__ void __launch_bounds__(quire::DECODE_THREADS, 1) name(PARAMETERS) {   \
        quire::wait_for_launches();                                                             \
        quire::paged_decode<quire::GenericRows<T, MAX_HEAD>>(ARGS);                             \
    }                                                                                           \
    QUIRE_EXPORT_TILED(name, 0, quire::DECODE_THREADS, 1);
#define PAGED_OF_SIZE(type, size, T, MAX_HEAD)                                                                              \
    PAGED_ROWS(paged_generic_##type##size, QUIRE_ATTENTION_PARAMETERS, QUIRE_ATTENTION_ARGS, T, MAX_HEAD)                   \
    PAGED_ROWS(paged_chosen_##type##size, QUIRE_CHOSEN_PARAMETERS, QUIRE_CHOSEN_ARGS, T, MAX_HEAD)
#define PAGED_OF(type, T)                               \
    PAGED_OF_SIZE(type, , T, 256)                       \
    PAGED_OF_SIZE(type, _wide, T, quire::WIDEST_HEAD)

PAGED_OF(f32, float)
PAGED_OF(f16, __half)
PAGED_OF(bf16, __nv_bfloat16)
