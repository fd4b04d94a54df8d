"""`gsa bench ops`: the operator against torch's softmax attention and against the machine's matmul rate."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from gsa.bench.arguments import prepare
from gsa.table import Column, Table, show

if TYPE_CHECKING:
    from torch import Tensor

SLOTS = 64
SGEMM = 512  # size of the matrices whose product is the machine's rate
SGEMM_FLOPS = 2 * SGEMM**3


@dataclass(frozen=True)
class Entry:
    """One thing to time."""

    heads: int
    width: int
    """Of a head."""
    T: int
    backward: bool
    tau: float = 8.0
    """Gates are logsigmoid(N(0, 1)) / tau."""


@dataclass(frozen=True)
class Row(Entry):
    """What was measured of it."""

    ms: float = 0.0
    us_per_token: float = 0.0
    softmax_ms: float | None = None
    """Of causal softmax attention with heads of 64 and the same width in all."""
    speedup: float | None = None
    """Softmax attention's time over ours."""
    relative: float | None = None
    """Time per token over that of the first of the entries it was measured with."""
    sgemm_share: float | None = None
    """Of the rate of a 512 x 512 matmul in the same run, counting 768 * heads * width flops a token; forward only."""
    peak_memory: float | None = None
    """Of a process that does this alone, over the bytes of inputs and output (and their gradients)."""


def slot_tensors(T: int, heads: int, width: int, slots: int, tau: float) -> tuple[Tensor, ...]:
    """q, k, v, g for one sequence."""
    import torch

    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, T, heads, width, generator=random) for _ in range(3))
    return q, k, v, torch.nn.functional.logsigmoid(torch.randn(1, T, heads, slots, generator=random)) / tau


def ops(
    quick: bool = False,
    threads: int | None = None,
    backend: str = "auto",
    json: bool = False,
    device: str = "cpu",
    markdown: bool = False,
) -> None:
    """Speed and memory of gated slot attention, beside softmax attention and the matmul rate of this machine.

    Every ratio comes from two measurements that took turns. Times are the best of several. On a GPU, everything is in
    bf16, at the paper's sizes and at narrower heads, also beside flash-linear-attention if that is installed, and
    single tokens are measured, too.

    Args:
        quick: Only sequences of 2048 tokens, and on a CPU no memory (half a minute instead of a few).
        threads: Threads of torch; its own choice by default.
        backend: The engine, or "auto".
        json: Print JSON instead of tables.
        device: "cpu"; "cuda" is an NVIDIA or AMD GPU, "cuda:1" the second one.
        markdown: Print the tables as Markdown.
    """
    prepare("bench", json=json, markdown=markdown, threads=threads)
    if device == "cpu":
        report = measure(quick, backend, progress=not json)
        tables = [speed_table(report)]
    else:
        from gsa.bench.gpu import ops as gpu_ops
        from gsa.bench.gpu import ops_tables

        report = gpu_ops.run(device, quick, backend, progress=not json)
        tables = ops_tables.tables(report)
    show(report, tables, json=json, markdown=markdown)


def measure(quick: bool, backend: str, progress: bool) -> dict[str, Any]:
    """All numbers of the benchmark."""
    import torch
    from rich.console import Console

    from gsa.bench.memory import measurable

    sizes = [
        (heads, width, T)
        for heads, width in ((4, 512), (4, 128), (16, 64))
        for T in ((2048,) if quick else (2048, 8192))
    ]
    contests = [([Entry(*size, back)], True) for size in sizes for back in (False, True)]
    contests += [([Entry(4, 512, 2048, back), Entry(4, 512, 2048, back, 0.1)], False) for back in (False, True)]
    if not quick:
        lengths = (2048, 16384, 65536)
        contests += [([Entry(4, 512, T, back) for T in lengths], False) for back in (False, True)]
    rows, rates = [], []
    with Console(stderr=True, quiet=not progress).status("measuring") as status:
        for entries, against in contests:
            first, last = entries[0], entries[-1]
            status.update(
                f"{first.heads} heads of {first.width}, T = {last.T}, tau = {last.tau:g}, "
                + ("forward+backward" if first.backward else "forward")
            )
            # Gigabytes of results are slow to get from the system at first, and then are its own to use again.
            found, rate = contest(entries, against, backend, rounds=8 if last.T > 10000 else 4)
            rows += found if against else found[1:]
            rates.append(rate)
        for i, row in enumerate(rows):
            if row.T == 16384 and measurable():
                status.update("peak memory")
                rows[i] = replace(row, peak_memory=peak_memory(row, SLOTS, backend, torch.get_num_threads()))
    return {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "backend": backend,
        "sgemm_gflops": max(rates),
        "rows": [asdict(row) for row in rows],
        "import_seconds": import_seconds(),
    }


