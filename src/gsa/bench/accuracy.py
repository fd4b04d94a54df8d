"""`gsa bench accuracy`: the operator in fp32 against the recurrence in fp64."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def accuracy(json: bool = False) -> None:
    """Errors of gated slot attention in fp32 against the token loop in fp64, for gates from none to full resets.

    512 tokens, 2 heads of 64, 32 slots; relative errors of the outputs, and of the worst of the gradients.

    Args:
        json: Print JSON instead of a table.
    """
    rows = measure()
    if json:
        print(json_module.dumps(rows, indent=2))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(title="fp32 against the recurrence in fp64, 512 tokens", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("gates", "error of outputs", "of gradients"):
        table.add_column(name, justify="left" if name == "gates" else "right")
    for name, row in rows.items():
        table.add_row(name, f"{row['outputs']:.1e}", f"{row['gradients']:.1e}")
    Console().print(table)


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
