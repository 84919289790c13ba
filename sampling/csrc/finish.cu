// Last kernel of a step: sample_finish_{f32,f16,bf16}. Writes the token of a row; its log-probability, rank and
// alternatives if requested; and the slot's new state.
//
// Grid (rows), 512 threads. No two rows of a step share a slot.

#include "block.cuh"

namespace quire {

// Writes the `num_top` likeliest tokens of the raw row to `tops`, descending, ties by id, and returns their number. The
// row's part of `scaled` is no longer needed and holds the tokens before they are sorted.
template <class T>
__device__ __forceinline__ uint32_t likeliest(RowShared& shared, const SampleArgs& args, const RowView& row, float largest, double normaliser) {
    __shared__ uint32_t found;
    const T* logits = row.template logits<T>(args);
    const float none = __uint_as_float(0xff800000u);
    const auto possible = [&](uint32_t token, uint32_t& key) {
        const float logit = to_float(logits[token]);
        key = key_of(logit);
        return logit > none;
    };
    uint32_t least = 0, last = NONE;
    const Selected selected =
        select(shared, args.vocab, row.params->num_top, 0.0f, [&](uint32_t token, uint32_t& key, Mass& mass) {
            mass = 1;
            return possible(token, key);
        });
    if (selected.found) {
        least = selected.key;
        const Mass needed = selected.target - selected.above;
        if (needed < selected.at) {
            last = last_of_lowest(shared, args.vocab, needed, [&](uint32_t token) {
                uint32_t key;
                return possible(token, key) && key == least;
            });
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) found = 0;
    __syncthreads();
    uint32_t* list = reinterpret_cast<uint32_t*>(row.scaled(args));
    for (uint32_t token = threadIdx.x; token < args.vocab; token += ROW_THREADS) {
        uint32_t key;
        if (possible(token, key) && (key > least || (key == least && token <= last))) list[atomicAdd(&found, 1u)] = token;
    }
    __syncthreads();
    const uint32_t count = found;
    Top* tops = args.tops + static_cast<int64_t>(row.index) * args.top_stride;
    for (uint32_t i = threadIdx.x; i < count; i += ROW_THREADS) {
        const float logit = to_float(logits[list[i]]);
        const Mass own = pack(key_of(logit), list[i]);
        uint32_t position = 0;
        for (uint32_t j = 0; j < count; j++) position += pack(key_of(to_float(logits[list[j]])), list[j]) > own;
        tops[position] = {list[i], static_cast<float>(__dsub_rn(static_cast<double>(relative(logit, largest)), normaliser))};
    }
    return count;
}

template <class T>
__device__ __forceinline__ void finish(const SampleArgs& args) {
    __shared__ RowShared shared;
    const RowView row(args, blockIdx.x);
    if (!row.exists()) return;
    const Cut& cut = args.cuts[row.index];
    const Chunk* chunks = row.chunks(args);
    uint32_t token = cut.certain;
    if (token == NONE) {
        double sum = -static_cast<double>(__uint_as_float(0x7f800000u));
        for (uint32_t split = 0; split < args.splits; split++) {
            // Ids ascend with the chunks, so the lowest id wins a tie.
            if (chunks[split].sum > sum) {
                sum = chunks[split].sum;
                token = chunks[split].winner;
            }
        }
    }
    RowResult result = {token, 0.0f, 0, 0};
    if (row.is(ROW_LOGPROBS)) {
        const T* logits = row.template logits<T>(args);
        const float none = __uint_as_float(0xff800000u);
        uint32_t largest_key = 0;
        Mass mass = 0, greater = 0;
        for (uint32_t split = 0; split < args.splits; split++) {
            largest_key = max(largest_key, chunks[split].raw_key);
            mass += chunks[split].mass;
        }
        const float largest = fminf(of_key(largest_key), LARGEST);
        const double normaliser = mass ? ln_mass(mass) : 0.0;
        const float logit = to_float(logits[token]), own = isnan(logit) ? none : logit;
        for (uint32_t i = threadIdx.x; i < args.vocab; i += ROW_THREADS) greater += to_float(logits[i]) > own;
        greater = block_fold<ROW_THREADS>(greater, shared.warp_values, Sum());
        result.rank = 1 + static_cast<uint32_t>(greater);
        result.logprob =
            own > none ? static_cast<float>(__dsub_rn(static_cast<double>(relative(own, largest)), normaliser)) : none;
        if (row.params->num_top) result.num_top = likeliest<T>(shared, args, row, largest, normaliser);
    }
    if (threadIdx.x == 0) {
        args.results[row.index] = result;
        const uint32_t len = row.output_len();
        if (row.counts) row.counts[token]++;
        row.state[1 + len % args.tail_tokens] = token;
        row.state[0] = len + 1;
    }
}

}  // namespace quire

QUIRE_SAMPLE_ENTRIES(sample_finish, quire::ROW_THREADS, quire::finish)
