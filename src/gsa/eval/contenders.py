"""What is compared: result files, folders of them, or models, which are evaluated first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gsa.errors import GSAError
from gsa.eval.comparison import Contender
from gsa.eval.results import FOLDER, file_name, load_result
from gsa.files import named

if TYPE_CHECKING:
    from gsa.eval.run import Report

OF_MODELS = ("config.json", "manifest.json", "checkpoints")
"""What folders of models, checkpoints and runs have; the modules that write them would bring torch along."""
Evaluate = Callable[[str], "Report"]
"""Runs tasks with a model, as far as its results are not there yet."""


def contender(name: str, evaluate: Evaluate | None) -> Contender:
    """The results that a name means; a model, if it is one, is evaluated, or its results of earlier are taken."""
    path = named(name, "file")
    if path.is_file() and path.suffix != ".gguf":
        return Contender(name, [load_result(path)])
    if path.is_dir() and not any((path / part).exists() for part in OF_MODELS):
        return _folder(name, path)
    if evaluate is not None:
        return Contender(name, [entry.result for entry in evaluate(name).entries])
    earlier = FOLDER / file_name(path.name or name)
    if earlier.is_dir():
        return _folder(name, earlier)
    raise GSAError(
        f"{name} is no result file and no folder of results, and there are no results in {earlier}; expected one of "
        "these, or a model with --tasks, which are run then"
    )


def _folder(name: str, folder: Path) -> Contender:
    """All results of a folder, which are those of one model."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise GSAError(f"{folder}: there are no result files in this folder; `gsa eval` and `gsa probe` write them")
    results = [load_result(file) for file in files]
    models = {str(result["model"].get("name")) for result in results}
    if len(models) > 1:
        raise GSAError(f"{folder}: expected results of one model in a folder, got those of {', '.join(sorted(models))}")
    return Contender(name, results)
