"""`LLM`: forms of prompts, order, results, arrays, errors."""

from __future__ import annotations

import json
import math
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

import quire
from quire import LLM, BeamSearchParams, FlatLogprobs, LoRARequest, PoolingParams, SamplingParams, StructuredOutputsParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def test_outputs_are_in_the_order_of_the_prompts_whatever_their_form(llm: LLM) -> None:
    text = "The capital of France is"
    ids = llm.get_tokenizer().encode(text)
    forms: list[Any] = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}, {"prompt": "shown", "prompt_token_ids": ids}]
    outputs = llm.generate([*forms, "Hello"], [GREEDY] * 5 + [SamplingParams(temperature=0, max_tokens=1)], use_tqdm=False)
    assert [output.prompt for output in outputs] == [text, None, text, None, "shown", "Hello"]
    assert all(output.prompt_token_ids == ids for output in outputs[:5])
    assert {output.outputs[0].text for output in outputs[:5]} == {" Paris. The capital of I"}
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8] * 5 + [1]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    assert llm.generate(ids, GREEDY, use_tqdm=False)[0].outputs[0].text == outputs[0].outputs[0].text
    assert len({output.request_id for output in outputs}) == 6
    assert llm.generate([], GREEDY) == []


def test_an_output_has_the_attributes_of_vllm(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    output = llm.generate("The capital of France is", params, use_tqdm=False)[0]
    (one,) = output.outputs
    assert (one.index, one.finish_reason, one.stop_reason, one.lora_request, one.finished()) == (0, "length", None, None, True)
    assert one.logprobs is not None and len(one.logprobs) == 4 and output.prompt_logprobs is not None
    for token, position in zip(one.token_ids, one.logprobs, strict=True):
        assert next(iter(position)) == token and len(position) == 2
        assert position[token].rank == 1 and position[token].decoded_token
        assert [found.rank for found in position.values()] == [1, 2]
    assert one.cumulative_logprob == pytest.approx(sum(p[t].logprob for t, p in zip(one.token_ids, one.logprobs)))
    assert output.prompt_logprobs[0] is None and output.prompt_token_ids is not None
    assert all(token in (found or {}) for token, found in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:]))
    assert output.num_cached_tokens is not None and output.metrics is None
    assert pickle.loads(pickle.dumps(output)).outputs[0].logprobs == one.logprobs
    assert "CompletionOutput(index=0, text=' Paris.'" in repr(output)


def test_flat_logprobs_are_the_dicts_in_a_few_lists(llm: LLM) -> None:
    given: dict[str, Any] = {"temperature": 1, "seed": 3, "max_tokens": 6, "logprobs": 3, "prompt_logprobs": 2}
    dicts = llm.generate("The capital of France is", SamplingParams(**given), use_tqdm=False)[0]
    flat = llm.generate("The capital of France is", SamplingParams(**given, flat_logprobs=True), use_tqdm=False)[0]
    for found, expected in ((flat.outputs[0].logprobs, dicts.outputs[0].logprobs), (flat.prompt_logprobs, dicts.prompt_logprobs)):
        assert isinstance(found, FlatLogprobs) and isinstance(expected, list)
        assert list(found) == [position or {} for position in expected] and len(found) == len(expected)
        assert found[1:3] == FlatLogprobs(*_moved(found, 1, 3)) and list(found[1:3]) == [found[1], found[2]]
        assert found[-1] == expected[-1] and pickle.loads(pickle.dumps(found)) == found
        assert len(found.token_ids) == len(found.logprobs) == len(found.ranks) == found.end_indices[-1]
    assert flat.outputs[0].logprobs is not None
    assert flat.outputs[0].cumulative_logprob == dicts.outputs[0].cumulative_logprob
    # The token itself comes first, although it may be one of its alternatives.
    assert [end - start for start, end in _bounds(flat.outputs[0].logprobs)] == [4] * 6
    own = FlatLogprobs()
    own.extend(dicts.outputs[0].logprobs or [])
    assert list(own) == dicts.outputs[0].logprobs
    with pytest.raises(TypeError, match="Cannot set"):
        own[0] = {}
    with pytest.raises(TypeError, match="Cannot delete"):
        del own[0]
    with pytest.raises(TypeError, match="Cannot insert"):
        own.insert(0, None)


