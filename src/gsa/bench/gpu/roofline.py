"""From what kernels do to the time they take at least on a GPU: a model, and not a measurement.

A kernel takes as long as the slowest of its three needs: memory, matrix units, other arithmetic; kernels come one after
another. Exponentials, for which processors have few units, are not in it, nor is waiting of any kind, nor the launch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from gsa.bench.gpu.counting import Work
from gsa.ops.triton.launch import TARGETS


@dataclass(frozen=True)
class Machine:
    """The limits of a GPU, as they are stated for it, per second."""

    name: str
    target: str
    bandwidth: float
    """Bytes of its memory."""
    matrix: dict[str, float]
    """Flops of dense products, by operands (see Work.products)."""
    arithmetic: float
    """Flops of everything else, in fp32."""

    @property
    def processors(self) -> int:
        return TARGETS[self.target].processors


def _matrix(bf16: float, tf32: float, fp32: float) -> dict[str, float]:
    return {"bf16": bf16, "fp16": bf16, "tf32": tf32, "tf32x3": tf32 / 3, "ieee": fp32}


MACHINES = (
    # Taken to be the H100 (SXM), which it is but for fp64 and NVLink. No matrix unit of it takes fp32 as it is.
    Machine("H800", "sm_90", 3.35e12, _matrix(bf16=989.4e12, tf32=494.7e12, fp32=66.9e12), arithmetic=66.9e12),
    Machine("MI300X", "gfx942", 5.3e12, _matrix(bf16=1307.4e12, tf32=653.7e12, fp32=163.4e12), arithmetic=163.4e12),
)


@dataclass(frozen=True)
class Model:
    """What is expected of a list of kernels."""

    asked: int
    """Bytes that programs ask for."""
    once: int
    """Bytes if each kernel got every address from memory once."""
    matrix_flops: int
    seconds: float
    """At least, if caches hold what programs share."""
    seconds_uncached: float
    """At least, if everything that is asked for came from memory."""
    bandwidth_share: float
    """Of the memory, while these seconds last."""
    matrix_share: float
    """Of the matrix units' bf16 rate."""


def model(works: list[Work], machine: Machine) -> Model:
    """The expected time of kernels that run one after another, and what they make of the machine."""
    seconds = uncached = 0.0
    for work in works:
        memory = (work.read_once + work.written_once) / machine.bandwidth
        computing = _computing(work, machine)
        seconds += max(memory, computing)
        uncached += max((work.read + work.written) / machine.bandwidth, computing)
    asked = sum(work.read + work.written for work in works)
    once = sum(work.read_once + work.written_once for work in works)
    flops = sum(sum(work.products.values()) for work in works)
    return Model(
        asked,
        once,
        flops,
        seconds,
        uncached,
        once / seconds / machine.bandwidth,
        flops / seconds / machine.matrix["bf16"],
    )


def _computing(work: Work, machine: Machine) -> float:
    """Seconds of the slowest units; those of processors that have no program do nothing."""
    busy = min(1.0, work.programs / machine.processors) if work.programs else 1.0
    products = sum(flops / machine.matrix[kind] for kind, flops in work.products.items())
    return max(products, work.flops / machine.arithmetic) / busy


def extrapolated(counts: dict[tuple[int, int], list[Work]], segments: int, chunks: int, heads: int) -> list[Work]:
    """The work on sequences of so many segments with so many chunks each, from counts of a few.

    Everything that is counted grows by the same amount with every chunk, and with every segment. `counts` are of one
    sequence and one head, by (segments, chunks): (1, 1) and (1, 2) if there is one segment, else (2, 1), (3, 1) and
    (2, 2). `heads` are those of all sequences together.
    """
    if segments == 1:
        times = {(1, 1): 2.0 - chunks, (1, 2): chunks - 1.0}
    else:
        more = segments * (chunks - 1) / 2
        times = {(2, 1): 3 - segments - more, (3, 1): segments - 2.0, (2, 2): more}
    rows = zip(*(counts[at] for at in times), strict=True)
    return [_sum([heads * by for by in times.values()], row) for row in rows]


def _sum(times: list[float], works: tuple[Work, ...]) -> Work:
    total = Work(works[0].name)
    assert all(work.name == total.name for work in works), "a longer sequence has other kernels"
    for field in fields(Work):
        if field.type == "int":
            numbers = [getattr(work, field.name) for work in works]
            setattr(total, field.name, _whole(times, numbers))
    for kind in works[0].products:
        total.products[kind] = _whole(times, [work.products[kind] for work in works])
    return total


def _whole(times: list[float], numbers: list[int]) -> int:
    total = sum(by * number for by, number in zip(times, numbers, strict=True))
    assert total == int(total) >= 0, f"not a count: {total}"
    return int(total)
