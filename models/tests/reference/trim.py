"""Copies reference cases into this folder, keeping of the expected results only what the tests read.

    python trim.py SOURCE DESTINATION [CASE ...]

SOURCE holds one folder per case: a checkpoint with `expected.json` and `expected.safetensors`. The checkpoint is copied
as it is, but `tokenizer.json` without white space between its values, which is more than half of it. Of the logits only
the last position of each prompt is kept, as `<tensor name>` of shape [1, vocab_size]. Without names, all cases are copied.
Cases that are GGUF files, which are in ../gguf/reference, state conversations once per tokenizer: each gets them here.
Needs numpy and safetensors.
"""

import json
import shutil
import sys
from pathlib import Path

from safetensors.numpy import load_file, save_file

EXPECTED = ["stored_dtype", "eos_token_ids", "noise", "min_router_gap", "notes", "encode", "detok", "chat"]
GGUF = ["model_file", "hf_config"]
PROMPT = ["name", "text", "add_special_tokens", "ids", "len", "logits"]
GREEDY = ["ids", "margins", "logprobs"]


def write(values: dict, file: Path) -> None:
    file.write_text(json.dumps(values, ensure_ascii=False, separators=(",", ":")) + "\n")


def trim(source: Path, destination: Path) -> None:
    destination.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.stem != "expected":
            shutil.copyfile(file, destination / file.name)
    expected = json.loads((source / "expected.json").read_text())
    if "model_file" in expected:
        # The first parts of the name say which tokenizer it is.
        same = source.name.rpartition("-")[0]
        others = [json.loads(file.read_text()) for file in source.parent.glob(f"{same}-*/expected.json")]
        expected["chat"] = next(other["chat"] for other in others if other["chat"])
    else:
        write(json.loads((source / "tokenizer.json").read_text()), destination / "tokenizer.json")
    trimmed = {key: expected[key] for key in EXPECTED + GGUF if expected.get(key) is not None}
    trimmed["prompts"] = [
        {key: prompt[key] for key in PROMPT} | {"greedy": {key: prompt["greedy"][key] for key in GREEDY}}
        for prompt in expected["prompts"]
    ]
    write(trimmed, destination / "expected.json")

    logits = load_file(source / "expected.safetensors")
    last = {prompt["logits"]: logits[prompt["logits"]][-1:].copy() for prompt in expected["prompts"]}
    save_file(last, destination / "expected.safetensors")


if __name__ == "__main__":
    source, destination = map(Path, sys.argv[1:3])
    names = sys.argv[3:] or [expected.parent.name for expected in source.glob("*/expected.json")]
    for name in names:
        trim(source / name, destination / name)