def _bounds(found: Any) -> list[tuple[int, int]]:
    return list(zip(found.start_indices, found.end_indices, strict=True))


def _moved(found: FlatLogprobs, first: int, last: int) -> tuple[list[Any], ...]:
    """The lists of a slice, written out."""
    start, end = found.start_indices[first], found.end_indices[last - 1]
    starts, ends = ([at - start for at in bounds[first:last]] for bounds in (found.start_indices, found.end_indices))
    return starts, ends, *(list(part[start:end]) for part in (found.token_ids, found.logprobs, found.ranks, found.decoded_tokens))


def test_all_tokens_of_the_vocabulary_have_log_probabilities_if_the_engine_allows_it(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=-1, prompt_logprobs=-1)
    with pytest.raises(ValueError, match="prompt_logprobs: found -1.*--max-logprobs"):
        llm.generate("Hello there", params, use_tqdm=False)
    with LLM(max_logprobs=-1) as free:
        size = free.llm_engine.model_config.get_vocab_size()
        output = free.generate("Hello there", params, use_tqdm=False)[0]
        assert output.outputs[0].logprobs is not None and output.prompt_logprobs is not None
        for position in [*output.outputs[0].logprobs, *output.prompt_logprobs[1:]]:
            assert position is not None and len(position) == size
            assert math.fsum(math.exp(one.logprob) for one in position.values()) == pytest.approx(1, abs=1e-4)
            assert sorted(one.rank or 0 for one in position.values())[-1] == size
        few = free.generate("Hello there", SamplingParams(temperature=0, max_tokens=2, logprobs=3), use_tqdm=False)[0].outputs[0]
        for position, three in zip(output.outputs[0].logprobs, few.logprobs or [], strict=True):
            assert list(three.items()) == list(position.items())[: len(three)]


def test_reasoning_ends_after_its_budget(llm: LLM) -> None:
    def output(engine: LLM, budget: int | None) -> quire.CompletionOutput:
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, thinking_token_budget=budget)
        return engine.generate("How much is it?<think>", params, use_tqdm=False)[0].outputs[0]

    with LLM(reasoning_parser="qwen3") as thinks:
        free, short = output(thinks, None), output(thinks, 4)
        assert free.text == output(thinks, -1).text == output(thinks, 1000).text == output(llm, None).text
        assert "</think>" not in free.text and "</think>" in short.text
        # Tokens, not texts: the fourth may end inside of a character.
        assert free.token_ids[:4] == short.token_ids[:4]
        assert llm.get_tokenizer().decode(short.token_ids[4:]).startswith("</think>")
    with pytest.raises(ValueError, match="thinking_token_budget.*--reasoning-parser"):
        output(llm, 4)


def test_stops_say_what_stopped(llm: LLM) -> None:
    def stopped(**given: Any) -> tuple[str, Any, Any]:
        params = SamplingParams(temperature=0, max_tokens=30, **given)
        one = llm.generate("The capital of France is", params, use_tqdm=False)[0].outputs[0]
        return one.text, one.finish_reason, one.stop_reason

    assert stopped(stop="capital") == (" Paris. The ", "stop", "capital")
    assert stopped(stop=["capital"], include_stop_str_in_output=True) == (" Paris. The capital", "stop", "capital")
    assert stopped(stop_token_ids=[326]) == (" Paris. The", "stop", 326)
    chat = llm.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY.clone(), use_tqdm=False)
    assert chat[0].prompt is not None and chat[0].prompt.endswith("<|im_start|>assistant\n")
    eos = llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0, max_tokens=50))
    assert (eos[0].outputs[0].finish_reason, eos[0].outputs[0].stop_reason) == ("stop", None)
    assert not llm.generate("a", SamplingParams(detokenize=False), use_tqdm=False)[0].outputs[0].text


