"""What tests of evaluation share: requests, and what a plain loop says of them."""

import random
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gsa import LM
from gsa.data.tokenizer import load_tokenizer
from gsa.eval.ours import OurReader
from gsa.eval.reader import Continuation, Reader, ReaderTokenizer, Score
from gsa.infer import Engine, Model
from gsa.infer.text import TextEngine

CLOSE = 1e-4
VOCABULARY = 300
"""Enough for the tokenizer of bytes."""


def reader_of(lm: LM, **options: str) -> OurReader:
    """A reader of a model with a vocabulary of 300."""
    return OurReader(TextEngine(Engine(Model.load(lm, **options), batch_size=1), load_tokenizer("bytes")), "small")


def requests(vocabulary: int = VOCABULARY, seed: int = 0) -> list[Continuation]:
    """Contexts of unequal lengths, with and without a common beginning, with one and several continuations."""
    draw = random.Random(seed)

    def ids(least: int, most: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(draw.randint(least, most))]

    shots, more = ids(40, 40), ids(25, 25)
    found = []
    for beginning in ([], shots, shots + more, more):
        for _ in range(2):
            context = beginning + ids(1, 12)
            found += [Continuation(context, ids(1, 6)) for _ in range(draw.choice([1, 2, 4]))]
            found += [Continuation(context + ids(2, 2), ids(1, 1)) for _ in range(3)]
    found.append(Continuation(shots, ids(2, 2)))  # which is all that others have in common
    found.append(found[0])
    return found


def plain(logits: Callable[[Tensor], Tensor], asked: Sequence[Continuation]) -> list[Score]:
    """One request after the other, each read whole; `logits` maps ids [1, T] to [1, T, V]."""
    found = []
    for context, continuation in asked:
        ids = torch.tensor([[*context, *continuation]])
        with torch.no_grad():
            rows = logits(ids[:, :-1])[0, len(context) - 1 :].double().log_softmax(-1)
        targets = torch.tensor(continuation)
        total = float(rows.gather(1, targets[:, None]).sum())
        found.append(Score(total, bool((rows.argmax(-1) == targets).all())))
    return found


def scores(reader: Reader, asked: Sequence[Continuation], batch_size: int = 8, reuse: bool = True) -> list[Score]:
    """The answers in the order of the requests, each of which comes once."""
    answered = list(reader.score(asked, batch_size=batch_size, reuse=reuse))
    assert sorted(number for number, _ in answered) == list(range(len(asked)))
    return [score for _, score in sorted(answered)]


def apart(a: Sequence[Score], b: Sequence[Score]) -> float:
    """The largest difference of log-likelihoods."""
    return max(abs(x.log_likelihood - y.log_likelihood) for x, y in zip(a, b, strict=True))


class Fixed(Reader):
    """Answers at once, and counts what it is asked."""

    class Words(ReaderTokenizer):
        eos_id, bos_id, vocab_size = 0, None, 100

        def encode(self, text: str, *, special: bool = False) -> list[int]:
            return [int(word) for word in text.split()]

        def decode(self, ids: Sequence[int]) -> str:
            return " ".join(map(str, ids))

    def __init__(self, fingerprint: str = "a") -> None:
        self.name, self.max_length, self.tokenizer = "fixed", None, Fixed.Words()
        self.about = {"kind": "gsa", "fingerprint": fingerprint, "weights": "fp32", "compute": "fp32", "device": "cpu"}
        self.asked = 0

    def score(
        self, requests: Sequence[Continuation], *, batch_size: int, reuse: bool = True
    ) -> Iterator[tuple[int, Score]]:
        for number in reversed(range(len(requests))):
            self.asked += 1
            yield number, Score(-float(sum(requests[number].context)), len(requests[number].continuation) == 1)

    def log_probs(self, ids: Sequence[int], state: object = None) -> tuple[Tensor, object]:
        raise NotImplementedError

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, until: Sequence[str], batch_size: int
    ) -> Iterator[tuple[int, str]]:
        for number, prompt in enumerate(prompts):
            self.asked += 1
            yield number, f"{sum(prompt)} {max_tokens} {list(until)}"
