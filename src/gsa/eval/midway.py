"""Midway: how far a long text was read, in a file, so that reading goes on from there after a stop.

The file (safetensors) has the sums of all losses so far and the state of the reader, which of models with slots has the
same size after any number of tokens. It is there for readers whose states can be stored, which are those of ours.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gsa.errors import GSAError
from gsa.eval.reader import Reader
from gsa.eval.sums import Sums
from gsa.files import full_disk_explained, open_file, written

EVERY = 10.0
"""Seconds between two times that the file is written."""
SHARE = 20
"""Reading takes so many times as long, at least, as writing: the state of a model with attention grows."""
SUMS = ("sums.tokens", "sums.nats")
"""What of the tensors is not the reader's."""


class Point(NamedTuple):
    """A place within a window."""

    window: int
    read: int
    """Ids of the window that were read."""
    sums: Sums
    state: object


class Midway:
    """The last point that was reached, in memory, and now and then in a file.

    `asked` tells what is measured: the file of another measurement is not used, and is replaced.
    """

    def __init__(self, path: Path, asked: str, reader: Reader) -> None:
        self.path = path
        self._asked, self._reader = asked, reader
        self._wrote, self._pause = time.monotonic(), EVERY
        self._last: Point | None = None

    def reached(self, point: Point) -> None:
        """Keeps a point; the file is written if that was long ago."""
        self._last = point
        if time.monotonic() - self._wrote >= self._pause:
            self.save()

    def finished(self) -> None:
        """The window is read to its end, and its sums are kept elsewhere."""
        self._last = None

    def save(self) -> None:
        """Writes the file, if there is something to write that it does not have."""
        stored = None if self._last is None else self._reader.stored(self._last.state)
        if self._last is None or stored is None:
            return
        began, sums = time.monotonic(), self._last.sums
        tensors = dict(zip(SUMS, (torch.from_numpy(sums.tokens), torch.from_numpy(sums.nats)), strict=True))
        place = {"asked": self._asked, "window": self._last.window, "read": self._last.read}
        tensors |= {f"state.{name}": x.contiguous() for name, x in stored.items()}
        try:
            with full_disk_explained(self.path.parent), written(self.path) as path:
                save_file(tensors, path, {"place": json.dumps(place)})
        except (OSError, SafetensorError) as error:
            raise GSAError(f"{self.path}: cannot be written: {error}") from None
        self._last = None
        self._wrote = time.monotonic()
        self._pause = max(EVERY, SHARE * (self._wrote - began))

    def load(self) -> Point | None:
        """The point in the file, if there is one of this measurement."""
        if not self.path.exists():
            return None
        try:
            with open_file(self.path), safe_open(self.path, framework="pt") as file:
                place = _place(file.metadata())
                if place["asked"] != self._asked:
                    return None
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
            sums = _sums(tensors)
            stored = {name.removeprefix("state."): x for name, x in tensors.items() if name not in SUMS}
            return Point(place["window"], place["read"], sums, self._reader.restored(stored, place["read"]))
        except (OSError, SafetensorError, GSAError) as error:
            raise GSAError(f"{self.path}: no place to go on from: {error}; remove it to start anew") from None

    def remove(self) -> None:
        """Takes the file away, when the result is written."""
        self.path.unlink(missing_ok=True)


def _place(metadata: dict[str, str] | None) -> dict[str, Any]:
    try:
        place = json.loads((metadata or {})["place"])
        if type(place["asked"]) is str and type(place["window"]) is type(place["read"]) is int and place["window"] >= 0:
            return dict(place)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise GSAError("its metadata do not say which")


def _sums(tensors: dict[str, torch.Tensor]) -> Sums:
    for name, dtype in zip(SUMS, (torch.int64, torch.float64), strict=True):
        x = tensors.get(name)
        if x is None or x.dtype != dtype or x.dim() != 1:
            raise GSAError(f"{name} must be {dtype} of one dimension, got {'nothing' if x is None else kind(x)}")
    tokens, nats = (np.array(tensors[name].numpy()) for name in SUMS)
    if len(tokens) != len(nats) or not np.isfinite(nats).all():
        raise GSAError("its sums must be finite numbers, as many as there are counts")
    return Sums(tokens, nats)


def kind(x: torch.Tensor) -> str:
    return f"{x.dtype} {list(x.shape)}"
