"""Time and memory of single parts of a model, measured on a device and scaled to a micro-batch.

Shape letters: B rows, T time, D model width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from gsa.mixers.base import Options
from gsa.mixers.norm import RMSNorm
from gsa.mixers.sequences import Sequences
from gsa.mixers.shared import add_shared_parameters, shared_inputs
from gsa.models.backbone import Block
from gsa.models.config import ModelConfig
from gsa.models.init import initialise, without_memory
from gsa.models.loss import LOGITS_AT_ONCE, linear_cross_entropy
from gsa.train.peak import block_flops, synchronise

WORK_SECONDS = 0.4  # for one pass forward and backward at the matmul rate; a longer one is measured on fewer tokens
MIN_TOKENS = 32  # to measure on
ENOUGH_SECONDS = 2.0  # of repeated runs, after which no further one is made
RUNS = (4, 100)  # fewest and most of a measurement
Passes = Callable[[int, int], Tensor]
"""A loss of so many rows of so many tokens."""


@dataclass(frozen=True)
class Batch:
    """What a process computes at once, and how fast it could."""

    rows: int
    length: int
    packed: bool
    """Whether rows lie end to end, as they do where documents are kept apart."""
    device: torch.device
    dtype: torch.dtype
    peak: float
    """FLOP/s of a matmul."""

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    def cut(self, flops_per_token: float) -> tuple[int, int]:
        """Rows and length of a batch whose passes take a few seconds at most: fewer rows first, then shorter ones."""
        tokens = max(int(WORK_SECONDS * self.peak / flops_per_token), MIN_TOKENS)
        if tokens >= self.length:
            return min(self.rows, tokens // self.length), self.length
        return 1, tokens


@dataclass(frozen=True)
class Seconds:
    """A time as a range: on a machine that others use too, the same work does not always take as long."""

    low: float
    """Of the best run: what it takes when nothing else runs."""
    high: float
    """Of the slower half of all runs, on average."""

    def __mul__(self, factor: float) -> Seconds:
        return Seconds(self.low * factor, self.high * factor)

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.low + other.low, self.high + other.high)

    @classmethod
    def of(cls, runs: Sequence[float]) -> Seconds:
        """The range of some runs.

        >>> Seconds.of([3.0, 1.0, 2.0, 5.0])
        Seconds(low=1.0, high=4.0)
        """
        slower = sorted(runs)[len(runs) // 2 :]
        return cls(min(runs), sum(slower) / len(slower))


@dataclass(frozen=True)
class Part:
    """What was measured of a part of a model, scaled to a micro-batch."""

    parameters: int
    seconds: Seconds
    """Of the passes forward and backward."""
    copied_bytes: int
    """Kept for the pass backward whatever the number of tokens: weights in half precision."""
    kept_bytes: int
    """Kept for the pass backward, in proportion to the tokens."""
    working_bytes: int
    measured_tokens: int


def measure_block(config: ModelConfig, options: Options, batch: Batch, checkpointing: bool) -> Part:
    """Time and memory of one block."""
    with torch.device(batch.device):
        block = Block(config, options)
        block.apply(partial(initialise, deviation=config.initializer_range, layers=config.num_hidden_layers))
        # What the second of two such layers gets from the model: the first one of a model may get nothing.
        model, layers = nn.Module(), (options, options)
        add_shared_parameters(model, layers)
        with torch.no_grad():
            shared = shared_inputs(model, layers)[1]

    def passes(rows: int, length: int) -> Tensor:
        x = torch.randn(rows, length, config.hidden_size, device=batch.device, requires_grad=True)
        sequences = Sequences(rows, length, batch.device)
        if batch.packed:
            x = x.detach().view(1, rows * length, -1).requires_grad_()
            sequences = Sequences(1, rows * length, batch.device, torch.arange(rows + 1, device=batch.device) * length)
        return block(x, None, sequences, False, shared)[0].float().mean()

    with without_memory():
        shape = Block(config, options)
        work = partial(block_flops, shape)
        rows, length = batch.cut(3 * work(batch.length))
        share = rows * length * work(length) / (batch.tokens * work(batch.length))
    copied, per_token = _kept(block, passes, rows, length, batch)
    block.gradient_checkpointing = checkpointing
    seconds = _seconds(lambda: _run(block, passes, rows, length, batch), batch.device) * (1 / share)
    return Part(
        parameters=_size(block),
        seconds=seconds,
        copied_bytes=copied,
        kept_bytes=round(per_token * batch.tokens),
        working_bytes=round(per_token * batch.tokens),
        measured_tokens=rows * length,
    )


def measure_ends(config: ModelConfig, batch: Batch) -> Part:
    """Time and memory of what stands before and behind the blocks: embedding, last norm, head and loss."""
    with torch.device(batch.device):
        embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        head = (
            embeddings if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )
    module = nn.ModuleList([embeddings, norm, head])
    module.apply(partial(initialise, deviation=config.initializer_range, layers=config.num_hidden_layers))

    def passes(rows: int, length: int) -> Tensor:
        ids = torch.randint(config.vocab_size, (rows * length,), device=batch.device)
        return linear_cross_entropy(norm(embeddings(ids)), head.weight, ids)

    logits = min(LOGITS_AT_ONCE, batch.tokens * config.vocab_size)
    rows, length = batch.cut(6 * config.hidden_size * config.vocab_size)
    copied, per_token = _kept(module, passes, rows, length, batch)
    times = batch.tokens / (rows * length)
    seconds = _seconds(lambda: _run(module, passes, rows, length, batch), batch.device) * times
    return Part(
        parameters=_size(module),
        seconds=seconds,
        copied_bytes=copied,
        kept_bytes=round(per_token * batch.tokens),
        working_bytes=3 * 4 * logits + 4 * config.vocab_size * config.hidden_size,
        measured_tokens=rows * length,
    )


def measure_update(parameters: int, largest: int, device: torch.device, ema: bool) -> Seconds:
    """The time to clip, update and average so many parameters, measured on `largest` of them."""
    weight = nn.Parameter(torch.zeros(largest, device=device))
    weight.grad = torch.zeros_like(weight)
    average = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW([weight], lr=1e-4, fused=True)

    def update() -> None:
        nn.utils.clip_grad_norm_([weight], 1.0)
        optimizer.step()
        if ema:
            average.lerp_(weight.detach(), 0.001)

    return _seconds(update, device) * (parameters / largest)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _forward(passes: Passes, rows: int, length: int, batch: Batch) -> Tensor:
    with torch.autocast(batch.device.type, batch.dtype, enabled=batch.dtype != torch.float32):
        return passes(rows, length)


def _run(module: nn.Module, passes: Passes, rows: int, length: int, batch: Batch) -> None:
    module.zero_grad()
    _forward(passes, rows, length, batch).backward()


def _kept(module: nn.Module, passes: Passes, rows: int, length: int, batch: Batch) -> tuple[int, float]:
    """Bytes that a pass forward keeps for the pass backward besides parameters: once, and for every token."""
    sizes = {}
    for T in (-(-length // 4), -(-length // 2)):
        kept: dict[int, int] = {}

        def pack(x: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = _forward(passes, rows, T, batch)
        for parameter in module.parameters():
            kept.pop(parameter.untyped_storage().data_ptr(), None)
        del loss
        sizes[rows * T] = sum(kept.values())
    (few, small), (many, large) = sizes.items() if len(sizes) == 2 else ((0, 0), *sizes.items())
    once = max(round(small - (large - small) * few / (many - few)), 0)
    return once, (large - once) / many


def _seconds(run: Callable[[], object], device: torch.device) -> Seconds:
    """The range of several runs, after a first one that fetches memory and does not count."""
    run()
    times: list[float] = []
    while len(times) < RUNS[0] or (len(times) < RUNS[1] and sum(times) < ENOUGH_SECONDS):
        synchronise(device)
        before = time.perf_counter()
        run()
        synchronise(device)
        times.append(time.perf_counter() - before)
    return Seconds.of(times)
