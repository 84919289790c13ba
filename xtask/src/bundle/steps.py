"""The steps of a run: what each does, and the lines that it writes."""

from __future__ import annotations

import argparse
import concurrent.futures
import http.client
import json
import os
import pathlib
import re
import shutil
import socket
import sys
import tarfile
import tempfile
import threading
import time
import urllib.request
from typing import IO, Any, Iterable, Optional

import environment
import page
import plan
from process import GRACE, Clock, Ended, Processes, Results, read_lines, refuse

HERE = pathlib.Path(__file__).resolve().parent
# Free bytes of /dev/shm for the weights of the largest model and the programs.
WEIGHTS_BYTES = 25_000_000_000


def work_folder() -> pathlib.Path:
    """Returns a folder of this user for programs and weights: in TMPDIR if it is set, else in memory if there is enough."""
    memory = pathlib.Path("/dev/shm")
    enough = "TMPDIR" not in os.environ and memory.is_dir() and shutil.disk_usage(memory).free > WEIGHTS_BYTES
    folder = (memory if enough else pathlib.Path(tempfile.gettempdir())) / f"quire-bundle-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            refuse(f"{folder}: found a folder of another user; remove it, or set TMPDIR", 1)
        for name in ("bin", "kernels", "peers"):
            (folder / name).mkdir(exist_ok=True)
    except OSError as error:
        refuse(f"{folder}: {error.strerror}; set TMPDIR to a writable folder", 1)
    return folder


