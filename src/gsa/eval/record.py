"""The result of a probe or of perplexity, in the format of all result files."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from gsa import __version__
from gsa.console import tell
from gsa.errors import GSAError
from gsa.eval.reader import Reader
from gsa.eval.results import FORMAT, Result, load_result, save_result


def record(
    reader: Reader,
    *,
    task: str,
    title: str,
    data: str,
    limit: int | None,
    metrics: dict[str, dict[str, Any]],
    main: str,
    samples: dict[str, list[Any]],
    settings: dict[str, Any],
    seconds: float,
    tables: dict[str, Any],
    shots: int = 0,
    documents: str | None = None,
) -> Result:
    """A result; `tables` are what this task measures besides, by name. `documents` tells other ones apart."""
    return {
        "format": FORMAT,
        "model": {**reader.about, "name": reader.name},
        "task": task,
        "title": title,
        "group": None,
        "version": 1,
        "shots": shots,
        "limit": limit,
        "data": data,
        "metrics": metrics,
        "main": main,
        "samples": samples,
        **tables,
        "notes": [],
        **({} if documents is None else {"identity": {"documents": documents}}),
        "settings": settings,
        "seconds": seconds,
        "gsa": __version__,
        "packages": {},
    }


def keep(result: Result, path: Path) -> None:
    """Writes the file of a result, and says where; and that it replaces one of other documents with the same name."""
    with suppress(GSAError):  # what is no result is replaced too
        if path.exists() and _documents(load_result(path)) != _documents(result):
            tell(f"{path} was of other documents of this name, and is replaced; --output would keep both")
    save_result(result, path)
    tell(f"{path}: written")


def _documents(result: Result) -> Any:
    return result.get("identity", {}).get("documents")


def short_name(result: Result) -> str:
    """What tables and charts call the model of a result: of a file or folder, the last part of its path."""
    name = str(result["model"]["name"])
    return (Path(name).name or name) if Path(name).exists() else name
