"""LoRA adapters through Python: written here in PEFT's files, for the model that is built in."""

from __future__ import annotations

import asyncio
import json
import random
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM, AsyncLLM, LoRARequest, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12)
MODEL = json.loads((Path(__file__).parents[2] / "models/demo/config.json").read_text())


def write(folder: Path, seed: int, rank: int = 2) -> Path:
    """An adapter for the output projections of attention."""
    numbers, header, data = random.Random(seed), {}, b""
    hidden = MODEL["hidden_size"]
    for layer in range(MODEL["num_hidden_layers"]):
        for factor, shape in (("lora_A", [rank, hidden]), ("lora_B", [hidden, rank])):
            values = array("f", (numbers.uniform(-1, 1) for _ in range(shape[0] * shape[1])))
            name = f"base_model.model.model.layers.{layer}.self_attn.o_proj.{factor}.weight"
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + 4 * len(values)]}
            data += values.tobytes()
    folder.mkdir()
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    folder = tmp_path_factory.mktemp("adapters")
    return [LoRARequest(f"a{seed}", seed, str(write(folder / f"a{seed}", seed))) for seed in (1, 2)]


@pytest.fixture(scope="module")
def engine() -> Iterator[LLM]:
    with LLM(enable_lora=True, max_loras=2, kv_cache_memory_bytes="16M") as engine:
        yield engine


def tokens(engine: LLM, adapter: LoRARequest | None) -> list[int]:
    output = engine.generate("The capital of France is", GREEDY, lora_request=adapter, use_tqdm=False)[0]
    assert output.lora_request is adapter and output.outputs[0].lora_request is adapter
    return list(output.outputs[0].token_ids)


def test_an_adapter_is_loaded_by_its_first_request_and_changes_the_output(engine: LLM, adapters: list[LoRARequest]) -> None:
    plain, first, second = (tokens(engine, adapter) for adapter in (None, *adapters))
    assert plain != first != second != plain
    prompts = ["The capital of France is"] * 3
    together = engine.generate(prompts, GREEDY, lora_request=[None, *adapters], use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in together] == [plain, first, second]


def test_an_adapter_loaded_in_place_replaces_the_one_of_its_name(engine: LLM, adapters: list[LoRARequest]) -> None:
    first, second = (tokens(engine, adapter) for adapter in adapters)
    name = LoRARequest("name", 3, adapters[0].lora_path)
    assert tokens(engine, name) == first
    # The name is the identity: another path alone changes nothing.
    assert tokens(engine, LoRARequest("name", 3, adapters[1].lora_path)) == first
    assert tokens(engine, LoRARequest("name", 3, adapters[1].lora_path, load_inplace=True)) == second


def test_wrong_adapters_raise(engine: LLM, adapters: list[LoRARequest], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the name of the model"):
        tokens(engine, LoRARequest("quire-demo", 1, adapters[0].lora_path))
    with pytest.raises(ValueError, match="lora_request: found 2 items for 1 prompts"):
        engine.generate("a", GREEDY, lora_request=adapters)
    big = LoRARequest("big", 9, str(write(tmp_path / "big", 1, rank=32)))
    with pytest.raises(ValueError, match="--max-lora-rank"):
        tokens(engine, big)
    with pytest.raises(TypeError, match="lora_request"):
        engine.generate("a", GREEDY, lora_request="a")  # type: ignore[arg-type]


def test_adapters_come_and_go_in_an_asynchronous_engine(engine: LLM, adapters: list[LoRARequest]) -> None:
    expected = tokens(engine, adapters[0])

    async def main() -> None:
        async with AsyncLLM(enable_lora=True, kv_cache_memory_bytes="8M") as other:
            assert await other.add_lora(adapters[0]) and not await other.add_lora(adapters[0])
            assert await other.list_loras() == {1} and await other.pin_lora(1) and not await other.pin_lora(2)
            last = None
            async for last in other.generate("The capital of France is", GREEDY, lora_request=adapters[0]):
                pass
            assert last is not None and list(last.outputs[0].token_ids) == expected
            assert await other.remove_lora(1) and not await other.remove_lora(1)
            assert await other.list_loras() == set()

    asyncio.run(main())
