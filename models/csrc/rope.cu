// Cosines and sines of a step's positions, computed once for all layers: entry rope_table.
//
// Grid (rows), 128 threads.

#include <quire/export.cuh>
#include <math.h>
#include <stdint.h>

namespace quire {

constexpr uint32_t ROPE_THREADS = 128;

// positions: [rows]; frequencies: [half]; table: [rows, 2 * half], each row its cosines, then its sines.
__device__ __forceinline__ void rope_table(const uint32_t* positions, const float* frequencies, float* table,
                                           uint32_t half) {
    const float position = static_cast<float>(positions[blockIdx.x]);
    float* row = table + static_cast<int64_t>(blockIdx.x) * 2 * half;
    for (uint32_t i = threadIdx.x; i < half; i += ROPE_THREADS) {
        const float angle = position * frequencies[i];
        row[i] = cosf(angle);
        row[half + i] = sinf(angle);
    }
}

}  // namespace quire

extern "C" __global__ void __launch_bounds__(quire::ROPE_THREADS)
    rope_table(const uint32_t* positions, const float* frequencies, float* table, const uint32_t half) {
    quire::rope_table(positions, frequencies, table, half);
}
QUIRE_EXPORT(rope_table);
