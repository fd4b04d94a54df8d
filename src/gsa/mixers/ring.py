"""A window that moves along sequences: the last W tokens before a call, then those of the call.

Shape letters: B rows, T time, N sequences, W tokens of the window, X tokens that are picked from each sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from gsa.mixers.sequences import Sequences


class Ring:
    """Where the tokens of a call and the W before it lie. `past` [N, W, ...] ends with the newest; None is nothing."""

    def __init__(self, sequences: Sequences, window: int):
        self.sequences, self.window = sequences, window

    def joined(self, past: Tensor | None, new: Tensor) -> Tensor:
        """All that the tokens may see, as `window_attention` takes it: [B, W + T, ...], or packed [1, N W + T, ...].

        Without a past it is what is new.
        """
        if past is None:
            return new
        if not self.sequences.packed:
            return torch.cat([past.to(new.dtype), new], 1)
        ids, N = self._ids, self.sequences.count
        places = torch.arange(N * self.window, device=new.device).unflatten(0, (N, self.window))
        tokens = torch.arange(new.shape[1], device=new.device)
        source = torch.empty(N * self.window + new.shape[1], dtype=torch.int64, device=new.device)
        source[(places + self._starts[:, None]).flatten()] = places.flatten()
        source[tokens + (ids + 1) * self.window] = tokens + N * self.window
        return self._memory(past, new).index_select(0, source)[None]

    def leaving(self, past: Tensor | None, new: Tensor) -> Tensor:
        """The token [B, T, ...] that leaves the window when each comes: W places before it. 0 where there is none."""
        T, W = new.shape[1], self.window
        if past is not None and self.sequences.packed:
            offsets, N = self.sequences.offsets[0], self.sequences.count
            tokens = torch.arange(T, device=new.device)
            source = torch.where(offsets >= W, tokens + (N - 1) * W, self._ids * W + offsets)
            return self._memory(past, new).index_select(0, source)[None]
        moved = pad(new, (0, 0) * (new.dim() - 2) + (W, 0)) if past is None else torch.cat([past.to(new.dtype), new], 1)
        moved = moved[:, :T]
        if not self.sequences.packed:
            return moved
        own = (self.sequences.offsets >= W).reshape(1, T, *[1] * (new.dim() - 2))
        return torch.where(own, moved, 0)  # what was before it is another sequence's

    def last(self, past: Tensor | None, new: Tensor) -> Tensor:
        """The last W tokens of each sequence [N, W, ...], 0 where there was none: the past of the next call."""
        if past is not None and not self.sequences.packed:
            return torch.cat([past, new.to(past.dtype)], 1)[:, new.shape[1] :].clone()
        back = torch.arange(self.window, device=new.device) - self.window
        return self.picked(past, new, self.sequences.lengths()[:, None] + back)

    def picked(self, past: Tensor | None, new: Tensor, places: Tensor) -> Tensor:
        """Tokens [N, X, ...] at places [N, X] of their sequences, counted from the first of the call; 0 where there is
        none. Those of the past are negative."""
        N, W, lengths = self.sequences.count, self.window, self.sequences.lengths()[:, None]
        least = 0 if past is None else -W
        missing = (places < least) | (places >= lengths)
        memory = new.flatten(0, 1) if past is None else self._memory(past, new)
        if memory.shape[0] == 0:
            return new.new_zeros(*places.shape, *new.shape[2:])
        source = places + self._starts[:, None]
        if past is not None:
            rows = torch.arange(N, device=new.device)[:, None]
            source = torch.where(places < 0, places + (rows + 1) * W, source + N * W)
        found = memory.index_select(0, source.masked_fill(missing, 0).flatten()).unflatten(0, places.shape)
        return torch.where(missing.reshape(*places.shape, *[1] * (new.dim() - 2)), 0, found)

    def _memory(self, past: Tensor, new: Tensor) -> Tensor:
        """The pasts of all sequences, then all tokens [N W + B T, ...]."""
        return torch.cat([past.to(new.dtype).flatten(0, 1), new.flatten(0, 1)])

    @property
    def _ids(self) -> Tensor:
        assert self.sequences.ids is not None
        return self.sequences.ids

    @property
    def _starts(self) -> Tensor:
        """The first token of each sequence [N], among all."""
        lengths = self.sequences.lengths()
        return lengths.cumsum(0) - lengths
