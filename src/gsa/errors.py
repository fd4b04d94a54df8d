"""Errors a user can cause. Each says the operation, what came and what was expected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gsa.terminal import shortened, shown

_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
"""What torch says for want of memory: on GPUs, on CPUs, and on CPUs under Windows."""


class GSAError(ValueError):
    """Base of every error that this package raises on purpose.

    What it quotes may come from anywhere: the message is never too long to read, and has no control characters.
    """

    def __init__(self, message: object) -> None:
        super().__init__(shortened(shown(str(message))))


class OutOfMemory(GSAError, MemoryError, RuntimeError):
    """There is not enough memory, of the machine or of a GPU. It is a RuntimeError too, as torch's own error is."""


class BackendUnavailable(GSAError):
    """An engine that was asked for by name cannot run here."""


@contextmanager
def raised_by(operation: str) -> Iterator[None]:
    """Puts the operation in front of errors that were raised deeper, where its name is not known.

    For want of memory, whoever noticed it, the error is OutOfMemory.
    """
    with memory_errors(operation):
        try:
            yield
        except GSAError as error:
            raise type(error)(f"{operation}: {error}") from None


@contextmanager
def memory_errors(operation: str) -> Iterator[None]:
    """Raises OutOfMemory for what Python, numpy or torch raise for want of memory; other errors pass as they are."""
    try:
        yield
    except GSAError:
        raise
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        said = (str(error).strip().splitlines() or ["it cannot be had"])[0]
        raise OutOfMemory(f"{operation}: not enough memory: {said}") from error


def _is_out_of_memory(error: MemoryError | RuntimeError) -> bool:
    """Whether memory was lacking. torch has a class for that on GPUs, known here by its name, and none on CPUs."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or any(words in str(error) for words in _NO_MEMORY)
    )
