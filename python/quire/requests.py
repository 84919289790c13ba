"""From prompts and parameters to the requests of the engine, which have the JSON of the HTTP API."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

from quire.params import BeamSearchParams, LoRARequest, PoolingParams, SamplingParams, integer, token_ids, wrong_type

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]


class _Salted(TypedDict, total=False):
    cache_salt: str


class TextPrompt(_Salted):
    """A prompt as text. Requests share cached blocks only with requests of the same `cache_salt`."""

    prompt: str


class _Texted(_Salted, total=False):
    prompt: str | None


class TokensPrompt(_Texted):
    """A prompt as token ids, and its text, which is only returned."""

    prompt_token_ids: Sequence[int]


#: A prompt: text, token ids, or a dict.
PromptType = str | Sequence[int] | TextPrompt | TokensPrompt

#: Keys of prompts for other kinds of models.
_OTHER_KINDS = ("multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids", "prompt_embeds", "encoder_prompt")


@dataclass
class Prompt:
    """A prompt that has been checked."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None = None

    def value(self) -> str | list[int]:
        """What is sent to the engine."""
        return self.token_ids if self.token_ids is not None else self.text or ""


def _is_ids(value: object) -> bool:
    """Whether a value is one prompt of token ids, and not a list of prompts."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable) or isinstance(value, Iterator):
        return False
    items: Iterable[object] = value
    first = next(iter(items), None)
    return first is not None and hasattr(type(first), "__index__")


def _prompt(name: str, value: object) -> Prompt:
    if isinstance(value, str):
        return Prompt(value, None)
    if isinstance(value, Mapping):
        known = ("prompt", "prompt_token_ids", "cache_salt")
        for key in value:
            # Results of a beam search name the kind of their prompt.
            if key in _OTHER_KINDS and not value[key] or key == "type" and value[key] in ("text", "token"):
                continue
            if key not in known:
                advice = "models here read text only; remove it" if key in _OTHER_KINDS else f"expected {', '.join(known)}"
                raise ValueError(f"{name}: found the key {key!r}; {advice}")
        salt, text, ids = value.get("cache_salt"), value.get("prompt"), value.get("prompt_token_ids")
        if salt is not None and not isinstance(salt, str):
            raise wrong_type(f"{name}.cache_salt", salt, "a string")
        if text is not None and not isinstance(text, str):
            raise wrong_type(f"{name}.prompt", text, "a string")
        if ids is None and text is None:
            raise ValueError(f"{name}: found neither prompt nor prompt_token_ids, expected one of them")
        return Prompt(text, None if ids is None else token_ids(f"{name}.prompt_token_ids", ids), salt)
    if _is_ids(value):
        return Prompt(None, token_ids(name, value))
    if isinstance(value, Sequence) and len(value) == 0:
        raise ValueError(f"{name}: found a prompt without tokens, expected at least one")
    raise wrong_type(name, value, "a string, a list of token ids, or a dict with prompt or prompt_token_ids")


def one_prompt(value: object) -> Prompt:
    """A single prompt."""
    return _prompt("prompt", value)


def prompts(value: object) -> list[Prompt]:
    """One prompt or a list of them."""
    if isinstance(value, (str, Mapping)) or _is_ids(value):
        return [_prompt("prompts", value)]
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        return [_prompt("prompts", value)]
    items: Iterable[object] = value
    return [_prompt(f"prompts[{at}]", item) for at, item in enumerate(items)]


Item = TypeVar("Item")


def each(name: str, value: object, count: int, kind: type[Item]) -> list[Item | None]:
    """One value for all prompts, or one for each, some of which may be None."""
    if value is None or isinstance(value, kind):
        return [value] * count
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise wrong_type(name, value, f"a {kind.__name__} or a list of them")
    for at, item in enumerate(value):
        if item is not None and not isinstance(item, kind):
            raise wrong_type(f"{name}[{at}]", item, f"a {kind.__name__}")
    if len(value) != count:
        raise ValueError(f"{name}: found {len(value)} items for {count} prompts, expected one for all or as many as prompts")
    return list(value)


def priorities(value: object, count: int) -> list[int]:
    """The priorities of requests."""
    if value is None:
        return [0] * count
    if hasattr(type(value), "__index__"):
        return [integer("priority", value, -(2**31), 2**31 - 1)] * count
    if not isinstance(value, Sequence):
        raise wrong_type("priority", value, "an integer or a list of them")
    if len(value) != count:
        raise ValueError(f"priority: found {len(value)} items for {count} prompts, expected one for all or as many as prompts")
    return [integer(f"priority[{at}]", item, -(2**31), 2**31 - 1) for at, item in enumerate(value)]


def tokenization(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Fields for `tokenization_kwargs`."""
    body: dict[str, Any] = {}
    given = dict(kwargs or {})
    if (special := given.pop("add_special_tokens", None)) is not None:
        body["add_special_tokens"] = special
    most = given.pop("truncate_prompt_tokens", None)
    if given.pop("truncation", False):
        most = given.pop("max_length", most)
    if most is not None:
        body["truncate_prompt_tokens"] = integer("truncate_prompt_tokens", most, -1)
    if given:
        name = next(iter(given))
        expected = "add_special_tokens, truncate_prompt_tokens, or truncation with max_length"
        raise ValueError(f"tokenization_kwargs: found {name!r}, expected {expected}")
    return body


