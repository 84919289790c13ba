// Arguments and arrays of the sampling kernels. src/device/args.rs declares the same structs, field for field.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <quire/export.cuh>
#include <stdint.h>

namespace quire {

// Sums of weights, and packed pairs. Not uint64_t: CUDA's atomics are declared for this type.
using Mass = unsigned long long;

constexpr uint32_t NONE = 0xffffffffu;  // no slot, no token

constexpr uint32_t CHUNK = 8192;         // positions of a row per block of adjust, filter and draw
constexpr uint32_t CHUNK_THREADS = 256;  // threads of such a block
constexpr uint32_t SEGMENT = 128;        // positions of a row that share a peak: what a warp loads of floats at once
constexpr uint32_t ROW_THREADS = 512;    // threads of a block that processes a whole row
constexpr uint32_t LIST = 4096;          // undecided tokens of a row that its scratch memory holds
constexpr uint32_t MAX_DRAFTS = 32;      // drafts of a slot: a warp reads them at once

// Bits of RowParams::flags.
enum RowFlag : uint32_t {
    ROW_GREEDY = 1,       // take the likeliest token, without a draw
    ROW_CONSTRAINED = 2,  // the slot's constraint mask applies
    ROW_ALLOWED = 4,      // the slot's mask of allowed_token_ids applies
    ROW_PENALISED = 8,    // the slot's token counts are kept and used
    ROW_LOGPROBS = 16,    // log-probability and rank of the token, and `num_top` alternatives
};

// A row of a step. The rows of a slot with drafts are consecutive: row i draws the token behind its output and i drafts.
struct Row {
    uint32_t slot;  // NONE: a row of padding
    uint32_t logits_row;
    uint32_t num_drafts;  // drafts before the token of this row: those of the rows before it
    uint32_t draft;       // what the token of this row is compared with; NONE in the last row of a slot
};
static_assert(sizeof(Row) == 16, "the size in args.rs");

// A copy of the last token of a slot's sequence to an array of tokens.
struct TokenCopy {
    uint32_t slot;
    uint32_t index;
};
static_assert(sizeof(TokenCopy) == 8, "the size in args.rs");

// The request of a slot: the fields of `sampling::SamplingParams`, all 32-bit words, so that a change is one copy.
struct RowParams {
    uint32_t flags;
    float temperature;  // unused if greedy
    float top_p;
    float typical_p;
    float ln_min_p;
    uint32_t top_k;
    float repetition_penalty;
    float presence_penalty;
    float frequency_penalty;
    uint32_t min_tokens;
    // The slot's list: `num_biases` pairs (token, bias), ascending by token; `num_stops` ids; then `bad_words` words,
    // which are the length and the tokens of each bad word.
    uint32_t num_biases;
    uint32_t num_stops;
    uint32_t bad_words;
    uint32_t num_top;
    uint32_t seed[2];   // low, high
    uint32_t sequence;  // within its request
    uint32_t padding[3];
};
static_assert(sizeof(RowParams) == 80, "the size in args.rs");

// The results of the blocks of adjust and draw for a chunk of a row.
struct Chunk {
    Mass best;      // packed: the likeliest adjusted token, 0 if none is possible
    Mass fallback;  // packed: the likeliest raw token within the constraint
    Mass mass;      // of the raw row
    double sum;     // logit + noise of the winner
    uint32_t winner;
    uint32_t raw_key;  // of the largest raw logit
    uint32_t open;     // whether some token is neither banned nor held back
    uint32_t least;    // ~key of the least adjusted logit that is possible, 0 if none is
};
static_assert(sizeof(Chunk) == 48, "the size in args.rs");

// Which tokens of a row the filters keep. sample_filter leaves the tokens of a few bins undecided; sample_finish decides.
// If no bin is undecided, all three are NONE.
struct Cut {
    double first_sum;    // logit + noise of the likeliest token
    Mass mass_before_k;  // mass of the bins before k_bin; without top_k, of all bins
    Mass mass_before;    // mass of the bins before first_bin
    float largest;       // largest scaled logit
    float bins_per_unit; // see bin_of
    float raw_largest;   // largest raw logit, at most LARGEST
    float mean;          // typical_p: mean of logit − largest
    float reach;         // typical_p: greatest distance from the mean that is kept; ∞ if off
    uint32_t key;        // the least key kept,
    uint32_t last;       // and the highest token kept of that key
    uint32_t certain;    // the token, if it is not drawn; else NONE
    uint32_t first_bin;  // the first undecided bin
    uint32_t last_bin;   // the last one in which top_p may end
    uint32_t k_bin;      // the one in which top_k ends; without top_k, last_bin
    uint32_t needed;     // how many of the likeliest tokens of k_bin top_k needs; 0 without top_k
    uint32_t listed;     // number of undecided tokens, if at most LIST
    uint32_t arrivals;   // blocks of sample_filter that have added their counts
    uint32_t first;      // the likeliest token
    uint32_t output_len;
};
static_assert(sizeof(Cut) == 88, "the size in args.rs");

// The result of a row, copied to the host.
struct RowResult {
    uint32_t token;
    float logprob;
    uint32_t rank;
    uint32_t num_top;  // pairs in `tops`
};
static_assert(sizeof(RowResult) == 16, "the size in args.rs");

// One of the likeliest tokens of a row.
struct Top {
    uint32_t token;
    float logprob;
};
static_assert(sizeof(Top) == 8, "the size in args.rs");

struct SampleShape {
    uint64_t logits_stride;  // elements from one row of logits to the next
    uint32_t vocab;          // at most 2^22
    uint32_t splits;         // chunks of a row, wherever it begins: ceil((vocab + 7) / CHUNK)
    uint32_t list_words;     // words of a slot's list
    uint32_t tail_tokens;    // number of last output tokens that a slot keeps, for bad words
    uint32_t top_stride;     // entries of a row in `tops`
    uint32_t scaled_stride;  // elements from one row of `scaled` to the next: a multiple of 4, at least vocab + 7
};
static_assert(sizeof(SampleShape) == 32, "the size in args.rs");

struct HistoryShape {
    uint32_t slot;
    uint32_t vocab;
    uint32_t tail_tokens;
    uint32_t penalised;      // whether counts are kept
    uint32_t prompt_tokens;  // tokens of the prompt, first in `tokens`
    uint32_t last_tokens;    // tokens of the output, behind the prompt: all of them if counts are kept
    uint32_t output_len;
    uint32_t padding;
};
static_assert(sizeof(HistoryShape) == 32, "the size in args.rs");

struct ForkShape {
    uint32_t from, to, sequence;
    uint32_t vocab, list_words, tail_tokens;
};
static_assert(sizeof(ForkShape) == 24, "the size in args.rs");

struct CopyShape {
    uint32_t copies;
    uint32_t tail_tokens;
};
static_assert(sizeof(CopyShape) == 8, "the size in args.rs");

struct AcceptShape {
    uint32_t rows;
    uint32_t vocab;
    uint32_t tail_tokens;
};
static_assert(sizeof(AcceptShape) == 12, "the size in args.rs");

struct SampleArgs : SampleShape {
    const void* logits;           // [logit rows, logits_stride]
    const Row* rows;              // [rows]
    const RowParams* params;      // [slots]
    const uint32_t* lists;        // [slots, list_words]
    const uint32_t* constraints;  // [slots, ceil(vocab / 32)]: bit j of word i is token 32 i + j
    const uint32_t* allowed;      // as `constraints`
    uint32_t* counts;             // [slots, vocab]: occurrences in the output | IN_PROMPT
    uint32_t* state;              // [slots, 1 + tail_tokens]: length of the output; output token i at 1 + i % tail_tokens
    float* scaled;                // [rows, scaled_stride]: adjusted logits / temperature, never NaN; unused for greedy rows
    uint32_t* peaks;              // [rows, splits, CHUNK / SEGMENT]: the largest key of each segment of `scaled`
    Mass* scratch;          // [rows, LIST]: a histogram, then the undecided tokens, packed
    Chunk* chunks;                // [rows, splits]
    Cut* cuts;                    // [rows]
    RowResult* results;           // [rows]
    Top* tops;                    // [rows, top_stride]
};

constexpr uint32_t IN_PROMPT = 0x80000000u;

// The numbers of a row, one per token. Token t is at position t + phase: positions that are multiples of 16 bytes are
// aligned in memory. Logits and scaled logits of a row have the same phase.
template <class T>
struct Values {
    const T* tokens;
    uint32_t phase, vocab;

