"""`AsyncLLM`: streams, cancellation, event loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import quire
from quire import LLM, AsyncLLM, RequestOutputKind, SamplingParams

TEXT = "The capital of France is"
#: Runs until it is cancelled, as far as a test is concerned: many times as long as `drained` waits.
LONG = SamplingParams(n=32, max_tokens=None, ignore_eos=True, seed=1)


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    engine = AsyncLLM()
    yield engine
    engine.shutdown()


async def drained(engine: AsyncLLM) -> int:
    """Number of the engine's requests once cancelled ones are gone."""
    for _ in range(30):
        if engine._handle.engine.num_unfinished() == 0:
            return 0
        await asyncio.sleep(0.01)
    return engine._handle.engine.num_unfinished()


def test_each_kind_of_output_adds_up_to_the_offline_output(engine: AsyncLLM, llm: LLM) -> None:
    given: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "logprobs": 2, "prompt_logprobs": 1}
    (offline,) = llm.generate(TEXT, SamplingParams(**given), use_tqdm=False)
    expected = offline.outputs[0]

    async def run(kind: RequestOutputKind) -> list[quire.RequestOutput]:
        return [output async for output in engine.generate(TEXT, SamplingParams(output_kind=kind, **given))]

    cumulative, delta, final = (asyncio.run(run(kind)) for kind in RequestOutputKind)
    for outputs in (cumulative, final):
        last = outputs[-1]
        assert last.finished and last.outputs[0].text == expected.text and last.outputs[0].logprobs == expected.logprobs
        assert last.outputs[0].cumulative_logprob == pytest.approx(expected.cumulative_logprob)
        assert last.prompt_logprobs == offline.prompt_logprobs and last.prompt_token_ids == offline.prompt_token_ids
    assert len(final) == 1
    lengths = [len(output.outputs[0].token_ids) for output in cumulative if output.outputs]
    assert lengths == sorted(lengths) and lengths[-1] == 20
    pieces = [output.outputs[0] for output in delta if output.outputs]
    assert "".join(piece.text for piece in pieces) == expected.text
    assert [token for piece in pieces for token in piece.token_ids] == list(expected.token_ids)
    assert [position for piece in pieces for position in piece.logprobs or []] == expected.logprobs
    assert [output.finished for output in delta] == [False] * (len(delta) - 1) + [True]
    assert sum(output.prompt_logprobs is not None for output in delta) == 1


def test_whatever_ends_an_iteration_early_cancels_the_request(engine: AsyncLLM) -> None:
    async def main() -> None:
        async for _ in engine.generate(TEXT, LONG):
            break
        assert await drained(engine) == 0

        begun = asyncio.Event()

        async def read() -> None:
            async for _ in engine.generate(TEXT, LONG):
                begun.set()

        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await drained(engine) == 0

        stream = engine.generate(TEXT, LONG)
        await anext(stream)
        await stream.aclose()
        assert await drained(engine) == 0 and engine.get_num_unfinished_requests() == 0

    asyncio.run(main())


def test_abort_ends_an_iteration_with_what_there_is(engine: AsyncLLM) -> None:
    async def main() -> None:
        outputs = []
        async for output in engine.generate(TEXT, LONG, "mine"):
            outputs.append(output)
            if len(outputs) == 1:
                with pytest.raises(ValueError, match="request_id: found 'mine', which is running"):
                    await anext(engine.generate(TEXT, LONG, "mine"))
            if len(outputs) == 3:
                await engine.abort("mine")
        last = outputs[-1]
        assert last.finished and len(last.outputs) == 32 and last.request_id == "mine"
        assert all(one.finish_reason == "abort" for one in last.outputs)
        before = outputs[-2].outputs[0]
        assert len(last.outputs[before.index].token_ids) >= len(before.token_ids) > 0
        await engine.abort(["mine", "another"])
        assert await drained(engine) == 0

    asyncio.run(main())


