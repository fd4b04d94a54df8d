"""One stage of a distillation: steps, checkpoints, and the way back to the bit.

As in training, nothing is drawn at random after the beginning: a step depends on weights, optimiser and its own number.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from gsa.data.batches import Steps
from gsa.distill.likeliest import in_precision
from gsa.distill.trained import Optimizer, plain_weights
from gsa.errors import GSAError
from gsa.models.lm import LM
from gsa.options import check, number
from gsa.train.checkpoint import Checkpoint, clean, newest_checkpoint, prune, save_checkpoint
from gsa.train.manifest import broken
from gsa.train.metrics import Metrics
from gsa.train.position import SMOOTHING
from gsa.train.progress import Progress
from gsa.train.schedule import learning_rate
from gsa.train.stop import StopWish
from gsa.train.strategies.tensors import check_tensors, optimizer_shapes

WARMUP, FLOOR = 10, 0.1
"""Steps in which rates rise, and what is left of them at the end."""
MEASURED = 5
"""Steps after which the time for all of them is known."""
MAX_SKIPPED = 10
"""Steps in a row that are not finite, after which a run stops."""


class Objective(Protocol):
    """What a stage makes small."""

    def backward(self, rows: list[int], step: int, weight: float) -> float:
        """Adds the gradient of `weight` times the loss on rows; the loss."""


@dataclass
class Position:
    """Where a stage is: with weights and optimiser, all that a checkpoint must hold."""

    step: int = number(0, least=0)
    steps: int = number(0, least=0)
    """Of the whole stage."""
    seconds: float = number(0.0, least=0)
    """Of all steps, over all starts."""
    skipped: int = number(0, least=0)
    """Steps with a loss or gradient that was not finite."""
    loss: float | None = None
    """A moving average."""


@dataclass
class Stage:
    """A stage of a run, with its folder."""

    name: str
    folder: Path
    model: LM
    optimizer: Optimizer
    objective: Objective
    data: Steps
    first: int
    """The step of the data that is the stage's first."""
    steps: int
    """As many as tokens allow."""
    seconds: float | None
    """Time for all of them, if it is limited."""
    clip: float
    precision: torch.dtype
    facts: dict[str, Any]
    """What decides the path of the run; a checkpoint with other facts is of another run."""
    tokenizer: Path
    say: Callable[[str], None]
    position: Position = field(default_factory=Position)

    def resume(self) -> bool:
        """Goes back to the newest checkpoint, if there is one."""
        self.position = Position(steps=self.steps)
        if self.folder.exists():
            clean(self.folder)
        found = newest_checkpoint(self.folder, self.say, check=self._check)
        if found is None:
            return False
        if changed := changed_facts(found.state.get("facts"), self.facts):
            raise GSAError(
                f"distill: {found.folder} is of a run with other settings ({', '.join(changed)}): choose another out"
            )
        self.position = Position(**found.state["position"])
        load_trained(self.model, found.tensors("trained"))
        self.optimizer.load(found.tensors("optimizer"))
        return True

    def _check(self, checkpoint: Checkpoint) -> None:
        """Raises BrokenCheckpoint if a stage cannot go on from there."""
        try:
            check(Position(**checkpoint.state["position"]), "position")
        except (GSAError, KeyError, TypeError) as error:
            raise broken(checkpoint.folder, f"position: {error}") from None
        if changed_facts(checkpoint.state.get("facts"), self.facts):
            return  # of another run, which is no damage
        shapes = {name: tuple(p.shape) for name, p in self.optimizer.parameters.items()}
        for group, expected in (("trained", shapes), ("optimizer", optimizer_shapes(shapes))):
            try:
                problem = check_tensors(checkpoint.tensors(group, described=True), expected)
            except GSAError as error:
                problem = str(error)
            if problem:
                raise broken(checkpoint.folder, f"{group}: {problem}")

    def run(self, *, quiet: bool, save_seconds: float) -> int | None:
        """Goes to the end of the stage, or to a signal, which is returned."""
        position, saved = self.position, time.monotonic()
        with (
            Progress(position.steps, position.step, quiet=quiet) as progress,
            StopWish(quiet=quiet) as wish,
            Metrics(
                self.folder, resume_step=position.step, tensorboard=False, wandb=None, settings={}, say=self.say
            ) as metrics,
        ):
            skipped_in_row = 0
            while position.step < position.steps and wish.signal is None:
                began = time.perf_counter()
                values = self._step()
                seconds = time.perf_counter() - began
                position.seconds += seconds
                self._settle_steps(progress)
                rate = self.data.tokens / seconds
                metrics.write(position.step, {**values, "tokens_per_second": rate})
                progress.update(
                    position.step,
                    loss=values["loss"] if position.loss is None else position.loss,
                    lr=values["lr"],
                    tokens_per_second=rate,
                    peak_share=None,
                    grad_norm=values["grad_norm"],
                    skipped=position.skipped,
                )
                skipped_in_row = skipped_in_row + 1 if values["skipped"] else 0
                if skipped_in_row >= MAX_SKIPPED:
                    raise GSAError(f"distill: {MAX_SKIPPED} steps in a row were not finite; lower rates may help")
                if position.step == position.steps or time.monotonic() - saved >= save_seconds:
                    self.save()
                    saved = time.monotonic()
            if position.step < position.steps:
                self.save()
        return wish.signal if position.step < position.steps else None

    def _step(self) -> dict[str, float]:
        """One step of the optimiser, or none if the gradient is not finite."""
        position, loss = self.position, 0.0
        pieces = self.data.chosen(self.first + position.step)
        with in_precision(self.model, self.precision):
            for rows in pieces:
                loss += self.objective.backward(rows, position.step, 1 / len(pieces)) / len(pieces)
        norm = self.optimizer.norm()
        scale = learning_rate(position.step, steps=position.steps, warmup=WARMUP, peak=1.0, floor=FLOOR)
        good = math.isfinite(loss) and math.isfinite(norm)
        if good:
            self.optimizer.step(scale, min(1.0, self.clip / (norm + 1e-6)))
            before = loss if position.loss is None else position.loss
            position.loss = SMOOTHING * before + (1 - SMOOTHING) * loss
        else:
            self.optimizer.adam.zero_grad()
            position.skipped += 1
        position.step += 1
        lr = self.optimizer.parts[0].lr * scale
        return {"loss": loss, "lr": lr, "grad_norm": norm, "skipped": float(not good)}

    def _settle_steps(self, progress: Progress) -> None:
        """Where time is limited, makes the steps fewer if it would not do; once, when their time is known."""
        position = self.position
        if self.seconds is None or position.step != MEASURED:
            return
        possible = max(int(self.seconds / (position.seconds / position.step)), MEASURED)
        if possible < position.steps:
            progress.note(f"{self.name}: {possible} steps in the time there is, instead of {position.steps}")
            position.steps = progress.total = possible

    def save(self) -> None:
        """Writes a checkpoint, and removes the one before."""
        trained = {name: p.detach().cpu().clone() for name, p in self.optimizer.parameters.items()}
        for name, x in trained.items():
            if not bool(torch.isfinite(x).all()):
                raise GSAError(f"distill: {name} is not finite at step {self.position.step}, which is not saved")
        tensors = {"model": plain_weights(self.model), "trained": trained, "optimizer": self.optimizer.state()}
        state = {"position": asdict(self.position), "facts": self.facts}
        save_checkpoint(self.folder, self.position.step, self.model.config, tensors, state, tokenizer=self.tokenizer)
        prune(self.folder, 1, set())


def changed_facts(before: Any, now: dict[str, Any]) -> list[str]:
    """Names of what decides the path of a run and is not as it was; what no longer decides it may be anything."""
    return [name for name in now if not isinstance(before, dict) or before.get(name) != now[name]]


@torch.no_grad()
def load_trained(model: LM, tensors: dict[str, torch.Tensor]) -> None:
    """Gives parameters the values of a checkpoint."""
    own = dict(model.named_parameters())
    for name, x in tensors.items():
        own[name].copy_(x)
