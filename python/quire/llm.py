"""Offline inference: prompts in, outputs out."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from quire import _quire, metrics, requests
from quire.metrics import Metric
from quire.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    ClassificationOutput,
    ClassificationRequestOutput,
    Collector,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    TokenTexts,
    integers,
)
from quire.params import (
    BeamSearchParams,
    LoRARequest,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
    integer,
    wrong_type,
)
from quire.settings import EngineArgs, Settings
from quire.tokenizer import Tokenizer

__all__ = ["LLM"]

_WEIGHTS = "weights do not change while an engine runs"

#: Methods of vLLM's engines that are not supported, and what to use instead.
OF_WORKERS = {
    "collective_rpc": "there are no Python workers",
    "start_profile": "use `quire serve --profile`",
    "stop_profile": "use `quire serve --profile`",
    "release_kv_cache_memory": "use sleep()",
    "reset_mm_cache": "models here read text only",
    "get_weight_version": _WEIGHTS,
    "init_weight_transfer_engine": _WEIGHTS,
    "shutdown_weight_transfer_engine": _WEIGHTS,
    "start_draft_weight_update": _WEIGHTS,
    "start_weight_update": _WEIGHTS,
    "finish_weight_update": _WEIGHTS,
    "update_weights": _WEIGHTS,
    "update_weight_version": _WEIGHTS,
}

#: Those of `LLM` alone.
_INTERNALS = {
    **OF_WORKERS,
    "apply_model": "weights are not Python objects here",
    "reward": "reward models are not supported",
}


class EngineHandle:
    """What `LLM` and `AsyncLLM` share: an engine, its settings, adapters and defaults."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.engine: _quire.Engine = _quire.Engine(settings.to_json())
        self.info: dict[str, Any] = self.engine.info()
        self.texts: TokenTexts = TokenTexts(self.engine)
        self.ids: Iterator[str] = map(str, itertools.count())
        self._adapters = threading.Lock()
        # At the end of the interpreter, before its threads are gone.
        self._finalizer = weakref.finalize(self, _close, self.engine)

    def close(self) -> None:
        self._finalizer()

    def default_sampling_params(self) -> SamplingParams:
        found = {} if self.settings.ignores_generation_config else self.engine.sampling_defaults()
        return SamplingParams(**{**found, **self.settings.sampling_defaults})

    def load(self, adapters: Sequence[LoRARequest | None]) -> None:
        """Loads the adapters that are not loaded."""
        wanted = {adapter.lora_name: adapter for adapter in adapters if adapter is not None}
        if not wanted:
            return
        with self._adapters:
            loaded = {name for name, _ in self.engine.adapters()}
            for name, adapter in wanted.items():
                if name == self.info["name"]:
                    raise ValueError(f"lora_request: found {name!r}, the name of the model, expected another name")
                if adapter.load_inplace or name not in loaded:
                    self.engine.load_adapter(name, adapter.lora_path, adapter.load_inplace)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.engine, self.info["name"], self.settings.chat_template)

    def sleep(self, level: int, mode: str) -> None:
        self.engine.sleep(integer("level", level), mode)


def _close(engine: _quire.Engine) -> None:
    try:
        engine.close()
    except RuntimeError:
        # In the child of a fork the engine is another process's.
        pass


class ModelFacts:
    """`llm.llm_engine.model_config`."""

    def __init__(self, info: Mapping[str, Any]) -> None:
        self.model: str = info["name"]
        """Name of the model."""
        self.max_model_len: int = info["max_model_len"]
        """Greatest number of tokens of prompt and output."""
        self._vocab_size: int = info["vocab_size"]

    def get_vocab_size(self) -> int:
        """Number of token ids."""
        return self._vocab_size


class EngineFacts:
    """`llm.llm_engine`."""

    def __init__(self, model_config: ModelFacts, tokenizer: Tokenizer) -> None:
        self.model_config = model_config
        """Facts about the model."""
        self.tokenizer = tokenizer
        """The model's tokenizer."""

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.tokenizer


