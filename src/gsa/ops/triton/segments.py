"""Where sequences are cut: into segments, which are worked on in parallel, and those into chunks.

Shape letters: B batch, T time, N sequences.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gsa.ops.sequences import sequence_bounds


class Segments(NamedTuple):
    """The cut of one call, as the kernels read it."""

    table: Tensor
    """[segments, 4]: sequence, first token, token after the last, number of its first chunk. Tokens are counted through
    all rows of the batch. An empty sequence has one segment, too."""
    firsts: Tensor
    """[N + 1]: where the segments of each sequence begin."""
    chunks: Tensor
    """[chunks, 2]: first token, and how many tokens."""
    whole: bool
    """Every sequence is one segment."""


def counts(B: int, T: int, sequences: int | None, segment: int, chunk: int) -> tuple[int, int]:
    """The largest possible numbers of segments and chunks, from shapes alone; `sequences` if they are packed."""
    if sequences is None:
        return B * max(1, -(-T // segment)), B * -(-T // chunk)
    return T // segment + sequences, T // chunk + sequences


# Tables by tensor of bounds. Reading the bounds waits for the GPU, and every layer of a model passes the same tensor.
_packed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_lock = threading.Lock()  # backward passes run in threads of autograd


def segments(B: int, T: int, cu_seqlens: Tensor | None, device: torch.device, segment: int, chunk: int) -> Segments:
    """Segments of `segment` tokens, of B rows or of packed sequences; checks the values of cu_seqlens."""
    if device.type == "meta":
        N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        size, chunks = counts(B, T, None if cu_seqlens is None else N, segment, chunk)
        table, firsts, pieces = (
            torch.empty(shape, dtype=torch.int64, device=device) for shape in ((size, 4), (N + 1,), (chunks, 2))
        )
        return Segments(table, firsts, pieces, segment >= T)
    if cu_seqlens is None:
        return cut_rows(B, T, device, segment, chunk)
    if cu_seqlens.is_inference():  # it has no version counter, so a change in place would go unnoticed
        return cut_sequences(sequence_bounds(B, T, cu_seqlens), device, segment, chunk, segment >= T)
    key = (cu_seqlens._version, T, device, segment, chunk)
    with _lock:
        known = _packed.setdefault(cu_seqlens, {})
        if key not in known:
            if len(known) > 8:  # old versions of a tensor that was changed in place
                known.clear()
            known[key] = cut_sequences(sequence_bounds(B, T, cu_seqlens), device, segment, chunk, segment >= T)
        return known[key]


def cut_rows(B: int, T: int, device: torch.device, segment: int, chunk: int) -> Segments:
    """The segments of B rows, computed on the device: nothing is copied to it, so a CUDA graph can capture this."""
    per_row, chunks = max(1, -(-T // segment)), -(-T // chunk)
    row = torch.arange(B, device=device)[:, None]
    start = torch.arange(per_row, device=device)[None] * segment
    table = (row, row * T + start, row * T + (start + segment).clamp(max=T), row * chunks + start // chunk)
    first = torch.arange(chunks, device=device)[None] * chunk
    pieces = (row * T + first, (T - first).clamp(max=chunk))
    return Segments(
        torch.stack([x.expand(B, per_row) for x in table], -1).view(-1, 4),
        torch.arange(B + 1, device=device) * per_row,
        torch.stack([x.expand(B, chunks) for x in pieces], -1).view(-1, 2),
        segment >= T,
    )


def cut_sequences(
    bounds: list[tuple[int, int, int]], device: torch.device, segment: int, chunk: int, whole: bool
) -> Segments:
    """The segments of sequences (row, start, stop)."""
    table: list[tuple[int, int, int, int]] = []
    chunks: list[tuple[int, int]] = []
    firsts = [0]
    for n, (_, start, stop) in enumerate(bounds):
        for first in range(start, stop, segment) if stop > start else (start,):
            last = min(first + segment, stop)
            table.append((n, first, last, len(chunks)))
            chunks += [(t, min(chunk, last - t)) for t in range(first, last, chunk)]
        firsts.append(len(table))
    with torch.inference_mode(False):
        tensors = [torch.tensor(x, dtype=torch.int64, device=device) for x in (table, firsts, chunks)]
    return Segments(tensors[0].view(-1, 4), tensors[1], tensors[2].view(-1, 2), whole)
