"""The HTTP server in this process."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

from quire import _quire
from quire.settings import Settings

__all__ = ["Server", "serve"]


class Server:
    """A running server. It stops at `close()`, or at the end of a `with` block."""

    def __init__(self, server: _quire.Server) -> None:
        self._server = server

    @property
    def port(self) -> int:
        """Port that it listens on."""
        return self._server.port

    @property
    def url(self) -> str:
        """Address, such as `http://127.0.0.1:8000`."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._server.host, self._server.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the server has ended, at most for `timeout` seconds. Returns whether it has. Ctrl-C ends the waiting.

        Raises:
            RuntimeError: The engine has failed.
        """
        return self._server.wait(timeout)

    def close(self) -> None:
        """Stops the server: running requests may finish within `shutdown_timeout` seconds (30)."""
        self._server.stop()
        self._server.wait(None)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Server(url={self.url!r})"


def serve(model: str | os.PathLike[str] | None = None, **settings: Any) -> Server:
    """Starts the HTTP server of `quire serve` in this process and waits until it serves.

    Args:
        model: Folder of a checkpoint, GGUF file, or id on the Hugging Face hub; None: the small model that is built in.
        settings: The flags of `quire serve` with underscores, such as `port=8001`; `port=0` selects a free one.

    Raises:
        TypeError: A keyword argument is unknown.
        ValueError: A setting has a wrong value.
        RuntimeError: The model cannot be loaded, or the address is in use.
    """
    given = {"model": None if model is None else os.fspath(model), **settings}
    return Server(_quire.Server(Settings("serve()", given, server=True).to_json()))
