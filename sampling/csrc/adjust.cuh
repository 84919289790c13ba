// The steps before the filters, for a single token: constraint, allowed ids, bad words, bias, penalties, temperature.
#pragma once

#include "numbers.cuh"

namespace quire {

__device__ __forceinline__ bool in_mask(const uint32_t* mask, uint32_t token) {
    return !mask || (mask[token / 32] >> (token % 32) & 1);
}

// Calls `ban(token)` with the last token of every bad word whose other tokens end the output. The words are distributed
// over `threads` threads.
template <class Ban>
__device__ __forceinline__ void each_bad_word(const SampleArgs& args, const RowView& row, uint32_t thread, uint32_t threads, Ban ban) {
    const uint32_t* words = row.bad_words();
    const uint32_t len = row.output_len(), end = row.params->bad_words;
    uint32_t number = 0;
    for (uint32_t at = 0; at < end; at += 1 + words[at], number++) {
        if (number % threads != thread) continue;
        const uint32_t before = words[at] - 1;
        bool matches = before <= len;
        for (uint32_t i = 0; matches && i < before; i++) {
            matches = row.output_token(args, len - before + i) == words[at + 1 + i];
        }
        if (matches) ban(words[at + 1 + before]);
    }
}

// Adds the biases of a token to its logit, in list order.
__device__ __forceinline__ float biased(const RowView& row, uint32_t token, float logit) {
    uint32_t low = 0, high = row.params->num_biases;
    while (low < high) {
        const uint32_t middle = (low + high) / 2;
        if (row.list[2 * middle] < token) low = middle + 1;
        else high = middle;
    }
    for (; low < row.params->num_biases && row.list[2 * low] == token; low++) {
        logit = __fadd_rn(logit, __uint_as_float(row.list[2 * low + 1]));
    }
    return logit;
}

// What applies to every token of a row: penalties if their counts are kept, and unless the row is greedy the temperature.
struct Adjustment {
    const uint32_t *counts, *drafts;
    uint32_t num_drafts;
    float repetition, frequency, presence, temperature;

    __device__ __forceinline__ explicit Adjustment(const RowView& row)
        : counts(row.counts), drafts(row.drafts), num_drafts(row.num_drafts) {
        temperature = row.is(ROW_GREEDY) ? 0.0f : row.params->temperature;
        if (!counts) return;
        repetition = row.params->repetition_penalty;
        frequency = row.params->frequency_penalty;
        presence = row.params->presence_penalty;
    }

    // Returns the adjusted logit of a token that is not banned. NaN becomes −∞.
    __device__ __forceinline__ float operator()(uint32_t token, float logit) const {
        if (counts) {
            uint32_t count = counts[token];
            for (uint32_t i = 0; i < num_drafts; i++) count += drafts[i] == token;
            const uint32_t in_output = count & ~IN_PROMPT;
            if (count) logit = logit > 0.0f ? __fdiv_rn(logit, repetition) : __fmul_rn(logit, repetition);
            if (in_output) logit = __fsub_rn(__fsub_rn(logit, __fmul_rn(frequency, __uint2float_rn(in_output))), presence);
        }
        if (isnan(logit)) return __uint_as_float(0xff800000u);
        return temperature == 0.0f ? logit : fminf(__fdiv_rn(logit, temperature), LARGEST);
    }
};

// A token packed for the search for the likeliest; 0 if it is impossible.
__device__ __forceinline__ Mass candidate(float logit, uint32_t token) {
    return logit > __uint_as_float(0xff800000u) ? pack(key_of(logit), token) : 0;
}

}  // namespace quire
