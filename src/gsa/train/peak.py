"""Work and the rate at which it could be done: FLOPs of a model's training, and the matmul rate of a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gsa.errors import GSAError
from gsa.mixers.attention import Attention
from gsa.mixers.base import Mixer
from gsa.mixers.convolution import ShortConvolution
from gsa.mixers.heads import HeadMixer
from gsa.mixers.hybrid import Hybrid
from gsa.models.config import ModelConfig
from gsa.models.init import without_memory
from gsa.models.lm import LM

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (256, 512, 1024, 2048, 4096, 8192)
RUNS = 4  # of each size, at least
SIZE_SECONDS = 0.05  # for the runs of a size, at least: on a busy machine, some of many are undisturbed
SECONDS = 0.3  # in which the rate is measured, about
AGAIN_SECONDS = 60.0  # between two measurements in the midst of a run


def matmul_peak(device: torch.device | str, dtype: torch.dtype) -> float:
    """FLOP/s of a product of square matrices on a device, with the number of threads that torch has now.

    The matrices grow as long as a few runs of the next size fit into a third of a second; the best run counts.
    """
    device = torch.device(device)
    if dtype not in DTYPES:
        raise GSAError(f"matmul_peak: dtype must be float32, bfloat16 or float16, got {dtype}")
    random = torch.Generator(device).manual_seed(0)  # measuring must not change what a run draws
    begin, best = time.perf_counter(), 0.0
    for size in SIZES:
        a = torch.randn(size, size, device=device, generator=random).to(dtype)
        out = a @ a  # warms up, and is what the runs write to
        seconds, runs, end = float("inf"), 0, time.perf_counter() + SIZE_SECONDS
        while runs < RUNS or time.perf_counter() < end:
            runs += 1
            synchronise(device)
            before = time.perf_counter()
            torch.mm(a, a, out=out)
            synchronise(device)
            seconds = min(seconds, time.perf_counter() - before)
        best = max(best, 2 * size**3 / seconds)
        if time.perf_counter() - begin + (RUNS + 1) * 8 * seconds > SECONDS:
            break
    return best


def product_rate(tokens: int, width: int, features: int, dtype: torch.dtype) -> Callable[[], float]:
    """A measurement of the CPU's FLOP/s in the products of a linear map, forward and backward, at its best so far.

    x W^T of `tokens` rows with W [features, width], and of the backward pass dy W and dy^T x: what a training step's
    products are like, where square matrices are the best case.
    """
    random = torch.Generator().manual_seed(0)
    x, weight, dy = (
        torch.randn(shape, generator=random).to(dtype)
        for shape in ((tokens, width), (features, width), (tokens, features))
    )
    best = [float("inf")] * 3

    def measure() -> float:
        for i, (a, b) in enumerate(((x, weight.T), (dy, weight), (dy.T, x))):
            for _ in range(RUNS):
                before = time.perf_counter()
                a @ b
                best[i] = min(best[i], time.perf_counter() - before)
        return 6 * tokens * width * features / sum(best)

    return measure


class Peak:
    """The matmul rate that a run's speed is compared with, over all of its processes.

    What is measured is the least that the device can do: beside other processes a CPU seems slower than it is. So when
    training is faster than the rate, that is measured again, once in a while; and a share is never above 1.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, world_size: int):
        self.device, self.dtype, self.world_size = device, dtype, world_size
        self.rate = self._measured()
        self._again = time.monotonic()

    def _measured(self) -> float:
        return matmul_peak(self.device, self.dtype) * self.world_size

    def share(self, flops_per_second: float) -> float:
        """What part of the rate so many FLOP/s are."""
        # Other processes do not slow a GPU down, and it may have no memory left to measure in.
        if flops_per_second > self.rate and self.device.type == "cpu" and time.monotonic() >= self._again:
            self.rate = max(self.rate, self._measured())
            self._again = time.monotonic() + AGAIN_SECONDS
        self.rate = max(self.rate, flops_per_second)
        return flops_per_second / self.rate


