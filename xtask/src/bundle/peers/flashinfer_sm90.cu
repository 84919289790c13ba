// FlashInfer's causal prefill with a paged cache for Hopper (its backend `fa3`), behind the functions that peers.py calls. Not in
// flashinfer.cu, because FlashInfer's headers for Hopper define the names of the others once more.
#include <cutlass/epilogue/collective/default_epilogue.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>

// Skips a header for tests of products, which need cuRAND.
#define FLASHINFER_CUTLASS_UTILS_CUH_

#include <flashinfer/attention/hopper/default_params.cuh>
#include <flashinfer/attention/hopper/prefill_sm90.cuh>
#include <flashinfer/attention/hopper/variants.cuh>
#include <flashinfer/attention/mask.cuh>
#include <flashinfer/attention/scheduler.cuh>

#include "call.h"

namespace peer {

using namespace flashinfer;

constexpr int HEAD = 128, BLOCK = 16;
using Number = cutlass::bfloat16_t;
using Params = BatchPrefillPagedParams<Number, Number, Number, int>;

PrefillPlanSM90Info plan;

}  // namespace peer

PEER int prefill_prepare(const Call *call) {
    using namespace peer;
    try {
        auto starts = multiples(call->batch, call->context / BLOCK), rows = multiples(call->batch, call->query_len);
        std::vector<int> lengths(call->batch, call->context);
        return flashinfer::PrefillSM90Plan<int>(call->floats, call->float_bytes, call->ints, call->pinned, call->int_bytes, plan,
                                                rows.data(), starts.data(), lengths.data(), rows.back(), call->batch, call->heads,
                                                call->kv_heads, HEAD, HEAD, BLOCK, true, false, sizeof(Number),
                                                static_cast<cudaStream_t>(call->stream));
    } catch (...) {
        return cudaErrorNotSupported;
    }
}

PEER int prefill_run(const Call *call) {
    using namespace peer;
    if (plan.same_schedule_for_all_heads) {
        return cudaErrorNotSupported;  // more than half a million rows
    }
    const auto place = [&](int64_t offset) { return GetPtrFromBaseOffset<int>(call->ints, offset); };
    Params params{};
    params.q_ptr = mutable_pointer<Number>(call->queries);
    params.k_ptr = mutable_pointer<Number>(call->keys);
    params.v_ptr = mutable_pointer<Number>(call->values);
    params.o_ptr = static_cast<Number *>(call->out);
    params.qo_tile_indices = place(plan.qo_tile_indices_offset);
    params.qo_indptr = place(plan.qo_indptr_offset);
    params.kv_indptr = place(plan.kv_indptr_offset);
    params.kv_indices = mutable_pointer<int>(call->tables);
    params.qo_lens = place(plan.qo_len_offset);
    params.kv_lens = place(plan.kv_len_offset);
    params.head_indices = place(plan.head_indices_offset);
    params.work_indptr = place(plan.work_indptr_offset);
    params.batch_indices = place(plan.batch_indices_offset);
    params.additional_params.sm_scale = call->scale;
    params.q_stride_n = params.o_stride_n = call->heads * HEAD;
    params.k_stride_n = params.v_stride_n = call->kv_heads * HEAD;
    params.q_stride_h = params.k_stride_h = params.v_stride_h = params.o_stride_h = HEAD;
    params.k_page_stride = params.v_page_stride = BLOCK * params.k_stride_n;
    params.nnz_qo = static_cast<int64_t>(call->batch) * call->query_len;
    params.num_qo_heads = call->heads;
    params.num_kv_heads = call->kv_heads;
    params.group_size = call->heads / call->kv_heads;
    params.page_size = BLOCK;
    params.window_left = -1;
    params.causal = true;
    try {
        return BatchPrefillWithPagedKVCacheDispatched<HEAD, HEAD, MaskMode::kCausal, false, false, StandardAttention>(
            params, true, static_cast<cudaStream_t>(call->stream));
    } catch (...) {
        return cudaErrorNotSupported;
    }
}
