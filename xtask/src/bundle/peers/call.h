// What peers.py passes to the libraries of flashinfer.cu and flashinfer_sm90.cu: one call of attention in bf16, with heads of 128 and
// blocks of 16 tokens. `NAME_prepare` plans for the shape of a call, `NAME_run` enqueues it; both return a cudaError_t.
#pragma once

#include <vector>

#define PEER extern "C" __attribute__((visibility("default")))

struct Call {
    void *out;            // [batch * query_len, heads, 128]
    const void *queries;  // [batch * query_len, heads, 128]
    const void *keys;     // [blocks, 16, kv_heads, 128]
    const void *values;   // [blocks, 16, kv_heads, 128]
    const int *tables;    // [batch, context / 16]: blocks of each sequence
    const int *starts;    // [batch + 1]: first entry of each sequence in `tables`
    const int *rows;      // [batch + 1]: first query row of each sequence
    const int *last;      // [batch]: tokens in the last block of each sequence
    void *floats;         // workspace of `float_bytes`
    void *ints;           // workspace of `int_bytes`
    void *pinned;         // workspace of `int_bytes` in pinned memory of the host; all others are in device memory
    void *stream;
    long long float_bytes;
    long long int_bytes;
    int batch;
    int heads;
    int kv_heads;
    int context;    // tokens of each sequence, a multiple of 16
    int query_len;  // query rows of each sequence, which are its last tokens
    float scale;
};

// The size that peers.py compares with that of its own structure.
PEER int call_bytes() {
    return sizeof(Call);
}

// Returns `starts` or `rows` as the host has them: count + 1 multiples of a step.
inline std::vector<int> multiples(int count, int step) {
    std::vector<int> all(count + 1);
    for (int i = 0; i <= count; i++) {
        all[i] = i * step;
    }
    return all;
}

template <class T>
T *mutable_pointer(const void *pointer) {
    return static_cast<T *>(const_cast<void *>(pointer));
}