def test_many_requests_in_many_event_loops_share_the_engine(engine: AsyncLLM, llm: LLM) -> None:
    params = SamplingParams(max_tokens=16, seed=5)
    (expected,) = llm.generate(TEXT, params, use_tqdm=False)
    found: list[list[int]] = []

    async def one() -> list[int]:
        last = None
        async for last in engine.generate(TEXT, params):
            pass
        assert last is not None
        return list(last.outputs[0].token_ids)

    async def many() -> list[list[int]]:
        return await asyncio.gather(*(one() for _ in range(8)))

    threads = [threading.Thread(target=lambda: found.extend(asyncio.run(many()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [list(expected.outputs[0].token_ids)] * 32


def test_the_event_loop_runs_while_the_engine_computes(engine: AsyncLLM) -> None:
    async def main() -> tuple[int, int]:
        ticks = steps = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1

        task = asyncio.create_task(tick())
        async for _ in engine.generate(TEXT, SamplingParams(max_tokens=300, ignore_eos=True, seed=1)):
            steps += 1
        task.cancel()
        return ticks, steps

    ticks, steps = asyncio.run(main())
    assert ticks > 20 and steps > 20


def test_several_sequences_are_one_request(engine: AsyncLLM) -> None:
    async def main() -> dict[int, str | None]:
        ended: dict[int, str | None] = {}
        async for output in engine.generate(TEXT, SamplingParams(n=3, seed=2, max_tokens=9)):
            for one in output.outputs:
                if one.finished():
                    ended[one.index] = one.finish_reason
        assert output.finished
        return ended

    assert asyncio.run(main()).keys() == {0, 1, 2}


def test_errors_and_embeddings(engine: AsyncLLM, llm: LLM) -> None:
    async def first(stream: Any) -> Any:
        return await anext(stream)

    with pytest.raises(ValueError, match="allowed_token_ids"):
        asyncio.run(first(engine.generate(TEXT, SamplingParams(allowed_token_ids=[10**6]))))
    with pytest.raises(TypeError, match="sampling_params"):
        asyncio.run(first(engine.generate(TEXT, {"n": 1})))  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="AsyncLLM.pause_generation"):
        engine.pause_generation  # noqa: B018
    found = asyncio.run(first(engine.encode(TEXT, request_id="e")))
    assert found.outputs.data == llm.embed(TEXT, use_tqdm=False)[0].outputs.array and found.request_id == "e"
    asyncio.run(engine.check_health())
    assert engine.is_running and not engine.errored


def test_after_shutdown_requests_raise_and_running_ones_end() -> None:
    engine = AsyncLLM.from_engine_args(quire.AsyncEngineArgs(kv_cache_memory_bytes="8M"))

    async def main() -> None:
        params = LONG.clone()
        params.n = 1
        stream = engine.generate(TEXT, params)
        await anext(stream)
        engine.shutdown()
        with pytest.raises(quire.EngineDeadError):
            async for _ in stream:
                pass
        with pytest.raises(quire.EngineDeadError):
            await anext(engine.generate(TEXT, LONG))
        with pytest.raises(quire.EngineDeadError):
            await engine.check_health()
        engine.shutdown()

    asyncio.run(main())


def test_an_abort_while_a_request_is_submitted_ends_it(engine: AsyncLLM) -> None:
    async def main() -> None:
        stream = engine.generate("a " * 500, LONG, "early")
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await engine.abort("early")
        output = await first
        while not output.finished:
            output = await anext(stream)
        assert output.outputs[0].finish_reason == "abort"
        assert await drained(engine) == 0

    asyncio.run(main())


def test_calls_work_in_a_running_event_loop_as_in_a_notebook(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, seed=9)

    async def cells() -> None:
        # A cell that blocks, then cells that share the loop.
        (expected,) = llm.generate(TEXT, params, use_tqdm=False)
        with LLM(kv_cache_memory_bytes="8M") as other:
            assert other.generate(TEXT, params, use_tqdm=False)[0].outputs[0].token_ids == expected.outputs[0].token_ids
        engine = AsyncLLM(kv_cache_memory_bytes="8M")
        for _ in range(2):
            last = None
            async for last in engine.generate(TEXT, params):
                pass
            assert last is not None and last.outputs[0].token_ids == expected.outputs[0].token_ids
        engine.shutdown()

    asyncio.run(cells())


def test_an_engine_sleeps_once_its_requests_have_ended(engine: AsyncLLM) -> None:
    async def main() -> None:
        async def one() -> None:
            async for _ in engine.generate(TEXT, SamplingParams(max_tokens=40, ignore_eos=True)):
                pass

        tasks = [asyncio.create_task(one()) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await engine.wait_for_requests_to_drain(0)
        await engine.wait_for_requests_to_drain()
        await asyncio.gather(*tasks)
        await engine.sleep(level=1)
        assert await engine.is_sleeping()
        await engine.wake_up()
        assert not await engine.is_sleeping()
        await one()
        with pytest.raises(ValueError, match="data_parallel_rank"):
            await anext(engine.generate(TEXT, data_parallel_rank=1))

    asyncio.run(main())
