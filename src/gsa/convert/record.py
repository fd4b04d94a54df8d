"""convert.json, read back: what a converted folder was made from, and what was trained since."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gsa.convert.run import RECORD
from gsa.errors import GSAError
from gsa.files import read_json
from gsa.models.config import ModelConfig


@dataclass(frozen=True)
class Record:
    """How a folder came about."""

    source: str
    """As it was named when it was converted."""
    teacher: ModelConfig
    context: int | None
    """Tokens that the teacher was trained for, if its config says so."""
    new: frozenset[str]
    """Tensors that the source does not have."""
    trained: frozenset[str]
    """Tensors that were trained after the conversion."""

    @property
    def trained_copies(self) -> frozenset[str]:
        """Tensors of the source that are no longer as they were there."""
        return self.trained - self.new


def read_record(folder: Path) -> Record:
    """The record in a folder."""
    path = folder / RECORD
    fields = read_json(path, made_by="gsa convert")
    source, teacher, context = (fields.get(name) for name in ("source", "teacher", "context"))
    if not isinstance(source, str) or not isinstance(teacher, dict):
        raise GSAError(f"verify: {path}: expected the record of a conversion, with source and teacher")
    if context is not None and (type(context) is not int or context < 1):
        raise GSAError(f"verify: {path}: context must be a whole number of at least 1, got {context!r}")
    distilled = fields.get("distilled")
    if distilled is not None and not isinstance(distilled, dict):
        raise GSAError(f"verify: {path}: distilled must be an object with 'trained', got {type(distilled).__name__}")
    trained = [] if distilled is None else distilled.get("trained")
    lists = {"new": fields.get("new"), "distilled.trained": trained}
    for name, value in lists.items():
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise GSAError(f"verify: {path}: {name} must be a list of names of tensors")
    new, changed = (frozenset(value) for value in lists.values() if value is not None)
    return Record(source, ModelConfig.from_dict(teacher), context, new, changed)
