"""Small runs for the tests: a text of 60 KB as bytes, and a model of some thousand parameters."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gsa.data.prepare import prepare
from gsa.train.precision import UNITS
from gsa.train.settings import TrainSettings

ALICE = Path(__file__).parent.parent / "material" / "alice.txt"
MODEL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_slots": 8}


def prepared(folder: Path) -> tuple[Path, Path]:
    """Tokens to learn from, of several documents, and tokens to evaluate on."""
    paragraphs = ALICE.read_text().split("\n\n")
    for name, texts in (("train", paragraphs[:-20]), ("eval", paragraphs[-20:])):
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text("".join(lines))
        prepare([str(folder / f"{name}.jsonl")], "bytes", folder / name, processes=1, progress=False)
    return folder / "train", folder / "eval"


def options(folder: Path, out: str = "run", **changes: Any) -> dict[str, Any]:
    """Settings of a small run on what `prepared` wrote to the folder."""
    return {
        "model_options": MODEL,
        "data": str(folder / "train"),
        "eval_data": str(folder / "eval"),
        "out": str(folder / out) if out else out,
        "length": 64,
        "batch_size": 4,
        "steps": 12,
        "warmup_steps": 2,
        "lr": 3e-3,
        "eval_every": 4,
        "eval_rows": 8,
        "save_every": 3,
        "precision": "fp32",  # the same on every machine
        "threads": 1,
        "json": True,
        **changes,
    }


def run_settings(folder: Path, out: str = "run", **changes: Any) -> TrainSettings:
    return TrainSettings(**options(folder, out, **changes))


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    """The weights of the newest checkpoint."""
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    return load_file(newest / "model.safetensors")


def losses(run: Path) -> list[float]:
    """The loss of every step."""
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def wait_for_steps(process: subprocess.Popen[str], run: Path) -> None:
    """Returns when a run in another process has made some steps."""
    metrics = run / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size > 2000):
        time.sleep(0.05)


def use_cpu(monkeypatch: pytest.MonkeyPatch, unit: str | None) -> None:
    """A CPU that has this unit for bf16, or none."""
    assert unit in (*UNITS, None)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: unit == "AVX-512 BF16")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: unit == "AMX BF16")