def test_a_limit_beyond_the_context_ends_at_the_context(llm: LLM) -> None:
    for most in (None, 10**6):
        params = SamplingParams(max_tokens=most, ignore_eos=True, seed=1)
        output = llm.generate("Hello", params, use_tqdm=False)[0]
        assert output.prompt_token_ids is not None
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == llm.max_model_len
        assert output.outputs[0].finish_reason == "length"


def test_several_sequences_and_their_seeds(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=12)
    first, second = (llm.generate("Once upon", params, use_tqdm=False)[0].outputs for _ in range(2))
    assert [one.index for one in first] == [0, 1, 2]
    assert [one.token_ids for one in first] == [one.token_ids for one in second]
    assert len({tuple(one.token_ids) for one in first}) > 1


def test_conversations_one_or_many_with_templates_and_tools(llm: LLM) -> None:
    talk = [{"role": "user", "content": "What is the capital of France?"}]
    one = llm.chat(talk, GREEDY, use_tqdm=False)
    many = llm.chat([talk, [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]], GREEDY, use_tqdm=False)
    assert len(one) == 1 and len(many) == 2
    assert many[0].outputs[0].text == one[0].outputs[0].text == "The capital of France is Par"
    own = llm.chat(talk, GREEDY, chat_template="{{ messages[0].content }}!", use_tqdm=False)
    assert own[0].prompt == "What is the capital of France?!"
    begun = [*talk, {"role": "assistant", "content": "The capital"}]
    more = llm.chat(begun, GREEDY, add_generation_prompt=False, continue_final_message=True, use_tqdm=False)
    assert more[0].prompt is not None and more[0].prompt.endswith("The capital")
    with pytest.raises(ValueError, match="continue_final_message"):
        llm.chat(begun, GREEDY, continue_final_message=True)
    with pytest.raises(TypeError, match="messages"):
        llm.chat("Hi")
    with pytest.raises(ValueError, match=r"messages\[0\].role"):
        llm.chat([{"content": "Hi"}], GREEDY)


def test_structured_outputs_match_their_constraint(llm: LLM) -> None:
    def text(most: int = 40, **given: Any) -> str:
        constraint = StructuredOutputsParams(**given)
        params = SamplingParams(seed=3, max_tokens=most, structured_outputs=constraint)
        return llm.generate("Answer: ", params, use_tqdm=False)[0].outputs[0].text

    assert text(choice=["yes", "no"]) in ("yes", "no")
    assert re.fullmatch(r"\d{3}-[a-c]", text(regex=r"\d{3}-[a-c]"))
    assert text(grammar='\nroot ::= "a" more_rule\nmore_rule ::= "b" | "c"\n') in ("ab", "ac")
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    assert json.loads(text(100, json=schema))["n"] in (1, 2)
    del schema["additionalProperties"]
    closed = text(100, json=schema, disable_additional_properties=True, disable_any_whitespace=True)
    assert closed in ('{"n":1}', '{"n":2}')
    with pytest.raises(ValueError, match="structured_outputs"):
        text(regex="(")


def test_queued_requests_run_and_are_waited_for_later(llm: LLM) -> None:
    prompts, talk = ["The capital of France is", "Once upon"], [{"role": "user", "content": "Hi"}]
    expected = [*llm.generate(prompts, GREEDY, use_tqdm=False), *llm.chat(talk, GREEDY, use_tqdm=False)]
    ids = [*llm.enqueue(prompts, GREEDY), *llm.enqueue_chat(talk, GREEDY)]
    found = llm.wait_for_completion(quire.RequestOutput, use_tqdm=False)
    assert [output.request_id for output in found] == ids and len(set(ids)) == 3
    assert [(one.prompt, one.outputs[0].text) for one in found] == [(one.prompt, one.outputs[0].text) for one in expected]
    assert llm.wait_for_completion() == []
    with pytest.raises(ValueError, match="output_type"):
        llm.wait_for_completion(int)  # type: ignore[arg-type]