    static constexpr uint32_t WIDTH = 16 / sizeof(T);  // elements of a load

    __device__ __forceinline__ T operator[](uint32_t token) const { return tokens[token]; }
    __device__ __forceinline__ uint32_t end() const { return phase + vocab; }
    // Whether a load at this token, which may be before the first or behind the last, has only tokens of the row.
    __device__ __forceinline__ bool whole(uint32_t token) const { return token < vocab && vocab - token >= WIDTH; }
};

// Copies a struct to shared memory, a word per thread. The caller waits.
template <class S>
__device__ __forceinline__ void copy_words(S& to, const S& from) {
    static_assert(sizeof(S) <= 4 * CHUNK_THREADS, "one word per thread of the smallest block");
    const uint32_t i = threadIdx.x;
    if (i < sizeof(S) / 4) reinterpret_cast<uint32_t*>(&to)[i] = reinterpret_cast<const uint32_t*>(&from)[i];
}

// Appends a token to the output of a slot. `counts`: null without penalties.
__device__ __forceinline__ void append_token(uint32_t* counts, uint32_t* state, uint32_t tail_tokens, uint32_t token) {
    const uint32_t len = state[0];
    if (counts) counts[token]++;
    state[1 + len % tail_tokens] = token;
    state[0] = len + 1;
}

// A row of the step, and its slot's part of every array.
struct RowView {
    // What threads share.
    struct Shared {
        Row row;
        RowParams params;
        uint32_t drafts[MAX_DRAFTS];
    };

