"""Errors a user can cause. Each says the operation, what came and what was expected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class GSAError(ValueError):
    """Base of every error raised for bad input."""


@contextmanager
def raised_by(operation: str) -> Iterator[None]:
    """Puts the operation in front of errors that were raised deeper, where its name is not known."""
    try:
        yield
    except GSAError as error:
        raise type(error)(f"{operation}: {error}") from None


class BackendUnavailable(GSAError):
    """An engine that was asked for by name cannot run here."""
