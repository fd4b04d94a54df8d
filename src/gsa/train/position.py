"""Where a run is, where its time went, and how it ended."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from gsa.errors import GSAError
from gsa.models.config import ModelConfig
from gsa.options import check, check_values, number
from gsa.train.settings import TrainSettings

SMOOTHING = 0.9


@dataclass
class Evaluated:
    """What an evaluation has found; of the best one, step and loss are kept."""

    step: int = number(least=0)
    loss: float = number()
    perplexity: float = number(most=sys.float_info.max)  # of a loss that has grown, it is far beyond other numbers
    bits_per_byte: float = number()


@dataclass
class Position:
    """Where a run is: with weights and optimiser, all that a checkpoint must hold."""

    step: int = number(0, least=0)
    """Steps done, skipped ones too."""
    skipped: int = number(0, least=0)
    """Steps with a loss or gradient that was not finite."""
    skipped_in_row: int = number(0, least=0)
    loss_scale: float = number(1.0, above=0)
    """What the loss is multiplied by before the pass backward, in fp16."""
    good_steps: int = number(0, least=0)
    """Steps since the loss scale changed."""
    eval: dict[str, float] | None = None
    """The last evaluation that was finite."""
    best: dict[str, float] | None = None
    """The best evaluation: step and loss."""
    evals_since_best: int = number(0, least=0)
    seconds: float = number(0.0, least=0)
    """Time of all steps, over all starts."""
    smoothed_loss: float | None = None
    """A moving average of the loss, for the eye."""

    def note_loss(self, loss: float) -> None:
        """Takes the loss of a step into the average; one bad step must not stay in it."""
        if math.isfinite(loss):
            before = loss if self.smoothed_loss is None else self.smoothed_loss
            self.smoothed_loss = SMOOTHING * before + (1 - SMOOTHING) * loss

    @classmethod
    def read(cls, state: dict[str, Any]) -> Position:
        """The position in a checkpoint's state."""
        state = {"smoothed_loss": None, **state}  # which earlier checkpoints lack
        missing = [entry.name for entry in fields(cls) if entry.name not in state]
        if missing:
            raise GSAError(f"{', '.join(missing)} must be there, and is missing")
        position = cls(**{entry.name: state[entry.name] for entry in fields(cls)})
        check(position, "position")
        for name, found in (("eval", position.eval), ("best", position.best)):
            if found is None:
                continue
            check_values(Evaluated, found, name)
            if not {"step", "loss"} <= found.keys():
                raise GSAError(f"{name} must have step and loss, got {found!r:.80}")
        return position


def check_state(state: dict[str, Any]) -> None:
    """Raises unless a checkpoint's state says all that a run needs to go on, each of it of its type."""
    Position.read(state)
    check_values(TrainSettings, state.get("settings"), "settings")
    check_values(ModelConfig, state.get("model"), "model")
    data = state.get("data")
    if not isinstance(data, dict) or not isinstance(data.get("fingerprint"), str):
        raise GSAError(f"data must have the fingerprint of the tokens, got {data!r:.80}")


@dataclass
class Spent:
    """Seconds of this process, by what they went to."""

    data: float = 0.0
    """Waiting for data."""
    compute: float = 0.0
    """Forward, backward and optimiser."""
    evaluation: float = 0.0
    saving: float = 0.0
    began: float = field(default_factory=time.perf_counter)

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Counts the time inside as spent on one of the fields."""
        began = time.perf_counter()
        yield
        setattr(self, what, getattr(self, what) + time.perf_counter() - began)

    def summary(self) -> dict[str, float]:
        """All parts, what is left over, and the total."""
        total = time.perf_counter() - self.began
        parts = {name: getattr(self, name) for name in ("data", "compute", "evaluation", "saving")}
        return {**parts, "rest": total - sum(parts.values()), "total": total}


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    reason: str
    """finished, early (no better evaluation for long), or stopped (by a signal)."""
    signal: int | None
    """That signal."""
    rank: int
    """Of the process that tells."""
    begin: int
    """The step that this start went on from."""
    step: int
    steps: int
    tokens: int
    skipped: int
    checkpoint: str | None
    """The newest."""
    precision: str
    """Of the passes through the model."""
    eval: dict[str, float] | None
    best: dict[str, float] | None
    spent: dict[str, float]
    """Seconds of this start, by what they went to."""
