"""Which sequences lie in a batch, told in any of the ways that trainers and collators use.

Shape letters: B rows, T time, N sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gsa.errors import GSAError
from gsa.mixers.sequences import PackedRows, Padding, describe, padding_of


@dataclass(frozen=True)
class Packing:
    """What a call says of its sequences; several ways of saying it may come together."""

    cu_seqlens: Tensor | None = None
    """Borders [N+1], B is 1: our own way."""
    cu_seq_lens_q: Tensor | None = None
    cu_seq_lens_k: Tensor | None = None
    """The same by the names of flash attention; queries and keys have the same borders here."""
    seq_idx: Tensor | None = None
    """The number of each token's sequence [B, T]."""
    position_ids: Tensor | None = None
    """The place of each token in its sequence [B, T] or [1, T]: it restarts at 0 where a sequence begins."""

    def resolved(
        self, batch: Tensor, mask: Tensor | None, cached: bool
    ) -> tuple[Padding | PackedRows | None, Tensor | None]:
        """How a batch [B, T, ...] with a mask [B, T] is packed, if at all, and otherwise its borders, if there are any.

        With `cached`, the state of earlier tokens is, or will be, in a cache: then each row is one sequence.
        """
        borders = self._borders()
        if borders is not None:
            if mask is not None and not torch.compiler.is_compiling() and bool(mask.all()):
                mask = None
            return padding_of(mask, batch, borders, "GSAModel"), borders
        padding = padding_of(mask, batch, None, "GSAModel")  # checks the mask
        mask = None if padding is None else padding.mask
        begins = self._begins(batch, mask, cached)
        if begins is None:
            return padding, None
        return PackedRows(begins, mask), None

    def _borders(self) -> Tensor | None:
        """The borders that are given as such."""
        chosen, name = None, ""
        for other, borders in (
            ("cu_seqlens", self.cu_seqlens),
            ("cu_seq_lens_q", self.cu_seq_lens_q),
            ("cu_seq_lens_k", self.cu_seq_lens_k),
        ):
            if borders is None:
                continue
            if chosen is None:
                chosen, name = borders, other
            elif not (torch.compiler.is_compiling() or torch.equal(chosen.long(), borders.long())):
                raise GSAError(f"GSAModel: {name} and {other} differ; a sequence has one length here")
        return chosen

    def _begins(self, batch: Tensor, mask: Tensor | None, cached: bool) -> Tensor | None:
        """At which tokens sequences begin inside rows [B, T]; None if nowhere."""
        B, T = batch.shape[:2]
        real = torch.ones(B, T, dtype=torch.bool, device=batch.device) if mask is None else mask
        parts = []
        if self.seq_idx is not None:
            numbers = _rows("seq_idx", self.seq_idx, B, T, batch.device)
            before = _before(real)
            parts.append((before >= 0) & (numbers != numbers.gather(1, before.clamp(min=0))))
        if self.position_ids is not None:
            positions = _rows("position_ids", self.position_ids, B, T, batch.device)
            # One token a row: nothing begins inside it. Compiled code cannot look, and with a cache nothing may begin.
            if T > 1 and not (torch.compiler.is_compiling() and cached):
                parts.append(_restarts(positions, real, cached))
        if not parts:
            return None
        begins = torch.stack(parts).any(0) & real
        if torch.compiler.is_compiling():
            return begins
        return begins if bool(begins.any()) else None


def _rows(name: str, x: object, B: int, T: int, device: torch.device) -> Tensor:
    fits = isinstance(x, Tensor) and not x.is_floating_point() and tuple(x.shape) in ((B, T), (1, T))
    if not fits:
        raise GSAError(f"GSAModel: {name} must be whole numbers [B, T] = [{B}, {T}], got {describe(x)}")
    assert isinstance(x, Tensor)
    return x.to(device=device, dtype=torch.int64).expand(B, T)


def _before(real: Tensor) -> Tensor:
    """The place in its row of the last token, which is none of the pads, before each [B, T]; -1 if there is none."""
    places = torch.arange(real.shape[1], device=real.device).expand(real.shape)
    before = torch.where(real, places, -1).cummax(1).values
    return torch.nn.functional.pad(before, (1, 0), value=-1)[:, :-1]


def _restarts(positions: Tensor, real: Tensor, cached: bool) -> Tensor:
    """Where positions [B, T] start again at 0; raises where they do anything else than to go up by one.

    Pads have no place of their own, but may be counted: behind a pad, positions may also go up by as many as came.
    """
    B, T = positions.shape
    places = torch.arange(T, device=positions.device).expand(B, T)
    before = _before(real)
    step = positions - positions.gather(1, before.clamp(min=0))
    follows = (before >= 0) & ((step == 1) | (step == places - before))
    first = before < 0
    # A row may go on from a cache, or count the pads before its first token.
    begins_well = (positions == 0) | (first & (positions == places)) | (first & cached)
    restarts = real & ~first & ~follows
    wrong = real & ~follows & ~begins_well
    if not torch.compiler.is_compiling() and bool(wrong.any()):
        row, place = wrong.nonzero()[0].tolist()
        raise GSAError(
            f"GSAModel: position_ids: token {place} of row {row} is at position {int(positions[row, place])}, expected "
            "0, where a sequence begins, or one more than before; this model cannot begin in the middle of a sequence "
            "(as context and sequence parallel training do) nor skip positions"
        )
    return restarts
