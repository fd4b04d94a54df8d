"""A distillation before it starts: student, teacher, tokens and rows of evaluation are found and checked here."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gsa.convert.load import load_teacher
from gsa.convert.mapping import HEAD
from gsa.convert.run import RECORD
from gsa.data.batches import Rows
from gsa.data.holdout import HELDOUT
from gsa.data.shards import Tokens
from gsa.data.tokenizer import JSON, load_tokenizer
from gsa.devices import find_device
from gsa.distill.settings import DistillSettings
from gsa.errors import GSAError, raised_by
from gsa.files import named, read_json
from gsa.models.checkpoint import described_weights, read_model
from gsa.models.config import ModelConfig
from gsa.models.lm import LM
from gsa.models.sizes import tensor_shapes
from gsa.train.find import HUB_NAME
from gsa.train.precision import AUTO, automatic, refuse_missing_unit
from gsa.train.strategies import PRECISIONS


@dataclass(frozen=True)
class Prepared:
    """What a run works with."""

    settings: DistillSettings
    folder: Path
    """Of the student as it was converted."""
    record: dict[str, Any]
    """How it was converted."""
    student: LM
    teacher: LM
    new: set[str]
    """The student's tensors that the teacher does not have."""
    rows: Rows
    evaluated: Tensor | None
    """Texts [N, T] that neither learns from."""
    precision: torch.dtype

    @property
    def evaluated_print(self) -> str | None:
        """A hash of these texts, their number and length too."""
        if self.evaluated is None:
            return None
        found = hashlib.sha256(str(tuple(self.evaluated.shape)).encode())
        found.update(self.evaluated.contiguous().numpy().data)
        return found.hexdigest()


def prepare(settings: DistillSettings) -> Prepared:
    """Everything that is needed; raises for the first thing that is wrong."""
    folder = named(settings.student, "distill")
    record = _record(folder)
    tokens = Tokens.open(str(settings.data))
    _check_tokenizer(tokens, folder)
    if tokens.length < settings.length:
        raise GSAError(
            f"distill: data {tokens.folder} has {tokens.length} tokens, fewer than a row of {settings.length}"
        )
    evaluated = _evaluated(settings, tokens, folder)
    device = find_device(settings.device, "distill")
    precision = automatic(device) if settings.precision == AUTO else settings.precision
    with raised_by("distill"):
        refuse_missing_unit(precision, device)
        student = read_model(folder, dtype=torch.float32)
        teacher = _teacher(settings, record)
        _check_copies(student, teacher, record, folder)
        student, teacher = student.to(device), teacher.to(device)
    if tokens.tokenizer.vocab_size > student.config.vocab_size:
        raise GSAError(
            f"distill: data {tokens.folder} has {tokens.tokenizer.vocab_size} tokens, the student knows "
            f"{student.config.vocab_size}"
        )
    new = set(tensor_shapes(student.config)) - set(tensor_shapes(teacher.config))
    rows = Rows(tokens, settings.length, reset_at_documents=True)
    return Prepared(settings, folder, record, student, teacher, new, rows, evaluated, PRECISIONS[precision])


