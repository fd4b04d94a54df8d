"""Locks on files and folders. They end with the process that holds them, however that ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from gsa.errors import GSAError

_held: set[int] = set()  # open files and folders that this process has locked


def _let_go() -> None:
    for handle in _held:
        os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    # Otherwise a child process that outlives this one, such as one that loads data, would still hold the lock.
    os.register_at_fork(after_in_child=_let_go)


@contextmanager
def held(path: Path) -> Iterator[bool]:
    """Holds a file or folder for this process; raises BlockingIOError if it is held already.

    Whether it is held now is yielded: Windows and some file systems have no such locks. A folder on a network's disk
    is held against the processes of this machine, not against those of others.
    """
    try:
        import fcntl
    except ImportError:
        yield False
        return
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # not waiting for what might be a pipe
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except BlockingIOError:
            raise
        except OSError:
            alone = False
        _held.add(handle)
        yield alone
    finally:
        if handle in _held:  # in a forked child it is closed already, and the number may mean another file
            _held.remove(handle)
            os.close(handle)


@contextmanager
def locked(folder: Path, operation: str) -> Iterator[None]:
    """Holds a folder for this process; raises if another one holds it."""
    with ExitStack() as stack:
        try:
            stack.enter_context(held(folder))
        except BlockingIOError:
            raise GSAError(f"{operation}: another process is at work on {folder}") from None
        yield
