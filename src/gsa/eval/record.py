"""The result of a probe or of perplexity, in the format of all result files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gsa import __version__
from gsa.console import tell
from gsa.eval.reader import Reader
from gsa.eval.results import FORMAT, Result, file_name, save_result


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
) -> Result:
    """A result; `tables` are what this task measures besides, by name."""
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
        "settings": settings,
        "seconds": seconds,
        "gsa": __version__,
        "packages": {},
    }


def keep(result: Result, folder: Path) -> None:
    """Writes the file of a result, and says where."""
    path = folder / f"{file_name(result['task'])}.json"
    save_result(result, path)
    tell(f"{path}: written")


def short_name(result: Result) -> str:
    """What tables and charts call the model of a result: of a file or folder, the last part of its path."""
    name = str(result["model"]["name"])
    return (Path(name).name or name) if Path(name).exists() else name
