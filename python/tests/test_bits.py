"""The same bits through Python as through the HTTP server of the same build."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import quire
from quire import LLM, SamplingParams, StructuredOutputsParams

PROMPTS = ["The capital of France is", "Once upon a time", "1, 2, 3,"]

#: Every option of sampling at least once.
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1.3, "seed": -5, "top_p": 0.9},
    {"seed": 2**62, "top_k": 5},
    {"seed": 3, "min_p": 0.5, "max_tokens": 40},
    {"seed": 4, "presence_penalty": 2.0, "max_tokens": 60},
    {"seed": 4, "frequency_penalty": 2.0, "max_tokens": 60},
    {"seed": 5, "repetition_penalty": 1.5},
    {"seed": 6, "n": 3},
    {"seed": 7, "stop": ["e", "is"]},
    {"seed": 8, "stop": ["e"], "include_stop_str_in_output": True},
    {"seed": 9, "stop_token_ids": [17, 15]},
    {"seed": 10, "ignore_eos": True, "min_tokens": 20, "max_tokens": 40},
    {"seed": 11, "logit_bias": {17: -100.0, 400: 5.0}},
    {"seed": 12, "allowed_token_ids": list(range(300, 400))},
    {"seed": 13, "bad_words": ["the", "Paris"]},
    {"seed": 14, "skip_special_tokens": False, "ignore_eos": True, "logit_bias": {2: 8.0}},
    {"seed": 15, "prompt_logprobs": 2},
    {"seed": 16, "structured_outputs": {"regex": "[a-z]{5,9}"}},
]


def _same(output: quire.RequestOutput, choices: list[Any]) -> None:
    assert len(output.outputs) == len(choices)
    for one, choice in zip(output.outputs, choices, strict=True):
        assert list(one.token_ids) == choice["token_ids"]
        assert one.text == choice.get("text", choice.get("message", {}).get("content"))
        assert (one.finish_reason, one.stop_reason) == (choice["finish_reason"], choice["stop_reason"])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_completions_equal_those_of_the_server_bit_by_bit(llm: LLM, post: Callable[..., Any], options: dict[str, Any]) -> None:
    given = dict(options)
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    outputs = llm.generate(PROMPTS, SamplingParams(logprobs=3, **given), use_tqdm=False)
    neutral = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 16}
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        body = {**neutral, **options, "prompt": prompt, "logprobs": 3, "return_token_ids": True}
        choices = post("/v1/completions", body)["choices"]
        _same(output, choices)
        for one, choice in zip(output.outputs, choices, strict=True):
            assert one.logprobs is not None
            mine = [position[token].logprob for token, position in zip(one.token_ids, one.logprobs)]
            # The server's numbers are those of float32, written so that they read back as the same.
            assert mine == [max(-9999.0, found) for found in choice["logprobs"]["token_logprobs"]]
        if "prompt_logprobs" in options:
            assert output.prompt_logprobs is not None
            for ours, theirs in zip(output.prompt_logprobs[1:], choices[0]["prompt_logprobs"][1:], strict=True):
                assert {str(token): found.logprob for token, found in (ours or {}).items()} == {
                    token: found["logprob"] for token, found in theirs.items()
                }


@pytest.mark.parametrize("options", OPTIONS[1:], ids=str)
def test_every_option_changes_an_output(llm: LLM, options: dict[str, Any]) -> None:
    given = {**options}
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    kept: dict[str, Any] = {name: given[name] for name in ("seed", "max_tokens", "n") if name in given}
    if "skip_special_tokens" in given:
        kept = {name: value for name, value in given.items() if name != "skip_special_tokens"}

    def outputs(params: SamplingParams) -> list[Any]:
        found = llm.generate(PROMPTS, params, use_tqdm=False)
        return [(one.text, one.finish_reason, output.prompt_logprobs is None) for output in found for one in output.outputs]

    changed = outputs(SamplingParams(**given))
    others = [SamplingParams(**kept)] if set(given) - set(kept) else [SamplingParams(), SamplingParams(seed=99)]
    assert all(changed != outputs(other) for other in others)


def test_chats_equal_those_of_the_server(llm: LLM, post: Callable[..., Any]) -> None:
    for question in ("What is the capital of France?", "Count to five."):
        messages = [{"role": "user", "content": question}]
        (output,) = llm.chat(messages, SamplingParams(seed=1, max_tokens=30, logprobs=2), use_tqdm=False)
        body = {"messages": messages, "seed": 1, "max_tokens": 30, "temperature": 1, "top_p": 1, "return_token_ids": True}
        choices = post("/v1/chat/completions", body)["choices"]
        _same(output, choices)


def test_embeddings_equal_those_of_the_server(llm: LLM, post: Callable[..., Any]) -> None:
    numpy = pytest.importorskip("numpy")
    found = post("/v1/embeddings", {"input": PROMPTS})["data"]
    for output, theirs in zip(llm.embed(PROMPTS, use_tqdm=False), found, strict=True):
        assert output.outputs.array.tobytes() == numpy.array(theirs["embedding"], numpy.float32).tobytes()


def test_a_prompt_alone_has_the_bits_that_it_has_among_others(llm: LLM) -> None:
    params = SamplingParams(seed=2, logprobs=1, max_tokens=24)
    together = llm.generate(PROMPTS * 5, params, use_tqdm=False)
    for at, prompt in enumerate(PROMPTS):
        (alone,) = llm.generate(prompt, params, use_tqdm=False)
        for other in together[at :: len(PROMPTS)]:
            assert other.outputs[0].logprobs == alone.outputs[0].logprobs
