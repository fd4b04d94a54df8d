"""Log-probabilities in OpenAI's two forms: the legacy one of completions, and the one of chats."""

from __future__ import annotations

from typing import Any

from gsa.data.tokenizer import Tokenizer
from gsa.data.vocabulary import vocabulary
from gsa.infer.requests import Alternatives, Token


def spelling(tokenizer: Tokenizer, id_: int) -> bytes:
    """The bytes that a token stands for; none for an id that the tokenizer does not know."""
    if id_ >= tokenizer.vocab_size:
        return b""
    spelt = vocabulary(tokenizer).spelt
    return tokenizer.decode([id_]).encode() if spelt is None else spelt[id_]


def shown_token(tokenizer: Tokenizer, id_: int) -> str:
    """A token as text; bytes that are no UTF-8 without its neighbours are written as in bytes:\\xe2\\x82."""
    content = spelling(tokenizer, id_)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


class Legacy:
    """The log-probabilities of a completion: lists side by side, with the place of each token in the text.

    `begin` is where in the text the first token stands.
    """

    def __init__(self, tokenizer: Tokenizer, begin: int = 0) -> None:
        self._tokenizer, self._place = tokenizer, begin
        self._lists = _lists()

    def add(self, id_: int, logprob: float | None, top: Alternatives | None, length: int) -> None:
        """Adds a token, and how many characters of the text have become final with it."""
        lists = self._lists
        lists["tokens"].append(shown_token(self._tokenizer, id_))
        lists["token_logprobs"].append(logprob)
        lists["text_offset"].append(self._place)
        self._place += length
        if logprob is None or top is None:
            lists["top_logprobs"].append(None)
            return
        # The likeliest last: of tokens that are shown alike, it is the one to be told.
        found = {shown_token(self._tokenizer, other): value for other, value in reversed(top)}
        name = lists["tokens"][-1]
        found[name] = max(found.get(name, logprob), logprob)
        lists["top_logprobs"].append(found)

    def taken(self) -> dict[str, Any]:
        """What was added since the last time."""
        lists, self._lists = self._lists, _lists()
        return lists


def _lists() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def chat_logprobs(tokenizer: Tokenizer, tokens: list[Token]) -> dict[str, Any]:
    """The log-probabilities of tokens of a chat."""

    def told(id_: int, logprob: float) -> dict[str, Any]:
        return {"token": shown_token(tokenizer, id_), "logprob": logprob, "bytes": list(spelling(tokenizer, id_))}

    content = []
    for token in tokens:
        assert token.logprob is not None
        top = [told(id_, value) for id_, value in token.top or ()]
        content.append({**told(token.id, token.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}
