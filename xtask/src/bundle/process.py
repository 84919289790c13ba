"""Runs programs with a time limit each, and writes every result as a line of JSON when it is known."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import Any, NoReturn, Optional

# Seconds that a killed process has to end. One that waits in a driver may never end; then the run goes on without it.
GRACE = 5.0
# Characters of an output that are kept with a failure.
TAIL = 1500


def refuse(text: str, code: int = 2) -> NoReturn:
    print(f"run.py: {text}", file=sys.stderr)
    sys.exit(code)


class Clock:
    """The time left of a run; none after it was stopped."""

    def __init__(self, seconds: float):
        self.start = time.monotonic()
        self.end = self.start + seconds
        self.stopped = False

    def since(self) -> float:
        return time.monotonic() - self.start

    def left(self) -> float:
        return 0.0 if self.stopped else max(0.0, self.end - time.monotonic())


class Results:
    """The files of a run: `results.jsonl`, a line for each result, and `log.txt`, the output of what failed."""

    def __init__(self, folder: pathlib.Path, clock: Clock):
        self.folder, self.clock = folder, clock
        self.lock = threading.Lock()
        self.lines = open(folder / "results.jsonl", "a", encoding="utf-8")
        self.texts = open(folder / "log.txt", "a", encoding="utf-8")

    def add(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind, **fields, "at": round(self.clock.since(), 1)})
        with self.lock:
            self.lines.write(line + "\n")
            self.lines.flush()

    def log(self, title: str, text: str) -> None:
        with self.lock:
            self.texts.write(f"=== {title}\n{text.rstrip()}\n")
            self.texts.flush()

    def say(self, text: str) -> None:
        with self.lock:
            print(f"[{self.clock.since():6.1f}] {text}", flush=True)


def lines_of(text: str) -> list[dict[str, Any]]:
    """Returns the JSON objects in lines, without a line that a limit cut off."""
    found = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def read_lines(file: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the JSON objects of a file: one a line, or the whole file; none if it does not exist."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    try:
        value = json.loads(text)
    except ValueError:
        return lines_of(text)
    return [value] if isinstance(value, dict) else []


@dataclass(frozen=True)
class Ended:
    """How a process ended. `code` is `None` if it did not end although it was killed."""

    code: Optional[int]
    output: str
    seconds: float
    reached_limit: bool

    def tail(self) -> str:
        return self.output[-TAIL:]

    def last_line(self) -> str:
        """Returns the last line that is not empty: an error of `quire`."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else f"ended with code {self.code} without a word"

    def result(self) -> str:
        return "limit" if self.reached_limit else "ok" if self.code == 0 else "failed"


class Processes:
    """Starts programs, each as the leader of a process group, so that all it has started ends with it."""

    def __init__(self, environment: dict[str, str], clock: Clock):
        self.environment, self.clock = environment, clock
        self.lock = threading.Lock()
        self.running: set[subprocess.Popen[bytes]] = set()

    def start(self, command: list[str], output: Any, cwd: Optional[pathlib.Path] = None,
              more: Optional[dict[str, str]] = None) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=cwd,
                                   env={**self.environment, **(more or {})}, start_new_session=True)
        with self.lock:
            self.running.add(process)
        if self.clock.stopped:
            kill(process)
        return process

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """Ends a process and its group, and waits for it, but not for ever."""
        kill(process)
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            pass
        with self.lock:
            self.running.discard(process)

    def run(self, command: list[str], seconds: float, cwd: Optional[pathlib.Path] = None,
            more: Optional[dict[str, str]] = None) -> Ended:
        start = time.monotonic()
        reached_limit = False
        # A file, not a pipe: nobody waits for the end of what a process outside of the group may hold open.
        with tempfile.TemporaryFile() as output:
            try:
                process = self.start(command, output, cwd, more)
            except OSError as error:
                return Ended(127, f"{command[0]}: {error.strerror or error}", 0.0, False)
            try:
                process.wait(max(seconds, 0.1))
            except subprocess.TimeoutExpired:
                reached_limit = True
            self.end(process)
            output.seek(0)
            text = output.read().decode("utf-8", "replace")
        return Ended(process.returncode, text, round(time.monotonic() - start, 2), reached_limit)

    def stop(self) -> None:
        """Stops the run: ends all processes; nothing has time left from now on."""
        self.clock.stopped = True
        # Without the lock: a signal handler calls this, and the main thread may hold it.
        for process in list(self.running):
            kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
