"""StateDir: kept states as files in a folder, which are still there when the engine starts again."""

from __future__ import annotations

import json
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from threading import Condition, Thread

from gsa.errors import GSAError
from gsa.files import remove_leftovers
from gsa.infer.model import Model
from gsa.infer.state import State
from gsa.locks import locked

Key = tuple[str, str]
"""A scope, within which states are shared, and the TokenHash of the tokens, in hexadecimal."""
NAME = re.compile(r"(?P<tokens>[1-9]\d{0,11})-(?P<computed>[0-9a-f]{16})-[0-9a-f]{40}\.state")
PAUSE = 3.0
"""How long the writer rests after each file, in times that it took: writing gets a quarter of a core at most."""


@dataclass(frozen=True)
class DirReport:
    """What a folder of states holds, and what came of it so far."""

    states: int = 0
    """States of this model, computed as it computes now."""
    nbytes: int = 0
    """Bytes of all states in the folder, also those of other models."""
    hits: int = 0
    """States that were read from it."""
    evictions: int = 0
    """Files that made room for others."""
    skipped: int = 0
    """Files that were not trusted: of other models, damaged, or changed."""
    failures: int = 0
    """States that could not be written."""


@dataclass(frozen=True)
class _File:
    tokens: int
    nbytes: int
    usable: bool
    """Whether it is one of this model, and nothing is known against it."""


