"""Files of states: safetensors, always written in the same way, and checked before any tensor is read."""

from __future__ import annotations

import json
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gsa.errors import GSAError
from gsa.files import NotAFile, open_file, written
from gsa.ops.weights import FORMATS

FORMAT, VERSION = "gsa-state", 1
MAX_HEADER = 2**22
"""Bytes of a header at most; that of a model with a thousand layers is a tenth of it."""
BLOCK = 2**20
"""Bytes that are read at once where no tensor is needed."""
DTYPES = {torch.float32: "F32", torch.int64: "I64"}
DIGEST = "[0-9a-f]{64}"
MAX_TOKENS = 10**12 - 1
"""Tokens of a sequence at most: years of reading. Angles in fp64, and all else made of a count, are exact so far."""
FIELDS = {
    "tokens": "[1-9][0-9]{0,11}",
    "digest": DIGEST,
    "fingerprint": DIGEST,
    "weights": "|".join(FORMATS),
}
"""What the metadata must hold beside format, version and content, and how it is written."""
NOTE, MAX_NOTE = "note", 2**21
"""A field that may stand there too: what its owner knows of a state beside it, as text of so many bytes at most."""
Blocks = Callable[[str], Iterable[bytes | memoryview]]
"""Gives the bytes of a tensor by its name, in blocks."""


class Kind(NamedTuple):
    """What a tensor is, apart from its numbers."""

    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        return next(dtype for dtype, name in DTYPES.items() if name == self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype} {_shown(list(self.shape))}"


def kind_of(x: Tensor) -> Kind:
    """The kind of a tensor; of dtypes, a state has only these."""
    return Kind(DTYPES.get(x.dtype, str(x.dtype)), tuple(x.shape))


def check_kinds(found: Mapping[str, Kind], expected: Mapping[str, Kind]) -> None:
    """Raises for the first tensor that is missing, too many, or of another kind than expected."""
    for name in expected:
        if name not in found:
            raise GSAError(f"tensor {name} is missing")
    for name, kind in found.items():
        if name not in expected:
            raise GSAError(f"tensor {_shown(name)} is not part of a state of this model")
        if kind != expected[name]:
            raise GSAError(f"tensor {name} is {kind}, the model asks for {expected[name]}")


