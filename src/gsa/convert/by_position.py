"""How a student differs from its teacher, by how many tokens of context it has: KL, cross-entropy, top-1 agreement.

Logits of a few positions are in memory at a time, in fp32. Shape letters: N texts, T time, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gsa.errors import GSAError, memory_errors
from gsa.eval.progress import Progress
from gsa.mixers.sequences import describe
from gsa.models.lm import LM, check_ids
from gsa.table import Column, Table

BORDERS = (0, 64, 128, 256, 512, 1024)
"""Where the bins of positions begin; the last one has no end."""
POSITIONS_AT_ONCE = 128
"""Whose logits are in memory."""


@dataclass(frozen=True)
class Place:
    """Means over some positions, in nats a token."""

    begin: int
    end: int | None
    """None for no end."""
    tokens: int
    kl: float
    """KL(teacher || student)."""
    student_ce: float
    teacher_ce: float
    agreement: float
    """Share of positions at which both find the same token likeliest."""

    @property
    def name(self) -> str:
        return positions(self.begin, self.end)


def positions(begin: int, end: int | None) -> str:
    """From the first to the last of them, if there is a last one.

    >>> positions(64, 128), positions(1024, None)
    ('64-127', '1024-')
    """
    return f"{begin}-" + ("" if end is None else str(end - 1))


@dataclass(frozen=True)
class Compared:
    """Figures of every position of texts but their last tokens, all [N, T - 1], on the CPU.

    Rows are texts, so that a bootstrap can draw these.
    """

    kl: Tensor
    student_ce: Tensor
    teacher_ce: Tensor
    agreement: Tensor

    def place(self, begin: int, end: int | None = None) -> Place | None:
        """The means of these positions; None if no text is so long."""
        parts = [figures[:, begin:end].double() for figures in vars(self).values()]
        tokens = parts[0].numel()
        return Place(begin, end, tokens, *(float(part.mean()) for part in parts)) if tokens else None

    def places(self, borders: Sequence[int] = BORDERS) -> list[Place]:
        """The means of each bin that has positions in it."""
        found = [self.place(begin, end) for begin, end in zip(borders, [*borders[1:], None], strict=True)]
        return [place for place in found if place is not None]


class Reading(NamedTuple):
    """A way to read texts: features [T, D] of one of them, and what turns features into logits."""

    features: Callable[[Tensor, int], Tensor]
    """Of texts [N, T] and the number of the one that is read."""
    head: nn.Module

    @classmethod
    def of(cls, model: LM) -> Reading:
        """A model's own, from the beginning of a text."""
        return cls(lambda rows, number: model.model(rows[number, None], return_state=False)[0][0], model.lm_head)


def compare(student: LM, teacher: LM, rows: Tensor, *, quiet: bool = False) -> Compared:
    """A student beside its teacher, on texts [N, T], each from its beginning.

    >>> from gsa.models.config import ModelConfig
    >>> model = LM(ModelConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=1, vocab_size=50))
    >>> [place] = compare(model, model, torch.arange(50)[None]).places()
    >>> place.name, place.tokens, abs(place.kl) < 1e-6, place.agreement
    ('0-63', 49, True, 1.0)
    """
    vocabularies = student.config.vocab_size, teacher.config.vocab_size
    if vocabularies[0] != vocabularies[1]:
        raise GSAError(
            f"compare: student and teacher must share a vocabulary, got {vocabularies[0]} and {vocabularies[1]} tokens"
        )
    check_ids("rows", rows, teacher.config.vocab_size)
    return compare_all({"student": Reading.of(student)}, Reading.of(teacher), rows, quiet=quiet)["student"]


def compare_all(
    students: Mapping[str, Reading], teacher: Reading, rows: Tensor, *, quiet: bool = False
) -> dict[str, Compared]:
    """Several students beside one teacher, which reads the texts [N, T] once."""
    if rows.dim() != 2 or rows.shape[0] < 1 or rows.shape[1] < 2:
        raise GSAError(f"compare: expected texts [N, T] of at least 2 tokens, got {describe(rows)}")
    total, found = rows.numel() * (1 + len(students)), dict[str, list[Tensor]]()
    with torch.no_grad(), memory_errors("compare"), Progress(total, "tokens", quiet=quiet) as progress:
        for number, row in enumerate(rows):
            read = {}
            for name, reading in {"": teacher, **students}.items():
                read[name] = reading.features(rows, number)[:-1]
                progress.advance(len(row))
            for name, figures in _figures(students, teacher, read, row[1:]).items():
                found.setdefault(name, []).append(figures)
    return {name: Compared(*torch.stack(figures, 1)) for name, figures in found.items()}


def _figures(
    students: Mapping[str, Reading], teacher: Reading, read: dict[str, Tensor], labels: Tensor
) -> dict[str, Tensor]:
    """Figures [4, T - 1] of each student, from features [T - 1, D]; the teacher's are those without a name."""
    found: dict[str, list[Tensor]] = {name: [] for name in students}
    for begin in range(0, len(labels), POSITIONS_AT_ONCE):
        piece = slice(begin, begin + POSITIONS_AT_ONCE)
        right = labels[piece, None].long()
        expected = _log_probs(teacher.head, read[""][piece])
        p, likeliest = expected.exp(), expected.argmax(-1)
        teacher_ce = -expected.gather(1, right)[:, 0]
        for name, student in students.items():
            own = _log_probs(student.head, read[name][piece])
            student_ce = -own.gather(1, right)[:, 0]
            agreement = (own.argmax(-1) == likeliest).float()
            kl = (p * (expected - own)).sum(-1).clamp(min=0)  # less than 0 is rounding
            found[name].append(torch.stack([kl, student_ce, teacher_ce, agreement]).cpu())
    return {name: torch.cat(pieces, 1) for name, pieces in found.items()}


def _log_probs(head: nn.Module, x: Tensor) -> Tensor:
    """[T, V] of features [T, D]."""
    logits: Tensor = head(x[None])[0]
    return logits.float().log_softmax(-1)


def table(title: str, places: Sequence[Place], notes: Sequence[str] = ()) -> Table:
    """A row for each bin."""
    columns = [
        Column("positions", lambda place: place.name, left=True),
        Column("tokens", lambda place: place.tokens, "{:,}"),
        Column("KL", lambda place: place.kl, "{:.4f}"),
        Column("cross-entropy", lambda place: place.student_ce, "{:.3f}"),
        Column("teacher's", lambda place: place.teacher_ce, "{:.3f}"),
        Column("same top token", lambda place: place.agreement, "{:.1%}"),
    ]
    return Table(title, columns, places, notes)
