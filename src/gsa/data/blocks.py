"""Blocks: inputs cut into parts of about a megabyte, in order, always at the same places, from any of them on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, BinaryIO

from gsa.data.optional import first_line
from gsa.data.sources import Input, open_dataset, parquet
from gsa.data.streams import Stream
from gsa.data.tokenizer import cut_before
from gsa.errors import GSAError

BLOCK = 1 << 20
"""Longest part of a text, in bytes. A block ends with the part that fills half of it, as any part does that is cut."""
LONGEST_ROW = 1 << 26
"""A longer row of a .jsonl file is a bad one: it would have to be in memory as a whole."""

MOST_VALUES = 4096
"""A part of a dataset with so many rows ends, however short they are."""


class Missing(Enum):
    """Stands where a row has no such field."""

    FIELD = 1


@dataclass(frozen=True)
class Position:
    """A place in the inputs: which one, bytes or rows before it there, lines or rows before it there."""

    input: int = 0
    offset: int = 0
    line: int = 0


@dataclass(frozen=True)
class Part:
    """A stretch of one input: text of one document, rows of JSON, or values of a column."""

    name: str
    kind: str
    """text, jsonl or values."""
    line: int
    """Lines or rows before it in the input."""
    data: bytes | list[Any]
    """Bytes; of values, each bytes, str or whatever stands there instead."""
    begins: bool = True
    """Whether it is the beginning of a text."""
    ends: bool = True
    """Whether it is the end of a text."""
    damage: str | None = None
    """What was wrong with the input here."""


@dataclass
class Block:
    """Parts that are encoded together, and where they are in the inputs."""

    begin: Position
    parts: list[Part] = field(default_factory=list)
    size: int = 0
    consumed: int = 0
    """Bytes on disk read so far, over all inputs: for showing progress."""


def read_blocks(inputs: Sequence[Input], text_field: str, begin: Position | None = None) -> Iterator[Block]:
    """All blocks from a position on; the positions at which blocks begin give the blocks that were given before."""
    position = begin or Position()
    block = Block(position)
    before = sum(entry.size or 0 for entry in inputs[: position.input])
    for index in range(position.input, len(inputs)):
        entry = inputs[index]
        for part, size, consumed, following in _READERS[entry.kind](entry, text_field, position):
            block.parts.append(part)
            block.size += size
            block.consumed = before + consumed
            position = following
            if block.size >= BLOCK // 2:
                yield block
                block = Block(position)
        position = Position(index + 1)
        before += entry.size or 0
        if not block.parts:
            block = Block(position)
    if block.parts:
        yield block


Parts = Iterator[tuple[Part, int, int, Position]]
"""Parts, each with its size, the bytes on disk read so far, and where the next one begins."""


def _text(entry: Input, text_field: str, position: Position) -> Parts:
    """One document, cut at line ends, or else at words, or else between characters."""
    with _opened(entry) as file:
        stream = Stream(file, entry.compression)
        stream.skip(position.offset)
        rest = b""
        while True:
            data = rest + stream.read(BLOCK - len(rest))
            ends = len(data) < BLOCK
            cut = len(data) if ends else cut_before(data, 0, BLOCK, b"\n", b" ") or _between_characters(data)
            data, rest = data[:cut], data[cut:]
            part = Part(
                entry.name, "text", position.line, data, position.offset == 0, ends, stream.damage if ends else None
            )
            position = Position(position.input, position.offset + cut, position.line + data.count(b"\n"))
            if ends:
                _check_unchanged(entry, file)
            yield part, len(data), stream.consumed, position
            if ends:
                return


def _between_characters(data: bytes) -> int:
    """The last place that is not inside a character of UTF-8."""
    for cut in range(len(data) - 1, len(data) - 5, -1):
        if data[cut] & 0xC0 != 0x80:
            return cut
    return len(data)


def _jsonl(entry: Input, text_field: str, position: Position) -> Parts:
    """Whole lines."""
    with _opened(entry) as file:
        stream = Stream(file, entry.compression)
        stream.skip(position.offset)
        rest, ends = b"", False
        while not ends:
            lines, rest, ends, skipped = _whole_lines(stream, rest)
            if skipped:
                end, _, lines = lines.partition(b"\n")
                part = Part(entry.name, "jsonl", position.line, b"", damage=f"a row of more than {LONGEST_ROW} bytes")
                position = Position(position.input, position.offset + skipped + len(end) + 1, position.line + 1)
                yield part, 0, stream.consumed, position
            part = Part(entry.name, "jsonl", position.line, lines, damage=stream.damage if ends else None)
            position = Position(position.input, position.offset + len(lines), position.line + lines.count(b"\n"))
            if ends:
                _check_unchanged(entry, file)
            yield part, len(lines), stream.consumed, position


def _whole_lines(stream: Stream, rest: bytes) -> tuple[bytes, bytes, bool, int]:
    """Lines from `rest` on, what is left of the next, whether this is the end, bytes of a first line left out."""
    data, asked, skipped = bytearray(rest), BLOCK - len(rest), 0
    while True:
        more = stream.read(asked)
        searched = len(data)
        data += more
        if len(more) < asked:
            return bytes(data), b"", True, skipped
        if cut := data.rfind(b"\n", searched) + 1:
            return bytes(data[:cut]), bytes(data[cut:]), False, skipped
        if len(data) > LONGEST_ROW:
            skipped += len(data)
            data.clear()
        asked = BLOCK


def _parquet(entry: Input, text_field: str, position: Position) -> Parts:
    """The values of a column, as bytes: whether they are UTF-8 is seen to later."""
    package, arrow = parquet()
    done = 0
    with _opened(entry) as opened, package.ParquetFile(opened, pre_buffer=False, buffer_size=BLOCK) as file:
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if done + rows <= position.offset:
                done += rows
                continue
            size = sum(
                column.total_uncompressed_size
                for column in map(file.metadata.row_group(group).column, range(file.metadata.num_columns))
                if column.path_in_schema == text_field
            )
            batches = file.iter_batches(
                max(1, rows * BLOCK // max(size, 1) // 4), row_groups=[group], columns=[text_field], use_threads=False
            )
            try:
                for batch in batches:
                    done += len(batch)
                    if done <= position.offset:
                        continue
                    values = _as_bytes(batch.column(0), arrow)
                    part = Part(entry.name, "values", position.offset, values)
                    position = Position(position.input, done, done)
                    yield part, sum(len(value) for value in values if value is not None), opened.tell(), position
            except (OSError, arrow.ArrowException) as error:
                yield Part(entry.name, "values", done, [], damage=first_line(error)), 0, opened.tell(), position
                return
        _check_unchanged(entry, opened)


def _as_bytes(column: Any, arrow: Any) -> list[bytes | None]:
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(arrow.large_binary()).to_pylist()


def _hub(entry: Input, text_field: str, position: Position) -> Parts:
    """The values of a field of a streamed dataset."""
    values: list[Any] = []
    size = 0
    for row in open_dataset(entry.name).skip(position.offset):
        value = row.get(text_field, Missing.FIELD)
        values.append(value)
        size += len(value) if isinstance(value, str) else 0
        if size >= BLOCK or len(values) >= MOST_VALUES:
            part = Part(entry.name, "values", position.offset, values)
            position = Position(position.input, position.offset + len(values), position.offset + len(values))
            yield part, size, 0, position
            values, size = [], 0
    if values:
        position = Position(position.input, position.offset + len(values), position.offset + len(values))
        yield Part(entry.name, "values", position.offset - len(values), values), size, 0, position


_READERS: dict[str, Callable[[Input, str, Position], Parts]] = {
    "text": _text,
    "jsonl": _jsonl,
    "parquet": _parquet,
    "hf": _hub,
}


@contextmanager
def _opened(entry: Input) -> Iterator[BinaryIO]:
    try:
        file = open(entry.name, "rb")  # noqa: SIM115  (closed below)
    except OSError as error:
        raise GSAError(f"data: {entry.name} cannot be read any more: {error.strerror}") from None
    with file:
        _check_unchanged(entry, file)
        yield file


def _check_unchanged(entry: Input, file: BinaryIO) -> None:
    status = os.fstat(file.fileno())
    if (status.st_size, status.st_mtime_ns) != (entry.size, entry.changed):
        raise GSAError(f"data: {entry.name} has changed since the work on it began; begin anew in another folder")
