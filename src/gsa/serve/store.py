"""StateStore: states that have an id. They never change, and are there until they are removed or make room for others.

In memory, or in a folder, where each is a file of its state and one of what else is known of it, written in that order:

    state_3f....safetensors   as `State.save` writes it
    state_3f....json          {"id", "created", "salt", "name", "conversation", ...}
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from threading import RLock
from typing import Any

from gsa.data.chat_template import Message
from gsa.errors import GSAError, OutOfMemory
from gsa.files import full_disk_explained, read_json, remove_leftovers, written
from gsa.infer.model import Model
from gsa.infer.state import State
from gsa.locks import locked
from gsa.options import check_values
from gsa.serve.errors import StorageFailed, as_json
from gsa.terminal import quoted

LOG = logging.getLogger("gsa.serve")
ID = re.compile("state_[0-9a-f]{32}")


@dataclass(frozen=True)
class Conversation:
    """What of a state is a conversation, so that it can go on."""

    messages: list[Message] = field(default_factory=list)
    reply: list[int] | None = None
    """The tokens of the last message, if the model wrote it; None if all messages were read."""
    behind: str | None = None
    """Id of the state that it stands behind, if that has no conversation: of a document, say."""
    instructed: bool = False
    """Whether the first message is what a response calls instructions, which hold for one response only."""


BROUGHT = "brought"
"""What a conversation stands behind that began at a state which a client had brought, and which was not kept."""


@dataclass(frozen=True)
class Entry:
    """What is known of a state."""

    id: str
    created: float
    """Seconds since 1970."""
    tokens: int
    nbytes: int
    fingerprint: str
    salt: str = ""
    """A hash of what only those know who may find the state; empty if everyone may."""
    name: str = ""
    conversation: Conversation | None = None


def new_id() -> str:
    """An id that nobody can guess."""
    return f"state_{secrets.token_hex(16)}"


def _hidden(salt: str) -> str:
    return sha256(salt.encode()).hexdigest() if salt else ""


class StateStore:
    """States by id, of so many bytes in memory and so many in a folder. Several threads may use it.

    What was used least recently makes room: in memory for what is in the folder too, else for good. `say` is told of
    files that cannot be used. Close it at the end, so that another process may have the folder.
    """

    def __init__(
        self,
        model: Model,
        memory_bytes: int,
        folder: Path | None = None,
        folder_bytes: int = 0,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._model, self._memory_bytes = model, memory_bytes
        self._folder, self._folder_bytes = folder, folder_bytes
        self._lock = RLock()
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._states: OrderedDict[str, State] = OrderedDict()
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """Bytes of the files of each state in the folder; those that are of no use to this model come first."""
        self._stack = ExitStack()
        if folder is not None:
            with ExitStack() as stack:
                self._open(folder, stack, say)
                self._stack = stack.pop_all()

    def close(self) -> None:
        """Lets go of the folder."""
        self._stack.close()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def memory(self) -> int:
        """Bytes of the states in memory."""
        with self._lock:
            return sum(state.nbytes for state in self._states.values())

    @property
    def stored(self) -> int:
        """Bytes of all states: of their files, also those of other models, if they have any."""
        with self._lock:
            if self._folder is not None:
                return sum(self._sizes.values())
            return sum(entry.nbytes for entry in self._entries.values())

    def put(
        self,
        state: State,
        *,
        salt: str = "",
        name: str = "",
        conversation: Conversation | None = None,
        id: str | None = None,
    ) -> Entry:
        """Keeps a state; with a folder, it is on the disk when this returns."""
        limit, nbytes = self._memory_bytes, state.nbytes
        if self._folder is not None:
            limit, nbytes = self._folder_bytes, state.file_bytes
        if nbytes > limit:
            raise GSAError(f"state: it has {nbytes:,} bytes, and all states together may have {limit:,}")
        entry = Entry(
            id=id or new_id(),
            created=time.time(),
            tokens=state.tokens,
            nbytes=state.nbytes,
            fingerprint=state.fingerprint,
            salt=_hidden(salt),
            name=name,
            conversation=conversation,
        )
        if self._folder is not None:
            self._write(self._folder, entry, state)
        with self._lock:
            self._entries[entry.id] = entry
            self._states[entry.id] = state
            if self._folder is not None:
                self._sizes[entry.id] = self._size(entry.id)
            self._make_room()
        return entry

    def find(self, id: str, salt: str = "") -> Entry | None:
        """What is known of a state; None if there is none for who has this salt."""
        with self._lock:
            entry = self._entries.get(id)
        return entry if entry is not None and secrets.compare_digest(entry.salt, _hidden(salt)) else None

    def list(self, salt: str = "") -> list[Entry]:
        """All states for who has this salt, the newest last."""
        with self._lock:
            entries = [entry for entry in self._entries.values() if entry.salt == _hidden(salt)]
        return sorted(entries, key=lambda entry: (entry.created, entry.id))

    def load(self, entry: Entry) -> State:
        """The state of an entry; raises if it is gone, or if its file is broken."""
        if self._folder is not None:
            with suppress(OSError):
                os.utime(self._facts(entry.id))  # so that the next server knows what was used
        with self._lock:
            if entry.id in self._entries:
                self._entries.move_to_end(entry.id)
                if self._folder is not None:
                    self._sizes.move_to_end(entry.id)
            state = self._states.get(entry.id)
            if state is not None:
                self._states.move_to_end(entry.id)
                return state
        if self._folder is None:
            raise GSAError(f"state: {entry.id} is gone")
        state = State.load(self._file(entry.id), self._model)
        with self._lock:
            if entry.id in self._entries:
                self._states[entry.id] = state
                self._make_room()
        return state

    def remove(self, entry: Entry) -> None:
        """Removes a state; raises, and it stays, if its files cannot be removed."""
        with self._lock:
            if self._folder is not None:
                try:
                    self._unlink(entry.id)
                except OSError as error:
                    LOG.error("a state cannot be removed from %s: %s", self._folder, error)
                    raise StorageFailed("the state cannot be removed: the server's disk cannot be written") from None
            self._forget(entry.id)

    def _forget(self, id_: str) -> None:
        for known in (self._entries, self._states, self._sizes):
            known.pop(id_, None)

    def _unlink(self, id_: str) -> None:
        for path in (self._facts(id_), self._file(id_)):
            path.unlink(missing_ok=True)

    def _size(self, id_: str) -> int:
        """Bytes of a state's files that are there."""
        total = 0
        for path in (self._facts(id_), self._file(id_)):
            with suppress(OSError):
                total += path.stat().st_size
        return total

    def _make_room(self) -> None:
        while self.memory > self._memory_bytes and len(self._states) > (self._folder is None):
            id_, _ = self._states.popitem(last=False)
            if self._folder is None:
                del self._entries[id_]
        while self._folder is not None and self.stored > self._folder_bytes and len(self._sizes) > 1:
            id_ = next(iter(self._sizes))
            try:
                self._unlink(id_)
            except OSError as error:  # the next state will try again
                LOG.error("a state cannot make room in %s: %s", self._folder, error)
                break
            self._forget(id_)

    def _file(self, id_: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{id_}.safetensors"

    def _facts(self, id_: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{id_}.json"

    def _write(self, folder: Path, entry: Entry, state: State) -> None:
        try:
            with full_disk_explained(folder):
                state.save(self._file(entry.id))
                with written(self._facts(entry.id)) as place:
                    place.write_text(as_json(asdict(entry)))
        except OutOfMemory:
            raise
        except (OSError, GSAError) as error:  # which name places that are not a client's business
            LOG.error("a state cannot be kept in %s: %s", folder, error)
            with suppress(OSError):
                self._file(entry.id).unlink(missing_ok=True)
            raise StorageFailed("the state cannot be kept: the server's disk is full, or cannot be written") from None

    def _open(self, folder: Path, stack: ExitStack, say: Callable[[str], None]) -> None:
        """Takes a folder, and finds the states of this model in it; those of other models stay until their room is
        needed."""
        try:
            folder.mkdir(0o700, parents=True, exist_ok=True)
            stack.enter_context(locked(folder, "serve"))
            _try_to_write(folder, say)
            remove_leftovers(folder)
            for path in folder.glob("state_*.safetensors"):
                if ID.fullmatch(path.stem) and not path.with_suffix(".json").exists():
                    with suppress(OSError):
                        path.unlink()  # of a server that was killed before it could say that the state is there
            paths = sorted(folder.glob("state_*.json"), key=lambda path: path.stat().st_mtime)
        except OSError as error:
            raise GSAError(f"serve: {folder} cannot be used: {error.strerror}") from None
        for path in paths:
            if ID.fullmatch(path.stem):
                self._sizes[path.stem] = self._size(path.stem)
            try:
                entry = _entry(read_json(path), path)
            except GSAError as error:
                say(f"{error}; it is left out")
                continue
            if entry.fingerprint == self._model.fingerprint and self._file(entry.id).exists():
                self._entries[entry.id] = entry
        for id_ in self._entries:
            self._sizes.move_to_end(id_)
        self._make_room()


def _try_to_write(folder: Path, say: Callable[[str], None]) -> None:
    """Says if states cannot be kept in a folder: better now than with the first of them."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        say(f"serve: {folder} cannot be written ({error.strerror}): no state can be kept under an id")


def _entry(facts: dict[str, Any], path: Path) -> Entry:
    """An entry from its file, if it is one."""
    fields = facts.get("conversation")
    conversation = None if fields is None else conversation_of(fields, f"{path}: conversation")
    check_values(Entry, {**facts, "conversation": None}, str(path))
    try:
        entry = Entry(**{**facts, "conversation": conversation})
    except TypeError:
        raise GSAError(f"{path}: expected the fields of a state, got {', '.join(facts)}") from None
    if path.stem != entry.id or not ID.fullmatch(entry.id):
        raise GSAError(f"{path}: it tells of {entry.id!r}")
    return entry


def conversation_of(fields: Any, what: str) -> Conversation:
    """A conversation from a file, if it is one; the error says what it was about."""
    check_values(Conversation, fields, what)
    messages, reply = fields.get("messages"), fields.get("reply")
    whole = isinstance(messages, list) and all(_is_message(message) for message in messages)
    if not whole or not (reply is None or all(type(id_) is int for id_ in reply)):
        raise GSAError(f"{what}: expected messages with role and content, and ids of tokens")
    try:
        return Conversation(**fields)
    except TypeError:
        raise GSAError(f"{what}: expected the fields of a conversation, got {quoted(list(fields))}") from None


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and message.keys() == {"role", "content"}
        and all(isinstance(value, str) for value in message.values())
    )
