"""Sources: what a user names, as a list of inputs in a fixed order. `portions.py` reads them.

    a file       one document of text, whatever its extension; .jsonl has one in each row, .parquet too
    a folder     all files in it and beneath it, in the order of their names, but not hidden ones
    hf:NAME      a dataset of the Hugging Face Hub or a local folder, streamed; hf:NAME:SPLIT, hf:NAME:CONFIG:SPLIT

Text and .jsonl may be compressed (.gz, .zst). A .json file whose first line is an object is read as .jsonl, since many
corpora are published so; one that is an array is refused; any other is text.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePath
from typing import Any

from gsa.data.optional import first_line, hub_failures, optional
from gsa.data.streams import COMPRESSIONS, MAGIC, MAX_ROW_BYTES, Stream, zstandard
from gsa.errors import GSAError
from gsa.files import named

ROWS = {".jsonl", ".ndjson"}
ARCHIVES = ("7z", "bz2", "rar", "tar", "tgz", "xz", "zip")
OTHERS = ("arrow", "bin", "docx", "epub", "gif", "jpeg", "jpg", "mp3", "mp4", "npy", "npz", "pdf", "pkl", "png", "pt")
# Files that are surely no text: the error then names the format, not the first byte that is not UTF-8.
BINARY = {f".{name}" for name in (*ARCHIVES, *OTHERS)}
TEXT_COLUMNS = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null")
SNIFFED = 1 << 16


@dataclass(frozen=True)
class Input:
    """One file, or one dataset that is streamed."""

    name: str
    """Its path, or what follows `hf:`."""
    kind: str
    """text, jsonl, parquet or hf."""
    compression: str | None = None
    size: int | None = None
    """Bytes on disk, None for a stream."""
    changed: int | None = None
    """When the file was changed last, in nanoseconds; of a local dataset, the last one of its files."""
    text_size: int = 0
    """Bytes of text that are surely in it, packed or not."""
    version: str | None = None
    """Of a dataset: the commit on the Hub, or a hash of the names and sizes of its local files."""
    below: str = ""
    """Of a file: its path below the source it is in, which stays the same wherever the source lies."""


def plan(
    sources: Sequence[str], *, field: str = "text", exclude: Sequence[str] = (), leave_out: Sequence[Path] = ()
) -> list[list[Input]]:
    """The inputs of each source, in order; raises for what cannot be read, before anything is.

    `leave_out` are folders and files of our own that may be in a source.
    """
    if not sources:
        raise GSAError("data: no source was given; expected files, folders or hf:NAME")
    unused = set(exclude)
    inputs = [_of_source(source, field, exclude, unused, leave_out) for source in sources]
    for pattern in exclude:
        if pattern in unused:
            raise GSAError(f"data: exclude: {pattern!r} fits no file")
    if not any(inputs):
        raise GSAError(f"data: {', '.join(sources)}: every file is excluded")
    return inputs


def plain_name(source: str) -> str:
    """A source as it is recorded: a folder is the same with a slash behind it, and with ./ in front.

    >>> plain_name("./books/"), plain_name("hf:owner/name:train")
    ('books', 'hf:owner/name:train')
    """
    return source if source.startswith("hf:") else PurePath(source).as_posix()


def _of_source(
    source: str, field: str, exclude: Sequence[str], unused: set[str], leave_out: Sequence[Path]
) -> list[Input]:
    """The inputs of one source; patterns that fit a file are taken out of `unused`."""
    if source.startswith("hf:"):
        return [_of_hub(source.removeprefix("hf:"), field)]
    path = named(source, "data")
    if path.is_dir():
        found = _files(path, leave_out)
        files = [file for file in found if not _excluded(file, path, exclude, unused)]
        if not files:
            raise GSAError(f"data: folder {source} has no files" + (" that are not excluded" if found else ""))
        return [_of_file(file, path, field) for file in files]
    if path.exists():
        return [] if _excluded(path, path.parent, exclude, unused) else [_of_file(path, path.parent, field)]
    is_path = path.is_absolute() or source.startswith((".", "~")) or path.suffix or source.count("/") > 1
    hint = "" if is_path else f"; a dataset of the Hugging Face Hub is hf:{source}"
    raise GSAError(f"data: there is no file or folder {source}{hint}")


def _files(folder: Path, leave_out: Sequence[Path] = ()) -> list[Path]:
    """All files in and beneath a folder, in the order of their paths, without hidden ones; each folder once."""
    found: list[Path] = []
    left_out = {path.resolve() for path in leave_out}
    names = {path.name for path in left_out}
    visited = set()
    for name, folders, files in os.walk(folder, onerror=_unreadable, followlinks=True):
        place, status = Path(name), os.stat(name)
        if (status.st_dev, status.st_ino) in visited:  # by way of a link, which may also lead back
            folders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and (place / name).resolve() not in left_out
        )
        found += [
            place / name
            for name in files
            if not name.startswith(".") and not (name in names and (place / name).resolve() in left_out)
        ]
    return sorted(found, key=lambda path: path.parts)


def _unreadable(error: OSError) -> None:
    raise GSAError(f"data: {error.filename} cannot be read: {error.strerror}")


def _excluded(path: Path, base: Path, patterns: Sequence[str], unused: set[str]) -> bool:
    """Whether a pattern fits a file or a folder it is in: the name, the path below the source, or the path as given."""
    inside = path.relative_to(base)
    places = [inside, *list(inside.parents)[:-1]]
    fitting = set()
    for pattern in patterns:
        plain = PurePath(pattern).as_posix()  # without ./ in front or / behind
        names = [place.name for place in places] + [place.as_posix() for place in places]
        if "/" in plain:
            names += [(base / place).as_posix() for place in places]
        if any(fnmatch(name, plain) for name in names):
            fitting.add(pattern)
    unused -= fitting
    return bool(fitting)


def _of_file(path: Path, base: Path, field: str) -> Input:
    try:
        status = path.stat()
    except OSError as error:
        raise GSAError(f"data: {path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise GSAError(f"data: {path} is no regular file; what comes through a pipe has to be saved first")
    compression = COMPRESSIONS.get(path.suffix.lower())
    suffix = (Path(path.stem).suffix if compression else path.suffix).lower()
    if suffix in BINARY or (compression and suffix == ".parquet"):
        raise GSAError(f"data: {path}: {suffix} files are not read; unpack or convert it, or leave it out (--exclude)")
    if suffix == ".parquet":
        kind, text_size = "parquet", _parquet_text(path, field)
    else:
        kind = _sniffed(path, compression, suffix)
        text_size = status.st_size if kind == "text" else 0
    below = path.relative_to(base).as_posix()
    return Input(str(path), kind, compression, status.st_size, status.st_mtime_ns, text_size, below=below)


def _sniffed(path: Path, compression: str | None, suffix: str) -> str:
    """Whether a file is text or rows, by its name and its beginning; raises for what is neither."""
    if compression == "zst":
        zstandard()
    try:
        with open(path, "rb") as file:
            begins = file.read(4)
            file.seek(0)
            stream = Stream(file, compression)
            head = stream.read(SNIFFED)
            first = _first_line(stream, head) if suffix == ".json" else b""
    except OSError as error:
        raise GSAError(f"data: {path} cannot be read: {error.strerror}") from None
    if compression and begins and not begins.startswith(MAGIC[compression]):
        raise GSAError(f"data: {path} is not compressed as its name says ({compression})")
    if head.count(0) * 100 > len(head) or head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise GSAError(
            f"data: {path} has many zero bytes or the mark of UTF-16, so it is binary or UTF-16; expected text in "
            "UTF-8. Convert it, or leave it out (--exclude)"
        )
    if first.startswith(b"["):
        raise GSAError(
            f"data: {path} is one JSON array; expected an object in each line (.jsonl). Convert it, or leave it out "
            "(--exclude)"
        )
    return "jsonl" if suffix in ROWS or _is_row(first) else "text"


def _first_line(stream: Stream, head: bytes) -> bytes:
    """The first line that is not blank, or as much of it as a row may have and a little more."""
    line, more = bytearray(), head.removeprefix(codecs.BOM_UTF8)
    while more:
        text, end, _ = (more if line else more.lstrip()).partition(b"\n")
        line += text
        if end or len(line) > MAX_ROW_BYTES:
            break
        more = stream.read(SNIFFED)
    return bytes(line)


def _is_row(line: bytes) -> bool:
    """Whether a line is a JSON object; one that is too long to tell is, by its beginning."""
    if not line.startswith(b"{") or len(line) > MAX_ROW_BYTES:
        return line.startswith(b"{")
    try:
        json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return False
    return True


def _parquet_text(path: Path, field: str) -> int:
    """How many bytes a column of text has on disk; raises if a parquet file cannot be read, or has no such column."""
    package, arrow = parquet()
    try:
        with package.ParquetFile(path) as file:
            schema, about = file.schema_arrow, file.metadata
    except (OSError, arrow.ArrowException) as error:
        raise GSAError(f"data: {path} is not a whole parquet file: {error}") from None
    if field not in schema.names:
        raise GSAError(f"data: {path} has no column {field!r}; it has {', '.join(schema.names)} (--field)")
    if schema.names.count(field) > 1:
        raise GSAError(f"data: {path} has {schema.names.count(field)} columns {field!r}, expected one")
    kind = schema.field(field).type
    kind = kind.value_type if arrow.types.is_dictionary(kind) else kind
    if not any(getattr(arrow.types, f"is_{name}")(kind) for name in TEXT_COLUMNS):
        raise GSAError(f"data: {path}: column {field!r} holds {kind}, expected string")
    groups = [about.row_group(i) for i in range(about.num_row_groups)]
    columns = [group.column(i) for group in groups for i in range(about.num_columns)]
    return sum(column.total_compressed_size for column in columns if column.path_in_schema == field)


def parquet() -> tuple[Any, Any]:
    """The packages `pyarrow.parquet` and `pyarrow`."""
    return optional("pyarrow.parquet", "a .parquet file"), optional("pyarrow", "a .parquet file")


def _of_hub(name: str, field: str) -> Input:
    dataset, _, split = _parts_of(name)
    with _dataset_errors(dataset, split):
        version, changed = _version(dataset)
    features = open_dataset(name, version).features
    if features is not None and field not in features:
        raise GSAError(f"data: dataset {name} has no field {field!r}; it has {', '.join(features)} (--field)")
    return Input(name, "hf", changed=changed, version=version)


def _version(dataset: str) -> tuple[str, int | None]:
    """What tells a dataset from the same one at another time, and when its files were changed, if they are here."""
    if not Path(dataset).exists():
        from huggingface_hub import HfApi

        # One request without the retries of a download, so that a wrong name is an error at once.
        return str(HfApi().dataset_info(dataset, timeout=10).sha), None
    files = _files(Path(dataset)) if Path(dataset).is_dir() else [Path(dataset)]
    status = {str(path): path.stat() for path in files}
    sizes = json.dumps([[name, entry.st_size] for name, entry in status.items()])
    changed = max((entry.st_mtime_ns for entry in status.values()), default=0)
    return hashlib.sha256(sizes.encode()).hexdigest(), changed


def open_dataset(name: str, version: str | None) -> Any:
    """The dataset NAME, NAME:SPLIT or NAME:CONFIG:SPLIT, streamed; one of the Hub as it was at a commit."""
    dataset, config, split = _parts_of(name)
    revision = None if Path(dataset).exists() else version
    with _dataset_errors(dataset, split):
        return optional("datasets", f"hf:{name}").load_dataset(
            dataset, config, split=split, streaming=True, revision=revision
        )


def _parts_of(name: str) -> tuple[str, str | None, str]:
    """Dataset, config and split."""
    optional("datasets", f"hf:{name}")
    dataset, *rest = name.split(":")
    if not dataset or len(rest) > 2 or not all(rest):
        raise GSAError(f"data: hf:{name}: expected hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
    return dataset, rest[0] if len(rest) == 2 else None, rest[-1] if rest else "train"


@contextmanager
def _dataset_errors(dataset: str, split: str) -> Iterator[None]:
    try:
        yield
    except hub_failures() as error:
        raise GSAError(f"data: dataset {dataset!r}, split {split!r} cannot be opened: {first_line(error)}") from None
