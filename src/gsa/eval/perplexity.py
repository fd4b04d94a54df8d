"""`gsa eval MODEL --text FILE`: perplexity by place in the context or by its length, as tables and charts."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gsa.chart import bars, check_picture, save_lines
from gsa.console import tell
from gsa.errors import GSAError
from gsa.eval.extrapolation import ends, extrapolate, fits
from gsa.eval.journal import Journal
from gsa.eval.losses import Passage, checked_windows, measure, passages, perplexity
from gsa.eval.midway import Midway
from gsa.eval.reader import Reader
from gsa.eval.record import keep, record, short_name
from gsa.eval.results import folder_of, result_file
from gsa.eval.standard_error import ratio_error
from gsa.eval.sums import Sums
from gsa.eval.texts import length_name, lengths_of
from gsa.files import byte_count
from gsa.options import check_count
from gsa.table import Column, Table, show

FIELD, LAST, SAMPLES = "text", 256, 4
"""What is usual."""
AXES = {"before": "tokens before", "context": "tokens of context"}
"""The axis of a chart in the terminal, and what a picture has room to call it."""


def run(
    reader: Reader,
    sources: Sequence[str],
    *,
    field: str = FIELD,
    context: int | None = None,
    stride: int | None = None,
    lengths: str | None = None,
    last: int = LAST,
    samples: int = SAMPLES,
    limit_tokens: int | None = None,
    output: str | None = None,
    plot: str | None = None,
    json: bool = False,
    markdown: bool = False,
) -> dict[str, Any]:
    """Measures a model on texts, writes the result file and prints it: a table with a chart, or JSON, or Markdown.

    Args:
        reader: The model.
        sources: Files and folders, as `gsa data prepare` takes them.
        field: Where the text is in a row.
        context: Tokens of a window; by default documents are read whole, or in the longest windows the model takes.
        stride: Tokens by which windows advance, at most `context`, which is also what it is by default.
        lengths: Measure contexts of these lengths instead, as in "1K,4K,64K": the loss of their last tokens.
        last: So many of their last tokens.
        samples: Contexts of each length.
        limit_tokens: Read no more tokens of the texts than so many.
        output: Folder for the result file; by default evaluations/MODEL.
        plot: Picture to write (.png, .svg, .pdf).
        json: Print the result as JSON.
        markdown: Print the table as Markdown.
    """
    if json and markdown:
        raise GSAError("perplexity: json and markdown exclude each other")
    for name, count in {"last": last, "samples": samples, "limit_tokens": limit_tokens}.items():
        check_count(f"perplexity: {name}", count)
    if plot is not None:
        check_picture(plot)
    wishes = {
        "lengths": (lengths, None),
        "last": (last, LAST),
        "samples": (samples, SAMPLES),
        "context": (context, None),
        "stride": (stride, None),
        "limit": (limit_tokens, None),
        "field": (field, FIELD),
    }
    unusual = {name: value for name, (value, usual) in wishes.items() if value != usual}
    if lengths is None:
        if (last, samples) != (LAST, SAMPLES):
            raise GSAError("perplexity: --last and --samples go with --lengths")
        result = _by_position(reader, sources, field, context, stride, limit_tokens, output, unusual, json)
    elif context is not None or stride is not None:
        raise GSAError("perplexity: --lengths are contexts themselves; expected no --context and no --stride with them")
    else:
        wished = lengths_of(lengths, "perplexity: lengths", least=last)
        result = _by_length(reader, sources, field, wished, last, samples, limit_tokens, output, unusual, json)
    show(result, tables(result), json=json, markdown=markdown)
    series, x_name = chart(result)
    if not json and not markdown:
        print(bars(series, x_name, "nats a token"))
    if plot is not None:
        save_lines(series, Path(plot), AXES[x_name], "nats a token", f"{short_name(result)}: {result['data']}")
    return result


def _by_position(
    reader: Reader,
    sources: Sequence[str],
    field: str,
    context: int | None,
    stride: int | None,
    limit_tokens: int | None,
    output: str | None,
    unusual: dict[str, Any],
    quiet: bool,
) -> dict[str, Any]:
    context, stride = checked_windows(reader, context, stride)
    read = passages(reader, sources, field=field, limit_tokens=limit_tokens, say=tell)
    data = _data(sources)
    settings = {"context": context, "stride": stride, "field": field, "limit_tokens": limit_tokens}
    task = f"perplexity:{data}"
    path = folder_of(reader, output) / result_file(task, unusual)
    asked = {"model": reader.about, "settings": settings, "texts": [_fingerprint(part.ids) for part in read]}
    with Journal(path.with_suffix(".answers"), asked, Sums.fits) as journal:
        _tell_what_is_known(journal, "windows")
        midway = Midway(path.with_suffix(".midway"), journal.digest, reader)
        outcome = measure(reader, read, context=context, stride=stride, journal=journal, midway=midway, quiet=quiet)
        result = record(
            reader,
            task=task,
            title="Perplexity",
            data=data,
            limit=limit_tokens,
            metrics=outcome.metrics(),
            main="bits_per_byte" if outcome.text_bytes else "loss",
            samples={
                "id": [f"{number}: {part.name}" for number, part in enumerate(read)],
                "tokens": [part.tokens for part in read],
                "bytes": [part.text_bytes for part in read],
                "nats": [float(sums.nats.sum()) for sums in outcome.sums],
            },
            settings=settings,
            seconds=outcome.seconds,
            tables={"positions": outcome.positions()},
            documents=_digest(read),
        )
        keep(result, path)
        journal.remove()
        midway.remove()
    return result


def _by_length(
    reader: Reader,
    sources: Sequence[str],
    field: str,
    lengths: list[int],
    last: int,
    samples: int,
    limit_tokens: int | None,
    output: str | None,
    unusual: dict[str, Any],
    quiet: bool,
) -> dict[str, Any]:
    fitting = [length for length in lengths if reader.max_length is None or length <= reader.max_length]
    if not fitting:
        raise GSAError(
            f"perplexity: {reader.name} sees at most {reader.max_length} tokens at once, expected a length up to that"
        )
    if fitting != lengths:
        left_out = ", ".join(map(length_name, lengths[len(fitting) :]))
        tell(f"{reader.name} sees at most {reader.max_length} tokens at once; left out: {left_out}")
    began = time.monotonic()
    read = passages(reader, sources, field=field, limit_tokens=limit_tokens, say=tell)
    contexts = ends(read, fitting[-1], samples)
    data = _data(sources)
    settings = {
        "lengths": fitting,
        "last": last,
        "contexts": len(contexts),
        "field": field,
        "limit_tokens": limit_tokens,
    }
    task = f"lengths:{data}"
    asked = {"model": reader.about, "settings": settings, "texts": [_fingerprint(ids) for ids in contexts]}
    path = folder_of(reader, output) / result_file(task, unusual)
    with Journal(path.with_suffix(".answers"), asked, fits) as journal:
        _tell_what_is_known(journal, "contexts")
        rows = extrapolate(reader, contexts, fitting, last=last, journal=journal, quiet=quiet)
        losses = {f"loss_{length_name(row['length'])}": row["losses"] for row in rows}
        result = record(
            reader,
            task=task,
            title="Loss by length of the context",
            data=data,
            limit=limit_tokens,
            metrics={
                name: {"value": sum(values) / len(values), "stderr": ratio_error(values), "higher_is_better": False}
                for name, values in losses.items()
            },
            main=list(losses)[-1],
            samples={"id": list(range(len(contexts))), **losses},
            settings=settings,
            seconds=time.monotonic() - began,
            tables={"lengths": [{name: value for name, value in row.items() if name != "losses"} for row in rows]},
            documents=_digest(read),
        )
        keep(result, path)
        journal.remove()
    return result


def _tell_what_is_known(journal: Journal, what: str) -> None:
    if journal.answers:
        tell(f"{journal.path}: goes on with {len(journal.answers):,} {what} of before")


def tables(result: dict[str, Any]) -> list[Table]:
    """The tables of a result."""
    if "lengths" in result:
        return [_length_table(result)]
    metrics = result["metrics"]
    texts = result["samples"]
    settings = result["settings"]
    if settings["context"] is None:
        how = "whole documents"
    else:
        how = f"windows of {settings['context']:,} tokens" + (
            f", {settings['stride']:,} apart" if settings["stride"] is not None else ""
        )
    bits = metrics.get("bits_per_byte")
    rows = [
        {**row, "name": f"{row['from']:,}" if row["from"] == row["to"] else f"{row['from']:,} to {row['to']:,}"}
        for row in result["positions"]
    ]
    total = {"name": "all", "tokens": sum(texts["tokens"]), "loss": metrics["loss"]["value"]}
    columns = [
        Column("tokens before", "name", left=True),
        Column("tokens", "tokens", "{:,}"),
        Column("loss (nats)", "loss", "{:.4f}"),
        Column("perplexity", lambda row: perplexity(row["loss"]), "{:,.2f}"),
    ]
    of = "document" if len(texts["id"]) == 1 else "documents"
    notes = [f"{len(texts['id']):,} {of}, {sum(texts['bytes']):,} bytes; {how}; {result['seconds']:.1f} s"]
    if bits is not None:
        error = "" if bits["stderr"] is None else f" (standard error {bits['stderr']:.4f})"
        notes.insert(0, f"{bits['value']:.4f} bits per byte{error}")
    return [Table(f"{short_name(result)}: {result['data']}", columns, [*rows, total], notes)]


def _length_table(result: dict[str, Any]) -> Table:
    columns = [
        Column("context", lambda row: length_name(row["length"])),
        Column("loss (nats)", "loss", "{:.4f}"),
        Column("perplexity", "perplexity", "{:,.2f}"),
        Column("tokens/s", "tokens_per_second", "{:,.0f}"),
        Column("peak memory", lambda row: None if row["peak_bytes"] is None else byte_count(row["peak_bytes"])),
        Column("state", lambda row: byte_count(row["state_bytes"])),
    ]
    settings = result["settings"]
    notes = [
        f"loss of the last {settings['last']:,} tokens of {settings['contexts']:,} contexts, which end in the same "
        "places for every length; peak memory is what reading took besides the model"
    ]
    return Table(f"{short_name(result)}: {result['data']}", columns, result["lengths"], notes)


def chart(result: dict[str, Any]) -> tuple[dict[str, dict[int, float]], str]:
    """The loss of a result against tokens before, or against the length of the context; and the name of that axis."""
    name = short_name(result)
    if "lengths" in result:
        return {name: {row["length"]: row["loss"] for row in result["lengths"]}}, "context"
    return {name: {row["from"]: row["loss"] for row in result["positions"]}}, "before"


def _data(sources: Sequence[str]) -> str:
    """What was read, by the names of files."""
    return "+".join(Path(source).name for source in sources)


def _digest(read: Sequence[Passage]) -> str:
    """Tells other texts apart, for whatever tokenizer."""
    return hashlib.sha256("".join(part.digest for part in read).encode()).hexdigest()


def _fingerprint(ids: Any) -> str:
    return hashlib.sha256(ids.tobytes()).hexdigest()
