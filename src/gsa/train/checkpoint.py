"""Checkpoints of training: model folders with everything a run needs to go on, each with a manifest that proves it.

    RUN/checkpoints/step-00000120/
        config.json, model.safetensors   as `gsa.models.checkpoint.load_model` and transformers read them
        optimizer.safetensors, ...       the other groups of tensors; large groups are numbered files with an index
        state.json                       the step, and what else the trainer wants back
        tokenizer.json, ...              the tokenizer's files, if there are any
        manifest.json                    size and SHA-256 of every other file, and of itself

A folder has such a name only when it is whole and on the disk. Hidden names (.step-...) are saves and removals under
way, or killed; `clean` removes them. step-00000120.old is one that was being replaced by another of the same step.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gsa.errors import GSAError
from gsa.files import OLD, broken_name, discard, read_file, read_json, remove, sync, whole_folder
from gsa.models.checkpoint import (
    CONFIG,
    companions,
    config_text,
    described_weights,
    empty_model,
    load_config,
    load_weights,
    stored_weights,
    write_weights,
)
from gsa.models.config import ModelConfig
from gsa.train.manifest import BrokenCheckpoint, broken, read_manifest, write_manifest

FOLDER, STATE, SETTINGS = "checkpoints", "state.json", "settings.json"
SHARD_BYTES = 4 * 2**30
_NAME = re.compile(r"step-(\d{8,})(\.old)?")
_LEFTOVER = re.compile(r"\.step-\d{8,}(\.old)?\.[0-9a-f]+(\.unfinished)?")
_GROUP = re.compile(r"[a-z]+")
_LIKE_MODEL = ("model", "ema")  # groups with the names of a model's weights


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files have been found whole."""

    folder: Path
    step: int
    state: dict[str, Any]
    groups: tuple[str, ...]

    def tensors(self, group: str, *, described: bool = False) -> dict[str, Tensor]:
        """The tensors of a group ("model", "optimizer", ...) by name, on the CPU; if only described, on `meta`."""
        if group not in self.groups:
            raise GSAError(f"checkpoint {self.folder}: there is no {group!r}, only {', '.join(self.groups)}")
        return (described_weights if described else load_weights)(self.folder, name=group)

    def config(self) -> ModelConfig:
        """The model's config."""
        return load_config(self.folder)


