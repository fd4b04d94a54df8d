"""Portions: inputs cut into about a megabyte each, which is encoded at once.

The cuts are always at the same places, so that reading can go on from the beginning of any portion.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, BinaryIO

from gsa.data.optional import first_line, hub_failures
from gsa.data.sources import Input, open_dataset, parquet
from gsa.data.streams import MAX_ROW_BYTES, Stream
from gsa.data.tokenizer import cut_before
from gsa.errors import GSAError

PORTION_BYTES = 1 << 20
"""Longest part of a text, in bytes. A portion ends with the part that brings it to half of this or more."""
VALUE_BYTES = 64
"""What a value of a column counts besides its text, in bytes, so that a part of empty values ends too."""
MAX_BATCH_ROWS = 256
"""Rows of a .parquet file that are unpacked at once, at most: how long they are is known only when they are."""


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
    below: str = ""
    """Of text: the path of its file below the source."""


@dataclass
class Portion:
    """Parts that are encoded together, and where they are in the inputs."""

    begin: Position
    parts: list[Part] = field(default_factory=list)
    size: int = 0
    consumed: int = 0
    """Bytes on disk read so far, over all inputs: for showing progress."""


def read_portions(inputs: Sequence[Input], text_field: str, begin: Position | None = None) -> Iterator[Portion]:
    """All portions from a position on. From where a portion began, the same portions follow as the first time."""
    position = begin or Position()
    portion = Portion(position)
    before = sum(entry.size or 0 for entry in inputs[: position.input])
    for index in range(position.input, len(inputs)):
        entry = inputs[index]
        for part, size, consumed, following in _READERS[entry.kind](entry, text_field, position):
            portion.parts.append(part)
            portion.size += size
            portion.consumed = before + consumed
            position = following
            if portion.size >= PORTION_BYTES // 2:
                yield portion
                portion = Portion(position)
        position = Position(index + 1)
        before += entry.size or 0
        if not portion.parts:
            portion = Portion(position)
    if portion.parts:
        yield portion


Parts = Iterator[tuple[Part, int, int, Position]]
"""Parts, each with its size, the bytes on disk read so far, and where the next one begins."""


def _text(entry: Input, text_field: str, position: Position) -> Parts:
    """One document, cut at line ends, or else at words, or else between characters."""
    with _opened(entry) as file:
        stream = Stream(file, entry.compression)
        stream.skip(position.offset)
        rest = b""
        while True:
            data = rest + stream.read(PORTION_BYTES - len(rest))
            ends = len(data) < PORTION_BYTES
            cut = len(data) if ends else cut_before(data, 0, PORTION_BYTES, b"\n", b" ") or _between_characters(data)
            data, rest = data[:cut], data[cut:]
            damage = stream.damage if ends else None
            part = Part(entry.name, "text", position.line, data, position.offset == 0, ends, damage, entry.below)
            position = Position(position.input, position.offset + cut, position.line + data.count(b"\n"))
            if ends:
                _check_unchanged(entry, file)
            yield part, len(data), stream.consumed, position
            if ends:
                return


def _between_characters(data: bytes) -> int:
    """The last place that is not in the middle of a character of UTF-8."""
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
                part = Part(entry.name, "jsonl", position.line, b"", damage=f"a row of more than {MAX_ROW_BYTES} bytes")
                position = Position(position.input, position.offset + skipped + len(end) + 1, position.line + 1)
                yield part, 0, stream.consumed, position
            part = Part(entry.name, "jsonl", position.line, lines, damage=stream.damage if ends else None)
            position = Position(position.input, position.offset + len(lines), position.line + lines.count(b"\n"))
            if ends:
                _check_unchanged(entry, file)
            yield part, len(lines), stream.consumed, position


def _whole_lines(stream: Stream, rest: bytes) -> tuple[bytes, bytes, bool, int]:
    """Lines from `rest` on, what is left of the next, whether this is the end, bytes of a first line left out."""
    data, asked, skipped = bytearray(rest), PORTION_BYTES - len(rest), 0
    while True:
        more = stream.read(asked)
        searched = len(data)
        data += more
        if len(more) < asked:
            return bytes(data), b"", True, skipped
        if cut := data.rfind(b"\n", searched) + 1:
            return bytes(data[:cut]), bytes(data[cut:]), False, skipped
        if len(data) > MAX_ROW_BYTES:
            skipped += len(data)
            data.clear()
        asked = PORTION_BYTES


def _parquet(entry: Input, text_field: str, position: Position) -> Parts:
    """The values of a column, as bytes; `documents.py` decodes them."""
    package, arrow = parquet()
    damage: list[str] = []
    with _opened(entry) as opened, package.ParquetFile(opened, pre_buffer=False, buffer_size=PORTION_BYTES) as file:

        def values() -> Iterator[bytes | None]:
            try:
                for batch in _batches(file, text_field, position.offset):
                    column = batch.column(0)
                    if arrow.types.is_dictionary(column.type):
                        column = column.dictionary_decode()
                    for value in column.cast(arrow.large_binary()):
                        yield value.as_py()
            except (OSError, arrow.ArrowException) as error:
                damage.append(first_line(error))

        for part, size, following in _in_parts(entry, values(), position):
            position = following
            yield part, size, opened.tell(), position
        if damage:
            yield Part(entry.name, "values", position.line, [], damage=damage[0]), 0, opened.tell(), position
            return
        _check_unchanged(entry, opened)


def _batches(file: Any, text_field: str, skip: int) -> Iterator[Any]:
    """The column in pieces of a few rows, without the first `skip` rows."""
    for group in range(file.num_row_groups):
        about = file.metadata.row_group(group)
        if about.num_rows <= skip:
            skip -= about.num_rows
            continue
        columns = [about.column(i) for i in range(about.num_columns)]
        size = sum(column.total_uncompressed_size for column in columns if column.path_in_schema == text_field)
        rows = min(MAX_BATCH_ROWS, max(1, about.num_rows * PORTION_BYTES // max(size, 1) // 4))
        for batch in file.iter_batches(rows, row_groups=[group], columns=[text_field], use_threads=False):
            if skip < len(batch):
                yield batch.slice(skip)
            skip = max(0, skip - len(batch))


def _hub(entry: Input, text_field: str, position: Position) -> Parts:
    """The values of a field of a streamed dataset."""

    def values() -> Iterator[Any]:
        try:
            for row in open_dataset(entry.name, entry.version).skip(position.offset):
                yield row.get(text_field, Missing.FIELD)
        except GSAError:
            raise
        except hub_failures() as error:
            raise GSAError(
                f"data: dataset {entry.name} could not be read on: {first_line(error)}. What is finished stays, the "
                "same command goes on"
            ) from None

    for part, size, following in _in_parts(entry, values(), position):
        yield part, size, 0, following


def _in_parts(entry: Input, values: Iterator[Any], position: Position) -> Iterator[tuple[Part, int, Position]]:
    """Values in parts, each with its size and where the next one begins."""
    part: list[Any] = []
    size = 0

    def ended() -> tuple[Part, int, Position]:
        following = position.offset + len(part)
        return (
            Part(entry.name, "values", position.offset, part),
            size,
            Position(position.input, following, following),
        )

    for value in values:
        part.append(value)
        size += VALUE_BYTES + (len(value) if isinstance(value, str | bytes) else 0)
        if size >= PORTION_BYTES // 2:
            result = ended()
            yield result
            part, size, position = [], 0, result[2]
    if part:
        yield ended()


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