def test_an_engine_that_slept_has_equal_outputs() -> None:
    with LLM(kv_cache_memory_bytes="8M") as llm:

        def tokens() -> list[int]:
            return list(llm.generate("Once upon", SamplingParams(seed=1), use_tqdm=False)[0].outputs[0].token_ids)

        expected = tokens()
        for level in (0, 1):
            llm.sleep(level)
            with pytest.raises((RuntimeError, ValueError), match="sleep"):
                tokens()
            llm.wake_up(["kv_cache"])
            assert tokens() == expected
        with pytest.raises(ValueError, match="level: found .*7"):
            llm.sleep(7)
        with pytest.raises(ValueError, match="mode: found .*soon"):
            llm.sleep(1, "soon")


def test_a_beam_search_returns_its_width_best_first(llm: LLM) -> None:
    (found,) = llm.beam_search(["The capital of"], BeamSearchParams(3, 5))
    assert len(found.sequences) == 3
    scores = [one.cum_logprob / len(one.logprobs) for one in found.sequences]
    assert scores == sorted(scores, reverse=True)
    best = found.sequences[0]
    assert best.tokens[:4] == llm.get_tokenizer().encode("The capital of") and best.text is not None
    assert best.text.startswith("The capital of") and len(best.logprobs) == 5
    # The prompt of a result is a prompt.
    prompt: Any = best.orig_prompt
    (again,) = llm.beam_search(prompt, BeamSearchParams(3, 5))
    assert [one.tokens for one in again.sequences] == [one.tokens for one in found.sequences]


def test_embeddings_are_vectors_of_length_one(llm: LLM) -> None:
    prompts: list[quire.PromptType] = ["a b c", {"prompt_token_ids": [1, 2, 3]}]
    first, second = llm.embed(prompts, use_tqdm=False)
    assert first.outputs.hidden_size == len(first.outputs.embedding) == 192 and second.prompt_token_ids == [1, 2, 3]
    assert math.sqrt(sum(x * x for x in first.outputs.embedding)) == pytest.approx(1.0, abs=1e-6)
    assert llm.encode("a b c", pooling_task="embed", use_tqdm=False)[0].outputs.data == first.outputs.array
    with pytest.raises(ValueError, match="dimensions: found 5, expected 192"):
        llm.embed("a", pooling_params=PoolingParams(dimensions=5))
    with pytest.raises(ValueError, match="pooling_task"):
        llm.encode("a")
    with pytest.raises(ValueError, match="no labels"):
        llm.classify("a")
    with pytest.raises(ValueError, match="rope_theta"):
        quire.LLM(hf_overrides={"rope_theta": 1})
    # A model of embeddings scores their cosine.
    texts = ["a b c", "c b a"]
    a, b = (one.outputs.embedding for one in llm.embed(texts, use_tqdm=False))
    [found] = llm.score(*texts)
    assert found.outputs.score == pytest.approx(sum(x * y for x, y in zip(a, b, strict=True)), abs=1e-6)


ENCODERS = Path(__file__).parents[2] / "models" / "tests" / "encoders"


