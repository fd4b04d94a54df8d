"""What clients ask: pieces of a book to continue, and conversations about it, always the same ones for a seed."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

PROMPT_WORDS = (8, 96)
ANSWER_TOKENS = (32, 128)
"""The shortest and the longest; all between are equally likely."""
TOP_P = 0.95
"""Where answers are drawn."""
WORDS_OF_TOKENS = 0.74
"""Words of the book for a token of SmolLM2."""


@cache
def _words() -> list[str]:
    from gsa.pretrained import book

    return book().split()


def _excerpt(chance: random.Random, words: int) -> str:
    begin = chance.randrange(len(_words()) - words)
    return " ".join(_words()[begin : begin + words])


def question(seed: int, client: int, number: int, temperature: float = 0.0) -> dict[str, Any]:
    """The body of one request of a client. Without a temperature the likeliest tokens are taken; in any case there is
    one right answer."""
    chance = random.Random(f"{seed} {client} {number}")
    prompt = _excerpt(chance, chance.randint(*PROMPT_WORDS))
    body = {"prompt": prompt, "max_tokens": chance.randint(*ANSWER_TOKENS), "temperature": temperature}
    return body if temperature == 0 else {**body, "top_p": TOP_P, "seed": chance.getrandbits(31)}


def opening(seed: int, number: int, tokens: int) -> list[dict[str, str]]:
    """The first message of a conversation, of about so many tokens; no two begin alike."""
    text = _excerpt(random.Random(f"chat {seed} {number}"), round(tokens * WORDS_OF_TOKENS))
    return [{"role": "user", "content": f"{text}\n\nWhat is this about?"}]


def document(seed: int, number: int, tokens: int) -> str:
    """A prompt of about so many tokens, which may be more than the book has; no two begin alike."""
    chance = random.Random(f"document {seed} {number}")
    return "\n\n".join(_excerpt(chance, round(500 * WORDS_OF_TOKENS)) for _ in range(max(tokens // 500, 1)))


def second_turn(messages: list[dict[str, str]], answer: str) -> list[dict[str, str]]:
    """The conversation with its answer and a further question, told in full, as clients do."""
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": "Who is in it?"}]
