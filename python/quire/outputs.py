"""Results of requests, with the names of vLLM.

Lists of numbers are made when they are read. What the engine returned is kept as bytes, of which `arrays` and `array` are views: with
NumPy, `numpy.asarray(output.arrays.logprobs)` copies nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, overload

from quire.params import LoRARequest, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from typing_extensions import Self

    from quire import _quire

__all__ = [
    "BeamSearchOutput",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "FlatLogprobs",
    "Logprob",
    "LogprobArrays",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
    "TokenArrays",
]


def integers(data: bytes) -> memoryview[int]:
    """A view of uint32."""
    return memoryview(data).cast("I")


def floats(data: bytes) -> memoryview[float]:
    """A view of float32."""
    return memoryview(data).cast("f")


@dataclass
class Logprob:
    """Log-probability of a token."""

    logprob: float
    """Natural logarithm of the probability; -inf if it is 0."""
    rank: int | None = None
    """1 + the number of likelier tokens."""
    decoded_token: str | None = None
    """Text of the token alone; bytes that are not UTF-8 are U+FFFD."""


@dataclass
class FlatLogprobs(MutableSequence["dict[int, Logprob]"]):
    """Log-probabilities of all positions in a few lists, as in vLLM. It reads like the list of dicts that it stands for.

    Position `i` has the entries from `start_indices[i]` to before `end_indices[i]`: the token itself, then the alternatives, of which
    it may be one.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append(self, value: dict[int, Logprob] | None) -> None:
        """Adds a position."""
        found = value or {}
        self.append_fast(
            list(found),
            [one.logprob for one in found.values()],
            [one.rank for one in found.values()],
            [one.decoded_token for one in found.values()],
        )

    def append_fast(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        ranks: Iterable[int | None],
        decoded_tokens: Iterable[str | None],
    ) -> None:
        """Adds a position with these entries."""
        self.start_indices.append(len(self.token_ids))
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.ranks += ranks
        self.decoded_tokens += decoded_tokens
        self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...

    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...

    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | FlatLogprobs:
        if isinstance(index, slice):
            some = FlatLogprobs()
            for start, end in zip(self.start_indices[index], self.end_indices[index], strict=True):
                at = slice(start, end)
                some.append_fast(self.token_ids[at], self.logprobs[at], self.ranks[at], self.decoded_tokens[at])
            return some
        found: dict[int, Logprob] = {}
        for entry in range(self.start_indices[index], self.end_indices[index]):
            one = Logprob(self.logprobs[entry], self.ranks[entry], self.decoded_tokens[entry])
            found.setdefault(self.token_ids[entry], one)
        return found

    def __iter__(self) -> Iterator[dict[int, Logprob]]:
        return (self[position] for position in range(len(self)))

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("Cannot set logprobs in FlatLogprobs")

    def __delitem__(self, index: Any) -> None:
        raise TypeError("Cannot delete logprobs from FlatLogprobs")

    def insert(self, index: int, value: dict[int, Logprob] | None) -> None:
        raise TypeError("Cannot insert logprobs to FlatLogprobs")


#: Log-probabilities of tokens: for each a dict with itself first.
SampleLogprobs = FlatLogprobs | list[dict[int, Logprob]]

#: Those of a prompt, whose first token has none.
PromptLogprobs = FlatLogprobs | list[dict[int, Logprob] | None]


class TokenTexts:
    """Texts of tokens, each asked for once."""

    def __init__(self, engine: _quire.Engine) -> None:
        self._engine = engine
        self._texts: dict[int, str] = {}

    def learn(self, ids: Iterable[int]) -> dict[int, str]:
        """All known texts, those of `ids` among them."""
        new = [token for token in set(ids) if token not in self._texts]
        if new:
            self._texts.update(zip(new, self._engine.token_texts(new), strict=True))
        return self._texts