class StateDir:
    """States of a model in a folder, with files of so many bytes in all; the least recently used ones make room.

    A file is written whole or not at all, by a thread of its own, and checked as every file of a state before it is
    used. `computed` names how states come about, to the bit: those of another computation are left alone, and are the
    first to go. `find` gives a state that is to be written, if it is still there. One process at a time may use a
    folder.
    """

    def __init__(
        self,
        folder: Path,
        limit: int,
        model: Model,
        computed: str,
        find: Callable[[Key], State | None],
        say: Callable[[str], None],
    ):
        self.folder, self.limit = folder, limit
        self._model, self._find, self._say = model, find, say
        self._computed = sha256(computed.encode()).hexdigest()[:16]
        self._files: OrderedDict[str, _File] = OrderedDict()
        self._waiting: OrderedDict[Key, None] = OrderedDict()
        self._report = DirReport()
        self._changed = Condition()  # around all of these
        self._closing = False
        self._thread: Thread | None = None
        with ExitStack() as stack:
            try:
                folder.mkdir(0o700, parents=True, exist_ok=True)  # states tell what was said
                stack.enter_context(locked(folder, "state_dir"))
                remove_leftovers(folder)
                self._look()
            except OSError as error:
                raise GSAError(f"state_dir: {folder} cannot be used: {error.strerror}") from None
            self._stack = stack.pop_all()

    def report(self) -> DirReport:
        """What it holds now."""
        with self._changed:
            usable = sum(file.usable for file in self._files.values())
            return replace(self._report, states=usable, nbytes=self._nbytes())

    def lengths(self) -> set[int]:
        """How many tokens the states have read."""
        with self._changed:
            return {file.tokens for file in self._files.values() if file.usable}

    def get(self, key: Key, tokens: int) -> State | None:
        """The state of a key, which has read so many tokens, if there is a file of it that is whole."""
        name = self._name(key, tokens)
        with self._changed:
            file = self._files.get(name)
            if file is None or not file.usable:
                return None
            self._files.move_to_end(name)
        try:
            state = State.load(self.folder / name, self._model)
            if (state.tokens, state.digest) != (tokens, key[1]):
                raise GSAError(f"{self.folder / name}: it is of other tokens than its name says")
        except GSAError as error:
            self._distrust(name, str(error))
            return None
        with suppress(OSError):
            os.utime(self.folder / name)
        self._count(hits=1)
        return state

    def put(self, key: Key) -> None:
        """Has a state written soon, if it is still there then."""
        with self._changed:
            if self._closing:
                return
            self._waiting[key] = None
            if self._thread is None:
                self._thread = Thread(target=self._write_all, name="gsa-states", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self, *, write: bool = True) -> None:
        """Writes what is still to be written, unless it is to be dropped, and leaves the folder to others. Later calls
        do nothing."""
        with self._changed:
            self._closing = True
            if not write:
                self._waiting.clear()
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()
        with self._changed:
            self._files.clear()  # they are another's now
        self._stack.close()

    def _look(self) -> None:
        """Takes stock of the folder; nothing is opened."""
        found = []
        for entry in os.scandir(self.folder):
            name = NAME.fullmatch(entry.name)
            if name is not None and entry.is_file(follow_symlinks=False):
                facts = entry.stat()
                usable = name["computed"] == self._computed
                found.append((facts.st_mtime_ns, entry.name, _File(int(name["tokens"]), facts.st_size, usable)))
        # Those that cannot be used go first.
        for _, name_, file in sorted(found, key=lambda one: (one[2].usable, one[0], one[1])):
            self._files[name_] = file
        others = sum(not file.usable for file in self._files.values())
        if others:
            self._count(skipped=others)
            self._say(
                f"state_dir: {self.folder} has {others} states of other models, or that were computed otherwise; they "
                "are left alone until their room is needed"
            )
        self._make_room(0)

    def _name(self, key: Key, tokens: int) -> str:
        return f"{tokens}-{self._computed}-{sha256(json.dumps(key).encode()).hexdigest()[:40]}.state"

    def _distrust(self, name: str, why: str) -> None:
        """Never looks at a file again, which goes when room is needed."""
        with self._changed:
            file = self._files.get(name)
            if file is None:  # it has made room meanwhile
                return
            self._files[name] = replace(file, usable=False)
            self._files.move_to_end(name, last=False)
            self._report = replace(self._report, skipped=self._report.skipped + 1)
        self._say(f"state_dir: a state is not used: {why}")

    def _count(self, hits: int = 0, evictions: int = 0, skipped: int = 0, failures: int = 0) -> None:
        with self._changed:
            now = self._report
            self._report = replace(
                now,
                hits=now.hits + hits,
                evictions=now.evictions + evictions,
                skipped=now.skipped + skipped,
                failures=now.failures + failures,
            )

    def _nbytes(self) -> int:
        return sum(file.nbytes for file in self._files.values())

    def _make_room(self, nbytes: int) -> None:
        """Removes files until so many bytes fit in."""
        with self._changed:
            excess = self._nbytes() + nbytes - self.limit
            while excess > 0 and self._files:
                name, file = self._files.popitem(last=False)
                with suppress(FileNotFoundError):
                    (self.folder / name).unlink()
                excess -= file.nbytes
                self._count(evictions=1)

    def _write_all(self) -> None:
        """The thread: writes what waits, oldest first, until it is to end and nothing waits."""
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                if not self._waiting:
                    return
                key, _ = self._waiting.popitem(last=False)
            began = time.monotonic()
            state = self._find(key)
            if state is not None:
                try:
                    self._write(key, state)
                except Exception as error:  # whatever it was, the next one may be written
                    self._count(failures=1)
                    with suppress(Warning):  # where warnings are errors
                        self._say(f"state_dir: a state is not kept: {error}")
            with self._changed:
                self._changed.wait_for(lambda: self._closing, PAUSE * (time.monotonic() - began))

    def _write(self, key: Key, state: State) -> None:
        name, nbytes = self._name(key, state.tokens), state.file_bytes
        with self._changed:
            file = self._files.get(name)
            if file is not None and file.usable:
                self._files.move_to_end(name)
                return
        if nbytes > self.limit:
            return
        self._make_room(nbytes)
        state.save(self.folder / name)
        with self._changed:
            self._files[name] = _File(state.tokens, nbytes, usable=True)
            self._files.move_to_end(name)
