"""Where a pretrained Transformer comes from: a folder, the Hugging Face Hub, or a GGUF file (`gguf_file.py`).

A source has the fields of a config.json, tensors by transformers' names, and a tokenizer. Tensors are read one by one.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gsa.data.optional import hub_failures
from gsa.data.tokenizer import CONFIG as TOKENIZER_CONFIG
from gsa.data.tokenizer import JSON
from gsa.errors import GSAError
from gsa.files import named, read_file, read_json
from gsa.models.checkpoint import CONFIG, INDEX, companions, described_file, opened, weight_files
from gsa.models.fields import Fields
from gsa.terminal import quoted
from gsa.train.find import HUB_NAME, hub_said, on_hub

GGUF = ".gguf"
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Source(ABC):
    """A pretrained Transformer."""

    name: str
    """As it was asked for."""
    place: Path
    """A folder or a file."""
    origin: str
    """Where it is found again, from any folder: its path, or its name on the Hub."""

    @property
    @abstractmethod
    def fields(self) -> Fields:
        """config.json."""

    @property
    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """All tensors in the order in which they are best read, without their numbers (on torch's device meta)."""

    @property
    @abstractmethod
    def largest_shard(self) -> int | None:
        """Bytes of the tensors of the largest of several files; None if there is one."""

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """One tensor."""

    @abstractmethod
    def _write_companions(self, folder: Path) -> list[str]:
        """Writes the tokenizer and what belongs to it to a folder; the names of the files."""

    def write_companions(self, folder: Path) -> list[str]:
        """The same, without tokens that were added to the tokenizer and that the model does not have."""
        names = self._write_companions(folder)
        if (folder / JSON).exists():
            with self.blamed(folder):
                drop_foreign_tokens(folder, int(self.fields["vocab_size"]))
        return names

    @contextmanager
    def blamed(self, folder: Path) -> Iterator[None]:
        """Errors about a folder that is being made name the source, where what is wrong comes from."""
        try:
            yield
        except GSAError as error:
            raise GSAError(f"convert: {str(error).replace(str(folder), str(self.place))}") from None


class FolderSource(Source):
    """A folder with config.json and safetensors."""

    def __init__(self, place: Path, name: str, origin: str | None = None):
        self.place, self.name, self.origin = place, name, origin or str(place.resolve())

    @cached_property
    def fields(self) -> Fields:
        return read_json(self.place / CONFIG)

    @cached_property
    def _files(self) -> dict[Path, dict[str, Tensor]]:
        """What each file of weights holds."""
        files = {path: described_file(path) for path in weight_files(self.place)}
        if len(files) > 1 or not (self.place / "model.safetensors").exists():
            listed: dict[str, str] = read_json(self.place / INDEX)["weight_map"]
            for name, file in listed.items():
                if name not in files[self.place / file]:
                    raise GSAError(f"{self.place / file}: tensor {name} is missing, which {INDEX} says is there")
        return files

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for path, held in self._files.items():
            for name, x in held.items():
                if name in found:
                    raise GSAError(f"{path}: tensor {name} is in another file too")
                if x.dtype not in FLOATS:
                    raise GSAError(
                        f"{path}: tensor {name} is {_dtype(x)}; quantised weights are not read, but for GGUF files"
                    )
                found[name] = x
        return found

    @property
    def largest_shard(self) -> int | None:
        sizes = [sum(x.nbytes for x in held.values()) for held in self._files.values()]
        return max(sizes) if len(sizes) > 1 else None

    def read(self, name: str) -> Tensor:
        path = next(path for path, held in self._files.items() if name in held)
        with opened(path) as file:
            x: Tensor = file.get_tensor(name)
        return x

    def _write_companions(self, folder: Path) -> list[str]:
        found = companions(self.place)
        for file in found:
            (folder / file.name).write_bytes(read_file(file))
        return [file.name for file in found]


def drop_foreign_tokens(folder: Path, count: int) -> None:
    """Takes tokens out of a tokenizer that were added to it, and that its model of `count` tokens does not have.

    Some add a pad or an end of text, which no text needs, without making room for it; so does transformers.
    """
    path, config = folder / JSON, folder / TOKENIZER_CONFIG
    content = read_json(path)
    added = content.get("added_tokens") or []
    foreign = [token for token in added if token.get("id", 0) >= count]
    if foreign:
        content["added_tokens"] = [token for token in added if token not in foreign]
        path.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
    if foreign and config.exists():
        names = {token["content"] for token in foreign}
        kept = {name: value for name, value in read_json(config).items() if _spelling(value) not in names}
        if isinstance(decoder := kept.get("added_tokens_decoder"), dict):
            kept["added_tokens_decoder"] = {id: token for id, token in decoder.items() if _spelling(token) not in names}
        config.write_text(json.dumps(kept, indent=2) + "\n")


def _spelling(token: Any) -> Any:
    """A token's text, which is written as it is, or in a record of the token."""
    return token.get("content") if isinstance(token, dict) else token if isinstance(token, str) else None


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def open_source(name: str | Path) -> Source:
    """The source that a name means: a GGUF file, a folder, or a model of the Hugging Face Hub (owner/name)."""
    path = named(name, "convert: source")
    if path.suffix.lower() == GGUF and path.is_file():
        from gsa.convert.gguf_file import GGUFSource

        return GGUFSource(path, str(name))
    if path.is_dir():
        if not (path / CONFIG).exists():
            raise GSAError(f"convert: {path} has no {CONFIG}, expected the folder of a model, or a {GGUF} file")
        return FolderSource(path, str(name))
    if path.exists():
        raise GSAError(f"convert: {path} is a file, expected the folder of a model, or a {GGUF} file")
    missing = f"convert: {quoted(str(name))} was not found: there is no such folder or file, and "
    if not HUB_NAME.fullmatch(str(name)) or path.suffix.lower() == GGUF:
        raise GSAError(f"{missing}models of the Hugging Face Hub are named owner/name")
    try:
        return FolderSource(on_hub(str(name), _check_kind), str(name), str(name))
    except GSAError:
        raise
    except hub_failures() as error:
        raise GSAError(missing + hub_said(error)) from None


def _check_kind(folder: Path) -> Any:
    """Refuses a model of an unknown kind by its config."""
    from gsa.convert.teacher import read_teacher

    return read_teacher(read_json(folder / CONFIG))
