"""Recall beyond the window: questions whose answers stand too far back to be seen exactly.

Needles are numbers hidden in a book (`gsa probe needle`), pairs are words that stand beside others (`gsa probe mqar`),
SQuAD's are questions on a paragraph. An answer is written if
each of its tokens is the likeliest in its place, as greedy decoding would have it; nats are the loss of all of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, product
from typing import NamedTuple

import numpy as np
import torch

from gsa.convert.audit import Sizes
from gsa.errors import memory_errors
from gsa.eval.local_data import DataFolder
from gsa.eval.probes.material import sentences, words
from gsa.eval.probes.needle import INTRODUCTION, NEEDLE, QUESTION, Hay
from gsa.eval.progress import Progress
from gsa.eval.reader import ReaderTokenizer
from gsa.eval.tasks.cloze import squad_questions
from gsa.models.lm import LM
from gsa.table import Column, Table

SQUAD = "squad_dev_v1.1"
PROMPT = 'Text: {context}\nQuestion: {question}\nThe answer in the text is "'
"""The open quotation mark asks for words of the text: without it, models that chat answer with a sentence."""
HAY, LONGEST = 192, 512
"""Tokens that a needle is hidden in, at least; and of a prompt with a paragraph of SQuAD, at most."""
DEPTHS, SAMPLES = (0, 25, 50, 75), 200
"""Where needles stand, in percent of the text, and how many are tried to find some at every distance."""


@dataclass(frozen=True)
class Question:
    """A prompt and its answer, as ids."""

    kind: str
    prompt: list[int]
    answer: list[int]
    back: int
    """Tokens from the last place where the answer stands to the end of the prompt."""


class Distance(NamedTuple):
    """How far back answers stand, in tokens."""

    least: int
    most: int | None

    def holds(self, back: int) -> bool:
        return back >= self.least and (self.most is None or back <= self.most)

    @property
    def name(self) -> str:
        return f"{self.least} or more" if self.most is None else f"{self.least} to {self.most}"


@dataclass(frozen=True)
class Cell:
    """What a model made of the questions of a kind whose answers are so far back."""

    kind: str
    back: Distance
    model: str
    questions: int
    written: float
    """Share of answers."""
    nats: float
    """The mean loss of an answer."""


def distances(sizes: Sizes) -> list[Distance]:
    """Beyond the window, but not that of equal state; and beyond both. One for all, if there is no window."""
    if not sizes.slots:
        return [Distance(1, None)]
    equal = sizes.near + sizes.slots
    return [Distance(sizes.near + 1, equal), Distance(equal + 1, None)]


def questions_of(
    tokenizer: ReaderTokenizer, book: str, sizes: Sizes, count: int, data: DataFolder, seed: int = 0
) -> list[Question]:
    """So many needles in a book, as many pairs, and as many questions of SQuAD if there is a folder of data."""
    found = [*_taken(_needles(tokenizer, book, sizes, seed), sizes, count)]
    found += _taken(_pairs(tokenizer, sizes, seed), sizes, count)
    if data.folder is not None:
        found += _taken(_squad(tokenizer, data, seed), sizes, count)
    return found


def _taken(questions: Iterator[Question], sizes: Sizes, count: int) -> Iterator[Question]:
    """The first questions whose answers are beyond the window and behind the sinks, as many at each distance."""
    left = dict.fromkeys(distances(sizes), -(-count // len(distances(sizes))))
    for question in questions:
        for distance in left:
            kept_for_ever = len(question.prompt) - question.back < sizes.sinks
            if left[distance] and distance.holds(question.back) and not kept_for_ever:
                left[distance] -= 1
                yield question
        if not any(left.values()):
            return


def _needles(tokenizer: ReaderTokenizer, book: str, sizes: Sizes, seed: int) -> Iterator[Question]:
    hay = Hay(tokenizer, sentences(book))
    length = len(tokenizer.encode(INTRODUCTION + NEEDLE + QUESTION)) + _beyond(sizes)
    for sample in range(SAMPLES):
        for depth in DEPTHS:
            prompt, value = hay.stack(length, depth, np.random.default_rng([seed, sample]))
            yield _question("needle", tokenizer, prompt, value, tokenizer.encode(f" {value}"))


def _pairs(tokenizer: ReaderTokenizer, sizes: Sizes, seed: int) -> Iterator[Question]:
    """Lines of "key: value", of words that stand once each, and then one of the keys."""
    known = words()
    for sample in range(SAMPLES):
        chance = np.random.default_rng([seed, 1, sample])
        drawn = [known[i] for i in chance.permutation(len(known)).tolist()]
        lines = [f"{key}: {value}\n" for key, value in zip(drawn[::2], drawn[1::2], strict=True)]
        count = min(-(-_beyond(sizes) // len(tokenizer.encode(lines[0]))), len(lines))
        for asked in chance.permutation(count)[: len(DEPTHS)].tolist():
            key, value = drawn[2 * asked : 2 * asked + 2]
            prompt = tokenizer.encode(f"{''.join(lines[:count])}{key}:", special=True)
            yield _question("pairs", tokenizer, prompt, f" {value}", tokenizer.encode(f" {value}"))


def _beyond(sizes: Sizes) -> int:
    """Tokens of a text in which answers at every distance have room."""
    return max(HAY, 3 * (sizes.near + sizes.slots) // 2)


def _squad(tokenizer: ReaderTokenizer, data: DataFolder, seed: int) -> Iterator[Question]:
    """In random order; questions that name their answer, or whose paragraph does not have it, are left out."""
    asked = list(squad_questions(data.rows(SQUAD)[0]))
    for number in np.random.default_rng(seed).permutation(len(asked)):
        context, question, (answer, *_) = asked[number]
        prompt = tokenizer.encode(PROMPT.format(context=context, question=question), special=True)
        if answer in context and answer not in question and len(prompt) <= LONGEST:
            yield _question("SQuAD", tokenizer, prompt, answer, tokenizer.encode(answer))


def _question(kind: str, tokenizer: ReaderTokenizer, prompt: list[int], answer: str, ids: list[int]) -> Question:
    """A question whose answer, as it follows the prompt, has these ids."""
    ends = range(1, len(prompt) + 1)
    back = ends[bisect_left(ends, True, hi=len(ends) - 1, key=lambda k: answer in tokenizer.decode(prompt[-k:]))]
    return Question(kind, prompt, ids, back)


def ask(models: Mapping[str, LM], questions: Sequence[Question], sizes: Sizes, *, quiet: bool = False) -> list[Cell]:
    """Every question to every model."""
    total = len(models) * sum(len(question.prompt) for question in questions)
    answers: dict[str, list[tuple[bool, float]]] = {name: [] for name in models}
    with torch.no_grad(), memory_errors("verify"), Progress(total, "tokens of questions", quiet=quiet) as progress:
        for question in questions:
            for name, model in models.items():
                answers[name].append(answered(model, question))
                progress.advance(len(question.prompt))
    cells = []
    for kind, distance in product(dict.fromkeys(question.kind for question in questions), distances(sizes)):
        asked = [question.kind == kind and distance.holds(question.back) for question in questions]
        for name in models if any(asked) else ():
            written, nats = np.array(list(compress(answers[name], asked)), float).T
            cells.append(Cell(kind, distance, name, len(nats), float(written.mean()), float(nats.mean())))
    return cells


def answered(model: LM, question: Question) -> tuple[bool, float]:
    """Whether greedy decoding writes the answer, and the loss of the answer in nats."""
    answer = torch.tensor(question.answer)
    ids = torch.tensor([[*question.prompt, *question.answer[:-1]]])
    x = model.model(ids, return_state=False)[0][:, -len(answer) :]
    log_probs = model.lm_head(x)[0].float().log_softmax(-1)
    return bool((log_probs.argmax(-1) == answer).all()), -float(log_probs.gather(1, answer[:, None]).sum())


def tables(cells: Sequence[Cell]) -> list[Table]:
    """A row for each kind and distance, a column for each model."""
    rows: dict[tuple[str, Distance], dict[str, Cell]] = {}
    for cell in cells:
        rows.setdefault((cell.kind, cell.back), {})[cell.model] = cell
    models = list(dict.fromkeys(cell.model for cell in cells))

    def columns(figure: str, form: str) -> list[Column]:
        def of(name: str) -> Column:
            return Column(name, lambda row: getattr(row[name], figure), form)

        return [
            Column("answer", lambda row: row[models[0]].kind, left=True),
            Column("tokens back", lambda row: row[models[0]].back.name),
            Column("questions", lambda row: row[models[0]].questions),
            *(of(name) for name in models),
        ]

    return [
        Table(
            "Recall: answers written, always with the likeliest token", columns("written", "{:.0%}"), [*rows.values()]
        ),
        Table("Recall: nats of an answer", columns("nats", "{:.2f}"), [*rows.values()]),
    ]
