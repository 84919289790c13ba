"""Times the decode attention of other engines on the GPU, with the shapes of `quire bench kernels`: 32 / 8 heads of 128, bf16.

    peers.py FOLDER FILE

FOLDER is what `cargo xtask gpu-peers` made: libraries with the functions of call.h, and the versions. Each figure is written to FILE
as a line of JSON. Each kernel has a process of its own, because a fault on the GPU ends all work of a process. A result must agree
with PyTorch's attention in f32; a kernel that fails, disagrees or takes too long gets a line with the error.

As in our measurement, the runs are enqueued ahead of the GPU, with an event between two of them, and use different blocks in turn, so
that reads come from memory.
"""

import ctypes
import json
import multiprocessing
import pathlib
import statistics
import sys

# The library, the function in it, and the name in tables.
KERNELS = [
    ("vllm", "vllm_v1", "paged_attention_v1"),
    ("vllm", "vllm_v2", "paged_attention_v2"),
    ("flashinfer", "flashinfer", "batch decode"),
]
SHAPES = [(1, 512), (64, 512), (1, 4096), (64, 4096)]
HEADS, KV_HEADS, HEAD, BLOCK = 32, 8, 128, 16
POOL = 256 << 20  # bytes of keys and values: more than any L2 cache
WARMUP, REPEAT = 2, 20
LIMIT = 11  # seconds of a kernel
REPORTED = 9  # exit code of a process that has written its errors
# Greatest error over the greatest number of the result: bf16 has 8 bits, and the kernels round probabilities to it.
ALLOWED = 0.02


class Call(ctypes.Structure):
    """The structure of call.h."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("out", "queries", "keys", "values", "tables", "lengths", "stream")]
    _fields_ += [(name, ctypes.c_int) for name in ("batch", "heads", "kv_heads", "context")]
    _fields_ += [("scale", ctypes.c_float)]


def functions(folder, library, name):
    """Returns the functions `prepare` and `run` of a kernel, which raise an error instead of returning its code."""
    loaded = ctypes.CDLL(str(pathlib.Path(folder, f"lib{library}.so").resolve()))
    if loaded.call_bytes() != ctypes.sizeof(Call):
        raise ValueError(f"found a structure of {loaded.call_bytes()} bytes, expected {ctypes.sizeof(Call)}")

    def checked(step):
        function = getattr(loaded, f"{name}_{step}")
        function.argtypes = [ctypes.POINTER(Call)]

        def call(arguments):
            code = function(ctypes.byref(arguments))
            if code:
                raise RuntimeError(f"{name}_{step}: CUDA error {code}")

        return call

    return checked("prepare"), checked("run")


def version(folder, library):
    """Returns the version of a package in requirements.txt."""
    lines = pathlib.Path(folder, "requirements.txt").read_text().splitlines()
    pin = next((line for line in lines if line.startswith(library)), "")
    return pin.partition("==")[2].partition(" ")[0]


def tables_of(blocks, batch, per_sequence):
    """Returns the number of tables for a batch that a pool of blocks gives without using a block twice: at least one."""
    return max(1, blocks // (batch * per_sequence))


def measure(torch, prepare, run, library, batch, context):
    """Returns the median seconds of a call, and its error."""
    per_sequence = context // BLOCK
    block_bytes = 2 * BLOCK * KV_HEADS * HEAD * 2
    blocks = max(batch * per_sequence, POOL // block_bytes)
    copies = min(tables_of(blocks, batch, per_sequence), WARMUP + REPEAT)
    normal = lambda *shape: torch.randn(*shape, dtype=torch.bfloat16, device="cuda")
    queries, out = normal(batch, HEADS, HEAD), normal(batch, HEADS, HEAD)
    keys, values = (normal(blocks, BLOCK, KV_HEADS, HEAD) for _ in range(2))
    order = torch.randperm(blocks, device="cuda").to(torch.int32)[: copies * batch * per_sequence]
    tables = order.view(copies, batch, per_sequence).contiguous()
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    if library == "vllm":
        # Keys: [block, head, 16 groups of 8 elements, token, element]; values: [block, head, element, token].
        laid = (keys.view(blocks, BLOCK, KV_HEADS, HEAD // 8, 8).permute(0, 2, 3, 1, 4).contiguous(),
                values.permute(0, 2, 3, 1).contiguous())
    else:
        laid = keys, values
    stream = torch.cuda.current_stream()
    pointers = [tensor.data_ptr() for tensor in (out, queries, *laid)]
    calls = [Call(*pointers, table.data_ptr(), lengths.data_ptr(), stream.cuda_stream, batch, HEADS, KV_HEADS, context,
                  HEAD**-0.5) for table in tables]
    torch.cuda.synchronize()
    prepare(calls[0])

    run(calls[0])
    torch.cuda.synchronize()
    worst = 0.0
    for row in {0, batch - 1}:
        attended = [of[tables[0, row].long()].view(context, KV_HEADS, HEAD).transpose(0, 1).float() for of in (keys, values)]
        key, value = (of.repeat_interleave(HEADS // KV_HEADS, 0) for of in attended)
        expected = torch.nn.functional.scaled_dot_product_attention(queries[row].float().unsqueeze(1), key, value).squeeze(1)
        error = ((out[row].float() - expected).abs().max() / expected.abs().max()).item()
        worst = error if not error <= worst else worst  # not a number stays
    if not worst <= ALLOWED:
        raise ValueError(f"found an error of {worst:.3g} of the greatest number, expected at most {ALLOWED}")

    for i in range(WARMUP):
        run(calls[i % copies])
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)  # clocks, so that the work is enqueued before the GPU begins it
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEAT + 1)]
    marks[0].record()
    for i, mark in enumerate(marks[1:]):
        run(calls[(WARMUP + i) % copies])
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) / 1e3 for a, b in zip(marks, marks[1:])), worst


def measure_all(torch, folder, say, library, name):
    """Measures a kernel, in a process of its own."""
    try:
        prepare, run = functions(folder, library, name)
    except (OSError, AttributeError, ValueError) as error:
        say(error=str(error))
        sys.exit(REPORTED)
    code = 0
    for batch, context in SHAPES:
        try:
            seconds, error = measure(torch, prepare, run, library, batch, context)
        except Exception as problem:  # of any kind: the other shapes and kernels still run
            say(batch=batch, tokens=context, error=(str(problem) or repr(problem)).splitlines()[0])
            code = REPORTED
        else:
            moved = 2 * 2 * batch * context * KV_HEADS * HEAD
            say(batch=batch, tokens=context, seconds=seconds, bytes_per_second=moved / seconds, relative_error=error)
        torch.cuda.empty_cache()
    sys.exit(code)


def main(folder, file):
    import torch  # not at the top: the tests of this file have no PyTorch

    context = multiprocessing.get_context("fork")  # CUDA is not initialised yet
    worst = 0
    for library, name, title in KERNELS:

        def say(**figures):
            line = json.dumps({"kind": "peer decode", "kernel": f"{library} {version(folder, library)} {title}", **figures})
            print(line, flush=True)
            with open(file, "a") as out:
                print(line, file=out)

        process = context.Process(target=measure_all, args=(torch, folder, say, library, name))
        process.start()
        process.join(LIMIT)
        if process.is_alive():
            process.kill()
            process.join()
            say(error=f"it took more than {LIMIT} s")
        elif process.exitcode not in (0, REPORTED):
            say(error=f"its process ended with code {process.exitcode}")
        worst = worst or process.exitcode
    return 1 if worst else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
