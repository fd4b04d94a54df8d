"""Models of the package that update the weights of another package: merged once, into the user's cache folder.

The folder of such a model has config.json, the tensors that its base does not have (update.safetensors), and a record
(update.json) with the SHA-256 of all that goes into the merged model and of what comes out. Everything else, also the
tokenizer, comes from the base.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gsa.cache import VARIABLE, cache_folder
from gsa.console import tell
from gsa.errors import GSAError
from gsa.extras import require
from gsa.files import byte_count, free_bytes, open_file, read_file, read_json, sha256, whole_folder
from gsa.locks import held
from gsa.pretrained import RECORD

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gsa.convert.mapping import Mapping
    from gsa.convert.sources import Source
    from gsa.models import ModelConfig

UPDATE, CONFIG, GENERATION, CARD = "update.safetensors", "config.json", "generation_config.json", "README.md"
HASHED = (CONFIG, GENERATION, UPDATE)
"""Files that the record has the SHA-256 of."""
MERGED = "merged.json"
"""File of a merged model: what all its files were when they were written."""
FORMAT = 1
_WEIGHTS = "model.safetensors"
_SMALL = 2**25
"""Files up to so many bytes are compared whole whenever the model is loaded."""
_PAUSE = 0.1
"""Seconds between looks at what another process does."""


def merged(folder: Path) -> Path:
    """The folder of the model that an update and its base make, from the cache; the first time, it is made."""
    record = read_record(folder)
    place = cache_folder() / "models" / f"{folder.name}-{sha256(folder / RECORD)[:12]}"
    if _wrong(place) is None:
        return place
    _check_writable(place.parent, folder.name)
    with ExitStack() as stack:
        _wait_for(place.parent, folder.name, stack)
        wrong = _wrong(place)  # another process may have made it meanwhile
        if wrong is not None:
            if place.exists():
                tell(f"{place}: {wrong}; it is made again")
            _merge(folder, record, place)
    return place


def _wait_for(folder: Path, name: str, stack: ExitStack) -> None:
    """Holds a folder, in which one process at a time merges."""
    told = False
    while True:
        try:
            stack.enter_context(held(folder))
        except BlockingIOError:
            if not told:
                tell(f"{name}: another process is making it; waiting")
                told = True
            time.sleep(_PAUSE)
        else:
            return


def _check_writable(folder: Path, name: str) -> None:
    """Makes a folder; raises if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(folder, os.W_OK | os.X_OK) else "it may not be written to"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason is not None:
        raise GSAError(f"{name}: cannot write {folder}: {reason}; {_elsewhere(name)}")


def _elsewhere(name: str) -> str:
    return f"{name} is made once and kept in the user's cache folder; the environment variable {VARIABLE} names another"


def read_record(folder: Path) -> dict[str, Any]:
    """The record of an update, whose other files are compared with it."""
    record = read_json(folder / RECORD)
    base, files, weights = (record.get(name) for name in ("base", "files", "weights"))
    if record.get("format") != FORMAT or not all(isinstance(part, dict) for part in (base, files, weights)):
        raise GSAError(f"{folder / RECORD}: expected the record of an update, with base, files and weights")
    for name in HASHED:
        if sha256(folder / name) != record["files"].get(name):
            raise GSAError(f"{folder / name} is not the file that {RECORD} is about (sha256)")
    return record


def base_file(package: str, name: str, file: str | None = None) -> Path:
    """The GGUF file that a package carries, which is found without importing it."""
    for needed in (package, "gguf", "transformers"):
        require(needed, name)
    found = find_spec(package)
    assert found is not None
    folders = [Path(folder) for folder in found.submodule_search_locations or ()]
    files = [path for folder in folders for path in sorted(folder.glob("*.gguf" if file is None else file))]
    if len(files) != 1:
        wanted = "one GGUF file" if file is None else file
        raise GSAError(f"{name}: the package {package} has {len(files)} such files, expected {wanted}")
    return files[0]


def _checked_base(record: dict[str, Any], name: str) -> Path:
    """The base, every byte of which has been looked at."""
    base = record["base"]
    path = base_file(base["package"], name, base["file"])
    size = path.stat().st_size
    if size != base["bytes"]:
        raise GSAError(f"{name}: {path} has {size:,} bytes, expected {base['bytes']:,}: another version, or broken")
    if sha256(path) != base["sha256"]:
        raise GSAError(f"{name}: {path} is not the file that the update was made for (sha256): changed, or broken")
    return path


