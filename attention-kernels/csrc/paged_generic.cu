// cuda.generic: queries of every type and head size up to 576, over a cache of the same type or any 8-bit format. Kernels
// paged_generic_<type> for heads of up to 256 elements, and paged_generic_<type>_wide; paged_chosen_<type>[_wide] for the tokens that an
// indexer chose. Grid and threads as in paged_decode.cu.

#include <quire/export.cuh>

#include "paged_decode.cuh"

// One block per multiprocessor suffices: wide heads may take all registers that they need.
#define PAGED_GENERIC(name, T, MAX_HEAD)                                                                      \
    extern "C" __global__ void __launch_bounds__(quire::DECODE_THREADS, 1) name(QUIRE_ATTENTION_PARAMETERS) { \
        quire::wait_for_launches();                                                                           \
        quire::paged_decode<quire::GenericRows<T, MAX_HEAD>>(QUIRE_ATTENTION_ARGS);                           \
    }                                                                                                         \
    QUIRE_EXPORT_TILED(name, 0, quire::DECODE_THREADS, 1);
// The same for tokens that an indexer chose.
#define PAGED_CHOSEN(name, T, MAX_HEAD)                                                                    \
    extern "C" __global__ void __launch_bounds__(quire::DECODE_THREADS, 1) name(QUIRE_CHOSEN_PARAMETERS) { \
        quire::wait_for_launches();                                                                        \
        quire::paged_decode<quire::GenericRows<T, MAX_HEAD>>(QUIRE_CHOSEN_ARGS);                           \
    }                                                                                                      \
    QUIRE_EXPORT_TILED(name, 0, quire::DECODE_THREADS, 1);

PAGED_GENERIC(paged_generic_f32, float, 256)
PAGED_GENERIC(paged_generic_f32_wide, float, quire::WIDEST_HEAD)
PAGED_GENERIC(paged_generic_f16, __half, 256)
PAGED_GENERIC(paged_generic_f16_wide, __half, quire::WIDEST_HEAD)
PAGED_GENERIC(paged_generic_bf16, __nv_bfloat16, 256)
PAGED_GENERIC(paged_generic_bf16_wide, __nv_bfloat16, quire::WIDEST_HEAD)

PAGED_CHOSEN(paged_chosen_f32, float, 256)
PAGED_CHOSEN(paged_chosen_f32_wide, float, quire::WIDEST_HEAD)
PAGED_CHOSEN(paged_chosen_f16, __half, 256)
PAGED_CHOSEN(paged_chosen_f16_wide, __half, quire::WIDEST_HEAD)
PAGED_CHOSEN(paged_chosen_bf16, __nv_bfloat16, 256)
PAGED_CHOSEN(paged_chosen_bf16_wide, __nv_bfloat16, quire::WIDEST_HEAD)
