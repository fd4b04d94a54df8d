"""Probes: questions to a model that are made up by rule, its answers graded, as a table, a chart and a result file.

A probe is its questions and how an answer is graded. Each question belongs to a cell: a length, or a length and a
depth. Answers are kept as they come, and the same command goes on where it was stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gsa.chart import bars, check_picture, heat_map, save_heat_map, save_lines
from gsa.console import tell
from gsa.errors import GSAError
from gsa.eval.answers import Answers
from gsa.eval.probes.options import ProbeOptions, unusual
from gsa.eval.reader import Reader, open_reader
from gsa.eval.record import keep, record, short_name
from gsa.eval.results import folder_of, result_file
from gsa.eval.standard_error import ratio_error
from gsa.table import Column, Table, show
from gsa.threads import use_threads


@dataclass(frozen=True)
class Question:
    """One question: what the model reads, and what is right."""

    cell: tuple[int, ...]
    """Where it stands in the table: a value for each axis of the probe."""
    prompt: list[int]
    right: Any
    """The right answer, in JSON's types."""
    spare: int
    """Tokens that an answer may have."""
    choices: tuple[list[int], ...] = ()
    """Continuations to choose from, if the answer is not a text."""


Ask = Callable[[Answers, Reader, Sequence[Question], int], list[Any]]
"""Of answers that are known, a reader, questions and a batch size: the answer to each question, in JSON's types."""


@dataclass(frozen=True)
class Probe:
    """Questions, how they are asked, and how answers are graded."""

    name: str
    title: str
    axes: tuple[str, ...]
    """What the values of a cell are: one for a table and a chart of lines, two for a heat map."""
    metrics: dict[str, str]
    """Names of metrics, shares from 0 to 1, and what a table calls them; the first is the main one."""
    questions: list[Question]
    grade: Callable[[Question, Any], dict[str, float]]
    """The metrics of an answer."""
    ask: Ask
    settings: dict[str, Any]
    data: str
    shots: int = 0


def generating(until: Sequence[str]) -> Ask:
    """Questions answered by a text: greedy, up to a stop string, of as many tokens as the answer may have."""

    def ask(answers: Answers, reader: Reader, questions: Sequence[Question], batch_size: int) -> list[Any]:
        found: dict[int, str] = {}
        for spare in sorted({question.spare for question in questions}):
            numbers = [number for number, question in enumerate(questions) if question.spare == spare]
            prompts = [questions[number].prompt for number in numbers]
            texts = answers.texts(reader, prompts, max_tokens=spare, until=until, batch_size=batch_size, what="answers")
            found |= dict(zip(numbers, texts, strict=True))
        return [found[number] for number in range(len(questions))]

    return ask


def run(make: Callable[[Reader], Probe], options: ProbeOptions) -> dict[str, Any]:
    """Opens a model, makes a probe for its tokenizer, asks, and shows what comes out."""
    if options.plot is not None:
        check_picture(options.plot)
    use_threads(options.threads)
    reader = open_reader(
        options.model, weights=options.weights, compute=options.compute, device=options.device, dtype=options.dtype
    )
    return answered(reader, make(reader), options)


def answered(reader: Reader, probe: Probe, options: ProbeOptions) -> dict[str, Any]:
    """Asks all questions of a probe, writes the result file, and shows it."""
    began = time.monotonic()
    questions = _fitting(reader, probe)
    path = folder_of(reader, options.output) / result_file(probe.name, unusual(options))
    kept = path.with_suffix(".answers")
    with Answers(kept, quiet=options.json) as answers:
        if len(answers):
            tell(f"{kept}: goes on with {len(answers)} answers of before")
        try:
            found = probe.ask(answers, reader, questions, options.batch_size)
        except KeyboardInterrupt:
            tell(f"{kept}: what is answered so far; the same command goes on from there")
            raise
        result = _result(reader, probe, questions, found, time.monotonic() - began)
        keep(result, path)
    kept.unlink(missing_ok=True)
    show(result, [_table(result, probe)], json=options.json)
    _draw(result, probe, options)
    return result


