"""Engines that tests share: the model that is built in."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import quire


@pytest.fixture(scope="session")
def llm() -> Iterator[quire.LLM]:
    with quire.LLM() as llm:
        yield llm


@pytest.fixture(scope="session")
def server() -> Iterator[quire.Server]:
    with quire.serve(port=0, reasoning_parser="none") as server:
        yield server


@pytest.fixture(scope="session")
def post(server: quire.Server) -> Callable[[str, dict[str, Any]], Any]:
    def post(route: str, body: dict[str, Any]) -> Any:
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(server.url + route, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from None

    return post
