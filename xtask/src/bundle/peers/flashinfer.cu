// FlashInfer's batch decode with a paged cache behind the functions that peers.py calls. Its sources come from its package, and its
// own plan and launcher choose grids, partitions and shared memory. `flashinfer_prepare` plans, `flashinfer_run` enqueues; both
// return a cudaError_t.
#include <numeric>
#include <vector>

#include <flashinfer/utils.cuh>

// Only groups of four query heads: the compiler takes minutes for all of them.
#undef DISPATCH_GQA_GROUP_SIZE
#define DISPATCH_GQA_GROUP_SIZE(size, NAME, ...) \
    if (size == 4) {                             \
        constexpr size_t NAME = 4;               \
        __VA_ARGS__                              \
    } else {                                     \
        return cudaErrorInvalidValue;            \
    }

#include <flashinfer/attention/decode.cuh>
#include <flashinfer/attention/default_decode_params.cuh>
#include <flashinfer/attention/scheduler.cuh>
#include <flashinfer/attention/variants.cuh>

#include "call.h"

// nvcc does not accept an unnamed namespace here: FlashInfer has one too.
namespace peer {

using namespace flashinfer;

constexpr int HEAD = 128, BLOCK = 16, GROUP = 4;
constexpr auto NONE = PosEncodingMode::kNone;
constexpr size_t FLOAT_BYTES = 128 << 20, INT_BYTES = 8 << 20;  // as FlashInfer's documentation advises
using Params = BatchDecodeParams<nv_bfloat16, nv_bfloat16, nv_bfloat16, int>;
using Variant = DefaultAttention<false, false, false, false>;

DecodePlanInfo plan;
void *floats, *ints, *pinned;
int *starts, *last;  // [batch + 1] first table entry of each sequence; [batch] tokens in its last block

template <class T>
T *place(void *base, int64_t offset) {
    return GetPtrFromBaseOffset<T>(base, offset);
}

int upload(int **to, const std::vector<int> &from) {
    if (int code = cudaMalloc(to, from.size() * sizeof(int))) {
        return code;
    }
    return cudaMemcpy(*to, from.data(), from.size() * sizeof(int), cudaMemcpyHostToDevice);
}

// FlashInfer throws where it does not support something.
template <class Body>
int guarded(Body body) {
    try {
        return body();
    } catch (...) {
        return cudaErrorNotSupported;
    }
}

}  // namespace peer

using namespace peer;

PEER int flashinfer_prepare(const Call *call) {
    return guarded([&]() -> int {
        std::vector<int> first(call->batch + 1), tokens(call->batch, BLOCK);
        for (int i = 0; i <= call->batch; i++) {
            first[i] = i * (call->context / BLOCK);
        }
        if (int code = upload(&starts, first)) {
            return code;
        }
        if (int code = upload(&last, tokens)) {
            return code;
        }
        if (int code = cudaMalloc(&floats, FLOAT_BYTES)) {
            return code;
        }
        if (int code = cudaMalloc(&ints, INT_BYTES)) {
            return code;
        }
        if (int code = cudaMallocHost(&pinned, INT_BYTES)) {
            return code;
        }
        const auto estimate = BatchDecodeWithPagedKVCacheWorkEstimationDispatched<GROUP, HEAD, NONE, Variant, Params>;
        if (int code = DecodePlan<HEAD, NONE, Variant, Params>(
                floats, FLOAT_BYTES, ints, pinned, INT_BYTES, plan, first.data(), call->batch, call->heads, BLOCK, false,
                static_cast<cudaStream_t>(call->stream), estimate)) {
            return code;
        }
        return cudaStreamSynchronize(static_cast<cudaStream_t>(call->stream));
    });
}

PEER int flashinfer_run(const Call *call) {
    return guarded([&]() -> int {
        using Number = nv_bfloat16;
        auto *keys = static_cast<Number *>(const_cast<void *>(call->keys));
        auto *values = static_cast<Number *>(const_cast<void *>(call->values));
        const paged_kv_t<Number, int> cache(call->kv_heads, BLOCK, HEAD, call->batch, QKVLayout::kNHD, keys, values,
                                            const_cast<int *>(call->tables), starts, last);
        auto *queries = static_cast<Number *>(const_cast<void *>(call->queries));
        Params params(queries, nullptr, cache, static_cast<Number *>(call->out), nullptr, nullptr, call->heads,
                      call->heads * HEAD, HEAD, -1, 0, call->scale, 1, 1e4);
        params.padded_batch_size = plan.padded_batch_size;
        params.request_indices = place<int>(ints, plan.request_indices_offset);
        params.kv_tile_indices = place<int>(ints, plan.kv_tile_indices_offset);
        params.o_indptr = place<int>(ints, plan.o_indptr_offset);
        params.kv_chunk_size_ptr = place<int>(ints, plan.kv_chunk_size_ptr_offset);
        auto *partial = plan.split_kv ? place<Number>(floats, plan.v_offset) : nullptr;
        auto *sums = plan.split_kv ? place<float>(floats, plan.s_offset) : nullptr;
        return BatchDecodeWithPagedKVCacheDispatched<HEAD, NONE, Variant>(params, partial, sums,
                                                                          static_cast<cudaStream_t>(call->stream));
    });
}
