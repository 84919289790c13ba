// Kernels between steps: sample_history (the history of a slot's sequence, also after a preemption), sample_fork (one
// slot becomes a copy of another) and sample_copy_tokens (drawn tokens become input tokens of the next step). Last kernel of a
// step with drafts: sample_accept (the tokens up to the first wrong draft of a slot become output).
//
// 512 threads. Grid (1), one launch per changed slot; sample_copy_tokens: (ceil(copies / 512)); sample_accept: (ceil(rows / 512)).

#include "args.cuh"

namespace quire {

__device__ __forceinline__ void history(const uint32_t* tokens, uint32_t* counts, uint32_t* state, const HistoryShape& shape) {
    counts += static_cast<int64_t>(shape.slot) * shape.vocab;
    state += static_cast<int64_t>(shape.slot) * (1 + shape.tail_tokens);
    const uint32_t* last = tokens + shape.prompt_tokens;
    if (shape.penalised) {
        for (uint32_t i = threadIdx.x; i < shape.vocab; i += ROW_THREADS) counts[i] = 0;
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < shape.prompt_tokens; i += ROW_THREADS) {
            if (tokens[i] < shape.vocab) atomicOr(&counts[tokens[i]], IN_PROMPT);
        }
        for (uint32_t i = threadIdx.x; i < shape.last_tokens; i += ROW_THREADS) {
            if (last[i] < shape.vocab) atomicAdd(&counts[last[i]], 1u);
        }
    }
    const uint32_t kept = min(shape.last_tokens, shape.tail_tokens);
    for (uint32_t i = threadIdx.x; i < kept; i += ROW_THREADS) {
        state[1 + (shape.output_len - kept + i) % shape.tail_tokens] = last[shape.last_tokens - kept + i];
    }
    if (threadIdx.x == 0) state[0] = shape.output_len;
}

__device__ __forceinline__ void copy(uint32_t* array, uint32_t words, uint32_t from, uint32_t to) {
    const uint32_t* source = array + static_cast<int64_t>(from) * words;
    uint32_t* target = array + static_cast<int64_t>(to) * words;
    for (uint32_t i = threadIdx.x; i < words; i += ROW_THREADS) target[i] = source[i];
}

// A slot whose output is empty copies nothing.
__device__ __forceinline__ void copy_token(const TokenCopy* copies, const uint32_t* state, uint32_t* tokens, const CopyShape& shape) {
    const uint32_t i = blockIdx.x * ROW_THREADS + threadIdx.x;
    if (i >= shape.copies) return;
    const uint32_t* own = state + static_cast<int64_t>(copies[i].slot) * (1 + shape.tail_tokens);
    if (own[0]) tokens[copies[i].index] = own[1 + (own[0] - 1) % shape.tail_tokens];
}

// A thread for each row; that of the first row of a slot with drafts has work.
__device__ __forceinline__ void accept(const Row* rows, const RowParams* params, const RowResult* results, uint32_t* counts,
                                       uint32_t* state, const AcceptShape& shape) {
    const uint32_t first = blockIdx.x * ROW_THREADS + threadIdx.x;
    if (first >= shape.rows) return;
    const Row row = rows[first];
    if (row.slot == NONE || row.num_drafts || row.draft == NONE) return;
    const int64_t slot = row.slot;
    state += slot * (1 + shape.tail_tokens);
    counts = params[slot].flags & ROW_PENALISED ? counts + slot * shape.vocab : nullptr;
    // The last row has no draft, so its token equals none.
    bool is_right = true;
    for (uint32_t i = first; is_right; i++) {
        append_token(counts, state, shape.tail_tokens, results[i].token);
        is_right = results[i].token == rows[i].draft;
    }
}

}  // namespace quire

extern "C" __global__ void __launch_bounds__(quire::ROW_THREADS)
    sample_history(const uint32_t* tokens, uint32_t* counts, uint32_t* state, const quire::HistoryShape shape) {
    quire::wait_for_launches();
    quire::history(tokens, counts, state, shape);
}
QUIRE_EXPORT_OVERLAPPED(sample_history, 0);

extern "C" __global__ void __launch_bounds__(quire::ROW_THREADS)
    sample_fork(quire::RowParams* params, uint32_t* lists, uint32_t* constraints, uint32_t* allowed, uint32_t* counts,
                uint32_t* state, const quire::ForkShape shape) {
    quire::wait_for_launches();
    const uint32_t flags = params[shape.from].flags, mask_words = (shape.vocab + 31) / 32;
    quire::copy(lists, shape.list_words, shape.from, shape.to);
    quire::copy(state, 1 + shape.tail_tokens, shape.from, shape.to);
    if (flags & quire::ROW_CONSTRAINED) quire::copy(constraints, mask_words, shape.from, shape.to);
    if (flags & quire::ROW_ALLOWED) quire::copy(allowed, mask_words, shape.from, shape.to);
    if (flags & quire::ROW_PENALISED) quire::copy(counts, shape.vocab, shape.from, shape.to);
    if (threadIdx.x == 0) {
        params[shape.to] = params[shape.from];
        params[shape.to].sequence = shape.sequence;
    }
}
QUIRE_EXPORT_OVERLAPPED(sample_fork, 0);

extern "C" __global__ void __launch_bounds__(quire::ROW_THREADS)
    sample_copy_tokens(const quire::TokenCopy* copies, const uint32_t* state, uint32_t* tokens, const quire::CopyShape shape) {
    quire::wait_for_launches();
    quire::copy_token(copies, state, tokens, shape);
}
QUIRE_EXPORT_OVERLAPPED(sample_copy_tokens, 0);

extern "C" __global__ void __launch_bounds__(quire::ROW_THREADS)
    sample_accept(const quire::Row* rows, const quire::RowParams* params, const quire::RowResult* results, uint32_t* counts,
                  uint32_t* state, const quire::AcceptShape shape) {
    quire::wait_for_launches();
    quire::accept(rows, params, results, counts, state, shape);
}
QUIRE_EXPORT_OVERLAPPED(sample_accept, 0);
