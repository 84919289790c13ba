"""Makes OUT/page.md from the lines that a run has written, however many there are.

    python3 page.py OUT
"""

from __future__ import annotations

import collections
import json
import pathlib
import statistics
import sys
from typing import Any, Iterable, Optional

sys.dont_write_bytecode = True
from process import read_lines

Line = dict[str, Any]
RESULTS = ("ok", "failed", "limit", "no test", "not run", "no time")
# Failed comparisons that are printed of a test; results.jsonl has all.
MOST_LOOKS = 5


def number(value: Optional[float], digits: int = 1, scale: float = 1.0) -> str:
    return "–" if value is None else f"{value * scale:,.{digits}f}"


def over(a: Optional[float], b: Optional[float]) -> Optional[float]:
    return a / b if a is not None and b else None


def cell(value: Any) -> str:
    return str("–" if value is None else value).replace("|", "\\|").replace("\n", " ")


def table(title: str, head: str, rows: Iterable[Iterable[Any]]) -> list[str]:
    """Returns the lines of a table with a title; none without rows. Columns of `head` are separated by commas."""
    rows = [" | ".join(map(cell, row)) for row in rows]
    if not rows:
        return []
    names = head.split(", ")
    return ["", f"## {title}", "", f"| {' | '.join(names)} |", "|" + "---|" * len(names), *(f"| {row} |" for row in rows)]


