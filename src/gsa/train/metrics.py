"""Metrics of a run: metrics.jsonl in its folder, and TensorBoard and Weights & Biases where they are wanted."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from gsa.errors import GSAError
from gsa.extras import EXTRA_OF, how_to_install
from gsa.files import NotAFile, broken_name, read_file, read_json, written

METRICS, TENSORBOARD, WANDB = "metrics.jsonl", "tensorboard", "wandb.json"
Value = float | int | str


class Metrics:
    """Writes what a run measures, step by step.

    metrics.jsonl has one JSON object a line, `{"step": 1, "loss": 9.01, ...}`, each written at once. A number that is
    not finite is null there, since JSON has no word for it. When a run resumes from step `resume_step`, what an
    interrupted run wrote about later steps is forgotten: those steps come again. A file with lines that are no metrics
    is kept under another name, which is told to `say`, and goes on with those that are.
    """

    def __init__(
        self,
        run: Path,
        *,
        resume_step: int,
        tensorboard: bool,
        wandb: str | None,
        settings: dict[str, Any],
        say: Callable[[str], None],
    ):
        # What may be missing comes first, before anything is changed.
        writer = _imported("torch.utils.tensorboard", "SummaryWriter", "tensorboard") if tensorboard else None
        service = None if wandb is None else {name: _imported("wandb", name, "wandb") for name in ("init", "Error")}
        self.path = Path(run) / METRICS
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _forget(self.path, resume_step, say)
        except OSError as error:
            raise _cannot_write(self.path, error) from None
        self._wandb: Any = None
        if service is not None:
            name = _wandb_id(self.path.parent)
            try:
                self._wandb = service["init"](project=wandb, id=name, resume="allow", dir=str(run), config=settings)
            except service["Error"] as error:
                raise GSAError(f"metrics: wandb cannot start a run in project {wandb!r}: {error}") from None
            # Its own count of steps only rises, so that steps which come again would be ignored.
            self._wandb.define_metric("step")
            self._wandb.define_metric("*", step_metric="step")
        self._tensorboard: Any = None
        if writer is not None:
            folder = str(self.path.parent / TENSORBOARD)
            # Points from this step on are hidden.
            self._tensorboard = writer(folder, purge_step=resume_step + 1 if resume_step else None)
            self._tensorboard.add_text("settings", _indented(settings), resume_step)
        try:
            # Not buffered: a line is in the file when `write` returns, and none is left to write when a disk is full.
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise _cannot_write(self.path, error) from None

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Adds what was measured at a step."""
        line = json.dumps({"step": step, **{name: _strict(value) for name, value in values.items()}}, allow_nan=False)
        rest = memoryview(line.encode() + b"\n")
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise _cannot_write(self.path, error) from None
        if self._tensorboard is not None:
            for name, value in values.items():
                if isinstance(value, str):
                    self._tensorboard.add_text(name, value, step)
                else:
                    self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()  # or a kill would lose points that no resumed run writes again
        if self._wandb is not None:
            self._wandb.log({"step": step, **values})

    def close(self, *, failed: bool = False) -> None:
        """Ends writing."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(failed))

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)


def _object(line: bytes) -> dict[str, Any] | None:
    """What a line says, if it is whole and has a step."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):  # also for numbers of too many digits, and brackets nested too deep
        return None
    whole = line.endswith(b"\n") and isinstance(values, dict) and type(values.get("step")) is int
    return values if whole else None


def _forget(path: Path, resume_step: int, say: Callable[[str], None]) -> None:
    """Drops lines of later steps, and what is left of a line that was cut short; a file with other damage is kept."""
    try:
        text = read_file(path)
    except FileNotFoundError:
        return
    except NotAFile:
        kept = broken_name(path)
        os.rename(path, kept)
        say(f"metrics: {path} is not a file; it is renamed to {kept.name}, and a new one begins")
        return
    lines = text.splitlines(keepends=True)
    found = [_object(line) for line in lines]
    last = max((i for i, values in enumerate(found) if values is not None), default=-1)
    if None in found[:last]:  # what follows the last good line is a torn end, as a kill can leave it
        kept = broken_name(path)
        with written(kept) as file:
            file.write_bytes(text)
        say(
            f"metrics: {path}: line {found.index(None) + 1} is not a JSON object with a step; the file is kept as "
            f"{kept.name}, and goes on with the lines that are"
        )
    pairs = zip(lines, found, strict=True)
    wanted = b"".join(line for line, values in pairs if values is not None and values["step"] <= resume_step)
    if wanted != text:
        with written(path) as file:
            file.write_bytes(wanted)


def _cannot_write(path: Path, error: OSError) -> GSAError:
    return GSAError(f"metrics: cannot write {path}: {error.strerror}")


def _strict(value: Value) -> Value | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _imported(module: str, name: str, what: str) -> Any:
    """A function of an optional package."""
    try:
        # A folder that happens to have the package's name can be imported too, but has nothing in it.
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise GSAError(
            f"metrics: {what} is wanted, but cannot be imported ({error}): {how_to_install(EXTRA_OF[what])}; "
            f"or leave {what} out"
        ) from None


def _wandb_id(run: Path) -> str:
    """The name under which Weights & Biases knows a run, made once and kept in the run's folder."""
    path = run / WANDB
    if not path.exists():
        with written(path) as file:
            file.write_text(json.dumps({"id": secrets.token_hex(8)}) + "\n")
    name = read_json(path).get("id")
    if not isinstance(name, str) or not name:
        raise GSAError(f"metrics: {path} has no id; remove it to begin a new run there")
    return name


def _indented(settings: dict[str, Any]) -> str:
    """Settings as TensorBoard shows them: indented text."""
    return "\n".join(f"    {line}" for line in json.dumps(settings, indent=2, default=str).splitlines())
