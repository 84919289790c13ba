// Third kernel of a step: sample_draw_{f32,f16,bf16}. Draws from the tokens of a chunk that are kept for certain, and lists
// those that are undecided. Computes the mass of the raw row if log-probabilities are requested.
//
// Grid (splits, rows), 256 threads; a block processes CHUNK positions of one row.

#include "draw.cuh"

namespace quire {

// Undecided tokens of a block. If there are more, or if those of all blocks do not fit the row's list, sample_finish finds
// them in the row.
struct Undecided {
    static constexpr uint32_t MOST = 1024;
    Mass tokens[MOST];  // packed
    uint32_t count, at;

    __device__ __forceinline__ void add(uint32_t token, float logit) {
        const uint32_t i = atomicAdd(&count, 1u);
        if (i < MOST) tokens[i] = pack(key_of(logit), token);
    }

    // Appends the tokens of this block to the list of the row.
    __device__ __forceinline__ void store(Mass* list, uint32_t& listed) {
        __syncthreads();
        if (threadIdx.x == 0 && count) at = atomicAdd(&listed, count <= MOST ? count : LIST + 1);
        __syncthreads();
        if (count > MOST || at + count > LIST) return;
        for (uint32_t i = threadIdx.x; i < count; i += CHUNK_THREADS) list[at + i] = tokens[i];
    }
};

template <class T>
__device__ __forceinline__ void draw(const SampleArgs& args) {
    __shared__ Winner winners[CHUNK_THREADS / 32];
    __shared__ Mass warp_values[CHUNK_THREADS / 32];
    __shared__ Undecided undecided_tokens;
    __shared__ Cut cut;
    __shared__ RowView::Shared row_shared;
    const RowView row(args, blockIdx.y, sizeof(T), row_shared);
    if (!row.exists()) return;
    copy_words(cut, args.cuts[row.index]);
    __syncthreads();
    const uint32_t begin = blockIdx.x * CHUNK, end = min(begin + CHUNK, row.phase + args.vocab);
    Chunk& chunk = row.chunks(args)[blockIdx.x];
    // typical_p decides for each token, behind the others.
    const bool draws = row.params->typical_p >= 1.0f, lists = cut.first_bin != NONE;
    if (cut.certain == NONE && (draws || lists)) {
        Draw drawn = {*row.params, cut.output_len, cut.first_sum};
        if (threadIdx.x == 0) undecided_tokens.count = 0;
        const Rounds rounds(row.peaks(args), begin, end, [&](uint32_t key) {
            return key >= cut.key && (lists ? bin_of(cut, of_key(key)) <= cut.k_bin : !drawn.hopeless(of_key(key)));
        });
        __syncthreads();
        drawn.add_each<CHUNK_THREADS>(row.scaled(args), begin, end, rounds, [&](uint32_t token, float logit) {
            if (key_of(logit) < cut.key) return false;
            const uint32_t bin = bin_of(cut, logit);
            if (undecided(cut, bin)) undecided_tokens.add(token, logit);
            return draws && bin < cut.first_bin;
        });
        if (lists) undecided_tokens.store(row.scratch(args), args.cuts[row.index].listed);
        const Winner winner = block_fold<CHUNK_THREADS>(drawn.best, winners, GreaterSum());
        if (threadIdx.x == 0) {
            chunk.sum = winner.sum;
            chunk.winner = winner.token;
        }
    }
    if (row.is(ROW_LOGPROBS)) {
        Mass mass = 0;
        each_token<CHUNK_THREADS>(row.logits<T>(args), begin, end, Always(), [&](uint32_t, float logit) {
            mass += weight(relative(logit, cut.raw_largest));
        });
        mass = block_fold<CHUNK_THREADS>(mass, warp_values, Sum());
        if (threadIdx.x == 0) chunk.mass = mass;
    }
}

}  // namespace quire

QUIRE_SAMPLE_ENTRIES(sample_draw, quire::CHUNK_THREADS, quire::draw)
