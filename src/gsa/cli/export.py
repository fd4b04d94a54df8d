"""`gsa export`."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import Literal


def export(
    checkpoint: str,
    out: str,
    best: bool = False,
    ema: bool = False,
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    licence: str | None = None,
    json: bool = False,
) -> None:
    """Writes a checkpoint of training as a folder that transformers loads, with tokenizer and model card.

    Every file of the checkpoint is compared with its manifest first.

    Args:
        checkpoint: Folder of a checkpoint, or of a run, whose newest whole checkpoint is taken.
        out: Folder to write, new or empty.
        best: Take the run's checkpoint with the best evaluation.
        ema: Take the moving average of the weights.
        dtype: Of the weights; by default as they are.
        licence: Licence for the model card, e.g. apache-2.0; none is stated by default.
        json: Print JSON instead of text.
    """
    from gsa.console import tell
    from gsa.train.export import export_checkpoint

    done = export_checkpoint(
        checkpoint,
        Path(out),
        tell,
        best=best,
        ema=ema,
        dtype=dtype,
        licence=licence,
    )
    if json:
        print(json_module.dumps(asdict(done), indent=2, default=str))
    else:
        print(f"step {done.step}: {done.parameters:,} parameters, {done.dtype} -> {out}, with {', '.join(done.files)}")
