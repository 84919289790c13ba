// First kernel of a step: sample_adjust_{f32,f16,bf16}. Computes, in one pass over the logits, which tokens may be
// drawn, their adjusted logits, and the likeliest of them.
//
// Grid (splits, rows), 256 threads; a block processes CHUNK tokens of one row. Stop ids that are held back are banned
// here; sample_filter restores them if nothing else is left.

#include "adjust.cuh"
#include "block.cuh"

namespace quire {

constexpr uint32_t CHUNK_WORDS = CHUNK / 32;

// Tokens of the chunk that appear in the row's list, one bit per token.
struct ListedTokens {
    uint32_t biased[CHUNK_WORDS], banned[CHUNK_WORDS], held_back[CHUNK_WORDS];

    __device__ __forceinline__ void fill(const SampleArgs& args, const RowView& row, uint32_t begin) {
        for (uint32_t i = threadIdx.x; i < CHUNK_WORDS; i += CHUNK_THREADS) biased[i] = banned[i] = held_back[i] = 0;
        __syncthreads();
        const auto mark = [&](uint32_t* bits, uint32_t token) {
            const uint32_t at = token - begin;
            if (token >= begin && at < CHUNK) atomicOr(&bits[at / 32], 1u << at % 32);
        };
        for (uint32_t i = threadIdx.x; i < row.params->num_biases; i += CHUNK_THREADS) mark(biased, row.list[2 * i]);
        each_bad_word(args, row, threadIdx.x, CHUNK_THREADS, [&](uint32_t token) { mark(banned, token); });
        if (row.holds_back_stops()) {
            for (uint32_t i = threadIdx.x; i < row.params->num_stops; i += CHUNK_THREADS) mark(held_back, row.stops()[i]);
        }
        __syncthreads();
    }
};

template <class T>
__device__ __forceinline__ void adjust(const SampleArgs& args) {
    __shared__ ListedTokens listed;
    __shared__ Mass warp_values[CHUNK_THREADS / 32];
    const RowView row(args, blockIdx.y);
    if (!row.exists()) return;
    const RowParams& params = *row.params;
    const uint32_t begin = blockIdx.x * CHUNK, end = min(begin + CHUNK, args.vocab);
    const bool has_list = params.num_biases || params.bad_words || row.holds_back_stops();
    if (has_list) listed.fill(args, row, begin);

    const T* logits = row.template logits<T>(args);
    float* scaled = row.scaled(args);
    const float none = __uint_as_float(0xff800000u);
    Mass best = 0, fallback = 0, largest = 0;
    int open = 0;
    for (uint32_t token = begin + threadIdx.x; token < end; token += CHUNK_THREADS) {
        const float raw = to_float(logits[token]);
        const uint32_t word = (token - begin) / 32, bit = 1u << token % 32;
        const bool is_constrained = !in_mask(row.constraint, token);
        const float number = isnan(raw) ? none : raw;
        const uint32_t raw_key = key_of(number);
        if (!is_constrained) fallback = Greater()(fallback, pack(raw_key, token));
        largest = Greater()(largest, raw_key);
        float logit = none;
        if (!is_constrained && in_mask(row.allowed, token) && !(has_list && ((listed.banned[word] | listed.held_back[word]) & bit))) {
            open |= raw != none;
            logit = adjusted(row, token, has_list && (listed.biased[word] & bit) ? biased(row, token, raw) : raw);
        }
        if (!row.is(ROW_GREEDY)) scaled[token] = logit;
        best = Greater()(best, candidate(logit, token));
    }
    best = block_fold<CHUNK_THREADS>(best, warp_values, Greater());
    fallback = block_fold<CHUNK_THREADS>(fallback, warp_values, Greater());
    largest = block_fold<CHUNK_THREADS>(largest, warp_values, Greater());
    open = __syncthreads_or(open);
    if (threadIdx.x == 0) {
        Chunk& chunk = row.chunks(args)[blockIdx.x];
        chunk.best = best;
        chunk.fallback = fallback;
        chunk.raw_key = static_cast<uint32_t>(largest);
        chunk.open = static_cast<uint32_t>(open);
    }
}

}  // namespace quire

QUIRE_SAMPLE_ENTRIES(sample_adjust, quire::CHUNK_THREADS, quire::adjust)