@dataclass
class Extra:
    """What a request has besides its prompt and its parameters."""

    lora: LoRARequest | None = None
    priority: int = 0
    fields: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        body = dict(self.fields or {})
        if self.lora is not None:
            body["model"] = self.lora.lora_name
        if self.priority:
            body["priority"] = self.priority
        return body


def _encoded(body: dict[str, Any]) -> bytes:
    try:
        return json.dumps(body, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"request: {error}, expected values that JSON has") from None


def completion(prompt: Prompt, params: SamplingParams | BeamSearchParams, extra: Extra) -> bytes:
    """The body of `/v1/completions`."""
    body = {"prompt": prompt.value(), **params.to_json(), **extra.to_json()}
    if prompt.cache_salt is not None:
        body["cache_salt"] = prompt.cache_salt
    if isinstance(params, SamplingParams) and params.logprobs is not None:
        body["logprobs"] = params.logprobs
    return _encoded(body)


def adapter(given: object) -> LoRARequest | None:
    """The adapter of one request."""
    if given is not None and not isinstance(given, LoRARequest):
        raise wrong_type("lora_request", given, "a LoRARequest")
    return given


def extra(lora_request: object, priority: object, tokenization_kwargs: Mapping[str, Any] | None) -> Extra:
    """What one request has besides its prompt and its parameters."""
    return Extra(adapter(lora_request), priorities(priority, 1)[0], tokenization(tokenization_kwargs))


def embedding(prompt: Prompt, params: PoolingParams, extra: Extra) -> bytes:
    """The body of `/v1/embeddings` or of `/classify`."""
    body = {"input": prompt.value(), **params.to_json(), **extra.to_json()}
    if prompt.cache_salt is not None:
        body["cache_salt"] = prompt.cache_salt
    return _encoded(body)


#: Tasks of pooling models, and the route of each.
POOLING_ROUTES = {"embed": "embeddings", "classify": "classify"}


def pooling_task(task: str | None, params: Sequence[PoolingParams]) -> str:
    """The route of a pooling task."""
    if task not in POOLING_ROUTES:
        found = "no pooling_task" if task is None else f"the task {task!r}"
        raise ValueError(f"pooling_task: found {found}, expected one of {', '.join(POOLING_ROUTES)}")
    for one in params:
        if one.task not in (None, task):
            raise ValueError(f"pooling_params.task: found {one.task!r}, expected {task!r}")
    return POOLING_ROUTES[task]


def pair_texts(name: str, value: object) -> list[str]:
    """A text or a list of texts."""
    items = [value] if isinstance(value, str) else value
    if isinstance(items, (bytes, Mapping)) or not isinstance(items, Sequence):
        raise wrong_type(name, value, "a string or a list of strings")
    for at, item in enumerate(items):
        if not isinstance(item, str):
            raise wrong_type(f"{name}[{at}]", item, "a string")
    return list(items)


def score(first: list[str], second: list[str], params: PoolingParams, extra: Extra) -> bytes:
    """The body of `/score`."""
    if len(first) not in (1, len(second)) or not second:
        raise ValueError(f"data_1: found {len(first)} texts for the {len(second)} of data_2, expected one or as many")
    return _encoded({"text_1": first, "text_2": second, **params.to_json(), **extra.to_json()})


def conversations(messages: object) -> list[list[dict[str, Any]]]:
    """One conversation or a list of them."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise wrong_type("messages", messages, "a list of messages, or a list of such lists")
    if messages and isinstance(messages[0], Mapping):
        return [list(messages)]
    for at, conversation in enumerate(messages):
        if isinstance(conversation, (str, bytes, Mapping)) or not isinstance(conversation, Sequence):
            raise wrong_type(f"messages[{at}]", conversation, "a list of messages")
    return [list(conversation) for conversation in messages]


@dataclass
class ChatFields:
    """The fields that render a conversation."""

    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[dict[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    def to_json(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "messages": list(messages),
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            # The template gets the tools. As in vLLM, the text is returned as it is, and nothing constrains it.
            "tool_choice": "none",
        }
        if self.chat_template:
            body["chat_template"] = self.chat_template
        if self.tools:
            body["tools"] = list(self.tools)
        if self.chat_template_kwargs:
            body["chat_template_kwargs"] = dict(self.chat_template_kwargs)
        return body


def chat(messages: Sequence[Mapping[str, Any]], fields: ChatFields, params: SamplingParams, extra: Extra) -> bytes:
    """The body of `/v1/chat/completions`."""
    body = {**fields.to_json(messages), **params.to_json(), **extra.to_json()}
    if params.logprobs is not None:
        body.update(logprobs=True, top_logprobs=params.logprobs)
    return _encoded(body)


def rendering(messages: Sequence[Mapping[str, Any]], fields: ChatFields) -> bytes:
    """The body of a conversation that is only rendered."""
    return _encoded(fields.to_json(messages))
