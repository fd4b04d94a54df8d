"""ForeignTokenizer: a tokenizer of transformers, as evaluation sees it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from gsa import templates
from gsa.errors import GSAError
from gsa.eval.foreign_model import loaded
from gsa.eval.reader import ReaderTokenizer


class ForeignTokenizer(ReaderTokenizer):
    """A tokenizer that `AutoTokenizer` loads."""

    def __init__(self, tokenizer: Any, ends: Collection[int] = ()) -> None:
        """`ends`: tokens that end a text by the model's config, for a tokenizer without one."""
        found = min(ends, default=None) if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        if found is None:
            raise GSAError("reader: neither the tokenizer nor the config names a token that ends a text, expected one")
        self.eos_id, self.bos_id, self.vocab_size = found, tokenizer.bos_token_id, len(tokenizer)
        self.tokenizer = tokenizer

    @classmethod
    def open(cls, model: str | Path, ends: Collection[int] = ()) -> ForeignTokenizer:
        """The tokenizer beside a model, or within a GGUF file."""
        return cls(loaded("AutoTokenizer", model), ends)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=special))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @property
    def chat_template(self) -> str | None:
        """The template that conversations are written by, in Jinja, if there is one."""
        found = self.tokenizer.chat_template
        return found if isinstance(found, str) else None

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """A conversation as the template writes it, up to where the model's reply begins."""
        if self.chat_template is None:
            raise GSAError("reader: the model has no chat template, so it takes no conversations")
        names = {key: str(token) for key, token in self.tokenizer.special_tokens_map.items()}
        return templates.render(self.chat_template, [dict(message) for message in messages], names)
