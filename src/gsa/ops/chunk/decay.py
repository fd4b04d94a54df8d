"""What a forget gate does inside a chunk, exact for every gate.

With log gates g_t, token j reaches token i >= j with the weight w_ij = exp(g_{j+1} + ... + g_i), one per feature. Three
operations use it, and they are each other's derivatives:

    scores(x, y)_ij = sum_f x_i w_ij y_j
    mix(A, y)_i = sum_{j<=i} A_ij w_ij y_j
    mix_back(A, x)_j = sum_{i>=j} A_ij w_ij x_i

Two forms. While the decay of a chunk stays within what the dtype can hold, w_ij splits into up_i * down_j, anchored
half way, and everything is plain matmuls of x * up and y * down. A chunk with stronger decay takes the halving form:
between the two halves of a block, w_ij splits at the middle into two factors that are at most one, and the halves are
halved in turn. Those factors are exponentials of sums of g, never of differences: they hold for g = -inf and lose
nothing to cancellation.

Shape letters: n chunks (of all lanes and heads), R queries per key/value head, C tokens in a chunk, F features; b is
the size of a half block, m the number of chunks in the halving form.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property

import torch
from torch import Tensor

from gsa.ops.chunk.scratch import Scratch

# Nats of decay per token, on average over a chunk, up to which the split is taken. For fp32 that is 64 nats over 64
# tokens, of which each factor spans half: e^32 leaves room for results of 1e22. In a shorter chunk the same rate is the
# limit, not the same sum: the gradient of a gate is a difference there, of terms e^-g times larger than itself.
SPLIT_LIMIT = {torch.float32: 1.0, torch.float64: 8.0}


class Decay:
    """The decay of one gate over chunks of C tokens; g [n, C, F], where F = 1 is one gate for the whole head.

    `held` counts the tokens of each chunk that are not padding: [n, 1, 1], or C if all are full.
    """

    def __init__(self, name: str, g: Tensor, held: Tensor | int, scratch: Scratch):
        self.g = g
        cumulative = torch.cumsum(g, 1, out=scratch(f"{name} up", *g.shape))
        log_half = cumulative[:, -1:] / 2
        fits = log_half >= held * (-SPLIT_LIMIT[g.dtype] / 2)
        self.half = log_half.exp()
        """exp(half the chunk's decay) [n, 1, F]: from before the chunk to the anchor, and from there to its end."""
        self.up = cumulative.sub_(log_half).exp_()
        """From the anchor to token i [n, C, F]."""
        self.down = torch.reciprocal(self.up, out=scratch(f"{name} down", *g.shape))
        """From token j to the anchor [n, C, F]."""
        self.strong: Tensor | None = None
        """The chunks that need the halving form, if any; their up and down mean nothing."""
        if not bool(fits.all()):
            self.strong = (~fits).flatten(1).any(1).nonzero().squeeze(1)
            self.halves = Halves(g[self.strong])

    @cached_property
    def total(self) -> Tensor:
        """Over the whole chunk [n, F]."""
        return self.half.square().squeeze(1)


class Side(ABC):
    """One side of a product inside a chunk: a tensor with its decay, seen from the chunk's anchor and its border."""

    def __init__(self, name: str, raw: Tensor, decay: Decay | None, scratch: Scratch):
        self.name, self.raw, self.decay, self.scratch = name, raw, decay, scratch

    @abstractmethod
    def _weight(self, decay: Decay) -> Tensor:
        """The decay between token and anchor [n, C, F]."""

    @abstractmethod
    def _exact(self, halves: Halves) -> Tensor:
        """The decay between token and border, for strong chunks [m, C, F]."""

    @cached_property
    def inside(self) -> Tensor:
        """Weighted to the anchor of the chunk (not for strong chunks)."""
        if self.decay is None:
            return self.raw
        return over_queries(self.raw, self._weight(self.decay), self.scratch(f"{self.name} inside", *self.raw.shape))

    @cached_property
    def border(self) -> Tensor:
        """Weighted to the border of the chunk."""
        if self.decay is None:
            return self.raw
        border = torch.mul(self.inside, self.decay.half, out=self.scratch(f"{self.name} border", *self.raw.shape))
        strong = self.decay.strong
        if strong is not None:
            border[strong] = over_queries(self.raw[strong], self._exact(self.decay.halves))
        return border


class Early(Side):
    """Keys or values [n, C, F], written first and decaying towards the reader; their border is the end of the chunk."""

    def _weight(self, decay: Decay) -> Tensor:
        return decay.down

    def _exact(self, halves: Halves) -> Tensor:
        return halves.suffix


class Late(Side):
    """Queries or output gradients [n, R*C, F], which read what has decayed; their border is the start of the chunk."""

    def _weight(self, decay: Decay) -> Tensor:
        return decay.up

    def _exact(self, halves: Halves) -> Tensor:
        return halves.prefix


class Halves:
    """The halving form for chunks [m, C, F]: w_ij factored at the middle of the block where i and j part."""

    def __init__(self, g: Tensor):
        self.C = g.shape[1]
        self.levels: list[Tensor] = []
        """Per half size b = 1, 2, 4...: [m, C/2b, 2, b, F]; [:, :, 0] from j to the middle, [:, :, 1] from it to i."""
        prefix, suffix = g, torch.zeros_like(g)  # log decay inside blocks of one token: up to i, and after j
        b = 1
        while b < self.C:
            before, after = prefix.unflatten(1, (-1, 2, b)), suffix.unflatten(1, (-1, 2, b))
            self.levels.append(torch.stack((after[:, :, 0], before[:, :, 1]), 2).exp_())
            whole = before[:, :, :, -1:]  # of each half
            prefix = torch.stack((before[:, :, 0], whole[:, :, 0] + before[:, :, 1]), 2).flatten(1, 3)
            suffix = torch.stack((after[:, :, 0] + whole[:, :, 1], after[:, :, 1]), 2).flatten(1, 3)
            b *= 2
        self.prefix, self.suffix = prefix.exp_(), suffix.exp_()

    def scores(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.unflatten(1, (-1, self.C))
        m, R, C, _ = x.shape
        A = x.new_zeros(m, R, C, C)
        A.diagonal(dim1=2, dim2=3).copy_((x * y[:, None]).sum(3))
        for w in self.levels:
            late, early = _late(x, w), _early(y, w)
            _blocks(A, w).copy_(torch.bmm(late, early.mT).view(m, -1, R, w.shape[3], w.shape[3]))
        return A.flatten(1, 2)

    def mix(self, A: Tensor, y: Tensor) -> Tensor:
        A = A.unflatten(1, (-1, self.C))
        out = A.diagonal(dim1=2, dim2=3)[..., None] * y[:, None]
        for w in self.levels:
            _add_late(out, torch.bmm(_rows(_blocks(A, w)), _early(y, w)), w)
        return out.flatten(1, 2)

    def mix_back(self, A: Tensor, x: Tensor) -> Tensor:
        A, x = A.unflatten(1, (-1, self.C)), x.unflatten(1, (-1, self.C))
        out = (A.diagonal(dim1=2, dim2=3)[..., None] * x).sum(1)
        for w in self.levels:
            _add_early(out, torch.bmm(_rows(_blocks(A, w)).mT, _late(x, w)), w)
        return out

    def reach(self, A: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Gradient of sum_ij A_ij x_i w_ij y_j for g [m, C, F]: at t, the pairs with j < t <= i."""
        A, x = A.unflatten(1, (-1, self.C)), x.unflatten(1, (-1, self.C))
        m, C, F = y.shape
        dg = y.new_zeros(m, C, self.prefix.shape[2])
        for w in self.levels:
            blocks, late, early = _rows(_blocks(A, w)), _late(x, w), _early(y, w)
            halves = dg.view(m, *w.shape[1:])
            arriving = (late * torch.bmm(blocks, early)).view(m, w.shape[1], -1, w.shape[3], F).sum(2)
            halves[:, :, 1] += reverse_cumsum(to_width(arriving, w.shape[4]), 2)
            leaving = (early * torch.bmm(blocks.mT, late)).view(m, w.shape[1], w.shape[3], F)
            halves[:, :, 0, 1:] += to_width(leaving, w.shape[4]).cumsum(2)[:, :, :-1]
        return dg


def _blocks(A: Tensor, w: Tensor) -> Tensor:
    """View of A [m, R, C, C] on the pairs that part at this level: [m, C/2b, R, b, b]."""
    m, R = A.shape[:2]
    nb, b = w.shape[1], w.shape[3]
    return A.view(m, R, nb, 2, b, nb, 2, b)[:, :, :, 1, :, :, 0].diagonal(dim1=2, dim2=4).permute(0, 4, 1, 2, 3)


def _rows(blocks: Tensor) -> Tensor:
    return blocks.flatten(2, 3).flatten(0, 1)  # [m * C/2b, R * b, b]


def _late(x: Tensor, w: Tensor) -> Tensor:
    """x [m, R, C, F] of the second halves, weighted from the middle: [m * C/2b, R * b, F]."""
    halves = x.unflatten(2, (w.shape[1], 2, w.shape[3]))[:, :, :, 1].transpose(1, 2)
    return (halves * w[:, :, None, 1]).flatten(2, 3).flatten(0, 1)


def _early(y: Tensor, w: Tensor) -> Tensor:
    """y [m, C, F] of the first halves, weighted to the middle: [m * C/2b, b, F]."""
    return (y.unflatten(1, (w.shape[1], 2, w.shape[3]))[:, :, 0] * w[:, :, 0]).flatten(0, 1)


def _add_late(out: Tensor, part: Tensor, w: Tensor) -> None:
    """Adds part [m * C/2b, R * b, F], weighted from the middle, to the second halves of out [m, R, C, F]."""
    m, R, _, F = out.shape
    nb, b = w.shape[1], w.shape[3]
    out.view(m, R, nb, 2, b, F)[:, :, :, 1] += (part.view(m, nb, R, b, F) * w[:, :, None, 1]).transpose(1, 2)


def _add_early(out: Tensor, part: Tensor, w: Tensor) -> None:
    """Adds part [m * C/2b, b, F], weighted to the middle, to the first halves of out [m, C, F]."""
    m, _, F = out.shape
    nb, b = w.shape[1], w.shape[3]
    out.view(m, nb, 2, b, F)[:, :, 0] += part.view(m, nb, b, F) * w[:, :, 0]


class GateGradient:
    """The gradient of one gate, gathered from the passes that used it.

    A gate g_t touches what was written at j < t, or before the chunk, and is read at i >= t, or after it. With the
    pairs summed over j as reads_i and over i as writes_j, its gradient is the sum of reads - writes from t on, plus
    what the chunk leaves behind for later reads. Strong gates cut off most pairs, and the rest would drown in the
    rounding of such a difference; there, the pairs that g_t touches are summed by themselves.
    """

    def __init__(self, decay: Decay):
        self.decay = decay
        self.balance = torch.zeros_like(decay.g)
        """reads - writes [n, C, F]; in strong chunks only reads of what came from before."""
        self.left = torch.zeros_like(decay.half)
        """Left behind for later reads [n, 1, F]; in strong chunks only what was there before."""
        if decay.strong is not None:
            self.strong = torch.zeros_like(decay.halves.prefix)
            """The rest, for strong chunks [m, C, F]."""

    def add(self, reads: Tensor, writes: Tensor, crossing: Tensor, left: Tensor) -> None:
        """Pairs by reader [n, R*C, F] and by writer [n, C, F]; those that cross the chunk from side to side [n, 1, F],
        and those written in it and read after it [n, 1, F]. Of strong chunks, none with both ends inside."""
        reads, writes = self._narrow(reads), self._narrow(writes)
        strong = self.decay.strong
        if strong is not None:
            self.strong[:, 1:] += writes[strong].cumsum(1)[:, :-1]
            writes[strong] = 0
            left[strong] = 0
        self.balance += reads
        self.balance -= writes
        self.left += to_width(crossing + left, self.left.shape[2])

    def add_strong(self, A: Tensor, x: Tensor, y: Tensor) -> None:
        """The pairs A_ij x_i w_ij y_j with both ends inside a strong chunk."""
        self.strong += self.decay.halves.reach(A, x, y)

    def _narrow(self, x: Tensor) -> Tensor:
        """x [n, R*C, F] summed over queries, and over features if the gate has only one."""
        C = self.balance.shape[1]
        return to_width(x if x.shape[1] == C else x.unflatten(1, (-1, C)).sum(1), self.balance.shape[2])

    def result(self) -> Tensor:
        """dg [n, C, F]."""
        dg = reverse_cumsum(self.balance, 1).add_(self.left)
        if self.decay.strong is not None:
            dg[self.decay.strong] += self.strong
        return dg


def over_queries(x: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
    """x [n, R*C, F] times w [n, C, F], the same for the R queries of a head."""
    out = torch.empty_like(x) if out is None else out
    if x.shape[1] == w.shape[1]:
        return torch.mul(x, w, out=out)
    torch.mul(x.unflatten(1, (-1, w.shape[1])), w[:, None], out=out.unflatten(1, (-1, w.shape[1])))
    return out


def causal_(A: Tensor) -> Tensor:
    """A [n, R*C, C] with everything after the token itself set to zero, in place."""
    (A if A.shape[1] == A.shape[2] else A.unflatten(1, (-1, A.shape[2]))).tril_()
    return A


def to_width(x: Tensor, width: int) -> Tensor:
    """x [..., F] as it is, or summed over F for a gate of width one."""
    return x if x.shape[-1] == width else x.sum(-1, keepdim=True)


def reverse_cumsum(x: Tensor, dim: int) -> Tensor:
    return x.flip(dim).cumsum(dim).flip(dim)
