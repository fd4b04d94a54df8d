"""Models that come with the package: folders that `gsa` and transformers load, each with a card that says what it is.

import gsa

model = gsa.load("gsa-tiny")  # takes and gives text; gsa.LM.from_pretrained("gsa-tiny") is the module of torch

One that has update.json is an update of weights that another package carries: the two are merged when the model is
first used (`merge.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gsa.errors import GSAError
from gsa.extras import installed, lacks
from gsa.files import read_json

RECORD = "update.json"
"""File of a model that is an update: what it updates, and what comes out."""


def names() -> list[str]:
    """The models there are."""
    return sorted(path.parent.name for path in _place().glob("*/config.json"))


def packaged(name: str) -> Path:
    """The folder of a model in the package, as it comes: card and config, and weights or an update of others'."""
    if name not in names():
        raise GSAError(f"pretrained: there is no model {name!r}, only {', '.join(names())}")
    return _place() / name


def base_package(name: str) -> str | None:
    """The package whose weights a model updates; None if it has its own."""
    record = packaged(name) / RECORD
    return read_json(record)["base"]["package"] if record.exists() else None


def lacking(name: str) -> str | None:
    """Why a model cannot be used, and what would help; None if it can."""
    base = base_package(name)
    return None if base is None or installed(base) else lacks(base)


def folder(name: str = "gsa-tiny") -> Path:
    """The folder of a model with all that it needs: weights, config, tokenizer and card.

    An update is merged with what it updates first, once, into the user's cache folder.
    """
    if not (packaged(name) / RECORD).exists():
        return packaged(name)
    from gsa.pretrained.merge import merged

    return merged(packaged(name))


def path_of(model: Any) -> Any:
    """The folder of a model if this is the name of one, and no file or folder here; anything else as it is."""
    known = isinstance(model, str) and model in names() and not Path(model).exists()
    return str(folder(model)) if known else model


def book() -> str:
    """*Sense and Sensibility* by Jane Austen (1811, public domain), 670 KB: a long text to try things with."""
    import lzma

    path = _place() / "books" / "sense-and-sensibility.txt.xz"
    return lzma.decompress(path.read_bytes()).decode("utf-8")


def _place() -> Path:
    return Path(__file__).parent
