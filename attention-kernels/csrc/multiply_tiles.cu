// multiply_tiles: measures the rate of mma.sync on a GPU's tensor cores for `quire bench`. The engine does not launch it.
//
// Grid of any size, 256 threads: each warp multiplies 16x16 by 16x8 tiles of bf16 from registers, 8 products at a time,
// and adds them to its own sums. `x` and `y` contain two bf16 each, which fill the tiles. Each thread writes the sum of
// its sums, so no product can be optimised away.

#include <quire/export.cuh>
#include <quire/ptx.cuh>

#include <stdint.h>

namespace quire {

constexpr uint32_t MULTIPLY_THREADS = 256, CHAINS = 8;

__device__ __forceinline__ void multiply_tiles(float* sums, uint32_t x, uint32_t y, uint32_t steps) {
    const uint32_t a[4] = {x, x, x, x}, b[2] = {y, y};
    float chains[CHAINS][4] = {};
    for (uint32_t step = 0; step < steps; step++) {
#pragma unroll
        for (uint32_t c = 0; c < CHAINS; c++) mma_m16n8k16<__nv_bfloat16>(chains[c], a, b);
    }
    float sum = 0.0f;
#pragma unroll
    for (uint32_t c = 0; c < CHAINS; c++) {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) sum += chains[c][i];
    }
    sums[blockIdx.x * MULTIPLY_THREADS + threadIdx.x] = sum;
}

}  // namespace quire

extern "C" __global__ void __launch_bounds__(quire::MULTIPLY_THREADS)
    multiply_tiles(float* sums, const uint32_t x, const uint32_t y, const uint32_t steps) {
    quire::multiply_tiles(sums, x, y, steps);
}
QUIRE_EXPORT(multiply_tiles);
