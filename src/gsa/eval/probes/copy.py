"""`gsa probe copy`: random words are written down once more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from gsa.eval.probes.options import ProbeOptions
from gsa.options import choice

if TYPE_CHECKING:
    from gsa.eval.probes.asking import Probe, Question
    from gsa.eval.reader import Reader

Form = Literal["words", "letters"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPARE = 8
"""Tokens that an answer may have beyond a quarter more than the longest line has: it may be cut into other tokens."""


@dataclass(frozen=True)
class Copy(ProbeOptions):
    """Asks a model to repeat random words that it has just read.

    A line of random words stands twice, and its first word a third time; the model writes the line to its end, always
    with the likeliest token. `exact` is the share of lines that are right as a whole, `parts` that of the words in
    their places. The same command goes on where it was stopped.
    """

    name = "copy"

    lengths: str = "10,20,50,100"
    """Words of a line, the first among them, with commas between; at least 2."""
    form: str = choice("words", get_args(Form))
    """Of what a line is made: words of four to nine letters, or single letters; with blanks between."""

    def _maker(self) -> Callable[[Reader], Probe]:
        from gsa.eval.texts import lengths_of

        sizes = lengths_of(self.lengths, "probe copy: lengths", least=2, most=2**16)
        return lambda reader: probe(reader, sizes, self.form, self.samples, self.seed)


def probe(reader: Reader, lengths: list[int], form: str, samples: int, seed: int) -> Probe:
    """The questions of `gsa probe copy`."""
    from gsa.eval.probes.asking import Probe, Question, generating
    from gsa.eval.probes.material import words

    alphabet = words() if form == "words" else tuple(LETTERS)
    questions = []
    for length in lengths:
        lines = []
        for sample in range(samples):
            rng = np.random.default_rng([seed, length, sample])
            lines.append([alphabet[i] for i in rng.integers(len(alphabet), size=length).tolist()])
        # One number for all lines of a length, so that they can be written together.
        spare = max(len(reader.tokenizer.encode(" ".join(parts))) for parts in lines) * 5 // 4 + SPARE
        for parts in lines:
            line = " ".join(parts)
            prompt = reader.tokenizer.encode(f"{line}\n{line}\n{parts[0]}", special=True)
            questions.append(Question((length,), prompt, " ".join(parts[1:]), spare))
    return Probe(
        name="copy",
        title="Copying",
        axes=("length",),
        metrics={"exact": "exact", "parts": form},
        questions=questions,
        grade=grade,
        ask=generating(["\n"]),
        settings={"lengths": lengths, "form": form, "samples": samples, "seed": seed},
        data="made by rule",
        shots=1,
    )


def grade(question: Question, answer: str) -> dict[str, float]:
    """Whether a line is right, and the share of its parts that stand in their places."""
    right, written = question.right.split(" "), answer.split("\n", 1)[0].split()
    hits = sum(one == other for one, other in zip(right, written, strict=False))
    return {"exact": float(right == written), "parts": hits / len(right)}
