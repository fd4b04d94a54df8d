"""The plan of log-likelihoods: which contexts are the same, what others have in common, what is read together.

It depends on the requests alone, never on the size of batches, so that neither do the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import isnan
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from gsa.errors import GSAError
from gsa.eval.reader import Continuation, Score

Ids = tuple[int, ...]
State = TypeVar("State")
LEAST_SHARED = 16
"""Tokens of a shared beginning at least, for its state to be kept."""
LEAST_SAVED = 64
"""Tokens at least that all who share it need not read: it is read in a pass of its own, which has to pay."""


@dataclass
class Context:
    """A context, and all that it is to go on with."""

    ids: Ids
    continuations: dict[int, Ids]
    """By the numbers of their requests."""
    cuts: list[int] = field(default_factory=list)
    """Lengths of its beginnings that others share, whose states are kept; rising, and shorter than the context."""


def contexts_of(requests: Sequence[Continuation], max_length: int | None, vocab_size: int) -> list[Context]:
    """The different contexts of requests, sorted; those that are too long for a model lose their beginning.

    The last token of a continuation is never read, so that context and continuation may have max_length + 1 together.
    """
    found: dict[Ids, Context] = {}
    for number, request in enumerate(requests):
        context, continuation = (_checked(ids, vocab_size, f"score: request {number}") for ids in request)
        if max_length is not None:
            if len(continuation) > max_length:
                raise GSAError(
                    f"score: request {number} has a continuation of {len(continuation)} tokens, "
                    f"expected at most {max_length} (max_length)"
                )
            context = context[-(max_length + 1 - len(continuation)) :]
        found.setdefault(context, Context(context, {})).continuations[number] = continuation
    return [found[ids] for ids in sorted(found)]


def _checked(ids: Sequence[int], vocab_size: int, what: str) -> Ids:
    if not len(ids):
        raise GSAError(f"{what} is empty, or a part of it; expected tokens")
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        raise GSAError(f"{what} has ids {low}..{high}, expected 0..{vocab_size - 1} (the vocabulary)")
    return tuple(ids)


def share_beginnings(contexts: Sequence[Context]) -> None:
    """Finds what sorted contexts have in common at their beginning, if it pays to read that once (`cuts`)."""
    runs = [(0, len(contexts), 0)]  # from, to, and how far those in between are read already
    while runs:
        begin, end, read = runs.pop()
        if end - begin < 2:
            continue
        common = _common(contexts[begin].ids, contexts[end - 1].ids)
        # Something has to be left of each, so that there is a token whose logits tell what comes next.
        shared = min(common, min(len(context.ids) for context in contexts[begin:end]) - 1)
        if shared - read >= LEAST_SHARED and (end - begin - 1) * (shared - read) >= LEAST_SAVED:
            for context in contexts[begin:end]:
                context.cuts.append(shared)
            read = shared
        next_ids = (context.ids[common : common + 1] for context in contexts[begin:end])
        for _, run in groupby(next_ids):
            length = len(list(run))
            runs.append((begin, begin + length, read))
            begin += length


class Asked(NamedTuple):
    """How likely is a token, behind the id at a place of a job? It is part of the answer to a request."""

    place: int
    token: int
    request: int = 0


@dataclass
class Job(Generic[State]):
    """Ids to read, from a state or from nothing, and what is asked on the way."""

    ids: Ids
    start: State | None
    asked: list[Asked] = field(default_factory=list)
    """Places never fall."""

    @classmethod
    def whole(cls, ids: Ids, start: State | None, request: int, continuation: Ids) -> Job[State]:
        """The rest of a context and a continuation, in one go."""
        asked = [Asked(len(ids) - 1 + i, token, request) for i, token in enumerate(continuation)]
        return cls(ids + continuation[:-1], start, asked)

    @classmethod
    def context(cls, ids: Ids, start: State | None, continuations: dict[int, Ids]) -> Job[State]:
        """The rest of a context and what its continuations begin with alike, and their first tokens behind that."""
        shared = alike(continuations)
        asked = [
            Asked(len(ids) - 1 + i, own[i], request)
            for i in range(shared + 1)
            for request, own in continuations.items()
        ]
        return cls(ids + next(iter(continuations.values()))[:shared], start, asked)

    @classmethod
    def later(cls, start: State, request: int, continuation: Ids, shared: int) -> Job[State]:
        """What is left of a continuation behind its context and so many tokens, which it has in common with others."""
        asked = [Asked(i, token, request) for i, token in enumerate(continuation[shared + 1 :])]
        return cls(continuation[shared:-1], start, asked)

    def cut(self, length: int) -> tuple[Job[State], Job[State]]:
        """The first ids, and the others, which have to go on from the state behind them."""
        first = [asked for asked in self.asked if asked.place < length]
        rest = [asked._replace(place=asked.place - length) for asked in self.asked if asked.place >= length]
        return Job(self.ids[:length], self.start, first), Job(self.ids[length:], None, rest)


def alike(continuations: dict[int, Ids]) -> int:
    """How many tokens all continuations begin with alike, of those that have to be read: the last of each has not."""
    first, *others = continuations.values()
    return min([len(first) - 1, *(min(_common(first, own), len(own) - 1) for own in others)])


class Tally:
    """Sums of what was asked, by request."""

    def __init__(self) -> None:
        self._totals: dict[int, float] = {}
        self._greedy: dict[int, bool] = {}

    def add(self, job: Job[State], answer: Tensor) -> None:
        """`answer` [asked, 2] has the log-probability of each token, and whether it is the likeliest."""
        for (_, _, request), (log_prob, greedy) in zip(job.asked, answer.tolist(), strict=True):
            self._totals[request] = self._totals.get(request, 0.0) + log_prob
            self._greedy[request] = self._greedy.get(request, True) and bool(greedy)

    def scores(self) -> list[tuple[int, Score]]:
        """All requests that were asked for."""
        for request, total in self._totals.items():
            if isnan(total):
                raise GSAError(f"score: the model's answer to request {request} is not a number (nan)")
        return [(request, Score(total, self._greedy[request])) for request, total in self._totals.items()]


class Beginnings(Generic[State]):
    """The states behind the shared beginnings of contexts, which come sorted: only those of the last one are kept.

    `read` gives the state behind more ids, from a state, or from nothing if that is None.
    """

    def __init__(self, read: Callable[[Ids, State | None], State]) -> None:
        self._read = read
        self._open: list[tuple[Ids, State]] = []

    def of(self, context: Context) -> tuple[State | None, int]:
        """The state that a context goes on from, and how many of its ids are read by then."""
        while self._open and context.ids[: len(self._open[-1][0])] != self._open[-1][0]:
            self._open.pop()
        state, read = (self._open[-1][1], len(self._open[-1][0])) if self._open else (None, 0)
        for cut in context.cuts[len(self._open) :]:
            state, read = self._read(context.ids[read:cut], state), cut
            self._open.append((context.ids[:cut], state))
        return state, read


def room(max_length: int | None, max_tokens: int) -> int | None:
    """How many tokens of a prompt a model may see that goes on for so many; None if there is no limit."""
    if max_length is None:
        return None
    if max_tokens >= max_length:
        raise GSAError(f"generate: max_tokens must be below {max_length} (max_length), got {max_tokens}")
    return max_length - max_tokens


def prompts_of(prompts: Sequence[Sequence[int]], most: int | None, vocab_size: int) -> list[Context]:
    """The different prompts, sorted, with the numbers of those who ask; only the last `most` ids of each are read."""
    found: dict[Ids, Context] = {}
    for number, prompt in enumerate(prompts):
        ids = _checked(prompt, vocab_size, f"generate: prompt {number}")
        ids = ids if most is None else ids[-most:]
        found.setdefault(ids, Context(ids, {})).continuations[number] = ()
    return [found[ids] for ids in sorted(found)]


def _common(a: Ids, b: Ids) -> int:
    """How many tokens two sequences begin with alike."""
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)


def batches(contexts: Iterable[Context], batch_size: int, most_tokens: int) -> Iterator[list[Context]]:
    """Contexts, in their order, with about so many requests together, and so many tokens at most if they are several.

    >>> contexts = [Context((1, 2), {0: (3,), 1: (4,)}), Context((5,), {2: (6,)}), Context((7,), {3: (8,)})]
    >>> [len(batch) for batch in batches(contexts, 3, 100)]
    [2, 1]
    """
    batch: list[Context] = []
    requests = tokens = 0
    for context in contexts:
        read = len(context.ids) - (context.cuts[-1] if context.cuts else 0)
        size = read + sum(len(ids) - 1 for ids in context.continuations.values())
        if batch and (requests + len(context.continuations) > batch_size or tokens + size > most_tokens):
            yield batch
            batch, requests, tokens = [], 0, 0
        batch.append(context)
        requests, tokens = requests + len(context.continuations), tokens + size
    if batch:
        yield batch
