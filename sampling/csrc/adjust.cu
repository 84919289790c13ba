// First kernel of a step: entries sample_adjust_{f32,f16,bf16}. One pass over the logits: what may be drawn at all, with
// which adjusted logit, and the likeliest of it.
//
// Grid (splits, rows), 256 threads; a block has CHUNK tokens of one row. Stop ids that are held back are left out here;
// sample_filter brings them back where nothing else is left.

#include "adjust.cuh"
#include "block.cuh"

namespace quire {

constexpr uint32_t CHUNK_WORDS = CHUNK / 32;

// Tokens of the chunk that the row's list names, a bit each.
struct Named {
    uint32_t biased[CHUNK_WORDS], banned[CHUNK_WORDS], held[CHUNK_WORDS];

    __device__ __forceinline__ void fill(const SampleArgs& args, const Row& row, uint32_t begin) {
        for (uint32_t i = threadIdx.x; i < CHUNK_WORDS; i += CHUNK_THREADS) biased[i] = banned[i] = held[i] = 0;
        __syncthreads();
        const auto mark = [&](uint32_t* bits, uint32_t token) {
            const uint32_t at = token - begin;
            if (token >= begin && at < CHUNK) atomicOr(&bits[at / 32], 1u << at % 32);
        };
        for (uint32_t i = threadIdx.x; i < row.params->num_biases; i += CHUNK_THREADS) mark(biased, row.list[2 * i]);
        each_bad_word(args, row, threadIdx.x, CHUNK_THREADS, [&](uint32_t token) { mark(banned, token); });
        if (row.holds()) {
            for (uint32_t i = threadIdx.x; i < row.params->num_stops; i += CHUNK_THREADS) mark(held, row.stops()[i]);
        }
        __syncthreads();
    }
};

template <class T>
__device__ __forceinline__ void adjust(const SampleArgs& args) {
    __shared__ Named named;
    __shared__ Mass of_warps[CHUNK_THREADS / 32];
    const Row row(args, blockIdx.y);
    if (!row.exists()) return;
    const RowParams& params = *row.params;
    const uint32_t begin = blockIdx.x * CHUNK, end = min(begin + CHUNK, args.vocab);
    const bool has_names = params.num_biases || params.bad_words || row.holds();
    if (has_names) named.fill(args, row, begin);

    const T* logits = row.template logits<T>(args);
    float* scaled = row.scaled(args);
    const float none = __uint_as_float(0xff800000u);
    Mass best = 0, fallback = 0, largest = 0;
    int open = 0;
    for (uint32_t token = begin + threadIdx.x; token < end; token += CHUNK_THREADS) {
        const float raw = to_float(logits[token]);
        const uint32_t word = (token - begin) / 32, bit = 1u << token % 32;
        const bool constrained = !in_mask(row.constraint, token);
        const float number = isnan(raw) ? none : raw;
        const uint32_t raw_key = key_of(number);
        if (!constrained) fallback = Greater()(fallback, pack(raw_key, token));
        largest = Greater()(largest, raw_key);
        float logit = none;
        if (!constrained && in_mask(row.allowed, token) && !(has_names && ((named.banned[word] | named.held[word]) & bit))) {
            open |= raw != none;
            logit = shaped(row, token, has_names && (named.biased[word] & bit) ? biased(row, token, raw) : raw);
        }
        if (!row.is(ROW_GREEDY)) scaled[token] = logit;
        best = Greater()(best, candidate(logit, token));
    }
    best = block_fold<CHUNK_THREADS>(best, of_warps, Greater());
    fallback = block_fold<CHUNK_THREADS>(fallback, of_warps, Greater());
    largest = block_fold<CHUNK_THREADS>(largest, of_warps, Greater());
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
