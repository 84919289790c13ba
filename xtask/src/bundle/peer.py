"""Measures PyTorch on the same GPU: the rates of copies and matrix products, attention, and generation with transformers.

    peer.py WORK MODEL FILE

Each figure is written to FILE as a line of JSON as soon as it is measured. Batches are static, as `generate` makes them: prompts are
padded on the left to the longest of their batch, and a batch runs until its longest output is complete. Only requested tokens count.
"""

import json
import pathlib
import statistics
import sys
import time

import torch
import torch.nn.functional as functional

CARD = torch.cuda.is_available()
DEVICE = "cuda" if CARD else "cpu"
TINY = not CARD or "tiny" in sys.argv
CAP = 25  # seconds of generation after which no further batch begins


def seconds(work, repeat=10):
    """Returns the median time of some runs, by the clock of the GPU."""
    work()
    times = []
    for _ in range(1 if TINY else repeat):
        if CARD:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def normal(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE)


def rates(say):
    size = 256 if TINY else 8192
    a, b = normal(size, size), normal(size, size)
    say(kind="matmul", size=size, operations_per_second=2 * size**3 / seconds(lambda: a @ b))
    source = normal(1 << (16 if TINY else 31))
    target = torch.empty_like(source)
    moved = 2 * source.numel() * source.element_size()
    say(kind="copy", bytes_per_second=moved / seconds(lambda: target.copy_(source)))


def attention(say, heads=32, kv_heads=8, dim=128):
    def attend(query, key, value, **options):
        return functional.scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)

    for batch, context in [(2, 40)] if TINY else [(1, 512), (64, 512), (1, 4096), (64, 4096)]:
        query = normal(batch, heads, 1, dim)
        key, value = (normal(batch, kv_heads, context, dim) for _ in range(2))
        took = seconds(lambda: attend(query, key, value))
        moved = 2 * key.numel() * key.element_size()
        say(kind="sdpa decode", batch=batch, tokens=context, seconds=took, bytes_per_second=moved / took)
    for tokens in [40] if TINY else [2048, 16384]:
        query = normal(1, heads, tokens, dim)
        key, value = (normal(1, kv_heads, tokens, dim) for _ in range(2))
        took = seconds(lambda: attend(query, key, value, is_causal=True))
        operations = 2 * heads * dim * tokens * tokens
        say(kind="sdpa prefill", batch=1, tokens=tokens, seconds=took, operations_per_second=operations / took)


def generate(say, work, name, batch_size=16):
    import transformers

    start = time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        work / name, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).to(DEVICE)
    model.eval()
    say(kind="transformers load", seconds=time.perf_counter() - start)
    wanted = [tuple(map(int, line.split())) for line in (work / "lengths.txt").read_text().splitlines()]
    vocab = model.config.vocab_size
    run(model, vocab, [(8, 2)])  # the first call also initialises, so it is not measured
    prompt_tokens = tokens = done = 0
    start = time.perf_counter()
    for first in range(0, len(wanted), batch_size):
        batch = wanted[first : first + batch_size]
        if time.perf_counter() - start > CAP:
            break
        run(model, vocab, batch)
        prompt_tokens += sum(given for given, _ in batch)
        tokens += sum(made for _, made in batch)
        done += len(batch)
        took = time.perf_counter() - start
        # After each batch, so that the work before the time limit counts.
        say(kind="transformers generate", batch=batch_size, requests=done, of=len(wanted), prompt_tokens=prompt_tokens,
            tokens=tokens, seconds=took, tokens_per_second=tokens / took)


@torch.inference_mode()
def run(model, vocab, batch):
    longest = max(given for given, _ in batch)
    most = max(made for _, made in batch)
    ids = torch.randint(1, vocab, (len(batch), longest), device=DEVICE)
    mask = torch.ones_like(ids)
    for row, (given, _) in enumerate(batch):
        mask[row, : longest - given] = 0
    model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=most, min_new_tokens=most,
                   pad_token_id=0)
    if CARD:
        torch.cuda.synchronize()


def main(work, name, file):
    with open(file, "w", buffering=1) as out:

        def say(**figures):
            line = json.dumps(figures)
            print(line)
            print(line, file=out)

        say(kind="versions", torch=torch.__version__, device=torch.cuda.get_device_name() if CARD else "cpu")
        rates(say)
        attention(say)
        if CARD:
            torch.cuda.empty_cache()
        generate(say, pathlib.Path(work), name)


if __name__ == "__main__":
    main(*sys.argv[1:])
