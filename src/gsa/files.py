"""Files and folders that appear whole or not at all, whenever the process or the machine stops; and reading them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from gsa.errors import GSAError
from gsa.terminal import quoted

OLD = ".old"  # suffix of a folder that is being replaced
UNFINISHED = ".unfinished"  # suffix of a file that is being written
MOST_JSON = 2**26  # bytes; objects take some ten times as many in memory


def named(name: str | Path, what: str) -> Path:
    """The path of a name that someone gave, of a file that there may be or not; raises for what no file can be called.

    That is a name with a NUL, with characters that the file system does not have, or too long a one.
    """
    try:
        os.lstat(name)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass
    except OSError as error:
        raise GSAError(f"{what}: {quoted(str(name))} cannot be used: {error.strerror}") from None
    except ValueError:
        raise GSAError(
            f"{what}: {quoted(str(name))} cannot be the name of a file: it has a NUL, or half of a surrogate"
        ) from None
    return Path(name)


def read_json(path: Path, *, made_by: str | None = None) -> dict[str, Any]:
    """The object in a JSON file; `made_by` is the command that would have written it, for the error."""
    try:
        with named(path, "JSON").open("rb") as file:
            content = file.read(MOST_JSON + 1)
    except (FileNotFoundError, NotADirectoryError):
        hint = "" if made_by is None else f"; `{made_by}` writes it"
        raise GSAError(f"{path}: there is no such file{hint}") from None
    except OSError as error:
        raise GSAError(f"{path}: cannot be read: {error}") from None
    return parse_json(content, str(path))


def parse_json(text: str | bytes, what: str) -> dict[str, Any]:
    """The object that a JSON text is; the error says what it was about."""
    if len(text) > MOST_JSON:
        raise GSAError(f"{what}: more than {byte_count(MOST_JSON)} of JSON, expected less")
    try:
        fields = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise GSAError(f"{what}: not JSON: {error}") from None
    except RecursionError:
        raise GSAError(f"{what}: not JSON that can be read: brackets are nested too deep") from None
    except ValueError:
        raise GSAError(f"{what}: not JSON that can be read: a number has thousands of digits") from None
    if not isinstance(fields, dict):
        raise GSAError(f"{what}: expected a JSON object, got {type(fields).__name__}")
    return fields


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """A temporary path to write a file to, which is synced and renamed to `path` when the block ends without an error.

    So there is never half a file under that name. Where one `with` opens several, the last is renamed first.
    """
    place = unfinished(path)
    try:
        yield place
        sync(place)
        os.replace(place, path)
        sync(path.parent)
    finally:
        place.unlink(missing_ok=True)


def unfinished(path: Path) -> Path:
    """A hidden path beside `path` for a file that is being written; a new one each time, since two may write it."""
    hidden = _hidden(path)
    return hidden.with_name(hidden.name + UNFINISHED)


@contextmanager
def full_disk_explained(folder: Path) -> Iterator[None]:
    """Turns a full disk into an error that says how to go on."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise GSAError(
            f"{folder}: the disk is full ({byte_count(free_bytes(folder))} free). What is finished stays; make room, "
            "and the same command goes on from there"
        ) from None


_held: set[int] = set()  # open folders that this process has locked


def _let_go() -> None:
    for handle in _held:
        os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    # Otherwise a child process that outlives this one, such as one that loads data, would still hold the lock.
    os.register_at_fork(after_in_child=_let_go)


@contextmanager
def locked(folder: Path, operation: str) -> Iterator[None]:
    """Holds a folder for this process; raises if another one holds it. Ends with the process, however that ends."""
    try:
        import fcntl
    except ImportError:  # Windows has no such lock
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise GSAError(f"{operation}: another process is at work on {folder}") from None
        _held.add(handle)
        yield
    finally:
        _held.discard(handle)
        os.close(handle)


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    digest, block = hashlib.sha256(), memoryview(bytearray(2**17))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


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
            f"{byte_count(free_bytes(path))} are free there; everything written earlier is untouched"
        ) from None


def _place(fresh: Path, path: Path) -> None:
    """Renames `fresh` to `path`. A folder of that name becomes NAME.old, and is removed when the new one is on disk."""
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
    """Removes a folder, after renaming it, so that nobody ever finds half of it under its name."""
    hidden = _hidden(path)
    os.rename(path, hidden)
    sync(path.parent)
    # What cannot be removed now only takes space: it is tried again when leftovers are removed.
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
    """A number of bytes in words, e.g. `1.5 GB`."""
    for unit, size in (("GB", 2**30), ("MB", 2**20), ("KB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def free_bytes(path: Path) -> int:
    """Free bytes where a path is, or would be."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free