class Page:
    def __init__(self, out: pathlib.Path):
        self.lines = read_lines(out / "results.jsonl")
        self.files = {file.stem: read_lines(file) for file in sorted(out.glob("*.jsonl")) if file.name != "results.jsonl"}
        self.roofline = next(iter(read_lines(out / "roofline.json")), {})
        figures = [line for name, lines in self.files.items() for line in lines]
        self.cells = [line for line in figures if line.get("kind") == "cell"]
        self.unmeasured = [line for line in figures if line.get("kind") == "not_measured"]
        self.peers = [line for line in figures if line.get("kind") == "peer"]

    def of(self, kind: str, *key: str) -> list[Line]:
        """Returns the lines of a kind; of those with an equal key the last one that had time, because a test may have run again."""
        lines = [line for line in self.lines if line.get("kind") == kind]
        if not key:
            return lines
        last: dict[tuple[str, ...], Line] = {}
        for line in lines:
            names = tuple(str(line.get(name)) for name in key)
            if line.get("result") != "no time" or names not in last:
                last[names] = line
        return list(last.values())

    def environment(self) -> list[str]:
        said = []
        for line in self.of("environment", "run", "bundle", "cards"):
            said += [f"- run {line['run']}, {line['date']}, {line['device']}: {'; '.join(line['cards']) or 'no card'}",
                     f"- bundle: {'; '.join(line['bundle'])}",
                     f"- glibc {line['glibc']}, Python {line['python']}, "
                     + ", ".join(f"{name} {found or 'missing'}" for part in ("modules", "libraries", "tools")
                                 for name, found in line[part].items())]
            if line["device"] == "cuda-sim":
                said.append("- **the kernels ran as host code: times mean nothing, this shows only that every part runs**")
        peaks = self.roofline.get("peaks", self.roofline)
        if peaks:
            rates = ", ".join(f"{name} {number(value, 3, 1e-12)} T/s" for name, value in peaks.items()
                              if name.endswith("_per_second") and value)
            said += [f"- {self.roofline.get('description', '')}; measured: {rates}"]
        said += [f"- missing: {line['what']}; not run without it: {line['without']}" for line in self.of("missing", "what")]
        return said

    def tests(self) -> list[str]:
        tests = self.of("test", "program", "test")
        programs = sorted({line["program"] for line in tests})
        count = collections.Counter((line["program"], line["result"]) for line in tests)
        said = table("Tests", "program, " + ", ".join(RESULTS),
                     ([program, *(count[program, result] or "" for result in RESULTS)] for program in programs))
        planned = [line["count"] for line in self.of("tests")][-1:]
        if planned and len(tests) < planned[0]:
            said += ["", f"{planned[0] - len(tests)} of {planned[0]} tests have no line: the run was killed."]
        for line in tests:
            if line["result"] not in ("ok", "not run", "no time"):
                said += ["", f"**{line['program']} {line['test']}**: {line['result']}, code {line['code']}, {line['seconds']} s"]
                said += [f"- {json.dumps(look)}" for look in line["looks"][:MOST_LOOKS]]
                if len(line["looks"]) > MOST_LOOKS:
                    said.append(f"- and {len(line['looks']) - MOST_LOOKS} more")
                if not line["looks"]:
                    said += ["```", *(line.get("tail") or "").strip().splitlines()[-12:], "```"]
        runs = self.of("sanitizer", "tool", "program", "test")
        said += table("Failed tests under sanitizers", "test, tool, result, summary",
                      ([f"{line['program']} {line['test']}", line["tool"], line["result"], "; ".join(line.get("summary", []))]
                       for line in runs))
        return said

    # Cells, each beside the fastest peer with its shape

    @staticmethod
    def shape(line: Line) -> tuple[Any, ...]:
        operation = line.get("operation")
        rows = line.get("query_len") or line.get("rows")
        if operation == "linear":
            return operation, rows, line.get("outputs"), line.get("inputs") or line.get("heads", 0) * line.get("head_size", 0)
        return operation, line.get("batch"), line.get("context"), rows if operation == "prefill" else None

    def beside(self, line: Line) -> list[str]:
        seconds = line.get("median_seconds")
        same = [peer for peer in self.peers if self.shape(peer) == self.shape(line) and peer.get("seconds")]
        if line.get("weights") in (None, "numbers"):
            same = [peer for peer in same if peer.get("weights", "bfloat16") == "bfloat16"]
        if not same or line.get("kv_dtype", "same") != "same":
            return ["–", "–", "–"]
        best = min(same, key=lambda peer: peer["seconds"])
        return [best["kernel"], number(best["seconds"], 1, 1e6), number(over(best["seconds"], seconds), 2) + " ×"]

    def attention(self) -> list[str]:
        said = []
        for operation in ("decode", "prefill"):
            rows = []
            for line in self.cells:
                if line.get("operation") == operation:
                    seconds = line.get("median_seconds")
                    rows.append([line.get("variant"), f"{line.get('dtype')}/{line.get('kv_dtype')}",
                                 f"{line.get('heads')}/{line.get('kv_heads')} × {line.get('head_size')}", line.get("batch"),
                                 line.get("context"), line.get("query_len") if operation == "prefill" else 1,
                                 number(seconds, 1, 1e6), number(line.get("bytes_per_second"), 0, 1e-9),
                                 number(over(line.get("operations"), seconds), 1, 1e-12), number(line.get("share_of_peak"), 0, 100),
                                 number(line.get("max_error_ulps"), 2), *self.beside(line)])
            said += table(f"Attention, {operation}", "variant, types, heads, batch, context, rows, µs, GB/s, TFLOP/s, % of peak, ulps, "
                          "fastest peer, its µs, peer / ours", rows)
        return said

    def products(self) -> list[str]:
        rows = [[line.get("variant"), line.get("weights"), line.get("query_len"), line.get("outputs"),
                 number(line.get("median_seconds"), 1, 1e6), number(line.get("bytes_per_second"), 0, 1e-9),
                 number(over(line.get("operations"), line.get("median_seconds")), 1, 1e-12), number(line.get("share_of_peak"), 0, 100),
                 *self.beside(line)] for line in self.cells if line.get("operation") == "linear"]
        said = table("Products", "variant, weights, rows, outputs, µs, GB/s, TFLOP/s, % of peak, fastest peer, its µs, peer / ours", rows)
        rows = [[line.get("operation"), line.get("variant"), line.get("dtype"), line.get("batch"), line.get("context"),
                 line.get("query_len"), number(line.get("median_seconds"), 1, 1e6), number(line.get("bytes_per_second"), 0, 1e-9)]
                for line in self.cells if line.get("operation") not in ("decode", "prefill", "linear")]
        said += table("Other kernels", "operation, variant, type, batch, context, rows, µs, GB/s", rows)
        known = ("weights", "batch", "context", "query_len", "rows", "outputs", "inputs")
        rows = [[line.get("operation"), line.get("kernel"), ", ".join(f"{name} {line[name]}" for name in known if name in line),
                 number(line.get("seconds"), 1, 1e6), number(line.get("bytes_per_second"), 0, 1e-9),
                 number(line.get("operations_per_second"), 1, 1e-12), line.get("error", "")] for line in self.peers]
        said += table("Peers", "operation, kernel, shape, µs, GB/s, TFLOP/s, error", rows)
        said += table("Not measured", "what", ([line.get("what")] for line in self.unmeasured))
        return said

    def steps(self) -> list[str]:
        rows = []
        for name, lines in self.files.items():
            for line in lines if name.startswith("step-") else []:
                shape = [name.partition("-")[2], line.get("kind"), line.get("batch"), line.get("tokens")]
                if "error" in line:
                    rows.append([*shape, f"not run: {line['error']}", "", ""])
                else:
                    steps = line.get("steps") if line.get("kind") == "decode" else 1
                    rows.append([*shape, number(over(line.get("seconds"), steps), 2, 1e3),
                                 number(line.get("tokens_per_second"), 0), number(line.get("share_of_roofline"), 0, 100)])
        said = table("Steps of the 8B model", "setting, phase, batch, tokens, ms, tokens/s, % of the roofline", rows)
        rows = []
        for line in self.of("http", "requests"):
            figures = line.get("figures", {})
            rows.append([f"{line['requests']} × ({line['input']}, {line['output']})", figures.get("failed"),
                         number(figures.get("output_throughput"), 0), number(figures.get("p50_itl_ms"), 1),
                         number(figures.get("p50_ttft_ms"), 0), number(figures.get("p99_ttft_ms"), 0)])
        said += table("Served over HTTP", "requests (tokens in; out), failed, tok/s out, ITL p50 ms, TTFT p50 ms, TTFT p99 ms", rows)
        times = [line["seconds"] for line in self.of("start")]
        if times:
            said += ["", f"From the start of the process to its first token: {', '.join(number(time, 2) for time in times)} s, "
                         f"median {statistics.median(times):.2f}."]
        return said

    def counters(self) -> list[str]:
        wanted = ("Duration", "DRAM Throughput", "Compute (SM) Throughput", "L2 Hit Rate", "Registers Per Thread",
                  "Theoretical Occupancy", "Achieved Occupancy", "No Eligible")
        rows = [[line["part"], *(line["figures"].get(name) for name in wanted)] for line in self.of("ncu", "part")]
        return table("Hardware counters", "kernel, " + ", ".join(wanted), rows)

    def parts(self) -> list[str]:
        return table("Parts", "step, part, result, seconds, why",
                     ([line["step"], line["part"], line["result"], line.get("seconds"), line.get("reason") or ""]
                      for line in self.of("part", "step", "part")))

    def text(self) -> str:
        dates = [line["date"] for line in self.of("environment")]
        said = [f"# GPU run{', ' + dates[-1] if dates else ''}", ""]
        for part in (self.environment, self.tests, self.attention, self.products, self.steps, self.counters, self.parts):
            try:
                said += part()
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                said += ["", f"The part `{part.__name__}` of this page failed: {error!r}."]
        return "\n".join(said) + "\n"


def write(out: pathlib.Path) -> None:
    (out / "page.md").write_text(Page(out).text(), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2 or not pathlib.Path(sys.argv[1]).is_dir():
        sys.exit("page.py: expected the folder of the results: page.py OUT")
    write(pathlib.Path(sys.argv[1]))
