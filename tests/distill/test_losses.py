"""The two losses, against the same written out plainly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gsa.distill.align import Align
from gsa.distill.divergence import LEAST_REST, likeliest_divergence
from gsa.distill.prepare import prepare
from tests.distill.small import WINDOW, material, settings


@pytest.mark.parametrize("k", [1, 5, 30])
def test_divergence_is_kl_over_the_likeliest_and_the_rest(k: int) -> None:
    """Value and gradients, also where the likeliest are all tokens there are."""
    torch.manual_seed(0)
    x, head, teacher = torch.randn(7, 12), torch.randn(30, 12), 2 * torch.randn(7, 30)
    log_probs, ids = teacher.log_softmax(-1).topk(k)

    def plain(x: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        q = (x @ head.T).softmax(-1)
        own = q.gather(-1, ids)
        p, p_rest = log_probs.exp(), (1 - log_probs.exp().sum(-1)).clamp_min(LEAST_REST)
        q_rest = (1 - own.sum(-1)).clamp_min(LEAST_REST)
        return ((p * (log_probs - own.log())).sum(-1) + p_rest * (p_rest / q_rest).log()).mean()

    found, expected = [], []
    for function, results in (
        (lambda x, head: likeliest_divergence(x, head, ids, log_probs), found),
        (plain, expected),
    ):
        a, b = x.clone().requires_grad_(), head.clone().requires_grad_()
        loss = function(a, b)
        results += [loss.detach(), *torch.autograd.grad(3 * loss, (a, b))]
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


def test_divergence_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    x, head = torch.randn(11, 6, requires_grad=True), torch.randn(20, 6, requires_grad=True)
    log_probs, ids = torch.randn(11, 20).log_softmax(-1).topk(4)
    whole = torch.autograd.grad(likeliest_divergence(x, head, ids, log_probs), (x, head))
    monkeypatch.setattr("gsa.distill.divergence.LOGITS_AT_ONCE", 60)
    pieces = torch.autograd.grad(likeliest_divergence(x, head, ids, log_probs), (x, head))
    for a, b in zip(whole, pieces, strict=True):
        torch.testing.assert_close(a, b)


def test_alignment_is_the_error_of_each_layer_on_the_teachers_inputs(tmp_path: Path) -> None:
    """Loss and gradient equal one graph over all layers; and the teacher's own mixers have none."""
    p = prepare(settings(material(tmp_path)))
    loss = Align(p.student, p.teacher, p.rows, windows=(), seed=0).backward([0, 3], 0, 0.5)
    found = {name: x.grad.clone() for name, x in p.student.named_parameters() if x.grad is not None}
    p.student.zero_grad()

    batch = p.rows.micro_batch([0, 3])
    seen, errors = list[torch.Tensor](), list[torch.Tensor]()
    hooks = [
        block.mixer.register_forward_hook(lambda _, inputs, out: seen.extend((inputs[0], out[0])))
        for block in p.teacher.model.layers
    ]
    p.teacher.model(batch.ids, cu_seqlens=batch.cu_seqlens)
    for hook in hooks:
        hook.remove()
    for i, block in enumerate(p.student.model.layers):
        x, y = seen[2 * i : 2 * i + 2]
        error = block.mixer(x, cu_seqlens=batch.cu_seqlens)[0] - y
        errors.append(error.square().sum() / y.square().sum())
    expected = torch.stack(errors).mean()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-4)
    (0.5 * expected).backward()
    assert found
    for name, x in found.items():
        torch.testing.assert_close(x, p.student.get_parameter(name).grad, rtol=1e-3, atol=1e-6)

    # the teacher is no further from itself than rounding
    again = Align(p.teacher.requires_grad_(), p.teacher, p.rows, windows=(), seed=0)
    assert again.backward([0], 0, 1.0) < 1e-9


def test_windows_are_drawn_by_step_and_put_back(tmp_path: Path) -> None:
    p = prepare(settings(material(tmp_path)))
    align = Align(p.student, p.teacher, p.rows, windows=(1, 3, WINDOW), seed=7)
    losses = [align.backward([0], step, 1.0) for step in range(12)]
    assert losses == [align.backward([0], step, 1.0) for step in range(12)]
    assert len(set(losses)) == 3
    assert {block.mixer.options.window for block in p.student.model.layers} == {WINDOW}
