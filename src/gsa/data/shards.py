"""Tokens on disk: a manifest, and shards that are mapped into memory. Format and reader; `writer.py` writes.

    manifest.json          what is here: counts, tokenizer, sources, and of every file its size and sha256
    tokens-00000.npy       one row of ids, uint16 or uint32; documents lie end to end, each with end of text as its last
    documents-00000.npy    int64: positions in the shard at which documents begin; one may go on into the next shard
    tokenizer/             the tokenizer as a Hugging Face folder

Nothing here but a check of the tokenizer needs more than numpy. A file that is missing, cut short or of another kind is
found when the folder is opened; a changed byte by `Tokens.verify`.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gsa.errors import GSAError
from gsa.files import named, open_file, read_json, sha256
from gsa.terminal import quoted

FORMAT = 1
MANIFEST, TOKENIZER = "manifest.json", "tokenizer"
HEADER_SIZE = 128
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class TokenizerInfo:
    """What shards know of the tokenizer that made them."""

    name: str
    fingerprint: str
    vocab_size: int
    eos_id: int


@dataclass(frozen=True)
class Shard:
    """Two files of a shard: names, counts, sizes in bytes and hashes."""

    tokens: str
    documents: str
    token_count: int
    document_count: int
    tokens_size: int
    documents_size: int
    tokens_sha256: str
    documents_sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a folder of tokens holds."""

    tokenizer: TokenizerInfo
    dtype: str
    """uint16 or uint32."""
    tokens: int
    documents: int
    text_bytes: int
    """Length of all documents in UTF-8, for bits per byte."""
    bad_rows: dict[str, int]
    """Rows that were left out, by kind."""
    undecodable_bytes: int
    """Bytes that were no UTF-8 and were replaced."""
    sources: list[dict[str, Any]]
    options: dict[str, Any]
    """Everything else that decides what is in the shards."""
    shards: list[Shard]
    tokenizer_files: dict[str, str]
    """The sha256 of the tokenizer's files by name."""

    def to_json(self) -> str:
        """The manifest as text."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """A manifest from its file, every field of it checked."""
        values = read_json(path, made_by="gsa data prepare")
        if values.pop("format", None) != FORMAT:
            raise GSAError(f"{path}: expected format {FORMAT}, as this version of gsa writes")
        values = {"tokenizer_files": {}, **values}  # which earlier manifests lack
        manifest: Manifest = checked(cls, values, str(path))
        for i, shard in enumerate(manifest.shards):
            if (shard.tokens, shard.documents) != shard_names(i):
                raise GSAError(f"{path}: shard {i} is {shard.tokens!r}, {shard.documents!r}; expected {shard_names(i)}")
        for name in manifest.tokenizer_files:
            if Path(name).name != name:
                raise GSAError(f"{path}: tokenizer_files: {quoted(name)} is not the name of a file beside the others")
        tokens = sum(shard.token_count for shard in manifest.shards)
        documents = sum(shard.document_count for shard in manifest.shards)
        if (tokens, documents) != (manifest.tokens, manifest.documents):
            raise GSAError(f"{path}: the counts of the shards do not add up to the counts of the whole")
        if manifest.dtype != token_dtype(manifest.tokenizer.vocab_size):
            raise GSAError(
                f"{path}: dtype is {manifest.dtype!r}, expected {token_dtype(manifest.tokenizer.vocab_size)!r}"
            )
        return manifest


def shard_names(index: int) -> tuple[str, str]:
    """The names of a shard's two files."""
    return f"tokens-{index:05d}.npy", f"documents-{index:05d}.npy"


