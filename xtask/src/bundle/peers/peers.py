"""Times PyTorch's and FlashInfer's kernels on the GPU, with the shapes of `quire bench kernels`: 32 / 8 heads of 128, bf16.

    peers.py FOLDER FILE [--only NAME,...] [--limit SECONDS]

FOLDER is what `cargo xtask gpu-peers` made: libraries with the functions of call.h, and the version. Each figure is appended to
FILE as a line of JSON as soon as it is known. Each family of kernels has its own process, because a fault on the GPU ends all work
of a process. Results must agree with float32 on two rows. A kernel that fails or disagrees, and a family that takes too long, get a
line with the error. Calls are captured in a CUDA graph and use different inputs in turn, so that reads come from memory and not
from the L2 cache. `seconds` is the median of the graph's replays, `best_seconds` the least, both divided by the calls.
"""

import argparse
import ctypes
import functools
import json
import multiprocessing
import os
import pathlib
import sys
import time

# Sequences, tokens of each, and query rows of each, which are its last tokens.
DECODE = [(1, 512, 1), (64, 512, 1), (1, 4096, 1), (64, 2048, 1), (64, 4096, 1)]
HEADS, KV_HEADS, HEAD, BLOCK = 32, 8, 128, 16
LAYER = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]  # outputs and inputs of a layer of an 8B model
LAYERS, LAST, WIDE = 32, (128256, 4096), LAYER[2]
GROUP = 128  # inputs that share a scale of 4-bit weights
POOL = 128 << 20  # bytes that calls read in turn at least: more than the L2 cache of 50 MB twice
SPAN, MOST_CALLS, REPLAYS = 2e-3, 100, 11  # seconds of a graph, if so many calls are enough
# Greatest error over the greatest number of the result: bf16 has 8 bits, and the kernels round probabilities to it.
ALLOWED = 0.02
LIMIT = 15  # seconds of a family


class Call(ctypes.Structure):
    """The structure of call.h."""

    _fields_ = [(name, of) for of, names in [
        (ctypes.c_void_p, "out queries keys values tables starts rows last floats ints pinned stream"),
        (ctypes.c_longlong, "float_bytes int_bytes"),
        (ctypes.c_int, "batch heads kv_heads context query_len"),
        (ctypes.c_float, "scale")] for name in names.split()]


def functions(folder, library, name):
    """Returns the functions `prepare` and `run` of a kernel, which raise an error instead of returning its code."""
    loaded = ctypes.CDLL(str(pathlib.Path(folder, f"lib{library}.so").resolve()))
    if loaded.call_bytes() != ctypes.sizeof(Call):
        raise ValueError(f"found a structure of {loaded.call_bytes()} bytes, expected {ctypes.sizeof(Call)}")

    def call(step, arguments):
        if code := getattr(loaded, f"{name}_{step}")(ctypes.byref(arguments)):
            raise RuntimeError(f"{name}_{step}: CUDA error {code}")

    return functools.partial(call, "prepare"), functools.partial(call, "run")


def version(folder):
    """Returns the version of the package in requirements.txt."""
    return pathlib.Path(folder, "requirements.txt").read_text().partition("==")[2].partition(" ")[0]