class LogprobArrays:
    """Log-probabilities of tokens as flat arrays. The alternatives of all tokens follow each other; `counts` says how many each has."""

    __slots__ = ("_parts",)

    def __init__(self, parts: tuple[bytes, bytes, bytes, bytes, bytes]) -> None:
        self._parts = parts

    @staticmethod
    def of(found: _quire.Logprobs) -> LogprobArrays:
        return LogprobArrays((found.logprobs, found.ranks, found.counts, found.top_token_ids, found.top_logprobs))

    @property
    def logprobs(self) -> memoryview[float]:
        """Of each token, float32."""
        return floats(self._parts[0])

    @property
    def ranks(self) -> memoryview[int]:
        """Of each token, uint32; 1 is the likeliest."""
        return integers(self._parts[1])

    @property
    def counts(self) -> memoryview[int]:
        """Number of alternatives of each token, uint32."""
        return integers(self._parts[2])

    @property
    def top_token_ids(self) -> memoryview[int]:
        """Alternatives, likeliest first, uint32."""
        return integers(self._parts[3])

    @property
    def top_logprobs(self) -> memoryview[float]:
        """Log-probabilities of the alternatives, float32."""
        return floats(self._parts[4])

    def __len__(self) -> int:
        return len(self._parts[0]) // 4

    def joined(self, later: LogprobArrays) -> LogprobArrays:
        a, b = self._parts, later._parts
        return LogprobArrays((a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4]))

    def to_flat(
        self, ids: Sequence[int], texts: dict[int, str] | None, flat: FlatLogprobs | None = None
    ) -> FlatLogprobs:
        """vLLM's flat form, behind `flat`: each of the tokens `ids` with its alternatives."""
        text = ({} if texts is None else texts).get
        at, flat = 0, FlatLogprobs() if flat is None else flat
        tops, top_logprobs = self.top_token_ids.tolist(), self.top_logprobs.tolist()
        for token, logprob, rank, count in zip(ids, self.logprobs, self.ranks, self.counts, strict=True):
            found, at = slice(at, at + count), at + count
            tokens = [token, *tops[found]]
            flat.append_fast(tokens, [logprob, *top_logprobs[found]], [rank, *range(1, count + 1)], map(text, tokens))
        return flat


@dataclass(frozen=True)
class TokenArrays:
    """Numbers of an output as arrays without copies."""

    token_ids: memoryview[int]
    """Generated tokens, uint32."""
    logprobs: LogprobArrays | None
    """Their log-probabilities, if they were requested."""


class CompletionOutput:
    """One continuation of a prompt.

    Attributes:
        index: Index of the sequence, below `n`.
        text: Generated text.
        token_ids: Generated tokens, including the one that ended the sequence.
        cumulative_logprob: Sum of the log-probabilities of all tokens so far; None unless `logprobs` was requested.
        logprobs: For each token a dict from token ids to `Logprob`, the token itself first; None unless requested. With `flat_logprobs`
            they are `FlatLogprobs`.
        finish_reason: "stop" or "length"; None while the sequence is unfinished.
        stop_reason: The stop string or stop token that ended the sequence; None after an end-of-sequence token.
        lora_request: The adapter.
        arrays: Token ids and log-probabilities as arrays without copies.
    """

    def __init__(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        cumulative_logprob: float | None = None,
        logprobs: SampleLogprobs | None = None,
        routed_experts: None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
        lora_request: LoRARequest | None = None,
        *,
        arrays: TokenArrays | None = None,
        texts: dict[int, str] | None = None,
        flat: bool = False,
    ) -> None:
        self.index = index
        self.text = text
        self.cumulative_logprob = cumulative_logprob
        self.routed_experts = routed_experts
        self.finish_reason = finish_reason
        self.stop_reason = stop_reason
        self.lora_request = lora_request
        self.sampling_mask: None = None
        self.spec_decode_metrics: None = None
        self.weight_versions: None = None
        self.arrays: TokenArrays = arrays or TokenArrays(integers(array("I", token_ids).tobytes()), None)
        self._token_ids: Sequence[int] | None = None if arrays else token_ids
        self._logprobs = logprobs
        self._texts = texts
        self._flat = flat

    @property
    def token_ids(self) -> Sequence[int]:
        if self._token_ids is None:
            self._token_ids = self.arrays.token_ids.tolist()
        return self._token_ids

    @token_ids.setter
    def token_ids(self, ids: Sequence[int]) -> None:
        self._token_ids = ids

    @property
    def logprobs(self) -> SampleLogprobs | None:
        if self._logprobs is None and self.arrays.logprobs is not None:
            found = self.arrays.logprobs.to_flat(self.arrays.token_ids.tolist(), self._texts)
            self._logprobs = found if self._flat else list(found)
        return self._logprobs

    def finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.finish_reason is not None

    def __reduce__(self) -> tuple[Any, ...]:
        # Views cannot be pickled.
        given = (self.index, self.text, list(self.token_ids), self.cumulative_logprob, self.logprobs)
        return CompletionOutput, (*given, None, self.finish_reason, self.stop_reason, self.lora_request)

    def __repr__(self) -> str:
        return (
            f"CompletionOutput(index={self.index}, text={self.text!r}, token_ids={self.token_ids}, "
            f"cumulative_logprob={self.cumulative_logprob}, logprobs={self.logprobs}, "
            f"finish_reason={self.finish_reason}, stop_reason={self.stop_reason})"
        )


