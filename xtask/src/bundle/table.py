"""Prints the figures of a run as Markdown, each beside its lower bound and PyTorch's figure, and lists what was not measured.

    table.py WORK OUT DEVICE CARD BUNDLE.TXT

WORK has the files of the parts of run.sh, OUT those of the programs, and predicted/ beside BUNDLE.TXT the predicted times of kernels.
All figures also go to OUT/figures.json. It needs only Python.

The lower bound of a time is the longer of two times: bytes over the bandwidth of memory, and operations over the rate of matrix
products. Both rates are measured on the GPU in the same run; the better one of Quire and PyTorch counts.

Predicted times are those of the card that was measured, from counts of the simulator (docs/benchmarks/gpu-predicted.md).
"""

import datetime
import json
import pathlib
import statistics
import sys


def lines(file):
    """Returns the JSON values in a file of lines, without a line that a time limit cut off."""
    found = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            pass
    return found


def whole(file):
    """Returns the JSON value of a file, or None."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


def table(title, head, rows):
    if rows:
        print(f"\n## {title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
        for row in rows:
            print(f"| {' | '.join(map(str, row))} |")


def number(value, digits=1, unit=""):
    return "–" if value is None else f"{value:,.{digits}f}{unit}"


def over(a, b, scale=1.0):
    return scale * a / b if a is not None and b else None


def sweep(planned):
    """Returns the lines of a sweep, with an error for each planned shape that was not measured."""
    words = planned.read_text().split()
    flag = lambda name: [int(n) for n in words[words.index(name) + 1].split(",")] if name in words else []
    wanted = [("prefill", 1, tokens) for tokens in flag("--prefill") if tokens]
    wanted += [("decode", batch, tokens) for tokens in flag("--context") for batch in flag("--batch-size")]
    found = {(line["kind"], line["batch"], line["tokens"]): line for line in lines(planned.with_suffix(".jsonl"))}
    missing = lambda kind, batch, tokens: {"kind": kind, "batch": batch, "tokens": tokens, "error": "the time limit of its part"}
    return [found.get(shape) or missing(*shape) for shape in wanted]


class Predicted:
    """Predicted times of attention kernels on the card that was measured: files of `quire bench kernels --counts`."""

    # Launches of a dense decoder besides attention, whose predicted time has its own. Of a layer: four products, the rotation with the
    # cache write, the activation and two norms; of a step: embeddings, the rotary table, the first norm, the last product, its logits.
    OF_LAYER, OF_STEP = 8, 5
    # What `auto` chooses for the decode of models with groups of query heads.
    DECODE = "cuda.paged_gqa"

    def __init__(self, folder, card):
        found = [file for file in map(whole, sorted(folder.glob("*.json"))) if file and file.get("counting")]
        self.cards = sorted({file["counting"]["card"] for file in found})
        self.card = max((name for name in self.cards if name in card), key=len, default=None)
        self.rows, self.memory, self.products, self.launch = {}, None, None, None
        for file in found:
            counting = file["counting"]
            if counting["card"] != self.card:
                continue
            self.launch = counting["graph_launch_seconds"]
            for row in file["rows"]:
                scale, least = counting["scale"], row["least_seconds"]
                self.rows[self.key(row, row["batch"] * scale)] = row["predicted_seconds"]
                # The least time is the longer of bytes / memory and operations / products: some row is bound by each.
                self.memory = max(self.memory or 0, row["bytes"] * scale / least)
                self.products = max(self.products or 0, row["operations"] * scale / least)

    @staticmethod
    def key(row, batch):
        rows = row["query_len"] if row["operation"] == "prefill" else 1
        return (row["operation"], row["variant"], row["kv_dtype"], row["heads"], row["kv_heads"], row["head_size"], batch,
                row["context"], rows)

    def attention(self, row):
        """Returns the seconds of a measured row, or None."""
        return self.rows.get(self.key(row, row["batch"]))

    def step(self, line, config):
        """Returns the seconds of a decode step of a sweep's line, or None: products + attention + launches.

        products:  the longer of the weights' bytes over 90 % of the bandwidth, and the operations over the tensor peak
        attention: layers * the predicted time of grouped decode for this batch and context
        launches:  (8 * layers + 5) * the cost of a launch in a graph
        Sampling, and what cuBLAS falls short of its peak, are left out.
        """
        if not config or not self.memory or "roofline" not in line:
            return None
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        size = config.get("head_dim") or config["hidden_size"] // heads
        shape = {"operation": "decode", "variant": self.DECODE, "kv_dtype": "same", "heads": heads, "batch": line["batch"],
                 "kv_heads": config["num_key_value_heads"], "head_size": size, "context": line["tokens"]}
        attention = self.attention(shape)
        if attention is None:
            return None
        products = max(line["roofline"]["weight_bytes"] / self.memory, line["operations"] / line["steps"] / self.products)
        return products + layers * attention + (self.OF_LAYER * layers + self.OF_STEP) * self.launch


class Run:
    def __init__(self, work, out, predicted):
        self.predicted = predicted
        self.peers = lines(work / "peers.jsonl")
        self.sweeps = {file.stem: sweep(file) for file in sorted(work.glob("*.planned"))}
        self.pytorch = lines(work / "pytorch.jsonl")
        self.start = [line["seconds"] for line in lines(work / "start.jsonl")]
        self.mixed = {file.stem: whole(file) for file in sorted(work.glob("mixed-*.json"))}
        self.configs = {file.parent.name: whole(file) for file in sorted(work.glob("*/config.json"))}
        self.roofline = whole(out / "roofline.json") or {}
        self.attention = [row for name in ("attention", "kernels", "prefill") for row in (whole(out / f"{name}.json") or {}).get("rows", [])]
        peaks = self.roofline.get("peaks", {})
        best = lambda *rates: max((rate for rate in rates if rate), default=None)
        self.bandwidth = best(peaks.get("read_bytes_per_second"), peaks.get("copy_bytes_per_second"),
                              self.rate("copy", "bytes_per_second"))
        self.products = best(peaks.get("bf16_operations_per_second"), self.rate("matmul", "operations_per_second"))

    def rate(self, kind, field):
        return next((line[field] for line in self.pytorch if line["kind"] == kind), None)

    def step(self, sweep, line):
        """Returns the predicted seconds of a decode step; None for settings that run otherwise, such as without graphs."""
        return self.predicted.step(line, self.configs.get(sweep.removeprefix("sweep-")))

    def floor(self, line, model):
        """Returns the lower bound in seconds, and the operations including those of attention, which Quire's own lower bound leaves out."""
        if not self.bandwidth or not self.products:
            return None, line["operations"]
        operations = line["operations"]
        config = self.configs.get(model)
        if line["kind"] == "prefill" and config:
            # Scores and values; the causal mask removes half of them.
            operations += 2 * config["num_hidden_layers"] * config["hidden_size"] * line["tokens"] ** 2
        return max(line["bytes"] / self.bandwidth, operations / self.products), operations


