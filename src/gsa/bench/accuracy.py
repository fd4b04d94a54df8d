"""`gsa bench accuracy`: the operator in fp32 against the recurrence in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gsa.bench.arguments import prepare
from gsa.table import Column, Table, show

if TYPE_CHECKING:
    from torch import Tensor


def accuracy(json: bool = False, markdown: bool = False) -> None:
    """Errors of gated slot attention in fp32 against the token loop in fp64, for gates from none to full resets.

    512 tokens, 2 heads of 64, 32 slots; relative errors of the outputs, and of the worst of the gradients.

    Args:
        json: Print JSON instead of a table.
        markdown: Print the table as Markdown.
    """
    prepare("bench", json=json, markdown=markdown)
    report = measure()
    show(report, [error_table(report)], json=json, markdown=markdown)


def error_table(report: dict[str, dict[str, float]]) -> Table:
    """A line for each kind of gate."""
    columns = [
        Column("gates", "gates", left=True),
        Column("error of outputs", "outputs", "{:.1e}"),
        Column("of gradients", "gradients", "{:.1e}"),
    ]
    rows = [{"gates": gates, **errors} for gates, errors in report.items()]
    return Table("fp32 against the recurrence in fp64, 512 tokens", columns, rows)


def measure() -> dict[str, dict[str, float]]:
    """The errors by kind of gate."""
    import torch
    from torch.nn.functional import logsigmoid

    from gsa.bench.ops import slot_tensors
    from gsa.ops import gated_slot_attention

    gates: dict[str, Callable[[Tensor], Tensor]] = {
        "as in the paper (tau = 8)": lambda x: logsigmoid(x) / 8,
        "strong (tau = 0.1)": lambda x: logsigmoid(x) / 0.1,
        "barely any (tau = 1000)": lambda x: logsigmoid(x) / 1000,
        "one token in ten a full reset (g = -inf)": lambda x: torch.where(x > 1.28, -torch.inf, logsigmoid(x) / 8),
    }
    rows = {}
    for name, gate in gates.items():
        noise = torch.randn(1, 512, 2, 32, generator=torch.Generator().manual_seed(1))
        inputs = (*slot_tensors(512, 2, 64, 32, tau=1.0)[:3], gate(noise))
        results = []
        for backend, dtype in (("auto", torch.float32), ("reference", torch.float64)):
            x = [t.to(dtype, copy=True).requires_grad_() for t in inputs]
            o, _ = gated_slot_attention(*x, scale=0.125, backend=backend)
            results.append((o.detach(), *torch.autograd.grad(o.square().sum(), x)))
        errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(*results, strict=True)]
        rows[name] = {"outputs": errors[0], "gradients": max(errors[1:])}
    return rows
