"""Attention in a sliding window in torch, on any device: blocks of queries against the blocks of keys they can see.

Every sequence is cut into blocks of C tokens. Queries of a block see keys of their own block and of the m before it, so
time and memory are linear in the length. Keys before the first query lie at the end of m blocks of their own. Blocks of
all sequences are worked on side by side, some at a time; the backward pass computes the scores again.

Shape letters: C tokens of a block, G blocks, L keys of m + 1 blocks, H key/value heads, R queries per key/value head,
K, V widths of a head, S sinks, N sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gsa.ops.calls import Gradients, Shape, Tensors, WindowCall, sums_dtype
from gsa.ops.gates import refuse_positions
from gsa.ops.sequences import sequence_bounds

# Tokens in a block: enough for large products, few enough that little is computed beyond the window.
LEAST_BLOCK, LARGEST_BLOCK = 32, 256
# Scores that are held at a time.
SCORES = 1 << 22


def saved_shapes(call: WindowCall) -> tuple[Shape, ...]:
    """Of the log-sum-exps, from which backward computes the weights."""
    return ((0,) if call.save == "nothing" else tuple(call.q.shape[:3]),)


@dataclass
class _Plan:
    """Where the tokens of all blocks lie, in tensors whose rows lie end to end."""

    queries: Tensor
    """Places of queries [G, C]; what is filled up repeats the last query of its sequence."""
    filled: Tensor
    """Which of them are filled up [G, C]."""
    keys: Tensor
    """Places of the keys of m + 1 blocks [G, L]; where a sequence has none, another of its own."""
    outside: Tensor
    """Where it has none [G, L]."""
    first: Tensor
    """The first of the keys that may be seen [G]."""
    position: Tensor
    """The place of a block's first query in its whole sequence [G]."""
    sequence: Tensor
    """The sequence of each block [G]."""
    band: Tensor
    """Which keys a query does not see by their distance [C, L]."""

    def parts(self, scores: int) -> Iterator[_Plan]:
        """Some blocks at a time, when a block has so many scores."""
        count = max(SCORES // max(scores, 1), 1)
        for begin in range(0, self.queries.shape[0], count):
            some = slice(begin, begin + count)
            yield _Plan(
                self.queries[some],
                self.filled[some],
                self.keys[some],
                self.outside[some],
                self.first[some],
                self.position[some],
                self.sequence[some],
                self.band,
            )


def _plan(call: WindowCall) -> _Plan:
    T, P, W, device = call.q.shape[1], call.past, call.window, call.q.device
    C = min(max(W, LEAST_BLOCK), LARGEST_BLOCK, max(T, 1))
    before = -(-(W - 1) // C) * C
    # The first query, the first key and the length of every sequence.
    sequences = [
        (b * T + start, b * call.k.shape[1] + start + (0 if call.cu_seqlens is None else n * P), stop - start)
        for n, (b, start, stop) in enumerate(sequence_bounds(call.q.shape[0], T, call.cu_seqlens))
    ]
    table = torch.tensor(sequences, dtype=torch.int64).reshape(-1, 3)
    blocks = -(-table[:, 2] // C)
    ids = torch.repeat_interleave(torch.arange(len(sequences)), blocks)
    begin = (torch.arange(len(ids)) - (blocks.cumsum(0) - blocks)[ids])[:, None] * C  # the first token of each block
    queries, keys, lengths = (column[ids, None] for column in table.T)
    position = torch.full((len(sequences),), P) if call.position is None else call.position.cpu().long()
    tokens, seen = torch.arange(C), torch.arange(before + C)
    time, places = begin + tokens, begin + P - before + seen  # in the sequence, and among its keys
    last = lengths + P - 1
    distance = before + tokens[:, None] - seen
    return _Plan(
        (queries + torch.minimum(time, lengths - 1)).to(device),
        (time >= lengths).to(device),
        (keys + torch.minimum(places.clamp(min=0), last)).to(device),
        ((places < 0) | (places > last)).to(device),
        ((P - position).clamp(min=0)[ids] - (begin[:, 0] + P - before)).clamp(min=0).to(device),
        (position[ids] + begin[:, 0]).to(device),
        ids.to(device),
        ((distance < 0) | (distance >= W)).to(device),
    )


class _Blocks:
    """Queries, keys, values and scores of some blocks."""

    def __init__(self, call: WindowCall, plan: _Plan):
        self.plan, self.heads, self.dtype = plan, call.k.shape[2], sums_dtype(call)
        self.q = self.by_query(_rows(call.q)).mul_(call.scale)  # a copy
        self.k, self.v = self._by_key(_rows(call.k)), self._by_key(_rows(call.v))
        C = plan.queries.shape[1]
        self.scores = self.q @ self.k.mT  # [G, H, R C, L]
        early = torch.arange(self.k.shape[2], device=self.q.device) < plan.first[:, None]  # [G, L]
        # A query that is filled up sees nothing and adds nothing to gradients; its output, NaN, is not stored.
        hidden = plan.band | (early | plan.outside)[:, None] | plan.filled[:, :, None]
        self._mask(self.scores, hidden)
        self.sink_scores = None
        if call.sink_q is not None and call.sink_k is not None and call.sink_v is not None:
            self.sink_q = self.by_query(_rows(call.sink_q)).mul_(call.scale)
            self.sink_k, self.sink_v = (
                x[plan.sequence].to(self.dtype).transpose(1, 2) for x in (call.sink_k, call.sink_v)
            )  # [G, H, S, X]
            self.sink_scores = self.sink_q @ self.sink_k.mT  # [G, H, R C, S]
            left = plan.position[:, None] + torch.arange(C, device=self.q.device) - call.window
            near = torch.arange(self.sink_k.shape[2], device=self.q.device) > left[:, :, None]
            self._mask(self.sink_scores, near | plan.filled[:, :, None])

    def _mask(self, scores: Tensor, hidden: Tensor) -> None:
        """Takes what is hidden [G, C, X] from scores [G, H, R C, X]."""
        rows = scores.view(hidden.shape[0], self.heads, -1, *hidden.shape[1:])
        rows.masked_fill_(hidden[:, None, None], -torch.inf)

    def lse(self) -> Tensor:
        """Log-sum-exps of all scores [G, H, R C, 1]."""
        total = self.scores.logsumexp(-1, keepdim=True)
        if self.sink_scores is None:
            return total
        return torch.logaddexp(total, self.sink_scores.logsumexp(-1, keepdim=True))

    def weights(self, lse: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of keys, and of sinks; the scores are used up."""
        sinks = None if self.sink_scores is None else self.sink_scores.sub_(lse).exp_()
        return self.scores.sub_(lse).exp_(), sinks

    def by_query(self, x: Tensor) -> Tensor:
        """A copy [G, H, R C, X] of x [all queries, HQ, X]."""
        G, C = self.plan.queries.shape
        part = x[self.plan.queries.flatten()].to(self.dtype).view(G, C, self.heads, -1, x.shape[2])
        return part.permute(0, 2, 3, 1, 4).reshape(G, self.heads, -1, x.shape[2])

    def store(self, out: Tensor, part: Tensor) -> None:
        """Puts part [G, H, R C, X] into out [all queries, HQ, X]."""
        G, C = self.plan.queries.shape
        kept = ~self.plan.filled.flatten()
        part = part.view(G, self.heads, -1, C, part.shape[3]).permute(0, 3, 1, 2, 4)
        out[self.plan.queries.flatten()[kept]] = part.reshape(G * C, *out.shape[1:])[kept].to(out.dtype)

    def add(self, out: Tensor, part: Tensor) -> None:
        """Adds part [G, H, L, X] to out [all keys, H, X]: block by block, since in one of them no key comes twice."""
        C = self.plan.queries.shape[1]
        for begin in range(0, part.shape[2], C):
            some = slice(begin, begin + C)
            kept = ~self.plan.outside[:, some]
            out[self.plan.keys[:, some][kept]] += part[:, :, some].transpose(1, 2)[kept]

    def _by_key(self, x: Tensor) -> Tensor:
        """[G, H, L, X] of x [all keys, H, X]."""
        return x[self.plan.keys.flatten()].to(self.dtype).unflatten(0, self.plan.keys.shape).transpose(1, 2)


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


def _scores(call: WindowCall, plan: _Plan) -> int:
    """Of one block."""
    return call.q.shape[2] * plan.band.numel()


def forward(call: WindowCall) -> tuple[Tensors, Tensors]:
    """Outputs [B, T, HQ, V] and log-sum-exps [B, T, HQ]; these once more, for backward."""
    if call.check:
        refuse_positions(call.position)
    (shape, sums), dtype = call.result_shapes(), sums_dtype(call)
    o, lse = call.q.new_empty(shape), call.q.new_empty((*sums, 1), dtype=dtype)
    plan = _plan(call)
    for part in plan.parts(_scores(call, plan)):
        blocks = _Blocks(call, part)
        total = blocks.lse()
        weights, by_sink = blocks.weights(total)
        out = weights @ blocks.v
        if by_sink is not None:
            out += by_sink @ blocks.sink_v
        blocks.store(_rows(o), out)
        blocks.store(_rows(lse), total)
    lse = lse.squeeze(-1)
    return (o, lse), (lse.new_empty(0) if call.save == "nothing" else lse.clone(),)


def backward(call: WindowCall, saved: Tensors, gradients: Gradients) -> Gradients:
    """Gradients of q, k and v, and of those of sinks."""
    (lse,), (do, dlse), dtype = saved, gradients, sums_dtype(call)
    assert do is not None
    dq = torch.empty_like(call.q, memory_format=torch.contiguous_format)
    dk, dv = (x.new_zeros(x.shape, dtype=dtype) for x in (call.k, call.v))
    dsink_q, dsink_k, dsink_v = dq, dk, dv  # passed over if there are no sinks
    if call.sink_k is not None and call.sink_v is not None:
        dsink_q = torch.empty_like(dq)
        dsink_k, dsink_v = (x.new_zeros(x.shape, dtype=dtype) for x in (call.sink_k, call.sink_v))
    plan = _plan(call)
    for part in plan.parts(_scores(call, plan)):
        blocks = _Blocks(call, part)
        weights, by_sink = blocks.weights(blocks.by_query(_rows(lse)[:, :, None]))
        dout = blocks.by_query(_rows(do))
        dweights = dout @ blocks.v.mT
        through = (dweights * weights).sum(-1, keepdim=True)
        if dlse is not None:
            through -= blocks.by_query(_rows(dlse)[:, :, None])
        if by_sink is not None:
            dby_sink = dout @ blocks.sink_v.mT
            through += (dby_sink * by_sink).sum(-1, keepdim=True)
            dsinks = dby_sink.sub_(through).mul_(by_sink)
            blocks.store(_rows(dsink_q), (dsinks @ blocks.sink_k).mul_(call.scale))
            dsink_k.index_add_(0, part.sequence, (dsinks.mT @ blocks.sink_q).transpose(1, 2))
            dsink_v.index_add_(0, part.sequence, (by_sink.mT @ dout).transpose(1, 2))
        dscores = dweights.sub_(through).mul_(weights)
        blocks.store(_rows(dq), (dscores @ blocks.k).mul_(call.scale))
        blocks.add(_rows(dk), dscores.mT @ blocks.q)
        blocks.add(_rows(dv), weights.mT @ dout)
    narrow = call.k.dtype
    return dq, dk.to(narrow), dv.to(narrow), dsink_q, dsink_k.to(narrow), dsink_v.to(narrow)
