"""Recipes: settings of training that come with the package, the paper's own among them.

gsa train --recipe gsa-tiny --data data/books --out runs/books
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from gsa.errors import GSAError


def names() -> list[str]:
    """The recipes there are."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.yaml"))


def recipe(name: str) -> Path:
    """The file of a recipe, which `gsa train --config` reads too.

    >>> recipe("gsa-tiny").name
    'gsa-tiny.yaml'
    """
    if name not in names():
        close = get_close_matches(name, names(), 1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise GSAError(
            f"train: there is no recipe {name!r}; {hint}expected one of {', '.join(names())}; "
            "a file of your own goes behind --config"
        )
    return Path(__file__).parent / f"{name}.yaml"
