"""The folder of a run: one run at a time in it, its settings, its checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gsa import __version__
from gsa.data.shards import TOKENIZER
from gsa.errors import GSAError
from gsa.files import byte_count, free_bytes, read_json, written
from gsa.locks import locked
from gsa.models.init import without_memory
from gsa.models.lm import LM
from gsa.train.checkpoint import (
    FOLDER,
    SETTINGS,
    STATE,
    Checkpoint,
    checkpoints,
    clean,
    newest_checkpoint,
    prune,
    save_checkpoint,
)
from gsa.train.manifest import broken
from gsa.train.plan import Plan
from gsa.train.position import Position, check_state
from gsa.train.precision import AUTO
from gsa.train.settings import PRECISIONS
from gsa.train.strategies.tensors import check_tensors, optimizer_shapes

NONFINITE = "nonfinite.json"
# What decides the path of a run: another value needs another folder.
FIXED = ("model", "length", "batch_size", "reset_at_documents", "seed")
# What says nothing about the run itself.
SHOWN = ("dry_run", "json", "tensorboard", "wandb", "out", "sample_prompt", "sample_tokens")


@contextmanager
def opened(plan: Plan) -> Iterator[RunFolder]:
    """The folder of a run, held for this process alone, without the leftovers of a process that was killed."""
    try:
        plan.out.mkdir(parents=True, exist_ok=True)
        if not os.access(plan.out, os.W_OK | os.X_OK):
            raise PermissionError("it is not writable")
    except OSError as error:
        raise GSAError(f"train: out {plan.out} cannot be used: {error}") from None
    with locked(plan.out, "train"):
        clean(plan.out)
        yield RunFolder(plan)


def recorded_precision(out: Path) -> str | None:
    """The precision of a run that was begun there; None if there is none, or its settings cannot be read."""
    try:
        found = read_json(out / SETTINGS)["settings"]["precision"]
    except (GSAError, OSError, KeyError, TypeError):
        return None
    return found if found in PRECISIONS and found != AUTO else None


class RunFolder:
    """The folder of a run. Only the first process of a run has one, from `opened`."""

    def __init__(self, plan: Plan):
        self.plan, self.path = plan, plan.out

    def newest(self, say: Callable[[str], None]) -> Checkpoint | None:
        """The newest whole checkpoint, if it is one of this plan's."""
        checkpoint = newest_checkpoint(self.path, say, check=self._check)
        if checkpoint is None:
            if set_aside := sorted((self.path / FOLDER).glob("broken-*")):
                raise GSAError(
                    f"train: no checkpoint of {self.path} is whole ({set_aside[-1]} is the newest); to begin anew, "
                    "choose another out or remove them"
                )
            return None
        before, now = checkpoint.state, self.state(Position())
        for name, keys in (("model", now["model"]), ("data", ("fingerprint",))):
            changed = [key for key in keys if before[name].get(key) != now[name][key]]
            if changed:
                raise GSAError(
                    f"train: {checkpoint.folder} is of a run with another {name} ({', '.join(changed)} changed): "
                    "choose another out"
                )
        settings = before["settings"]
        for name, value in now["settings"].items():
            if settings.get(name) == value or name in SHOWN or (name == "precision" and value == AUTO):
                continue  # auto keeps the precision that the run began with
            if name in FIXED:
                raise GSAError(
                    f"train: {checkpoint.folder} is of a run with {name} {settings.get(name)}, now it is {value}: "
                    "choose another out"
                )
            say(f"{name} was {settings.get(name)} until here, and is {value} from now on")
        return checkpoint

    def _check(self, checkpoint: Checkpoint) -> None:
        """Raises BrokenCheckpoint if a run cannot go on from what its state says, or not from its tensors."""
        try:
            check_state(checkpoint.state)
        except GSAError as error:
            raise broken(checkpoint.folder, f"{STATE}: {error}") from None
        if any(checkpoint.state["model"].get(key) != value for key, value in self.plan.config.to_dict().items()):
            return  # of another model, with other tensors; that is no damage
        with without_memory():
            shapes = {name: tuple(p.shape) for name, p in LM(self.plan.config).named_parameters()}
        expected = {"model": shapes, "optimizer": optimizer_shapes(shapes)}
        if checkpoint.state["settings"].get("ema") is not None:
            expected["ema"] = shapes
        for group, its_shapes in expected.items():
            try:
                problem = check_tensors(checkpoint.tensors(group, described=True), its_shapes)
            except GSAError as error:
                problem = str(error)
            if problem:
                raise broken(checkpoint.folder, f"{group}: {problem}")

    def write_settings(self) -> None:
        """Leaves the settings and the model's config in the folder, to be read by people."""
        state = self.state(Position())
        text = json.dumps({key: state[key] for key in ("gsa", "settings", "model", "data")}, indent=2) + "\n"
        try:
            with written(self.path / SETTINGS) as file:
                file.write_text(text)
        except OSError as error:
            raise GSAError(f"train: {self.path / SETTINGS} cannot be written: {error}") from None

    def state(self, position: Position) -> dict[str, Any]:
        """What a checkpoint says in JSON."""
        tokens, settings = self.plan.tokens, self.plan.settings
        return {
            **asdict(position),
            "tokens": position.step * self.plan.tokens_per_step,
            "samples": position.step * settings.batch_size,
            "settings": asdict(settings),
            "model": self.plan.config.to_dict(),
            "data": {
                "fingerprint": tokens.fingerprint,
                "tokenizer": asdict(tokens.tokenizer),
                "documents": tokens.documents,
                "tokens": tokens.length,
                "text_bytes": tokens.text_bytes,
                "sources": [source["name"] for source in tokens.manifest.sources],
            },
            "gsa": __version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }

    def save(self, position: Position, tensors: dict[str, dict[str, Tensor]]) -> Path:
        """Writes a checkpoint and removes those that need not be kept."""
        for group, named in tensors.items():
            for name, x in named.items():
                if not bool(torch.isfinite(x).all()):
                    raise GSAError(
                        f"train: {group} {name} is not finite at step {position.step}, which is not saved; "
                        f"the last good checkpoint is {self.last() or 'none'}"
                    )
        tokenizer = self.plan.tokens.folder / TOKENIZER
        saved = save_checkpoint(
            self.path, position.step, self.plan.config, tensors, self.state(position), tokenizer=tokenizer
        )
        settings = self.plan.settings
        best = {int(position.best["step"])} if settings.keep_best and position.best is not None else set()
        prune(self.path, settings.keep_last, best)
        return saved

    def report(self, found: dict[str, Any]) -> None:
        """Leaves what was found of a step that was not finite; a disk that cannot take it stops nothing."""
        with suppress(OSError), written(self.path / NONFINITE) as file:
            file.write_text(json.dumps(found, indent=2) + "\n")

    def last(self) -> Path | None:
        """The newest checkpoint by name."""
        found = checkpoints(self.path)
        return found[-1][1] if found else None

    def check_space(self, parameters: int) -> None:
        """Raises unless the checkpoints that will stand at once fit on the disk: those kept, and one being written."""
        settings = self.plan.settings
        size = parameters * 4 * (4 if settings.ema is not None else 3)
        more = max(settings.keep_last + settings.keep_best + 1 - len(checkpoints(self.path)), 1)
        free = free_bytes(self.path)
        if free < more * size:
            raise GSAError(
                f"train: {more} checkpoints of {byte_count(size)} are to come, the disk of {self.path} has "
                f"{byte_count(free)} free; make room, or keep fewer (keep_last, keep_best)"
            )