def decode(run):
    rows = []
    for name, measured in run.sweeps.items():
        for line in (line for line in measured if line["kind"] == "decode"):
            shape = [name.removeprefix("sweep-"), line["batch"], line["tokens"]]
            if "error" in line:
                rows.append(shape + [f"not run: {line['error']}", "", "", "", "", ""])
                continue
            took, (floor, _) = line["seconds"], run.floor(line, name.removeprefix("sweep-"))
            ms = 1e3 / line["steps"]
            predicted = run.step(name, line)
            rows.append(shape + [number(line["tokens_per_second"]), number(took * ms, 3), number(over(floor, 1, ms), 3),
                                 number(over(took, floor), 2, " ×"), number(over(predicted, 1, 1e3), 3),
                                 number(over(took / line["steps"], predicted), 2, " ×")])
    head = ["model or setting", "batch", "context", "tokens/s", "ms per step", "lower bound ms", "of the lower bound", "predicted ms",
            "measured / predicted"]
    table("Decode", head, rows)


def prefill(run):
    rows = []
    for name, measured in run.sweeps.items():
        for line in (line for line in measured if line["kind"] == "prefill"):
            shape = [name.removeprefix("sweep-"), line["tokens"]]
            if "error" in line:
                rows.append(shape + [f"not run: {line['error']}", "", "", ""])
                continue
            floor, operations = run.floor(line, shape[0])
            rate = over(operations, line["seconds"])
            rows.append(shape + [number(line["tokens_per_second"]), number(line["seconds"], 4), number(floor, 4),
                                 number(over(rate, run.products, 100), 0, " %")])
    table("Prefill", ["model", "tokens", "tokens/s", "seconds", "lower bound", "of the measured matmul rate, including attention"], rows)


def attention(run):
    peer = {("decode", line["batch"], line["tokens"]): line for line in run.pytorch if line["kind"] == "sdpa decode"}
    rows = []
    for row in run.attention:
        if row["operation"] in ("decode", "prefill"):
            beside = peer.get((row["operation"], row["batch"], row["context"])) if row["kv_dtype"] == "same" else None
            seconds, predicted = row["median_seconds"], run.predicted.attention(row)
            rows.append([row["operation"], row["variant"], row["kv_dtype"], row["batch"], row["context"],
                         row["query_len"] if row["operation"] == "prefill" else 1,
                         number(seconds * 1e6), number(over(predicted, 1, 1e6)), number(over(seconds, predicted), 2, " ×"),
                         number(over(row["bytes_per_second"], 1e9)),
                         number(over(row["bytes_per_second"], run.bandwidth, 100), 0, " %"),
                         number(over(row["operations"], seconds * 1e12)),
                         number(over(beside and beside["bytes_per_second"], 1e9))])
    head = ["operation", "variant", "cache", "batch", "context", "rows", "µs", "predicted µs", "measured / predicted", "GB/s",
            "of the bandwidth", "TFLOP/s", "PyTorch SDPA GB/s"]
    table("Attention", head, rows)
    ours = {}
    for row in run.attention:
        if row["operation"] == "decode" and row["kv_dtype"] == "same":
            shape, found = (row["batch"], row["context"]), (row["median_seconds"], row["variant"])
            ours[shape] = min(found, ours.get(shape, found))
    rows = []
    for line in run.peers:
        shape = (line.get("batch"), line.get("tokens"))
        mine, variant = ours.get(shape, (None, "–"))
        start = [line["kernel"], *("–" if n is None else n for n in shape)]
        if "error" in line:
            rows.append(start + [f"not measured: {line['error']}", "", "", "", ""])
        else:
            rows.append(start + [number(line["seconds"] * 1e6), number(line["bytes_per_second"] / 1e9), variant,
                                 number(over(mine, 1, 1e6)), number(over(line["seconds"], mine), 2, " ×")])
    head = ["kernel", "batch", "context", "µs", "GB/s", "Quire's fastest", "its µs", "theirs / ours"]
    table("Decode attention of other engines, on the same shapes", head, rows)
    rows = [[line["tokens"], number(line["seconds"] * 1e6), number(line["operations_per_second"] / 1e12)]
            for line in run.pytorch if line["kind"] == "sdpa prefill"]
    table("PyTorch's prefill attention, 32 / 8 heads of 128, bf16", ["tokens", "µs", "TFLOP/s"], rows)


