"""Which sequences lie in a batch, told in any of the ways that trainers and collators use.

Shape letters: B rows, T time, N sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache

from gsa.errors import GSAError
from gsa.mixers.sequences import PackedRows, Padding, describe, padding_of
from gsa.models.hf.cache import GSACache


@dataclass(frozen=True)
class Past:
    """What came before the tokens of a call."""

    cached: bool
    """Whether the state of earlier tokens is, or will be, in a cache: then each row is one sequence."""
    seen: int | None
    """Tokens that led to the state, pads among them; None if that is not known."""
    begun: Tensor | None = None
    """Which rows had a token that is none of the pads [B]; None if that is not known, and all are taken to."""

    @classmethod
    def of(cls, cache: Cache | None, use_cache: bool | None, mask: Tensor | None, length: int) -> Past:
        """What a call of so many tokens, with an attention mask [B, T] or [B, earlier tokens + T], goes on from."""
        cached = cache is not None or bool(use_cache)
        if not isinstance(cache, GSACache) or cache.state is None:
            return cls(cached, 0 if cache is None or isinstance(cache, GSACache) else None)
        if cache.seen == 0:  # whoever made it from a state has not counted
            return cls(cached, None)
        whole = isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] == cache.seen + length
        return cls(cached, cache.seen, mask[:, : cache.seen].bool().any(1) if whole and mask is not None else None)


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
        self, batch: Tensor, mask: Tensor | None, past: Past
    ) -> tuple[Padding | PackedRows | None, Tensor | None]:
        """How a batch [B, T, ...] with a mask [B, T] is packed, if at all; if not, its borders, if there are any."""
        borders = self._borders()
        if borders is not None:
            if mask is not None and not torch.compiler.is_compiling() and bool(mask.all()):
                mask = None
            return padding_of(mask, batch, borders, "GSAModel"), borders
        padding = padding_of(mask, batch, None, "GSAModel")  # checks the mask
        mask = None if padding is None else padding.mask
        begins = self._begins(batch, mask, past)
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

    def _begins(self, batch: Tensor, mask: Tensor | None, past: Past) -> Tensor | None:
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
            # Compiled code cannot look. With a cache nothing may begin inside a row, and nothing can in one of a token.
            if T > 0 and not (torch.compiler.is_compiling() and (past.cached or T == 1)):
                restarts = _restarts(positions, real, past)
                parts += [restarts] if T > 1 else []
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


def _restarts(positions: Tensor, real: Tensor, past: Past) -> Tensor:
    """Where positions [B, T] start again at 0; raises where they do anything else than to go up by one.

    Pads have no place of their own, but may be counted: behind a pad, positions may also go up by as many as came.
    """
    B, T = positions.shape
    places = torch.arange(T, device=positions.device).expand(B, T)
    before = _before(real)
    step = positions - positions.gather(1, before.clamp(min=0))
    follows = (before >= 0) & ((step == 1) | (step == places - before))
    first = before < 0
    begins_well = (~first & (positions == 0)) | (first & _goes_on(positions, places, past))
    restarts = real & ~first & ~follows
    wrong = real & ~follows & ~begins_well
    if not torch.compiler.is_compiling() and bool(wrong.any()):
        row, place = wrong.nonzero()[0].tolist()
        raise GSAError(
            f"GSAModel: position_ids: token {place} of row {row} is at position {int(positions[row, place])}, expected "
            "0, where a sequence begins, or one more than before; this model cannot begin in the middle of a sequence "
            "(as context and sequence parallel training do) nor skip positions"
            + (f"; its cache has seen {past.seen} tokens" if past.seen else "")
        )
    return restarts


def _goes_on(positions: Tensor, places: Tensor, past: Past) -> Tensor:
    """Whether positions [B, T] may be those of the first tokens of rows, which may count the pads before them."""
    if past.seen is None:
        return torch.ones_like(positions, dtype=torch.bool)
    if past.seen == 0:
        return (positions == 0) | (positions == places)
    begun = torch.ones_like(positions[:, 0], dtype=torch.bool) if past.begun is None else past.begun
    counts = (positions > 0) | ~begun.to(positions.device)[:, None]
    return counts & (positions <= places + past.seen)
