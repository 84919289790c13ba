// Second kernel of a step: sample_filter_{f32,f16,bf16}. Determines which tokens of a row are kept: min_p, top_k,
// top_p, typical_p, in that order and without sorting. `select` finds each cut in three passes.
//
// Grid (rows), 512 threads. It reads the output of sample_adjust, and only the logits of stop ids. The block of a row
// whose token is certain (greedy, or nothing is left) returns at once.

#include "adjust.cuh"
#include "block.cuh"
#include "filter.cuh"

namespace quire {

// Restores the stop ids that were held back, because everything else is banned. Returns the likeliest of them.
template <class T>
__device__ __forceinline__ Mass restore_stops(const SampleArgs& args, const RowView& row) {
    Mass best = 0;
    for (uint32_t i = threadIdx.x; i < row.params->num_stops; i += ROW_THREADS) {
        const uint32_t token = row.stops()[i];
        if (token >= args.vocab || !in_mask(row.constraint, token) || !in_mask(row.allowed, token)) continue;
        bool banned = false;
        each_bad_word(args, row, 0, 1, [&](uint32_t bad) { banned |= bad == token; });
        if (banned) continue;
        const float logit = adjusted(row, token, biased(row, token, to_float(row.template logits<T>(args)[token])));
        if (!row.is(ROW_GREEDY)) row.scaled(args)[token] = logit;
        best = Greater()(best, candidate(logit, token));
    }
    return best;
}

// top_p: keeps the fewest likeliest tokens that have the wanted share of the mass; of equal ones the lowest ids.
__device__ __forceinline__ void top_p(RowShared& shared, const SampleArgs& args, const float* scaled, float share, Cut& cut) {
    const float largest = cut.largest;
    const uint32_t least = cut.key;
    const Selected selected = select(shared, args.vocab, 0, share, [&](uint32_t token, uint32_t& key, Mass& mass) {
        key = key_of(scaled[token]);
        mass = weight(__fsub_rn(scaled[token], largest));
        return key >= least;
    });
    if (!selected.found) return;
    cut.key = selected.key;
    const Mass each = weight(__fsub_rn(of_key(selected.key), largest));
    const Mass needed = (selected.target - selected.above + each - 1) / each;
    if (needed * each < selected.at) {
        const auto ties = [&](uint32_t token) { return key_of(scaled[token]) == selected.key; };
        cut.last = last_of_lowest(shared, args.vocab, needed, ties);
    }
}

// typical_p (Meister et al., 2022): keeps the tokens nearest to the mean of the logits that have the wanted share of
// the mass.
__device__ __forceinline__ void typical_p(RowShared& shared, const SampleArgs& args, const float* scaled, float share, Cut& cut) {
    Mass mass = 0, moment = 0;  // the moment is a negative number in two's complement
    for (uint32_t token = threadIdx.x; token < args.vocab; token += ROW_THREADS) {
        if (!kept(cut, scaled[token], token)) continue;
        mass += weight(__fsub_rn(scaled[token], cut.largest));
        moment += static_cast<Mass>(weighted(__fsub_rn(scaled[token], cut.largest)));
    }
    mass = block_fold<ROW_THREADS>(mass, shared.warp_values, Sum());
    moment = block_fold<ROW_THREADS>(moment, shared.warp_values, Sum());
    const double mean = __ddiv_rn(static_cast<double>(static_cast<long long>(moment)), static_cast<double>(mass));
    const Cut before = cut;
    cut.mean = static_cast<float>(mean);
    const float largest = cut.largest, centre = cut.mean;
    const Selected selected = select(shared, args.vocab, 0, share, [&](uint32_t token, uint32_t& key, Mass& mass) {
        key = ~__float_as_uint(distance(scaled[token], largest, centre));
        mass = weight(__fsub_rn(scaled[token], largest));
        return kept(before, scaled[token], token);
    });
    if (selected.found) cut.reach = __uint_as_float(~selected.key);
}

template <class T>
__device__ __forceinline__ void filter(const SampleArgs& args) {
    __shared__ RowShared shared;
    const RowView row(args, blockIdx.x);
    if (!row.exists()) return;
    const RowParams& params = *row.params;
    Mass best = 0, fallback = 0;
    int open = 0;
    for (uint32_t split = threadIdx.x; split < args.splits; split += ROW_THREADS) {
        const Chunk& chunk = row.chunks(args)[split];
        best = Greater()(best, chunk.best);
        fallback = Greater()(fallback, chunk.fallback);
        open |= chunk.open != 0;
    }
    if (row.holds_back_stops() && !__syncthreads_or(open)) best = restore_stops<T>(args, row);
    best = block_fold<ROW_THREADS>(best, shared.warp_values, Greater());
    fallback = block_fold<ROW_THREADS>(fallback, shared.warp_values, Greater());

    const float infinity = __uint_as_float(0x7f800000u);
    Cut cut = {-static_cast<double>(infinity), logit_of(best), 0.0f, infinity, 0, NONE, NONE};
    if (!best) {
        cut.certain = fallback ? token_of(fallback) : 0;
    } else if (row.is(ROW_GREEDY)) {
        cut.certain = token_of(best);
    } else {
        const float* scaled = row.scaled(args);
        cut.key = key_of(fmaxf(__fadd_rn(cut.largest, params.ln_min_p), -LARGEST));
        if (params.top_k) {
            const uint32_t least = cut.key;
            const Selected selected =
                select(shared, args.vocab, params.top_k, 0.0f, [&](uint32_t token, uint32_t& key, Mass& mass) {
                    key = key_of(scaled[token]);
                    mass = 1;
                    return key >= least;
                });
            if (selected.found) cut.key = selected.key;
        }
        if (params.top_p < 1.0f) top_p(shared, args, scaled, params.top_p, cut);
        if (params.typical_p < 1.0f) typical_p(shared, args, scaled, params.typical_p, cut);
        // Only typical_p can drop the likeliest token.
        const uint32_t first = token_of(best);
        if (threadIdx.x == 0 && kept(cut, cut.largest, first)) {
            cut.first_sum = __dadd_rn(static_cast<double>(cut.largest), gumbel(uniform_bits(params, row.output_len(), first)));
        }
    }
    if (threadIdx.x == 0) args.cuts[row.index] = cut;
}

}  // namespace quire

QUIRE_SAMPLE_ENTRIES(sample_filter, quire::ROW_THREADS, quire::filter)
