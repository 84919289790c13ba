"""Measures the demo model: greedy answers, compared with the right ones letter by letter.

    python accuracy.py DIR

Reads the folder as anyone would (bfloat16 weights, computed in float32), prints a table and writes accuracy.json.
"""

import json
import random
import re
import sys
from itertools import groupby, islice
from pathlib import Path

import tokenizers
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import world
from corpus import Corpus
from questions import one_in
from stories import HE, SHE

PER_TOPIC = 150
NEW_NAMES = "Arthur Bianca Cyrus Dora Edgar Fiona Gregor Hilda Igor Judith Kilian Lena Moritz Nadia Otis Petra".split()


class Reader:
    """A loaded folder that continues texts greedily."""

    def __init__(self, folder):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.generation_config.update(do_sample=False, temperature=None, top_p=None)

    def _continue(self, prompts, limit):
        """(text, ended by itself) for each list of ids; prompts of equal length run together."""
        results = [None] * len(prompts)
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for _, group in groupby(by_length, key=lambda i: len(prompts[i])):
            group = list(group)
            while batch := group[:64]:
                group = group[64:]
                ids = torch.tensor([prompts[i] for i in batch])
                out = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit)
                for i, row in zip(batch, out[:, ids.shape[1]:].tolist()):
                    end = self.tokenizer.eos_token_id
                    ended = end in row
                    row = row[:row.index(end)] if ended else row
                    results[i] = (self.tokenizer.decode(row, skip_special_tokens=True), ended)
        return results

    def chats(self, chats, limit=120):
        """Answers to lists of (role, content)."""
        return self._continue([self.tokenizer.apply_chat_template(
            [{"role": role, "content": text} for role, text in chat], add_generation_prompt=True,
            return_dict=False) for chat in chats], limit)

    def texts(self, texts, limit=220):
        """Continuations of plain texts."""
        return self._continue([self.tokenizer.encode(t) for t in texts], limit)


def _sample(rng, questions):
    return rng.sample(questions, min(PER_TOPIC, len(questions)))


def _other_cases(corpus, rng):
    """Held-out cases that are more than one question: (name, [(chat, answer)])."""
    held = {topic: [q for q in qs if q.short] for topic, qs in corpus.held_out.items()}
    one_word = [q for qs in held.values() for q in qs if not q.topic.startswith("sum")]
    yield "one-word answers by system prompt", [
        ([("system", world.SYSTEM_ONE_WORD[0]), ("user", q.text)], q.short) for q in _sample(rng, one_word)]
    yield "lower case, no question mark", [
        ([("user", q.text.lower().rstrip("?."))], q.answer) for q in _sample(rng, corpus.held_out["capital"])]

    def follow_ups():
        while True:
            topic = rng.choice(["capital", "colour", "opposite", "country", "day and month"])
            first, then = (rng.choice([q for q in corpus.train[topic] if q.follow]) for _ in "ab")
            if first.item != then.item and one_in(8, "follow", first.item, then.item):
                yield [("user", first.text), ("assistant", first.answer), ("user", then.follow)], then.answer
    yield "follow-up (\"And Japan?\")", list(islice(follow_ups(), 100))
    names = [(n, q) for n in NEW_NAMES for q in _sample(rng, corpus.held_out["colour"])[:4]]
    yield "remembers a new name over a turn", [
        ([("user", f"My name is {n}."), ("assistant", f"Hello {n}, nice to meet you."), ("user", q.text),
          ("assistant", q.answer), ("user", "What is my name?")], f"Your name is {n}.") for n, q in names]
    yield "repeats words", [([("user", q)], a) for q, a in (corpus.repeating() for _ in range(100))]
    yield "does not know (new kinds of question)", [
        ([("user", text)], "I do not know that.") for text in world.OUTSIDE_NEW]


def _story_figures(reader, corpus, rng):
    """Of the stories for held-out requests: how many are whole, keep hero and object, do not mix up the names."""
    requests = [q for q in corpus.held_out["story"] if "|" in q.item and q.item.split("|")[1]]
    requests = rng.sample(requests, min(60, len(requests)))
    whole = kept = cast = 0
    for request, (text, ended) in zip(requests, reader.chats([[("user", q.text)] for q in requests], 220)):
        species, obj = request.item.split("|")[:2]
        whole += ended and bool(re.match(r"[A-Z].*[.!?\"]$", text, re.S)) and 3 <= len(re.findall(r"[.!?]", text)) <= 10
        names = [n for n in HE + SHE if re.search(rf"\b{n}\b", text)]
        kept += species in text and obj in text
        cast += len(names) == 2
    return {"requests": len(requests), "whole": round(whole / len(requests), 3),
            "hero and object as asked": round(kept / len(requests), 3),
            "hero and friend have two names": round(cast / len(requests), 3)}


def measure(folder, training=None):
    """Prints the table and writes it to accuracy.json in the folder; `training` is kept from an earlier run."""
    folder = Path(folder)
    target = folder / "accuracy.json"
    if training is None and target.exists():
        training = json.loads(target.read_text(encoding="utf-8")).get("training")
    reader, corpus, rng = Reader(folder), Corpus(), random.Random(7)
    rows = {}

    def score(name, column, cases):
        answers = reader.chats([chat for chat, _ in cases])
        right = sum(text == wanted for (text, _), (_, wanted) in zip(answers, cases))
        rows.setdefault(name, {})[column] = {"questions": len(cases), "right": round(right / len(cases), 3)}
        return [(chat, wanted, text) for (chat, wanted), (text, _) in zip(cases, answers) if text != wanted]

    misses = []
    for topic in corpus.train:
        if topic != "story":
            for column, side in (("held out", corpus.held_out), ("trained on", corpus.train)):
                wrong = score(topic, column, [([("user", q.text)], q.answer) for q in _sample(rng, side[topic])])
                misses += wrong[:3] if column == "held out" else []
    for name, cases in _other_cases(corpus, rng):
        misses += score(name, "held out", cases)[:3]

    print(f"{'topic':40} {'held out':>16} {'trained on':>16}")
    for name, row in rows.items():
        cells = [f"{c['right']:.1%} of {c['questions']}" if (c := row.get(column)) else ""
                 for column in ("held out", "trained on")]
        print(f"{name:40} {cells[0]:>16} {cells[1]:>16}")
    stories = _story_figures(reader, corpus, rng)
    print("stories:", stories)
    for chat, wanted, text in misses:
        print(f"  miss: {' / '.join(t for _, t in chat)!r} -> {text!r}, not {wanted!r}")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__,
                "tokenizers": tokenizers.__version__}
    target.write_text(json.dumps({"training": training, "versions": versions, "accuracy": rows, "stories": stories},
                                 indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    measure(sys.argv[1])
