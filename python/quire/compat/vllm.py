"""The package `vllm` for programs that import it: after `import quire.compat.vllm`, `import vllm` and its usual modules find this package.

It is for programs that cannot be changed, such as lm-eval and LangChain. It refuses to replace a vLLM that is imported already.
"""

from __future__ import annotations

import argparse
import gc
import importlib.machinery
import importlib.metadata
import sys
import types
from typing import Any

import quire
from quire import llm, metrics, outputs, params, requests, settings

#: The version of vLLM whose names these are.
VERSION = "0.32.0"


class VLLMValidationError(ValueError):
    """The base of errors of parameters in vLLM. Here they are `ValueError` and `TypeError`."""


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser of command lines."""


def get_tokenizer(tokenizer_name: str, *_: Any, trust_remote_code: bool = False, revision: str | None = None, **__: Any) -> Any:
    """The tokenizer of the package transformers."""
    from transformers import AutoTokenizer  # type: ignore[import-not-found, unused-ignore] # pyright: ignore

    return AutoTokenizer.from_pretrained(tokenizer_name, trust_remote_code=trust_remote_code, revision=revision)


def print_embeddings(embeds: list[float], prefix: str = "Embeddings") -> None:
    """Prints the first numbers of an embedding."""
    shown = ", ".join(map(str, embeds[:4]))
    more = ", ..." if len(embeds) > 4 else ""
    print(f"{prefix}: [{shown}{more}] (size={len(embeds)})")


def resolve_chat_template(tokenizer: Any, chat_template: str | None = None, tools: Any = None, **_: Any) -> str | None:
    """The chat template that a tokenizer of transformers uses."""
    found: str | None = chat_template or getattr(tokenizer, "chat_template", None)
    return found


def collect(*_: Any, **__: Any) -> None:
    """Ends engines that nothing refers to any more. There are no groups of processes to leave."""
    gc.collect()


def _public(module: types.ModuleType) -> dict[str, Any]:
    return {name: getattr(module, name) for name in module.__all__}


def _modules() -> dict[str, dict[str, Any]]:
    everything = {name: getattr(quire, name) for name in quire.__all__ if not name.startswith("_")}
    engine_args = {"EngineArgs": settings.EngineArgs, "AsyncEngineArgs": settings.AsyncEngineArgs}
    async_llm = {"AsyncLLM": quire.AsyncLLM, "AsyncLLMEngine": quire.AsyncLLM}
    ends: dict[str, Any] = {
        name: collect
        for name in ("cleanup_dist_env_and_memory", "destroy_distributed_environment", "destroy_model_parallel")
    }
    return {
        "vllm": {**everything, **async_llm, "__version__": VERSION},
        "vllm.distributed": ends,
        "vllm.distributed.parallel_state": ends,
        "vllm.engine.arg_utils": engine_args,
        "vllm.engine.async_llm_engine": async_llm,
        "vllm.engine.llm_engine": {"LLMEngine": quire.LLMEngine},
        "vllm.entrypoints.chat_utils": {"resolve_hf_chat_template": resolve_chat_template},
        "vllm.entrypoints.llm": {"LLM": llm.LLM},
        "vllm.exceptions": {"VLLMValidationError": VLLMValidationError},
        "vllm.inputs": _public(requests),
        "vllm.logprobs": {"FlatLogprobs": outputs.FlatLogprobs, "Logprob": outputs.Logprob},
        "vllm.lora.request": {"LoRARequest": params.LoRARequest},
        "vllm.outputs": _public(outputs),
        "vllm.pooling_params": {"PoolingParams": params.PoolingParams},
        "vllm.renderers.hf": {"resolve_chat_template": resolve_chat_template},
        "vllm.sampling_params": _public(params),
        "vllm.tokenizers": {"get_tokenizer": get_tokenizer},
        "vllm.transformers_utils.tokenizer": {"get_tokenizer": get_tokenizer},
        "vllm.utils": {"FlexibleArgumentParser": FlexibleArgumentParser},
        "vllm.utils.print_utils": {"print_embeddings": print_embeddings},
        "vllm.utils.argparse_utils": {"FlexibleArgumentParser": FlexibleArgumentParser},
        "vllm.v1.metrics.reader": _public(metrics),
        "vllm.v1.engine.async_llm": async_llm,
        "vllm.v1.engine.llm_engine": {"LLMEngine": quire.LLMEngine},
        "vllm.v1.engine.exceptions": {"EngineDeadError": quire.EngineDeadError},
    }


def install() -> None:
    """Makes `import vllm` find this package. A second call does nothing.

    Raises:
        RuntimeError: vLLM itself is imported.
    """
    known = sys.modules.get("vllm")
    if known is not None:
        if getattr(known, "__quire__", False):
            return
        raise RuntimeError("vllm: found vLLM imported, expected it not to be; import quire.compat.vllm first")
    for name, contents in _modules().items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            _module(".".join(parts[:depth]))
        sys.modules[name].__dict__.update(contents)
    sys.modules["vllm"].__dict__["__quire__"] = True
    # Programs ask for the version of the distribution.
    version = importlib.metadata.version

    def of(distribution_name: str) -> str:
        return VERSION if distribution_name == "vllm" else version(distribution_name)

    importlib.metadata.version = of


def _module(name: str) -> None:
    if name in sys.modules:
        return
    module = types.ModuleType(name, f"{name} of vLLM, by quire.compat.vllm")
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)


install()
