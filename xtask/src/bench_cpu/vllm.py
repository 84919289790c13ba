"""Measures vLLM; `cargo xtask bench-cpu` starts it.

    vllm.py MODEL DTYPE     answers each line "BATCH INPUT OUTPUT" with {"prefill": tokens/s, "decode": tokens/s}

It computes BATCH sequences of INPUT random tokens and OUTPUT new ones. The time for one new token is that of the prefill; the rest is
decode.
"""

import json
import random
import sys
import time

from vllm import LLM, SamplingParams

model = LLM(
    model=sys.argv[1],
    dtype=sys.argv[2],
    max_num_seqs=64,
    enable_prefix_caching=False,
    disable_log_stats=True,
)
draw = random.Random(1)


def seconds(batch, length, output):
    prompts = [{"prompt_token_ids": [draw.randrange(1000, 11000) for _ in range(length)]} for _ in range(batch)]
    sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    model.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - start


for line in sys.stdin:
    batch, length, output = map(int, line.split())
    seconds(batch, min(length, 512), 3)
    first = seconds(batch, length, 1)
    decode = seconds(batch, length, output) - first
    print(json.dumps({"prefill": batch * length / first, "decode": batch * (output - 1) / decode}), flush=True)
