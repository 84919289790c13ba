"""Parameters: the defaults of vLLM, and errors that name the field, what was found and what is allowed."""

from __future__ import annotations

import copy
import pickle

import pytest

from quire import BeamSearchParams, LoRARequest, PoolingParams, SamplingParams, StructuredOutputsParams

#: Names and defaults of vLLM 0.32 (`vllm/sampling_params.py`), in the order of the constructor.
DEFAULTS: dict[str, object] = {
    "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0,
    "watermarking": None, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "stop": [], "stop_token_ids": [],
    "ignore_eos": False, "max_tokens": 16, "min_tokens": 0, "logprobs": None, "prompt_logprobs": None,
    "prompt_logprob_token_ids": None, "prompt_logprob_start": None, "logprob_token_ids": None, "flat_logprobs": False,
    "detokenize": True, "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
}  # fmt: skip


def test_the_defaults_and_their_order_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert {name: getattr(params, name) for name in DEFAULTS} == DEFAULTS
    assert list(vars(params))[: len(DEFAULTS)] == list(DEFAULTS)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n": 0}, "n: found 0, expected an integer from 1 to 16384"),
        ({"n": 2, "temperature": 0}, "n: found 2, expected 1 with temperature 0"),
        ({"presence_penalty": 2.5}, "presence_penalty: found 2.5, expected a number from -2 to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty: found -3.0, expected a number from -2 to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty: found 0.0, expected a number above 0"),
        ({"temperature": -1}, "temperature: found -1.0, expected a number from 0 to 2"),
        ({"temperature": float("nan")}, "temperature: found nan, expected a finite number"),
        ({"top_p": 0}, "top_p: found 0.0, expected a number above 0 and at most 1"),
        ({"top_k": -2}, "top_k: found -2, expected an integer"),
        ({"min_p": 1.5}, "min_p: found 1.5, expected a number from 0 to 1"),
        ({"max_tokens": 0}, "max_tokens: found 0, expected an integer of at least 1"),
        ({"min_tokens": 17}, "min_tokens: found 17, expected at most max_tokens, which is 16"),
        ({"logprobs": -2}, "logprobs: found -2, expected an integer of at least -1"),
        ({"stop": ["a", ""]}, "stop: found ['a', ''], expected no empty string"),
        ({"stop": "a", "detokenize": False}, "stop: found ['a'], expected no stop strings with detokenize=False"),
        ({"allowed_token_ids": []}, "allowed_token_ids: found [], expected at least one token id"),
        ({"thinking_token_budget": -2}, "thinking_token_budget: found -2, expected an integer of at least -1"),
        ({"extra_args": {"a": 1}}, "extra_args: found {'a': 1}, which is not supported"),
    ],
)
def test_a_wrong_value_raises_with_the_field_and_what_is_allowed(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        SamplingParams(**given)  # type: ignore[arg-type]
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    "given",
    [{"n": "a"}, {"n": 1.5}, {"n": True}, {"temperature": "hot"}, {"stop": 3}, {"stop_token_ids": "ab"}, {"seed": 1.0},
     {"ignore_eos": "yes"}, {"flat_logprobs": 1}, {"thinking_token_budget": 1.5}, {"logit_bias": [1]}, {"structured_outputs": "x"}, {"output_kind": 1}, {"unknown": 1}],
)  # fmt: skip
def test_a_wrong_type_and_an_unknown_field_are_type_errors(given: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=next(iter(given))):
        SamplingParams(**given)  # type: ignore[arg-type]


def test_values_are_normalised_as_in_vllm() -> None:
    numpy = pytest.importorskip("numpy")
    params = SamplingParams(stop="a", seed=-1, logprobs=True, logit_bias={"5": 300},  # type: ignore[dict-item]
                            n=numpy.int64(2), top_p=numpy.float32(0.5))
    assert (params.stop, params.seed, params.logprobs, params.logit_bias) == (["a"], None, 1, {5: 100.0})
    assert (params.n, params.top_p) == (2, 0.5)
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None
    greedy = SamplingParams(temperature=0, top_p=0.5, top_k=5, min_p=0.1)
    assert (greedy.top_p, greedy.top_k, greedy.min_p) == (1.0, 0, 0.0)
    with pytest.warns(UserWarning, match="temperature"):
        assert SamplingParams(temperature=0.001).temperature == 0.01


def test_parameters_can_be_copied_and_pickled() -> None:
    params = SamplingParams(stop=["a"], structured_outputs=StructuredOutputsParams(regex="a+"))
    for copied in (copy.deepcopy(params), pickle.loads(pickle.dumps(params)), params.clone()):
        assert copied == params and copied is not params


def test_structured_outputs_take_exactly_one_constraint() -> None:
    with pytest.raises(ValueError, match="found regex and choice"):
        StructuredOutputsParams(regex="a", choice=["b"])
    with pytest.raises(ValueError, match="found none of them"):
        StructuredOutputsParams()
    with pytest.raises(TypeError, match="regex"):
        StructuredOutputsParams(regex=3)  # type: ignore[arg-type]


def test_other_parameters_are_checked_too() -> None:
    assert LoRARequest("a", 1, "x") == LoRARequest("a", 2, "y") != LoRARequest("b", 1, "x")
    with pytest.raises(ValueError, match="lora_int_id: found 0"):
        LoRARequest("a", 0, "x")
    with pytest.raises(ValueError, match="lora_path"):
        LoRARequest("a", 1)
    with pytest.raises(ValueError, match="beam_width"):
        BeamSearchParams(0, 5)
    with pytest.raises(ValueError, match="temperature"):
        BeamSearchParams(2, 5, temperature=1.0)
    with pytest.raises(ValueError, match="step_tag_id"):
        PoolingParams(step_tag_id=1)
