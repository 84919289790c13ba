"""Trains Quire's demo model from nothing and writes it as a folder in Hugging Face layout.

    python train.py --out DIR [--steps N] [--seed N] [--threads N]

Makes a byte-level BPE tokenizer and a small Llama from the corpus of `corpus.py`, stores the weights in bfloat16,
then reads the folder back and measures it (`accuracy.py`). See ../README.md for what comes out.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from accuracy import measure
from corpus import Corpus

BOS, START, END, PAD = "<|bos|>", "<|im_start|>", "<|im_end|>", "<pad>"
VOCABULARY = 1536
CONTEXT = 1024
TOKENS_PER_STEP = 4096
# row length -> how often; most rows are short and cheap, some reach the whole context
ROW_LENGTHS = {128: 2, 256: 5, 512: 2, 1024: 1}
# what a token counts in the loss, by who wrote it: answers fully, documents less (a story is mostly chance),
# questions hardly, for nobody can foresee them
ANSWER, DOCUMENT, QUESTION = 1.0, 0.3, 0.1

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('Unknown role: ' ~ message.role) }}
    {%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ (message.content or '') ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


def make_tokenizer(seed):
    """Byte-level BPE whose digits are always single tokens, so that numbers are written in one way only."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    corpus, texts = Corpus(seed), []
    for _ in range(40_000):
        kind, text = corpus.sample()
        texts += [text] if kind == "document" else [content for _, content in text]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[BOS, START, END, PAD], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B:1", special_tokens=[(BOS, bos)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=END, pad_token=PAD, model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(tokenizer):
    """A Llama with grouped queries and tied embeddings, of about 1.9 million parameters."""
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=192, intermediate_size=384, num_hidden_layers=5, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=CONTEXT, rms_norm_eps=1e-5, rope_theta=10000.0,
        tie_word_embeddings=True, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id))


class Batches:
    """Rows of whole training texts, one after the other; a row starts with a text and only its last may be cut."""

    def __init__(self, tokenizer, seed):
        self.tokenizer, self.corpus = tokenizer, Corpus(seed)
        self.header = tokenizer.encode(f"{START}assistant\n", add_special_tokens=False)
        self.start, self.end = self.header[0], tokenizer.eos_token_id
        self.rng = torch.Generator().manual_seed(seed)
        self.texts = self.tokens = 0

    def _text(self):
        """Token ids of one text, and the weight of each in the loss."""
        kind, content = self.corpus.sample()
        self.texts += 1
        if kind == "document":
            ids = self.tokenizer.encode(content) + [self.end]
            return ids, [0.0] + [DOCUMENT] * (len(ids) - 1)
        messages = [{"role": role, "content": text} for role, text in content]
        ids = self.tokenizer.encode(
            self.tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n"), add_special_tokens=False)
        weights, answer_from = [QUESTION] * len(ids), None
        weights[0] = 0.0
        for i, token in enumerate(ids):
            if token == self.start and ids[i:i + len(self.header)] == self.header:
                answer_from = i + len(self.header)
            if answer_from is not None and i >= answer_from:
                weights[i] = ANSWER
                if token == self.end:
                    answer_from = None
        return ids, weights

    def next(self):
        """(ids, weights) of shape [rows, length]."""
        pick = torch.multinomial(torch.tensor([float(w) for w in ROW_LENGTHS.values()]), 1, generator=self.rng)
        length = list(ROW_LENGTHS)[pick.item()]
        rows = []
        for _ in range(TOKENS_PER_STEP // length):
            ids, weights = [], []
            while len(ids) < length:
                more, their_weights = self._text()
                ids, weights = ids + more, weights + their_weights
            rows.append((ids[:length], weights[:length]))
        self.tokens += TOKENS_PER_STEP
        return torch.tensor([r[0] for r in rows]), torch.tensor([r[1] for r in rows])


def optimizers(model):
    """Muon for the matrices between the layers, AdamW for the embedding and the norms."""
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [torch.optim.Muon(hidden, lr=0.02, momentum=0.95, weight_decay=0.01),
            torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0)]


def schedule(step, steps):
    """Factor of the learning rate: a short warm-up, then a cosine down to two per cent."""
    warm_up = min(100, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def train(model, tokenizer, steps, seed):
    """Runs the steps; returns the batches (for their counts) and the minutes it took."""
    batches, started = Batches(tokenizer, seed), time.time()
    optims = optimizers(model)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda s: schedule(s, steps)) for o in optims]
    model.train()
    mean = None
    for step in range(steps):
        ids, weights = batches.next()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
        weights = weights[:, 1:].flatten()
        loss = (losses * weights).sum() / weights.sum()
        for o in optims:
            o.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for o, s in zip(optims, schedulers):
            o.step()
            s.step()
        mean = loss.item() if mean is None else 0.98 * mean + 0.02 * loss.item()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step} loss {mean:.4f} minutes {(time.time() - started) / 60:.1f}", flush=True)
    return batches, (time.time() - started) / 60


def save(model, tokenizer, folder):
    """The folder in Hugging Face layout, weights in bfloat16, JSON files without needless space."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id,
        do_sample=True, temperature=0.6, top_p=0.95)
    model.eval().to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)

    def edit(name, change):
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        change(content)
        indent = None if name == "tokenizer.json" else 2
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=indent) + "\n", encoding="utf-8")

    def model_config(c):  # keys that readers of older configurations expect
        c.update(rope_theta=10000.0, torch_dtype="bfloat16")

    def tokenizer_config(c):
        c.update(add_bos_token=True, chat_template=CHAT_TEMPLATE, tokenizer_class="PreTrainedTokenizerFast")
        c.pop("backend", None)

    edit("config.json", model_config)
    edit("tokenizer_config.json", tokenizer_config)
    edit("tokenizer.json", lambda c: None)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder that receives the model")
    parser.add_argument("--steps", type=int, default=6000, help=f"steps of {TOKENS_PER_STEP} tokens (default 6000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of corpus, weights and order (default 0)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)

    tokenizer = make_tokenizer(arguments.seed)
    model = make_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    batches, minutes = train(model, tokenizer, arguments.steps, arguments.seed + 1)
    save(model, tokenizer, arguments.out)
    measure(arguments.out, {"steps": arguments.steps, "seed": arguments.seed, "minutes": round(minutes, 1),
                            "texts": batches.texts, "tokens": batches.tokens})


if __name__ == "__main__":
    main()
