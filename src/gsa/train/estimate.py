"""What a run will cost in memory and time, from one block of each kind, measured: the whole model is never built."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gsa.errors import GSAError
from gsa.memory import memory_of
from gsa.models.config import ModelConfig
from gsa.models.sizes import check_parts, parameter_count
from gsa.ops.native import library
from gsa.train.measure import Batch, Part, Seconds, measure_block, measure_ends, measure_update
from gsa.train.peak import flops_per_token, matmul_peak
from gsa.train.strategies import PRECISIONS, STRATEGIES

if TYPE_CHECKING:
    from rich.console import Console

HEAP_SHARE = 0.25
"""What malloc holds beyond what is in use, as a share of the activations: 15 to 30% in steps measured on CPUs."""


DISTURBED = 1.5
"""On a machine of its own, a step's slower runs take some percent longer than the best, not half as long again."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a run will take. Bytes are those of one process; tokens and FLOPs those of all."""

    parameters: int
    precision: str
    """Of the passes that were measured."""
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    """Two moments for every weight."""
    ema_bytes: int
    activation_bytes: int
    """What the pass forward keeps for the pass backward, copies of weights in half precision among it."""
    working_bytes: int
    """What one block or the head needs for a moment, sharded weights that are gathered, and on a CPU malloc's share."""
    total_bytes: int
    """The most that is held at once. Gradients come as activations go, so the larger counts, unless they stay (DDP,
    accumulation)."""
    available_bytes: int | None
    """Memory of the GPU, or of the machine shared by its processes; None where that is not known."""
    flops_per_step: float
    tokens_per_step: int
    steps: int
    tokens: int
    seconds_per_step: Seconds
    """Without communication between processes, evaluations and checkpoints."""
    seconds: Seconds
    measured_tokens: int
    """The fewest tokens on which a part was measured; time and memory of a micro-batch are scaled from there."""
    scaled: bool
    """Whether a micro-batch has more tokens than were measured."""

    @property
    def disturbed(self) -> bool:
        """Whether other processes seem to have slowed the measurement down."""
        return self.seconds.high > DISTURBED * self.seconds.low

    @property
    def fits(self) -> bool | None:
        """Whether the memory suffices; None where it is not known."""
        return None if self.available_bytes is None else self.total_bytes <= self.available_bytes


