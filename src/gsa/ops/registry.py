"""Which engine computes: chosen once per call, and never quietly replaced when named."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gsa.errors import BackendUnavailable, GSAError
from gsa.ops import engines
from gsa.ops.native import library
from gsa.ops.triton import availability

# Where `unavailable(device)` says why an engine cannot run. Engines that are not named run anywhere.
AVAILABILITY: dict[str, Any] = {"native": library, "triton": availability}
# What "auto" tries, in order, per device type; "other" is for the rest.
PREFERENCE: dict[str, tuple[str, ...]] = {
    "cpu": ("native", "chunk"),
    "cuda": ("triton", "chunk"),  # which is also what torch calls AMD's
    "other": ("chunk",),
}


class _Chosen(threading.local):  # not a ContextVar, which torch.compile cannot read
    def __init__(self) -> None:  # not a class attribute, whose change torch.compile does not see
        self.name = "auto"
        self.see: Callable[[Any], None] | None = None


_chosen = _Chosen()


def backends() -> dict[str, str | None]:
    """Every engine by name: None if it can run here, otherwise the reason why it cannot.

    >>> backends()["chunk"] is None
    True
    """
    return {name: _unavailable(name, None) for name in engines.MODULES}


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Inside the context, calls that leave `backend` at "auto" use this engine.

    >>> from gsa.ops import gated_linear_attention
    >>> q, k, v = torch.randn(3, 1, 5, 2, 8)
    >>> with use_backend("reference"):
    ...     o, _ = gated_linear_attention(q, k, v)
    """
    if name != "auto":
        _check_usable(name, None, "use_backend")
    previous, _chosen.name = _chosen.name, name
    try:
        yield
    finally:
        _chosen.name = previous


@contextmanager
def watch(see: Callable[[Any], None]) -> Iterator[None]:
    """Inside the context, the record of every call (see gsa.ops.calls) is shown to `see` before it is computed.

    >>> from gsa.ops import gated_linear_attention
    >>> calls = []
    >>> with watch(calls.append):
    ...     o, _ = gated_linear_attention(*torch.randn(3, 1, 5, 2, 8))
    >>> [type(call).__name__ for call in calls]
    ['LinearCall']
    """
    previous, _chosen.see = _chosen.see, see
    try:
        yield
    finally:
        _chosen.see = previous


def chosen() -> str:
    """What `use_backend` says: an engine, or "auto"."""
    return _chosen.name


def engine_name(backend: str, device: torch.device, operation: str = "gated_slot_attention") -> str:
    """The engine asked for, by name or by `use_backend`, or the best one for the device that has the operation."""
    if not isinstance(backend, str):
        raise GSAError(f"{operation}: backend must be a name, got {type(backend).__name__}")
    name = _chosen.name if backend == "auto" else backend
    if name == "auto":
        candidates = PREFERENCE.get(device.type, PREFERENCE["other"])
        return next(c for c in candidates if _unavailable(c, device) is None and _has(c, operation))
    _check_usable(name, device, operation)
    if not _has(name, operation):
        raise BackendUnavailable(f"{operation}: the engine {name!r} has no such operation; use another, or 'auto'")
    return name


def find(operation: str, backend: str, device: torch.device) -> Any:
    """The operation of that engine: a function that takes a record of gsa.ops.calls."""
    function = getattr(getattr(engines, engine_name(backend, device, operation)), operation)
    see = _chosen.see
    if see is None:
        return function

    def watched(call: Any, **options: Any) -> Any:
        see(call)
        return function(call, **options)

    return watched


def _has(name: str, operation: str) -> bool:
    return hasattr(getattr(engines, name), operation)


def _unavailable(name: str, device: torch.device | None) -> str | None:
    """Why an engine cannot run on a device (None: any), or None if it can."""
    if name not in AVAILABILITY:
        return None
    reason: str | None = AVAILABILITY[name].unavailable(device)
    return reason


def _check_usable(name: str, device: torch.device | None, who: str) -> None:
    """Refuses an engine that does not exist or cannot run; `who` asks for it."""
    if name not in engines.MODULES:
        expected = ", ".join(map(repr, engines.MODULES))
        raise GSAError(f"{who}: unknown engine {name!r}; expected 'auto' or one of {expected}")
    reason = _unavailable(name, device)
    if reason is not None:
        raise BackendUnavailable(f"{who}: {name!r} cannot run here: {reason}")