    uint32_t index, slot, logits_row, phase;
    uint32_t num_drafts;     // drafts before the token of this row,
    const uint32_t* drafts;  // and what they are
    const RowParams* params;
    const uint32_t* list;
    const uint32_t* constraint;  // null: none
    const uint32_t* allowed;     // null: all
    uint32_t* counts;            // null: no penalties
    uint32_t* state;

    // `size`: bytes of a logit. All threads of the block must call this.
    __device__ __forceinline__ RowView(const SampleArgs& args, uint32_t index, uint64_t size, Shared& shared) : index(index) {
        if (threadIdx.x < 32) {
            const Row& row = args.rows[index];
            const uint32_t of_row = row.slot, before = row.num_drafts;
            if (threadIdx.x == 0) shared.row = row;
            if (of_row != NONE) copy_words(shared.params, args.params[of_row]);
            if (threadIdx.x < before) shared.drafts[threadIdx.x] = args.rows[index - before + threadIdx.x].draft;
        }
        __syncthreads();
        slot = shared.row.slot;
        logits_row = shared.row.logits_row;
        num_drafts = shared.row.num_drafts;
        drafts = shared.drafts;
        if (slot == NONE) return;
        const int64_t words = (args.vocab + 31) / 32, at = slot;
        const uint64_t first = reinterpret_cast<uintptr_t>(args.logits) / size + logits_row * args.logits_stride;
        phase = static_cast<uint32_t>(first % (16 / size));
        params = &shared.params;
        list = args.lists + at * args.list_words;
        constraint = is(ROW_CONSTRAINED) ? args.constraints + at * words : nullptr;
        allowed = is(ROW_ALLOWED) ? args.allowed + at * words : nullptr;
        counts = is(ROW_PENALISED) ? args.counts + at * args.vocab : nullptr;
        state = args.state + at * (1 + args.tail_tokens);
    }

