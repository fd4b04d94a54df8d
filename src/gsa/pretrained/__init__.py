"""Models that come with the package: folders that `gsa` and transformers load, each with a card that says what it is.

import gsa

model = gsa.load("gsa-tiny")  # takes and gives text; gsa.LM.from_pretrained("gsa-tiny") is the module of torch
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gsa.errors import GSAError


def names() -> list[str]:
    """The models there are."""
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/config.json"))


def folder(name: str = "gsa-tiny") -> Path:
    """The folder of a model: weights, config, tokenizer, recipe, log and card."""
    if name not in names():
        raise GSAError(f"pretrained: there is no model {name!r}, only {', '.join(names())}")
    return Path(__file__).parent / name


def path_of(model: Any) -> Any:
    """The folder of a model if this is the name of one, and no file or folder here; anything else as it is."""
    known = isinstance(model, str) and model in names() and not Path(model).exists()
    return str(folder(model)) if known else model


def book() -> str:
    """*Sense and Sensibility* by Jane Austen (1811, public domain), 670 KB: a long text to try things with."""
    import lzma

    path = Path(__file__).parent / "books" / "sense-and-sensibility.txt.xz"
    return lzma.decompress(path.read_bytes()).decode("utf-8")