def test_classes_and_scores_are_those_of_transformers() -> None:
    inputs = json.loads((ENCODERS / "qwen3-seqcls" / "expected.json").read_text())["inputs"]
    with quire.LLM(ENCODERS / "qwen3-seqcls", dtype="float32") as llm:
        found = llm.classify([one["text"] for one in inputs], use_tqdm=False)
        [logits] = llm.encode(
            inputs[0]["text"], PoolingParams(use_activation=False), pooling_task="classify", use_tqdm=False
        )
        for one, want in zip(found, inputs, strict=True):
            assert one.outputs.probs == pytest.approx(want["probs"], abs=1e-5)
            assert one.prompt_token_ids == want["ids"] and one.outputs.num_classes == len(want["probs"])
        assert list(logits.outputs.data) == pytest.approx(inputs[0]["logits"], abs=1e-4)
        with pytest.raises(ValueError, match="labels"):
            llm.score("a", "b")
    pairs = json.loads((ENCODERS / "xlm-roberta-rerank" / "expected.json").read_text())["inputs"]
    with quire.LLM(ENCODERS / "xlm-roberta-rerank", dtype="float32") as llm:
        scored = llm.score([one["text"] for one in pairs], [one["text_pair"] for one in pairs])
        for pair, want in zip(scored, pairs, strict=True):
            assert pair.outputs.score == pytest.approx(want["score"], abs=1e-5)
            assert pair.prompt_token_ids == want["ids"]
        assert [one.outputs for one in llm.score(pairs[0]["text"], [one["text_pair"] for one in pairs[:2]])][0] == scored[0].outputs
        with pytest.raises(ValueError, match="data_1: found 2 texts for the 3 of data_2"):
            llm.score(["a", "b"], ["a", "b", "c"])
        with pytest.raises(ValueError, match="cannot generate"):
            llm.generate("a", use_tqdm=False)


def test_arrays_are_views_of_what_the_engine_returned(llm: LLM) -> None:
    numpy = pytest.importorskip("numpy")
    one = llm.generate("The capital of", SamplingParams(temperature=0, logprobs=3), use_tqdm=False)[0].outputs[0]
    ids, found = numpy.asarray(one.arrays.token_ids), one.arrays.logprobs
    assert ids.dtype == numpy.uint32 and ids.tolist() == list(one.token_ids) and found is not None
    assert one.logprobs is not None and numpy.asarray(found.counts).tolist() == [3] * 16
    assert numpy.asarray(found.logprobs).tolist() == [p[t].logprob for t, p in zip(one.token_ids, one.logprobs)]
    shaped = numpy.asarray(found.top_logprobs).reshape(16, 3)
    assert (numpy.diff(shaped, axis=1) <= 0).all()
    vector = llm.embed("a", use_tqdm=False)[0].outputs
    array = numpy.asarray(vector.array)
    assert array.dtype == numpy.float32 and numpy.asarray(vector).tolist() == vector.embedding
    for made, source in ((ids, one.arrays.token_ids), (array, vector.array)):
        assert numpy.shares_memory(made, numpy.asarray(source)) and not made.flags.owndata


def test_default_parameters_are_those_of_the_generation_config(llm: LLM) -> None:
    # That of the built-in model has a temperature and a top_p.
    default = llm.get_default_sampling_params()
    assert (default.temperature, default.top_p, default.max_tokens) == (0.6, 0.95, 16)
    with LLM(generation_config="vllm", override_generation_config={"top_k": 3}, kv_cache_memory_bytes="8M") as other:
        assert other.get_default_sampling_params() == SamplingParams(top_k=3)


def test_the_tokenizer_has_the_methods_of_hugging_face(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("hello world")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello world"
    assert tokenizer("hello world")["input_ids"] == ids and tokenizer(["hello world"])["input_ids"] == [ids]
    assert tokenizer.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(ids)) == ids
    assert tokenizer.eos_token_id == 2 and tokenizer.eos_token == "<|im_end|>" and 2 in tokenizer.all_special_ids
    assert len(tokenizer) == tokenizer.vocab_size >= len(tokenizer.get_vocab())
    talk = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    assert text.endswith("assistant\n") and tokenizer.apply_chat_template(talk, add_generation_prompt=True)
    assert len(tokenizer.encode("a b c d e f", truncation=True, max_length=3)) == 3


