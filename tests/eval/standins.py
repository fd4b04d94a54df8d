"""Readers that are no models: one that looks up in its prompt what a probe asks for, and one that never knows."""

import re
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gsa.eval.reader import Continuation, Reader, ReaderTokenizer, Score


class Bytes(ReaderTokenizer):
    """A token for each byte of UTF-8."""

    eos_id = 256
    bos_id = None
    vocab_size = 257

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(id_ for id_ in ids if id_ < 256).decode(errors="replace")


class StandIn(Reader):
    """Answers with a function of the prompt's text, and chooses with one of the prompt's ids.

    The log-probability of a token is a number that depends on the token and on how many stand before it.
    """

    def __init__(
        self,
        answer: Callable[[str], str] = lambda prompt: "",
        value: Callable[[Sequence[int], Sequence[int]], bool] = lambda context, continuation: False,
        max_length: int | None = None,
    ) -> None:
        self.name, self.tokenizer, self.max_length = "stand-in", Bytes(), max_length
        self.about = {"kind": "stand-in", "fingerprint": "0"}
        self._answer, self._value = answer, value
        self.asked = 0
        """Prompts, requests and ids that were read."""
        self.longest = 0
        """Ids that were read at once."""

    def score(
        self, requests: Sequence[Continuation], *, batch_size: int, reuse: bool = True
    ) -> Iterator[tuple[int, Score]]:
        for number, request in reversed(list(enumerate(requests))):
            self.asked += 1
            right = self._value(request.context, request.continuation)
            yield number, Score(-1.0 if right else -2.0, right)

    def log_probs(self, ids: Sequence[int], state: object = None) -> tuple[Tensor, object]:
        before = 0 if state is None else int(state[0])
        self.asked += len(ids)
        self.longest = max(self.longest, before + len(ids))
        places = torch.arange(before, before + len(ids)).float()
        found = -torch.log1p(places) - torch.tensor(list(ids)) / 256
        return (found if state is not None else found[1:]), torch.tensor([before + len(ids)])

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, until: Sequence[str], batch_size: int
    ) -> Iterator[tuple[int, str]]:
        for number, prompt in reversed(list(enumerate(prompts))):
            self.asked += 1
            text = self._answer(self.tokenizer.decode(prompt))
            for stop in until:
                text = text.split(stop, 1)[0]
            yield number, self.tokenizer.decode(self.tokenizer.encode(text)[:max_tokens])


def look_up(prompt: str) -> str:
    """The right answer to a question of phonebook, needle or copy."""
    if "magic numbers" in prompt:
        key = re.findall(r"magic number for (\S+) mentioned", prompt)[-1]
        return " certainly " + re.findall(rf"magic numbers for {key} is: (\d+)\.", prompt)[0] + ", as one reads."
    *lines, last = prompt.split("\n")
    if last.endswith(":"):
        return next(line for line in lines if line.startswith(last)).removeprefix(last) + "\nSomebody Else: 1"
    return lines[0].removeprefix(last) + "\nand so on"


def look_up_token(context: Sequence[int], continuation: Sequence[int]) -> bool:
    """Whether a continuation is the value of the key that ends a context, in a question of mqar made of tokens."""
    *pairs, key = context
    return dict(zip(pairs[0::2], pairs[1::2], strict=True))[key] == continuation[0]


def look_up_word(context: Sequence[int], continuation: Sequence[int]) -> bool:
    """The same in one made of words."""
    *lines, key = bytes(context).decode().split("\n")
    return f"{key}{bytes(continuation).decode()}" in lines


def knowing() -> StandIn:
    """A reader that is always right, but for mqar."""
    return StandIn(look_up)


def ignorant() -> StandIn:
    """A reader that is always wrong."""
    return StandIn(lambda prompt: " 12", lambda context, continuation: False)
