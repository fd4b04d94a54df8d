"""Bytes of a file, plain or compressed, in reads of bounded size. Reading ends at the first damage, which is told."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from gsa.data.optional import optional

COMPRESSIONS = {".gz": "gz", ".zst": "zst"}
MAGIC = {"gz": (b"\x1f\x8b",), "zst": (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + i, 0x2A, 0x4D, 0x18]) for i in range(16)))}
"""The first bytes of such files; a zst file may also begin with a frame that is to be skipped."""
MAX_ROW_BYTES = 1 << 26
"""A longer row of a .jsonl file is a bad one: it would have to be in memory as a whole."""
# Bytes taken at a time: few, since one compressed byte may become thousands.
GZ_INPUT, GZ_OUTPUT, ZST_INPUT = 1 << 16, 1 << 18, 1 << 11


class Stream:
    """Reads the unpacked content of a file. `damage` is set when reading has come to it, and says what is wrong."""

    def __init__(self, file: BinaryIO, compression: str | None) -> None:
        self.damage: str | None = None
        self._file = file
        self._buffer = bytearray()
        self._chunks = None if compression is None else self._unpacked(compression)

    @property
    def consumed(self) -> int:
        """Bytes of the file itself that were read."""
        return self._file.tell()

    def read(self, size: int) -> bytes:
        """The next `size` bytes; fewer at the end."""
        if self._chunks is None:
            return self._file.read(size)
        while len(self._buffer) < size and (chunk := next(self._chunks, b"")):
            self._buffer += chunk
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    def skip(self, size: int) -> None:
        """Goes on to `size` bytes further."""
        if self._chunks is None:
            self._file.seek(size, 1)
            return
        while size and (data := self.read(min(size, 1 << 20))):
            size -= len(data)

    def _unpacked(self, compression: str) -> Iterator[bytes]:
        unpacked = _gunzipped(self._file) if compression == "gz" else _unzstd(self._file)
        try:
            yield from (chunk for chunk in unpacked if chunk)
        except _Damage as damage:
            self.damage = str(damage)


class _Damage(Exception):
    """What is wrong with a compressed file."""


def _gunzipped(file: BinaryIO) -> Iterator[bytes]:
    member: Any = None
    while data := file.read(GZ_INPUT):
        while data:
            if member is None:
                data = data.lstrip(b"\0")  # members may be padded
                if not data:
                    break
                member = zlib.decompressobj(wbits=31)
            try:
                yield member.decompress(data, GZ_OUTPUT)
                data = member.unconsumed_tail
                while not data and not member.eof and (more := member.decompress(b"", GZ_OUTPUT)):
                    yield more
            except zlib.error as error:
                raise _Damage(f"not gzip from about byte {file.tell()} on ({error})") from None
            if member.eof:
                data, member = member.unused_data, None
    if member is not None:
        raise _Damage("cut short")


def zstandard() -> Any:
    """The package `zstandard`."""
    return optional("zstandard", "a .zst file")


def _unzstd(file: BinaryIO) -> Iterator[bytes]:
    package = zstandard()
    frame: Any = None
    while data := file.read(ZST_INPUT):
        while data:
            frame = frame or package.ZstdDecompressor(max_window_size=2**27).decompressobj()
            try:
                yield frame.decompress(data)
            except package.ZstdError as error:
                raise _Damage(f"not zstd from about byte {file.tell()} on ({error})") from None
            data = b""
            if frame.eof:
                data, frame = frame.unused_data, None
    if frame is not None:
        raise _Damage("cut short")