def token_dtype(vocab_size: int) -> str:
    """The smaller of uint16 and uint32 that holds every id."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def checked(kind: Any, values: Any, where: str) -> Any:
    """A dataclass from JSON; raises for a field that is missing, unknown or of another type."""
    if not isinstance(values, dict):
        raise GSAError(f"{where}: expected an object, got {type(values).__name__}")
    expected = {entry.name: entry.type for entry in fields(kind)}
    for name in values:
        if name not in expected:
            raise GSAError(f"{where}: unknown field {name!r}")
    result: dict[str, Any] = {}
    for name, annotation in expected.items():
        if name not in values:
            raise GSAError(f"{where}: field {name!r} is missing")
        value = values[name]
        if annotation == "TokenizerInfo":
            value = checked(TokenizerInfo, value, f"{where}: {name}")
        elif annotation == "list[Shard]" and isinstance(value, list):
            value = [checked(Shard, shard, f"{where}: shard {i}") for i, shard in enumerate(value)]
        elif not _fits(value, str(annotation)):
            raise GSAError(f"{where}: {name} must be {annotation}, got {value!r:.80}")
        result[name] = value
    return kind(**result)


def _fits(value: Any, annotation: str) -> bool:
    if annotation == "int":
        return type(value) is int and value >= 0
    if annotation == "str":
        return isinstance(value, str)
    if annotation == "list[dict[str, Any]]":
        return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)
    if annotation == "dict[str, int]":
        return isinstance(value, dict) and all(_fits(entry, "int") for entry in value.values())
    if annotation == "dict[str, str]":
        return isinstance(value, dict) and all(_fits(entry, "str") for entry in value.values())
    return annotation == "dict[str, Any]" and isinstance(value, dict)


def npy_header(dtype: str, count: int) -> bytes:
    """The head of a .npy file with one row of numbers, always of the same length."""
    text = f"{{'descr': {np.dtype(dtype).newbyteorder('<').str!r}, 'fortran_order': False, 'shape': ({count},), }}"
    return (
        b"\x93NUMPY\x01\x00" + (HEADER_SIZE - 10).to_bytes(2, "little") + text.ljust(HEADER_SIZE - 11).encode() + b"\n"
    )


class Tokens:
    """All tokens of a folder as one long row, read from disk as they are asked for.

    Positions count from the first token of the first shard. May be pickled, e.g. for workers of a DataLoader: they open
    the files again.

    >>> tokens = Tokens.open("data/books")  # doctest: +SKIP
    >>> tokens.read(0, 2048), tokens.document_starts(0, 2048)  # doctest: +SKIP
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.length = manifest.tokens
        self.documents = manifest.documents
        self.text_bytes = manifest.text_bytes
        self.tokenizer = manifest.tokenizer
        self._begins = list(accumulate((shard.token_count for shard in manifest.shards), initial=0))
        self._mapped: dict[str, NDArray[Any]] = {}

    @classmethod
    def open(cls, folder: str | Path) -> Tokens:
        """The tokens of a folder, after a look at every file's head and size; `verify` looks at every byte."""
        folder = named(folder, "data")
        if not folder.is_dir():
            raise GSAError(f"{folder}: there is no such folder; `gsa data prepare` writes one")
        if not (folder / MANIFEST).exists() and (folder / "progress.json").exists():
            raise GSAError(f"{folder}: not finished; the command `gsa data prepare` that began it goes on with it")
        manifest = Manifest.read(folder / MANIFEST)
        for shard in manifest.shards:
            check_shard(folder, shard, manifest.dtype)
        return cls(folder, manifest)

    def __len__(self) -> int:
        return self.length

    @property
    def fingerprint(self) -> str:
        """One hash for everything in the shards."""
        hashes = [f"{shard.tokens_sha256} {shard.documents_sha256}\n" for shard in self.manifest.shards]
        return hashlib.sha256("".join(hashes).encode()).hexdigest()

    def verify(self) -> None:
        """Raises for the first file whose bytes are not those that were written, and for another tokenizer."""
        self.check_tokenizer()
        for shard in self.manifest.shards:
            for name, expected in ((shard.tokens, shard.tokens_sha256), (shard.documents, shard.documents_sha256)):
                _check_bytes(self.folder / name, expected)

    def check_tokenizer(self) -> None:
        """Raises if the tokenizer beside the shards is missing, or not the one that made them."""
        from gsa.data.tokenizer import load_tokenizer

        path = self.folder / TOKENIZER
        if not path.is_dir():
            raise GSAError(f"{path}: the folder is missing; the command that made {self.folder} writes it again")
        found = load_tokenizer(path).fingerprint
        if found != self.tokenizer.fingerprint:
            raise GSAError(
                f"{path}: its fingerprint is {found[:12]}, expected {self.tokenizer.fingerprint[:12]}, that of the "
                f"tokenizer of the shards; the command that made {self.folder} writes it again"
            )
        for name, expected in self.manifest.tokenizer_files.items():
            try:
                _check_bytes(path / name, expected)
            except GSAError as error:
                raise GSAError(f"{error}; the command that made {self.folder} writes it again") from None

    def read(self, begin: int, end: int) -> Ids:
        """The ids at positions begin to end (not included), from as many shards as that takes."""
        parts = [
            self._map(self.manifest.shards[i].tokens, self.manifest.shards[i].token_count)[first:last]
            for i, first, last in self._spans(begin, end)
        ]
        return np.concatenate(parts, dtype=np.int64) if parts else np.empty(0, np.int64)

    def document_starts(self, begin: int, end: int) -> Ids:
        """The positions from begin to end (not included) at which documents begin, in order."""
        parts = []
        for i, first, last in self._spans(begin, end):
            starts = self._map(self.manifest.shards[i].documents, self.manifest.shards[i].document_count)
            low, high = np.searchsorted(starts, [first, last])
            parts.append(starts[low:high] + self._begins[i])
        return np.concatenate(parts, dtype=np.int64) if parts else np.empty(0, np.int64)

    def _spans(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """Which shards hold begin to end, each with the range inside it."""
        if not 0 <= begin <= end <= self.length:
            raise GSAError(f"{self.folder}: positions {begin} to {end} are not within its {self.length} tokens")
        spans = []
        i = bisect_right(self._begins, begin) - 1
        while begin < end:
            last = min(end, self._begins[i + 1])
            if last > begin:
                spans.append((i, begin - self._begins[i], last - self._begins[i]))
            begin = last
            i += 1
        return spans

    def _map(self, name: str, count: int) -> NDArray[Any]:
        if name not in self._mapped:
            mode: Any = "r" if count else None  # an empty file cannot be mapped
            self._mapped[name] = np.load(self.folder / name, mmap_mode=mode, allow_pickle=False)
        return self._mapped[name]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": {}}


def check_shard(folder: Path, shard: Shard, dtype: str) -> None:
    """Raises if a file of a shard is missing, cut short, or of another kind."""
    _check_file(folder / shard.tokens, dtype, shard.token_count, shard.tokens_size)
    _check_file(folder / shard.documents, "int64", shard.document_count, shard.documents_size)


def _check_file(path: Path, dtype: str, count: int, size: int) -> None:
    """Raises if a file is not there, not as long as it was, or not one row of so many numbers."""
    try:
        with open_file(path) as file:
            head = file.read(HEADER_SIZE)
            there = file.seek(0, 2)
    except FileNotFoundError:
        raise GSAError(f"{path}: the file is missing") from None
    except OSError as error:
        raise GSAError(f"{path}: cannot be read: {error}") from None
    expected = HEADER_SIZE + count * np.dtype(dtype).itemsize
    if there != size or size != expected:
        raise GSAError(f"{path}: {there} bytes are there, expected {expected} ({count} of {dtype})")
    if head != npy_header(dtype, count):
        raise GSAError(f"{path}: not a .npy file with {count} of {dtype}")


def _check_bytes(path: Path, expected: str) -> None:
    """Raises if a file is not there, or its bytes do not have the hash they were written with."""
    try:
        found = sha256(path)
    except FileNotFoundError:
        raise GSAError(f"{path}: the file is missing") from None
    except OSError as error:
        raise GSAError(f"{path}: cannot be read: {error}") from None
    if found != expected:
        raise GSAError(f"{path}: its bytes have changed since it was written (sha256)")
