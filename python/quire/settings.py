"""Settings of an engine: the flags of `quire serve` as keyword arguments, and vLLM's names for them.

The flags, their defaults and their checks are those of the program, and so is the table of what vLLM has in addition: such names are
accepted with a value that asks for nothing, and refused otherwise.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire import _quire

__all__ = ["AsyncEngineArgs", "EngineArgs"]

#: Compiled kernels of a package for GPUs; the program looks for them beside its own file.
KERNELS = Path(__file__).parent / "kernels"

#: Names of vLLM that have no counterpart here: the values that are accepted without effect (None: all), and the reason. Those of the first
#: line are arguments of vLLM's classes alone, or settings of a server.
_FOREIGN: dict[str, tuple[list[str] | None, str]] = {
    **dict.fromkeys(("enable_mm_processor_stats", "mamba_config", "shutdown_timeout"), (None, "")),
    **dict.fromkeys(
        ("enable_log_requests", "max_num_queued_reqs", "model_weights", "pooler_config", "structured_outputs_config"),
        ([], "remove it"),
    ),
    **{name: (values, reason) for name, values, reason in _quire.vllm_settings()},
}

#: Names of vLLM for parts of `speculative_config`.
_SPECULATIVE = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}

#: All names of vLLM that are no flags.
OF_VLLM = frozenset(
    {*_FOREIGN, *_SPECULATIVE, "tokenizer", "tokenizer_revision", "generation_config"}
    | {"override_generation_config"}
)


def _is_neutral(value: object) -> bool:
    return value is None or value is False or value in ("", "auto") or value == 0 or value in ([], {}, ())


class Settings:
    """Settings of an engine, checked as far as their names go."""

    def __init__(self, owner: str, given: Mapping[str, Any], *, server: bool = False) -> None:
        given = {name: value for name, value in given.items() if not name.startswith("_")}
        #: Chat template as text, for each conversation.
        self.chat_template: str | None = None
        #: Whether `generation_config.json` has no effect on default sampling parameters.
        self.ignores_generation_config: bool = False
        #: Sampling defaults beside those of `generation_config.json`.
        self.sampling_defaults: dict[str, Any] = {}
        values: dict[str, Any] = {}
        # The program knows flags of vLLM too; for those of this file, what it says of their values counts.
        known = set(_quire.settings(server)) - OF_VLLM
        speculative: dict[str, Any] = {}
        for name, value in given.items():
            if name not in known and name not in OF_VLLM:
                near = difflib.get_close_matches(name, [*known, *OF_VLLM], 1)
                guess = f"; did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"{owner} got an unexpected keyword argument {name!r}{guess}")
            accepted, reason = _FOREIGN.get(name, ([], ""))
            if value is None or accepted is None:
                continue
            if name in ("tokenizer", "tokenizer_revision"):
                if value != given.get({"tokenizer": "model"}.get(name, "revision")):
                    raise ValueError(f"{name}: found {value!r}, expected that of the model; put its files beside the weights")
            elif name == "generation_config":
                if value not in ("auto", "vllm"):
                    raise ValueError(f"generation_config: found {value!r}, expected auto or vllm")
                self.ignores_generation_config = value == "vllm"
            elif name == "override_generation_config":
                self.sampling_defaults = dict(value)
            elif name in _SPECULATIVE:
                speculative[_SPECULATIVE[name]] = value
            elif name == "chat_template" and isinstance(value, str) and ("{" in value or "\n" in value):
                self.chat_template = value
            elif name in known:
                values[name] = value
            elif not _is_neutral(value) and str(value) not in accepted:
                expected = f"expected {', '.join(accepted)}: " if accepted else "which this engine does not have: "
                raise ValueError(f"{name}: found {value!r}, {expected}{reason}")
        if "kernels_dir" not in values and KERNELS.is_dir() and "QUIRE_KERNELS_DIR" not in os.environ:
            values["kernels_dir"] = KERNELS
        if speculative:
            values["speculative_config"] = speculative
        self._values = {name: found for name, value in values.items() if (found := _plain(name, value)) is not None}

    def to_json(self) -> str:
        """A JSON object."""
        return json.dumps(self._values)


def _plain(name: str, value: object) -> object:
    """A value as JSON has it; None if it is not set."""
    if name == "hf_token" and isinstance(value, bool):
        return None
    if name == "max_model_len" and value == -1:
        return "auto"
    if name == "dtype" and not isinstance(value, str) and value is not None:
        return str(value).rsplit(".", 1)[-1]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (Path, os.PathLike)):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): found for key, item in value.items() if (found := _plain("", item)) is not None}
    if isinstance(value, (list, tuple)):
        return [_plain("", item) for item in value]
    if hasattr(type(value), "__index__"):
        return int(value)  # type: ignore[call-overload]
    if hasattr(type(value), "__float__"):
        return float(value)  # type: ignore[arg-type]
    raise TypeError(f"{name}: found a value of type {type(value).__name__}, expected a plain value")


def _parsed(text: str) -> Any:
    """A value of a command line: JSON, or text."""
    try:
        return json.loads(text.lower() if text in ("True", "False", "None") else text)
    except ValueError:
        return text


class EngineArgs:
    """Settings of an engine, as attributes. The names are those of `LLM`."""

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        Settings(type(self).__name__ + "()", {"model": model, **settings})
        self.model = model
        self.__dict__.update(settings)

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Adds a flag for each setting. Values are checked when an engine starts."""
        for name in sorted({*_quire.settings(False), *OF_VLLM}):
            longs = ["--" + name.replace("_", "-")] + (["--" + name] if "_" in name else [])
            read = _parsed if name in OF_VLLM else str
            parser.add_argument(*longs, dest=name, nargs="?", const=True, default=None, type=read)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """Takes the settings from the result of a parser."""
        names = {*_quire.settings(False), *OF_VLLM}
        given = {name: value for name, value in vars(args).items() if name in names and value is not None}
        return cls(**given)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class AsyncEngineArgs(EngineArgs):
    """Settings of an engine for `AsyncLLM`."""
