"""`gsa probe phonebook`: a name is looked up in a list of names and numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gsa.eval.probes.options import ProbeOptions

if TYPE_CHECKING:
    from gsa.eval.probes.asking import Probe
    from gsa.eval.reader import Reader

DIGITS = 10
MAX_TOKENS = 24
"""More than ten digits have in any tokenizer, with a space before them."""
EXAMPLES = 2


@dataclass(frozen=True)
class Phonebook(ProbeOptions):
    """Asks a model for numbers in a phone book that it has just read.

    A book has a line for each entry, a full name and ten random digits. Behind it stand two of its lines once more, as
    examples, and then a name of another line. The model's answer is what it writes up to the end of the line, always
    with the likeliest token; it is right if it is the number, digit by digit. The same command goes on where it was
    stopped.
    """

    name = "phonebook"

    lengths: str = "20,50,100,200"
    """Lines of the book, with commas between; at least 3."""

    def _maker(self) -> Callable[[Reader], Probe]:
        from gsa.eval.probes.material import full_names
        from gsa.eval.texts import lengths_of

        lines = lengths_of(self.lengths, "probe phonebook: lengths", least=EXAMPLES + 1, most=len(full_names()))
        return lambda reader: probe(reader, lines, self.samples, self.seed)


def probe(reader: Reader, lines: list[int], samples: int, seed: int) -> Probe:
    """The questions of `gsa probe phonebook`."""
    from gsa.eval.probes.asking import Probe, Question, generating

    questions = []
    for length in lines:
        for sample in range(samples):
            text, number = book(length, np.random.default_rng([seed, length, sample]))
            questions.append(Question((length,), reader.tokenizer.encode(text, special=True), number, MAX_TOKENS))
    return Probe(
        name="phonebook",
        title="Phone book",
        axes=("lines",),
        metrics={"exact": "exact"},
        questions=questions,
        grade=lambda question, answer: {"exact": float(first_line(answer) == question.right)},
        ask=generating(["\n"]),
        settings={"lengths": lines, "samples": samples, "seed": seed},
        data="made by rule",
        shots=EXAMPLES,
    )


def book(length: int, rng: np.random.Generator) -> tuple[str, str]:
    """A phone book with two examples and a question behind it, and the answer."""
    from gsa.eval.probes.material import full_names

    names = rng.permutation(full_names())[:length].tolist()
    numbers = ["".join(map(str, digits)) for digits in rng.integers(0, 10, (length, DIGITS)).tolist()]
    *examples, asked = rng.permutation(length)[: EXAMPLES + 1].tolist()
    entries = [f"{name}: {number}\n" for name, number in zip(names, numbers, strict=True)]
    return "".join([*entries, "\n", *(entries[i] for i in examples), f"{names[asked]}:"]), numbers[asked]


def first_line(answer: str) -> str:
    """The first line of an answer, without blanks around it."""
    return answer.split("\n", 1)[0].strip()