def synchronise(device: torch.device) -> None:
    """Waits until a device has done what it was given; the CPU has always."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def flops_per_token(config: ModelConfig, length: int) -> float:
    """FLOPs of training per token, in sequences of `length` tokens: the pass forward, and twice that backward.

    A multiplication and an addition are two. Counted are, in the pass forward:

    - every weight of a linear map or a convolution, 2 each time it is used; the head too, tied or not;
    - attention: 4 x width of all query heads x tokens that a token sees on average, itself and its window respected;
    - recurrent mixers: 2 for each number of their state to write, and 2 for each to read, of which grouped query heads
      read the same ones. That is the recurrence; the chunkwise form that runs does more, which does not count;
    - hybrid: both, and its gates and slot queries, where a token sees sinks and slots.

    Not counted are the look-up of embeddings, norms, activations, gates and softmaxes, the loss and the optimiser, and
    what gradient checkpointing computes again.

    >>> config = ModelConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_slots=16, vocab_size=100)
    >>> weights = 4 * 64 * 64 + 64 * 2 * 16 + 3 * 64 * config.mlp_width + 64 * 100
    >>> flops_per_token(config, 2048) == 3 * (2 * weights + 4 * 2 * 16 * 64)
    True
    """
    if length < 1:
        raise GSAError(f"flops_per_token: length must be at least 1, got {length}")
    with without_memory():
        model = LM(config)
        blocks = sum(block_flops(block, length) for block in model.model.layers)
    return 3.0 * (blocks + 2 * model.lm_head.weight.numel())


def block_flops(block: nn.Module, length: int) -> float:
    """FLOPs per token of the pass forward of a part of a model, counted as in `flops_per_token`.

    It builds mixers on the default device: call it inside `without_memory`.
    """
    total = 0.0
    for module in block.modules():
        if isinstance(module, (nn.Linear, ShortConvolution)):
            total += 2 * module.weight.numel()
        if isinstance(module, Mixer):
            total += _memory_flops(module, length)
    return total


def _seen_on_average(length: int, most: int) -> float:
    """Tokens 1 to `most` see as many, those behind them `most`."""
    seen = min(length, most)
    return (seen * (seen + 1) / 2 + (length - seen) * seen) / length


def _slot_flops(mixer: Attention, length: int) -> float:
    """Of the slots of `hybrid`, which only tokens behind the window and the sinks write and read."""
    if not isinstance(mixer, Hybrid):
        return 0.0
    options = mixer.options
    weights = mixer.slot_router.weight.numel() + mixer.slot_query.numel()
    memory = options.key_width * options.num_slots * (options.kv_heads + options.heads)  # written once, read by queries
    late = max(length - options.window - options.num_sinks, 0) / length
    return late * (2 * weights + 4 * memory)


def _memory_flops(mixer: Mixer, length: int) -> float:
    """What a mixer does to its memory at a token, in the pass forward."""
    options: Any = mixer.options
    if isinstance(mixer, Attention):
        window = length if options.window is None else options.window
        context = _seen_on_average(length, window)
        if isinstance(mixer, Hybrid):
            # The first token that sees a sink is the one behind the window, and so on.
            beyond = max(length - window, 0)
            context += _seen_on_average(beyond, options.num_sinks) * beyond / length if beyond else 0.0
        return 4 * options.heads * options.key_width * context + _slot_flops(mixer, length)
    written = mixer.state_size
    assert written is not None
    if not isinstance(mixer, HeadMixer):
        return 4 * written
    # Every query head reads a whole memory: as large a state as if each had one of its own.
    read = type(mixer)(replace(options, num_key_value_heads=None)).state_size
    assert read is not None
    shared = 0
    if mixer.feature_map.layer is not None:  # used by every head of queries and keys, and counted once already
        uses = options.num_attention_heads + options.kv_heads
        shared = 2 * (uses - 1) * mixer.feature_map.layer.weight.numel()
    return 2 * written + 2 * read + shared
