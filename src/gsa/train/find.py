"""find_model: the one place that turns what a user calls a model into a folder with its weights.

A name means, in this order:

- a folder: a checkpoint of training, a run, of which the newest whole checkpoint is taken, or any with config.json;
- a model of the package ("gsa-tiny", "gsa-smol");
- a model of the Hugging Face Hub ("owner/name").
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

from gsa import pretrained
from gsa.data.optional import first_line, hub_failures
from gsa.errors import GSAError
from gsa.extras import installed, require
from gsa.files import named, read_json
from gsa.models import presets
from gsa.models.checkpoint import CONFIG, files_on_hub, load_config, without_weights
from gsa.train.checkpoint import FOLDER, SETTINGS, Checkpoint, checkpoints, newest_checkpoint, read_checkpoint
from gsa.train.manifest import MANIFEST

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_HUB_FILES = ("*.json", "model*.safetensors", "*.model", "merges.txt", "vocab.txt", "*.jinja")
"""What belongs to a model on the Hub: config, weights, and the tokenizer."""
_HUB_SECONDS = 10.0
"""How long the Hub may take to answer the first question."""
_TRIES = 20
"""How often the newest checkpoint of a run is looked for that removes it while it is read."""
Read = TypeVar("Read")


@dataclass(frozen=True)
class FoundModel:
    """Where a model is."""

    folder: Path
    """Has config.json and weights."""
    checkpoint: Checkpoint | None = None
    """If it is one of training: every file has been compared with its manifest."""
    run: Path | None = None
    """The run that the checkpoint is the newest of, if a run was asked for."""


def warn(line: str) -> None:
    """Says something as a Python warning."""
    warnings.warn(line, stacklevel=2)


def find_model(name: str | Path, say: Callable[[str], None] = warn) -> FoundModel:
    """The model that a name or a folder means; raises with all that was looked for if there is none.

    Broken checkpoints of a run that are passed over are told to `say`. Models of the Hub come from its cache, or are
    fetched.

    >>> find_model("gsa-tiny").folder.name
    'gsa-tiny'
    """
    _check_name(name)
    name = pretrained.path_of(name)
    path = named(name, "model")
    if path.is_dir():
        return _in_folder(path, say)
    if path.exists():
        raise GSAError(f"model {name} is a file, expected the folder of a model")
    if not isinstance(name, str):
        raise GSAError(f"model {str(name)!r} was not found: there is no such folder")
    packaged = ", ".join(pretrained.names())
    missing = f"model {name!r} was not found: there is no folder {name}, the package has {packaged}, and "
    if not HUB_NAME.fullmatch(name):
        raise GSAError(f"{missing}models of the Hugging Face Hub are named owner/name{_hint(name)}")
    try:
        folder = on_hub(name)
    except GSAError:
        raise
    except hub_failures() as error:
        raise GSAError(missing + hub_said(error)) from None
    return FoundModel(folder)


def model_type_on_hub(name: str) -> str | None:
    """What config.json of a model of the Hub says it is, fetched or from the cache; None if it cannot be had."""
    if not HUB_NAME.fullmatch(name) or not installed("huggingface_hub"):
        return None
    from huggingface_hub import hf_hub_download

    try:
        found = read_json(Path(hf_hub_download(name, CONFIG, etag_timeout=_HUB_SECONDS))).get("model_type")
    except hub_failures():
        return None
    return found if isinstance(found, str) else None


def read_live(name: str | Path, read: Callable[[], Read]) -> Read:
    """What `read` returns, which finds a model by its name and reads it.

    A run that goes on meanwhile may remove the checkpoint that is being read: then all is done again.
    """
    _check_name(name)
    for last in [*[False] * (_TRIES - 1), True]:
        before = _listed(name)
        try:
            return read()
        except (GSAError, OSError):
            if last or _listed(name) == before:
                raise
    raise AssertionError("the last try returns or raises")


def _check_name(name: str | Path) -> None:
    if not isinstance(name, str | Path) or not str(name):
        raise GSAError(f"model must be a name or a folder, got {name!r}")


def _listed(name: str | Path) -> list[tuple[int, Path]]:
    """The checkpoints of a run, if a name means one."""
    return checkpoints(Path(name)) if os.path.isdir(Path(name) / FOLDER) else []


def _hint(name: str) -> str:
    """What may have been meant by a name that is not there, as the end of a sentence."""
    if name in presets():
        return f"; {name} is a preset without weights, which `gsa train --model {name}` can train"
    close = get_close_matches(name, pretrained.names(), 1)
    return f"; did you mean {close[0]}?" if close else ""


def hub_said(error: Exception) -> str:
    """Why a model did not come from the Hub, as the end of a sentence."""
    from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError

    if isinstance(error, RepositoryNotFoundError):
        return "the Hugging Face Hub has no model of that name that you may read"
    if isinstance(error, OfflineModeIsEnabled):
        return "it is not in the cache of the Hugging Face Hub, which may not be asked: HF_HUB_OFFLINE is set"
    return f"it could not be fetched from the Hugging Face Hub: {first_line(error)}"


def _in_folder(path: Path, say: Callable[[str], None]) -> FoundModel:
    if (path / MANIFEST).exists():
        return FoundModel(path, read_checkpoint(path))
    if (path / FOLDER).is_dir():
        newest = newest_checkpoint(path, say, set_aside=False)
        if newest is None:
            raise GSAError(f"model {path}: the run has no whole checkpoint")
        return FoundModel(newest.folder, newest, path)
    if (path / SETTINGS).exists():
        raise GSAError(f"model {path}: the run has no checkpoint yet")
    if not (path / CONFIG).exists():
        raise GSAError(
            f"model {path} is neither a model ({CONFIG}), nor a checkpoint ({MANIFEST}), nor a run ({FOLDER}): "
            "the folder has none of these"
        )
    return FoundModel(path)


def on_hub(name: str, check: Callable[[Path], object] = load_config) -> Path:
    """The folder of a model of the Hub: fetched, or from the cache where the Hub is out of reach.

    `check` gets a folder with config.json alone, and raises for a model that is not wanted, before its weights are
    fetched: for one that is not ours, by default.
    """
    require("huggingface_hub", f"model {name!r}: a model of the Hugging Face Hub")
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    unreachable = None
    try:
        # One look, without the retries of a download: a name that is wrong is told at once.
        get_hf_file_metadata(hf_hub_url(name, CONFIG), timeout=_HUB_SECONDS)
    except hub_failures() as error:
        unreachable = error
    cached = unreachable is not None
    try:
        check(Path(hf_hub_download(name, CONFIG, local_files_only=cached)).parent)
    except LocalEntryNotFoundError as error:
        raise unreachable or error from None
    folder = Path(snapshot_download(name, allow_patterns=list(_HUB_FILES), local_files_only=cached))
    if not any(folder.glob("model*.safetensors")):
        raise without_weights(f"model {name!r}", [] if cached else files_on_hub(name))
    return folder
