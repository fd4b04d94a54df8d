"""`gsa bench ops`: the operator against torch's softmax attention and against the machine's matmul rate."""

from __future__ import annotations

import json as json_module
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gsa.errors import GSAError

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

SLOTS = 64
SGEMM = 512  # size of the matrices whose product is the machine's rate
SGEMM_FLOPS = 2 * SGEMM**3


@dataclass
class Row:
    """One comparison."""

    heads: int
    width: int
    """Of a head; softmax attention gets heads of 64 with the same width in all."""
    T: int
    backward: bool
    tau: float
    """Gates are logsigmoid(N(0, 1)) / tau."""
    ms: float
    us_per_token: float
    softmax_ms: float | None
    speedup: float | None
    """Softmax attention's time over ours."""
    sgemm_share: float | None
    """Of the rate of a 512 x 512 matmul in the same run, counting 768 * heads * width flops a token; forward only."""


def slot_tensors(T: int, heads: int, width: int, slots: int, tau: float) -> tuple[Tensor, ...]:
    """q, k, v, g for one sequence."""
    import torch

    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, T, heads, width, generator=random) for _ in range(3))
    return q, k, v, torch.nn.functional.logsigmoid(torch.randn(1, T, heads, slots, generator=random)) / tau


def ops(quick: bool = False, threads: int | None = None, backend: str = "auto", json: bool = False) -> None:
    """Speed and memory of gated slot attention, beside softmax attention and the matmul rate of this machine.

    Every ratio comes from two measurements that took turns. Times are the best of several.

    Args:
        quick: Only sequences of 2048 tokens, and no memory (half a minute instead of a few).
        threads: Threads of torch; its own choice by default.
        backend: The engine, or "auto".
        json: Print JSON instead of tables.
    """
    import torch

    if threads is not None and threads < 1:
        raise GSAError(f"bench: threads must be at least 1, got {threads}")
    if threads is not None:
        torch.set_num_threads(threads)
    report = measure(quick, backend, progress=not json)
    print(json_module.dumps(report, indent=2)) if json else _show(report)


def measure(quick: bool, backend: str, progress: bool) -> dict[str, Any]:
    """All numbers of the benchmark."""
    import torch
    from rich.console import Console

    status = Console(stderr=True).status("measuring") if progress else None
    lengths = (2048,) if quick else (2048, 8192)
    plans = [
        (heads, width, T, back, 8.0, True) for heads, width in ((4, 512), (4, 128)) for T in lengths for back in (0, 1)
    ]
    plans += [(4, 512, 2048, back, 0.1, False) for back in (0, 1)]
    if not quick:
        plans += [(4, 512, 32768, back, 8.0, False) for back in (0, 1)]
    rows, rates = [], []
    try:
        if status:
            status.start()
        for heads, width, T, back, tau, against in plans:
            if status:
                status.update(f"{heads} heads of {width}, T = {T}, {'forward+backward' if back else 'forward'}")
            row, rate = compare(heads, width, T, bool(back), tau, against, backend)
            rows.append(row)
            rates.append(rate)
        memory = None if quick else _memory(backend, torch.get_num_threads(), status)
    finally:
        if status:
            status.stop()
    return {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "backend": backend,
        "sgemm_gflops": max(rates),
        "rows": [asdict(row) for row in rows],
        "memory": memory,
        "import_seconds": import_seconds(),
    }