def unpack(work: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns the programs of the bundle by name: those in `bin/`, and those in `bin.tar.xz`, which it unpacks as it does kernels
    and peers."""
    found = {file.name: file for file in (HERE / "bin").glob("*")}
    try:
        import lzma
    except ImportError:
        refuse("found a python3 without the module lzma, which unpacks the programs; install it, or use another python3", 1)
    try:
        for folder in ("bin", "kernels"):
            # All in one, because programs have much in common.
            if (HERE / f"{folder}.tar.xz").exists():
                with tarfile.open(HERE / f"{folder}.tar.xz", "r|xz") as archive:
                    for member in archive:
                        content = archive.extractfile(member)
                        if content is not None:
                            name = pathlib.PurePath(member.name).name
                            made = put(work / folder / name, content)
                            if folder == "bin":
                                found[name] = made
        for file in (HERE / "peers").glob("*"):
            with lzma.open(file) if file.suffix == ".xz" else open(file, "rb") as content:
                put(work / "peers" / file.name.removesuffix(".xz"), content)
    except (OSError, EOFError, lzma.LZMAError, tarfile.TarError) as error:
        refuse(f"{HERE} cannot be unpacked to {work}: {error}; copy the bundle again, or set TMPDIR to a folder with more space", 1)
    return found


def put(file: pathlib.Path, content: IO[bytes]) -> pathlib.Path:
    """Replaces a program, of which an old one may still run."""
    part = file.with_name(f"{file.name}.{os.getpid()}")
    with open(part, "wb") as made:
        shutil.copyfileobj(content, made)
    part.chmod(0o755)
    return part.replace(file)


class Run:
    """A run: its options, what it has found, and a method for each `does` of a step."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.plan = [step for step in plan.RUNS[options.run] if options.steps is None or step.name in options.steps]
        self.short = options.short or options.device == "cuda-sim"
        seconds = options.limit or plan.SECONDS[options.run]
        self.scale = seconds / plan.SECONDS[options.run]
        self.clock = Clock(seconds)
        self.out: pathlib.Path = options.out
        earlier = read_results(self.out) if options.resume else []
        outcomes = {(line.get("program") or line.get("step"), line.get("test") or line.get("part")): line.get("result")
                    for line in earlier if line.get("kind") in ("test", "part")}
        self.passed = {key for key, result in outcomes.items() if result == "ok"}
        self.results = Results(self.out, self.clock)
        self.work = work_folder()
        self.processes = Processes(dict(os.environ), self.clock)
        kernels = next(filter(pathlib.Path.is_dir, (HERE / "kernels", self.work / "kernels")))
        self.processes.environment.update(
            QUIRE_BUNDLE=str(HERE), QUIRE_TEST_DEVICE=options.device, QUIRE_KERNELS_DIR=str(options.kernels or kernels), RUST_BACKTRACE="1",
            CARGO_TARGET_DIR=str(self.work / "target"), HF_HUB_OFFLINE="1", PYTHONUNBUFFERED="1", PYTHONDONTWRITEBYTECODE="1")
        self.programs = unpack(self.work)
        self.found: dict[str, Any] = {}
        # Why the device does not open.
        self.unopened: Optional[str] = None
        self.operations: Optional[set[str]] = None
        self.failures = 0

    def stop(self, *_: Any) -> None:
        self.processes.stop()

    def all(self) -> int:
        """Runs all steps and returns the exit code."""
        self.describe()
        beside: list[threading.Thread] = []
        for step in self.plan:
            if step.name in plan.BESIDE:
                beside.append(threading.Thread(target=self.step, args=(step,)))
                beside[-1].start()
                continue
            if step.does != "tests":
                for thread in beside:
                    thread.join()
            self.step(step)
        for thread in beside:
            thread.join()
        self.results.add("end", stopped=self.clock.stopped, failures=self.failures)
        page.write(self.out)
        self.results.say(f"{self.failures} failures; {self.out / 'page.md'}")
        return 1 if self.failures or self.clock.stopped else 0

    def describe(self) -> None:
        self.found = environment.describe(self.processes)
        bundle = HERE / "bundle.txt"
        text = bundle.read_text().splitlines()[:3] if bundle.is_file() else []
        self.results.add("environment", run=self.options.run, device=self.options.device, short=self.short, bundle=text,
                         date=time.strftime("%Y-%m-%d", time.gmtime()), **self.found)
        self.results.say(f"run {self.options.run} on {self.options.device}: {'; '.join(self.found['cards']) or 'no card'}")
        parts = [[step.name, part] for step in self.plan for part in step.names()]
        self.results.add("plan", run=self.options.run, parts=parts)
        for what, why in environment.missing(self.found, self.options.device):
            self.results.add("missing", what=what, without=why)
            self.results.say(f"found no {what}; not run without it: {why}")

    def lacks(self, need: str) -> Optional[str]:
        """Returns why something that a step needs is not there."""
        if need == "device":
            return self.unopened
        if need == "products" and self.options.device == "cuda" and not self.found["libraries"]["cuBLASLt"]:
            return "found no cuBLASLt (libcublasLt.so.13); install cuBLAS of CUDA 13"
        if need == "tree" and self.options.tree is None:
            return f"found no checkout above {HERE}, which has the reference cases; name one with --tree"
        if need == "torch" and not self.found["modules"]["torch"]:
            return "found no module torch in this python3; pip install torch"
        if need == "model" and self.model() is None:
            return "found no weights; the step weights makes them"
        if need == "card" and self.options.device != "cuda":
            return "needs a GPU"
        if need == "ncu" and (self.options.device != "cuda" or not self.found["tools"]["ncu"]):
            return "found no ncu; install Nsight Compute"
        return None

    def step(self, step: plan.Step) -> None:
        budget = max(step.seconds * self.scale, plan.SHORTEST)
        lack = next((why for why in map(self.lacks, step.needs) if why), None)
        # A step with too little time would only take it from the others.
        if lack or self.clock.left() < plan.LEAST * budget:
            for part in step.names():
                self.record(step, part, "not run" if lack else "no time", reason=lack)
            return
        end = time.monotonic() + min(budget, self.clock.left())
        try:
            getattr(self, step.does)(step, end)
        except Exception as error:  # of any kind: the other steps still run
            self.record(step, step.name, "failed", reason=f"run.py: {error!r}")

    def failed(self, result: str) -> None:
        with self.results.lock:
            self.failures += result in ("failed", "limit", "no test")

    def record(self, step: plan.Step, part: str, result: str, **fields: Any) -> None:
        self.failed(result)
        self.results.add("part", step=step.name, part=part, result=result, **fields)
        why = fields.get("reason")
        self.results.say(f"{part}: {result}{f' ({why})' if why else ''} {fields.get('seconds', '')}")

    def part(self, step: plan.Step, part: str, command: list[str], end: float) -> Optional[Ended]:
        """Runs a part until `end`. Returns `None` if it passed earlier, or had no time."""
        # A new machine has no weights, whatever passed on another.
        if (step.name, part) in self.passed and step.does not in ("roofline", "weights"):
            return None
        left = min(end - time.monotonic(), self.clock.left())
        if left < 0.5:
            self.record(step, part, "no time")
            return None
        ended = self.processes.run(command, left)
        result = "no time" if self.clock.stopped and ended.code != 0 else ended.result()
        reason = None if result == "ok" else ended.last_line()[:300]
        self.record(step, part, result, seconds=ended.seconds, code=ended.code, reason=reason)
        self.results.log(f"{part}: {result} {ended.code} {' '.join(command)}", ended.output)
        return ended

    def quire(self, *words: str) -> list[str]:
        return [str(self.programs.get("quire", HERE / "bin/quire")), *words]

    def roofline(self, step: plan.Step, end: float) -> None:
        command = self.quire("bench", "roofline", "--device", self.options.device, "--json", str(self.out / "roofline.json"))
        ended = self.part(step, step.name, command, end)
        if ended is not None and ended.result() != "ok":
            self.unopened = f"the device does not open: {ended.last_line()[:300]}"

    def model_name(self) -> str:
        return "tiny" if self.short else "8b"

    def model(self) -> Optional[pathlib.Path]:
        name = self.model_name()
        return next((base / name for base in (self.work, HERE / "shapes") if (base / name / "ready").exists()), None)

    def weights(self, step: plan.Step, end: float) -> None:
        if self.model() is not None:
            self.record(step, step.name, "ok", reason="made earlier")
            return
        if self.lacks("torch"):
            self.record(step, step.name, "not run", reason=self.lacks("torch"))
            return
        command = [sys.executable, str(HERE / "weights.py"), str(HERE / "shapes"), str(self.work), self.model_name()]
        self.part(step, step.name, command, end)

    # Tests

    def tests(self, step: plan.Step, end: float) -> None:
        begun = time.monotonic()
        jobs = self.options.jobs or (plan.JOBS if self.options.device == "cuda" else os.cpu_count() or 1)
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            programs = list(dict.fromkeys(program for program, _, _ in plan.TESTS))
            lists = dict(zip(programs, pool.map(lambda program: self.list_tests(step, program, end), programs)))
            listed = {program: tests for program, tests in lists.items() if tests is not None}
            chosen = plan.choose(listed, self.short, self.options.tests)
            for program in listed.keys() - {program for program, _ in chosen}:
                if not self.options.tests:
                    self.record(step, program, "no test", reason="it lists no test of the table in plan.py; correct the table")
            self.results.add("tests", count=len(chosen))
            todo = [test for test in chosen if test not in self.passed]
            self.results.say(f"{len(chosen)} tests, {len(todo)} of them to run")
            outcomes = pool.map(lambda test: self.test(end, *test), todo)
            failed = [test for test, result in zip(todo, outcomes) if result in ("failed", "limit")]
            tool = self.found["tools"]["compute-sanitizer"]
            if failed and tool and self.options.device == "cuda":
                again = [(name, *test) for name in plan.SANITIZERS for test in failed]
                list(pool.map(lambda job: self.sanitize(end, tool, *job), again))
        self.record(step, step.name, "ok", seconds=round(time.monotonic() - begun, 1))
        tally = {result: sum(line["result"] == result for line in latest_tests(self.out)) for result in page.RESULTS}
        self.results.say(", ".join(f"{count} {result}" for result, count in tally.items() if count))

    def list_tests(self, step: plan.Step, program: str, end: float) -> Optional[list[str]]:
        file = self.programs.get(program)
        if file is None:
            self.record(step, program, "not run", reason="the bundle has no such program")
            return None
        ended = self.processes.run([str(file), "--list"], min(20.0, end - time.monotonic()))
        if ended.code != 0:
            self.record(step, program, ended.result(), code=ended.code, reason=ended.last_line()[:300])
            return None
        return [line[:-6] for line in ended.output.splitlines() if line.endswith(": test")]

    def run_test(self, before: list[str], program: str, test: str, end: float, most: float) -> Optional[Ended]:
        left = min(end - time.monotonic(), self.clock.left(), most)
        if left < 0.5:
            return None
        crate = self.options.tree / program
        # As cargo sets them: tests find the checkout by them.
        more = {"CARGO_MANIFEST_DIR": str(crate), "CARGO_PKG_NAME": program}
        command = [*before, str(self.programs[program]), "--exact", test, "--nocapture", "--test-threads=1"]
        ended = self.processes.run(command, left, crate if crate.is_dir() else self.options.tree, more)
        return None if self.clock.stopped and ended.code != 0 else ended

    def test(self, end: float, program: str, test: str) -> str:
        ended = self.run_test([], program, test, end, max(1.0, plan.TEST_SECONDS * self.scale))
        if ended is None:
            self.results.add("test", program=program, test=test, result="no time")
            return "no time"
        not_run = re.findall(r"NOT RUN: (.*)", ended.output)
        result = ended.result()
        if result == "ok" and "1 passed" not in ended.output:
            result = "no test"
        # A test that runs on every device reports the others.
        elif result == "ok" and any(" names another device than " not in line for line in not_run):
            result = "not run"
        bad = result not in ("ok", "not run")
        looks = looks_of(ended.output)
        self.results.add("test", program=program, test=test, result=result, seconds=ended.seconds, code=ended.code, not_run=not_run,
                         looks=looks, tail=ended.tail() if bad else None)
        self.failed(result)
        if bad:
            self.results.say(f"{program} {test}: {result} (code {ended.code}, {ended.seconds} s, {len(looks)} looks failed)")
            self.results.log(f"{program} {test}: {result}, code {ended.code}", ended.output)
        return result

    def sanitize(self, end: float, tool: str, name: str, program: str, test: str) -> None:
        before = [tool, "--tool", name, "--error-exitcode", "9", "--print-limit", "20"]
        ended = self.run_test(before, program, test, end, self.clock.left())
        line: dict[str, Any] = {"tool": name, "program": program, "test": test}
        if ended is None:
            self.results.add("sanitizer", **line, result="no time")
            return
        summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", ended.output)
        clean = bool(summary) and all(text.startswith("0 ") for text in summary)
        result = "limit" if ended.reached_limit else "ok" if clean else "failed"
        self.results.add("sanitizer", **line, result=result, seconds=ended.seconds, code=ended.code, summary=summary,
                         tail=None if clean else ended.tail())
        self.results.log(f"{name} {program} {test}: {result}", ended.output)

    # Measurements

    def has_operation(self, words: list[str]) -> bool:
        if self.operations is None:
            text = self.processes.run(self.quire("bench", "kernels", "--help"), 5).output
            listed = re.search(r"Operations: ([a-z0-9_, ]+)", text)
            self.operations = set(re.findall(r"\w+", listed.group(1))) if listed else set()
        return not self.operations or words[words.index("--op") + 1] in self.operations

    def cells(self, step: plan.Step, end: float) -> None:
        short, more = (plan.SHORT_CELLS, plan.SHORT_CELLS_MORE) if self.short else ({}, "")
        for part, text in step.parts:
            words = plan.words(text, short, more)
            if self.has_operation(words):
                file = str(self.out / f"{part}.jsonl")
                self.part(step, part, self.quire("bench", "kernels", "--device", self.options.device, *words, "--json", file), end)
            else:
                self.record(step, part, "not run", reason="quire bench kernels has no such --op")

    def engine_words(self, text: str) -> list[str]:
        return ["--device", self.options.device, *plan.words(text, plan.SHORT_ENGINE if self.short else {})]

    def sweep(self, step: plan.Step, end: float) -> None:
        for part, text in step.parts:
            file = str(self.out / f"{part}.jsonl")
            self.part(step, part, self.quire("bench", "sweep", str(self.model()), *self.engine_words(text), "--output-json", file), end)

    def start(self, step: plan.Step, end: float) -> None:
        """Times a process from its start to its first token, with the checkpoint in memory."""
        for part, text in step.parts:
            words = ["generate", str(self.model()), "--prompt", "a", "--max-tokens", "1", *self.engine_words(text)]
            for _ in range(plan.STARTS):
                ended = self.part(step, part, self.quire(*words), end)
                if ended is None or ended.code != 0:
                    break
                self.results.add("start", seconds=ended.seconds)

    def http(self, step: plan.Step, end: float) -> None:
        (part, text), = step.parts
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        log = self.out / "server.txt"
        begun = time.monotonic()
        words = ["serve", str(self.model()), "--host", "127.0.0.1", "--port", port, *self.engine_words(text)]
        with open(log, "wb") as output:
            server = self.processes.start(self.quire(*words), output)
        try:
            while not answers(port) and server.poll() is None and time.monotonic() < end and not self.clock.stopped:
                time.sleep(0.05)
            seconds = round(time.monotonic() - begun, 2)
            if not answers(port):
                said = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
                result = "failed" if server.poll() is not None else "limit"
                self.record(step, part, result, seconds=seconds, code=server.poll(), reason=said[0][:300])
                return
            self.record(step, part, "ok", seconds=seconds)
            for requests, given, wanted in plan.SHORT_LOADS if self.short else plan.LOADS:
                file = self.work / "http.json"
                ended = self.part(step, f"http-{requests}", self.quire(
                    "bench", "serve", "--base-url", f"http://127.0.0.1:{port}", "--num-prompts", str(requests), "--random-vocab-size",
                    "1000" if self.short else "100000", "--random-input-len", str(given), "--random-output-len", str(wanted),
                    "--ignore-eos", "--json", str(file)), end)
                if ended is not None and ended.code == 0:
                    figures = {name: value for name, value in read_lines(file)[0].items() if not isinstance(value, (list, dict))}
                    self.results.add("http", requests=requests, input=given, output=wanted, figures=figures)
        finally:
            server.terminate()
            try:
                server.wait(GRACE)
            except Exception:  # it is killed then
                pass
            self.processes.end(server)

    def peers(self, step: plan.Step, end: float) -> None:
        folder, file = self.work / "peers", self.out / "peers.jsonl"
        limit = str(max(1.0, end - time.monotonic() - 2.0))
        self.part(step, step.name, [sys.executable, str(HERE / "peers.py"), str(folder), str(file), "--limit", limit], end)

    def ncu(self, step: plan.Step, end: float) -> None:
        tool = self.found["tools"]["ncu"]
        sections = [word for name in plan.NCU_SECTIONS for word in ("--section", name)]
        for part, text in step.parts:
            command = [tool, "--clock-control", "none", *sections, "-k", f"regex:{part.removeprefix('ncu-')}", "-s", "1", "-c", "1",
                       *self.quire("bench", "kernels", "--device", "cuda", *text.split(), "--warmup", "1", "--repeat", "1")]
            # One that hangs leaves time for the others.
            most = time.monotonic() + step.seconds * self.scale / 2
            ended = self.part(step, part, command, min(end, most))
            if ended is not None:
                found = re.findall(r"^ +([A-Z][\w /()-]+?) {2,}(\S*) +([\d.,]+)$", ended.output, re.MULTILINE)
                figures = {name: f"{value} {unit}".strip() for name, unit, value in found}
                self.results.add("ncu", part=part, command=text, figures=figures)


def looks_of(output: str) -> list[Any]:
    """Returns what a test said of its failed comparisons. The first one may stand behind the name of the test."""
    found: list[Any] = []
    for text in re.findall(r"look failed: (.*)", output):
        try:
            found.append(json.loads(text))
        except ValueError:
            found.append({"text": text})
    return found


def read_results(out: pathlib.Path) -> list[dict[str, Any]]:
    return read_lines(out / "results.jsonl")


def latest_tests(out: pathlib.Path) -> Iterable[dict[str, Any]]:
    tests = {(line["program"], line["test"]): line for line in read_results(out) if line["kind"] == "test"}
    return tests.values()


def answers(port: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
            return True
    except (OSError, http.client.HTTPException):
        return False
