"""Copies reference cases into this folder, keeping of the expected results only what the tests read.

    python trim.py SOURCE DESTINATION

SOURCE holds one folder per case: a checkpoint with `expected.json` and `expected.safetensors`. Of the logits only the
last position of each prompt is kept, as `<tensor name>` of shape [1, vocab_size]. Needs numpy and safetensors.
"""

import json
import shutil
import sys
from pathlib import Path

from safetensors.numpy import load_file, save_file

CASES = ["llama", "llama31-rope", "mistral-sliding", "qwen2", "qwen3"]
CHECKPOINT = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model.safetensors",
]
PROMPT = ["name", "text", "add_special_tokens", "ids", "len", "logits"]
GREEDY = ["ids", "margins", "logprobs"]


def trim(source: Path, destination: Path) -> None:
    destination.mkdir(parents=True, exist_ok=True)
    for name in CHECKPOINT:
        if (source / name).exists():
            shutil.copyfile(source / name, destination / name)

    expected = json.loads((source / "expected.json").read_text())
    trimmed = {key: expected[key] for key in ["eos_token_ids", "encode", "detok", "chat"]}
    trimmed["prompts"] = [
        {key: prompt[key] for key in PROMPT} | {"greedy": {key: prompt["greedy"][key] for key in GREEDY}}
        for prompt in expected["prompts"]
    ]
    lines = json.dumps(trimmed, ensure_ascii=False, separators=(",", ":"))
    (destination / "expected.json").write_text(lines + "\n")

    logits = load_file(source / "expected.safetensors")
    last = {prompt["logits"]: logits[prompt["logits"]][-1:].copy() for prompt in expected["prompts"]}
    save_file(last, destination / "expected.safetensors")


if __name__ == "__main__":
    source, destination = map(Path, sys.argv[1:3])
    for case in CASES:
        trim(source / case, destination / case)