    __device__ __forceinline__ bool exists() const { return slot != NONE; }
    __device__ __forceinline__ bool is(RowFlag flag) const { return params->flags & flag; }
    // Number of tokens before that of this row, drafts included.
    __device__ __forceinline__ uint32_t output_len() const { return state[0] + num_drafts; }
    // One of them, at most `tail_tokens` before the end.
    __device__ __forceinline__ uint32_t output_token(const SampleArgs& args, uint32_t at) const {
        return at < state[0] ? state[1 + at % args.tail_tokens] : drafts[at - state[0]];
    }
    // Whether the stop ids are held back, unless nothing else is left.
    __device__ __forceinline__ bool holds_back_stops() const { return params->num_stops && output_len() < params->min_tokens; }
    __device__ __forceinline__ const uint32_t* stops() const { return list + 2 * params->num_biases; }
    __device__ __forceinline__ const uint32_t* bad_words() const { return stops() + params->num_stops; }

    // Whether top_k or top_p applies.
    __device__ __forceinline__ bool has_histogram() const {
        return !is(ROW_GREEDY) && (params->top_k || params->top_p < 1.0f);
    }

    template <class T>
    __device__ __forceinline__ Values<T> logits(const SampleArgs& args) const {
        return {static_cast<const T*>(args.logits) + logits_row * args.logits_stride, phase, args.vocab};
    }
    __device__ __forceinline__ float* scaled_tokens(const SampleArgs& args) const {
        return args.scaled + static_cast<int64_t>(index) * args.scaled_stride + phase;
    }
    __device__ __forceinline__ Values<float> scaled(const SampleArgs& args) const { return {scaled_tokens(args), phase, args.vocab}; }
    __device__ __forceinline__ uint32_t* peaks(const SampleArgs& args) const {
        return args.peaks + static_cast<int64_t>(index) * args.splits * (CHUNK / SEGMENT);
    }
    __device__ __forceinline__ Mass* scratch(const SampleArgs& args) const {
        return args.scratch + static_cast<int64_t>(index) * LIST;
    }
    __device__ __forceinline__ Chunk* chunks(const SampleArgs& args) const {
        return args.chunks + static_cast<int64_t>(index) * args.splits;
    }
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

}  // namespace quire

#define QUIRE_SAMPLE_PARAMETERS                                                                                       \
    const void *logits, const quire::Row *rows, const quire::RowParams *params, const uint32_t *lists,                \
        const uint32_t *constraints, const uint32_t *allowed, uint32_t *counts, uint32_t *state, float *scaled,       \
        uint32_t *peaks, quire::Mass *scratch, quire::Chunk *chunks, quire::Cut *cuts, quire::RowResult *results,     \
        quire::Top *tops, const quire::SampleShape shape
#define QUIRE_SAMPLE_ARGS                                                                                             \
    {shape, logits, rows, params, lists, constraints, allowed, counts, state, scaled, peaks, scratch, chunks, cuts, results, tops}

// Defines one kernel per type of logits.
#define QUIRE_SAMPLE_ENTRY(name, threads, call)                                               \
    extern "C" __global__ void __launch_bounds__(threads, 1) name(QUIRE_SAMPLE_PARAMETERS) {  \
        quire::wait_for_launches();                                                           \
        call(QUIRE_SAMPLE_ARGS);                                                              \
    }                                                                                         \
    QUIRE_EXPORT_OVERLAPPED(name, 0);
#define QUIRE_SAMPLE_ENTRIES(name, threads, call)                     \
    QUIRE_SAMPLE_ENTRY(name##_f32, threads, call<float>)              \
    QUIRE_SAMPLE_ENTRY(name##_f16, threads, call<__half>)             \
    QUIRE_SAMPLE_ENTRY(name##_bf16, threads, call<__nv_bfloat16>)
