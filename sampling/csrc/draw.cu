// Third kernel of a step: sample_draw_{f32,f16,bf16}. Computes the argmax of logit + Gumbel noise over the kept tokens,
// and the mass of the raw row if log-probabilities are requested.
//
// Grid (splits, rows), 256 threads; a block processes CHUNK tokens of one row. Noise is computed only for tokens that
// can still win.

#include "block.cuh"
#include "filter.cuh"

namespace quire {

// The greatest logit + noise so far, and its token.
struct Winner {
    double sum;
    uint32_t token;
};
struct GreaterSum {
    __device__ __forceinline__ Winner operator()(Winner a, Winner b) const {
        return b.sum > a.sum || (b.sum == a.sum && b.token < a.token) ? b : a;
    }
};
__device__ __forceinline__ Winner from_lane_xor(Winner value, int lanes) {
    return {__shfl_xor_sync(0xffffffffu, value.sum, lanes), __shfl_xor_sync(0xffffffffu, value.token, lanes)};
}

__device__ __forceinline__ Winner thread_winner(const SampleArgs& args, const RowView& row, const Cut& cut, uint32_t begin, uint32_t end) {
    const float* scaled = row.scaled(args);
    const uint32_t output_index = row.output_len();
    Winner best = {-static_cast<double>(__uint_as_float(0x7f800000u)), NONE};
    double bound = cut.first_sum;  // lower bound of the winning sum
    for (uint32_t token = begin + threadIdx.x; token < end; token += CHUNK_THREADS) {
        const double logit = static_cast<double>(scaled[token]);
        if (logit + MAX_NOISE < bound || !kept(cut, scaled[token], token)) continue;
        const Mass bits = uniform_bits(*row.params, output_index, token);
        if (logit + gumbel_bound(bits) < bound) continue;
        best = GreaterSum()(best, {__dadd_rn(logit, gumbel(bits)), token});
        bound = best.sum > bound ? best.sum : bound;
    }
    return best;
}

template <class T>
__device__ __forceinline__ void draw(const SampleArgs& args) {
    __shared__ Winner winners[CHUNK_THREADS / 32];
    __shared__ Mass warp_values[CHUNK_THREADS / 32];
    const RowView row(args, blockIdx.y);
    if (!row.exists()) return;
    const uint32_t begin = blockIdx.x * CHUNK, end = min(begin + CHUNK, args.vocab);
    Chunk& chunk = row.chunks(args)[blockIdx.x];
    const Cut cut = args.cuts[row.index];
    if (cut.certain == NONE) {
        const Winner winner =
            block_fold<CHUNK_THREADS>(thread_winner(args, row, cut, begin, end), winners, GreaterSum());
        if (threadIdx.x == 0) {
            chunk.sum = winner.sum;
            chunk.winner = winner.token;
        }
    }
    if (row.is(ROW_LOGPROBS)) {
        uint32_t key = 0;
        for (uint32_t split = 0; split < args.splits; split++) key = max(key, row.chunks(args)[split].raw_key);
        const float largest = fminf(of_key(key), LARGEST);
        const T* logits = row.template logits<T>(args);
        Mass mass = 0;
        for (uint32_t token = begin + threadIdx.x; token < end; token += CHUNK_THREADS) {
            mass += weight(relative(to_float(logits[token]), largest));
        }
        mass = block_fold<CHUNK_THREADS>(mass, warp_values, Sum());
        if (threadIdx.x == 0) chunk.mass = mass;
    }
}

}  // namespace quire

QUIRE_SAMPLE_ENTRIES(sample_draw, quire::CHUNK_THREADS, quire::draw)
