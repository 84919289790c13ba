"""Programs that import vLLM: the names of vLLM's examples and of the wrappers that others have written, in a process of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quire import LLMEngine, RequestOutputKind, SamplingParams


def run(code: str, *arguments: str) -> str:
    program = [sys.executable, "-c", "import quire.compat.vllm\n" + code, *arguments]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_basic_script_of_vllm_runs_with_its_import_unchanged() -> None:
    code = """
from importlib.metadata import version
from importlib.util import find_spec

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.outputs import RequestOutput

assert find_spec("vllm") and version("vllm") == "0.32.0"
llm = LLM(model=None)
outputs = llm.generate(["Hello, my name is"], SamplingParams(temperature=0.8, top_p=0.95))
for output in outputs:
    assert isinstance(output, RequestOutput)
    print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")
engine = llm._handle.engine
del llm
cleanup_dist_env_and_memory()
print(engine.is_running())
"""
    found = run(code)
    assert found.startswith("Prompt: 'Hello, my name is', Generated text: ") and found.endswith("False\n")


def test_an_example_with_arguments_of_the_engine_runs() -> None:
    # As vLLM's examples/basic/offline_inference/generate.py.
    code = """
from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
EngineArgs.add_cli_args(parser)
parser.set_defaults(max_num_seqs=4)
group = parser.add_argument_group("Sampling parameters")
group.add_argument("--max-tokens", type=int)
args = vars(parser.parse_args())
most = args.pop("max_tokens")
llm = LLM(**args)
params = llm.get_default_sampling_params()
params.max_tokens = most
print(llm.max_model_len, len(llm.generate("Hello", params)[0].outputs[0].token_ids))
"""
    arguments = ["--max-model-len", "128", "--kv_cache_memory_bytes=8M", "--enforce-eager", "--max-tokens", "3"]
    assert run(code, *arguments) == "128 3\n"


def test_the_wrapper_of_langchain_finds_what_it_uses() -> None:
    # What langchain_community.llms.vllm.VLLM does.
    code = """
from vllm import LLM as VLLModel, SamplingParams
client = VLLModel(model=None, tensor_parallel_size=1, trust_remote_code=False, dtype="auto", download_dir=None)
params = dict(n=1, max_tokens=8, top_k=-1, top_p=1.0, temperature=1.0, presence_penalty=0.0, frequency_penalty=0.0, stop=None,
              ignore_eos=False, logprobs=None)
print([output.outputs[0].text for output in client.generate(["Hello"], SamplingParams(**params))])
"""
    assert run(code).startswith("['")


def test_numbers_are_printed_under_the_name_that_an_example_gives() -> None:
    code = """
from vllm.utils.print_utils import print_embeddings
print_embeddings([0.5, 1.0, 1.5, 2.0, 2.5], prefix="Reward")
"""
    assert run(code) == "Reward: [0.5, 1.0, 1.5, 2.0, ...] (size=5)\n"


def test_an_imported_vllm_is_not_replaced() -> None:
    code = "import sys, types; sys.modules['vllm'] = types.ModuleType('vllm'); import quire.compat.vllm"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "found vLLM imported" in ended.stderr


def test_an_engine_is_driven_step_by_step() -> None:
    engine = LLMEngine(kv_cache_memory_bytes="8M")
    texts: dict[str, str] = {}
    for at in range(3):
        params = SamplingParams(seed=at, max_tokens=5 + at, output_kind=RequestOutputKind(at))
        assert engine.add_request(f"r{at}", "The capital of France is", params) == f"r{at}"
    with pytest.raises(ValueError, match="request_id: found 'r0'"):
        engine.add_request("r0", "a", SamplingParams())
    engine.add_request("gone", "a", SamplingParams(max_tokens=None, ignore_eos=True))
    engine.abort_request(["gone"])
    finished = set()
    while engine.has_unfinished_requests():
        for output in engine.step():
            one = output.outputs[0] if output.outputs else None
            if one is not None:
                delta = output.request_id == "r1"
                texts[output.request_id] = (texts.get(output.request_id, "") if delta else "") + one.text
            if output.finished:
                finished.add(output.request_id)
    assert finished == {"r0", "r1", "r2"} == texts.keys() and engine.step() == []
    engine.close()
