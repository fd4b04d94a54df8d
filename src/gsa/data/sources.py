"""Sources: what a user names, as a list of inputs in a fixed order. `blocks.py` reads them.

    a file       one document of text, whatever its extension; .jsonl has one in each row, .parquet too
    a folder     all files in it and beneath it, in the order of their names, but not hidden ones
    hf:NAME      a dataset of the Hugging Face Hub or a local folder, streamed; hf:NAME:SPLIT, hf:NAME:CONFIG:SPLIT

Text and .jsonl may be compressed (.gz, .zst). A .json file whose first line is an object with the field is read as
.jsonl, since many corpora are published so; any other is text.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from gsa.data.optional import first_line, hub_failures, optional
from gsa.data.streams import COMPRESSIONS, MAGIC, Stream, zstandard
from gsa.errors import GSAError

ROWS = {".jsonl", ".ndjson"}
ARCHIVES = ("7z", "bz2", "rar", "tar", "tgz", "xz", "zip")
OTHERS = ("arrow", "bin", "docx", "epub", "gif", "jpeg", "jpg", "mp3", "mp4", "npy", "npz", "pdf", "pkl", "png", "pt")
# What is surely no text, so that the message can be about the format rather than about a byte in it.
BINARY = {f".{name}" for name in (*ARCHIVES, *OTHERS)}
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
    """When the file was changed last, in nanoseconds."""


def plan(
    sources: Sequence[str], *, field: str = "text", exclude: Sequence[str] = (), leave_out: Path | None = None
) -> list[list[Input]]:
    """The inputs of each source, in order; raises for what cannot be read, before anything is."""
    if not sources:
        raise GSAError("data: no source was given; expected files, folders or hf:NAME")
    inputs = [_of_source(source, field, exclude, leave_out) for source in sources]
    if not any(inputs):
        raise GSAError(f"data: {', '.join(sources)}: every file is excluded")
    return inputs


def _of_source(source: str, field: str, exclude: Sequence[str], leave_out: Path | None) -> list[Input]:
    if source.startswith("hf:"):
        return [_of_hub(source.removeprefix("hf:"), field)]
    path = Path(source)
    if path.is_dir():
        files = [file for file in _files(path, leave_out) if not _excluded(file, path, exclude)]
        if not files:
            raise GSAError(f"data: folder {source} has no files" + (" that are not excluded" if exclude else ""))
        return [_of_file(file, field) for file in files]
    if path.exists():
        return [] if _excluded(path, path.parent, exclude) else [_of_file(path, field)]
    if path.is_absolute() or source.startswith((".", "~")) or path.suffix or source.count("/") > 1:
        raise GSAError(f"data: there is no file or folder {source}")
    try:
        return [_of_hub(source, field)]
    except GSAError as error:
        raise GSAError(f"data: there is no file or folder {source}; {str(error).removeprefix('data: ')}") from None


def _files(folder: Path, leave_out: Path | None) -> list[Path]:
    """All files in and beneath a folder, in the order of their paths, without hidden ones."""
    found = []
    left_out = None if leave_out is None else leave_out.resolve()
    for place, folders, files in os.walk(folder, onerror=_unreadable):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and (Path(place) / name).resolve() != left_out
        )
        found += [Path(place) / name for name in files if not name.startswith(".")]
    return sorted(found, key=lambda path: path.parts)


def _unreadable(error: OSError) -> None:
    raise GSAError(f"data: {error.filename} cannot be read: {error.strerror}")


def _excluded(path: Path, base: Path, patterns: Sequence[str]) -> bool:
    """Whether a pattern fits a file's name, or its path below the source."""
    inside = path.relative_to(base).as_posix()
    return any(fnmatch(path.name, pattern) or fnmatch(inside, pattern) for pattern in patterns)


def _of_file(path: Path, field: str) -> Input:
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
        _check_parquet(path, field)
        kind = "parquet"
    else:
        kind = _sniffed(path, compression, suffix, field)
    return Input(str(path), kind, compression, status.st_size, status.st_mtime_ns)


def _sniffed(path: Path, compression: str | None, suffix: str, field: str) -> str:
    """Whether a file is text or rows, by its name and its beginning; raises for what is neither."""
    if compression == "zst":
        zstandard()
    try:
        with open(path, "rb") as file:
            begins = file.read(4)
            file.seek(0)
            head = Stream(file, compression).read(SNIFFED)
    except OSError as error:
        raise GSAError(f"data: {path} cannot be read: {error.strerror}") from None
    if compression and begins and not begins.startswith(MAGIC[compression]):
        raise GSAError(f"data: {path} is not compressed as its name says ({compression})")
    if b"\0" in head:
        raise GSAError(
            f"data: {path} has zero bytes, so it is binary or UTF-16; expected text in UTF-8. Convert it, or leave it "
            "out (--exclude)"
        )
    if suffix == ".json":
        try:
            first = json.loads(head.partition(b"\n")[0])
        except ValueError:
            return "text"
        return "jsonl" if isinstance(first, dict) and field in first else "text"
    return "jsonl" if suffix in ROWS else "text"


def _check_parquet(path: Path, field: str) -> None:
    """Raises if a parquet file cannot be read, or has no column of text with this name."""
    package, arrow = parquet()
    try:
        with package.ParquetFile(path) as file:
            schema = file.schema_arrow
    except (OSError, arrow.ArrowException) as error:
        raise GSAError(f"data: {path} is not a whole parquet file: {error}") from None
    if field not in schema.names:
        raise GSAError(f"data: {path} has no column {field!r}; it has {', '.join(schema.names)} (--field)")
    kind = schema.field(field).type
    kind = kind.value_type if arrow.types.is_dictionary(kind) else kind
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
        raise GSAError(f"data: {path}: column {field!r} holds {kind}, expected string")


def parquet() -> tuple[Any, Any]:
    """The packages `pyarrow.parquet` and `pyarrow`."""
    return optional("pyarrow.parquet", "a .parquet file"), optional("pyarrow", "a .parquet file")


def _of_hub(name: str, field: str) -> Input:
    dataset = open_dataset(name)
    if dataset.features is not None and field not in dataset.features:
        raise GSAError(f"data: dataset {name} has no field {field!r}; it has {', '.join(dataset.features)} (--field)")
    return Input(name, "hf")


def open_dataset(name: str) -> Any:
    """The dataset NAME, NAME:SPLIT or NAME:CONFIG:SPLIT, streamed."""
    datasets = optional("datasets", f"hf:{name}")
    from huggingface_hub import HfApi

    dataset, *rest = name.split(":")
    if not dataset or len(rest) > 2 or not all(rest):
        raise GSAError(f"data: hf:{name}: expected hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
    config, split = [None, *(rest or ["train"])][-2:]
    try:
        if not Path(dataset).exists():
            # One look without the retries of a download: a name that is wrong is told at once.
            HfApi().dataset_info(dataset, timeout=10)
        return datasets.load_dataset(dataset, config, split=split, streaming=True)
    except hub_failures() as error:
        raise GSAError(f"data: dataset {dataset!r}, split {split!r} cannot be opened: {first_line(error)}") from None
