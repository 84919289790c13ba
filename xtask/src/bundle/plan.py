"""What the two runs do, in which order, and within how many seconds: the only tables of steps, tests, shapes and limits."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Seconds of a whole run; `--limit` replaces it and scales the budget of every step.
SECONDS = {"one": 210.0, "two": 360.0}
# Seconds of one test.
TEST_SECONDS = 60.0
# A step starts only with this share of its budget left, and no budget is shorter than this.
LEAST = 0.2
SHORTEST = 2.0
# Tests that run at once on a card.
JOBS = 10
SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")

# Programs of tests, the tests of each that a card runs, and the few of them that `--short` runs. What matters most comes first.
TESTS = (
    ("device", r"^(backends|profile|resources)::", r"^profile::"),
    ("attention-kernels", r"^conformance::(reference|graphs|caches|transfers)::", r"::cache_writes_equal_the_reference_cases"),
    ("attention-kernels", r"^conformance::attention::", r"^$"),
    ("models", r"^kernels::", r"::gathered_rows_are_exact_copies"),
    ("sampling", r"^device::", r"^device::(refusals|cuts)::"),
    ("engine", r"^reference::(other|the_rest).*_on_cuda_sim$", r"^$"),
    ("engine", r"^(reference|deterministic)::(?!.*every_setting)", r"^$"),
    ("models", r"^(forward_sim|graphs_sim|draft_graphs_sim|lora::sim|forward_codes|drafts|step_sim)::", r"^$"),
    ("attention-kernels", r"^conformance::", r"^$"),
    ("engine", r"^(overlap|speculate_sim|kv_dtypes|lora|recurrent|embeddings|windows|quantized|swap|swaps_beside|steady|kernels"
               r"|speculate|speculate_recurrent|draft_model|faults|host_tier|kv_transfer|kv_events|beam)::", r"^embeddings::.*_is_refused$"),
)
# These compile sources, or test a driver of host code.
NEVER = r"sanitizer|counts::|plug_?in|backends::driver::"


def choose(listed: dict[str, list[str]], short: bool, only: str) -> list[tuple[str, str]]:
    """Returns the tests of a run in their order, each once: program and name."""
    chosen: dict[tuple[str, str], None] = {}
    for program, wanted, few in TESTS:
        for test in listed.get(program, []):
            if re.search(wanted, test) and not re.search(NEVER, test) and (not short or re.search(few, test)):
                if re.search(only, f"{program}/{test}"):
                    chosen[program, test] = None
    return list(chosen)


@dataclass(frozen=True)
class Step:
    """A step: `run.py` has a method for each `does`. `needs` are names of `Run.lacks`."""

    name: str
    seconds: float
    does: str
    needs: tuple[str, ...] = ()
    parts: tuple[tuple[str, str], ...] = ()

    def names(self) -> list[str]:
        """Returns the names of the parts that a run has a line for, whatever happens."""
        return [part for part, _ in self.parts] or [self.name]


DECODE = "--op decode --dtype bfloat16"
PREFILL = "--op prefill --dtype bfloat16"
LINEAR = "--op linear --dtype bfloat16 --batch 1 --query-len 1,16,64,256,2048 --outputs 28672"
ENGINE = "--dtype bfloat16 --kv-cache-memory-bytes 40G --max-num-batched-tokens 8192"
SWEEP = f"{ENGINE} --max-model-len 16640 --max-num-seqs 256 --steps 32"
FEW = f"{SWEEP} --batch-size 1,64,256 --context 512 --prefill 2048"

ATTENTION = Step("attention", 45, "cells", ("device",), (
    ("decode", f"{DECODE} --batch 1,64 --context 512,2048,4096"),
    ("prefill-2048", f"{PREFILL} --batch 1 --context 2048 --query-len 2048"),
    ("prefill-8192", f"{PREFILL} --batch 1 --context 8192 --query-len 8192"),
    ("prefill-chunks", f"{PREFILL} --batch 16 --context 1024 --query-len 128"),
))
LINEARS = Step("linear", 30, "cells", ("device", "products"), (("linear", f"{LINEAR} --weights numbers"),))
QUANTISED = Step("quantised", 35, "cells", ("device", "products"), (
    ("linear-q4", f"{LINEAR} --weights q4"),
    ("linear-q8", f"{LINEAR} --weights q8"),
))
CACHES = Step("caches", 15, "cells", ("device",), (
    ("decode-8bit", f"{DECODE} --kv-dtype fp8_e4m3,int8 --batch 64 --context 512,2048"),
))
# An operation that `quire bench kernels` does not have is a line that says so.
OTHERS = Step("others", 10, "cells", ("device",), (
    ("low_rank", "--op low_rank --dtype bfloat16 --batch 1 --query-len 1,64"),
    ("experts", "--op experts --dtype bfloat16 --batch 1 --query-len 1,64"),
    ("latent", "--op latent --dtype bfloat16 --batch 1,64 --context 512"),
    ("sampler", "--op sampler --batch 1,64,256"),
    ("cache_write", "--op cache_write --dtype bfloat16 --batch 1 --query-len 2048"),
    ("block_copy", "--op block_copy --dtype bfloat16"),
))
MODEL = ("device", "products", "model")
SWEEPS = (
    Step("step-bf16", 35, "sweep", MODEL, (("step-bf16", f"{SWEEP} --batch-size 1,8,64,256 --context 512,4096 --prefill 2048,16384"),)),
    Step("step-deterministic", 20, "sweep", MODEL, (("step-deterministic", f"{FEW} --deterministic"),)),
    Step("step-q4", 25, "sweep", MODEL, (("step-q4", f"{FEW} --quantization q4"),)),
    Step("step-fp8", 20, "sweep", MODEL, (("step-fp8", f"{FEW} --kv-cache-dtype fp8_e4m3"),)),
)
HTTP = Step("http", 30, "http", MODEL, (("server", f"{ENGINE} --max-model-len 8192 --max-num-seqs 256"),))
START = Step("start", 15, "start", MODEL, (("generate", f"{ENGINE} --max-model-len 8192 --max-num-seqs 256"),))
# A part is named for its kernel, of which one launch is measured after one that is not.
NCU = Step("ncu", 40, "ncu", ("device", "ncu"), (
    ("ncu-paged_gqa", f"{DECODE} --batch 64 --context 2048 --variant cuda.paged_gqa"),
    ("ncu-prefill_sm90", f"{PREFILL} --batch 1 --context 4096 --query-len 4096 --variant cuda.prefill_sm90"),
    ("ncu-paged_prefill", f"{PREFILL} --batch 1 --context 4096 --query-len 4096 --variant cuda.paged_prefill"),
    ("ncu-prefill_128", f"{PREFILL} --batch 1 --context 4096 --query-len 4096 --variant cuda.prefill_128"),
    ("ncu-linear", "--op linear --dtype bfloat16 --batch 1 --query-len 16 --outputs 28672 --weights q4"),
))
NCU_SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "Occupancy", "WarpStateStats", "LaunchStats", "SchedulerStats")

# Weights are made beside the tests, so their time is no part of the sum.
WEIGHTS = Step("weights", 60, "weights", ("device",))
RUNS = {
    "one": (Step("roofline", 15, "roofline"), WEIGHTS, Step("tests", 115, "tests", ("device", "tree")), ATTENTION, LINEARS),
    "two": (Step("roofline", 10, "roofline"), WEIGHTS, Step("tests", 40, "tests", ("device", "tree")), QUANTISED, CACHES, *SWEEPS,
            HTTP, START, Step("peers", 60, "peers", ("torch", "card")), NCU, OTHERS),
}
BESIDE = ("weights",)

# Concurrent requests, tokens of each prompt, tokens of each answer.
LOADS = ((16, 256, 128), (64, 512, 128), (256, 512, 128))
STARTS = 3

# `--short`, and `--device cuda-sim`: the same steps with shapes that a simulator can run, and models without size.
SHORT_LOADS = ((2, 8, 4),)
SHORT_CELLS = {"--batch": "1", "--context": "40", "--query-len": "4", "--outputs": "128"}
SHORT_CELLS_MORE = "--heads 2 --kv-heads 1 --head-size 64 --warmup 0 --repeat 1"
SHORT_ENGINE = {"--max-model-len": "256", "--max-num-batched-tokens": "64", "--max-num-seqs": "4", "--kv-cache-memory-bytes": "4M",
                "--batch-size": "1,2", "--context": "16", "--prefill": "40", "--steps": "3"}


def words(text: str, short: dict[str, str], more: str = "") -> list[str]:
    """Returns the words of a command; `short` replaces values of flags, and `more` follows."""
    parts = text.split()
    for index, flag in enumerate(parts[:-1]):
        parts[index + 1] = short.get(flag, parts[index + 1])
    return parts + more.split()
