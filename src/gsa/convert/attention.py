"""Softmax attention written out, for calibration and checks: all scores of a text at once.

Shape letters: T time, H key/value heads, HQ query heads, K width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gsa.mixers.attention import AttentionOptions
from gsa.mixers.rotary import rotate


class Scores:
    """Scores of queries [T, HQ, K] and keys [T, H, K], before rotary positions."""

    def __init__(self, options: AttentionOptions, q: Tensor, k: Tensor):
        self.options, self.q, self.k = options, q, k
        self.positions = torch.arange(len(q))

    def teacher(self) -> Tensor:
        """[HQ, T, T] of a layer of attention, -inf where a query does not look."""
        back = self.positions[:, None] - self.positions
        window = self.options.window
        seen = (back >= 0) if window is None else (back >= 0) & (back < window)
        return self._products(self.positions, len(self.k)).masked_fill(~seen, -torch.inf)

    def near(self, v: Tensor, window: int, sinks: int) -> tuple[Tensor, Tensor]:
        """What `hybrid` sees exactly, a window, and sinks at the distance they left it, of values v [T, H, K].

        Outputs [T, HQ, K] and the log-sum-exp of their scores [T, HQ].
        """
        back = self.positions[:, None] - self.positions
        inside = self._products(self.positions, len(self.k)).masked_fill((back < 0) | (back >= window), -torch.inf)
        kept = self._products(self.positions.clamp(max=window + sinks - 1), sinks)
        kept = kept.masked_fill(back[:, :sinks] < window, -torch.inf)
        scores = torch.cat([inside, kept], -1)
        return self.outputs(scores.softmax(-1), torch.cat([v, v[:sinks]])), scores.logsumexp(-1).T.contiguous()

    def outputs(self, p: Tensor, v: Tensor) -> Tensor:
        """[T, HQ, K] of weights [HQ, T, keys] and values [keys, H, K]."""
        return torch.einsum("hts,shk->thk", p, v.repeat_interleave(self.options.heads // self.options.kv_heads, 1))

    def _products(self, positions: Tensor, keys: int) -> Tensor:
        """[HQ, T, keys] of queries turned by these positions and the first keys turned by their own."""
        rope, groups = self.options.rope, self.options.heads // self.options.kv_heads
        q, k = self.q[None], self.k[None, :keys]
        if rope.theta:
            q, k = rotate(q, positions[None], rope), rotate(k, self.positions[None, :keys], rope)
        k = k[0].repeat_interleave(groups, 1)
        return torch.einsum("thk,shk->hts", q[0], k) * self.options.key_width**-0.5