def estimate(
    config: ModelConfig,
    *,
    length: int,
    rows: int,
    accumulation: int,
    world_size: int,
    engine: str,
    precision: str,
    ema: bool,
    gradient_checkpointing: bool,
    steps: int,
    device: torch.device | str,
    zero_stage: int = 2,
    reset_at_documents: bool = True,
) -> Estimate:
    """What so many steps of training will take on devices like this one, measured in some seconds.

    A step is `accumulation` micro-batches of `rows` sequences of `length` tokens in each of `world_size` processes,
    with fp32 weights and AdamW. With engine fsdp a process holds only a part of weights, gradients and moments; with
    deepspeed, `zero_stage` says which of them are shared out. With `reset_at_documents`, rows lie end to end, as in
    training.
    """
    device = torch.device(device)
    counts = {"length": length, "rows": rows, "accumulation": accumulation, "world_size": world_size, "steps": steps}
    for name, count in counts.items():
        if count < 1:
            raise GSAError(f"estimate: {name} must be at least 1, got {count}")
    if engine not in STRATEGIES:
        raise GSAError(f"estimate: engine must be one of {', '.join(STRATEGIES)}, got {engine!r}")
    if precision not in PRECISIONS:
        raise GSAError(f"estimate: precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    if zero_stage not in (1, 2, 3):
        raise GSAError(f"estimate: zero_stage must be 1, 2 or 3, got {zero_stage}")
    parameters = parameter_count(config)
    check_parts(config, "estimate", device)
    if library.unavailable(device) is None:
        library.watch_crowd()
    dtype, layers = PRECISIONS[precision], Counter(config.layers)
    batch = Batch(rows, length, reset_at_documents, device, dtype, matmul_peak(device, dtype))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        kinds = {options: measure_block(config, options, batch, gradient_checkpointing) for options in layers}
        ends = measure_ends(config, batch)
        update = measure_update(parameters, max(kind.parameters for kind in kinds.values()), device, ema)
    blocks = [(kinds[options], count) for options, count in layers.items()]
    # By how many processes weights, gradients and the optimiser's moments are shared.
    stage = {"single": 0, "ddp": 0, "fsdp": 3, "deepspeed": zero_stage}[engine]
    weights, gradients, moments = (-(-4 * parameters // (world_size if stage >= least else 1)) for least in (3, 2, 1))
    activations = _activations(blocks, ends, 4 * batch.tokens * config.hidden_size if gradient_checkpointing else None)
    working = max(part.working_bytes for part in (*kinds.values(), ends))
    if stage == 3:  # one block at a time has all of its weights and gradients, and the ends have theirs throughout
        working += 8 * (max(kind.parameters for kind in kinds.values()) + ends.parameters)
    if device.type == "cpu":
        working += round(HEAP_SHARE * _activations(blocks, ends, None))
    # DDP's buckets hold gradients throughout, as does a second micro-batch.
    at_once = accumulation > 1 or engine == "ddp"
    moving = activations + gradients if at_once else max(activations, gradients)
    averages = weights if ema else 0
    micro_batch = sum((kind.seconds * count for kind, count in blocks), ends.seconds)
    seconds_per_step = micro_batch * accumulation + update * (1 / (world_size if stage else 1))
    tokens_per_step = batch.tokens * accumulation * world_size
    measured = min(part.measured_tokens for part in (*kinds.values(), ends))
    return Estimate(
        parameters=parameters,
        precision=precision,
        weight_bytes=weights,
        gradient_bytes=gradients,
        optimizer_bytes=2 * moments,
        ema_bytes=averages,
        activation_bytes=activations,
        working_bytes=working,
        total_bytes=weights + 2 * moments + averages + moving + working,
        available_bytes=available_bytes(device),
        flops_per_step=flops_per_token(config, length) * tokens_per_step,
        tokens_per_step=tokens_per_step,
        steps=steps,
        tokens=tokens_per_step * steps,
        seconds_per_step=seconds_per_step,
        seconds=seconds_per_step * steps,
        measured_tokens=measured,
        scaled=measured < batch.tokens,
    )


def _activations(blocks: list[tuple[Part, int]], ends: Part, checkpoint: int | None) -> int:
    """Bytes kept for the pass backward by so many blocks of each kind and the ends.

    With gradient checkpointing a block keeps only its input, of `checkpoint` bytes, except the one block that is being
    computed again. Copies of weights stay, since autocast holds them until the pass forward ends.
    """
    kept = ends.kept_bytes + ends.copied_bytes + sum(kind.copied_bytes * count for kind, count in blocks)
    if checkpoint is None:
        return kept + sum(kind.kept_bytes * count for kind, count in blocks)
    return kept + sum(checkpoint * count for _, count in blocks) + max(kind.kept_bytes for kind, _ in blocks)


def available_bytes(device: torch.device) -> int | None:
    """Memory of a GPU, or this process's part of the machine's, or of its container's; None where that is not known."""
    memory = memory_of(device)
    if memory is None or device.type != "cpu":
        return memory
    # set by torchrun, which starts so many processes on a machine
    return memory // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def show(estimate: Estimate, console: Console | None = None) -> None:
    """Prints an estimate as a table, with a warning if the memory does not suffice."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = console or Console()
    memory = f"{gigabytes(estimate.total_bytes)} of {gigabytes(estimate.available_bytes)} a process"
    parts = {
        "weights": estimate.weight_bytes,
        "gradients": estimate.gradient_bytes,
        "optimizer": estimate.optimizer_bytes,
        "average (EMA)": estimate.ema_bytes,
        "activations": estimate.activation_bytes,
        "working space": estimate.working_bytes,
    }
    table = Table(box=SIMPLE, show_header=False, pad_edge=False)
    table.add_row("parameters", f"{estimate.parameters:,}")
    table.add_row("precision", estimate.precision)
    table.add_row("memory", memory)
    for name, size in parts.items():
        if size:
            table.add_row(f"  {name}", gigabytes(size))
    table.add_row("tokens", f"{estimate.tokens:,}: {estimate.steps:,} steps of {estimate.tokens_per_step:,}")
    table.add_row("work", f"{estimate.flops_per_step:.2e} FLOPs a step")
    table.add_row(
        "time", f"{_between(estimate.seconds, duration)}: {_between(estimate.seconds_per_step, _digits)} s a step"
    )
    console.print(table)
    if estimate.disturbed:
        console.print(
            "Other processes seem to use this machine: the shorter time is what it takes alone.", highlight=False
        )
    if estimate.scaled:
        console.print(f"Measured on {estimate.measured_tokens:,} tokens and scaled.", highlight=False)
    if estimate.fits is False:
        console.print(
            f"Warning: this does not fit into {gigabytes(estimate.available_bytes)}. Smaller micro-batches, gradient "
            "checkpointing, bf16, or sharding over more processes need less.",
            style="bold yellow",
            highlight=False,
        )


def _between(range_: Seconds, told: Callable[[float], str]) -> str:
    """Both ends of a range in words, or one where they are the same words."""
    low, high = told(range_.low), told(range_.high)
    return low if low == high else f"{low} to {high}"


def _digits(number: float) -> str:
    return f"{number:.3g}"


def gigabytes(size: int | None) -> str:
    """A number of bytes in words."""
    if size is None:
        return "unknown"
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def duration(seconds: float) -> str:
    """A time in words, in its two largest units.

    >>> duration(59), duration(3725), duration(86400 * 12.5)
    ('59 s', '1 h 2 min', '12 d 12 h')
    """
    left = round(seconds)
    parts: list[str] = []
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, left = divmod(left, unit)
        if count or (parts and len(parts) < 2) or (unit == 1 and not parts):
            parts.append(f"{count} {name}")
    return " ".join(part for part in parts[:2] if not part.startswith("0 ") or len(parts) == 1)
