// What peers.py passes to the libraries of vllm.cu and flashinfer.cu: one call of decode attention in bf16, with heads of 128 and
// blocks of 16 tokens. Every pointer but `stream` is in device memory.
#pragma once

#define PEER extern "C" __attribute__((visibility("default")))

struct Call {
    void *out;            // [batch, heads, 128]
    const void *queries;  // [batch, heads, 128]
    const void *keys;     // the block of a table entry, in the layout of the peer
    const void *values;
    const int *tables;   // [batch, context / 16]: blocks of each sequence
    const int *lengths;  // [batch]: each is `context`
    void *stream;
    int batch;
    int heads;
    int kv_heads;
    int context;  // a multiple of 16
    float scale;
};

// The size that peers.py compares with that of its own structure.
PEER int call_bytes() {
    return sizeof(Call);
}
