"""From sources to shards of tokens, in several processes, with bounded memory, to be taken up again where it stopped.

One process reads portions in order and writes tokens in order; workers encode in between. So the result is the same
bytes for any number of workers, and for any number of interruptions. Each document ends with end of text. A document
is encoded in pieces of some ten thousand characters, cut at line ends where possible: no token crosses such a cut.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from gsa.data.chat_template import ChatTemplate
from gsa.data.documents import no_text
from gsa.data.holdout import HELDOUT, Holdout, Side
from gsa.data.portions import PORTION_BYTES, Position, read_portions
from gsa.data.record import PROGRESS, TIMES, Progress, begun, compare, manifest_of, record, settings_of, total_size
from gsa.data.report import Report
from gsa.data.shards import MANIFEST, TOKENIZER, Manifest, Tokens
from gsa.data.sources import Input, plan
from gsa.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_paths
from gsa.data.worker import Task, Workers
from gsa.data.writer import ShardWriter, write_text
from gsa.errors import GSAError
from gsa.files import byte_count, named, remove_leftovers
from gsa.locks import locked
from gsa.options import check_count
from gsa.terminal import shown
from gsa.threads import usable_cores

SHARD_TOKENS = 2**27
MAX_PROCESSES = 1024


class EmptySide(GSAError):
    """A share of the documents is none of them, or all."""


def prepare(
    sources: Sequence[str],
    tokenizer: str | Tokenizer,
    out: str | Path,
    *,
    field: str = "text",
    processes: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    exclude: Sequence[str] = (),
    max_tokens: int | None = None,
    strict: bool = False,
    progress: bool = True,
    holdout: str | None = None,
    chat_field: str | None = None,
) -> Manifest:
    """The manifest of a folder with the tokens of all sources, which `gsa.data.shards.Tokens` opens.

    With `max_tokens` it ends after the portion of about a megabyte in which so many tokens are reached. With `holdout`,
    a share as in "1%" or a number of documents as in "5", so many are kept from it; their tokens are in the folder
    `heldout` within, where `gsa train` looks for what to evaluate on. Rows of .jsonl that have the `chat_field` are
    conversations: lists of messages with role and content, of which the last is the assistant's. The tokenizer's chat
    template tells them, and names of special tokens within messages are only text.

    The same call again goes on after the last shard that was finished, and has nothing to do if all are. A call with
    other sources, another tokenizer or other options for the same folder is refused.

    >>> prepare(["books/"], "bytes", "data/books")  # doctest: +SKIP
    """
    workers = usable_cores() if processes is None else processes
    check_count("data: processes", workers, most=MAX_PROCESSES)
    check_count("data: shard_tokens", shard_tokens)
    check_count("data: max_tokens", max_tokens)
    if not str(out):
        raise GSAError("data: out is empty, expected the name of a folder")
    out = named(out, "data")
    if out.exists() and not out.is_dir():
        raise GSAError(f"data: {out} is a file, expected a folder")
    split = None if holdout is None else Holdout.parse(holdout)
    tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    planned = plan(sources, field=field, exclude=exclude, leave_out=[out, *tokenizer_paths(tokenizer)])
    inputs = [entry for group in planned for entry in group]
    template = None if chat_field is None else _template(tokenizer, inputs)
    chat = None if template is None else f"{chat_field}, told by the template {template.digest[:12]}"

    def written(place: Path, most: int | None, side: Side | None) -> Manifest:
        part = None if side is None else f"{holdout}, {'held out' if side.heldout else 'the others'}"
        settings = settings_of(sources, planned, tokenizer, field, shard_tokens, exclude, most, part, chat)
        task = Task(str(place / TOKENIZER), tokenizer.fingerprint, field, strict, side)
        if template is not None:
            names = template.names
            task = replace(task, chat_field=chat_field, template=template.template, template_names=names)
        return _written(place, sources, inputs, settings, tokenizer, task, workers, progress)

    if split is None:
        return written(out, max_tokens, None)
    if not (out / HELDOUT).is_dir() and any((out / name).exists() for name in (MANIFEST, PROGRESS)):
        raise GSAError(f"data: {out} was begun without holdout. Remove the folder, or choose another")
    # What is held out comes first: it is little, and if it is nothing, that is known at once.
    most, threshold = split.tokens(max_tokens), split.threshold(sources, inputs, field, chat_field)
    try:
        written(out / HELDOUT, most, Side(threshold, heldout=True))
        return written(out, max_tokens, Side(threshold, heldout=False))
    except EmptySide:
        _forget(out)
        raise


def _template(tokenizer: Tokenizer, inputs: list[Input]) -> ChatTemplate:
    """What tells conversations; raises if there is none, or if conversations cannot be read from an input."""
    for entry in inputs:
        if entry.kind in ("parquet", "hf"):
            raise GSAError(f"data: chat_field: conversations are read from .jsonl files, and {entry.name} is none")
    return ChatTemplate.of(tokenizer)


def _written(
    out: Path,
    sources: Sequence[str],
    inputs: list[Input],
    settings: dict[str, Any],
    tokenizer: Tokenizer,
    task: Task,
    workers: int,
    show: bool,
) -> Manifest:
    """The manifest of a folder with the tokens of all inputs, or of one side of them."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GSAError(f"data: folder {out} cannot be made: {error.strerror}") from None
    with locked(out, "data"):
        remove_leftovers(out)
        if (out / MANIFEST).exists():
            return _finished(out, settings, tokenizer, show)
        state = begun(out, settings, tokenizer.dtype)
        if task.side is None or not task.side.heldout:
            _check_room(out, inputs, tokenizer, settings["max_tokens"], state)
        tokenizer.save(out / TOKENIZER)
        with Report(total_size(inputs), _done(inputs, state), show=show) as report:
            finished = _work(out, inputs, settings, state, tokenizer, task, workers, report)
            manifest = manifest_of(finished, settings, tokenizer)
            if not manifest.tokens and task.side is not None:
                raise EmptySide(
                    f"data: holdout {settings['holdout']}: that is none of the documents in {', '.join(sources)}; "
                    "give another share, or a number of documents as in --holdout 1"
                )
            if not manifest.tokens:
                raise no_text(sources, inputs, task.field, manifest.bad_rows)
            write_text(out / MANIFEST, manifest.to_json())
            (out / PROGRESS).unlink()
        report.summary(manifest, str(out), tokenizer)
        return manifest