def contest(
    entries: list[Entry], against: bool, backend: str, seconds: float = 4.0, rounds: int = 4
) -> tuple[list[Row], float]:
    """Times entries in turns, each with softmax attention if `against`; and the matmul rate (GFLOP/s) on the way."""
    import torch

    from gsa.bench.timing import race

    a, b = torch.randn(2, SGEMM, SGEMM)

    def multiply() -> None:
        for _ in range(20):
            torch.mm(a, b)

    contenders: dict[str, Callable[[], object]] = {"sgemm": multiply}
    for i, entry in enumerate(entries):
        contenders[f"slots {i}"], softmax = slots_and_softmax(entry, backend)
        if against:
            contenders[f"softmax {i}"] = softmax
    best = race(contenders, seconds, rounds)
    rate = 20 * SGEMM_FLOPS / best["sgemm"]
    rows = []
    for i, entry in enumerate(entries):
        time, softmax_time = best[f"slots {i}"], best.get(f"softmax {i}")
        share = 768 * entry.heads * entry.width * entry.T / time / rate
        rows.append(
            Row(
                **asdict(entry),
                ms=1e3 * time,
                us_per_token=1e6 * time / entry.T,
                softmax_ms=None if softmax_time is None else 1e3 * softmax_time,
                speedup=None if softmax_time is None else softmax_time / time,
                relative=(time / entry.T) / (best["slots 0"] / entries[0].T) if i else None,
                sgemm_share=None if entry.backward else share,
            )
        )
    return rows, rate / 1e9


def slots_and_softmax(entry: Entry, backend: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """Gated slot attention, and softmax attention of the same width."""
    import torch

    from gsa.ops import gated_slot_attention

    q, k, v, g = slot_tensors(entry.T, entry.heads, entry.width, SLOTS, entry.tau)
    heads = entry.heads * entry.width // 64
    sq, sk, sv = (x.view(1, entry.T, heads, 64).transpose(1, 2).contiguous() for x in (q, k, v))
    slots = forward_or_both(
        lambda: gated_slot_attention(q, k, v, g, scale=1.0, backend=backend)[0], (q, k, v, g), entry.backward
    )
    attend = torch.nn.functional.scaled_dot_product_attention
    return slots, forward_or_both(lambda: attend(sq, sk, sv, is_causal=True), (sq, sk, sv), entry.backward)


def forward_or_both(forward: Callable[[], Tensor], inputs: Any, backward: bool) -> Callable[[], object]:
    """The function to time: forward without a graph, or forward and backward to all inputs."""
    import torch

    if not backward:

        def run() -> None:
            with torch.no_grad():
                forward()

        return run
    for x in inputs:
        x.requires_grad_()
    gradient: list[Tensor] = []

    def both() -> None:
        o = forward()
        if not gradient:
            gradient.append(torch.ones_like(o))
        torch.autograd.grad(o, inputs, gradient[0])

    return both


def peak_memory(entry: Entry, slots: int, backend: str, threads: int) -> float:
    """Peak bytes of a call, as a multiple of what cannot be avoided: inputs and output, and their gradients."""
    from gsa.bench.memory import measured_alone

    setting = {**asdict(entry), "slots": slots, "backend": backend, "threads": threads}
    found = measured_alone("gsa.bench.ops:memory_of_call", setting)
    return float(found["peak"] / found["tensors"])


def memory_of_call(setting: dict[str, Any]) -> dict[str, int]:
    """Peak bytes of one call, and bytes of its tensors. Runs in a process of its own."""
    import torch

    from gsa.bench.memory import forget_peak, peak, resident
    from gsa.ops import gated_slot_attention

    torch.set_num_threads(setting["threads"])

    def call(T: int) -> int:
        tensors = slot_tensors(T, setting["heads"], setting["width"], setting["slots"], tau=8.0)
        for x in tensors:
            x.requires_grad_(setting["backward"])
        o, _ = gated_slot_attention(*tensors, scale=1.0, backend=setting["backend"])
        size = sum(x.nbytes for x in (*tensors, o))
        if setting["backward"]:
            o.backward(torch.ones_like(o))
            size *= 2
        return size

    call(64)  # loads code and starts threads, which is not the call's memory
    before = resident()
    forget_peak()
    tensors = call(setting["T"])
    return {"peak": peak() - before, "tensors": tensors}


def import_seconds() -> float:
    """What `import gsa, gsa.ops` adds to `import torch`: the best of three fresh processes."""
    code = "import torch, time; t = time.perf_counter(); import gsa, gsa.ops; print(time.perf_counter() - t)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    return min(float(run.stdout) for run in runs)


def passes(row: dict[str, Any]) -> str:
    """What was timed, for a column."""
    return "fwd+bwd" if row["backward"] else "fwd"


def speed_table(report: dict[str, Any]) -> Table:
    """The comparisons as a table."""
    columns = [
        Column("heads", lambda row: f"{row['heads']}x{row['width']}", left=True),
        Column("T", "T"),
        Column("pass", passes, left=True),
        Column("tau", "tau", "{:g}"),
        Column("ms", "ms", "{:.1f}"),
        Column("us/token", "us_per_token", "{:.1f}"),
        Column("softmax", "softmax_ms", "{:.1f}"),
        Column("speed-up", "speedup", "{:.1f}x"),
        Column("relative", "relative", "{:.2f}x"),
        Column("sgemm", "sgemm_share", "{:.0%}"),
        Column("peak", "peak_memory", "{:.2f}x"),
    ]
    notes = [
        "softmax: ms of causal softmax attention, heads of 64, same width",
        "relative: time per token over that of T = 2048 and tau = 8",
        f"sgemm: share of the rate of a {SGEMM} x {SGEMM} matmul, {report['sgemm_gflops']:.0f} GFLOP/s",
        "peak: memory over inputs and output (and their gradients), in a process of its own",
        f"{report['threads']} threads, {report['cpu']}, torch {report['torch']}, engine {report['backend']}; "
        f"import gsa adds {report['import_seconds']:.2f} s to import torch",
    ]
    return Table(f"Gated slot attention, {SLOTS} slots, fp32, one sequence", columns, report["rows"], notes)
