"""`gsa probe copy`: random words are written down once more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from gsa.console import Compute, Weights
from gsa.eval.arguments import Dtype

if TYPE_CHECKING:
    from gsa.eval.probes.asking import Probe, Question
    from gsa.eval.reader import Reader

Form = Literal["words", "letters"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPARE = 8
"""Tokens that an answer may have beyond a quarter more than the longest line has: it may be cut into other tokens."""


def copy(
    model: str,
    *,
    lengths: str = "10,20,50,100",
    form: Form = "words",
    samples: int = 50,
    seed: int = 0,
    batch_size: int = 8,
    weights: Weights = "auto",
    compute: Compute = "auto",
    device: str = "auto",
    dtype: Dtype = "auto",
    threads: int | None = None,
    output: str | None = None,
    plot: str | None = None,
    json: bool = False,
) -> None:
    """Asks a model to repeat random words that it has just read.

    A line of random words stands twice, and its first word a third time; the model writes the line to its end, always
    with the likeliest token. `exact` is the share of lines that are right as a whole, `parts` that of the words in
    their places. The same command goes on where it was stopped.

    Args:
        model: A model of ours (a name, a folder, a run), one that transformers loads, or a GGUF file.
        lengths: Words of a line, the first among them, with commas between; at least 2.
        form: Of what a line is made: words of four to nine letters, or single letters; with blanks between.
        samples: Lines of each length.
        seed: Of the random choices.
        batch_size: Lines that are written together.
        weights: Format of the weights in memory; for models of ours.
        compute: What prompts are computed in; for models of ours.
        device: Where it computes: cpu, cuda, cuda:1 for the second GPU, or auto, a GPU if torch can use one.
        dtype: What transformers computes in; for models of others.
        threads: Threads of torch; its own choice by default.
        output: Folder for the result file; by default evaluations/MODEL.
        plot: Picture to write (PNG).
        json: Print the result as JSON.
    """
    from gsa.eval.probes.asking import Wishes, check_asked, run
    from gsa.eval.texts import lengths_of

    check_asked("copy", samples=samples, seed=seed)
    sizes = lengths_of(lengths, "probe copy: lengths", least=2, most=2**16)
    run(
        lambda reader: probe(reader, sizes, form, samples, seed),
        model,
        Wishes(output, plot, json, batch_size),
        weights=weights,
        compute=compute,
        device=device,
        dtype=dtype,
        threads=threads,
    )


def probe(reader: Reader, lengths: list[int], form: Form, samples: int, seed: int) -> Probe:
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