def test_truncation_and_salts_reach_the_engine(llm: LLM) -> None:
    def run(prompt: Any, **kwargs: Any) -> quire.RequestOutput:
        return llm.generate(prompt, GREEDY, use_tqdm=False, tokenization_kwargs=kwargs)[0]

    assert run("a b c d e f", truncate_prompt_tokens=3).prompt_token_ids == run("a b c d e f").prompt_token_ids[-3:]  # type: ignore[index]
    assert len(run("a b c", add_special_tokens=False).prompt_token_ids or []) == len(run("a b c").prompt_token_ids or []) - 1
    with pytest.raises(ValueError, match="tokenization_kwargs: found 'x'"):
        run("a", x=1)
    llm.reset_prefix_cache()
    long = "the capital of France is Paris and " * 20
    assert run({"prompt": long, "cache_salt": "a"}).num_cached_tokens == 0
    assert (run({"prompt": long, "cache_salt": "a"}).num_cached_tokens or 0) > 0
    assert run({"prompt": long, "cache_salt": "b"}).num_cached_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "kind", "message"),
    [
        (5, TypeError, "prompts: found 5 of type int"),
        ([5.5], TypeError, "prompts[0]: found 5.5 of type float"),
        ([None], TypeError, "prompts[0]: found None"),
        ({"prompt": 3}, TypeError, "prompts.prompt: found 3"),
        ({}, ValueError, "prompts: found neither prompt nor prompt_token_ids"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, ValueError, "prompts: found the key 'multi_modal_data'; models here read text"),
        ({"prompt": "a", "other": 1}, ValueError, "prompts: found the key 'other'; expected prompt, prompt_token_ids, cache_salt"),
        ([[]], ValueError, "prompts[0]: found a prompt without tokens"),
        ([[10**6]], ValueError, "prompt: found "),
        ("a " * 2000, ValueError, "prompt: this model's maximum context length is 1024 tokens"),
        ("\ud800", ValueError, "prompt: found "),
    ],
)  # fmt: skip
def test_a_wrong_prompt_raises_and_the_engine_stays_usable(llm: LLM, prompt: Any, kind: type, message: str) -> None:
    with pytest.raises(kind) as raised:
        llm.generate(prompt, GREEDY, use_tqdm=False)
    assert str(raised.value).startswith(message)
    assert llm.generate("a", GREEDY, use_tqdm=False)[0].finished


def test_one_wrong_request_refuses_all_of_them(llm: LLM) -> None:
    wrong = SamplingParams(allowed_token_ids=[10**6])
    with pytest.raises(ValueError, match="allowed_token_ids"):
        llm.generate(["a", "b"], [GREEDY, wrong], use_tqdm=False)
    assert llm._handle.engine.num_unfinished() == 0
    for given in ([GREEDY], [GREEDY] * 3):
        with pytest.raises(ValueError, match=f"sampling_params: found {len(given)} items for 2 prompts"):
            llm.generate(["a", "b"], given)
    with pytest.raises(ValueError, match="priority"):
        llm.generate("a", GREEDY, priority=[1, 2])
    with pytest.raises(TypeError, match="sampling_params"):
        llm.generate("a", {"n": 1})  # type: ignore[arg-type]


def test_internals_are_refused_by_name(llm: LLM) -> None:
    for name in ("apply_model", "collective_rpc", "update_weights", "start_profile"):
        with pytest.raises(NotImplementedError, match=f"LLM.{name} is not supported: "):
            getattr(llm, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        llm.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"max_num_seq": 3}, TypeError, "LLM() got an unexpected keyword argument 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ({"host": "x"}, TypeError, "LLM() got an unexpected keyword argument 'host'"),
        ({"max_num_seqs": "x"}, ValueError, "invalid value 'x' for '--max-num-seqs <N>': expected a whole number"),
        ({"block_size": 7}, ValueError, "--block-size: found 7, expected"),
        ({"model": "no/such/model"}, ValueError, "no/such/model: no such folder or file; expected a checkpoint folder"),
        ({"cpu_offload_gb": 4}, ValueError, "cpu_offload_gb: found 4, expected 0: weights stay in the memory of the device"),
        ({"tokenizer": "other"}, ValueError, "tokenizer: found 'other', expected that of the model"),
        ({"ssl_keyfile": "x"}, TypeError, "LLM() got an unexpected keyword argument 'ssl_keyfile'"),
    ],
)  # fmt: skip
def test_a_wrong_setting_raises_the_line_of_the_program(given: dict[str, Any], kind: type, message: str) -> None:
    with pytest.raises(kind) as raised:
        LLM(**given)
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)