def save_checkpoint(
    run: Path,
    step: int,
    config: ModelConfig,
    tensors: dict[str, dict[str, Tensor]],
    state: dict[str, Any],
    *,
    tokenizer: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """The folder of a new checkpoint, which is on the disk when this returns; an older one of this step is replaced.

    `tensors` are groups by name: "model" is a state dict of the model, and "ema" one like it; others may hold anything.
    `state` is JSON. `tokenizer` is a folder with a tokenizer's files, which are copied.
    """
    if type(step) is not int or step < 0:
        raise GSAError(f"save_checkpoint: step must be a whole number from 0, got {step!r}")
    if state.get("step", step) != step:
        raise GSAError(f"save_checkpoint: state is of step {state['step']!r}, the checkpoint of step {step}")
    groups = _groups(config, tensors)
    texts = {
        CONFIG: config_text(config, next(iter(groups["model"].values())).dtype),
        STATE: _json({**state, "step": step}),
    }
    copies = {} if tokenizer is None else _tokenizer(tokenizer)
    needed = checkpoint_bytes(groups) + sum(map(len, texts.values())) + sum(map(len, copies.values()))
    path = run / FOLDER / f"step-{step:08d}"
    with whole_folder(path, "save_checkpoint", needed) as folder:
        for group, named in groups.items():
            write_weights(folder, named, name=group, shard_bytes=shard_bytes)
        for name, text in texts.items():
            (folder / name).write_text(text)
        for name, content in copies.items():
            (folder / name).write_bytes(content)
        write_manifest(folder, list(groups))
    return path


def checkpoint_bytes(tensors: dict[str, dict[str, Tensor]]) -> int:
    """About how many bytes a checkpoint of these tensors takes."""
    return sum(x.nbytes for named in tensors.values() for x in named.values())


def _groups(config: ModelConfig, tensors: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """The tensors as they are written; raises for what could not be read back."""
    if "model" not in tensors:
        raise GSAError(f"save_checkpoint: tensors must hold a group 'model', got {', '.join(tensors) or 'none'}")
    groups = {}
    for group, named in tensors.items():
        if not _GROUP.fullmatch(group):
            raise GSAError(f"save_checkpoint: a group's name is lower-case letters, got {group!r}")
        if group in _LIKE_MODEL:
            groups[group] = stored_weights(config, named)
            empty_model(config, groups[group], f"save_checkpoint: {group}")
        else:
            groups[group] = {name: x.detach().contiguous() for name, x in named.items()}
    return groups


def _tokenizer(folder: Path) -> dict[str, bytes]:
    try:
        files = {path.name: read_file(path) for path in companions(folder)}
    except OSError as error:
        raise GSAError(f"save_checkpoint: the tokenizer cannot be read: {error}") from None
    if not files:
        raise GSAError(f"save_checkpoint: {folder} holds no tokenizer (tokenizer.json, ...)")
    return files


def _json(value: dict[str, Any]) -> str:
    try:
        return json.dumps(value, indent=2) + "\n"
    except (TypeError, ValueError) as error:
        raise GSAError(f"save_checkpoint: state must be JSON: {error}") from None


def read_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint, after every byte of it has been compared with the manifest.

    Raises BrokenCheckpoint, with the file and what is wrong with it, if it is not as it was written; and GSAError if
    that cannot be known, because files may not be read or the format is newer.
    """
    if not os.path.lexists(folder):
        raise GSAError(f"checkpoint {folder}: there is no such folder")
    groups = read_manifest(folder, {CONFIG, STATE}, "model")
    state = _read_state(folder)
    return Checkpoint(folder, state["step"], state, tuple(groups))


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        state = read_json(folder / STATE)
    except GSAError as error:  # its bytes are those of the manifest, so that nobody else could read it either
        raise broken(folder, str(error)) from None
    step, named = state.get("step"), _NAME.fullmatch(folder.name)
    if type(step) is not int or step < 0:
        raise broken(folder, f"{STATE}: step is {step!r}, expected a whole number from 0")
    if named and int(named[1]) != step:
        raise broken(folder, f"{STATE} is of step {step}")
    return state


def checkpoints(run: Path) -> list[tuple[int, Path]]:
    """Steps and folders of a run's checkpoints, oldest first; whether they are whole, or folders, is not known.

    A step can be there twice after a kill, as step-... and before it step-....old.
    """
    try:
        paths = list((run / FOLDER).iterdir()) if os.path.lexists(run / FOLDER) else []
    except OSError as error:
        raise GSAError(f"checkpoints of {run}: the folder cannot be read: {error}") from None
    names = {path: _NAME.fullmatch(path.name) for path in paths}
    found = [(int(named[1]), named[2] is None, path) for path, named in names.items() if named]
    return [(step, path) for step, _, path in sorted(found)]


def newest_checkpoint(
    run: Path,
    say: Callable[[str], None],
    *,
    set_aside: bool = True,
    check: Callable[[Checkpoint], None] = lambda found: None,
) -> Checkpoint | None:
    """The newest checkpoint of a run that is whole, or None.

    Each broken one that is met is told to `say` and, unless `set_aside` is False (for those who only read), renamed to
    broken-step-..., so that it is not looked at again and its name is free. `check` may find more to be broken.
    """
    for _, path in reversed(checkpoints(run)):
        try:
            found = read_checkpoint(path)
            check(found)
            return found
        except GSAError as error:
            if not os.path.lexists(path):  # by the run itself, if others look at it
                raise GSAError(f"checkpoint {path}: it was removed while it was read") from None
            if not isinstance(error, BrokenCheckpoint):
                raise
            if set_aside:
                say(f"{error}; it is renamed to {_set_aside(path).name}, and the one before is looked at")
            else:
                say(f"{error}; the one before is looked at")
    return None


def _set_aside(path: Path) -> Path:
    place = broken_name(path)
    try:
        os.rename(path, place)
        sync(path.parent)
    except OSError as error:
        raise GSAError(f"checkpoint {path}: it is broken, and cannot be renamed: {error}") from None
    return place


def clean(run: Path) -> list[str]:
    """Removes what killed saves and removals have left, and returns its names; for the one process that writes a run.

    A checkpoint that was about to be replaced gets its name back, unless the one that replaces it is whole.
    """
    removed = []
    try:
        found = checkpoints(run)
        for path in sorted((run / FOLDER).glob(".step-*")):
            if _LEFTOVER.fullmatch(path.name):
                remove(path)
                removed.append(path.name)
        for _, path in found:
            if path.name.endswith(OLD) and _replaced_or_restored(path, path.with_name(path.name.removesuffix(OLD))):
                discard(path)
                removed.append(path.name)
    except OSError as error:
        raise GSAError(f"checkpoints of {run}: what a killed save has left cannot be removed: {error}") from None
    return removed


def _replaced_or_restored(old: Path, path: Path) -> bool:
    """Whether the checkpoint that replaces NAME.old is whole; if there is none, the old one gets its name back."""
    if not os.path.lexists(path):
        os.rename(old, path)
        sync(path.parent)
        return False
    try:
        read_checkpoint(path)
    except GSAError:
        return False
    return True


def prune(run: Path, keep_last: int, keep_steps: set[int]) -> list[int]:
    """Removes all checkpoints but the last `keep_last` and those of `keep_steps`; returns the steps that went."""
    if keep_last < 1:
        raise GSAError(f"prune: keep_last must be at least 1, got {keep_last}")
    found = checkpoints(run)
    steps = sorted({step for step, _ in found})
    gone = [step for step in steps[:-keep_last] if step not in keep_steps]
    try:
        for step, path in found:
            if step in gone:
                discard(path)
    except OSError as error:
        raise GSAError(f"prune: a checkpoint of {run} cannot be removed: {error}") from None
    return gone
