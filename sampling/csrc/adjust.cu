// First kernel of a step: sample_adjust_{f32,f16,bf16}. Computes, in one pass over the logits, which tokens may be
// drawn, their adjusted logits, and the likeliest of them. Clears the histogram that sample_filter fills.
//
// Grid (splits, rows), 256 threads; a block processes CHUNK positions of one row. Stop ids that are held back are banned
// here; sample_filter restores them if nothing else is left.

#include "adjust.cuh"
#include "block.cuh"
#include "filter.cuh"

namespace quire {

constexpr uint32_t CHUNK_WORDS = CHUNK / 32;

// Positions of the chunk whose tokens appear in the row's list, one bit each.
struct ListedTokens {
    uint32_t biased[CHUNK_WORDS], banned[CHUNK_WORDS], held_back[CHUNK_WORDS];

    __device__ __forceinline__ void fill(const SampleArgs& args, const RowView& row, uint32_t begin) {
        for (uint32_t i = threadIdx.x; i < CHUNK_WORDS; i += CHUNK_THREADS) biased[i] = banned[i] = held_back[i] = 0;
        __syncthreads();
        const auto mark = [&](uint32_t* bits, uint32_t token) {
            const uint32_t at = token + row.phase - begin;
            if (at < CHUNK) atomicOr(&bits[at / 32], 1u << at % 32);
        };
        for (uint32_t i = threadIdx.x; i < row.params->num_biases; i += CHUNK_THREADS) mark(biased, row.list[2 * i]);
        each_bad_word(args, row, threadIdx.x, CHUNK_THREADS, [&](uint32_t token) { mark(banned, token); });
        if (row.holds_back_stops()) {
            for (uint32_t i = threadIdx.x; i < row.params->num_stops; i += CHUNK_THREADS) mark(held_back, row.stops()[i]);
        }
        __syncthreads();
    }
};

// The largest key of a segment, from the largest of each lane's load.
template <uint32_t WIDTH>
__device__ __forceinline__ uint32_t peak_of(uint32_t key) {
    constexpr uint32_t LANES = SEGMENT / WIDTH;
    return __reduce_max_sync(0xffffffffu >> (32 - LANES) << threadIdx.x / LANES * LANES % 32, key);
}

template <class T>
__device__ __forceinline__ void adjust(const SampleArgs& args) {
    __shared__ ListedTokens listed;
    __shared__ Mass warp_values[CHUNK_THREADS / 32];
    __shared__ RowView::Shared row_shared;
    const RowView row(args, blockIdx.y, sizeof(T), row_shared);
    if (!row.exists()) return;
    const RowParams& params = *row.params;
    const Adjustment adjusted(row);
    const uint32_t begin = blockIdx.x * CHUNK, end = min(begin + CHUNK, row.phase + args.vocab);
    const bool has_list = params.num_biases || params.bad_words || row.holds_back_stops(), greedy = row.is(ROW_GREEDY);
    if (has_list) listed.fill(args, row, begin);
    if (row.has_histogram()) {
        for (uint32_t i = blockIdx.x * CHUNK_THREADS + threadIdx.x; i < 2 * BINS; i += args.splits * CHUNK_THREADS) {
            row.scratch(args)[i] = 0;
        }
        if (blockIdx.x == 0 && threadIdx.x == 0) args.cuts[row.index].arrivals = 0;
    }

    float* scaled = row.scaled_tokens(args);
    uint32_t* peaks = row.peaks(args);
    const float none = __uint_as_float(0xff800000u);
    Mass best = 0, fallback = 0;
    uint32_t largest = 0, least = 0;  // keys, of which the least is inverted
    int open = 0;
    each_vector<CHUNK_THREADS>(row.logits<T>(args), begin, end, Always(), [&](uint32_t at, uint32_t first, const auto& raws) {
        constexpr uint32_t WIDTH = Values<T>::WIDTH;
        alignas(16) float logits[WIDTH];
        uint32_t peak = 0;
#pragma unroll
        for (uint32_t i = 0; i < WIDTH; i++) {
            const uint32_t token = first + i, word = (at - begin + i) / 32, bit = 1u << (at + i) % 32;
            logits[i] = none;
            if (token >= args.vocab) continue;
            const float raw = to_float(raws[i]);
            const bool is_constrained = !in_mask(row.constraint, token);
            const uint32_t raw_key = key_of(isnan(raw) ? none : raw);
            if (!is_constrained) fallback = Greater()(fallback, pack(raw_key, token));
            largest = max(largest, raw_key);
            if (!is_constrained && in_mask(row.allowed, token) && !(has_list && ((listed.banned[word] | listed.held_back[word]) & bit))) {
                open |= raw != none;
                const bool is_biased = has_list && listed.biased[word] & bit;
                logits[i] = adjusted(token, is_biased ? biased(row, token, raw) : raw);
            }
            best = Greater()(best, candidate(logits[i], token));
            peak = max(peak, key_of(logits[i]));
            if (logits[i] != none) least = max(least, ~key_of(logits[i]));
        }
        if (greedy) return;
        if (Values<T>{nullptr, row.phase, args.vocab}.whole(first)) {
#pragma unroll
            for (uint32_t i = 0; i < WIDTH; i += 4) {
                *reinterpret_cast<float4*>(scaled + first + i) = *reinterpret_cast<const float4*>(logits + i);
            }
        } else {
#pragma unroll
            for (uint32_t i = 0; i < WIDTH; i++) {
                if (first + i < args.vocab) scaled[first + i] = logits[i];
            }
        }
        peak = peak_of<WIDTH>(peak);
        if (at % SEGMENT == 0) peaks[at / SEGMENT] = peak;
    });
    best = block_fold<CHUNK_THREADS>(best, warp_values, Greater());
    fallback = block_fold<CHUNK_THREADS>(fallback, warp_values, Greater());
    const Mass raw_key = block_fold<CHUNK_THREADS>(Mass(largest), warp_values, Greater());
    const Mass least_key = block_fold<CHUNK_THREADS>(Mass(least), warp_values, Greater());
    open = __syncthreads_or(open);
    if (threadIdx.x == 0) {
        Chunk& chunk = row.chunks(args)[blockIdx.x];
        chunk.best = best;
        chunk.fallback = fallback;
        chunk.raw_key = static_cast<uint32_t>(raw_key);
        chunk.least = static_cast<uint32_t>(least_key);
        chunk.open = static_cast<uint32_t>(open);
    }
}

}  // namespace quire

QUIRE_SAMPLE_ENTRIES(sample_adjust, quire::CHUNK_THREADS, quire::adjust)
