"""Measures llama.cpp through llama-cpp-python; `cargo xtask bench-cpu` starts it.

    llama.py MODEL.gguf THREADS     answers each line "BATCH INPUT OUTPUT" with {"prefill": tokens/s, "decode": tokens/s}

It computes BATCH sequences of INPUT random tokens, then OUTPUT - 1 steps with one token of each. A shorter run warms up.
"""

import json
import random
import sys
import time

import llama_cpp as ll

threads = int(sys.argv[2])
# Messages line by line on standard error would take measurable time.
quiet = ll.llama_log_callback(lambda level, text, data: None)
ll.llama_log_set(quiet, None)
ll.llama_backend_init()
model = ll.llama_model_load_from_file(sys.argv[1].encode(), ll.llama_model_default_params())
vocabulary = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
batch = ll.llama_batch_init(512, 0, 1)
draw = random.Random(1)


def decode(context, rows):
    """Makes one call with rows of (position, sequence, whether logits are needed)."""
    batch.n_tokens = len(rows)
    for i, (position, sequence, logits) in enumerate(rows):
        batch.token[i] = draw.randrange(vocabulary)
        batch.pos[i] = position
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = sequence
        batch.logits[i] = logits
    if ll.llama_decode(context, batch) != 0:
        sys.exit("llama_decode failed")


def once(context, sequences, length, steps):
    ll.llama_memory_clear(ll.llama_get_memory(context), True)
    rows = [(p, s, p == length - 1) for s in range(sequences) for p in range(length)]
    start = time.perf_counter()
    for first in range(0, len(rows), 512):
        decode(context, rows[first:first + 512])
    ll.llama_synchronize(context)
    middle = time.perf_counter()
    for step in range(steps):
        decode(context, [(length + step, s, True) for s in range(sequences)])
    ll.llama_synchronize(context)
    end = time.perf_counter()
    return {"prefill": len(rows) / (middle - start), "decode": sequences * steps / (end - middle)}


for line in sys.stdin:
    sequences, length, output = map(int, line.split())
    params = ll.llama_context_default_params()
    params.n_ctx = sequences * (length + output)
    params.n_batch = params.n_ubatch = 512
    params.n_seq_max = sequences
    params.n_threads = params.n_threads_batch = threads
    context = ll.llama_init_from_model(model, params)
    once(context, sequences, min(length, 512), 2)
    print(json.dumps(once(context, sequences, length, output - 1)), flush=True)
    ll.llama_free(context)
