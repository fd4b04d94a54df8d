"""Where sequences lie in a batch: one to a row, or packed end to end. Padded rows are packed before they are mixed.

Shape letters: B rows, T time, N sequences (B, or the number of packed ones).
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor

from gsa.errors import GSAError


class Sequences:
    """Where each sequence begins and ends in tensors [B, T, ...]."""

    def __init__(
        self,
        batch: int,
        length: int,
        device: torch.device,
        cu_seqlens: Tensor | None = None,
        longest: int | None = None,
    ):
        self.batch, self.length, self.device, self.cu_seqlens = batch, length, device, cu_seqlens
        self.longest = length if longest is None else longest
        """No sequence has more tokens than these in this call: known without a look at cu_seqlens."""
        self.count = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        steps = torch.arange(length, device=device)
        # ids [T]: the number of each token's sequence, None if each row is one sequence.
        # offsets [1, T]: how many tokens of its sequence come before a token in this call.
        if cu_seqlens is None:
            self.ids, self.offsets = None, steps[None]
        else:
            borders = cu_seqlens.to(device=device, dtype=torch.int64)
            self.ids = torch.searchsorted(borders[1:], steps, right=True)
            self.ids = self.ids.clamp(max=max(self.count - 1, 0))
            self.offsets = (steps - borders[self.ids])[None]

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Sequences:
        """The same on another device, where a model is spread over several."""
        moved = copy(self)
        moved.offsets = self.offsets.to(device, non_blocking=non_blocking)
        moved.ids = None if self.ids is None else self.ids.to(device, non_blocking=non_blocking)
        moved.device = moved.offsets.device
        return moved

    def end_to_end(self) -> Sequences:
        """The same for rows that are laid end to end as [1, B T, ...]."""
        assert self.cu_seqlens is None
        borders = torch.arange(self.batch + 1, device=self.device) * self.length
        return Sequences(1, self.batch * self.length, self.device, borders, longest=self.length)

    @property
    def packed(self) -> bool:
        return self.cu_seqlens is not None

    def positions(self, start: Tensor | None) -> Tensor:
        """The place of every token in its sequence [B or 1, T], when `start` [N] tokens came before."""
        if start is None:
            return self.offsets
        if self.ids is None:
            return self.offsets + start[:, None]
        return self.offsets + start[self.ids][None]

    def lengths(self) -> Tensor:
        """Tokens of each sequence in this call [N]."""
        if self.cu_seqlens is None:
            return torch.full((self.batch,), self.length, device=self.device)
        return self.cu_seqlens.to(device=self.device, dtype=torch.int64).diff()


def sequences_of(x: Tensor, cu_seqlens: Tensor | None, operation: str) -> Sequences:
    """The sequences of x [B, T, ...], with the values of cu_seqlens checked."""
    sequence_count(x, cu_seqlens, operation)
    if cu_seqlens is not None and not torch.compiler.is_compiling():
        borders = cu_seqlens.tolist()
        if borders[0] != 0 or borders[-1] != x.shape[1] or sorted(borders) != borders:
            raise GSAError(f"{operation}: cu_seqlens must rise from 0 to {x.shape[1]} (T), got {_short(borders)}")
    return Sequences(x.shape[0], x.shape[1], x.device, cu_seqlens)


def sequence_count(x: Tensor, cu_seqlens: Tensor | None, operation: str) -> int:
    """How many sequences x [B, T, ...] holds; raises unless cu_seqlens has the right type and shape."""
    if cu_seqlens is None:
        return x.shape[0]
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or cu_seqlens.dtype not in _INTEGERS:
        raise GSAError(f"{operation}: cu_seqlens must be an int32 or int64 tensor [N+1], got {describe(cu_seqlens)}")
    if cu_seqlens.shape[0] < 2:
        raise GSAError(f"{operation}: cu_seqlens must hold N+1 entries of N >= 1 sequences, got {len(cu_seqlens)}")
    if x.shape[0] != 1:
        raise GSAError(f"{operation}: cu_seqlens packs sequences into a batch of 1, but there are {x.shape[0]} rows")
    return cu_seqlens.shape[0] - 1


class _Moved:
    """Rows [B, T] with a mask, seen as sequences end to end in which no pad comes between two tokens."""

    mask: Tensor
    order: Tensor
    """Where each of what `pack` returns lies in the rows, laid end to end [tokens]."""
    cu_seqlens: Tensor
    """Borders of the sequences there."""
    rows: int
    """Sequences whose states are kept."""
    extra: int
    """Further sequences, of pads."""

    def sequences(self) -> Sequences:
        """Where they lie in what `pack` returns."""
        return Sequences(1, self.order.shape[0], self.mask.device, self.cu_seqlens, longest=self.mask.shape[1])

    def pack(self, x: Tensor) -> Tensor:
        """x [B, T, ...] as [1, tokens, ...]."""
        return x.flatten(0, 1)[self.order][None]

    def unpack(self, x: Tensor, fill: float = 0) -> Tensor:
        """x [1, tokens, ...] as [B, T, ...], with `fill` at pads."""
        B, T = self.mask.shape
        flat = x.new_full((B * T, *x.shape[2:]), fill).index_copy(0, self.order, x[0])
        return torch.where(self.mask.reshape(B, T, *[1] * (x.dim() - 2)), flat.unflatten(0, (B, T)), fill)


class Padding(_Moved):
    """Rows of unequal length [B, T] with a mask, seen as packed sequences: a pad can then touch nothing.

    The tokens of row 0, then of row 1, ... follow each other as B sequences. Compiled code cannot know how many tokens
    are real, so there the pads stay, behind all else, as B more sequences that nobody reads.
    """

    def __init__(self, mask: Tensor):
        B, T = mask.shape
        self.mask, self.rows = mask, B
        self.order = _tokens_first(mask)
        ends = mask.sum(1).cumsum(0)
        if torch.compiler.is_compiling():
            pads = torch.arange(1, B + 1, device=mask.device) * T + ends[-1]
            ends = torch.cat([ends, pads.clamp(max=B * T)])
        self.cu_seqlens = torch.nn.functional.pad(ends, (1, 0))
        self.extra = self.cu_seqlens.shape[0] - 1 - B


class PackedRows(_Moved):
    """Rows [B, T] that hold several sequences each, seen as all of these end to end.

    `begins` [B, T] is true at tokens where a sequence begins, other than by being the first of its row. In compiled
    code pads stay, as with `Padding`; each is a sequence of its own.
    """

    def __init__(self, begins: Tensor, mask: Tensor | None):
        self.mask = torch.ones_like(begins) if mask is None else mask.to(device=begins.device, dtype=torch.bool)
        self.order = _tokens_first(self.mask)
        # The sum of the mask is 1 at the first token of a row, and else only at pads.
        begins = (begins | (self.mask.cumsum(1) == 1) | ~self.mask).flatten()[self.order]
        tokens = self.order.shape[0]
        places = torch.arange(tokens, device=begins.device)
        if torch.compiler.is_compiling():
            # How many begin is not known there. The other borders lie behind all tokens, around empty sequences.
            borders = torch.where(begins, places, tokens).sort().values
        else:
            borders = places[begins]
        self.cu_seqlens = torch.nn.functional.pad(borders, (0, 1), value=tokens)
        self.rows, self.extra = self.cu_seqlens.shape[0] - 1, 0


def _tokens_first(mask: Tensor) -> Tensor:
    """The places of tokens in rows [B, T] laid end to end; in compiled code those of pads follow."""
    order = torch.argsort((~mask.flatten()).to(torch.int8), stable=True)
    return order if torch.compiler.is_compiling() else order[: int(mask.sum())]


def padding_of(mask: Tensor | None, x: Tensor, cu_seqlens: Tensor | None, operation: str) -> Padding | None:
    """What `mask` [B, T] (1 or True for tokens, 0 or False for pads) says of x [B, T, ...]; None if no pad is there."""
    if mask is None:
        return None
    if cu_seqlens is not None:
        raise GSAError(f"{operation}: mask and cu_seqlens exclude each other; packed sequences have no pads")
    if not isinstance(mask, Tensor) or tuple(mask.shape) != tuple(x.shape[:2]):
        raise GSAError(f"{operation}: mask must be a tensor [B, T] = {list(x.shape[:2])}, got {describe(mask)}")
    if mask.dtype != torch.bool and not torch.compiler.is_compiling() and bool(((mask != 0) & (mask != 1)).any()):
        # e.g. what attention adds to its scores, where 0 stands for a token
        raise GSAError(f"{operation}: mask must hold 1 at tokens and 0 at pads, got {_short(mask.unique().tolist())}")
    mask = mask.to(device=x.device, dtype=torch.bool)
    if not torch.compiler.is_compiling() and bool(mask.all()):
        return None
    return Padding(mask)


_INTEGERS = (torch.int32, torch.int64)


def describe(x: object) -> str:
    """What somebody passed."""
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def _short(numbers: list[Any]) -> str:
    return str(numbers if len(numbers) <= 8 else [*numbers[:4], "...", *numbers[-3:]])
