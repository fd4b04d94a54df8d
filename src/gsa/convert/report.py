"""`gsa convert --verify FOLDER --text FILE`: a student beside its teacher and beside windows, in figures.

By position in the context; for a hybrid, what window and slots each do (see gsa.convert.audit); and recall beyond the
window. All in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gsa.console import tell
from gsa.convert.audit import Figure, Sizes, ahead, shares, slots_alone, window_alone, with_slots_of_others
from gsa.convert.by_position import Compared, Reading, compare_all
from gsa.convert.load import load_teacher
from gsa.convert.recall import SQUAD, Cell, ask, questions_of
from gsa.convert.record import read_record
from gsa.convert.texts import Pieces, read_pieces
from gsa.data.sources import plan
from gsa.data.tokenizer import load_tokenizer
from gsa.errors import GSAError
from gsa.eval.local_data import DataFolder, expected_file
from gsa.eval.ours import OurTokenizer
from gsa.eval.perplexity import FIELD
from gsa.files import named
from gsa.models.checkpoint import read_model
from gsa.models.lm import LM
from gsa.options import check_count

LENGTH = 1024
"""Positions of each piece of text, unless windows are so long that it takes more."""
BEYOND = 4
"""How many times longer than window and sinks a piece is."""
TOKENS, QUESTIONS = 8192, 16
"""What is usual."""
STUDENT, ALONE = "student", "slots alone"


@dataclass(frozen=True)
class Report:
    """All figures."""

    sizes: Sizes
    pieces: Pieces
    compared: dict[str, Compared]
    """The student and what it is audited with, each beside the teacher."""
    shares: list[Figure]
    """Of hybrids: what of the window's loss is recovered."""
    ahead: list[Figure]
    """Of hybrids: how much less the student's loss is than that of a window with as large a state."""
    recalled: list[Cell]

    def as_json(self) -> dict[str, Any]:
        """All figures by name."""
        count, length = self.pieces.ids.shape
        return {
            "texts": self.pieces.names,
            "pieces": count,
            "length": length,
            **asdict(self.sizes),
            "positions": {name: [asdict(place) for place in one.places()] for name, one in self.compared.items()},
            "recovered": [asdict(figure) for figure in self.shares],
            "ahead": [asdict(figure) for figure in self.ahead],
            "recall": [{**asdict(cell), "back": list(cell.back)} for cell in self.recalled],
        }


def report_folder(
    folder: str | Path,
    texts: Sequence[str],
    source: str | Path | None = None,
    *,
    text_tokens: int = TOKENS,
    questions: int = QUESTIONS,
    data: str | Path | None = None,
    quiet: bool = False,
) -> Report:
    """A converted folder beside its source, on about so many tokens of texts that nothing was fitted to.

    Recall is asked with so many needles hidden in these texts, as many pairs of words, and as many questions of SQuAD,
    if there is a folder of `data` with its file.
    """
    check_wanted(texts, text_tokens=text_tokens, questions=questions, data=data)
    place, squad = named(folder, "verify"), DataFolder(data)
    record, tokenizer = read_record(place), load_tokenizer(place)
    student = read_model(place, dtype=torch.float32).eval().requires_grad_(False)
    sizes = Sizes.of(student)
    length = max(LENGTH, BEYOND * sizes.near) + 1
    length = min(length, record.context or length)
    if length <= sizes.near + 1:
        raise GSAError(
            f"verify: the teacher reads {length} tokens, of which none is beyond window and sinks of {sizes.near}"
        )
    pieces = read_pieces(tokenizer, texts, length=length, tokens=text_tokens, say=tell)
    ours = OurTokenizer(tokenizer)
    book = " ".join(ours.decode(row) for row in pieces.ids.tolist())
    asked = questions_of(ours, book, sizes, questions, squad) if questions else []
    teacher = load_teacher(record.source if source is None else source)
    models = {
        **(windows(student, teacher, sizes, bool(record.trained_copies)) if sizes.slots else {}),
        STUDENT: student,
    }
    readings = {name: Reading.of(model) for name, model in models.items()}
    if sizes.slots:
        readings[ALONE] = Reading.of(slots_alone(student))
        if len(pieces.ids) > 1:
            readings["slots of another text"] = with_slots_of_others(student, pieces.others())
    compared = compare_all(readings, Reading.of(teacher), pieces.ids, quiet=quiet)
    won, lead = list[Figure](), list[Figure]()
    if sizes.slots:
        windowed = {name: one for name, one in compared.items() if name != ALONE}
        won = shares(windowed, window_name(sizes.window), sizes.near)
        lead = ahead(compared, STUDENT, window_name(sizes.window + sizes.slots), sizes.near)
    return Report(sizes, pieces, compared, won, lead, ask({"teacher": teacher, **models}, asked, sizes, quiet=quiet))


def check_wanted(
    texts: Sequence[str], *, text_tokens: int = TOKENS, questions: int = QUESTIONS, data: str | Path | None = None
) -> None:
    """Raises if texts or data are not there, or numbers make no sense; nothing is read."""
    check_count("verify: text_tokens", text_tokens)
    check_count("verify: questions", questions, least=0)
    if not texts:
        raise GSAError("verify: there is no text to measure on")
    plan(texts, field=FIELD)
    folder = DataFolder(data)
    if data is not None and folder.find(SQUAD) is None:
        raise GSAError(f"verify: --data {folder.folder}: there is no {expected_file(SQUAD)}")
    if data is not None and not questions:
        raise GSAError("verify: data does nothing without questions")


def windows(student: LM, teacher: LM, sizes: Sizes, trained: bool) -> dict[str, LM]:
    """A hybrid's window without slots, and the one that has its size of state, both with the teacher's weights.

    If copies of these were trained, also the window with the student's own.
    """
    weights = teacher.state_dict()
    found = {
        window_name(window): window_alone(student, weights, window)
        for window in (sizes.window, sizes.window + sizes.slots)
    }
    if trained:
        found["slots off"] = window_alone(student, student.state_dict(), sizes.window)
    return found


def window_name(window: int) -> str:
    return f"window {window}"
