// Second kernel of a step: sample_filter_{f32,f16,bf16}. Bounds the cuts of min_p, top_k and top_p in one pass over the
// scaled logits. sample_finish places them within the bins that remain undecided.
//
// Grid (splits, rows), 256 threads. Without top_k and top_p, block 0 does what there is to do. Otherwise each block adds
// the histogram of its chunk to that of the row, and the last one to arrive finds the bins.

#include "adjust.cuh"
#include "block.cuh"
#include "filter.cuh"

namespace quire {

// Restores the stop ids that were held back, because everything else is banned. Returns the likeliest of them. All blocks
// of a row write the same.
template <class T>
__device__ __forceinline__ Mass restore_stops(const SampleArgs& args, const RowView& row) {
    const Adjustment adjusted(row);
    Mass best = 0;
    for (uint32_t i = threadIdx.x; i < row.params->num_stops; i += CHUNK_THREADS) {
        const uint32_t token = row.stops()[i];
        if (token >= args.vocab || !in_mask(row.constraint, token) || !in_mask(row.allowed, token)) continue;
        bool banned = false;
        each_bad_word(args, row, 0, 1, [&](uint32_t bad) { banned |= bad == token; });
        if (banned) continue;
        const float logit = adjusted(token, biased(row, token, to_float(row.logits<T>(args)[token])));
        if (!row.is(ROW_GREEDY)) {
            row.scaled_tokens(args)[token] = logit;
            atomicMax(&row.peaks(args)[(token + row.phase) / SEGMENT], key_of(logit));
        }
        best = Greater()(best, candidate(logit, token));
    }
    return best;
}

struct FilterShared {
    Bins<BINS> masses;
    uint32_t counts[BINS];
    Mass warp_values[CHUNK_THREADS / 32];
    bool is_last;
    Cut cut;
    Mass mass_through_k;  // mass of the bins through k_bin
};

// Adds the block's chunk to the histogram of the row: the mass of each bin if top_p applies, the count if top_k does.
__device__ __forceinline__ void add_chunk(FilterShared& shared, const SampleArgs& args, const RowView& row, const Cut& cut) {
    const bool has_counts = row.params->top_k, has_masses = row.params->top_p < 1.0f;
    shared.masses.clear<CHUNK_THREADS>();
    for (uint32_t i = threadIdx.x; i < BINS; i += CHUNK_THREADS) shared.counts[i] = 0;
    const Values<float> scaled = row.scaled(args);
    const uint32_t begin = blockIdx.x * CHUNK, end = min(begin + CHUNK, scaled.end());
    const float largest = cut.largest;
    const Rounds rounds(row.peaks(args), begin, end, [&](uint32_t key) { return key >= cut.key && bin_of(cut, of_key(key)) < FAR; });
    __syncthreads();
    each_token<CHUNK_THREADS>(scaled, begin, end, rounds, [&](uint32_t, float logit) {
        const uint32_t bin = bin_of(cut, logit);
        if (key_of(logit) < cut.key || bin == FAR) return;
        if (has_counts) atomicAdd(&shared.counts[bin], 1u);
        if (has_masses) shared.masses.add(bin, weight(__fsub_rn(logit, largest)));
    });
    __syncthreads();
    Mass* row_masses = row.scratch(args);
    for (uint32_t i = threadIdx.x; i < BINS; i += CHUNK_THREADS) {
        if (shared.masses[i]) atomicAdd(&row_masses[i], shared.masses[i]);
        if (shared.counts[i]) atomicAdd(&row_masses[BINS + i], Mass(shared.counts[i]));
    }
}

// Finds the bins of the row in which top_k and top_p end. How much of k_bin top_k keeps is not known yet, so top_p may end
// in any of several bins.
__device__ __forceinline__ void find_bins(FilterShared& shared, const RowParams& params, const Mass* histogram) {
    constexpr uint32_t OWN = BINS / CHUNK_THREADS;
    const uint32_t first = OWN * threadIdx.x;
    Mass masses[OWN], counts[OWN], mass = 0, count = 0, all_mass, all_counts;
#pragma unroll
    for (uint32_t i = 0; i < OWN; i++) {
        mass += masses[i] = params.top_p < 1.0f ? __ldcg(&histogram[first + i]) : 0;
        count += counts[i] = params.top_k ? __ldcg(&histogram[BINS + first + i]) : 0;
    }
    const Mass mass_before = block_scan<CHUNK_THREADS>(mass, shared.warp_values, all_mass);
    const Mass count_before = block_scan<CHUNK_THREADS>(count, shared.warp_values, all_counts);
    Cut& cut = shared.cut;
    if (threadIdx.x == 0) cut.mass_before_k = shared.mass_through_k = all_mass;
    __syncthreads();
    if (params.top_k) {
        Mass of_bins = count_before, of_masses = mass_before;
#pragma unroll
        for (uint32_t i = 0; i < OWN; i++) {
            if (of_bins < params.top_k && of_bins + counts[i] >= params.top_k) {
                cut.first_bin = cut.last_bin = cut.k_bin = first + i;
                cut.needed = static_cast<uint32_t>(params.top_k - of_bins);
                cut.mass_before_k = of_masses;
                shared.mass_through_k = of_masses + masses[i];
            }
            of_bins += counts[i];
            of_masses += masses[i];
        }
        __syncthreads();
    }
    if (params.top_p < 1.0f) {
        const Mass least = share_of(cut.mass_before_k, params.top_p), most = share_of(shared.mass_through_k, params.top_p);
        Mass before = mass_before;
#pragma unroll
        for (uint32_t i = 0; i < OWN; i++) {
            const Mass through = before + masses[i];
            if (before < least && through >= least) {
                cut.first_bin = first + i;
                cut.mass_before = before;
            }
            if (before < most && through >= most) {
                cut.last_bin = first + i;
                if (!cut.needed) cut.k_bin = first + i;
            }
            before = through;
        }
    }
}

template <class T>
__device__ __forceinline__ void filter(const SampleArgs& args) {
    __shared__ FilterShared shared;
    __shared__ RowView::Shared row_shared;
    const RowView row(args, blockIdx.y, sizeof(T), row_shared);
    if (!row.exists() || (blockIdx.x && !row.has_histogram())) return;
    const RowParams& params = *row.params;
    Mass best = 0, fallback = 0, raw_key = 0, least = 0;
    int open = 0;
    for (uint32_t split = threadIdx.x; split < args.splits; split += CHUNK_THREADS) {
        const Chunk& chunk = row.chunks(args)[split];
        best = Greater()(best, chunk.best);
        fallback = Greater()(fallback, chunk.fallback);
        raw_key = Greater()(raw_key, chunk.raw_key);
        least = Greater()(least, chunk.least);
        open |= chunk.open != 0;
    }
    if (row.holds_back_stops() && !__syncthreads_or(open)) best = restore_stops<T>(args, row);
    best = block_fold<CHUNK_THREADS>(best, shared.warp_values, Greater());
    fallback = block_fold<CHUNK_THREADS>(fallback, shared.warp_values, Greater());
    raw_key = block_fold<CHUNK_THREADS>(raw_key, shared.warp_values, Greater());
    least = block_fold<CHUNK_THREADS>(least, shared.warp_values, Greater());

    const float infinity = __uint_as_float(0x7f800000u);
    Cut cut = {};
    cut.largest = logit_of(best);
    cut.raw_largest = fminf(of_key(static_cast<uint32_t>(raw_key)), LARGEST);
    cut.reach = infinity;
    cut.last = cut.certain = cut.first_bin = cut.last_bin = cut.k_bin = NONE;
    if (!best) {
        cut.certain = fallback ? token_of(fallback) : 0;
    } else if (row.is(ROW_GREEDY)) {
        cut.certain = token_of(best);
    } else {
        cut.key = key_of(fmaxf(__fadd_rn(cut.largest, params.ln_min_p), -LARGEST));
        cut.bins_per_unit = bins_per_unit(__fsub_rn(cut.largest, of_key(max(~static_cast<uint32_t>(least), cut.key))));
        cut.first = token_of(best);
        if (threadIdx.x == 0) {
            cut.output_len = row.output_len();
            cut.first_sum = __dadd_rn(static_cast<double>(cut.largest), gumbel(uniform_bits(params, cut.output_len, cut.first)));
        }
    }
    if (threadIdx.x == 0) shared.cut = cut;
    if (cut.certain == NONE && row.has_histogram()) {
        add_chunk(shared, args, row, cut);
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) shared.is_last = atomicAdd(&args.cuts[row.index].arrivals, 1u) == args.splits - 1;
        __syncthreads();
        if (!shared.is_last) return;
        __threadfence();
        find_bins(shared, params, row.scratch(args));
    } else if (blockIdx.x) {
        return;
    }
    __syncthreads();
    if (threadIdx.x == 0) args.cuts[row.index] = shared.cut;
}

}  // namespace quire

QUIRE_SAMPLE_ENTRIES(sample_filter, quire::CHUNK_THREADS, quire::filter)
