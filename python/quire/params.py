"""Parameters of requests, with the names, defaults and checks of vLLM.

A wrong value raises when the object is made: `TypeError` for a wrong type, `ValueError` for a wrong value. The message has the field,
what was found and what is allowed. What depends on the model, such as the size of its vocabulary, is checked by the engine.
"""

from __future__ import annotations

import copy
import math
import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

__all__ = [
    "BeamSearchParams",
    "LoRARequest",
    "PoolingParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]

#: Smallest temperature above 0, as in vLLM: smaller ones are raised to it.
MIN_TEMPERATURE = 0.01

#: Greatest number of sequences of a prompt.
MAX_N = 16384


def wrong_type(name: str, found: object, expected: str) -> TypeError:
    return TypeError(f"{name}: found {found!r} of type {type(found).__name__}, expected {expected}")


def wrong(name: str, found: object, expected: str) -> ValueError:
    return ValueError(f"{name}: found {found!r}, expected {expected}")


def integer(name: str, value: object, least: int | None = None, most: int | None = None) -> int:
    """An integer of Python or NumPy in a closed interval."""
    expected = "an integer"
    if isinstance(value, bool):
        raise wrong_type(name, value, expected)
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise wrong_type(name, value, expected) from None
    if least is not None and number < least or most is not None and number > most:
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise wrong(name, value, f"{expected} {bounds}")
    return number


def number(name: str, value: object) -> float:
    """A finite number of Python or NumPy."""
    if isinstance(value, (bool, str, bytes)) or not hasattr(type(value), "__float__"):
        raise wrong_type(name, value, "a number")
    found = float(value)  # type: ignore[arg-type]
    if not math.isfinite(found):
        raise wrong(name, value, "a finite number")
    return found


def flag(name: str, value: object) -> bool:
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise wrong_type(name, value, "True or False")


def strings(name: str, value: object) -> list[str]:
    """A string or a list of strings, none of which is empty, without repetitions."""
    if value is None:
        return []
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise wrong_type(name, value, "a string or a list of strings")
    if not all(value):
        raise wrong(name, value, "no empty string")
    return list(dict.fromkeys(value))


def token_ids(name: str, value: object) -> list[int]:
    """A list, tuple or one-dimensional array of token ids."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise wrong_type(name, value, "a list of token ids")
    items: Iterable[object] = value
    return [integer(f"{name}[{at}]", item, 0, 2**32 - 1) for at, item in enumerate(items)]


class RequestOutputKind(Enum):
    """What each output of `AsyncLLM.generate` has."""

    CUMULATIVE = 0
    """Everything so far."""
    DELTA = 1
    """What is new."""
    FINAL_ONLY = 2
    """Everything, once, at the end."""


@dataclass
class StructuredOutputsParams:
    """A constraint on the whole output: exactly one of the first six fields."""

    json: str | dict[str, Any] | None = None
    """JSON schema, as a dict or as text."""
    regex: str | None = None
    """Regular expression that the whole output matches."""
    choice: list[str] | None = None
    """Strings of which the output is one."""
    grammar: str | None = None
    """Grammar: EBNF if it begins with ``name ::=``, otherwise Lark."""
    json_object: bool | None = None
    """Any JSON object."""
    disable_any_whitespace: bool = False
    """No white space between the tokens of JSON."""
    disable_additional_properties: bool = False
    """Objects have no other properties than those of the schema."""
    whitespace_pattern: str | None = None
    """Regular expression of the white space between the tokens of JSON."""
    structural_tag: str | None = None
    """Structural tags, as JSON text."""

    def __post_init__(self) -> None:
        kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = [name for name in kinds if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise ValueError(f"structured_outputs: found {found}, expected exactly one of {', '.join(kinds)}")
        for name in ("regex", "grammar", "structural_tag", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise wrong_type(name, value, "a string")
        if self.json is not None and not isinstance(self.json, (str, dict)):
            raise wrong_type("json", self.json, "a JSON schema as a dict or a string")
        if self.choice is not None:
            self.choice = strings("choice", self.choice)
        if self.json_object is not None and flag("json_object", self.json_object) is False:
            raise wrong("json_object", False, "True; omit structured_outputs for no constraint")

    def to_json(self) -> dict[str, Any]:
        """The field ``structured_outputs`` of a request."""
        return {item.name: value for item in fields(self) if (value := getattr(self, item.name)) not in (None, False)}


@dataclass(eq=False)
class LoRARequest:
    """A LoRA adapter for requests. Two are equal if their names are."""

    lora_name: str
    """Name of the adapter. The first request of a name loads it."""
    lora_int_id: int
    """Number of the adapter, at least 1. Not used: the name is the identity."""
    lora_path: str = ""
    """Folder of its files."""
    base_model_name: str | None = None
    """Not used: an engine has one base model."""
    load_inplace: bool = False
    """Load the files again, in place of the adapter of this name."""
    is_3d_lora_weight: bool = False
    """Must be False."""

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise wrong("lora_name", self.lora_name, "a non-empty string")
        self.lora_int_id = integer("lora_int_id", self.lora_int_id, 1)
        self.lora_path = str(self.lora_path)
        if not self.lora_path:
            raise wrong("lora_path", self.lora_path, "the folder of the adapter")
        if self.is_3d_lora_weight:
            raise wrong("is_3d_lora_weight", True, "False: the form of the weights follows from the files")

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)


#: Fields of `SamplingParams` that the engine does not have, the values that ask for nothing, and what to use instead.
_UNSUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    "watermarking": ((None, False), "remove it: outputs have no watermark"),
    "prompt_logprob_token_ids": ((None,), "use prompt_logprobs"),
    "prompt_logprob_start": ((None,), "use prompt_logprobs, and drop the first entries"),
    "logprob_token_ids": ((None,), "use logprobs, or allowed_token_ids with logprobs"),
    "stream_interval": ((None, 1), "remove it: outputs come as fast as they are read"),
    "extra_args": ((None, {}), "remove it: there are no custom samplers"),
    "skip_reading_prefix_cache": ((None, False), "use enable_prefix_caching=False, or a cache_salt of the prompt"),
    "repetition_detection": ((None,), "use repetition_penalty or frequency_penalty"),
    "routed_experts_prompt_start": ((0,), "remove it"),
    "trace_decode_token_ids": ((None,), "remove it"),
}

#: Fields with the same name and meaning in requests.
_SAME = (
    "n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop stop_token_ids ignore_eos"
    " min_tokens prompt_logprobs skip_special_tokens include_stop_str_in_output allowed_token_ids bad_words"
    " thinking_token_budget"
).split()


@dataclass
class SamplingParams:
    """How to continue a prompt. The defaults are vLLM's, not those of the model's `generation_config.json`;
    `LLM.get_default_sampling_params()` has these."""

    n: int = 1
    """Number of sequences to generate from the prompt, 1 to 16384; 1 with temperature 0."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the output has, -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens once for each time that the output has them, -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens of prompt and output, and multiplies negative ones; above 0."""
    temperature: float = 1.0
    """Softmax temperature, 0 to 2; 0 always takes the most likely token. Values between 0 and 0.01 become 0.01."""
    watermarking: bool | None = None
    """Not supported."""
    top_p: float = 1.0
    """Sample from the most likely tokens with this total probability; above 0, at most 1."""
    top_k: int = 0
    """Sample from this many of the most likely tokens; 0 and -1: from all."""
    min_p: float = 0.0
    """Least probability of a token relative to that of the most likely one, 0 to 1."""
    seed: int | None = None
    """Seed of the draws: equal requests with equal seeds have equal outputs. None and -1: from the engine's seed."""
    stop: str | list[str] | None = None
    """Strings before the first of which the output ends."""
    stop_token_ids: list[int] | None = None
    """Tokens that end the output."""
    ignore_eos: bool = False
    """Continue after an end-of-sequence token."""
    max_tokens: int | None = 16
    """Greatest number of tokens to generate, at least 1; None: up to the end of the context, which always ends the output."""
    min_tokens: int = 0
    """Number of tokens before an end-of-sequence token or a stop may end the output, at most max_tokens."""
    logprobs: int | None = None
    """Return log-probabilities of the tokens (natural logarithm) with this many alternatives, at most `max_logprobs` of the engine;
    True is 1, and -1 all tokens of the vocabulary."""
    prompt_logprobs: int | None = None
    """Return log-probabilities of the prompt's tokens with this many alternatives, as `logprobs`."""
    prompt_logprob_token_ids: Any = None
    """Not supported."""
    prompt_logprob_start: int | None = None
    """Not supported."""
    logprob_token_ids: list[int] | None = None
    """Not supported."""
    flat_logprobs: bool = False
    """Return log-probabilities as `FlatLogprobs`, without an object for each."""
    detokenize: bool = True
    """Return the text. Without it the text is empty, and there can be no stop strings."""
    skip_special_tokens: bool = True
    """Remove special tokens from the text."""
    spaces_between_special_tokens: bool = True
    """No effect: no spaces are added to the texts of tokens."""
    include_stop_str_in_output: bool = False
    """Keep the stop string in the text."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What each output of a stream has."""
    stream_interval: int | None = None
    """Not supported."""
    skip_clone: bool = False
    """No effect."""
    structured_outputs: StructuredOutputsParams | None = None
    """Constraint on the whole output."""
    logit_bias: dict[int, float] | None = None
    """Numbers added to logits by token id, cut to -100 to 100. Keys may be strings, as in JSON."""
    allowed_token_ids: list[int] | None = None
    """Generate only these tokens."""
    extra_args: dict[str, Any] | None = None
    """Not supported."""
    bad_words: list[str] | None = None
    """Strings that are not generated."""
    skip_reading_prefix_cache: bool | None = None
    """Not supported."""
    thinking_token_budget: int | None = None
    """Greatest number of tokens of the reasoning, whose end is then forced; None and -1: no limit. Needs the setting
    `reasoning_parser`."""
    repetition_detection: Any = None
    """Not supported."""
    routed_experts_prompt_start: int = 0
    """Not supported."""
    trace_decode_token_ids: list[int] | None = None
    """Not supported."""

    def __post_init__(self) -> None:
        for name, (neutral, advice) in _UNSUPPORTED.items():
            value = getattr(self, name)
            if not any(value is known or value == known for known in neutral):
                raise ValueError(f"{name}: found {value!r}, which is not supported; {advice}")
        self.n = integer("n", self.n, 1, MAX_N)
        for name in ("presence_penalty", "frequency_penalty"):
            value = number(name, getattr(self, name))
            if not -2.0 <= value <= 2.0:
                raise wrong(name, value, "a number from -2 to 2")
            setattr(self, name, value)
        self.repetition_penalty = number("repetition_penalty", self.repetition_penalty)
        if self.repetition_penalty <= 0.0:
            raise wrong("repetition_penalty", self.repetition_penalty, "a number above 0")
        self.temperature = number("temperature", self.temperature)
        if not 0.0 <= self.temperature <= 2.0:
            raise wrong("temperature", self.temperature, "a number from 0 to 2")
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            warnings.warn(f"temperature: found {self.temperature}, using {MIN_TEMPERATURE}", stacklevel=3)
            self.temperature = MIN_TEMPERATURE
        self.top_p = number("top_p", self.top_p)
        if not 0.0 < self.top_p <= 1.0:
            raise wrong("top_p", self.top_p, "a number above 0 and at most 1")
        self.top_k = integer("top_k", self.top_k, -1, 2**32 - 1)
        self.min_p = number("min_p", self.min_p)
        if not 0.0 <= self.min_p <= 1.0:
            raise wrong("min_p", self.min_p, "a number from 0 to 1")
        if self.seed is not None:
            self.seed = integer("seed", self.seed, -(2**63), 2**63 - 1)
            self.seed = None if self.seed == -1 else self.seed
        self.stop = strings("stop", self.stop)
        self.bad_words = strings("bad_words", self.bad_words)
        self.stop_token_ids = list(dict.fromkeys(token_ids("stop_token_ids", self.stop_token_ids or [])))
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise wrong("allowed_token_ids", [], "at least one token id")
        if self.max_tokens is not None:
            self.max_tokens = integer("max_tokens", self.max_tokens, 1)
        self.min_tokens = integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise wrong("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is False:
                value = None
            if value is not None:
                value = 1 if value is True else integer(name, value, -1)
            setattr(self, name, value)
        if self.thinking_token_budget is not None:
            budget = integer("thinking_token_budget", self.thinking_token_budget, -1)
            self.thinking_token_budget = None if budget == -1 else budget
        names = "flat_logprobs ignore_eos detokenize skip_special_tokens include_stop_str_in_output skip_clone"
        for name in names.split():
            setattr(self, name, flag(name, getattr(self, name)))
        if not isinstance(self.output_kind, RequestOutputKind):
            raise wrong_type("output_kind", self.output_kind, "a RequestOutputKind")
        if self.stop and not self.detokenize:
            raise wrong("stop", self.stop, "no stop strings with detokenize=False")
        if self.logit_bias is not None:
            self.logit_bias = _biases(self.logit_bias)
        if isinstance(self.structured_outputs, dict):
            self.structured_outputs = StructuredOutputsParams(**self.structured_outputs)
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputsParams):
            raise wrong_type("structured_outputs", self.structured_outputs, "StructuredOutputsParams")
        if self.temperature == 0.0:
            # As in vLLM: filters have no effect on the most likely token.
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
            if self.n > 1:
                raise wrong("n", self.n, "1 with temperature 0: all sequences would be equal")

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """Like the constructor, with the default for each number that is None."""
        numbers = ("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p")
        kept: dict[str, Any] = {name: value for name, value in given.items() if value is not None or name not in numbers}
        return cls(**kept)

    def clone(self) -> SamplingParams:
        """A deep copy."""
        return copy.deepcopy(self)

    def to_json(self) -> dict[str, Any]:
        """The fields of a request. Those of log-probabilities depend on the route and are not among them."""
        body = {name: getattr(self, name) for name in _SAME}
        # Without a limit the route's own default would hold.
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        if self.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        if self.structured_outputs is not None:
            body["structured_outputs"] = self.structured_outputs.to_json()
        return {name: value for name, value in body.items() if value not in (None, [])}


def _biases(given: object) -> dict[int, float]:
    if not isinstance(given, Mapping):
        raise wrong_type("logit_bias", given, "a dict of numbers by token id")
    biases: dict[int, float] = {}
    for key, value in given.items():
        try:
            token = int(key) if isinstance(key, str) else integer("logit_bias", key, 0)
        except ValueError:
            raise wrong("logit_bias", key, "token ids as keys") from None
        biases[token] = min(100.0, max(-100.0, number(f"logit_bias[{token}]", value)))
    return biases


@dataclass
class BeamSearchParams:
    """A search for the likeliest continuations."""

    beam_width: int
    """Number of live hypotheses, and of results."""
    max_tokens: int
    """Greatest number of tokens to generate."""
    ignore_eos: bool = False
    """Continue after an end-of-sequence token."""
    temperature: float = 0.0
    """Must be 0: the search ranks by the probabilities of the model."""
    length_penalty: float = 1.0
    """Exponent of the length by which the sum of log-probabilities is divided."""
    include_stop_str_in_output: bool = False
    """No effect: a search has no stop strings."""
    structured_outputs: StructuredOutputsParams | None = None
    """Must be None."""
    skip_special_tokens: bool = True
    """Remove special tokens from the text."""
    watermarking: bool | None = None
    """Not supported."""

    def __post_init__(self) -> None:
        self.beam_width = integer("beam_width", self.beam_width, 1, MAX_N)
        self.max_tokens = integer("max_tokens", self.max_tokens, 1)
        self.length_penalty = number("length_penalty", self.length_penalty)
        if number("temperature", self.temperature) != 0.0:
            raise wrong("temperature", self.temperature, "0: a beam search ranks by the probabilities of the model")
        if self.structured_outputs is not None:
            raise wrong("structured_outputs", self.structured_outputs, "None in a beam search")
        if self.watermarking:
            raise wrong("watermarking", self.watermarking, "None: outputs have no watermark")

    def to_json(self) -> dict[str, Any]:
        """The fields of a request."""
        return {
            "use_beam_search": True,
            "n": self.beam_width,
            "beam_width": self.beam_width,
            "max_tokens": self.max_tokens,
            "ignore_eos": flag("ignore_eos", self.ignore_eos),
            "length_penalty": self.length_penalty,
            "skip_special_tokens": flag("skip_special_tokens", self.skip_special_tokens),
            "repetition_penalty": 1.0,
            "logprobs": 0,
        }


@dataclass
class PoolingParams:
    """What to make of the hidden states of a prompt."""

    use_activation: bool | None = None
    """Normalise embeddings to length 1; None is True."""
    dimensions: int | None = None
    """Number of dimensions of an embedding; None: all of the model's."""
    step_tag_id: int | None = None
    """Not supported."""
    returned_token_ids: list[int] | None = None
    """Not supported."""
    task: str | None = None
    """The task; None: that of the method."""
    requires_token_ids: bool = False
    """No effect."""
    skip_reading_prefix_cache: bool | None = None
    """Not supported."""
    late_interaction_params: Any = None
    """Not supported."""
    extra_kwargs: dict[str, Any] | None = None
    """Not supported."""
    output_kind: RequestOutputKind = field(default=RequestOutputKind.FINAL_ONLY)
    """Must be FINAL_ONLY."""

    def __post_init__(self) -> None:
        for name in ("step_tag_id", "returned_token_ids", "late_interaction_params", "extra_kwargs"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: found {getattr(self, name)!r}, which is not supported; remove it")
        if self.skip_reading_prefix_cache:
            raise ValueError("skip_reading_prefix_cache: found True, which is not supported; use enable_prefix_caching=False")
        if self.dimensions is not None:
            self.dimensions = integer("dimensions", self.dimensions, 1)
        if self.use_activation is not None:
            self.use_activation = flag("use_activation", self.use_activation)

    def clone(self) -> PoolingParams:
        """A deep copy."""
        return copy.deepcopy(self)

    def to_json(self) -> dict[str, Any]:
        """The fields of a request."""
        body = {"use_activation": self.use_activation, "dimensions": self.dimensions}
        return {name: value for name, value in body.items() if value is not None}
