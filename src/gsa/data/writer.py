"""The writer of token shards, which appear whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gsa.data.shards import HEADER_SIZE, Shard, npy_header, shard_names
from gsa.files import full_disk_explained, sha256, sync, unfinished, written


def write_text(path: Path, text: str) -> None:
    """Writes a text file; it has its name only when it is whole and on disk."""
    with full_disk_explained(path.parent), written(path) as place:
        place.write_bytes(text.encode())


class _Row:
    """A .npy file with one row of numbers that grows; its length is filled in at the end."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.path, self.dtype, self.count = path, np.dtype(dtype).newbyteorder("<"), 0
        self.unfinished = unfinished(path)
        self.file = open(self.unfinished, "wb")  # noqa: SIM115  (open as long as the shard)
        self.file.write(bytes(HEADER_SIZE))

    def append(self, values: NDArray[Any]) -> None:
        self.file.write(np.ascontiguousarray(values, self.dtype).data)
        self.count += len(values)

    def finish(self) -> tuple[int, str]:
        """Size and sha256 of the file, which is whole and on disk, but has not got its name yet."""
        self.file.seek(0)
        self.file.write(npy_header(self.dtype.name, self.count))
        self.file.close()
        sync(self.unfinished)
        return self.unfinished.stat().st_size, sha256(self.unfinished)


class ShardWriter:
    """Shards of `shard_tokens` tokens each in a folder, from tokens as they come; the last may be shorter."""

    def __init__(self, folder: Path, dtype: str, shard_tokens: int, finished: list[Shard]) -> None:
        self.folder, self.dtype, self.shard_tokens = folder, dtype, shard_tokens
        self.shards = list(finished)
        self._rows: tuple[_Row, _Row] | None = None

    def append(self, tokens: NDArray[Any], starts: NDArray[np.int64]) -> int:
        """Takes tokens up to the end of the shard, and documents that start among them; says how many it took."""
        with full_disk_explained(self.folder):
            if self._rows is None:
                names = shard_names(len(self.shards))
                self._rows = _Row(self.folder / names[0], self.dtype), _Row(self.folder / names[1], "int64")
            row, documents = self._rows
            taken = min(len(tokens), self.shard_tokens - row.count)
            documents.append(starts[: np.searchsorted(starts, taken)] + row.count)
            row.append(tokens[:taken])
            return taken

    @property
    def room(self) -> int:
        """How many tokens the shard still takes."""
        return self.shard_tokens - (self._rows[0].count if self._rows else 0)

    @property
    def empty(self) -> bool:
        """Whether the shard has no token yet."""
        return self.room == self.shard_tokens

    def finish(self) -> None:
        """Ends the shard: both files get their names."""
        assert self._rows is not None
        with full_disk_explained(self.folder):
            row, documents = self._rows
            (size, digest), (documents_size, documents_digest) = row.finish(), documents.finish()
            for part in self._rows:
                os.replace(part.unfinished, part.path)
            sync(self.folder)
        self.shards.append(
            Shard(
                tokens=row.path.name,
                documents=documents.path.name,
                token_count=row.count,
                document_count=documents.count,
                tokens_size=size,
                documents_size=documents_size,
                tokens_sha256=digest,
                documents_sha256=documents_digest,
            )
        )
        self._rows = None

    def close(self) -> None:
        """Gives up the shard that is not finished."""
        for row in self._rows or ():
            with suppress(OSError):  # a full disk does not take what is still to be written, and need not
                row.file.close()
            row.unfinished.unlink(missing_ok=True)
        self._rows = None
