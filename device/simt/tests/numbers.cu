// Conversions and arithmetic of the small formats, over arrays.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <quire/export.cuh>
#include <stdint.h>

__device__ __forceinline__ int index() { return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); }

extern "C" __global__ void encode(uint16_t* f16, uint16_t* bf16, uint8_t* e4m3, uint8_t* e5m2, const float* in, int count) {
    const int i = index();
    if (i >= count) return;
    f16[i] = __half_as_ushort(__float2half_rn(in[i]));
    bf16[i] = __bfloat16_as_ushort(__float2bfloat16_rn(in[i]));
    e4m3[i] = __nv_fp8_e4m3(in[i]).__x;
    e5m2[i] = __nv_cvt_float_to_fp8(in[i], __NV_SATFINITE, __NV_E5M2);
}
QUIRE_EXPORT(encode);

// All codes of each format.
extern "C" __global__ void decode(float* f16, float* bf16, float* e4m3, float* e5m2) {
    const int code = index();
    f16[code] = __half2float(__ushort_as_half(static_cast<unsigned short>(code)));
    bf16[code] = __bfloat162float(__ushort_as_bfloat16(static_cast<unsigned short>(code)));
    if (code >= 256) return;
    __nv_fp8_e4m3 byte;
    byte.__x = static_cast<uint8_t>(code);
    e4m3[code] = static_cast<float>(byte);
    const __half_raw wide = __nv_cvt_fp8_to_halfraw(static_cast<uint8_t>(code), __NV_E5M2);
    e5m2[code] = __half2float(__half(wide));
}
QUIRE_EXPORT(decode);

// Two numbers at a time, as from vector loads.
extern "C" __global__ void pairs(float* out, const __half2* a, const __half2* b, const __nv_bfloat162* c) {
    const int i = index();
    const float2 fused = __half22float2(__hfma2(a[i], b[i], __hadd2(a[i], b[i])));
    const float2 wide = __bfloat1622float2(__hmul2(c[i], c[i]));
    const __nv_fp8x2_e4m3 bytes(fused);
    const float2 narrow = __half22float2(__half2(bytes));
    out[6 * i] = fused.x;
    out[6 * i + 1] = fused.y;
    out[6 * i + 2] = wide.x;
    out[6 * i + 3] = wide.y;
    out[6 * i + 4] = narrow.x;
    out[6 * i + 5] = narrow.y;
}
QUIRE_EXPORT(pairs);

extern "C" __global__ void functions(float* out, const float* in) {
    const float x = in[threadIdx.x];
    float* mine = out + 8 * threadIdx.x;
    mine[0] = __expf(x);
    mine[1] = exp2f(x);
    mine[2] = rsqrtf(fabsf(x) + 1.0f);
    mine[3] = __fdividef(x, 3.0f);
    mine[4] = static_cast<float>(__float2int_rn(x));
    mine[5] = __uint_as_float(__float_as_uint(x) ^ 0x80000000u);
    mine[6] = static_cast<float>(__byte_perm(0x03020100u, 0x07060504u, 0x7531u) == 0x07050301u);
    mine[7] = fmaxf(__ldg(in + threadIdx.x), 0.0f);
}
QUIRE_EXPORT(functions);
