"""Folders that appear whole or not at all, and go the same way, whenever the process or the machine stops."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from gsa.errors import GSAError

OLD = ".old"  # behind the name of a folder that is about to be replaced


@contextmanager
def whole_folder(path: Path, operation: str, needed: int) -> Iterator[Path]:
    """A hidden folder beside `path` to write files into; it is synced and gets its name when the block ends.

    A folder of that name is replaced: until the new one is there, the old one is, under its name or as NAME.old. If
    the block fails, nothing stays of what it wrote. `needed` is about how many bytes it writes, for the error.
    """
    fresh = _hidden(path)
    try:
        try:
            above_is_new = not path.parent.exists()
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh.mkdir()
            yield fresh
            for file in fresh.iterdir():
                sync(file)
            sync(fresh)
            _place(fresh, path)
            if above_is_new:
                sync(path.parent.parent)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise GSAError(
            f"{operation}: cannot write {path}: {error}; {byte_count(needed)} are needed, "
            f"{byte_count(_free(path))} are free there; everything written earlier is untouched"
        ) from None


def _place(fresh: Path, path: Path) -> None:
    """Gives a folder its name; one that has it already steps aside first, and is removed when the new one is safe."""
    old = path.with_name(path.name + OLD)
    if path.exists() and any(path.iterdir()):
        if old.exists():
            discard(old)
        os.rename(path, old)
    try:
        os.rename(fresh, path)
    except BaseException:
        if old.exists() and not path.exists():
            os.rename(old, path)
        raise
    sync(path.parent)
    if old.exists():
        discard(old)


def discard(path: Path) -> None:
    """Removes a folder; first it loses its name, so that no half of it is ever found there."""
    hidden = _hidden(path)
    os.rename(path, hidden)
    sync(path.parent)
    # What cannot be removed now is only in the way of space: it is tried again when leftovers are removed.
    shutil.rmtree(hidden, ignore_errors=True)


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def sync(path: Path) -> None:
    """Returns when a file's content, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some file systems cannot sync folders, and need not
            raise
    finally:
        os.close(handle)


def byte_count(count: int) -> str:
    """So many bytes in words."""
    for unit, size in (("GB", 2**30), ("MB", 2**20), ("KB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def _free(path: Path) -> int:
    """Free bytes where a path is, or would be."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free
