"""Small distillations for the tests: a Transformer of some thousand parameters, its students, a text as bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gsa.convert import Choices
from gsa.distill import DistillSettings
from gsa.models.checkpoint import load_weights
from tests.convert.families import made, saved
from tests.train.runs import prepared

WINDOW = 8


def material(folder: Path, to: str = "hybrid", **choices: Any) -> Path:
    """Source, student and tokens in a folder."""
    source = saved(folder / "source", "llama", num_hidden_layers=2)
    if to == "hybrid":
        choices = {"window": WINDOW, "sinks": 2, "slots": 4, **choices}
    made(source, folder / "student", Choices(to=to, **choices))
    prepared(folder)
    return folder


def settings(folder: Path, out: str = "run", **changes: Any) -> DistillSettings:
    """Settings of six steps for each stage."""
    options = {
        "data": str(folder / "train"),
        "eval_data": str(folder / "eval"),
        "length": 64,
        "batch_size": 2,
        "max_tokens": 12 * 128,
        "align_share": 0.5,
        "eval_rows": 2,
        "precision": "fp32",
        "threads": 1,
        "json": True,
    }
    return DistillSettings(**{"student": str(folder / "student"), "out": str(folder / out), **options, **changes})


def weights(folder: Path, out: str = "run") -> dict[str, torch.Tensor]:
    """Of the model that came out."""
    return load_weights(folder / out / "model")
