"""The engine step by step: requests are added, and each call returns what has come since the last one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from quire import _quire, metrics, requests
from quire.llm import EngineHandle
from quire.outputs import Collector, RequestOutput, integers
from quire.params import LoRARequest, SamplingParams, wrong_type
from quire.settings import EngineArgs, Settings
from quire.tokenizer import Tokenizer

__all__ = ["LLMEngine"]


class LLMEngine:
    """A model and the engine that computes it, for programs that drive requests themselves.

    The engine computes whether or not `step` is called. Arguments and errors are those of `LLM`.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, *, seed: int | None = 0, **settings: Any) -> None:
        given = {"model": None if model is None else os.fspath(model), "seed": seed, **settings}
        self._handle = EngineHandle(Settings("LLMEngine()", given))
        self._ready = _quire.Ready()
        self._running: dict[int, tuple[_quire.Stream, Collector]] = {}
        self._due: list[int] = []
        self._keys = 0

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **_: Any) -> LLMEngine:
        """Starts an engine with these settings."""
        return cls(**vars(engine_args))

    def add_request(
        self,
        request_id: str,
        prompt: requests.PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> str:
        """Adds a request. Returns its id. `arrival_time` and `trace_headers` have no effect."""
        if not isinstance(params, SamplingParams):
            raise wrong_type("params", params, "SamplingParams")
        if any(collector.request_id == request_id for _, collector in self._running.values()):
            raise ValueError(f"request_id: found {request_id!r}, which is running, expected another")
        given, extra = requests.one_prompt(prompt), requests.extra(lora_request, priority, tokenization_kwargs)
        body = requests.completion(given, params, extra)
        self._handle.load([lora_request])
        stream = self._handle.engine.submit("completions", [body], params.output_kind.name == "FINAL_ONLY")
        ids = integers(stream.prompt_token_ids(0)).tolist()
        collector = Collector(request_id, given.text, ids, self._handle.texts, params, lora_request)
        self._keys += 1
        self._running[self._keys] = (stream, collector)
        self._due.append(self._keys)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Waits for outputs of running requests. An empty list if none runs."""
        outputs: list[RequestOutput] = []
        while self._running:
            for key in dict.fromkeys(self._due):
                if key not in self._running:
                    continue
                stream, collector = self._running[key]
                try:
                    answers, ended = stream.poll(self._ready, key)
                except BaseException:
                    del self._running[key]
                    raise
                outputs += [collector.add(answer) for answer in answers]
                if ended:
                    del self._running[key]
            self._due = []
            if outputs:
                return outputs
            if self._running:
                self._due = self._ready.wait(True) or []
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether a request runs or has outputs that `step` has not returned."""
        return bool(self._running)

    def get_num_unfinished_requests(self) -> int:
        """Number of such requests."""
        return len(self._running)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Ends requests, whose outputs are not returned any more."""
        ended = {request_ids} if isinstance(request_ids, str) else set(request_ids)
        for key, (stream, collector) in list(self._running.items()):
            if collector.request_id in ended:
                stream.cancel()
                del self._running[key]

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """As in `LLM`."""
        return self._handle.engine.reset_prefix_cache(reset_running_requests)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._handle.tokenizer()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._handle.tokenizer()

    def get_metrics(self) -> list[metrics.Metric]:
        """As in `LLM`."""
        return metrics.parse(self._handle.engine.metrics())

    def close(self) -> None:
        """As in `LLM`."""
        self._handle.close()
