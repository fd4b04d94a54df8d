"""A student beside its teacher, by position."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from gsa.convert import by_position
from gsa.convert.by_position import Compared, Reading, compare, compare_all
from gsa.convert.load import load_teacher
from gsa.errors import GSAError
from gsa.models.config import ModelConfig
from gsa.models.lm import LM
from tests.convert.families import CASES, model_of, saved


def model(seed: int, vocab_size: int = 61) -> LM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_slots": 4}
    return LM(ModelConfig(**sizes, vocab_size=vocab_size, initializer_range=0.5)).eval()  # type: ignore[arg-type]


def texts(*shape: int) -> torch.Tensor:
    return torch.randint(61, shape, generator=torch.Generator().manual_seed(1))


def test_figures_are_those_of_all_logits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_position, "POSITIONS_AT_ONCE", 7)
    student, teacher, rows = model(0), model(1), texts(3, 150)
    found = compare(student, teacher, rows)
    with torch.no_grad():
        own, expected = (one(rows).logits[:, :-1].double().log_softmax(-1) for one in (student, teacher))
    kl = F.kl_div(own, expected, reduction="none", log_target=True).sum(-1)
    for begin, end, place in zip((0, 64, 128), (64, 128, None), found.places(), strict=True):
        part, labels = slice(begin, end), rows[:, 1:][:, begin:end]
        assert (place.begin, place.tokens) == (begin, labels.numel())
        assert place.kl == pytest.approx(float(kl[:, part].mean()), rel=1e-4)
        for log_probs, ce in ((own, place.student_ce), (expected, place.teacher_ce)):
            assert ce == pytest.approx(float(F.cross_entropy(log_probs[:, part].flatten(0, 1), labels.flatten())))
        same = own[:, part].argmax(-1) == expected[:, part].argmax(-1)
        assert place.agreement == pytest.approx(float(same.double().mean()))
    assert [place.name for place in found.places()] == ["0-63", "64-127", "128-255"]


def test_a_model_is_itself() -> None:
    one = model(0)
    for place in compare(one, one, texts(2, 70)).places():
        assert (place.kl, place.agreement, place.student_ce) == (0.0, 1.0, place.teacher_ce)


def test_several_students_are_compared_as_each_alone() -> None:
    teacher, students, rows = model(0), {"a": model(1), "b": model(2)}, texts(2, 20)
    found = compare_all({name: Reading.of(one) for name, one in students.items()}, Reading.of(teacher), rows)
    for name, one in students.items():
        assert found[name].places() == compare(one, teacher, rows).places()


def test_bins_without_positions_are_left_out() -> None:
    figures = torch.arange(10.0).view(2, 5)
    found = Compared(figures, figures, figures, figures)
    assert [(place.name, place.kl) for place in found.places((0, 3, 5))] == [("0-2", 3.5), ("3-4", 6.0)]
    assert found.place(5) is None
    last = found.place(4)
    assert last is not None
    assert (last.name, last.tokens, last.student_ce) == ("4-", 2, 6.5)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(GSAError, match="must share a vocabulary, got 61 and 60 tokens"):
        compare(model(0), model(0, 60), texts(1, 9))
    with pytest.raises(GSAError, match="at least 2 tokens"):
        compare(model(0), model(0), texts(3, 1))
    with pytest.raises(GSAError, match=r"rows must be in 0\.\.60"):
        compare(model(0), model(0), texts(1, 9) + 60)


def test_the_teacher_is_transformers_model(tmp_path: Path) -> None:
    ids = torch.randint(257, (1, 17), generator=torch.Generator().manual_seed(0))
    for case in CASES:
        teacher = load_teacher(saved(tmp_path / case, case))
        with torch.no_grad():
            expected = model_of(case)(ids).logits
        assert (teacher(ids).logits - expected).abs().max() < 1e-4 * expected.abs().max(), case
        assert not any(p.requires_grad for p in teacher.parameters())
    half = load_teacher(tmp_path / "qwen3", torch.bfloat16)
    assert {x.dtype for x in half.state_dict().values()} == {torch.bfloat16}