def _fitting(reader: Reader, probe: Probe) -> list[Question]:
    """The questions that the model can read with their answers; what is left out is told."""
    limit = reader.max_length
    fits = [limit is None or len(question.prompt) + question.spare <= limit for question in probe.questions]
    # A cell is asked whole or not at all.
    out = {question.cell for question, fit in zip(probe.questions, fits, strict=True) if not fit}
    if out:
        names = ", ".join(str(x) for x in sorted({cell[0] for cell in out}))
        tell(f"{reader.name} sees at most {limit} tokens at once; left out: {probe.axes[0]} {names}")
    questions = [question for question in probe.questions if question.cell not in out]
    if not questions:
        raise GSAError(
            f"probe {probe.name}: {reader.name} sees at most {limit} tokens at once, expected shorter lengths"
        )
    return questions


def _result(
    reader: Reader, probe: Probe, questions: list[Question], answers: list[Any], seconds: float
) -> dict[str, Any]:
    grades = [probe.grade(question, answer) for question, answer in zip(questions, answers, strict=True)]
    cells = [
        {
            **dict(zip(probe.axes, cell, strict=True)),
            "questions": len(members),
            **{name: _mean([grades[i][name] for i in members]) for name in probe.metrics},
        }
        for cell, members in _by_cell(questions).items()
    ]
    return record(
        reader,
        task=probe.name,
        title=probe.title,
        data=probe.data,
        limit=None,
        metrics={
            name: {
                "value": _mean([grade[name] for grade in grades]),
                "stderr": ratio_error([grade[name] for grade in grades]),
                "higher_is_better": True,
            }
            for name in probe.metrics
        },
        main=next(iter(probe.metrics)),
        samples={
            "id": list(range(len(questions))),
            **{axis: [question.cell[i] for question in questions] for i, axis in enumerate(probe.axes)},
            "right": [question.right for question in questions],
            "answer": answers,
            **{name: [grade[name] for grade in grades] for name in probe.metrics},
        },
        settings=probe.settings,
        seconds=seconds,
        shots=probe.shots,
        tables={"cells": cells},
    )


def _by_cell(questions: list[Question]) -> dict[tuple[int, ...], list[int]]:
    found: dict[tuple[int, ...], list[int]] = {}
    for number, question in enumerate(questions):
        found.setdefault(question.cell, []).append(number)
    return dict(sorted(found.items()))


def _table(result: dict[str, Any], probe: Probe) -> Table:
    columns = [Column(axis, axis) for axis in probe.axes]
    columns += [Column("questions", "questions"), *(Column(t, name, "{:.1%}") for name, t in probe.metrics.items())]
    total: dict[str, Any] = {axis: "all" if i == 0 else None for i, axis in enumerate(probe.axes)}
    total["questions"] = len(result["samples"]["id"])
    total |= {name: result["metrics"][name]["value"] for name in probe.metrics}
    error = result["metrics"][result["main"]]["stderr"]
    told = "" if error is None else f"standard error of the last row {error:.1%}; "
    notes = [f"{told}{result['seconds']:.1f} s"]
    return Table(f"{short_name(result)}: {probe.title}", columns, [*result["cells"], total], notes)


def _draw(result: dict[str, Any], probe: Probe, options: ProbeOptions) -> None:
    """The main metric against the axes, in the terminal and, if wished for, as a picture."""
    main, title = result["main"], f"{short_name(result)}: {probe.title}"
    plot = None if options.plot is None else Path(options.plot)
    if len(probe.axes) == 2:
        x, y = probe.axes
        cells = {(row[x], row[y]): row[main] for row in result["cells"]}
        if not options.json:
            print(heat_map(cells, x, y))
        if plot is not None:
            save_heat_map(cells, plot, x, y, title)
        return
    series = {name: {row[probe.axes[0]]: row[key] for row in result["cells"]} for key, name in probe.metrics.items()}
    if not options.json:
        print(bars(series, probe.axes[0], "share"))
    if plot is not None:
        save_lines(series, plot, probe.axes[0], "share", title)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
