// convert_fp8: converts elements to 8 bits (convert_fp8_from_<type>: source / scale) and back (convert_fp8_to_<type>: byte
// * scale).
//
// Grid of any size, 256 threads; a thread converts 8 elements at a time.

#include <quire/export.cuh>

#include "cache_args.cuh"
#include "eight.cuh"

namespace quire {

constexpr uint32_t CONVERT_THREADS = 256;

template <class T, bool QUANTISE>
__device__ __forceinline__ void convert_fp8(const ConvertArgs& args) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * CONVERT_THREADS * 8;
    for (int64_t i = (static_cast<int64_t>(blockIdx.x) * CONVERT_THREADS + threadIdx.x) * 8; i < args.elements; i += step) {
        const float scale = args.scales ? args.scales[i / args.elements_per_scale % args.num_scales] : 1.0f;
        Eight<T> eight;
        float numbers[8];
        if constexpr (QUANTISE) {
            eight.load(static_cast<const T*>(args.source) + i);
            eight.get(numbers);
            *reinterpret_cast<uint2*>(static_cast<uint8_t*>(args.target) + i) = quantise(args.format, numbers, scale);
        } else {
            const uint2 bytes = *reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(args.source) + i);
            dequantise(args.format, bytes, scale, numbers);
            eight.set(numbers);
            eight.store(static_cast<T*>(args.target) + i);
        }
    }
}

}  // namespace quire

#define CONVERT_FP8(name, T, QUANTISE)                                                                 \
    extern "C" __global__ void __launch_bounds__(quire::CONVERT_THREADS)                               \
        name(const void* source, void* target, const float* scales, const quire::ConvertShape shape) { \
        quire::wait_for_launches();                                                                    \
        quire::convert_fp8<T, QUANTISE>({shape, source, target, scales});                              \
    }                                                                                                  \
    QUIRE_EXPORT_OVERLAPPED(name, 0);

CONVERT_FP8(convert_fp8_from_f16, __half, true)
CONVERT_FP8(convert_fp8_from_bf16, __nv_bfloat16, true)
CONVERT_FP8(convert_fp8_from_f32, float, true)
CONVERT_FP8(convert_fp8_to_f16, __half, false)
CONVERT_FP8(convert_fp8_to_bf16, __nv_bfloat16, false)
CONVERT_FP8(convert_fp8_to_f32, float, false)
