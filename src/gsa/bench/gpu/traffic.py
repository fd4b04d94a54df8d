"""`gsa bench traffic`: bytes that the GPU kernels move, and what GPUs could make of them, without a GPU."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from gsa.bench.arguments import prepare
from gsa.errors import GSAError
from gsa.extras import installed, require
from gsa.table import show

if TYPE_CHECKING:
    from torch import Tensor

    from gsa.bench.gpu.counting import Counted, Saved
    from gsa.ops.calls import SlotCall
    from gsa.ops.triton.launch import Launch, Target

HEADS, WIDTH, SLOTS = 4, 512, 64  # of the paper's model with 1.3 billion parameters
SIZES = ((8, 2048), (4, 4096), (2, 8192), (1, 16384))  # sequences and their tokens


def traffic(json: bool = False, page: Path | None = None, markdown: bool = False) -> None:
    """Bytes that the GPU kernels move per token, beside flash-linear-attention's, and a model of the time they take.

    The kernels run in Triton's interpreter on short sequences, with their loads, stores and products counted; what is
    launched for the paper's sizes on an H800 and on an MI300X says how often each of them comes. A few minutes.

    Args:
        json: Print JSON instead of tables.
        page: A document; the tables between its markers are written anew.
        markdown: Print the tables as Markdown.
    """
    from gsa.bench.gpu.traffic_tables import tables, written_into

    prepare("bench", json=json, markdown=markdown)
    if page is not None and not page.is_file():
        raise GSAError(f"bench: there is no document {page}")
    if page is not None:
        written_into(page.read_text(), [])  # it has its markers: known before minutes have passed
    report = measure(progress=not json)
    if page is not None:
        page.write_text(written_into(page.read_text(), [table.markdown() for table in tables(report)]))
    show(report, tables(report), json=json, markdown=markdown)


def measure(progress: bool) -> dict[str, Any]:
    """All counts, and the model of each machine."""
    from rich.console import Console

    require("triton", "bench: counting")
    from gsa.bench.gpu.roofline import MACHINES
    from gsa.bench.memory import measured_alone

    contenders = ["ours", *(["fla"] if installed("fla") else [])]
    jobs = [{"who": who, "target": machine.target} for machine in MACHINES for who in contenders]
    with (
        Console(stderr=True, quiet=not progress).status("counting"),
        patch.dict(os.environ, TRITON_INTERPRET="1"),
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        found = list(pool.map(lambda job: measured_alone("gsa.bench.gpu.traffic:count", job), jobs))
    return report_of({(job["who"], job["target"]): counts for job, counts in zip(jobs, found, strict=True)})


def report_of(counted: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    """The report, from what `count` found by contender and target."""
    from gsa.bench.gpu.counting import Work
    from gsa.bench.gpu.roofline import MACHINES, model

    machines: dict[str, Any] = {}
    for machine in MACHINES:
        sizes: dict[str, Any] = {}
        for who, target in counted:
            for size, row in counted[who, target].items() if target == machine.target else ():
                works = {name: [Work(**work) for work in row[name]] for name in ("forward", "backward")}
                parts = {"forward": works["forward"], "both": [*works["forward"], *works["backward"]]}
                models = {name: asdict(model(part, machine)) for name, part in parts.items()}
                sizes.setdefault(size, {})[who] = {**row, "model": models}
        if sizes:
            machines[machine.name] = {**asdict(machine), "processors": machine.processors, "sizes": sizes}
    return {"heads": HEADS, "width": WIDTH, "slots": SLOTS, "machines": machines}


def count(setting: dict[str, Any]) -> dict[str, Any]:
    """What one contender does on a target at every size. Runs in a process of its own, in Triton's interpreter."""
    from gsa.bench.gpu.counting import Saved
    from gsa.bench.gpu.fla_traffic import CHUNK, count_fla
    from gsa.ops.triton.launch import TARGETS

    target = TARGETS[setting["target"]]
    sizes = [tuple(size) for size in setting.get("sizes", SIZES)]
    if setting["who"] == "ours":
        return {size_name(B, T): asdict(count_ours(target, B, T)) for B, T in sizes}
    counts = {(1, chunks): count_fla(target, chunks, WIDTH, SLOTS) for chunks in (1, 2)}
    found = {}
    for B, T in sizes:
        saved = counts[1, 1].saved
        scaled = Saved(*(B * HEADS * T // CHUNK * size for size in (saved.inputs, saved.extra)))
        found[size_name(B, T)] = asdict(_extrapolated(counts, 1, T // CHUNK, B, scaled))
    return found


def size_name(B: int, T: int) -> str:
    return f"{B} x {T}"


def _extrapolated(counts: dict[tuple[int, int], Counted], segments: int, chunks: int, B: int, saved: Saved) -> Counted:
    """What all heads of B sequences do."""
    from gsa.bench.gpu.counting import Counted
    from gsa.bench.gpu.roofline import extrapolated

    forward = extrapolated({at: c.forward for at, c in counts.items()}, segments, chunks, B * HEADS)
    backward = extrapolated({at: c.backward for at, c in counts.items()}, segments, chunks, B * HEADS)
    return Counted(forward, backward, saved)


def count_ours(target: Target, B: int, T: int) -> Counted:
    """Forward, backward and what is saved between them, of B sequences of T tokens."""
    import torch

    from gsa.ops.triton import plan

    segment = plan.segment_length(target, B * T, HEADS, WIDTH)
    segments, chunks = -(-T // segment), min(segment, T) // plan.settings(target, torch.bfloat16).chunk
    needed = ((1, 1), (1, 2)) if segments == 1 else ((2, 1), (3, 1), (2, 2))
    launched, saved = _launched(target, B, T)
    found = _extrapolated({at: _counted(target, *at) for at in needed}, segments, chunks, B, saved)
    expected = [(work.name, work.programs) for work in (*found.forward, *found.backward) if work.programs]
    assert expected == [(x.kernel.__name__, x.programs) for x in launched], "the launch table says otherwise"
    return found


def _tensors(B: int, T: int) -> tuple[Tensor, ...]:
    """q, k, v, g of full size, without memory."""
    import torch

    def empty(width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(B, T, HEADS, width, dtype=dtype, device="meta")

    return *(empty(WIDTH, torch.bfloat16) for _ in range(3)), empty(SLOTS, torch.float32)


_counts_so_far: dict[tuple[Target, int, int], Counted] = {}


def _counted(target: Target, segments: int, chunks: int) -> Counted:
    """One head of one sequence of so many segments with so many chunks each, tiled as on the target."""
    import torch

    from gsa.bench.gpu.counting import Counted, Saved, counting, slot_inputs
    from gsa.ops.triton import plan
    from gsa.ops.triton.launch import pretending

    key = (target, segments, chunks)
    if key not in _counts_so_far:
        segment = chunks * plan.settings(target, torch.bfloat16).chunk
        inputs = slot_inputs(segments * segment, WIDTH, SLOTS, gate_dtype=torch.float32)
        do = torch.randn_like(inputs[2])
        with counting() as works, pretending(target), patch.object(plan, "segment_length", return_value=segment):
            left = _forward(inputs)
            forward = len(works)
            _backward(inputs, do, left)
        _counts_so_far[key] = Counted(works[:forward], works[forward:], Saved())
    return _counts_so_far[key]


def _launched(target: Target, B: int, T: int) -> tuple[list[Launch], Saved]:
    """What is launched at full size, and saved between forward and backward."""
    import torch

    from gsa.bench.gpu.counting import saved_for_backward
    from gsa.ops.triton.engine import gated_slot_attention
    from gsa.ops.triton.launch import pretending, recording

    inputs = _tensors(B, T)
    with recording(target) as launched:
        _backward(inputs, torch.empty_like(inputs[2]), _forward(inputs))
    for x in inputs:
        x.requires_grad_()
    with pretending(target), saved_for_backward(inputs) as saved:
        gated_slot_attention(_call(inputs))
    return launched, saved


def _call(inputs: tuple[Tensor, ...]) -> SlotCall:
    from gsa.ops.calls import SlotCall

    q, k, v, g = inputs
    return SlotCall(q, k, v, g, None, None, None, None, 1.0, "softmax", "marks", False)


def _forward(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What forward leaves for backward."""
    from gsa.ops.triton.slot_attention import forward

    return forward(_call(inputs))[1]


def _backward(inputs: tuple[Tensor, ...], do: Tensor, left: tuple[Tensor, ...]) -> None:
    from gsa.ops.triton.slot_attention import backward

    backward(_call(inputs), left, (do, None, None))
