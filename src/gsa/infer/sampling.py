"""Which token comes next: the choice from the model's scores.

A choice is a function of the scores, the settings and one random number of the request's own, so it does not matter
which other requests are decoded beside it. Shape letters: V vocabulary, N requests.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gsa.ops.native import library
from gsa.ops.native.draws import draw
from gsa.ops.native.structs import GsaDraw
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


class Known:
    """Tokens whose scores are penalised, each once, with how often it has come out."""

    def __init__(self, prompt: Tensor):
        self.ids: NDArray[np.int64] = np.unique(prompt.numpy())
        self.counts = np.zeros(len(self.ids))
        self._places = {id_: place for place, id_ in enumerate(self.ids.tolist())}

    def __len__(self) -> int:
        return len(self._places)

    def add(self, token: int) -> None:
        """Counts a token that came out."""
        place = self._places.get(token, len(self))
        if place == len(self.ids):  # there is no more room
            more = max(64, place)
            self.ids = np.concatenate([self.ids, np.zeros(more, np.int64)])
            self.counts = np.concatenate([self.counts, np.zeros(more)])
        self.ids[place] = token
        self.counts[place] += 1
        self._places[token] = place


class Sampler:
    """Chooses the tokens of one request, whose prompt [T] is given."""

    def __init__(self, settings: Sampling, prompt: Tensor, vocab_size: int):
        self.settings = settings
        self.plain = settings.greedy and not settings.changes_scores
        """Whether it just takes the highest score."""
        self._random = random.Random(os.urandom(16) if settings.seed is None else settings.seed)
        repeats = settings.repetition_penalty != 1
        self._known = Known(prompt if repeats else prompt[:0]) if _penalises(settings) else None
        self._biased = np.array([*settings.logit_bias], np.int64)
        self._bias = np.array([*settings.logit_bias.values()], np.float64)
        self._draw: GsaDraw | None = None

    def choose(self, logits: Tensor) -> int:
        """A token by its scores [V], computed with torch; `took` has to be told."""
        scores = self.penalised(logits)
        return highest(scores) if self.settings.greedy else drawn(kept(scores, self.settings), self._random.random())

    def draw(self) -> GsaDraw:
        """The same for the native engine, whose scores it has not got yet; it points to memory of this sampler."""
        if self._draw is None:
            self._draw = _draw_of(self.settings)
            self._draw.biased, self._draw.biased_ids = len(self._biased), self._biased.ctypes.data
            self._draw.biases = self._bias.ctypes.data
        if self._known is not None:
            self._draw.known, self._draw.known_ids = len(self._known), self._known.ids.ctypes.data
            self._draw.counts = self._known.counts.ctypes.data
        if not self.settings.greedy:
            self._draw.chance = self._random.random()
        return self._draw

    def took(self, token: int) -> None:
        """Notes what was chosen."""
        if self._known is not None:
            self._known.add(token)

    def penalised(self, logits: Tensor) -> Tensor:
        """The scores [V] in fp64, those of earlier tokens made worse, and all with their bias."""
        scores, settings = logits.double(), self.settings
        if self._known is not None:
            known = len(self._known)
            ids, counts = torch.from_numpy(self._known.ids[:known]), torch.from_numpy(self._known.counts[:known])
            was, penalty, limit = scores[ids], settings.repetition_penalty, torch.finfo(torch.float64).max
            if penalty != 1:
                was = torch.where(was < 0, was * penalty, was / penalty).clamp(-limit, limit)
            came = torch.where(counts > 0, settings.presence_penalty, 0)
            scores[ids] = was - came - settings.frequency_penalty * counts
        scores[torch.from_numpy(self._biased)] += torch.from_numpy(self._bias)
        return scores


def _penalises(settings: Sampling) -> bool:
    return replace(settings, logit_bias={}).changes_scores


def _draw_of(settings: Sampling) -> GsaDraw:
    """How the native engine chooses by these settings."""
    return GsaDraw(
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
        repetition=settings.repetition_penalty,
        presence=settings.presence_penalty,
        frequency=settings.frequency_penalty,
    )


def choose(logits: Tensor, samplers: Sequence[Sampler]) -> list[Choice | Exception | None]:
    """The next token of N requests by the scores [N, V]; None where scores are not finite, and where a sampler fails,
    its error."""
    logits = logits.cpu()
    # A sum is much faster than looking at each, and is finite if and only if they are (short of overflow).
    finite = logits.sum(1).isfinite().tolist()
    likeliest = logits.max(1).indices.tolist() if any(sampler.plain for sampler in samplers) else []
    tokens: dict[int, int | Exception] = {row: likeliest[row] for row, sampler in enumerate(samplers) if sampler.plain}
    tokens |= _drawn(logits, {row: each for row, each in enumerate(samplers) if finite[row] and not each.plain})
    choices: list[Choice | Exception | None] = []
    for row, sampler in enumerate(samplers):
        token = tokens[row] if finite[row] else None
        if not isinstance(token, int):
            choices.append(token)
            continue
        try:
            sampler.took(token)
            choices.append(described(token, logits[row], sampler.settings.logprobs))
        except COMPUTED as error:
            choices.append(error)
    return choices


def _drawn(logits: Tensor, samplers: dict[int, Sampler]) -> dict[int, int | Exception]:
    """What the samplers of some rows of the scores [N, V] choose, or their errors."""
    compiled = logits.dtype == torch.float32 and library.unavailable(None) is None
    found: dict[int, int | Exception] = {}
    draws: dict[int, GsaDraw] = {}
    for row, sampler in samplers.items():
        try:
            if compiled:
                draws[row] = sampler.draw()
            else:
                found[row] = sampler.choose(logits[row])
        except COMPUTED as error:
            found[row] = error
    rows = [*draws]
    if not rows:
        return found
    try:
        scores = logits.contiguous() if len(rows) == len(logits) else logits[rows]
        return found | dict(zip(rows, draw(scores, [*draws.values()]), strict=True))
    except COMPUTED as error:
        return found | dict.fromkeys(rows, error)


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
