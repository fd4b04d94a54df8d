"""Vocabulary: what tokenizer.json says of a tokenizer's ids, beyond the text of each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gsa.data.tokenizer import JSON, BytesTokenizer, Tokenizer
from gsa.data.tokenizer_check import panics_told
from gsa.extras import require


@dataclass(frozen=True)
class SpecialToken:
    """A token that encoding a text never gives. Where its name stands, it may swallow the white space beside it."""

    id: int
    name: str
    takes_left: bool
    takes_right: bool


@dataclass(frozen=True)
class Vocabulary:
    """What `vocabulary` finds out."""

    special: tuple[SpecialToken, ...]
    lead: tuple[int, ...]
    """Ids that transformers puts in front of every text: usually none, or the token that begins a text."""
    spelt: tuple[bytes, ...] | None
    """The bytes of each id, if the text of several ids is their bytes joined; None for other tokenizers."""
    in_runs: frozenset[int]
    """Ids that stand for one byte each, as <0x0A> does. Such ids in a row are decoded as UTF-8 together; if they are
    not valid, each of them becomes U+FFFD."""
    joins_bytes: bool
    """Whether one character may take several ids that are not in `in_runs`."""
    prefix_once: bool
    """Whether the tokenizer puts a space in front of a text as a whole, but not of the text behind a special token."""


@lru_cache(maxsize=4)
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """The vocabulary of a tokenizer, worked out once."""
    content = json.loads(tokenizer.files()[JSON])
    decoder, names = content.get("decoder"), _names(content)
    kinds = {part["type"] for part in _parts(decoder)}
    return Vocabulary(
        special=tuple(
            SpecialToken(token["id"], token["content"], token.get("lstrip", False), token.get("rstrip", False))
            for token in content.get("added_tokens", ())
            if token.get("special")
        ),
        lead=_lead(content.get("post_processor")),
        spelt=_spelt(names, tokenizer.vocab_size) if decoder and decoder["type"] == "ByteLevel" else None,
        in_runs=frozenset(id_ for id_, name in names.items() if "ByteFallback" in kinds and _is_byte(name)),
        joins_bytes="ByteLevel" in kinds,
        prefix_once=any(part.get("prepend_scheme") == "first" for part in _parts(content.get("pre_tokenizer"))),
    )


def _parts(node: Any) -> list[dict[str, Any]]:
    """A part of a tokenizer and all that it consists of."""
    if isinstance(node, list):
        return [part for entry in node for part in _parts(entry)]
    if not isinstance(node, dict) or "type" not in node:
        return []
    return [node, *(part for value in node.values() for part in _parts(value))]


def _names(content: dict[str, Any]) -> dict[int, str]:
    """The name of each id."""
    vocab = content["model"]["vocab"]
    known = {id_: name for name, id_ in vocab.items()} if isinstance(vocab, dict) else dict(enumerate(_firsts(vocab)))
    return known | {token["id"]: token["content"] for token in content.get("added_tokens", ())}


def _firsts(pairs: list[list[Any]]) -> list[str]:
    return [name for name, _ in pairs]


def _spelt(names: dict[int, str], size: int) -> tuple[bytes, ...]:
    # The letter that such tokenizers write for each byte is the name of that byte's id in the tokenizer of bytes.
    of_bytes = json.loads(BytesTokenizer().files()[JSON])["model"]["vocab"]
    letters = {name: id_ for name, id_ in of_bytes.items() if id_ < 256}
    spelt = [b""] * size
    for id_, name in names.items():
        if all(letter in letters for letter in name):
            spelt[id_] = bytes(letters[letter] for letter in name)
        else:  # an added token, which stands as it is
            spelt[id_] = name.encode()
    return tuple(spelt)


def _is_byte(name: str) -> bool:
    """Whether a token's name is that of a byte, as in <0x0A>."""
    if len(name) != 6 or not (name.startswith("<0x") and name.endswith(">")):
        return False
    return all(digit in "0123456789abcdefABCDEF" for digit in name[3:5])


def _lead(post_processor: Any) -> tuple[int, ...]:
    """The special tokens that a post-processor puts in front of a text: it is tried on a text of one word."""
    if post_processor is None:
        return ()
    require("tokenizers", "tokenizer: one with special tokens around a text")
    from tokenizers import Tokenizer as RustTokenizer

    word = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    content = {"version": "1.0", "model": word, "post_processor": post_processor}
    with panics_told("its post-processor"):
        encoding = RustTokenizer.from_str(json.dumps(content)).encode("a")
    return tuple(encoding.ids[: encoding.special_tokens_mask.index(0)])
