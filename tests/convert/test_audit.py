"""What window and slots of a hybrid each do, beside models made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gsa.convert.audit import SWAP, Figure, Sizes, ahead, shares, slots_alone, window_alone, with_slots_of_others
from gsa.convert.by_position import Compared
from gsa.models.config import ModelConfig
from gsa.models.lm import LM

TEACHER = ModelConfig(
    mixer="attention",
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    rope_theta=500.0,
    vocab_size=61,
    initializer_range=0.3,
    tie_word_embeddings=True,
)
W, S, M = 20, 2, 8


def fresh(config: ModelConfig, weights: dict[str, Tensor] | None = None) -> LM:
    torch.manual_seed(0)
    model = LM(config).eval().requires_grad_(False)
    model.load_state_dict(weights or {}, strict=False)
    return model


@pytest.fixture
def teacher() -> LM:
    return fresh(TEACHER)


@pytest.fixture
def student(teacher: LM) -> LM:
    config = replace(TEACHER, mixer="hybrid", window=W, num_sinks=S, num_slots=M, slot_router="gates")
    return fresh(config, teacher.state_dict())


def texts(count: int, length: int) -> Tensor:
    return torch.randint(61, (count, length), generator=torch.Generator().manual_seed(3))


def off(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def test_a_window_alone_is_sliding_attention(teacher: LM, student: LM) -> None:
    without_sinks = fresh(replace(student.config, num_sinks=0), student.state_dict())
    expected = fresh(replace(TEACHER, window=W), teacher.state_dict())
    ids = texts(1, 90)
    found = window_alone(without_sinks, teacher.state_dict(), W)(ids).logits
    assert off(found, expected(ids).logits) < 1e-5


def test_a_window_alone_is_a_hybrid_whose_slots_count_for_nothing(teacher: LM, student: LM) -> None:
    ids, silent = texts(1, 90), fresh(student.config, student.state_dict())
    for layer in silent.model.layers:
        layer.mixer.get_parameter("slot_bias").fill_(-1e9)
    assert off(window_alone(student, teacher.state_dict(), W)(ids).logits, silent(ids).logits) < 1e-5
    assert off(student(ids).logits, silent(ids).logits) > 1e-3


def test_a_window_of_equal_state_is_the_teacher_for_longer(teacher: LM, student: LM) -> None:
    ids = texts(1, W + M + S)
    assert off(window_alone(student, teacher.state_dict(), W + M)(ids).logits, teacher(ids).logits) < 1e-5
    assert off(window_alone(student, teacher.state_dict(), W)(ids).logits, teacher(ids).logits) > 1e-3


def test_slots_alone_see_one_token_exactly(student: LM) -> None:
    ids = texts(1, 50)
    expected = fresh(replace(student.config, window=1, num_sinks=0), student.state_dict())
    assert off(slots_alone(student)(ids).logits, expected(ids).logits) < 1e-6


def test_weights_are_shared(teacher: LM, student: LM) -> None:
    for one, other in ((window_alone(student, teacher.state_dict(), W), teacher), (slots_alone(student), student)):
        name = "model.layers.0.mixer.q_proj.weight"
        assert one.get_parameter(name).data_ptr() == other.get_parameter(name).data_ptr()
        assert one.lm_head.weight is one.model.embeddings.weight


def test_slots_of_another_text_change_what_comes_when_they_are_full(student: LM) -> None:
    rows = texts(2, 200)
    own, _ = student.model(rows[:1])
    same, other = (with_slots_of_others(student, others).features(rows, 0) for others in ([0, 1], [1, 0]))
    assert off(same, own[0]) < 1e-5
    first = W + S + SWAP
    assert off(other[:first], own[0, :first]) < 1e-5
    assert off(other[first:], own[0, first:]) > 1e-3


def test_sizes(teacher: LM, student: LM) -> None:
    assert Sizes.of(student) == Sizes(W, S, M)
    assert Sizes.of(student).near == W + S
    assert Sizes.of(teacher) == Sizes()


def compared(ce: Tensor, teacher_ce: Tensor) -> Compared:
    return Compared(torch.zeros_like(ce), ce, teacher_ce, torch.ones_like(ce))


def test_recovered_shares_are_of_what_the_window_loses() -> None:
    """All texts lose alike, so that there is one share, whichever are drawn."""
    teacher_ce = torch.rand(5, 300, generator=torch.Generator().manual_seed(0))
    lost = torch.linspace(0, 1, 300)
    found = shares(
        {
            "window": compared(teacher_ce + lost, teacher_ce),
            "half": compared(teacher_ce + lost / 2, teacher_ce),
            "teacher": compared(teacher_ce, teacher_ce),
        },
        "window",
        100,
    )
    spans = {"half": [], "teacher": []}  # type: dict[str, list[str]]
    for share in found:
        spans[share.name].append(share.positions)
        expected = {"half": 0.5, "teacher": 1.0}[share.name]
        assert (share.value, share.low, share.high) == pytest.approx((expected,) * 3, abs=1e-4)
    assert spans["half"] == spans["teacher"] == ["100-127", "128-255", "256-511", "100-"]


def test_intervals_come_from_differences_between_texts() -> None:
    teacher_ce, window = torch.zeros(4, 80), torch.ones(4, 80)
    (share,) = shares(
        {
            "window": compared(window, teacher_ce),
            "other": compared(torch.tensor([[0.0], [0.0], [1.0], [1.0]]).expand(4, 80), teacher_ce),
        },
        "window",
        64,
    )
    assert share == Figure("other", 64, 128, 0.5, share.low, share.high)
    assert (share.low, share.high) == (0.0, 1.0)


def test_two_students_are_compared_text_by_text() -> None:
    """What makes a text hard for both cancels."""
    hard = torch.tensor([[1.0], [5.0], [9.0]]).expand(3, 80)
    both = {"a": compared(hard, hard), "b": compared(hard + 0.25, hard)}
    (figure,) = ahead(both, "a", "b", 70)
    assert figure == Figure("a", 70, 128, 0.25, 0.25, 0.25)


def test_where_a_window_loses_nothing_there_is_no_share() -> None:
    same = torch.ones(2, 80)
    assert shares({"window": compared(same, same), "other": compared(same, same)}, "window", 64) == []
