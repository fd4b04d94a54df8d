"""The router that lets a token write to few slots."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gsa.mixers import Mixer, mixer
from gsa.mixers.chosen_slots import HeadGate, SlotChoice

D, M = 16, 12


def layer(**options: object) -> Mixer:
    torch.manual_seed(0)
    sizes = {"hidden_size": D, "num_attention_heads": 2, "num_slots": M, "routed_slots": 3}
    return mixer("gsa", **{"router": "sigmoid", **sizes, **options})


def choice(kind: str, logits: Tensor, chosen: int) -> Tensor:
    """Weights of these logits [slots]."""
    router = SlotChoice(1, 1, len(logits), kind, chosen, 0.0)
    router.proj.weight.data = logits[:, None].clone()
    return router(torch.ones(1, 1, 1))[0, 0, 0].detach()


@pytest.mark.parametrize("kind", ["sigmoid", "softmax"])
def test_equal_scores_are_taken_together(kind: str) -> None:
    weights = choice(kind, torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0, 2.0]), 2)
    assert weights.nonzero().flatten().tolist() == [1, 2, 3, 5]
    assert weights[2] == weights[3] == weights[5]


@pytest.mark.parametrize("shift", [-300.0, 0.0, 300.0])
def test_sigmoid_scores_sum_to_one_however_small_they_are(shift: float) -> None:
    weights = choice("sigmoid", torch.tensor([0.0, 1.0, 2.0, 3.0]) + shift, 2)
    assert weights.isfinite().all()
    assert weights.sum().item() == pytest.approx(1)
    assert (weights > 0).tolist() == [False, False, True, True]


def test_softmax_scores_stay_as_they_are() -> None:
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0])
    weights = choice("softmax", logits, 2)
    assert torch.allclose(weights, torch.where(logits > 0.1, logits.softmax(-1), 0.0))


def test_slots_that_are_not_chosen_keep_every_bit() -> None:
    one = layer().eval()
    x = torch.randn(1, 20, D)
    _, before = one(x[:, :19])
    _, after = one(x[:, 19:], before)
    assert before is not None
    assert after is not None
    taken = one.router(x[:, 19:])[0, 0] > 0  # [H, M]
    assert taken.sum(-1).tolist() == [3, 3]
    same = (before["v"] == after["v"]).all(-1)[0] & (before["k"] == after["k"]).all(-2)[0]
    assert torch.equal(same, ~taken)


def test_noise_is_of_training_alone_and_of_the_seed() -> None:
    one, x = layer(), torch.randn(1, 8, D)

    def outputs(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return one(x)[0]

    assert torch.equal(outputs(1), outputs(1))
    assert not torch.equal(outputs(1), outputs(2))
    one.eval()
    assert torch.equal(outputs(1), outputs(2))


def test_noise_chooses_slots_as_often_as_a_softmax_has_them() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([0.0, 1.0, 2.0])
    router = SlotChoice(1, 1, 3, "softmax", 1, 1.0)
    router.proj.weight.data = logits[:, None].clone()
    first = (router(torch.ones(1, 20000, 1))[0, :, 0] > 0).float().mean(0)
    assert torch.allclose(first, logits.softmax(-1), atol=0.02)


def test_gates_of_heads_begin_with_steps_between_a_thousandth_and_a_tenth() -> None:
    torch.manual_seed(0)
    gate = HeadGate(D, 64)
    g = gate(torch.zeros(1, 1, D))[0, 0, :, 0]
    steps = -g / torch.linspace(1, 16, 64)
    assert 0.001 <= steps.min().item() < 0.003
    assert 0.05 < steps.max().item() <= 0.1
