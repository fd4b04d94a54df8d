"""Which token comes next: the choice from the model's scores.

A choice is a function of the scores, the settings and one random number of the request's own, so it does not matter
which other requests are decoded beside it. Shape letters: V vocabulary, N requests.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gsa.sampling import Sampling

HEAD = 256
"""Tokens, of the likeliest, among which the limit of top-p is looked for first."""

COMPUTED = (ArithmeticError, AssertionError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)
"""What a computation raises that fails. Others, as the TimeoutError of a signal handler, come from outside: they belong
to whoever called, and to no request."""


@dataclass(frozen=True)
class Choice:
    """A token, and what its settings asked to know of it."""

    id: int
    logprob: float | None
    top: list[tuple[int, float]] | None


class Sampler:
    """Chooses the tokens of one request, whose prompt [T] is given."""

    def __init__(self, settings: Sampling, prompt: Tensor, vocab_size: int):
        self.settings = settings
        self._random = random.Random(os.urandom(16) if settings.seed is None else settings.seed)
        self._seen: Tensor | None = None  # where [V] a token stands in the prompt or came out
        self._counts: Tensor | None = None  # how often [V] each came out
        if settings.repetition_penalty != 1:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool)
            self._seen[prompt] = True
        if settings.presence_penalty or settings.frequency_penalty:
            self._counts = torch.zeros(vocab_size, dtype=torch.float64)
        self._biased = torch.tensor([*settings.logit_bias], dtype=torch.int64)
        self._bias = torch.tensor([*settings.logit_bias.values()], dtype=torch.float64)

    @property
    def plain(self) -> bool:
        """Whether it just takes the highest score."""
        return self.settings.greedy and not self.settings.changes_scores

    def choose(self, logits: Tensor) -> int:
        """A token by its scores [V], and the random numbers go on by one."""
        scores = self.penalised(logits)
        if self.settings.greedy:
            token = highest(scores)
        else:
            token = drawn(kept(scores, self.settings), self._random.random())
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None:
            self._counts[token] += 1
        return token

    def penalised(self, logits: Tensor) -> Tensor:
        """The scores [V] in fp64, those of earlier tokens made worse, and all with their bias."""
        scores = logits.double()
        if self._seen is not None:
            earlier, penalty = self._seen.nonzero()[:, 0], self.settings.repetition_penalty
            was, limit = scores[earlier], torch.finfo(torch.float64).max
            scores[earlier] = torch.where(was < 0, was * penalty, was / penalty).clamp(-limit, limit)
        if self._counts is not None:
            settings, came = self.settings, (self._counts > 0).double()
            scores = scores - settings.presence_penalty * came - settings.frequency_penalty * self._counts
        scores[self._biased] += self._bias
        return scores


def choose(logits: Tensor, samplers: Sequence[Sampler]) -> list[Choice | Exception | None]:
    """The next token of N requests by the scores [N, V]; None where scores are not finite, and where a sampler fails,
    its error."""
    logits = logits.cpu()
    # A sum is much faster than looking at each, and is finite if and only if they are (short of overflow).
    finite = logits.sum(1).isfinite().tolist()
    likeliest = logits.max(1).indices.tolist() if any(sampler.plain for sampler in samplers) else []
    choices: list[Choice | Exception | None] = []
    for row, sampler in enumerate(samplers):
        if not finite[row]:
            choices.append(None)
            continue
        try:
            token = likeliest[row] if sampler.plain else sampler.choose(logits[row])
            choices.append(described(token, logits[row], sampler.settings.logprobs))
        except COMPUTED as error:
            choices.append(error)
    return choices


def highest(scores: Tensor) -> int:
    """The id of the highest score [V], of equals the lowest."""
    return int(scores.max(0).indices)


def kept(scores: Tensor, settings: Sampling) -> Tensor:
    """What the filters leave of the scores [V]: weights in proportion to the probabilities, 1 the highest, or 0."""
    # The highest becomes 0 before the division, so that no temperature is too low.
    weights = ((scores - scores.max()) / settings.temperature).exp()
    if 0 < settings.top_k < len(scores):
        weights = weights.where(scores >= scores.topk(settings.top_k).values[-1], 0)
    if settings.top_p < 1:
        weights = weights.where(_likeliest(weights, settings.top_p), 0)
    if settings.min_p > 0:
        weights = weights.where(weights >= settings.min_p, 0)
    return weights


def drawn(weights: Tensor, chance: float) -> int:
    """The id at which the sum of the weights [V], in the order of ids, passes `chance` (below 1) of the whole."""
    sums = weights.cumsum(0)
    return int(torch.searchsorted(sums, sums[-1] * chance, right=True))


def _likeliest(weights: Tensor, share: float) -> Tensor:
    """Where [V] the highest weights are that make up a share of the sum, at least one. Nearly always they are few, and
    only as many are sorted as needed."""
    left, needed, size = int((weights > 0).sum()), weights.sum() * share, HEAD
    while True:
        head = weights.topk(min(size, left)).values
        sums = head.cumsum(0)
        if len(head) == left or sums[-1] >= needed:
            break
        size *= 8
    count = max(1, int((sums - head < needed).sum()))
    last = head[count - 1]
    above = weights > last
    equal = (weights == last).nonzero()[:, 0]
    above[equal[: count - int(above.sum())]] = True
    return above


def described(token: int, logits: Tensor, alternatives: int | None) -> Choice:
    """A token, with its log-probability by the scores [V] and so many of the likeliest in its place."""
    if alternatives is None:
        return Choice(token, None, None)
    logprobs = logits.double().log_softmax(0)
    values, ids = logprobs.topk(min(alternatives, len(logprobs)))
    top = sorted(zip(ids.tolist(), values.tolist(), strict=True), key=lambda entry: (-entry[1], entry[0]))
    return Choice(token, float(logprobs[token]), top)
