"""Files and folders that appear whole or not at all, whenever the process or the machine stops; and reading them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedReader, BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from gsa.errors import GSAError
from gsa.locks import held
from gsa.terminal import quoted

OLD = ".old"  # suffix of a folder that is being replaced
UNFINISHED = ".unfinished"  # suffix of what is being written or removed
MOST_JSON = 2**26  # bytes; objects take some ten times as many in memory
MOST_BYTES = 2**28  # of other files that are read whole: texts, templates, tokenizers


def named(name: str | Path, what: str) -> Path:
    """The path of a name that someone gave, of a file that there may be or not; raises for what no file can be called.

    That is a name with a NUL, with characters that the file system does not have, too long a one, or no text at all.
    """
    if not isinstance(name, str | os.PathLike):
        raise GSAError(f"{what}: expected a name, got {name!r}")
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


_MACHINE = hashlib.sha256(platform.node().encode()).hexdigest()[:4]  # in the names of what it writes
_FORGOTTEN = 24 * 3600.0
"""Seconds after which nobody, on whatever machine, is still writing."""


class NotAFile(OSError):
    """A folder, pipe, socket or device is where a file was expected."""

    def __init__(self, path: str | Path):
        super().__init__(errno.EINVAL, "not a regular file", str(path))


def open_file(path: str | Path) -> BufferedReader:
    """A regular file, open for reading; raises NotAFile for anything else.

    Every file that others may have written is opened here: a pipe in its place would have us wait for a writer, and a
    device might never end.
    """
    try:
        file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115  (the caller closes it)
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.ENXIO):  # a folder, a socket
            raise NotAFile(path) from None
        raise
    except ValueError:  # a zero byte
        raise FileNotFoundError(errno.ENOENT, "no file can have such a name", str(path)) from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise NotAFile(path)
    return file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_file(path: str | Path) -> bytes:
    """The content of a regular file, which must not be larger than a file can be that is read whole."""
    with open_file(path) as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"more than {byte_count(MOST_BYTES)}", str(path))
    return content


def read_text(path: str | Path) -> str:
    """The text of such a file in UTF-8, with line ends as Python has them."""
    return TextIOWrapper(BytesIO(read_file(path)), encoding="utf-8").read()


def read_json(path: Path, *, made_by: str | None = None) -> dict[str, Any]:
    """The object in a JSON file; `made_by` is the command that would have written it, for the error."""
    try:
        with open_file(named(path, "JSON")) as file:
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
    with _workplace(path) as folder:
        place = folder / path.name
        yield place
        sync(place)
        os.replace(place, path)
        sync(path.parent)


@contextmanager
def _workplace(path: Path) -> Iterator[Path]:
    """A hidden folder beside `path` to write in, which is gone when the block ends, whatever is in it.

    A kill leaves it there. This process holds it as long as it lives, so that the next writer of the same name knows
    what it may remove. It is a folder, since libraries put files of their own beside the one they write.
    """
    remove_leftovers(path.parent, path.name)
    with ExitStack() as stack:
        folder = unfinished(path)
        stack.callback(lambda: shutil.rmtree(folder, ignore_errors=True))
        folder.mkdir()
        while not _is_held(folder, stack):
            folder = unfinished(path)
            folder.mkdir()
        yield folder


def _is_held(folder: Path, stack: ExitStack) -> bool:
    """Holds a new folder; False if another writer has taken it for a leftover before that."""
    try:
        stack.enter_context(held(folder))
    except (BlockingIOError, FileNotFoundError):
        return False
    return folder.exists()


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Removes what killed writers of a file or folder of this name have left in a folder; or of any name, for a process
    that holds the folder: then nobody else writes files in it.

    What a living process holds stays, and so does what another machine may be writing on a shared disk, whose locks
    are not seen here, for a day. What cannot be removed only takes space, and stays too.
    """
    named = ".+" if name is None else f"{re.escape(name)}({re.escape(OLD)})?"
    leftover = re.compile(rf"\.{named}\.(?P<token>[0-9a-f]+){re.escape(UNFINISHED)}", re.DOTALL)
    with suppress(OSError):
        for path in list(folder.iterdir()):
            found = leftover.fullmatch(path.name)
            if found is not None:
                with suppress(OSError):
                    if path.is_symlink() or (name is None and path.is_file()):  # nothing is written to links
                        path.unlink()
                    elif found["token"].startswith(_MACHINE) or time.time() - path.stat().st_mtime > _FORGOTTEN:
                        _remove_unless_held(path)


def _remove_unless_held(path: Path) -> None:
    with held(path) as alone:
        if alone:
            remove(path)


def remove(path: Path) -> None:
    """Removes a file, a folder with all that is in it, or a link, whose target stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def unfinished(path: Path) -> Path:
    """A hidden path beside `path` for what is being written; a new one each time, since two may write it."""
    return path.with_name(f".{path.name}.{_MACHINE}{secrets.token_hex(4)}{UNFINISHED}")


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


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    digest, block = hashlib.sha256(), memoryview(bytearray(2**17))
    with open_file(path) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


@contextmanager
def whole_folder(path: Path, operation: str, needed: int) -> Iterator[Path]:
    """A hidden folder beside `path` to write files into; it is synced and gets its name when the block ends.

    A folder of that name is replaced: until the new one is there, the old one is, under its name or as NAME.old. If
    the block fails, nothing stays of what it wrote. `needed` is about how many bytes it writes, for the error.
    """
    try:
        above_is_new = not path.parent.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        with _workplace(path) as fresh:
            yield fresh
            for file in fresh.iterdir():
                sync(file)
            sync(fresh)
            _place(fresh, path)
            if above_is_new:
                sync(path.parent.parent)
    except (OSError, SafetensorError) as error:
        raise GSAError(
            f"{operation}: cannot write {path}: {error}; {byte_count(needed)} are needed, "
            f"{byte_count(free_bytes(path))} are free there; everything written earlier is untouched"
        ) from None


def _place(fresh: Path, path: Path) -> None:
    """Renames `fresh` to `path`. A folder of that name becomes NAME.old, and is removed when the new one is on disk."""
    old = path.with_name(path.name + OLD)
    if path.is_symlink() or (path.exists() and any(path.iterdir())):
        if os.path.lexists(old):
            discard(old)
        os.rename(path, old)
    try:
        os.rename(fresh, path)
    except BaseException:
        if os.path.lexists(old) and not os.path.lexists(path):
            os.rename(old, path)
        raise
    sync(path.parent)
    if os.path.lexists(old):
        discard(old)


def discard(path: Path) -> None:
    """Removes a folder, or a link to one, after renaming it, so that nobody ever finds half of it under its name."""
    hidden = unfinished(path)
    os.rename(path, hidden)
    sync(path.parent)
    with suppress(OSError):  # what cannot be removed now is a leftover
        remove(hidden)


def broken_name(path: Path) -> Path:
    """A name beside a broken file or folder under which it can be kept: broken-NAME, or with a number behind."""
    place, tries = path.with_name(f"broken-{path.name}"), 1
    while os.path.lexists(place):
        tries += 1
        place = path.with_name(f"broken-{path.name}.{tries}")
    return place


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
    while True:
        try:
            return shutil.disk_usage(path).free
        except (FileNotFoundError, NotADirectoryError):  # it is not there, or another process has just replaced it
            if path == path.parent:
                raise
            path = path.parent
