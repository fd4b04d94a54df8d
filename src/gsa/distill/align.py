"""The first stage: every mixer learns its teacher's outputs from its teacher's inputs, all layers in one pass.

The teacher goes through a batch once, block by block. At each block the student's mixer sees what the teacher's sees,
and its error is taken back at once: no layer waits for another, and one layer's activations are in memory at a time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from gsa.data.batches import MicroBatch, Rows
from gsa.distill.likeliest import on_device
from gsa.errors import GSAError
from gsa.mixers.base import Mixer
from gsa.mixers.hybrid import Hybrid
from gsa.mixers.sequences import Sequences, sequences_of
from gsa.mixers.shared import shared_inputs
from gsa.models.lm import LM


class Align:
    """The squared error of a mixer's outputs, over their teacher's squares, a mean over layers."""

    def __init__(self, student: LM, teacher: LM, rows: Rows, *, windows: tuple[int, ...], seed: int):
        self.student, self.teacher, self.rows, self.windows, self.seed = student, teacher, rows, windows, seed
        mixers = [block.mixer for block in student.model.layers]
        if windows and not all(isinstance(mixer, Hybrid) for mixer in mixers):
            raise GSAError("distill: windows are for hybrids; this student has none")
        own = min((mixer.options.window for mixer in mixers if isinstance(mixer, Hybrid)), default=0)
        if windows and max(windows) > own:  # slots would learn less than they have to do
            raise GSAError(f"distill: windows: {max(windows)} is more than the student's own window, {own}")
        if any(x is not None for x in shared_inputs(student.model, [mixer.options for mixer in mixers])):
            raise GSAError("distill: layers of this student share parameters, so that none can learn alone")

    def backward(self, rows: list[int], step: int, weight: float) -> float:
        """Adds the gradient of `weight` times the error of rows; the error."""
        batch = on_device(self.rows.micro_batch(rows), self.teacher)
        with self._window(step):
            return self._backward(batch, weight)

    def _backward(self, batch: MicroBatch, weight: float) -> float:
        pairs = list(zip(self.teacher.model.layers, self.student.model.layers, strict=True))
        total = 0.0
        with torch.no_grad():
            x = self.teacher.model.embeddings(batch.ids)
        sequences = sequences_of(x, batch.cu_seqlens, "distill")
        for theirs, own in pairs:
            with torch.no_grad():
                seen = theirs.mixer_norm(x)
                y = _outputs(theirs.mixer, seen, sequences)
            error = _relative(_outputs(own.mixer, seen, sequences), y) / len(pairs)
            (error * weight).backward()
            total += float(error.detach())
            with torch.no_grad():
                x = x + y
                if theirs.mlp is not None:
                    x = x + theirs.mlp(theirs.mlp_norm(x))
        return total

    @contextmanager
    def _window(self, step: int) -> Iterator[None]:
        """Inside the context, a hybrid has the window of a step."""
        if not self.windows:
            yield
            return
        window = random.Random(f"{self.seed}/{step}").choice(self.windows)
        mixers = [block.mixer for block in self.student.model.layers]
        before = [mixer.options for mixer in mixers]
        try:
            for mixer, options in zip(mixers, before, strict=True):
                mixer.options = replace(options, window=window)
            yield
        finally:
            for mixer, options in zip(mixers, before, strict=True):
                mixer.options = options


def _outputs(mixer: Mixer, x: Tensor, sequences: Sequences) -> Tensor:
    return mixer(x, None, sequences=sequences, return_state=False)[0]


def _relative(found: Tensor, expected: Tensor) -> Tensor:
    expected = expected.float()
    return (found.float() - expected).square().sum() / expected.square().sum()