def test_a_model_that_cannot_load_raises_its_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RuntimeError) as raised:
        LLM(tmp_path)
    assert "config.json" in str(raised.value) and "\n" not in str(raised.value)


def test_neutral_settings_of_vllm_pass() -> None:
    given: dict[str, Any] = {"runner": "auto", "cpu_offload_gb": 0, "hf_overrides": None, "trust_remote_code": True, "compilation_config": 3}
    with LLM(tensor_parallel_size=1, kv_cache_memory_bytes="8M", max_model_len=-1, dtype="auto", **given) as llm:
        assert llm.generate("a", GREEDY, use_tqdm=False)[0].finished
    with LLM.from_engine_args(quire.EngineArgs(max_model_len=128, kv_cache_memory_bytes="8M")) as llm:
        assert llm.max_model_len == 128


def test_adapters_need_their_setting_and_a_folder(llm: LLM) -> None:
    with pytest.raises(ValueError, match="--enable-lora"):
        llm.generate("a", GREEDY, lora_request=LoRARequest("x", 1, "nowhere"))
    with LLM(enable_lora=True, kv_cache_memory_bytes="8M") as other, pytest.raises(ValueError, match="nowhere"):
        other.generate("a", GREEDY, lora_request=LoRARequest("x", 1, "nowhere"))


def test_metrics_count_what_the_engine_has_done() -> None:
    from quire.metrics import Counter, Gauge, Histogram, Vector

    draft = {"method": "ngram", "num_speculative_tokens": 3}
    with LLM(kv_cache_memory_bytes="8M", speculative_config=draft) as llm:
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        llm.generate(["The capital of France is"] * 2, params, use_tqdm=False)
        found = {metric.name: metric for metric in llm.get_metrics()}
    assert all(metric.labels["model_name"] == "quire-demo" for metric in found.values() if "model_name" in metric.labels)
    tokens, running, success = (found[f"vllm:{name}"] for name in ("generation_tokens", "num_requests_running", "request_success"))
    assert isinstance(tokens, Counter) and tokens.value == 400
    assert isinstance(running, Gauge) and running.value == 0 and isinstance(success, Counter)
    prompts = found["vllm:request_prompt_tokens"]
    assert isinstance(prompts, Histogram) and prompts.count == 2 and prompts.buckets["+Inf"] == 2 and prompts.sum > 2
    by_position = found["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert isinstance(by_position, Vector) and 1 <= len(by_position.values) <= 3
    accepted = found["vllm:spec_decode_num_accepted_tokens"]
    assert isinstance(accepted, Counter) and sum(by_position.values) == accepted.value > 0


def test_every_name_of_vllm_passes_where_it_asks_for_nothing() -> None:
    from quire.settings import OF_VLLM, Settings

    for name in OF_VLLM:
        Settings("LLM()", {name: None})
    # Defaults of vLLM that are neither empty nor "auto".
    defaults = {"data_parallel_size": 1, "nnodes": 1, "master_addr": "127.0.0.1", "tokenizer_mode": "auto", "model_impl": "auto",
                "mm_processor_cache_gb": 4, "logprobs_mode": "raw_logprobs", "offload_num_in_group": 1, "max_logprobs": 20}  # fmt: skip
    Settings("LLM()", defaults)
    for wrong in ({"data_parallel_size": 2}, {"logits_processors": ["x"]}, {"runner": "draft"}, {"worker_cls": "x"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: found .*, (expected|which this engine does not have)"):
            Settings("LLM()", wrong)