class Card:
    """The GPU in the process of a family, the stream of all its work, and the lines that the family writes."""

    def __init__(self, torch, say):
        self.torch, self.say, self.failed = torch, say, False
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)

    def copies(self, size):
        """Returns the number of inputs of a size in bytes that calls use in turn, the total of which is at least POOL."""
        return -(-POOL // size)

    def normal(self, *shape):
        return self.torch.randn(*shape, dtype=self.torch.bfloat16, device="cuda")

    def figure(self, measure, **what):
        """Writes the line of a measurement, or of its error, and returns its seconds or None."""
        try:
            found = measure()
        except Exception as problem:  # of any kind: the other shapes and kernels still run
            self.failed = True
            found = {"error": problem}
        self.say(**what, **found)
        self.torch.cuda.empty_cache()
        return found.get("seconds")

    def timed(self, calls, error, moved, operations):
        """Returns the figures of a call that moves some bytes. The calls have different inputs."""
        cuda = self.torch.cuda
        start, end, *marks = (cuda.Event(enable_timing=True) for _ in range(REPLAYS + 3))
        for call in calls:
            call()
        start.record()
        calls[0]()
        end.record()
        end.synchronize()
        count = max(len(calls), min(MOST_CALLS, int(SPAN * 1e3 / max(start.elapsed_time(end), 1e-3)) + 1))
        work = [calls[i % len(calls)] for i in range(count)]
        loop = lambda: [call() for call in work]
        try:
            graph = cuda.CUDAGraph()
            with cuda.graph(graph, stream=self.stream):
                loop()
            replay, how = graph.replay, "graph"
        except RuntimeError:
            replay, how = loop, "loop"
        replay()
        self.stream.synchronize()
        cuda._sleep(2_000_000)  # clocks, so that the work is enqueued before the GPU begins it
        marks[0].record()
        for mark in marks[1:]:
            replay()
            mark.record()
        self.stream.synchronize()
        times = sorted(a.elapsed_time(b) / 1e3 / count for a, b in zip(marks, marks[1:]))
        seconds = times[REPLAYS // 2]
        return {"seconds": seconds, "best_seconds": times[0], "timed": how, "bytes_per_second": moved / seconds,
                "operations_per_second": operations / seconds, "relative_error": error}


def checked(pairs):
    """Returns the greatest error of pairs of a result and what was expected, or raises an error if it is too great."""
    errors = [((found.float() - expected).abs().max() / expected.abs().max()).item() for found, expected in pairs]
    if not all(error <= ALLOWED for error in errors):  # also if it is not a number
        raise ValueError(f"found errors of {errors} of the greatest number, expected at most {ALLOWED}")
    return max(errors)


def attended(query, keys, values):
    """Returns attention in float32: query [heads, 128]; keys and values [tokens, kv_heads, 128]."""
    keys, values = (of.float().repeat_interleave(HEADS // KV_HEADS, 1) for of in (keys, values))
    scores = (query.float() * keys).sum(2) * HEAD**-0.5
    return (scores.softmax(0).unsqueeze(2) * values).sum(0)


def attention(card, kernel, shapes, prepare):
    """Writes the lines of an attention kernel. `prepare` gives the calls for a shape, and a function that gives the result of the
    first call for a query row of a sequence, the query, and all keys and values of the sequence."""
    def measure(batch, context, query_len):
        calls, look = prepare(batch, context, query_len)
        calls[0]()
        pairs = []
        for sequence, row in ((0, query_len // 2), (batch - 1, query_len - 1)):
            found, query, *cached = look(sequence, row)
            pairs.append((found, attended(query, *(of[: context - query_len + row + 1] for of in cached))))
        visible = batch * (query_len * (context - query_len) + query_len * (query_len + 1) // 2)
        return card.timed(calls, checked(pairs), 2 * 2 * batch * context * KV_HEADS * HEAD, 4 * HEADS * HEAD * visible)

    for batch, context, query_len in shapes:
        card.figure(functools.partial(measure, batch, context, query_len), kernel=kernel, dtype="bfloat16", batch=batch,
                    context=context, query_len=query_len, operation="decode" if query_len == 1 else "prefill")


def sdpa(card, folder, shapes):
    """PyTorch's attention with contiguous keys and values."""
    def prepare(batch, context, query_len):
        copies = card.copies(2 * batch * context * KV_HEADS * HEAD * 2)
        queries = card.normal(copies, batch, HEADS, query_len, HEAD)
        keys, values = (card.normal(copies, batch, KV_HEADS, context, HEAD) for _ in range(2))
        attend = functools.partial(card.torch.nn.functional.scaled_dot_product_attention, enable_gqa=True, is_causal=query_len > 1)
        calls = [functools.partial(attend, *inputs) for inputs in zip(queries, keys, values)]
        out = calls[0]()
        of_all = lambda of, sequence: of[0, sequence].transpose(0, 1)
        return calls, lambda sequence, row: (out[sequence, :, row], queries[0, sequence, :, row], of_all(keys, sequence),
                                             of_all(values, sequence))

    attention(card, "torch SDPA", shapes, prepare)


def flashinfer(card, folder, library, name, shapes):
    """A kernel of FlashInfer with a paged cache."""
    torch = card.torch
    integers = functools.partial(torch.tensor, dtype=torch.int32, device="cuda")
    space = functools.partial(torch.empty, dtype=torch.uint8)
    spaces = [space(128 << 20, device="cuda"), space(8 << 20, device="cuda"), space(8 << 20, pin_memory=True)]  # as it advises
    plan, run = functions(folder, library, name)

    def prepare(batch, context, query_len):
        per_sequence = context // BLOCK
        copies = card.copies(batch * per_sequence * 2 * BLOCK * KV_HEADS * HEAD * 2)
        blocks = copies * batch * per_sequence
        queries, out = card.normal(copies, batch * query_len, HEADS, HEAD), card.normal(batch * query_len, HEADS, HEAD)
        keys, values = (card.normal(blocks, BLOCK, KV_HEADS, HEAD) for _ in range(2))
        tables = torch.randperm(blocks, device="cuda").to(torch.int32).view(copies, batch, per_sequence)
        starts, rows = (integers([step * i for i in range(batch + 1)]) for step in (per_sequence, query_len))
        last = integers([BLOCK] * batch)

        def call(query, table):
            tensors = out, query, keys, values, table, starts, rows, last, *spaces
            arguments = Call(*(tensor.data_ptr() for tensor in tensors), card.stream.cuda_stream, spaces[0].numel(),
                             spaces[1].numel(), batch, HEADS, KV_HEADS, context, query_len, HEAD**-0.5)
            arguments.tensors = tensors  # which live as long as their pointers
            return functools.partial(run, arguments)

        calls = [call(*inputs) for inputs in zip(queries, tables)]
        card.stream.synchronize()
        plan(calls[0].args[-1])  # it depends only on the shape
        of_table = lambda of, sequence: of[tables[0, sequence].long()].view(context, KV_HEADS, HEAD)
        at = lambda of, sequence, row: of[sequence * query_len + row]
        return calls, lambda sequence, row: (at(out, sequence, row), at(queries[0], sequence, row), of_table(keys, sequence),
                                             of_table(values, sequence))

    attention(card, f"flashinfer {version(folder)} {name}", shapes, prepare)


def linear(card, kernel, weights, outputs, inputs, rows, bits, given, stored, product, expected):
    """Writes the line of a product of given rows with weights [outputs, inputs], and returns its seconds or None."""
    def measure():
        some = sorted({0, rows - 1})
        error = checked([(product(given, stored[0])[some], expected(given, stored[0], some))])
        calls = [functools.partial(product, given, of) for of in stored]
        moved = outputs * inputs * bits / 8 + rows * (inputs * given[0].element_size() + 2 * outputs)
        return card.timed(calls, error, moved, 2 * rows * outputs * inputs)

    return card.figure(measure, kernel=kernel, operation="linear", dtype="bfloat16", weights=weights, outputs=outputs,
                       inputs=inputs, rows=rows)


def dense(card, outputs, inputs, all_rows):
    """Writes the lines of products with bf16 weights, and returns their seconds by rows."""
    stored = [card.normal(outputs, inputs) for _ in range(card.copies(outputs * inputs * 2))]
    product, exact = (lambda x, w: x[0] @ w.t()), (lambda x, w, some: x[0][some].float() @ w.float().t())
    return {rows: linear(card, "torch matmul", "bfloat16", outputs, inputs, rows, 16, [card.normal(rows, inputs)], stored, product,
                         exact) for rows in all_rows}


def matmul(card, folder):
    """Products with bf16 weights, and their sum over a step of an 8B model."""
    all_rows = (1, 16, 64, 256, 2048)
    shapes = [dense(card, *shape, all_rows) for shape in [*LAYER, LAST]]
    for rows in all_rows:
        *layer, last = (of[rows] for of in shapes)
        if None not in [*layer, last]:
            card.say(kernel="torch matmul: linears of an 8B step", operation="step", dtype="bfloat16", weights="bfloat16",
                     rows=rows, seconds=LAYERS * sum(layer) + last)


def int4(card, folder):
    """Products with weights in 4 bits, in groups with a scale and an offset."""
    torch, ops = card.torch, card.torch.ops.aten

    def packed(outputs, inputs):
        codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.int32, device="cuda")
        scales = card.normal(inputs // GROUP, outputs, 2)
        scale, offset = (scales[:, :, i].t().float().repeat_interleave(GROUP, 1) for i in range(2))
        two = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
        return ops._convert_weight_to_int4pack(two, 8), scales, (codes - 8) * scale + offset

    product = lambda x, w: ops._weight_int4pack_mm(x[0], w[0], GROUP, w[1])
    exact = lambda x, w, some: x[0][some].float() @ w[2].t()
    stored = [packed(*WIDE) for _ in range(card.copies(WIDE[0] * WIDE[1] // 2))]
    for rows in (1, 16, 64, 256):
        linear(card, "torch _weight_int4pack_mm", f"int4, groups of {GROUP}", *WIDE, rows, 4 + 32 / GROUP,
               [card.normal(rows, WIDE[1])], stored, product, exact)


def fp8(card, folder):
    """Products of rows and weights in FP8, with a scale for each tensor, or for each row of both."""
    torch = card.torch
    eight = lambda *shape: card.normal(*shape).to(torch.float8_e4m3fn)
    scaled = functools.partial(torch._scaled_mm, out_dtype=torch.bfloat16, use_fast_accum=True)
    product = lambda x, w: scaled(x[0], w[0].t(), scale_a=x[1], scale_b=w[1])
    exact = lambda x, w, some: (x[0].float() * x[1])[some] @ (w[0].float().t() * w[1])
    numbers = [eight(*WIDE) for _ in range(card.copies(WIDE[0] * WIDE[1]))]
    for by in ("tensor", "row"):
        scales = lambda *shape: torch.rand(shape if by == "row" else (), device="cuda") + 0.5
        stored = [(of, scales(1, WIDE[0])) for of in numbers]
        for rows in (16, 64, 256, 2048):
            given = eight(rows, WIDE[1]), scales(rows, 1)
            linear(card, "torch _scaled_mm", f"fp8_e4m3, scales by {by}", *WIDE, rows, 8, given, stored, product, exact)


def rates(card, folder):
    """Rates of a copy and of a large product."""
    dense(card, 8192, 8192, [8192])
    source, target = card.normal(1 << 30), card.normal(1 << 30)
    copy = lambda: card.timed([lambda: target.copy_(source)], None, 2 * 2 * source.numel(), 0)
    card.figure(copy, kernel="torch copy", operation="copy", dtype="bfloat16")


# Names for --only, the most important first.
FAMILIES = {
    "sdpa-decode": functools.partial(sdpa, shapes=DECODE),
    "flashinfer-decode": functools.partial(flashinfer, library="flashinfer", name="decode", shapes=DECODE),
    "flashinfer-tensor-decode": functools.partial(flashinfer, library="flashinfer", name="tensor_decode", shapes=DECODE),
    "matmul": matmul,
    "sdpa-prefill": functools.partial(sdpa, shapes=[(1, tokens, tokens) for tokens in (2048, 8192, 16384)]),
    "flashinfer-prefill": functools.partial(flashinfer, library="flashinfer_sm90", name="prefill",
                                            shapes=[(1, 2048, 2048), (1, 8192, 8192), (16, 1024, 128)]),
    "int4": int4,
    "fp8": fp8,
    "rates": rates,
}


def run_family(torch, measure, folder, say):
    """Measures a family, in a process of its own."""
    try:
        card = Card(torch, say)
        measure(card, folder)
    except Exception as problem:  # the other families still run
        sys.exit(say(error=problem) or 1)
    sys.exit(card.failed)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder"), parser.add_argument("file")
    parser.add_argument("--only", default=",".join(FAMILIES), help="families, separated by commas")
    parser.add_argument("--limit", type=float, default=60, help="seconds of the whole run")
    options = parser.parse_args()
    names = options.only.split(",")
    if not set(names) <= set(FAMILIES):
        parser.error(f"--only: found {options.only}, expected names of {', '.join(FAMILIES)}")
    end = time.monotonic() + options.limit

    def say(family, **figures):  # a line that names no kernel is of the whole family
        first_line = lambda problem: (str(problem) or repr(problem)).splitlines()[0]
        line = json.dumps({"kind": "peer", "kernel": family, **figures}, default=first_line)
        with open(options.file, "a") as out:
            print(line, file=out)

    try:
        import torch  # not at the top: the tests of this file have no PyTorch
    except ImportError as problem:
        return say("all", error=problem) or 1
    context = multiprocessing.get_context("fork")  # CUDA is not initialised yet
    worst = 0
    for name in [name for name in FAMILIES if name in names]:
        if (limit := min(LIMIT, end - time.monotonic())) < 1:
            say(name, error=f"not measured: the limit of {options.limit:g} s was reached")
            worst = 1
            continue
        process = context.Process(target=run_family, args=(torch, FAMILIES[name], options.folder, functools.partial(say, name)))
        process.start()
        process.join(limit)
        if process.is_alive():
            process.kill()
            process.join(5)  # a process that waits in the driver may stay
            say(name, error=f"it took more than {limit:.0f} s")
        elif process.exitcode not in (0, 1):  # 1: it has written its errors
            say(name, error=f"its process ended with code {process.exitcode}")
        worst = worst or process.exitcode != 0
    return int(worst)


if __name__ == "__main__":
    os._exit(main())  # without waiting for a process that stays in the driver