def mixed(run):
    peer = [line for line in run.pytorch if line["kind"] == "transformers generate"][-1:]
    theirs = peer[0]["tokens_per_second"] if peer else None
    rows = []
    for name, line in run.mixed.items():
        if line:
            rate = line["output_tokens_per_second"]
            tokens = round(rate * line["elapsed_time"])
            rows.append([f"Quire, up to {line.get('max_num_seqs')} at once", line["num_prompts"], tokens, number(line["elapsed_time"], 2), number(rate),
                         number(over(rate, theirs), 1, " ×")])
    for line in peer:
        rows.append([f"transformers generate, static batches of {line['batch']}", f"{line['requests']} of {line['of']}",
                     line["tokens"], number(line["seconds"], 2), number(theirs), "1"])
    head = ["the largest model, mixed lengths", "requests", "tokens generated", "seconds", "tokens/s", "of PyTorch's"]
    table("Mixed lengths", head, rows)


def glance(run):
    """The figures that decide, of the largest model."""
    rows = []
    for line in run.sweeps.get("sweep-8b", []):
        if line["kind"] != "decode" or line["batch"] not in (1, 64, 256):
            continue
        goal = "≤ 15 ms" if (line["batch"], line["tokens"]) == (64, 4096) else ""
        what = f"step, batch {line['batch']} × {line['tokens']}"
        if "error" in line:
            rows.append([what, f"not run: {line['error']}", "", "", goal])
            continue
        seconds, predicted = line["seconds"] / line["steps"], run.step("sweep-8b", line)
        rows.append([what, number(seconds * 1e3, 2, " ms"), number(over(predicted, 1, 1e3), 2, " ms"),
                     number(over(seconds, predicted), 2, " ×"), goal])
    if rows and run.start:
        rows.append(["start to the first token", number(statistics.median(run.start), 2, " s"), "–", "–", "≤ 3 s"])
    table("8B at a glance", ["", "measured", "predicted", "measured / predicted", "goal"], rows)


def main(work, out, device, card, bundle):
    work, out = pathlib.Path(work), pathlib.Path(out)
    predicted = Predicted(pathlib.Path(bundle).parent / "predicted", card)
    run = Run(work, out, predicted)
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    print(f"# GPU figures, {date}\n")
    print(f"- device: {device}; {run.roofline.get('description', 'not opened')}; card and driver: {card}")
    print(f"- {'; '.join(pathlib.Path(bundle).read_text().splitlines()[:3])}")
    for line in run.pytorch:
        if line["kind"] == "versions":
            print(f"- PyTorch {line['torch']} on {line['device']}")
    if predicted.card:
        print(f"- predicted times: of an {predicted.card}")
    else:
        print(f"- no predicted times: they were made for {', '.join(predicted.cards) or 'no card'}, and the card is another one")
    if device == "cuda-sim":
        print("- **the kernels ran as host code: times mean nothing, this shows only that every part runs**")
    peaks = run.roofline.get("peaks", {})
    giga = lambda rate: number(over(rate, 1e9), 0)
    tera = lambda rate: number(over(rate, 1e12), 0)
    print(f"- measured: read {giga(peaks.get('read_bytes_per_second'))} GB/s, copy {giga(peaks.get('copy_bytes_per_second'))}; "
          f"PyTorch copy {giga(run.rate('copy', 'bytes_per_second'))}; mma.sync {tera(peaks.get('bf16_operations_per_second'))} "
          f"TFLOP/s, PyTorch matmul {tera(run.rate('matmul', 'operations_per_second'))}; the lower bounds use the best of each")
    if run.start:
        print(f"- from the start of the process to its first token, with the checkpoint in memory: "
              f"{', '.join(number(seconds, 2) for seconds in run.start)} s, median {statistics.median(run.start):.2f}")
    for part in (decode, prefill, attention, mixed, glance):
        part(run)
    everything = {"sweeps": run.sweeps, "pytorch": run.pytorch, "peers": run.peers, "start": run.start, "mixed": run.mixed}
    (out / "figures.json").write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
