"""Which engine computes: a literal table, chosen once per call, and never quietly replaced when named."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gsa.errors import BackendUnavailable, GSAError


@dataclass(frozen=True)
class Engine:
    """How to get at an engine, and why it cannot run on a device (None: any); None if it can."""

    load: Callable[[], Any]
    unavailable: Callable[[torch.device | None], str | None] = lambda device: None
    lacks: tuple[str, ...] = ()
    """Operations it does not have."""


def _reference() -> Any:
    from gsa.ops import reference

    return reference


def _chunk() -> Any:
    from gsa.ops import chunk_engine

    return chunk_engine


def _native() -> Any:
    from gsa.ops.native import engine

    return engine


def _native_unavailable(device: torch.device | None) -> str | None:
    from gsa.ops.native.library import unavailable

    return unavailable(device)


def _triton() -> Any:
    from gsa.ops.triton import engine

    return engine


def _triton_unavailable(device: torch.device | None) -> str | None:
    from gsa.ops.triton.availability import unavailable

    return unavailable(device)


ENGINES: dict[str, Engine] = {
    "reference": Engine(_reference),
    "chunk": Engine(_chunk),
    "native": Engine(_native, _native_unavailable),
    "triton": Engine(_triton, _triton_unavailable, lacks=("selective_scan",)),
}
# What "auto" tries, in order, per device type; "other" is for the rest.
PREFERENCE: dict[str, tuple[str, ...]] = {
    "cpu": ("native", "chunk"),
    "cuda": ("triton", "chunk"),  # which is also what torch calls AMD's
    "other": ("chunk",),
}


class _Chosen(threading.local):  # not a ContextVar, which torch.compile cannot read
    def __init__(self) -> None:  # not a class attribute, whose change torch.compile does not see
        self.name = "auto"


_chosen = _Chosen()


def backends() -> dict[str, str | None]:
    """Every engine by name: None if it can run here, otherwise the reason why it cannot.

    >>> backends()["chunk"] is None
    True
    """
    return {name: engine.unavailable(None) for name, engine in ENGINES.items()}


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Inside the context, calls that leave `backend` at "auto" use this engine.

    >>> from gsa.ops import gated_linear_attention
    >>> q, k, v = torch.randn(3, 1, 5, 2, 8)
    >>> with use_backend("reference"):
    ...     o, _ = gated_linear_attention(q, k, v)
    """
    if name != "auto":
        _usable(name, None)
    previous, _chosen.name = _chosen.name, name
    try:
        yield
    finally:
        _chosen.name = previous


def engine_name(backend: str, device: torch.device, operation: str = "") -> str:
    """The engine asked for, by name or by `use_backend`, or the best one for the device that has the operation."""
    if not isinstance(backend, str):
        raise GSAError(f"backend must be a name, got {type(backend).__name__}")
    name = _chosen.name if backend == "auto" else backend
    if name == "auto":
        candidates = PREFERENCE.get(device.type, PREFERENCE["other"])
        able = (c for c in candidates if operation not in ENGINES[c].lacks)
        return next(c for c in able if ENGINES[c].unavailable(device) is None)
    _usable(name, device)
    if operation in ENGINES[name].lacks:
        raise BackendUnavailable(f"{operation}: the engine {name!r} has no such operation; use another, or 'auto'")
    return name


def engine(backend: str, device: torch.device, operation: str = "") -> Any:
    """That engine: an object with the functions of gsa.ops.reference."""
    return ENGINES[engine_name(backend, device, operation)].load()


def _usable(name: str, device: torch.device | None) -> None:
    if name not in ENGINES:
        raise GSAError(f"backend: unknown engine {name!r}; expected 'auto' or one of {', '.join(map(repr, ENGINES))}")
    reason = ENGINES[name].unavailable(device)
    if reason is not None:
        raise BackendUnavailable(f"backend: {name!r} cannot run here: {reason}")
