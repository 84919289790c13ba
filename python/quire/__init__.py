"""Quire: an LLM inference engine.

>>> from quire import LLM, SamplingParams
>>> llm = LLM()
>>> outputs = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
>>> outputs[0].outputs[0].text
' Paris. The c'
>>> llm.close()

The classes have the names, defaults and results of vLLM; the page "Coming from vLLM" says what differs.
"""

from typing import TYPE_CHECKING, Any

from quire import outputs, params, requests, server, settings
from quire._quire import EngineDeadError, QueueOverflowError, __version__
from quire.llm import LLM
from quire.llm_engine import LLMEngine
from quire.outputs import *
from quire.params import *
from quire.requests import *
from quire.server import *
from quire.settings import *
from quire.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM
else:

    def __getattr__(name: str) -> Any:
        # asyncio takes most of the time of an import, and few programs need it.
        if name == "AsyncLLM":
            from quire.async_llm import AsyncLLM

            return AsyncLLM
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["LLM", "AsyncLLM", "EngineDeadError", "LLMEngine", "QueueOverflowError", "Tokenizer", "__version__"]
__all__ += outputs.__all__
__all__ += params.__all__
__all__ += requests.__all__
__all__ += server.__all__
__all__ += settings.__all__