def _forget(out: Path) -> None:
    """Removes what was begun in a folder in which one side is empty, so that the same folder takes another share.

    Of the side in `out` itself there are no shards then: what is held out comes first, and is whole before it begins.
    """
    for folder in (out / HELDOUT, out / TOKENIZER):
        shutil.rmtree(folder, ignore_errors=True)
    (out / PROGRESS).unlink(missing_ok=True)
    with suppress(OSError):  # it holds other things
        out.rmdir()


def _work(
    out: Path,
    inputs: list[Input],
    settings: dict[str, Any],
    state: Progress,
    tokenizer: Tokenizer,
    task: Task,
    workers: int,
    report: Report,
) -> Progress:
    """Encodes all portions from where the work stands, and keeps a record after each shard."""
    writer = ShardWriter(out, tokenizer.dtype, settings["shard_tokens"], state.shards)
    made = sum(shard.token_count for shard in state.shards)
    portions = read_portions(inputs, task.field, Position(state.input, state.offset, state.line))
    try:
        with Workers(min(workers, _useful_workers(inputs)), task) as pool:
            for portion, encoded in pool.encode(portions):
                done = state.skip
                state = replace(state, **asdict(portion.begin), skip=0)
                while done < len(encoded.tokens):
                    starts = encoded.starts[np.searchsorted(encoded.starts, done) :] - done
                    taken = writer.append(encoded.tokens[done:], starts)
                    done += taken
                    made += taken
                    if writer.room == 0:
                        writer.finish()
                        state = replace(state, shards=list(writer.shards))
                        record(out, settings, replace(state, skip=done))
                state = state.after(encoded)
                report.update(portion.consumed, made)
                if settings["max_tokens"] is not None and made >= settings["max_tokens"]:
                    break
        if not writer.empty:
            writer.finish()
    finally:
        writer.close()
    return replace(state, shards=list(writer.shards))


def _done(inputs: list[Input], state: Progress) -> tuple[int, int]:
    """Bytes read and tokens made so far."""
    read = (total_size(inputs[: state.input]) or 0) + (state.offset if inputs[state.input].compression is None else 0)
    return read, sum(shard.token_count for shard in state.shards)


def _useful_workers(inputs: list[Input]) -> int:
    """How many workers could have a portion each, where that is known."""
    if any(entry.kind not in ("text", "jsonl") or entry.compression for entry in inputs):
        return usable_cores()
    return (total_size(inputs) or 0) // PORTION_BYTES + 1


def _finished(out: Path, settings: dict[str, Any], tokenizer: Tokenizer, show: bool) -> Manifest:
    """The manifest of a folder that is done, if it is what was asked for and no shard is missing."""
    tokens = Tokens.open(out)
    manifest = tokens.manifest
    then = {**manifest.options, "sources": manifest.sources, "tokenizer": manifest.tokenizer.fingerprint}
    times = then.pop(TIMES, None)
    compare(out, then, settings)
    (out / PROGRESS).unlink(missing_ok=True)
    try:
        tokens.check_tokenizer()
    except GSAError:
        # It has the fingerprint of the one that made the shards. What else is in its files may differ, and is recorded.
        tokenizer.save(out / TOKENIZER)
        manifest = replace(manifest, tokenizer_files=tokenizer.hashes())
        write_text(out / MANIFEST, manifest.to_json())
        Tokens(out, manifest).check_tokenizer()
    if show and times not in (None, settings[TIMES]):
        print(
            f"data: note: the sources were changed after {shown(str(out))} was made; it has what was there then",
            file=sys.stderr,
        )
    if show:
        print(
            f"{shown(str(out))}: already done, {manifest.tokens:,} tokens, {manifest.documents:,} documents",
            file=sys.stderr,
        )
    return manifest


def _check_room(out: Path, inputs: list[Input], tokenizer: Tokenizer, max_tokens: int | None, state: Progress) -> None:
    """Raises if the disk is surely too small: a token counts as six bytes of text, more than most have."""
    tokens = sum(entry.text_size for entry in inputs) // (1 if tokenizer.vocab_size <= 257 else 6)
    tokens = tokens if max_tokens is None else min(tokens, max_tokens)
    written = sum(shard.tokens_size for shard in state.shards)
    needed = tokens * np.dtype(tokenizer.dtype).itemsize - written
    free = shutil.disk_usage(out).free
    if needed > free:
        raise GSAError(
            f"data: {out}: at least {byte_count(needed)} are needed, {byte_count(free)} are free on that disk"
        )
