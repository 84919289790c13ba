"""The tokenizer of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire import _quire, params, requests
from quire.outputs import integers

__all__ = ["Tokenizer"]


class Tokenizer:
    """The tokenizer of a model, with the methods of Hugging Face's that do not need other packages."""

    def __init__(self, engine: _quire.Engine, name: str, chat_template: str | None = None) -> None:
        self._engine = engine
        self._chat_template = chat_template
        facts = engine.info()
        self.name_or_path = name
        """The model."""
        self.vocab_size: int = facts["vocab_size"]
        """Number of token ids."""
        self.eos_token_ids: list[int] = facts["eos_token_ids"]
        """Tokens that end a sequence."""
        self.model_max_length: int = facts["max_model_len"]
        """Greatest number of tokens of prompt and output."""

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def eos_token_id(self) -> int | None:
        """The first token that ends a sequence."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    @property
    def eos_token(self) -> str | None:
        """The first token that ends a sequence, as the vocabulary spells it."""
        return None if self.eos_token_id is None else self._engine.id_to_token(self.eos_token_id)

    @property
    def all_special_ids(self) -> list[int]:
        """Tokens that mark structure and are no text."""
        return [token for token in range(self.vocab_size) if self._engine.is_special(token)]

    def encode(
        self, text: str, add_special_tokens: bool = True, truncation: bool = False, max_length: int | None = None
    ) -> list[int]:
        """Token ids of a text."""
        ids: list[int] = integers(self._engine.encode(text, add_special_tokens)).tolist()
        return ids[:max_length] if truncation else ids

    def __call__(
        self, text: str | Sequence[str], add_special_tokens: bool = True, **kwargs: Any
    ) -> dict[str, list[int] | list[list[int]]]:
        """`input_ids` and `attention_mask` of one text or of several, without padding."""
        unknown = set(kwargs) - {"truncation", "max_length", "return_attention_mask", "padding"}
        if unknown or kwargs.get("padding"):
            raise TypeError(f"Tokenizer() got unexpected keyword arguments: {sorted(unknown) or ['padding']}")
        cut = {name: kwargs[name] for name in ("truncation", "max_length") if name in kwargs}
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens, **cut)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        all_ids = [self.encode(one, add_special_tokens, **cut) for one in text]
        return {"input_ids": all_ids, "attention_mask": [[1] * len(ids) for ids in all_ids]}

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """Text of token ids."""
        ids = params.token_ids("token_ids", [token_ids] if isinstance(token_ids, int) else token_ids)
        return self._engine.decode(ids, skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False, **_: Any) -> list[str]:
        """Texts of several lists of token ids."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Tokens as the vocabulary spells them."""
        if isinstance(ids, int):
            return self._engine.id_to_token(ids)
        return [self._engine.id_to_token(token) for token in ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Ids of tokens as the vocabulary spells them; None for those that it does not have."""
        if isinstance(tokens, str):
            return self._engine.token_to_id(tokens)
        return [self._engine.token_to_id(token) for token in tokens]

    def get_vocab(self) -> dict[str, int]:
        """The vocabulary."""
        spelled = ((self._engine.id_to_token(token), token) for token in range(self.vocab_size))
        return {text: token for text, token in spelled if text is not None}

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> Any:
        """A conversation as the template of the model writes it: token ids, or text with `tokenize=False`. Other arguments are
        variables of the template."""
        template = chat_template or self._chat_template
        fields = requests.ChatFields(template, add_generation_prompt, continue_final_message, tools, kwargs)
        text = self._engine.render(requests.rendering(conversation, fields))
        return self.encode(text, add_special_tokens=False) if tokenize else text
