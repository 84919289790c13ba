// FlashInfer's batch decode with a paged cache, on CUDA cores and on tensor cores, behind the functions that peers.py calls. The second
// is what its decode wrapper runs with `use_tensor_cores`: a prefill with one query row per sequence. FlashInfer's own plans and
// launchers choose grids, partitions and shared memory. Its sources come from its package.
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
#include <flashinfer/attention/default_prefill_params.cuh>
#include <flashinfer/attention/prefill.cuh>
#include <flashinfer/attention/scheduler.cuh>
#include <flashinfer/attention/variants.cuh>

#include "call.h"

// nvcc does not accept an unnamed namespace here: FlashInfer has one too.
namespace peer {

using namespace flashinfer;

using Number = nv_bfloat16;
constexpr int HEAD = 128, BLOCK = 16, GROUP = 4;
constexpr uint32_t TILE = 16;  // rows of a tile, which FlashInfer takes for one query row in each of four heads
constexpr auto NONE = PosEncodingMode::kNone;
constexpr bool PDL = true;  // as its Python interface does on this architecture
using Variant = DefaultAttention<false, false, false, false>;
using DecodeParams = BatchDecodeParams<Number, Number, Number, int>;
using PrefillParams = BatchPrefillPagedParams<Number, Number, Number, int>;

DecodePlanInfo decode;
PrefillPlanInfo prefill;

template <class T>
T *place(void *base, int64_t offset) {
    return GetPtrFromBaseOffset<T>(base, offset);
}

paged_kv_t<Number, int> cache(const Call &call) {
    return {uint32_t(call.kv_heads),
            BLOCK,
            HEAD,
            uint32_t(call.batch),
            QKVLayout::kNHD,
            mutable_pointer<Number>(call.keys),
            mutable_pointer<Number>(call.values),
            mutable_pointer<int>(call.tables),
            mutable_pointer<int>(call.starts),
            mutable_pointer<int>(call.last)};
}

cudaStream_t stream(const Call &call) {
    return static_cast<cudaStream_t>(call.stream);
}

// Fills what both kinds of parameters have, for a plan.
template <class Params, class Plan>
void fill(Params &params, const Plan &plan, const Call &call) {
    params.padded_batch_size = plan.padded_batch_size;
    params.request_indices = place<int>(call.ints, plan.request_indices_offset);
    params.kv_tile_indices = place<int>(call.ints, plan.kv_tile_indices_offset);
    params.o_indptr = place<int>(call.ints, plan.o_indptr_offset);
    params.kv_chunk_size_ptr = place<int>(call.ints, plan.kv_chunk_size_ptr_offset);
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

PEER int decode_prepare(const Call *call) {
    return guarded([&]() -> int {
        auto starts = multiples(call->batch, call->context / BLOCK);
        const auto estimate = BatchDecodeWithPagedKVCacheWorkEstimationDispatched<GROUP, HEAD, NONE, Variant, DecodeParams>;
        return DecodePlan<HEAD, NONE, Variant, DecodeParams>(call->floats, call->float_bytes, call->ints, call->pinned,
                                                             call->int_bytes, decode, starts.data(), call->batch, call->heads,
                                                             BLOCK, false, stream(*call), estimate);
    });
}

PEER int decode_run(const Call *call) {
    return guarded([&]() -> int {
        DecodeParams params(mutable_pointer<Number>(call->queries), nullptr, cache(*call), static_cast<Number *>(call->out),
                            nullptr, nullptr, call->heads, call->heads * HEAD, HEAD, -1, 0, call->scale, 1, 1e4);
        fill(params, decode, *call);
        auto *partial = decode.split_kv ? place<Number>(call->floats, decode.v_offset) : nullptr;
        auto *sums = decode.split_kv ? place<float>(call->floats, decode.s_offset) : nullptr;
        return BatchDecodeWithPagedKVCacheDispatched<HEAD, NONE, Variant>(params, partial, sums, PDL, stream(*call));
    });
}

PEER int tensor_decode_prepare(const Call *call) {
    return guarded([&]() -> int {
        auto starts = multiples(call->batch, call->context / BLOCK), rows = multiples(call->batch, call->query_len);
        if (int code = PrefillPlan<int>(call->floats, call->float_bytes, call->ints, call->pinned, call->int_bytes, prefill,
                                        rows.data(), starts.data(), rows.back(), call->batch, call->heads, call->kv_heads, HEAD,
                                        HEAD, BLOCK, false, sizeof(Number), -1, -1, false, 0, 0, stream(*call))) {
            return code;
        }
        return prefill.cta_tile_q == TILE ? cudaSuccess : cudaErrorNotSupported;
    });
}

PEER int tensor_decode_run(const Call *call) {
    return guarded([&]() -> int {
        PrefillParams params(mutable_pointer<Number>(call->queries), cache(*call), nullptr, mutable_pointer<int>(call->rows),
                             nullptr, nullptr, static_cast<Number *>(call->out), nullptr, nullptr, call->heads,
                             call->heads * HEAD, HEAD, -1, 0, call->scale, 1, 1e4);
        fill(params, prefill, *call);
        params.qo_tile_indices = place<int>(call->ints, prefill.qo_tile_indices_offset);
        params.max_total_num_rows = prefill.total_num_rows;
        Number *partial = nullptr;
        float *sums = nullptr;
        if (prefill.split_kv) {
            params.merge_indptr = place<int>(call->ints, prefill.merge_indptr_offset);
            partial = place<Number>(call->floats, prefill.v_offset);
            sums = place<float>(call->floats, prefill.s_offset);
        }
        return BatchPrefillWithPagedKVCacheDispatched<TILE, HEAD, HEAD, NONE, false, MaskMode::kNone, Variant>(
            params, partial, sums, PDL, stream(*call));
    });
}