def write_state(path: Path, fields: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Writes a file of these fields and tensors, always with the same bytes. It has its name only when it is whole."""
    note = len(json.dumps(fields.get(NOTE, "")))
    if note > MAX_NOTE:
        raise GSAError(f"its note has {note:,} bytes, a file has room for {MAX_NOTE:,}")
    header, ordered = _header(fields, content_hash(fields, tensors), tensors), _ordered(tensors)
    try:
        if path.exists() and not path.is_file():
            raise GSAError(f"{path} is there and is not a file")
        with written(path) as place, open(place, "wb") as file:
            file.write(header)
            for x in ordered.values():
                file.write(_raw(x))
    except GSAError:
        raise
    except (OSError, ValueError) as error:  # the latter for a name that none can be
        raise GSAError(f"cannot write {path}: {error}") from None


def size_of_file(fields: Mapping[str, str], tensors: Mapping[str, Tensor]) -> int:
    """Bytes of a file of these fields and tensors."""
    return len(_header(fields, "0" * 64, tensors)) + sum(x.nbytes for x in tensors.values())


def content_hash(fields: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """The hash that a file of these fields and tensors holds."""
    kinds = {name: kind_of(x) for name, x in tensors.items()}
    return _content({"format": FORMAT, "version": str(VERSION), **fields}, kinds, lambda name: [_raw(tensors[name])])


def read_state(
    path: Path, expected: Callable[[dict[str, str]], Mapping[str, Kind]]
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The fields and tensors of a file; `expected` gets the fields, and says which tensors go with them or raises.
    A note is among the fields if there is one.

    The content is compared with a hash that the file holds. That finds damage, and changes by someone who does not
    compute the hash anew; it does not tell who wrote the file.
    """
    with _opened(path) as file:
        entries, metadata, kinds = _described(file)
        fields = {name: metadata[name] for name in (*FIELDS, NOTE) if name in metadata}
        check_kinds(kinds, expected(fields))
        _check_places(file, entries, kinds)
        tensors = {name: _read_tensor(file, kinds[name]) for name in entries}
    _check_content(metadata, kinds, lambda name: [_raw(tensors[name])])
    return fields, tensors


def inspect_state(path: Path) -> tuple[dict[str, str], dict[str, Kind]]:
    """The fields of a file, and what its tensors are, for a model that is not at hand.

    All of the file is compared with its hash, whatever its size: no tensor is made.
    """
    with _opened(path) as file:
        entries, metadata, kinds = _described(file)
        for name, kind in kinds.items():
            if kind.dtype not in DTYPES.values():
                raise GSAError(f"tensor {_shown(name)} is {kind}, expected {' or '.join(DTYPES.values())}")
        logits = kinds.get("logits")
        if logits is None or logits.dtype != "F32" or len(logits.shape) != 1:
            raise GSAError(f"tensor logits is {logits or 'missing'}, expected F32 of one dimension")
        _check_places(file, entries, kinds)
        begin = file.tell()
        _check_content(metadata, kinds, lambda name: _blocks(file, begin, *entries[name]["data_offsets"]))
    return {name: metadata[name] for name in FIELDS}, kinds


def _described(file: BufferedReader) -> tuple[dict[str, Any], dict[str, str], dict[str, Kind]]:
    """What a header says of the tensors, the metadata, and what the tensors are; the file stands at their begin."""
    entries = _read_header(file, _size(file))
    metadata = _checked_metadata(entries.pop("__metadata__", None))
    return entries, metadata, {name: _kind(name, entry) for name, entry in entries.items()}


def _size(file: BufferedReader) -> int:
    return os.fstat(file.fileno()).st_size


def _check_content(metadata: Mapping[str, str], kinds: Mapping[str, Kind], content: Blocks) -> None:
    """Raises unless the content has the hash that the metadata tells."""
    others = {name: value for name, value in metadata.items() if name != "content"}
    if _content(others, kinds, content) != metadata["content"]:
        raise GSAError("the content does not have the hash that was saved with it; the file was damaged or changed")


def _content(metadata: Mapping[str, str], kinds: Mapping[str, Kind], content: Blocks) -> str:
    """A hash over metadata, and over names, kinds and bytes of all tensors."""
    digest = sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, kind in sorted(kinds.items()):
        digest.update(json.dumps([name, *kind]).encode())
        for block in content(name):
            digest.update(block)
    return digest.hexdigest()


def _blocks(file: BufferedReader, begin: int, start: int, end: int) -> Iterator[bytes]:
    """The bytes of a tensor that lies at these offsets, a few at a time."""
    file.seek(begin + start)
    while start < end:
        block = file.read(min(BLOCK, end - start))
        if not block:
            raise GSAError(f"truncated while it was read: {end - start} bytes of a tensor are missing")
        start += len(block)
        yield block


def _raw(x: Tensor) -> memoryview:
    """The bytes of a tensor; in its own memory, if that is contiguous and the CPU's."""
    return x.cpu().flatten().view(torch.uint8).numpy().data


def _ordered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In the order of safetensors itself: wide numbers first, so that all are aligned."""
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])))


def _header(fields: Mapping[str, str], content: str, tensors: Mapping[str, Tensor]) -> bytes:
    """What stands before the tensors: the length of a JSON text, and that text, filled up with spaces."""
    metadata = {"format": FORMAT, "version": str(VERSION), **fields, "content": content}
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, x in _ordered(tensors).items():
        start, end = end, end + x.nbytes
        entries[name] = {"dtype": DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    try:
        with open_file(path) as file:
            yield file
    except FileNotFoundError:
        raise GSAError("there is no such file") from None
    except NotAFile:
        raise GSAError("is not a file") from None
    except OSError as error:
        raise GSAError(f"cannot be read: {error}") from None


def _read_header(file: BufferedReader, size: int) -> dict[str, Any]:
    """The object in a file's header, whose length is checked before it is read."""
    if size < 8:
        raise GSAError(f"not a safetensors file: it has {size} bytes")
    length = int.from_bytes(file.read(8), "little")
    if length > size - 8:
        raise GSAError(f"truncated, or not a safetensors file: a header of {length} bytes in a file of {size}")
    if length > MAX_HEADER:
        raise GSAError(f"the header has {length} bytes, expected {MAX_HEADER} at most")
    try:
        text = file.read(length).decode()
        entries = json.loads(text, object_pairs_hook=_without_doubles, parse_int=_whole, parse_float=_no_fraction)
    except (ValueError, RecursionError) as error:
        raise GSAError(f"the header is not JSON as safetensors has it: {error}") from None
    if not isinstance(entries, dict):
        raise GSAError(f"the header is not a JSON object, but {_shown(entries)}")
    return entries


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{_shown(name)} stands there more than once")
        found[name] = value
    return found


def _whole(digits: str) -> int:
    if len(digits) > 19:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _no_fraction(digits: str) -> float:
    raise ValueError(f"{digits[:20]} is not a whole number")


def _checked_metadata(metadata: object) -> dict[str, str]:
    """The metadata, if it is that of a state, complete and written as it should be."""
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise GSAError(f"not a state that gsa saved: it has no metadata with format {FORMAT!r}")
    version = metadata.get("version")
    if version != str(VERSION):
        newer = isinstance(version, str) and re.fullmatch("[1-9][0-9]*", version)
        by = "; it was written by a newer gsa" if newer else ""
        raise GSAError(f"version {_shown(version)} of the format, this gsa reads {VERSION}{by}")
    patterns = {"format": FORMAT, "version": str(VERSION), **FIELDS, "content": DIGEST}
    for name, pattern in patterns.items():
        value = metadata.get(name)
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise GSAError(f"metadata: {name} is {_shown(value)}, expected {pattern}")
    for name, value in metadata.items():
        if name not in (*patterns, NOTE):
            raise GSAError(f"metadata: unknown field {_shown(name)}")
        if name == NOTE and not isinstance(value, str):
            raise GSAError(f"metadata: {NOTE} is {_shown(value)}, expected a text")
    return metadata


def _kind(name: str, entry: object) -> Kind:
    """The kind of a tensor as the header tells it."""
    if isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if isinstance(dtype, str) and re.fullmatch("[A-Z0-9_]{1,9}", dtype) and _sizes(shape) and _sizes(offsets):
            return Kind(dtype, tuple(shape))
    raise GSAError(f"tensor {_shown(name)} is described as {_shown(entry)}, expected dtype, shape and data_offsets")


def _shown(value: object) -> str:
    """What stands in a file, short enough for an error."""
    return reprlib.repr(value)[:100]


def _sizes(numbers: object) -> bool:
    return isinstance(numbers, list) and all(type(number) is int and number >= 0 for number in numbers)


def _check_places(file: BufferedReader, entries: Mapping[str, Any], kinds: Mapping[str, Kind]) -> None:
    """Raises unless the tensors lie end to end, in the order of the header, and fill the rest of the file."""
    end, size = 0, _size(file) - file.tell()
    for name, entry in entries.items():
        start, end = end, end + kinds[name].nbytes
        if entry["data_offsets"] != [start, end]:
            raise GSAError(f"tensor {name} lies at {_shown(entry['data_offsets'])}, expected [{start}, {end}]")
    if size != end:
        what = "truncated" if size < end else "longer than it should be"
        raise GSAError(f"{what}: {size} bytes of tensors, the header tells of {end}")


def _read_tensor(file: BufferedReader, kind: Kind) -> Tensor:
    x = torch.empty(kind.shape, dtype=kind.torch_dtype, device="cpu")
    count = file.readinto(_raw(x))
    if count != kind.nbytes:
        raise GSAError(f"truncated while it was read: {count} bytes came of a tensor of {kind.nbytes}")
    return x
