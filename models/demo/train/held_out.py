"""Writes text that the demo model was not trained on: chats of one to three held-out questions, answered.

What a change of the arithmetic costs is measured on it (`engine/tests/perplexity.rs`). Every line is a JSON string, one
chat as the chat template writes it; all of it is drawn from one seed.

    python held_out.py TOKENS > held_out.jsonl
"""

import json
import random
import sys
from pathlib import Path

from transformers import AutoTokenizer

from corpus import WEIGHTS, write_story
from questions import all_questions


def main():
    wanted, rng = int(sys.argv[1]), random.Random(20)
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parent.parent)
    held_out = {topic: questions for topic, questions in all_questions()[1].items() if questions and topic in WEIGHTS}
    topics, weights = list(held_out), [WEIGHTS[topic] for topic in held_out]
    tokens = 0
    while tokens < wanted:
        messages = []
        for topic in rng.choices(topics, weights, k=rng.choice([1, 1, 2, 3])):
            question = rng.choice(held_out[topic])
            answer = write_story(rng, question) if topic == "story" else question.answer
            messages += [{"role": "user", "content": question.text}, {"role": "assistant", "content": answer}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        tokens += len(tokenizer.encode(text, add_special_tokens=False))
        print(json.dumps(text))


if __name__ == "__main__":
    main()