class RequestOutput:
    """Result of a prompt, or a part of it.

    Attributes:
        request_id: Id of the request.
        prompt: The prompt as text; None if token ids were given.
        prompt_token_ids: The prompt as token ids.
        prompt_logprobs: For each token of the prompt a dict from token ids to `Logprob`, None for the first; None unless requested.
        outputs: The sequences.
        finished: Whether all sequences have ended.
        metrics: None.
        lora_request: The adapter.
        num_cached_tokens: Number of prompt tokens that came from the prefix cache.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int] | None,
        prompt_logprobs: PromptLogprobs | None,
        outputs: list[CompletionOutput],
        finished: bool,
        metrics: None = None,
        lora_request: LoRARequest | None = None,
        num_cached_tokens: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.prompt_logprobs = prompt_logprobs
        self.outputs = outputs
        self.finished = finished
        self.metrics = metrics
        self.lora_request = lora_request
        self.encoder_prompt: None = None
        self.encoder_prompt_token_ids: None = None
        self.num_cached_tokens = num_cached_tokens
        self.num_cache_creation_tokens: None = None
        self.kv_transfer_params: None = None
        self.ec_transfer_params: None = None
        self.prompt_token_id_logprobs: None = None

    def __repr__(self) -> str:
        return (
            f"RequestOutput(request_id={self.request_id}, prompt={self.prompt!r}, "
            f"prompt_token_ids={self.prompt_token_ids}, prompt_logprobs={self.prompt_logprobs}, outputs={self.outputs}, "
            f"finished={self.finished}, metrics={self.metrics}, lora_request={self.lora_request}, "
            f"num_cached_tokens={self.num_cached_tokens})"
        )


class _Vector:
    """Numbers of a prompt, kept as float32."""

    #: Attribute of the number of numbers.
    _size: ClassVar[str] = ""

    def __init__(self, data: bytes | Sequence[float]) -> None:
        self._data = data if isinstance(data, bytes) else array("f", data).tobytes()

    @property
    def array(self) -> memoryview[float]:
        """The numbers as float32, without a copy."""
        return floats(self._data)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy

        return numpy.array(self.array, dtype=dtype, copy=copy)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Vector) and type(other) is type(self) and self._data == other._data

    def __hash__(self) -> int:
        return hash(self._data)

    def __repr__(self) -> str:
        shown = f"{self._size}={len(self.array)}" if self._size else f"data={self.array.tolist()}"
        return f"{type(self).__name__}({shown})"


class PoolingOutput(_Vector):
    """Numbers of a prompt."""

    @property
    def data(self) -> memoryview[float]:
        """The numbers as float32; vLLM has a tensor here."""
        return self.array


class EmbeddingOutput(_Vector):
    """An embedding."""

    _size = "hidden_size"

    @property
    def embedding(self) -> list[float]:
        """The vector, of length 1."""
        return list(self.array)

    @property
    def hidden_size(self) -> int:
        """Number of dimensions."""
        return len(self.array)


class ClassificationOutput(_Vector):
    """Probabilities of classes."""

    _size = "num_classes"

    @property
    def probs(self) -> list[float]:
        """A probability for each class."""
        return list(self.array)

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.array)


@dataclass
class ScoringOutput:
    """Similarity of two texts."""

    score: float
    """The greater, the more similar."""


Output = TypeVar("Output")


@dataclass
class PoolingRequestOutput(Generic[Output]):
    """Result of a prompt for a pooling task."""

    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    error: None = None

    @classmethod
    def of(cls, found: PoolingRequestOutput[PoolingOutput], kind: Callable[[bytes], Output]) -> Self:
        """The result of a prompt, whose numbers are of another kind."""
        outputs = kind(found.outputs._data)
        return cls(found.request_id, outputs, found.prompt_token_ids, found.num_cached_tokens, found.finished)


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """Embedding of a prompt."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """Probabilities of classes for a prompt."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """Similarity of two texts."""


@dataclass
class BeamSearchSequence:
    """A result of a beam search."""

    orig_prompt: dict[str, Any]
    """The prompt."""
    tokens: list[int]
    """Tokens of prompt and output."""
    logprobs: list[dict[int, Logprob]]
    """Of the output's tokens."""
    lora_request: LoRARequest | None = None
    cum_logprob: float = 0.0
    """Sum of the log-probabilities of the output's tokens."""
    text: str | None = None
    """Text of the prompt and the output."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """Results of a beam search, best first."""

    sequences: list[BeamSearchSequence]


@dataclass
class _Sequence:
    """A sequence so far."""

    text: str = ""
    token_ids: bytes = b""
    logprobs: LogprobArrays | None = None
    cumulative: float | None = None


@dataclass
class Collector:
    """Makes outputs of one request from the engine's answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    texts: TokenTexts
    params: SamplingParams
    lora_request: LoRARequest | None = None
    cached_tokens: int | None = None
    prompt_logprobs: PromptLogprobs | None = None
    sequences: dict[int, _Sequence] = field(default_factory=dict)

    def add(self, answer: _quire.Answer) -> RequestOutput:
        """The output after another answer."""
        if answer.cached_tokens is not None:
            self.cached_tokens = answer.cached_tokens
        new_prompt_logprobs = answer.prompt_logprobs is not None
        if answer.prompt_logprobs is not None:
            arrays = LogprobArrays.of(answer.prompt_logprobs)
            ids = self.prompt_token_ids[1:]
            texts = self.texts.learn([*ids, *arrays.top_token_ids]) if self.params.detokenize else None
            # The first token has none.
            flat = arrays.to_flat(ids, texts, FlatLogprobs([0], [0]))
            self.prompt_logprobs = flat if self.params.flat_logprobs else [None, *flat[1:]]
        is_delta = self.params.output_kind is RequestOutputKind.DELTA
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            self.prompt_logprobs if new_prompt_logprobs or not is_delta else None,
            [self._completion(found, is_delta) for found in answer.sequences],
            answer.finished,
            lora_request=self.lora_request,
            num_cached_tokens=self.cached_tokens,
        )

    def _completion(self, found: _quire.Sequence, is_delta: bool) -> CompletionOutput:
        so_far = self.sequences.setdefault(found.index, _Sequence())
        text, ids = found.text if self.params.detokenize else "", found.token_ids
        arrays = None if found.logprobs is None else LogprobArrays.of(found.logprobs)
        texts = None
        if arrays is not None:
            so_far.cumulative = (so_far.cumulative or 0.0) + sum(arrays.logprobs)
            if self.params.detokenize:
                texts = self.texts.learn([*integers(ids), *arrays.top_token_ids])
        if not is_delta:
            so_far.text, so_far.token_ids = so_far.text + text, so_far.token_ids + ids
            if arrays is not None:
                so_far.logprobs = arrays if so_far.logprobs is None else so_far.logprobs.joined(arrays)
                texts = self.texts.learn(()) if self.params.detokenize else None
            text, ids, arrays = so_far.text, so_far.token_ids, so_far.logprobs
        return CompletionOutput(
            found.index,
            text,
            (),
            so_far.cumulative,
            finish_reason=found.finish_reason,
            stop_reason=found.stop_token if found.stop_text is None else found.stop_text,
            lora_request=self.lora_request,
            arrays=TokenArrays(integers(ids), arrays),
            texts=texts,
            flat=self.params.flat_logprobs,
        )
