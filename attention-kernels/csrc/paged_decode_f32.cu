// cuda.paged_v1 and cuda.paged_v2 for f32 queries at any head size up to 256, over a cache of f32 or of any 8-bit format:
// entry paged_decode_f32. Grid and block as paged_decode.cu.

#include <quire/export.cuh>

#include "paged_decode.cuh"

extern "C" __global__ void __launch_bounds__(quire::DECODE_THREADS)
    paged_decode_f32(QUIRE_ATTENTION_PARAMETERS) {
    quire::paged_decode<quire::GenericRows>(QUIRE_ATTENTION_ARGS);
}
QUIRE_EXPORT(paged_decode_f32);
