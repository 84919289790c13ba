// cuda.generic: f32 queries of any head size up to 256, over a cache of f32 or any 8-bit format. Kernel paged_decode_f32.
// Grid and threads as in paged_decode.cu.

#include <quire/export.cuh>

#include "paged_decode.cuh"

extern "C" __global__ void __launch_bounds__(quire::DECODE_THREADS)
    paged_decode_f32(QUIRE_ATTENTION_PARAMETERS) {
    quire::paged_decode<quire::GenericRows>(QUIRE_ATTENTION_ARGS);
}
QUIRE_EXPORT(paged_decode_f32);
