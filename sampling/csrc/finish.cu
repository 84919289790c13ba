// Last kernel of a step: sample_finish_{f32,f16,bf16}. Places the cuts within their bins, draws from the tokens that were
// undecided, and writes the token of a row; its log-probability, rank and alternatives if requested; and the slot's new
// state, unless it has drafts: sample_accept does that, because the tokens behind a wrong draft do not count.
//
// Grid (rows), 512 threads.

#include "cut.cuh"
#include "draw.cuh"

namespace quire {

// Writes the `num_top` likeliest tokens of the raw row to `tops`, descending, ties by id, and returns their number. The
// row's part of `scaled` is no longer needed and holds the tokens before they are sorted.
template <class T>
__device__ __forceinline__ uint32_t likeliest(RowShared& shared, const SampleArgs& args, const RowView& row, float largest, double normaliser) {
    __shared__ uint32_t found;
    const Values<T> logits = row.logits<T>(args);
    const float none = __uint_as_float(0xff800000u);
    uint32_t least = 0, last = NONE;
    const Selected selected = select(shared, row.params->num_top, [&](const auto& use) {
        each_token(logits, [&](uint32_t, float logit) {
            if (logit > none) use(key_of(logit), Mass(1));
        });
    });
    if (selected.found) {
        least = selected.key;
        const Mass needed = row.params->num_top - selected.above;
        if (needed < selected.at) {
            last = last_of_lowest(shared, needed, [&](const auto& use) {
                each_token(logits, [&](uint32_t token, float logit) {
                    if (logit > none && key_of(logit) == least) use(token);
                });
            });
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) found = 0;
    __syncthreads();
    uint32_t* list = reinterpret_cast<uint32_t*>(row.scaled_tokens(args));
    each_token(logits, [&](uint32_t token, float logit) {
        const uint32_t key = key_of(logit);
        if (logit > none && (key > least || (key == least && token <= last))) list[atomicAdd(&found, 1u)] = token;
    });
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

// Returns the token of a row that is not certain.
__device__ __forceinline__ uint32_t drawn_token(RowShared& shared, const SampleArgs& args, const RowView& row, const Cut& bounds) {
    __shared__ Winner winners[ROW_THREADS / 32];
    const Values<float> scaled = row.scaled(args);
    const Mass* list = row.scratch(args);
    const bool is_typical = row.params->typical_p < 1.0f;
    Cut cut = bounds;
    place(shared, *row.params, scaled, list, bounds, cut);
    Draw drawn = {*row.params, cut.output_len, cut.first_sum};
    if (!is_typical) {
        const Chunk* chunks = row.chunks(args);
        for (uint32_t split = threadIdx.x; split < args.splits; split += ROW_THREADS) {
            drawn.best = GreaterSum()(drawn.best, {chunks[split].sum, chunks[split].winner});
        }
    } else if (!kept(cut, cut.largest, cut.first)) {
        // Only typical_p can drop the likeliest token.
        drawn.bound = drawn.best.sum;
    }
    if (is_typical || !is_listed(bounds)) {
        drawn.add_each<ROW_THREADS>(scaled, 0, scaled.end(), Always(), [&](uint32_t token, float logit) {
            return kept(cut, logit, token) && (is_typical || undecided(bounds, bin_of(cut, logit)));
        });
    } else {
        each_undecided(scaled, list, bounds, [&](uint32_t token, float logit) {
            if (kept(cut, logit, token)) drawn.add(token, logit);
        });
    }
    return block_fold<ROW_THREADS>(drawn.best, winners, GreaterSum()).token;
}

template <class T>
__device__ __forceinline__ void finish(const SampleArgs& args) {
    __shared__ RowShared shared;
    __shared__ RowView::Shared row_shared;
    const RowView row(args, blockIdx.x, sizeof(T), row_shared);
    if (!row.exists()) return;
    __shared__ Cut bounds;
    copy_words(bounds, args.cuts[row.index]);
    __syncthreads();
    const uint32_t token = bounds.certain != NONE ? bounds.certain : drawn_token(shared, args, row, bounds);
    RowResult result = {token, 0.0f, 0, 0};
    if (row.is(ROW_LOGPROBS)) {
        const Values<T> logits = row.logits<T>(args);
        const float none = __uint_as_float(0xff800000u), largest = bounds.raw_largest;
        Mass mass = 0, greater = 0;
        for (uint32_t split = threadIdx.x; split < args.splits; split += ROW_THREADS) mass += row.chunks(args)[split].mass;
        mass = block_fold<ROW_THREADS>(mass, shared.warp_values, Sum());
        const double normaliser = mass ? ln_mass(mass) : 0.0;
        const float logit = to_float(logits[token]), own = isnan(logit) ? none : logit;
        each_token(logits, [&](uint32_t, float other) { greater += other > own; });
        greater = block_fold<ROW_THREADS>(greater, shared.warp_values, Sum());
        result.rank = 1 + static_cast<uint32_t>(greater);
        result.logprob =
            own > none ? static_cast<float>(__dsub_rn(static_cast<double>(relative(own, largest)), normaliser)) : none;
        if (row.params->num_top) result.num_top = likeliest<T>(shared, args, row, largest, normaliser);
    }
    if (threadIdx.x == 0) {
        args.results[row.index] = result;
        const bool has_drafts = row.num_drafts || row_shared.row.draft != NONE;
        if (!has_drafts) append_token(row.counts, row.state, args.tail_tokens, token);
    }
}

}  // namespace quire

QUIRE_SAMPLE_ENTRIES(sample_finish, quire::ROW_THREADS, quire::finish)
