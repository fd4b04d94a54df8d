"""`gsa compare`: the verb, its tables and its charts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gsa.console import Compute, Weights
from gsa.eval.arguments import Dtype, max_lengths
from gsa.table import Column, Table, show

if TYPE_CHECKING:
    from gsa.eval.run import Report

AVERAGE = "Average"
FEW = 20
"""Documents, below which a bootstrap makes intervals that are too sure."""


def compare(
    models: list[str],
    *,
    tasks: str | None = None,
    data: str | None = None,
    limit: int | None = None,
    shots: int | None = None,
    max_length: str | None = None,
    batch_size: int = 32,
    weights: Weights = "auto",
    compute: Compute = "auto",
    device: str = "auto",
    dtype: Dtype = "auto",
    threads: int | None = None,
    all_metrics: bool = False,
    by_task: bool = False,
    resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
    plot: str | None = None,
    json: bool = False,
    markdown: bool = False,
) -> None:
    """Puts results of several models side by side, with their differences to the first one.

    Each is a result file, a folder of result files, as `gsa eval` and `gsa probe` write them, or a model: with --tasks
    it is evaluated first, as `gsa eval` does, and without, its results in evaluations/MODEL are taken. Values come with
    their standard errors, differences with an interval from a paired bootstrap: documents that both models have
    answered are drawn anew. A * marks an interval that does not have 0 in it. What makes results hard to compare, such
    as other shots, limits or data, is said beneath the tables.

    Args:
        models: Result files, folders of results, and models; differences are to the first.
        tasks: What models are evaluated on where there is no result yet, as for `gsa eval`. Their results go to
            evaluations/MODEL.
        data: Folder of files with documents, as for `gsa eval`.
        limit: Only the first so many documents of each task.
        shots: Examples before each document, instead of the paper's number.
        max_length: Tokens that inputs are cut to, instead of the paper's.
        batch_size: About how many requests are read together.
        weights: Format of the weights in memory; for models of ours.
        compute: What prompts are computed in; for models of ours.
        device: Where models compute: cpu, cuda, cuda:1 for the second GPU, or auto, a GPU if torch can use one.
        dtype: What models of transformers compute in; auto is that of their weights, and fp32 for a GGUF file.
        threads: Threads of torch; its own choice by default.
        all_metrics: Show all metrics of a task, instead of the main one.
        by_task: A row for each task and a column for each model, instead of the other way round.
        resamples: Times that documents are drawn anew.
        confidence: How sure an interval shall be, between 0 and 1.
        seed: Of the draws; the same again gives the same intervals.
        plot: Picture to write (.png, .svg, .pdf): values with standard errors, and differences with their intervals.
        json: Print JSON instead of tables.
        markdown: Print Markdown instead of text.
    """
    from gsa.chart import check_picture
    from gsa.console import tell
    from gsa.errors import GSAError, raised_by
    from gsa.eval.comparison import Comparison, Settings
    from gsa.eval.contenders import contender

    settings = Settings(resamples, confidence, seed)
    with raised_by("compare"):
        if json and markdown:
            raise GSAError("json and markdown exclude each other")
        if plot is not None:
            check_picture(plot)
        if len(set(models)) < len(models):
            raise GSAError(f"expected each model once, got {', '.join(models)}")
        if tasks is None:
            of_models = {"data": data, "limit": limit, "shots": shots, "max_length": max_length, "threads": threads}
            chosen = {"weights": weights, "compute": compute, "device": device, "dtype": dtype}
            given = [name for name, value in of_models.items() if value is not None]
            given += [name for name, value in chosen.items() if value != "auto"]
            if given:
                raise GSAError(f"{', '.join(given)} would do nothing: nothing is evaluated without --tasks")
    evaluated: list[str] = []

    def evaluate(model: str) -> Report:
        from gsa.eval.reader import open_reader
        from gsa.eval.run import Request, run_tasks
        from gsa.threads import use_threads

        use_threads(threads)
        assert tasks is not None
        request = Request(tasks, data, limit, batch_size, max_lengths=max_lengths(max_length), shots=shots)
        tell(f"{model} is evaluated")
        evaluated.append(model)
        return run_tasks(
            request, lambda: open_reader(model, weights=weights, compute=compute, device=device, dtype=dtype), tell
        )

    with raised_by("compare"):
        contenders = [contender(name, None if tasks is None else evaluate) for name in models]
        if tasks is not None and not evaluated:
            raise GSAError(f"--tasks would do nothing: none of {', '.join(models)} is a model")
        report = Comparison(contenders, settings, all_metrics=all_metrics).report()
    if plot is not None:
        from gsa.eval.compare_picture import save_picture

        save_picture(report, Path(plot))
    show(report, tables(report, by_task=by_task), json=json, markdown=markdown)
    if not json and not markdown:
        print(chart(report))


def tables(report: dict[str, Any], *, by_task: bool = False) -> list[Table]:
    """The values, and where there are several models, their differences to the first."""
    labels = [model["label"] for model in report["models"]]
    columns = [*report["tasks"], *([_averages(report["average"])] if report["average"] else [])]
    warnings = [f"Warning: {warning}" for warning in report["warnings"]]
    values = _table(
        "Results", labels, columns, [[_value(task, cell) for cell in task["values"]] for task in columns], by_task
    )
    notes = ["± is one standard error; of metrics with ↓, lower is better."]
    if report["average"]:
        notes.append(f"The average is that of {', '.join(report['average']['tasks'])}.")
    if len(labels) == 1:
        return [Table(values.title, values.columns, values.rows, [*notes, *warnings])]
    cells = [[_told(task, cell) for cell in task["differences"][1:]] for task in columns]
    title = f"Differences to {labels[0]}"
    differences = _table(title, labels[1:], columns, cells, by_task)
    how = (
        f"Intervals of {report['confidence']:.4g} confidence: paired bootstrap over documents, "
        f"{report['resamples']:,} resamples; * where 0 is not in it."
    )
    few = [f"{cell['documents']} of {task['header']}" for task, cell in _found(columns) if cell["documents"] < FEW]
    if few:
        how += f" Of so few documents intervals come out too narrow: {', '.join(dict.fromkeys(few))}."
    return [
        Table(values.title, values.columns, values.rows, notes),
        Table(title, differences.columns, differences.rows, [how, *warnings]),
    ]


def _found(columns: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """All differences there are, with their columns."""
    return [(column, cell) for column in columns for cell in column["differences"] if cell is not None]


def _averages(average: dict[str, Any]) -> dict[str, Any]:
    """The averages, as if they were a task."""
    return {"header": AVERAGE, "metric": "", "higher_is_better": True, **average}


def _table(
    title: str, labels: Sequence[str], tasks: Sequence[dict[str, Any]], cells: list[list[str]], by_task: bool
) -> Table:
    """Cells of each task, one for each model, with tasks as columns or as rows."""
    headers = [f"{task['header']} {task['metric']}{'' if task['higher_is_better'] else ' ↓'}".strip() for task in tasks]
    if by_task:
        columns = [Column("task", 0, left=True), *(Column(label, place) for place, label in enumerate(labels, 1))]
        return Table(title, columns, [[header, *row] for header, row in zip(headers, cells, strict=True)])
    columns = [Column("model", 0, left=True), *(Column(header, place) for place, header in enumerate(headers, 1))]
    return Table(title, columns, [[label, *(row[place] for row in cells)] for place, label in enumerate(labels)])


def _value(task: dict[str, Any], cell: dict[str, Any] | None) -> str:
    return "" if cell is None else written_value({**cell, "higher_is_better": task["higher_is_better"]})


def written_value(found: dict[str, Any]) -> str:
    """A metric of a result with its standard error; shares are in percent."""
    if found["value"] is None:
        return "inf"
    error = "" if found["stderr"] is None else f" ± {_number(found, found['stderr'])}"
    return _number(found, found["value"]) + error


def _told(task: dict[str, Any], cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    value, low, high = (_number(task, cell[name], sign="+") for name in ("value", "low", "high"))
    return f"{value} [{low}, {high}]{'' if cell['better'] is None else ' *'}"


def _number(metric: dict[str, Any], value: float, sign: str = "") -> str:
    """Shares in percent; others with about four digits."""
    if metric["higher_is_better"]:
        return f"{100 * value:{sign}.1f}"
    size = abs(value)
    return f"{value:{sign},.{0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 10 else 4}f}"


def chart(report: dict[str, Any], width: int = 40) -> str:
    """Bars for the terminal: shares on a scale up to 100%, other metrics on a scale up to their largest."""
    labels = [model["label"] for model in report["models"]]
    space = max(map(len, labels))
    lines = []
    for task in report["tasks"]:
        known = [cell["value"] for cell in task["values"] if cell is not None and cell["value"] is not None]
        longest = 1.0 if task["higher_is_better"] else max([*known, 0.0])
        lines.append(f"{task['header']} {task['metric']}{'' if task['higher_is_better'] else ' ↓'}")
        for label, cell in zip(labels, task["values"], strict=True):
            if cell is not None and cell["value"] is not None:
                share = cell["value"] / longest if longest > 0 else 0.0
                bar = "█" * max(0, min(width, round(width * share)))
                lines.append(f"  {label:<{space}} {bar}{' ' if bar else ''}{_number(task, cell['value'])}")
    return "\n".join(lines)