def compare(
    heads: int, width: int, T: int, backward: bool, tau: float, against: bool, backend: str, seconds: float = 4.0
) -> tuple[Row, float]:
    """One row (with softmax attention if `against`), and the matmul rate in GFLOP/s measured along with it."""
    import torch

    from gsa.bench.timing import race
    from gsa.ops import gated_slot_attention

    tensors = slot_tensors(T, heads, width, SLOTS, tau)
    total = heads * width
    sq, sk, sv = softmax = [x.view(1, T, total // 64, 64).transpose(1, 2).contiguous() for x in tensors[:3]]
    a, b = torch.randn(2, SGEMM, SGEMM)

    def multiply() -> None:
        for _ in range(20):
            torch.mm(a, b)

    def attend() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(sq, sk, sv, is_causal=True)

    def slots() -> Tensor:
        q, k, v, g = tensors
        return gated_slot_attention(q, k, v, g, scale=1.0, backend=backend)[0]

    contenders = {
        "sgemm": multiply,
        "slots": _pass(slots, tensors, backward),
        "softmax": _pass(attend, softmax, backward),
    }
    if not against:
        del contenders["softmax"]
    best = race(contenders, seconds)
    rate = 20 * SGEMM_FLOPS / best["sgemm"]
    row = Row(
        heads,
        width,
        T,
        backward,
        tau,
        ms=1e3 * best["slots"],
        us_per_token=1e6 * best["slots"] / T,
        softmax_ms=1e3 * best["softmax"] if against else None,
        speedup=best["softmax"] / best["slots"] if against else None,
        sgemm_share=None if backward else 768 * total * T / best["slots"] / rate,
    )
    return row, rate / 1e9


def _pass(forward: Callable[[], Tensor], inputs: Any, backward: bool) -> Callable[[], object]:
    """The function to time: forward without a graph, or forward and backward to all inputs."""
    import torch

    if not backward:

        def run() -> None:
            with torch.no_grad():
                forward()

        return run
    for x in inputs:
        x.requires_grad_()
    gradient = torch.ones_like(forward())

    def both() -> None:
        torch.autograd.grad(forward(), inputs, gradient)

    return both


def _memory(backend: str, threads: int, status: Any) -> dict[str, float] | None:
    from gsa.bench.memory import measurable, peak_memory

    if not measurable():
        return None
    if status:
        status.update("peak memory, T = 16384")
    return {
        name: peak_memory(backward, 16384, 4, 512, SLOTS, backend, threads)
        for name, backward in (("forward", False), ("forward+backward", True))
    }


def import_seconds() -> float:
    """What `import gsa, gsa.ops` adds to `import torch`: the best of three fresh processes."""
    code = "import torch, time; t = time.perf_counter(); import gsa, gsa.ops; print(time.perf_counter() - t)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    return min(float(run.stdout) for run in runs)


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    console.print(speed_table(report))
    by_case = {(r["width"], r["T"], r["backward"], r["tau"]): r for r in report["rows"]}
    console.print(
        f"sgemm {SGEMM}x{SGEMM}: {report['sgemm_gflops']:.0f} GFLOP/s, {report['threads']} threads, {report['cpu']}, "
        f"torch {report['torch']}, engine {report['backend']}"
    )
    for back, name in ((False, "forward"), (True, "forward+backward")):
        base = by_case[512, 2048, back, 8.0]
        strong = by_case[512, 2048, back, 0.1]["ms"] / base["ms"]
        line = f"{name}: strong gates (tau 0.1) take {strong:.2f}x the time of tau 8"
        if (512, 32768, back, 8.0) in by_case:
            longer = by_case[512, 32768, back, 8.0]["us_per_token"] / base["us_per_token"]
            line += f"; a token at T = 32768 takes {longer:.2f}x one at 2048"
        if report["memory"]:
            kind = "inputs, output and their gradients" if back else "inputs and output"
            line += f"; peak memory at T = 16384 is {report['memory'][name]:.2f}x {kind}"
        console.print(line)
    console.print(f"import gsa adds {report['import_seconds']:.2f} s to import torch")


def speed_table(report: dict[str, Any]) -> Table:
    """The comparisons as a table."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = f"Gated slot attention, {SLOTS} slots, fp32, one sequence"
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
    for name in ("heads", "T", "pass", "tau", "ms", "us/token", "softmax ms", "speed-up", "of sgemm"):
        table.add_column(name, justify="left" if name in ("heads", "pass") else "right", no_wrap=True)
    for row in report["rows"]:
        table.add_row(
            f"{row['heads']}x{row['width']}",
            str(row["T"]),
            "fwd+bwd" if row["backward"] else "fwd",
            f"{row['tau']:g}",
            f"{row['ms']:.1f}",
            f"{row['us_per_token']:.1f}",
            "" if row["softmax_ms"] is None else f"{row['softmax_ms']:.1f}",
            "" if row["speedup"] is None else f"{row['speedup']:.1f}x",
            "" if row["sgemm_share"] is None else f"{100 * row['sgemm_share']:.0f}%",
        )
    return table