def _merge(folder: Path, record: dict[str, Any], place: Path) -> None:
    """Writes the merged model."""
    import torch

    from gsa.convert.run import write_tensors
    from gsa.convert.sources import open_source
    from gsa.models.checkpoint import load_config, load_weights
    from gsa.models.remote import write_module

    name = folder.name
    base = _checked_base(record, name)
    needed, free = record["weights"]["bytes"], free_bytes(place.parent)
    if needed > free:
        raise GSAError(
            f"{name}: {byte_count(needed)} are needed in {place.parent}, {byte_count(free)} are free there; "
            f"{_elsewhere(name)}"
        )
    tell(f"{name} is made from {base.name}, once: {byte_count(needed)} in {place}")
    source = open_source(base)
    mapping = student_mapping(source, load_config(folder), str(folder))
    new = {key: x.float() for key, x in load_weights(folder, name="update").items()}
    _check_tensors(new, mapping, folder / UPDATE)
    with whole_folder(place, name, needed) as fresh:
        source.write_companions(fresh)
        write_tensors(source, mapping, torch.float32, fresh, new)
        write_module(fresh)
        for file in (CONFIG, GENERATION, CARD):
            (fresh / file).write_bytes(read_file(folder / file))
        _check_merged(fresh, record, name)
        described = {path.name: _facts(path) for path in sorted(fresh.iterdir())}
        (fresh / MERGED).write_text(json.dumps(described, indent=2) + "\n")


def _check_merged(folder: Path, record: dict[str, Any], name: str) -> None:
    """Compares every number that was written with what the update was made with."""
    from gsa.models.checkpoint import load_weights

    stored = load_weights(folder)
    if digest(stored, stored.__getitem__) != record["weights"]["sha256"]:
        raise GSAError(
            f"{name}: the merged weights are not those that the update was made with (sha256); the package gguf may "
            "read the base in another way"
        )


def student_mapping(source: Source, student: ModelConfig, what: str) -> Mapping:
    """Which tensor of a student is which of its base; raises if it cannot be one of that base."""
    from gsa.convert.mapping import map_tensors
    from gsa.convert.teacher import read_teacher
    from gsa.models.sizes import tensor_shapes

    teacher = read_teacher(source.fields).config
    theirs = tensor_shapes(teacher)
    for name, shape in tensor_shapes(student).items():
        if theirs.get(name, shape) != shape:
            raise GSAError(f"{what}: tensor {name} is {list(shape)}, and {list(theirs[name])} in {source.place}")
    mapping = map_tensors(source, teacher, student)
    if not mapping.new or mapping.dropped:
        raise GSAError(f"{what}: expected a model with all tensors of {source.place}, and more")
    return mapping


def _check_tensors(new: dict[str, Tensor], mapping: Mapping, path: Path) -> None:
    for name in mapping.new:
        if name not in new:
            raise GSAError(f"{path}: tensor {name} is missing")
        if tuple(new[name].shape) != mapping.shapes[name]:
            raise GSAError(f"{path}: tensor {name} is {list(new[name].shape)}, expected {list(mapping.shapes[name])}")
    for name in new:
        if name not in mapping.new:
            raise GSAError(f"{path}: tensor {name} is not one of the update's")


def digest(names: Iterable[str], read: Callable[[str], Tensor]) -> str:
    """The SHA-256 of tensors, whatever file they are in: names, dtypes, shapes and numbers."""
    import torch

    found = hashlib.sha256()
    for name in sorted(names):
        x = read(name)
        found.update(f"{name} {_dtype(x.dtype)} {list(x.shape)}\n".encode())
        found.update(x.contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _facts(path: Path) -> dict[str, Any]:
    """Bytes of a file, and the SHA-256 of a small one; of large ones, which are weights, that of their header."""
    size = path.stat().st_size
    if size <= _SMALL:
        return {"bytes": size, "sha256": sha256(path)}
    with open_file(path) as file:
        length = file.read(8)
        header = file.read(min(int.from_bytes(length, "little"), _SMALL))
    return {"bytes": size, "header": hashlib.sha256(length + header).hexdigest()}


def _wrong(place: Path) -> str | None:
    """What is wrong with a merged model, found at little cost; None if it can be used.

    What was written under this name was whole, so this finds what was done to it since.
    """
    if not place.is_dir():
        return "it is not there"
    try:
        written = read_json(place / MERGED)
        for name in sorted({*written, CONFIG, _WEIGHTS}):
            if written.get(name) != _facts(place / name):
                return f"{name} is not as it was written"
    except (GSAError, OSError, ValueError) as error:  # the last for names that no file can have
        return str(error)
    return None