def _record(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise GSAError(f"distill: {folder}: there is no such folder; `gsa convert` writes one")
    record = read_json(folder / RECORD, made_by="gsa convert")
    if not isinstance(record.get("source"), str) or not isinstance(record.get("teacher"), dict):
        raise GSAError(f"distill: {folder / RECORD}: expected the record of a conversion, with source and teacher")
    _check_distilled(record.get("distilled"), folder / RECORD)
    return record


def _check_distilled(before: Any, path: Path) -> None:
    """Raises unless a record says of trainings before this one, if there were any, what the next record needs."""
    if before is None:
        return
    fields = before if isinstance(before, dict) else {}
    trained, earlier = fields.get("trained"), fields.get("earlier", [])
    if not isinstance(trained, list) or not all(isinstance(name, str) for name in trained) or type(earlier) is not list:
        raise GSAError(
            f"distill: {path}: distilled must be an object with 'trained', a list of names of tensors, and 'earlier', "
            "a list, if there is one"
        )


def _teacher(settings: DistillSettings, record: dict[str, Any]) -> LM:
    """What the student was converted from, as far as its config tells."""
    source = settings.teacher or record["source"]
    gone = settings.teacher is None and not Path(source).exists()
    if gone and not HUB_NAME.fullmatch(source):
        raise GSAError(
            f"{source}, which the student was converted from, is not there; if it has moved, name it with --teacher"
        )
    try:
        teacher = load_teacher(source)
    except GSAError as error:  # a name of the Hub may be a folder that was named from another place
        hint = "; if it is a folder or file that has moved, name it with --teacher" if gone else ""
        raise type(error)(f"{error}{hint}") from None
    recorded, found = ModelConfig.from_dict(record["teacher"]), teacher.config
    for name in (entry.name for entry in fields(ModelConfig)):
        expected, theirs = getattr(recorded, name), getattr(found, name)
        if expected != theirs and name != "initializer_range":  # which a trained model does not use
            raise GSAError(
                f"teacher {source} has {name} {theirs}, the student's {expected}: "
                "it is not what the student was converted from"
            )
    return teacher


def _check_copies(student: LM, teacher: LM, record: dict[str, Any], folder: Path) -> None:
    """Raises unless all that a student has from its teacher, and no training has changed, is the teacher's."""
    dtype = next(iter(described_weights(folder).values())).dtype
    theirs, trained = teacher.state_dict(), set((record.get("distilled") or {"trained": ()})["trained"])
    if student.config.tie_word_embeddings:
        trained.add(HEAD)  # it is the embeddings under another name
    for name, x in student.state_dict().items():
        if name in theirs and name not in trained and not torch.equal(x, theirs[name].to(dtype).float()):
            raise GSAError(
                f"the teacher's {name} differs from the student's: it is not what the student was converted from"
            )


def _check_tokenizer(tokens: Tokens, folder: Path) -> None:
    if not (folder / JSON).exists():
        raise GSAError(f"distill: {folder} has no {JSON}, so that nobody knows which tokens it reads")
    found = load_tokenizer(str(folder)).fingerprint
    if found != tokens.tokenizer.fingerprint:
        raise GSAError(
            f"distill: data {tokens.folder} was prepared with {tokens.tokenizer.name!r}, fingerprint "
            f"{tokens.tokenizer.fingerprint[:12]}; the student's tokenizer has {found[:12]}"
        )


def _evaluated(settings: DistillSettings, tokens: Tokens, folder: Path) -> Tensor | None:
    """Rows of what there is to evaluate on."""
    if settings.eval_data is not None:
        found = Tokens.open(settings.eval_data)
        _check_tokenizer(found, folder)
        if found.fingerprint == tokens.fingerprint:
            raise GSAError(
                f"distill: eval_data {found.folder} has the tokens of data {tokens.folder}: expected texts that are "
                "not learned from; `gsa data prepare --holdout` keeps some"
            )
    elif tokens.manifest.options.get("holdout") is not None and (tokens.folder / HELDOUT).is_dir():
        found = Tokens.open(tokens.folder / HELDOUT)
    else:
        return None
    return spread_rows(found, settings.length, settings.eval_rows)


def spread_rows(tokens: Tokens, length: int, most: int) -> Tensor:
    """Up to so many rows [N, T] of one document each, spread evenly over all there are."""
    begins = sorted({0, *tokens.document_starts(0, tokens.length).tolist()})
    places = [
        place
        for begin, end in zip(begins, [*begins[1:], tokens.length], strict=True)
        for place in range(begin, end - length + 1, length)
    ]
    if not places:
        raise GSAError(f"distill: no document of {tokens.folder} has {length} tokens (length)")
    count = min(most, len(places))
    chosen = [places[i * len(places) // count] for i in range(count)]
    return torch.stack([torch.from_numpy(tokens.read(place, place + length)) for place in chosen])
