"""Inference for asyncio: requests whose outputs are read while they run."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from quire import _quire, requests
from quire._quire import EngineDeadError
from quire.llm import OF_WORKERS, EngineHandle
from quire.outputs import Collector, CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput, integers
from quire.params import LoRARequest, PoolingParams, SamplingParams, wrong_type
from quire.settings import EngineArgs, Settings
from quire.tokenizer import Tokenizer

__all__ = ["AsyncLLM"]

#: Methods of vLLM that are not supported, and what to use instead.
_INTERNALS = {
    **OF_WORKERS,
    "add_request": "use generate()",
    "from_vllm_config": "use from_engine_args()",
    "pause_generation": "stop sending requests",
    "resume_generation": "stop sending requests",
    "reset_encoder_cache": "models here read text only",
    "scale_elastic_ep": "there is one replica",
}


class _Dispatcher:
    """A thread that tells event loops which streams have events: once per step and loop."""

    def __init__(self) -> None:
        self.ready = _quire.Ready()
        self._readers: dict[int, tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = {}
        self._keys = itertools.count()
        self._lock = threading.Lock()
        threading.Thread(target=_dispatch, args=(self.ready, weakref.ref(self)), name="quire-dispatch", daemon=True).start()

    def add(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> int:
        """A key, after whose notice `wake` runs on the loop."""
        with self._lock:
            key = next(self._keys)
            self._readers[key] = (loop, wake)
            return key

    def remove(self, key: int) -> None:
        with self._lock:
            self._readers.pop(key, None)

    def tell(self, keys: list[int]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        with self._lock:
            for key in keys:
                if key in self._readers:
                    loop, wake = self._readers[key]
                    by_loop.setdefault(loop, []).append(wake)
        for loop, wakes in by_loop.items():
            # A loop that is closed reads nothing more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_run_all, wakes)


def _run_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()


def _dispatch(ready: _quire.Ready, owner: weakref.ref[_Dispatcher]) -> None:
    while (keys := ready.wait(False)) is not None and (dispatcher := owner()) is not None:
        dispatcher.tell(keys)
        del dispatcher


class _Running:
    """A request that has not ended."""

    def __init__(self, loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
        self._loop = loop
        self._event = event
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._event.set)


class AsyncLLM:
    """A model and the engine that computes it, for asyncio.

    Outputs may be read in several event loops and threads at a time. Arguments and errors are those of `LLM`.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, *, seed: int | None = 0, **settings: Any) -> None:
        given = {"model": None if model is None else os.fspath(model), "seed": seed, **settings}
        self._handle = EngineHandle(Settings("AsyncLLM()", given))
        self._dispatcher = _Dispatcher()
        weakref.finalize(self, self._dispatcher.ready.close)
        self._running: dict[str, _Running] = {}
        self._names: dict[int, str] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **_: Any) -> AsyncLLM:
        """Starts an engine with these settings."""
        return cls(**vars(engine_args))

    def __getattr__(self, name: str) -> Any:
        if name in _INTERNALS:
            raise NotImplementedError(f"AsyncLLM.{name} is not supported: {_INTERNALS[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    async def generate(
        self,
        prompt: requests.PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        prompt_text: str | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continues a prompt, and yields an output for what each step has added (`SamplingParams.output_kind`).

        Whatever ends the iteration early, such as `break` or the cancellation of the task, cancels the request. What is read
        late is merged: a slow reader delays nothing.

        Args:
            prompt: Text, token ids, or a dict.
            sampling_params: Parameters; None: `get_default_sampling_params()`.
            request_id: Id, with which `abort` ends the request; None: a new one.
            prompt_text: Text of a prompt of token ids, which is only returned.
            lora_request: Adapter.
            tokenization_kwargs: As in `LLM.generate`.
            trace_headers: No effect.
            priority: Lower runs first under `scheduling_policy="priority"`.
            data_parallel_rank: 0 or None: there is one replica.
            session_id: No effect.
        """
        if data_parallel_rank not in (None, 0):
            raise ValueError(f"data_parallel_rank: found {data_parallel_rank!r}, expected 0 or None: there is one replica")
        if sampling_params is not None and not isinstance(sampling_params, SamplingParams):
            raise wrong_type("sampling_params", sampling_params, "SamplingParams")
        params = sampling_params or self.get_default_sampling_params()
        given, extra = requests.one_prompt(prompt), requests.extra(lora_request, priority, tokenization_kwargs)
        body = requests.completion(given, params, extra)
        whole = params.output_kind.name == "FINAL_ONLY"
        request_id = request_id or next(self._handle.ids)
        async with contextlib.aclosing(self._answers(request_id, "completions", body, whole, lora_request)) as answers:
            collector = None
            async for stream, answer in answers:
                if collector is None:
                    ids = integers(stream.prompt_token_ids(0)).tolist()
                    text = given.text or prompt_text
                    collector = Collector(request_id, text, ids, self._handle.texts, params, lora_request)
                yield collector.add(answer) if answer is not None else _aborted(collector, params.n)

    async def encode(
        self,
        prompt: requests.PromptType,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Yields the embedding of a prompt, once; with the task "classify", the probabilities of its labels."""
        given, params = requests.one_prompt(prompt), pooling_params or PoolingParams()
        extra = requests.extra(lora_request, priority, tokenization_kwargs)
        body, route = requests.embedding(given, params, extra), requests.pooling_task(params.task or "embed", [params])
        request_id = request_id or next(self._handle.ids)
        async with contextlib.aclosing(self._answers(request_id, route, body, True, lora_request)) as answers:
            async for stream, answer in answers:
                if answer is not None:
                    ids = integers(stream.prompt_token_ids(0)).tolist()
                    vector = self._handle.engine.finish(
                        answer.embedding or b"", params.dimensions, params.use_activation
                    )
                    yield PoolingRequestOutput(request_id, PoolingOutput(vector), ids, answer.cached_tokens or 0, answer.finished)

    async def _answers(
        self, request_id: str, route: str, body: bytes, whole: bool, adapter: LoRARequest | None
    ) -> AsyncGenerator[tuple[_quire.Stream, _quire.Answer | None], None]:
        """The answers of a request; `None` as the last one after `abort`."""
        if request_id in self._running:
            raise ValueError(f"request_id: found {request_id!r}, which is running, expected another")
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        self._running[request_id] = running = _Running(loop, event)
        key = self._dispatcher.add(loop, event.set)
        stream = None
        try:
            # Tokenizing and compiling grammars take a while.
            stream = await loop.run_in_executor(None, self._submit, route, body, whole, adapter)
            while True:
                event.clear()
                answers, ended = stream.poll(self._dispatcher.ready, key)
                for answer in answers:
                    yield stream, answer
                if running.is_aborted and not ended:
                    stream.cancel()
                    yield stream, None
                    return
                if ended:
                    return
                if not answers:
                    await event.wait()
        finally:
            self._dispatcher.remove(key)
            self._running.pop(request_id, None)
            if stream is not None:
                stream.cancel()

    def _submit(self, route: str, body: bytes, whole: bool, adapter: LoRARequest | None) -> _quire.Stream:
        self._handle.load([adapter])
        return self._handle.engine.submit(route, [body], whole)

    async def abort(self, request_id: str | list[str], internal: bool = False) -> None:
        """Ends requests: their iterations end with an output whose unfinished sequences have the finish reason "abort"."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            if running := self._running.get(one):
                running.abort()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._handle.tokenizer()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._handle.tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """As in `LLM`."""
        return self._handle.default_sampling_params()

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """What the engine can do."""
        return ("generate", "embed")

    async def is_paused(self) -> bool:
        """False."""
        return False

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """As in `LLM`."""
        await asyncio.get_running_loop().run_in_executor(None, self._handle.sleep, level, mode)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """As in `LLM`."""
        await asyncio.get_running_loop().run_in_executor(None, self._handle.engine.wake_up)

    async def is_sleeping(self) -> bool:
        """Whether it sleeps."""
        return self._handle.engine.is_sleeping()

    async def wait_for_requests_to_drain(self, drain_timeout: int = 300) -> None:
        """Waits until all requests of this object have ended.

        Raises:
            TimeoutError: Some have not after `drain_timeout` seconds.
        """
        deadline = time.monotonic() + drain_timeout
        while self._running:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self._running)} requests have not ended after {drain_timeout} s")
            await asyncio.sleep(0.01)

    async def is_tracing_enabled(self) -> bool:
        """False: traces are those of the program."""
        return False

    async def do_log_stats(self) -> None:
        """Does nothing: there are no statistics in the log."""

    def get_num_unfinished_requests(self) -> int:
        """Number of requests of this object that have not ended."""
        return len(self._running)

    async def check_health(self) -> None:
        """Raises `EngineDeadError` if the engine has ended."""
        if not self.is_running:
            raise self.dead_error

    @property
    def is_running(self) -> bool:
        """Whether the engine takes requests."""
        return self._handle.engine.is_running()

    @property
    def is_stopped(self) -> bool:
        """Whether the engine has ended."""
        return not self.is_running

    @property
    def errored(self) -> bool:
        """Whether the engine has ended."""
        return not self.is_running

    @property
    def dead_error(self) -> BaseException:
        """The exception of requests to an engine that has ended."""
        return EngineDeadError("the engine has ended; start another")

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """As in `LLM`."""
        if reset_connector:
            raise ValueError("reset_connector: found True, expected False: the blocks of other replicas are theirs")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, self._handle.engine.reset_prefix_cache, reset_running_requests)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Loads an adapter. Returns whether it was not loaded before."""
        before = {name for name, _ in self._handle.engine.adapters()}
        await asyncio.get_running_loop().run_in_executor(None, self._handle.load, [lora_request])
        self._names[lora_request.lora_int_id] = lora_request.lora_name
        return lora_request.lora_name not in before

    async def remove_lora(self, lora_id: int) -> bool:
        """Removes an adapter after its last request. Returns whether there was one of this number."""
        name = self._names.pop(lora_id, None)
        if name is None:
            return False
        await asyncio.get_running_loop().run_in_executor(None, self._handle.engine.unload_adapter, name)
        return True

    async def list_loras(self) -> set[int]:
        """Numbers of the adapters that `add_lora` has loaded."""
        loaded = {name for name, _ in self._handle.engine.adapters()}
        return {number for number, name in self._names.items() if name in loaded}

    async def pin_lora(self, lora_id: int) -> bool:
        """Whether there is an adapter of this number; all stay in memory as far as `max_cpu_loras` allows."""
        return lora_id in await self.list_loras()

    def shutdown(self, timeout: float | None = None) -> None:
        """Cancels all requests, ends the engine and frees its memory. A second call does nothing."""
        self._handle.close()

    close = shutdown

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.shutdown)


def _aborted(collector: Collector, n: int) -> RequestOutput:
    """The output after an abort, with all that was generated."""
    outputs = []
    for index in range(n):
        so_far = collector.sequences.get(index)
        text, ids = (so_far.text, integers(so_far.token_ids).tolist()) if so_far else ("", [])
        outputs.append(CompletionOutput(index, text, ids, finish_reason="abort", lora_request=collector.lora_request))
    return RequestOutput(
        collector.request_id,
        collector.prompt,
        collector.prompt_token_ids,
        collector.prompt_logprobs,
        outputs,
        True,
        lora_request=collector.lora_request,
        num_cached_tokens=collector.cached_tokens,
    )
