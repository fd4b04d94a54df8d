"""What every experiment writes: a JSON with all that was found and how, and a picture as SVG and PNG."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gsa.errors import GSAError
from gsa.extras import imported
from gsa.files import named, written


def machine() -> dict[str, Any]:
    """Where something was measured."""
    import torch

    from gsa.cli.doctor import processor

    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def command(what: str) -> str:
    """What was typed, without the folders of this machine; or that it was called from Python."""
    if Path(sys.argv[0]).stem not in ("gsa", "__main__"):
        return f"gsa.paper.{what}, from Python"
    return shlex.join(["gsa", *(re.sub(r"[^=]*/", "", word) for word in sys.argv[1:])])


def folder_of(out: str) -> Path:
    """The folder for results, made if it is missing."""
    path = named(out, "folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GSAError(f"paper: {path}: cannot be made a folder: {error.strerror}") from None
    return path


def save_record(path: Path, what: str, settings: dict[str, Any], **found: Any) -> dict[str, Any]:
    """Writes and returns the record of an experiment."""
    record = {
        "experiment": what,
        "command": command(what),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "settings": settings,
        **found,
    }
    with written(path) as place:
        place.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    return record


@contextmanager
def drawn(path: Path, columns: int = 1, size: tuple[float, float] = (7, 4.5)) -> Iterator[Any]:
    """Axes of matplotlib, an array if there are several columns; the picture goes to `path` with .svg and .png."""
    imported("matplotlib", "paper: a picture").use("agg")
    from matplotlib import pyplot

    # The same picture is the same file: no dates in it, and names of its parts that are not random.
    with pyplot.rc_context({"svg.hashsalt": "gsa", "svg.fonttype": "none"}):
        figure, axes = pyplot.subplots(1, columns, figsize=size, dpi=120, layout="constrained")
        try:
            yield axes
            for kind, metadata in (("svg", {"Date": None}), ("png", None)):
                with written(path.with_suffix(f".{kind}")) as place:
                    figure.savefig(place, format=kind, metadata=metadata)
        finally:
            pyplot.close(figure)
