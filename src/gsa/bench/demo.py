"""`gsa demo`: the operator at work in a minute or two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

HEADS, WIDTH, SLOTS = 4, 128, 64


def demo(out: str = "out") -> None:
    """Shows gated slot attention at work: exact for every gate, fast, and with a cost per token that does not grow.

    Args:
        out: Folder for the chart.
    """
    from rich.console import Console

    from gsa.ops import backends

    console = Console()
    engines = ", ".join(name for name, reason in backends().items() if reason is None)
    console.print("[bold]Gated slot attention[/]: softmax attention over a fixed number of memory slots.")
    console.print(f"Engines on this machine: {engines}. {HEADS} heads of {WIDTH}, {SLOTS} slots, fp32.\n")
    _exactness(console)
    _speed(console, Path(out))


def _exactness(console: Console) -> None:
    """fp32 against the token loop in fp64, for gates from none to full resets."""
    import torch
    from rich.table import Table
    from torch.nn.functional import logsigmoid

    from gsa.bench.ops import slot_tensors
    from gsa.ops import gated_slot_attention

    gates: dict[str, Callable[[Tensor], Tensor]] = {
        "as in the paper (tau = 8)": lambda x: logsigmoid(x) / 8,
        "strong (tau = 0.1)": lambda x: logsigmoid(x) / 0.1,
        "barely any (tau = 1000)": lambda x: logsigmoid(x) / 1000,
        "one token in ten a full reset (g = -inf)": lambda x: torch.where(x > 1.28, -torch.inf, logsigmoid(x) / 8),
    }
    table = Table(title="1. Exact: fp32 against the recurrence in fp64, 512 tokens", title_justify="left")
    for name in ("gates", "error of outputs", "of gradients"):
        table.add_column(name, justify="left" if name == "gates" else "right")
    with console.status("comparing with the recurrence"):
        for name, gate in gates.items():
            noise = torch.randn(1, 512, 2, 32, generator=torch.Generator().manual_seed(1))
            inputs = (*slot_tensors(512, 2, 64, 32, tau=1.0)[:3], gate(noise))
            results = []
            for backend, dtype in (("auto", torch.float32), ("reference", torch.float64)):
                x = [t.to(dtype, copy=True).requires_grad_() for t in inputs]
                o, _ = gated_slot_attention(*x, scale=0.125, backend=backend)
                results.append((o.detach(), *torch.autograd.grad(o.square().sum(), x)))
            errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(*results, strict=True)]
            table.add_row(name, f"{errors[0]:.1e}", f"{max(errors[1:]):.1e}")
    console.print(table, "")


def _speed(console: Console, out: Path) -> None:
    """Time against softmax attention of the same width as sequences grow."""
    import torch
    from rich.table import Table

    from gsa.bench.chart import bars, save_lines
    from gsa.bench.ops import Entry, contest

    table = Table(
        title=f"2. Fast: against softmax attention of the same width, {torch.get_num_threads()} threads",
        title_justify="left",
    )
    for name in ("T", "forward", "softmax", "speed-up", "with backward", "softmax", "speed-up"):
        table.add_column(name, justify="right")
    series: dict[str, dict[int, float]] = {"slots": {}, "softmax": {}}
    with console.status("") as status:
        for T in (512, 1024, 2048, 4096, 8192):
            cells = [str(T)]
            for backward in (False, True):
                status.update(f"T = {T}, {'forward+backward' if backward else 'forward'}")
                (row,), _ = contest([Entry(HEADS, WIDTH, T, backward)], against=True, backend="auto", seconds=1.5)
                assert row.softmax_ms is not None
                cells += [f"{row.ms:.1f} ms", f"{row.softmax_ms:.1f} ms", f"{row.speedup:.1f}x"]
                if backward:
                    series["slots"][T] = row.us_per_token
                    series["softmax"][T] = 1e3 * row.softmax_ms / T
            table.add_row(*cells)
    console.print(table, "")
    console.print("[italic]3. Linear: microseconds per token, forward and backward[/]")
    console.print(bars(series, "T", ""), highlight=False)
    path = out / "cost_per_token.png"
    save_lines(
        series,
        path,
        "sequence length T",
        "microseconds per token, forward and backward",
        f"Gated slot attention against softmax attention, width {HEADS * WIDTH}",
    )
    console.print(f"\nChart: {path}")
