"""Threads, signals, forks and memory."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import quire
from quire import LLM, SamplingParams

#: Takes seconds, far longer than a test waits.
LONG = SamplingParams(max_tokens=None, ignore_eos=True, seed=1)


def python(code: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Runs a program in a process of its own."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, check=False)


def test_python_threads_run_while_the_engine_computes(llm: LLM) -> None:
    done, counted = threading.Event(), 0

    def generate() -> None:
        llm.generate(["a", "b"], SamplingParams(max_tokens=300, ignore_eos=True, seed=1), use_tqdm=False)
        done.set()

    thread = threading.Thread(target=generate)
    thread.start()
    while not done.is_set():
        time.sleep(0.001)
        counted += 1
    thread.join()
    assert counted > 20


def test_threads_may_call_at_once(llm: LLM) -> None:
    params = SamplingParams(seed=4, max_tokens=20)
    expected = llm.generate("Once upon", params, use_tqdm=False)[0].outputs[0].token_ids
    found: list[object] = []

    def generate() -> None:
        found.extend(llm.generate("Once upon", params, use_tqdm=False)[0].outputs[0].token_ids for _ in range(3))

    threads = [threading.Thread(target=generate) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [expected] * 24


def test_control_c_ends_a_generation_soon_and_the_engine_stays_usable(llm: LLM) -> None:
    # Enough work for many times the wait.
    prompts = ["a", "b", "c", "d"] * 64
    # A process that a shell has started in the background ignores the signal otherwise.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted() -> float:
        """Seconds from the signal to the exception."""
        sent: list[float] = []

        def interrupt() -> None:
            while llm._handle.engine.num_unfinished() < len(prompts):
                time.sleep(0.01)
            time.sleep(0.2)
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, LONG, use_tqdm=False)
        late = time.monotonic() - sent[0]
        thread.join()
        deadline = time.monotonic() + 5
        while llm._handle.engine.num_unfinished() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert llm._handle.engine.num_unfinished() == 0
        return late

    # Another process may hold the processor once.
    late = min(interrupted() for _ in range(3))
    assert late < 0.1, f"{late:.3f} s after the signal"
    assert len(llm.generate("a", SamplingParams(max_tokens=3, seed=1), use_tqdm=False)[0].outputs[0].token_ids) == 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_engine_raises_after_a_fork_and_the_parent_keeps_it() -> None:
    # In a process of its own: a fork of pytest would run its hooks twice.
    code = """
import os, sys
from quire import LLM, SamplingParams
llm = LLM(kv_cache_memory_bytes="8M")
params = SamplingParams(max_tokens=3, seed=1)
before = llm.generate("a", params, use_tqdm=False)[0].outputs[0].token_ids
child = os.fork()
if child == 0:
    try:
        llm.generate("a", params, use_tqdm=False)
    except RuntimeError as error:
        print("child:", error, flush=True)
    # The interpreter ends as usual, with the engine of the parent among its objects.
    sys.exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
assert llm.generate("a", params, use_tqdm=False)[0].outputs[0].token_ids == before
print("parent: well")
"""
    ended = python(code)
    assert ended.returncode == 0, ended.stderr
    assert "child: found an engine of process" in ended.stdout and "after a fork" in ended.stdout
    assert "parent: well" in ended.stdout


def _spawned(queue: multiprocessing.Queue[object]) -> None:
    with LLM(kv_cache_memory_bytes="8M") as llm:
        queue.put(list(llm.generate("a", SamplingParams(max_tokens=3, seed=1), use_tqdm=False)[0].outputs[0].token_ids))


def test_a_spawned_process_has_an_engine_of_its_own(llm: LLM) -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_spawned, args=(queue,))
    process.start()
    found = queue.get(timeout=60)
    process.join(30)
    assert process.exitcode == 0
    expected = llm.generate("a", SamplingParams(max_tokens=3, seed=1), use_tqdm=False)[0].outputs[0].token_ids
    assert found == list(expected)


def _resident() -> int:
    """Resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_closing_returns_the_memory() -> None:
    size, params = 48 << 20, SamplingParams(max_tokens=4, ignore_eos=True, seed=1)

    def use(turn: int) -> tuple[int, int]:
        with LLM(kv_cache_memory_bytes=size) as llm:
            # Different prompts, which fill half of the cache.
            llm.generate([f"{turn} {at} a " * 150 for at in range(25)], params, use_tqdm=False)
            full = _resident()
        gc.collect()
        return full, _resident()

    _, before = use(0)
    full, after = use(1)
    assert full - before > size // 3, f"{before >> 20} MiB, then {full >> 20}"
    assert after - before < size // 6, f"{before >> 20} MiB, then {full >> 20}, then {after >> 20}"


def test_an_engine_that_is_not_closed_ends_with_the_interpreter() -> None:
    code = """
import threading
from quire import LLM, SamplingParams
llm = LLM(kv_cache_memory_bytes="8M")
work = lambda: llm.generate("a", SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)
threading.Thread(target=work, daemon=True).start()
print("done")
"""
    ended = python(code)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


def test_the_program_is_part_of_the_package() -> None:
    command = [sys.executable, "-m", "quire"]
    ended = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert ended.stdout == f"quire {quire.__version__}\n"
    prompt = ["generate", "-p", "The capital of France is", "--max-tokens", "4"]
    ended = subprocess.run([*command, *prompt], capture_output=True, text=True, check=True)
    assert ended.stdout == " Paris.\n"
    ended = subprocess.run([*command, "serve", "--port", "x"], capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and ended.stderr.startswith("quire: invalid value 'x' for '--port <PORT>'")


def test_control_c_stops_the_program() -> None:
    command = [sys.executable, "-m", "quire", "serve", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "listening" in line:
            break
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=30)
    assert process.returncode == 0 and "stopping" in rest


def test_a_server_of_this_process_stops_and_its_port_is_free(llm: LLM) -> None:
    import json
    import urllib.request

    with quire.serve(port=0, kv_cache_memory_bytes="8M", served_model_name="mine") as server:
        with urllib.request.urlopen(server.url + "/v1/models") as response:
            assert json.load(response)["data"][0]["id"] == "mine"
        assert not server.wait(0.05)
        with pytest.raises(RuntimeError, match=f"--port {server.port}"):
            quire.serve(port=server.port, kv_cache_memory_bytes="8M")
        port = server.port
    assert server.wait(0)
    with quire.serve(port=port, kv_cache_memory_bytes="8M") as again:
        assert again.port == port
    with pytest.raises(TypeError, match=r"serve\(\) got an unexpected keyword argument 'prot'; did you mean 'port'"):
        quire.serve(prot=1)


def test_a_request_of_an_engine_that_ends_raises() -> None:
    llm = LLM(kv_cache_memory_bytes="8M")
    raised: list[BaseException] = []

    def generate() -> None:
        try:
            llm.generate(["a"] * 64, LONG, use_tqdm=False)
        except quire.EngineDeadError as error:
            raised.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    deadline = time.monotonic() + 30
    while llm._handle.engine.num_unfinished() < 64 and time.monotonic() < deadline:
        time.sleep(0.01)
    # The call has its stream after all are submitted.
    time.sleep(0.2)
    llm.close()
    thread.join(30)
    assert raised and "stopped before the response was complete" in str(raised[0])
