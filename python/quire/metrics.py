"""Metrics of an engine, with the classes of vLLM."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]


@dataclass
class Metric:
    """A metric: one for each set of labels."""

    name: str
    """Name, which begins with `vllm:`."""
    labels: dict[str, str]
    """Labels, such as `model_name`."""


@dataclass
class Counter(Metric):
    """A number that grows."""

    value: int


@dataclass
class Vector(Metric):
    """Numbers that grow, by position."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A number that changes."""

    value: float


@dataclass
class Histogram(Metric):
    """Counts of observed values."""

    count: int
    """Number of values."""
    sum: float
    """Their sum."""
    buckets: dict[str, int]
    """Number of values up to each limit; the last one is `+Inf`."""


#: A counter that vLLM has as a vector: a sample for each position of a draft.
_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"

_SAMPLE = re.compile(r"([\w:]+)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def _samples(page: str) -> Iterator[tuple[str, str, dict[str, str], str]]:
    """Kind, name, labels and value of each sample of a page in Prometheus' text format."""
    kinds: dict[str, str] = {}
    for line in page.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            kinds[name] = kind
        elif line.startswith("vllm:") and (sample := _SAMPLE.fullmatch(line)):
            name, labels, value = sample.groups()
            family = name if name in kinds else name.rsplit("_", 1)[0]
            unescaped = {key: re.sub(r"\\(.)", r"\1", text) for key, text in _LABEL.findall(labels or "")}
            yield kinds.get(family, ""), name, unescaped, value


def parse(page: str) -> list[Metric]:
    """The metrics of a page whose names begin with `vllm:`."""
    found: list[Metric] = []
    histograms: dict[tuple[str, frozenset[tuple[str, str]]], Histogram] = {}
    vectors: dict[frozenset[tuple[str, str]], Vector] = {}
    for kind, name, labels, value in _samples(page):
        if kind == "gauge":
            found.append(Gauge(name, labels, float(value)))
        elif kind == "counter":
            name = name.removesuffix("_total")
            if name == _BY_POSITION:
                position = int(labels.pop("position"))
                key = frozenset(labels.items())
                if key not in vectors:
                    vectors[key] = Vector(name, labels, [])
                    found.append(vectors[key])
                values = vectors[key].values
                values += [0] * (position + 1 - len(values))
                values[position] = int(float(value))
            else:
                found.append(Counter(name, labels, int(float(value))))
        elif kind == "histogram":
            limit = labels.pop("le", None)
            family, part = name.rsplit("_", 1)
            key_of = (family, frozenset(labels.items()))
            if key_of not in histograms:
                histograms[key_of] = Histogram(family, labels, 0, 0.0, {})
                found.append(histograms[key_of])
            one = histograms[key_of]
            if part == "bucket" and limit is not None:
                one.buckets[limit] = int(float(value))
            elif part == "count":
                one.count = int(float(value))
            elif part == "sum":
                one.sum = float(value)
    return found
