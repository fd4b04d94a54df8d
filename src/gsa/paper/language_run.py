"""One small language model, trained and evaluated: a cell of `gsa paper ablation`."""

from __future__ import annotations

import os
import tempfile
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gsa.errors import GSAError
from gsa.options import check, number
from gsa.train.settings import Value


@dataclass(frozen=True, kw_only=True)
class LanguageRun:
    """All that decides a run."""

    model: str = "gsa-tiny"
    """A preset."""
    options: dict[str, Value] = field(default_factory=dict)
    """Fields of its config to change."""
    data: str = ""
    eval_data: str = ""
    """Folders of tokens."""
    tokens: int = number(1_000_000, least=1)
    length: int = number(512, least=2)
    batch_size: int = number(2, least=1)
    lr: float = number(2e-3, above=0)
    seed: int = number(0, least=0)

    def __post_init__(self) -> None:
        check(self, "paper")


def run_language(settings: dict[str, Any]) -> dict[str, Any]:
    """The loss on tokens that were not learned from, by `gsa train`'s own loop.

    The rate rises over a twentieth of the steps and falls with a cosine to a twentieth of its height.
    """
    from gsa.train.run import train
    from gsa.train.settings import TrainSettings

    run = LanguageRun(**settings)
    steps = max(run.tokens // (run.length * run.batch_size), 1)
    with tempfile.TemporaryDirectory(prefix="gsa-") as folder:
        plan = TrainSettings(
            model=run.model,
            model_options=run.options,
            data=run.data,
            eval_data=run.eval_data,
            out=str(Path(folder) / "run"),
            length=run.length,
            batch_size=run.batch_size,
            steps=steps,
            warmup_steps=steps // 20,
            lr=run.lr,
            min_lr=run.lr / 20,
            seed=run.seed,
            eval_every=steps,
            save_every=steps,
            sample_tokens=0,
            keep_best=False,
            threads=1,
            json=True,
        )
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):  # many runs at once would talk into each other
            outcome = train(plan)
    if outcome.reason != "finished" or outcome.eval is None:
        raise GSAError(f"paper: a run ended before its time: {outcome.reason}")
    return {
        "loss": outcome.eval["loss"],
        "perplexity": outcome.eval["perplexity"],
        "bits_per_byte": outcome.eval["bits_per_byte"],
        "precision": outcome.precision,
        "skipped": outcome.skipped,
        "steps": steps,
    }


def settings_of(run: LanguageRun) -> dict[str, Any]:
    """What a cell is told."""
    return asdict(run)
