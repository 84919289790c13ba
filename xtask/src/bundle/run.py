#!/usr/bin/env python3
"""Tests and measures Quire on the GPU of this machine, in two runs that fit into a few minutes each.

Programs, kernels and shapes come from the folder of this file, reference cases from a checkout (`--tree`). Every result is a line of
JSON in OUT as soon as it is known: `results.jsonl` has tests and parts, `PART.jsonl` the figures of a part, `log.txt` the output of
parts and of failed tests. At the end, also after Ctrl-C, `page.py` makes OUT/page.md from the lines. Nothing is written to the folder
of this file unless OUT is in it. Unpacked programs and weights stay for the next run: in TMPDIR if it is set, else in /dev/shm if there
is enough memory, else in /tmp.

The exit code is 1 if something failed, 2 if the command line is wrong.
"""

import sys

sys.dont_write_bytecode = True
if sys.version_info < (3, 9):
    sys.exit(f"run.py: found Python {sys.version.split()[0]}, expected 3.9 or newer")

import argparse
import pathlib
import re
import signal

import environment
import plan
from process import refuse
from steps import HERE, Run


def is_checkout(folder: pathlib.Path) -> bool:
    return (folder / "Cargo.toml").is_file() and (folder / "models/tests/reference").is_dir()


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("run.py", description="Tests and measures Quire on the GPU of this machine.")
    parser.add_argument("run", choices=list(plan.RUNS), help="one: tests, attention, products; two: the rest")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "out", metavar="DIR", help="folder of the results [default: out/]")
    parser.add_argument("--tree", type=pathlib.Path, metavar="CHECKOUT", help="checkout with the cases [default: the nearest above]")
    parser.add_argument("--device", choices=("cuda", "cuda-sim"), default="cuda", help="cuda-sim: kernels as host code, small shapes")
    parser.add_argument("--kernels", type=pathlib.Path, metavar="DIR", help="compiled kernels [default: those of the bundle]")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="seconds of the run [default: 210 and 360]; scales each step")
    parser.add_argument("--resume", action="store_true", help="skip what passed in the results of OUT")
    parser.add_argument("--steps", type=lambda text: text.split(","), metavar="NAMES", help="run these alone, separated by commas")
    parser.add_argument("--tests", default="", metavar="REGEX", help="run the tests alone whose PROGRAM/NAME matches")
    parser.add_argument("--jobs", type=int, metavar="N", help="tests at once [default: 10, or one per core on cuda-sim]")
    parser.add_argument("--short", action="store_true", help="few tests, small shapes")
    options = parser.parse_args(arguments)
    names = [step.name for step in plan.RUNS[options.run]]
    unknown = [name for name in options.steps or [] if name not in names]
    if unknown:
        refuse(f"--steps: found {unknown[0]!r}, expected some of {','.join(names)}")
    if options.limit is not None and not options.limit >= 1:
        refuse(f"--limit: found {options.limit}, expected a number of seconds from 1")
    if options.jobs is not None and options.jobs < 1:
        refuse(f"--jobs: found {options.jobs}, expected a number from 1")
    try:
        re.compile(options.tests)
    except re.error as error:
        refuse(f"--tests: {error}; expected a regular expression")
    if options.tree is not None and not is_checkout(options.tree):
        refuse(f"--tree: found no Cargo.toml and models/tests/reference in {options.tree}; name the root of a checkout")
    options.tree = options.tree.resolve() if options.tree else next(filter(is_checkout, HERE.parents), None)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        with open(options.out / "results.jsonl", "a"):
            pass
    except OSError as error:
        refuse(f"--out: {options.out} cannot be written: {error.strerror}; name a writable folder")
    options.out = options.out.resolve()
    options.kernels = options.kernels.resolve() if options.kernels else None
    return options


def main(arguments: list[str]) -> int:
    options = options_of(arguments)
    needed, found = environment.needed_c_library(HERE), environment.c_library()
    if environment.older(found, needed):
        refuse(f"found the C library glibc {found}, expected {needed} or newer; make the bundle on a system that is as old", 1)
    run = Run(options)
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, run.stop)
    return run.all()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
