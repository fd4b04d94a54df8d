"""Packages that only some data need, imported when they are."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from gsa.extras import imported


def optional(package: str, purpose: str) -> Any:
    """A module of an optional package; without it, an error says what needs it and how to get it."""
    return imported(package, f"data: {purpose}")


def hub_failures() -> tuple[type[Exception], ...]:
    """What is raised for a name that the Hugging Face Hub does not have, a Hub out of reach, and broken data."""
    errors: Any = import_module("huggingface_hub.errors")
    failures = [OSError, ValueError, RuntimeError, errors.HTTPError, errors.EntryNotFoundError]
    if datasets := sys.modules.get("datasets"):  # only what is imported can raise
        failures += [datasets.exceptions.DatasetsError, import_module("pyarrow").ArrowException]
    return tuple(failures)


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