class LLM:
    """A model and the engine that computes it.

    Args:
        model: Folder of a checkpoint, GGUF file, or id on the Hugging Face hub; None: the small model that is built in.
        seed: Seed from which the seeds of requests without one are derived; None: random.
        settings: The flags of `quire serve` with underscores (`max_model_len=4096`, `dtype="bfloat16"`), and vLLM's names that ask
            for nothing else.

    Raises:
        TypeError: A keyword argument is unknown.
        ValueError: A setting has a wrong value.
        RuntimeError: The model cannot be loaded; the message is the line that the program prints.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, *, seed: int | None = 0, **settings: Any) -> None:
        given = {"model": None if model is None else os.fspath(model), "seed": seed, **settings}
        self._handle = EngineHandle(Settings("LLM()", given))
        self._queued: list[_Call] = []

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """Starts an engine with these settings."""
        return cls(**vars(engine_args))

    def __getattr__(self, name: str) -> Any:
        if name in _INTERNALS:
            raise NotImplementedError(f"LLM.{name} is not supported: {_INTERNALS[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"LLM(model={self._handle.info['name']!r}, max_model_len={self.max_model_len})"

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels all requests, ends the engine and frees its memory. A second call does nothing."""
        self._handle.close()

    @property
    def max_model_len(self) -> int:
        """Greatest number of tokens of prompt and output."""
        found: int = self._handle.info["max_model_len"]
        return found

    @property
    def llm_engine(self) -> EngineFacts:
        """Facts about the engine under the names by which scripts ask vLLM for them."""
        return EngineFacts(self.model_config, self._handle.tokenizer())

    @property
    def model_config(self) -> ModelFacts:
        """Facts about the model."""
        return ModelFacts(self._handle.info)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._handle.tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters that hold without others: those of `generation_config.json`, else those of `SamplingParams()`."""
        return self._handle.default_sampling_params()

    def get_metrics(self) -> list[Metric]:
        """What the engine has counted since its start: the metrics of the server's `/metrics` with vLLM's names."""
        return metrics.parse(self._handle.engine.metrics())

    def get_world_size(self, include_dp: bool = True) -> int:
        """1: ranks are threads of this process."""
        return 1

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empties the prefix cache. Returns whether it did: not while a request runs, unless `reset_running_requests`."""
        if reset_connector:
            raise ValueError("reset_connector: found True, expected False: the blocks of other replicas are theirs")
        return self._handle.engine.reset_prefix_cache(reset_running_requests)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Gives memory back until `wake_up`. Afterwards, equal requests have equal outputs.

        Args:
            level: 0 only takes no requests, 1 gives the cache back, 2 the weights too.
            mode: What becomes of unfinished requests: "abort" ends them, "wait" waits for them, "keep" refuses to sleep.
        """
        self._handle.sleep(level, mode)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Takes the memory again. `tags` names a part of it in vLLM; here all of it is taken."""
        self._handle.engine.wake_up()

    def generate(
        self,
        prompts: requests.PromptType | Sequence[requests.PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Continues prompts, all of them together. Ctrl-C ends the call and cancels the requests; the engine stays usable.

        Args:
            prompts: One prompt or a list: texts, lists of token ids, or dicts with `prompt` or `prompt_token_ids` and `cache_salt`.
            sampling_params: For all prompts, or a list with one for each; None: `get_default_sampling_params()`.
            use_tqdm: Show a progress bar on standard error; a callable makes it, as `tqdm` does.
            lora_request: Adapter for all prompts, or one for each.
            priority: Priority for all prompts, or one for each; lower runs first under `scheduling_policy="priority"`.
            tokenization_kwargs: `add_special_tokens`, `truncate_prompt_tokens`, or `truncation` with `max_length`.

        Returns:
            The outputs in the order of the prompts.

        Raises:
            TypeError, ValueError: A prompt or a parameter is wrong. Then no request runs.
            EngineDeadError: The engine is closed or has failed.
        """
        call = self._completions(prompts, sampling_params, lora_request, priority, tokenization_kwargs, mm_processor_kwargs)
        return call.outputs(use_tqdm)

    def enqueue(
        self,
        prompts: requests.PromptType | Sequence[requests.PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Like `generate`, but returns the ids of the requests, which the engine begins, and not their outputs:
        `wait_for_completion` does. `use_tqdm` has no effect."""
        call = self._completions(prompts, sampling_params, lora_request, priority, tokenization_kwargs, mm_processor_kwargs)
        self._queued.append(call)
        return call.ids

    def wait_for_completion(
        self,
        output_type: type[RequestOutput] | tuple[type[RequestOutput], ...] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[RequestOutput]:
        """The outputs of all requests of `enqueue` and `enqueue_chat` since the last call, in their order."""
        for kind in output_type if isinstance(output_type, tuple) else [output_type]:
            if kind not in (None, RequestOutput):
                raise ValueError(f"output_type: found {kind!r}, expected RequestOutput or None")
        queued, self._queued = self._queued, []
        return [output for call in queued for output in call.outputs(use_tqdm)]

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers conversations, all of them together.

        Args:
            messages: A conversation, which is a list of dicts with `role` and `content`, or a list of conversations.
            sampling_params: As in `generate`.
            use_tqdm: As in `generate`.
            lora_request: As in `generate`.
            priority: As in `generate`.
            chat_template: Jinja template instead of that of the model.
            chat_template_content_format: "auto" or "string": parts of a content become one text.
            add_generation_prompt: End the prompt with the start of an answer.
            continue_final_message: Continue the last message; not with `add_generation_prompt`.
            tools: Functions for the template. The output is the text of the model: calls in it are not parsed.
            chat_template_kwargs: Variables of the template.

        Returns:
            The outputs in the order of the conversations.
        """
        template = requests.ChatFields(
            chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs
        )
        call = self._chats(
            messages,
            sampling_params,
            lora_request,
            priority,
            template,
            chat_template_content_format,
            tokenization_kwargs,
            mm_processor_kwargs,
        )
        return call.outputs(use_tqdm)

    def enqueue_chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """`enqueue` for `chat`."""
        template = requests.ChatFields(
            chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs
        )
        call = self._chats(
            messages,
            sampling_params,
            lora_request,
            priority,
            template,
            chat_template_content_format,
            tokenization_kwargs,
            mm_processor_kwargs,
        )
        self._queued.append(call)
        return call.ids

    def _completions(
        self,
        prompts: requests.PromptType | Sequence[requests.PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
        priority: int | Sequence[int] | None,
        tokenization_kwargs: Mapping[str, Any] | None,
        mm_processor_kwargs: Mapping[str, Any] | None,
    ) -> _Call:
        _no_media(mm_processor_kwargs)
        given = requests.prompts(prompts)
        params = self._sampling(sampling_params, len(given))
        extras = self._extras(lora_request, priority, requests.tokenization(tokenization_kwargs), len(given))
        bodies = [requests.completion(*one) for one in zip(given, params, extras, strict=True)]
        return _Call(self._handle, "completions", bodies, [prompt.text for prompt in given], params, extras)

    def _chats(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
        priority: int | Sequence[int] | None,
        template: requests.ChatFields,
        chat_template_content_format: str,
        tokenization_kwargs: Mapping[str, Any] | None,
        mm_processor_kwargs: Mapping[str, Any] | None,
    ) -> _Call:
        _no_media(mm_processor_kwargs)
        if chat_template_content_format not in ("auto", "string"):
            found = f"chat_template_content_format: found {chat_template_content_format!r}"
            raise ValueError(f"{found}, expected auto or string: contents are texts here")
        given = requests.conversations(messages)
        params = self._sampling(sampling_params, len(given))
        extras = self._extras(lora_request, priority, requests.tokenization(tokenization_kwargs), len(given))
        fields = replace(template, chat_template=template.chat_template or self._handle.settings.chat_template)
        bodies = [requests.chat(talk, fields, one, extra) for talk, one, extra in zip(given, params, extras, strict=True)]
        texts = [self._handle.engine.render(requests.rendering(one, fields)) for one in given]
        return _Call(self._handle, "chat", bodies, texts, params, extras)

    def beam_search(
        self,
        prompts: requests.PromptType | Sequence[requests.PromptType],
        params: BeamSearchParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Searches for the likeliest continuations of each prompt. Returns `beam_width` of them for each, best first.

        `concurrency_limit` has no effect: the engine runs as many requests as its memory holds.
        """
        if not isinstance(params, BeamSearchParams):
            raise wrong_type("params", params, "BeamSearchParams")
        given = requests.prompts(prompts)
        extras = self._extras(lora_request, None, {}, len(given))
        bodies = [requests.completion(prompt, params, extra) for prompt, extra in zip(given, extras, strict=True)]
        shape = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)
        call = _Call(self._handle, "completions", bodies, [p.text for p in given], [shape] * len(given), extras)
        found = call.outputs(use_tqdm)
        return [BeamSearchOutput([self._hypothesis(output, at) for at in range(len(output.outputs))]) for output in found]

    def _hypothesis(self, output: RequestOutput, at: int) -> BeamSearchSequence:
        one, prompt = output.outputs[at], output.prompt_token_ids or []
        tokens = [*prompt, *one.token_ids]
        return BeamSearchSequence(
            orig_prompt={"type": "token", "prompt": output.prompt, "prompt_token_ids": prompt},
            tokens=tokens,
            logprobs=list(one.logprobs or []),
            lora_request=output.lora_request,
            cum_logprob=one.cumulative_logprob or 0.0,
            text=self._handle.engine.decode(tokens, True),
            finish_reason=one.finish_reason,
            stop_reason=one.stop_reason,
        )

    def encode(
        self,
        prompts: requests.PromptType | Sequence[requests.PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Applies a pooling task to prompts: "embed", or "classify" for a model with labels.

        Returns:
            For each prompt the numbers as a `memoryview` of float32, `outputs.data`.
        """
        given = requests.prompts(prompts)
        chosen = [one or PoolingParams() for one in requests.each("pooling_params", pooling_params, len(given), PoolingParams)]
        route = requests.pooling_task(pooling_task, chosen)
        extras = self._extras(lora_request, None, requests.tokenization(tokenization_kwargs), len(given))
        bodies = [requests.embedding(*one) for one in zip(given, chosen, extras, strict=True)]
        engine = self._handle.engine
        stream = engine.submit(route, bodies, True)
        results: list[PoolingRequestOutput[PoolingOutput] | None] = [None] * len(bodies)
        ids = [next(self._handle.ids) for _ in bodies]
        for answer in _answers(stream, len(bodies), use_tqdm):
            at = answer.request
            prompt = integers(stream.prompt_token_ids(at)).tolist()
            vector = engine.finish(answer.embedding or b"", chosen[at].dimensions, chosen[at].use_activation)
            results[at] = PoolingRequestOutput(
                ids[at], PoolingOutput(vector), prompt, answer.cached_tokens or 0, answer.finished
            )
        return [result for result in results if result is not None]

    def embed(
        self,
        prompts: requests.PromptType | Sequence[requests.PromptType],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embeddings of prompts, of length 1: `outputs.embedding` as a list, `outputs.array` without a copy."""
        found = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="embed",
            tokenization_kwargs=tokenization_kwargs,
        )
        return [EmbeddingRequestOutput.of(one, EmbeddingOutput) for one in found]

    def classify(
        self,
        prompts: requests.PromptType | Sequence[requests.PromptType],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Probabilities of the labels of prompts: `outputs.probs` as a list, `outputs.array` without a copy.

        Raises:
            ValueError: The model has no labels.
        """
        found = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="classify",
            tokenization_kwargs=tokenization_kwargs,
        )
        return [ClassificationRequestOutput.of(one, ClassificationOutput) for one in found]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Similarity of pairs of texts: the score of a cross-encoder, or the cosine of two embeddings.

        Args:
            data_1: One text for all pairs, or one for each.
            data_2: The other texts.
            use_tqdm: No effect: all pairs are one request.
            pooling_params: `use_activation=False` gives the logits of a cross-encoder.
            tokenization_kwargs: As in `generate`.
            chat_template: Must be None.

        Raises:
            ValueError: The model has several labels.
        """
        if chat_template is not None:
            raise ValueError("chat_template: found a template, expected None: a pair has the form of its model")
        params = requests.each("pooling_params", pooling_params, 1, PoolingParams)[0] or PoolingParams()
        [extra] = self._extras(lora_request, None, requests.tokenization(tokenization_kwargs), 1)
        pairs = [requests.pair_texts(name, value) for name, value in (("data_1", data_1), ("data_2", data_2))]
        found = self._handle.engine.score(requests.score(pairs[0], pairs[1], params, extra))
        return [
            ScoringRequestOutput(next(self._handle.ids), ScoringOutput(score), integers(prompt).tolist())
            for prompt, score in found
        ]

    def _sampling(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        found = requests.each("sampling_params", given, count, SamplingParams)
        default = self.get_default_sampling_params() if None in found else None
        return [one or default or SamplingParams() for one in found]

    def _extras(
        self,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
        priority: int | Sequence[int] | None,
        fields: Mapping[str, Any],
        count: int,
    ) -> list[requests.Extra]:
        adapters = requests.each("lora_request", lora_request, count, LoRARequest)
        self._handle.load(adapters)
        ranks = requests.priorities(priority, count)
        return [requests.Extra(adapter, rank, fields) for adapter, rank in zip(adapters, ranks, strict=True)]


class _Call:
    """Requests that were submitted together. Dropping it cancels them."""

    def __init__(
        self,
        handle: EngineHandle,
        route: str,
        bodies: list[bytes],
        texts: Sequence[str | None],
        params: Sequence[SamplingParams],
        extras: Sequence[requests.Extra],
    ) -> None:
        self.ids = [next(handle.ids) for _ in bodies]
        self._handle, self._texts, self._params, self._extras = handle, texts, params, extras
        self._stream = handle.engine.submit(route, bodies, True)

    def outputs(self, use_tqdm: bool | Callable[..., Any]) -> list[RequestOutput]:
        """Waits for the outputs, which are in the order of the requests."""
        found: list[RequestOutput | None] = [None] * len(self.ids)
        for answer in _answers(self._stream, len(self.ids), use_tqdm):
            at = answer.request
            prompt = integers(self._stream.prompt_token_ids(at)).tolist()
            lora, texts = self._extras[at].lora, self._handle.texts
            found[at] = Collector(self.ids[at], self._texts[at], prompt, texts, self._params[at], lora).add(answer)
        return [output for output in found if output is not None]


def _answers(stream: _quire.Stream, count: int, use_tqdm: bool | Callable[..., Any]) -> Iterator[_quire.Answer]:
    """All answers, with a progress bar. Whatever ends the loop early cancels the requests."""
    bar = _bar(count, use_tqdm)
    try:
        while answers := stream.wait():
            yield from answers
            if bar is not None:
                bar.update(len(answers))
    finally:
        stream.cancel()
        if bar is not None:
            bar.close()


def _bar(count: int, use_tqdm: bool | Callable[..., Any]) -> Any:
    if callable(use_tqdm):
        return use_tqdm(total=count, desc="Processed prompts", dynamic_ncols=True)
    if not use_tqdm:
        return None
    try:
        from tqdm.auto import tqdm  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return _Bar(count) if sys.stderr.isatty() else None
    return tqdm(total=count, desc="Processed prompts", dynamic_ncols=True)


class _Bar:
    """A progress bar for a terminal, where the package tqdm is missing."""

    def __init__(self, count: int) -> None:
        self._count, self._done = count, 0

    def update(self, more: int) -> None:
        self._done += more
        filled = 32 * self._done // max(1, self._count)
        print(f"\rProcessed prompts: {'#' * filled:32} {self._done}/{self._count}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        print(file=sys.stderr)


def _no_media(kwargs: Mapping[str, Any] | None) -> None:
    if kwargs:
        raise ValueError(f"mm_processor_kwargs: found {kwargs!r}, expected None: models here read text only")
