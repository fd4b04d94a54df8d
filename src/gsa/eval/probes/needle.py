"""`gsa probe needle`: a number is found again that stands somewhere in a long text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gsa.errors import GSAError
from gsa.eval.probes.options import ProbeOptions

if TYPE_CHECKING:
    from gsa.eval.probes.asking import Probe
    from gsa.eval.reader import Reader, ReaderTokenizer

MAX_TOKENS = 128
NEEDLE = "One of the special magic numbers for {key} is: {value}."
INTRODUCTION = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize them. You will be asked "
    "about the numbers afterwards.\n"
)
QUESTION = (
    "\nWhat is the special magic number for {key} mentioned in the provided text? The special magic number for {key} "
    "mentioned in the provided text is"
)
SHORTEST = 128


@dataclass(frozen=True)
class Needle(ProbeOptions):
    """Hides a number in a long text, and asks a model for it: a heat map of length by depth.

    The text is of a book, from a random sentence on; at some depth, from 0 (its beginning) to 100 (its end), it has the
    sentence "One of the special magic numbers for KEY is: NUMBER." The model goes on for up to 128 tokens, always with
    the likeliest, and is right if the number is among what it writes. The same command goes on where it was stopped.
    """

    name = "needle"

    lengths: str = "512,1K,2K,4K,8K"
    """Tokens of the whole prompt, with commas between; at least 128."""
    samples: int = 5
    """Questions for each length and depth."""
    depths: str = "0,25,50,75,100"
    """Where the sentence stands, in percent of the text, with commas between."""
    filler: str | None = None
    """File with the text; by default the book of the package, Sense and Sensibility."""

    def _maker(self) -> Callable[[Reader], Probe]:
        from gsa.console import read_text
        from gsa.eval.texts import lengths_of

        sizes = lengths_of(self.lengths, "probe needle: lengths", least=SHORTEST)
        places = lengths_of(self.depths, "probe needle: depths", least=0, most=100)
        text = None if self.filler is None else read_text(self.filler)
        name = None if self.filler is None else Path(self.filler).name
        return lambda reader: probe(reader, sizes, places, self.samples, self.seed, text, name)


def probe(
    reader: Reader,
    lengths: list[int],
    depths: list[int],
    samples: int,
    seed: int,
    text: str | None = None,
    name: str | None = None,
) -> Probe:
    """The questions of `gsa probe needle`; without a text, in the book of the package."""
    from gsa import pretrained
    from gsa.eval.probes.asking import Probe, Question, generating
    from gsa.eval.probes.material import sentences

    hay = Hay(reader.tokenizer, sentences(pretrained.book() if text is None else text))
    questions = []
    for length in lengths:
        for depth in depths:
            for sample in range(samples):
                # The same text and the same needle at every depth.
                prompt, value = hay.stack(length, depth, np.random.default_rng([seed, length, sample]))
                questions.append(Question((length, depth), prompt, value, MAX_TOKENS))
    return Probe(
        name="needle",
        title="Needle in a haystack",
        axes=("length", "depth"),
        metrics={"found": "found"},
        questions=questions,
        grade=lambda question, answer: {"found": float(question.right in answer)},
        ask=generating([]),
        settings={"lengths": lengths, "depths": depths, "samples": samples, "seed": seed},
        data="Sense and Sensibility" if name is None else name,
    )


class Hay:
    """A text to hide things in: its sentences and how many tokens each has."""

    def __init__(self, tokenizer: ReaderTokenizer, parts: list[str]) -> None:
        self._tokenizer = tokenizer
        self._parts = parts
        self._sizes = [len(self._tokenizer.encode(f" {part}")) for part in parts]
        if not sum(self._sizes):
            raise GSAError("probe needle: there is no text to hide a number in")

    def stack(self, length: int, depth: int, rng: np.random.Generator) -> tuple[list[int], str]:
        """A prompt of at most `length` tokens, and close to it, with a needle at a depth; and the number in it."""
        from gsa.eval.probes.material import words

        first, second = rng.choice(words(), 2, replace=False).tolist()
        facts = {"key": f"{first}-{second}", "value": str(rng.integers(10**6, 10**7))}
        hidden, question = NEEDLE.format(**facts), QUESTION.format(**facts)
        start = int(rng.integers(len(self._parts)))
        room = length - len(self._tokenizer.encode(f"{INTRODUCTION} {hidden}{question}", special=True))
        chosen: list[int] = []
        while (room := room - self._sizes[(start + len(chosen)) % len(self._parts)]) >= 0:
            chosen.append((start + len(chosen)) % len(self._parts))
        while True:
            before = np.cumsum([0, *(self._sizes[i] for i in chosen)])
            place = int(np.abs(before - before[-1] * depth / 100).argmin())
            hay = [self._parts[i] for i in chosen]
            text = " ".join([*hay[:place], hidden, *hay[place:]])
            prompt = self._tokenizer.encode(f"{INTRODUCTION}{text}{question}", special=True)
            if len(prompt) <= length:
                return prompt, facts["value"]
            if not chosen:
                raise GSAError(
                    f"probe needle: lengths must be at least {len(prompt)}, the tokens of a question alone, got "
                    f"{length}"
                )
            chosen.pop()  # together, sentences may have a token or two more than one by one
