// vLLM's paged attention v1 and v2 behind the functions that peers.py calls. Their sources come from vLLM's package.
//
// `NAME_prepare` allocates what a call needs, `NAME_run` enqueues it. Grids and shared memory are those of vLLM's own launchers,
// paged_attention_v1.cu and paged_attention_v2.cu, which need PyTorch's headers. Both functions return a cudaError_t.
#include <algorithm>

#include "attention/attention_kernels.cuh"
#include "call.h"

namespace {

constexpr int HEAD = 128, BLOCK = 16, THREADS = 128, PARTITION = 512;
constexpr auto SAME = vllm::Fp8KVCacheDataType::kAuto;
// Outputs of half of the warps, in shared memory.
constexpr int OUTPUTS = THREADS / 32 / 2 * HEAD * static_cast<int>(sizeof(float));

float *scales;  // of keys and values, 1
float *sums, *maxima;
__nv_bfloat16 *partial;

int partitions(const Call &call) {
    return (call.context + PARTITION - 1) / PARTITION;
}

int allocate_scales() {
    const float one = 1;
    if (int code = cudaMalloc(&scales, sizeof one)) {
        return code;
    }
    return cudaMemcpy(scales, &one, sizeof one, cudaMemcpyHostToDevice);
}

template <class T>
const T *as(const void *pointer) {
    return static_cast<const T *>(pointer);
}

}  // namespace

PEER int vllm_v1_prepare(const Call *call) {
    auto kernel = vllm::paged_attention_v1_kernel<__nv_bfloat16, __nv_bfloat16, HEAD, BLOCK, THREADS, SAME, false>;
    const int logits = call->context * static_cast<int>(sizeof(float));
    const auto most = cudaFuncAttributeMaxDynamicSharedMemorySize;
    if (int code = cudaFuncSetAttribute(kernel, most, std::max(logits, OUTPUTS))) {
        return code;
    }
    return allocate_scales();
}

PEER int vllm_v1_run(const Call *call) {
    const int logits = call->context * static_cast<int>(sizeof(float));
    const dim3 grid(call->heads, call->batch, 1);
    const int block_stride = call->kv_heads * HEAD * BLOCK;
    vllm::paged_attention_v1_kernel<__nv_bfloat16, __nv_bfloat16, HEAD, BLOCK, THREADS, SAME, false>
        <<<grid, THREADS, std::max(logits, OUTPUTS), static_cast<cudaStream_t>(call->stream)>>>(
            static_cast<__nv_bfloat16 *>(call->out), as<__nv_bfloat16>(call->queries), as<__nv_bfloat16>(call->keys),
            as<__nv_bfloat16>(call->values), call->kv_heads, call->scale, call->tables, call->lengths,
            call->context / BLOCK, nullptr, call->heads * HEAD, block_stride, HEAD * BLOCK, scales, scales, 0, 0, 0, 0, 0);
    return cudaGetLastError();
}

PEER int vllm_v2_prepare(const Call *call) {
    const size_t count = static_cast<size_t>(call->batch) * call->heads * partitions(*call);
    if (int code = cudaMalloc(&sums, count * sizeof(float))) {
        return code;
    }
    if (int code = cudaMalloc(&maxima, count * sizeof(float))) {
        return code;
    }
    if (int code = cudaMalloc(&partial, count * HEAD * sizeof(__nv_bfloat16))) {
        return code;
    }
    return allocate_scales();
}

PEER int vllm_v2_run(const Call *call) {
    const int count = partitions(*call);
    const dim3 grid(call->heads, call->batch, count), rows(call->heads, call->batch);
    const int logits = PARTITION * static_cast<int>(sizeof(float));
    const int block_stride = call->kv_heads * HEAD * BLOCK;
    const auto stream = static_cast<cudaStream_t>(call->stream);
    vllm::paged_attention_v2_kernel<__nv_bfloat16, __nv_bfloat16, HEAD, BLOCK, THREADS, SAME, false, PARTITION>
        <<<grid, THREADS, std::max(logits, OUTPUTS), stream>>>(
            sums, maxima, partial, as<__nv_bfloat16>(call->queries), as<__nv_bfloat16>(call->keys),
            as<__nv_bfloat16>(call->values), call->kv_heads, call->scale, call->tables, call->lengths,
            call->context / BLOCK, nullptr, call->heads * HEAD, block_stride, HEAD * BLOCK, scales, scales, 0, 0, 0, 0, 0);
    vllm::paged_attention_v2_reduce_kernel<__nv_bfloat16, HEAD, THREADS, PARTITION>
        <<<rows, THREADS, 2 * count * sizeof(float), stream>>>(
            static_cast<__nv_bfloat16 *>(call->out), sums, maxima, partial, call->lengths, count);
    return cudaGetLastError();
}
