"""ForeignReader: any causal model that transformers loads, GGUF files among them, as evaluation reads with it.

Pads stand on the right, where no causal model sees them before what is asked. What contexts have in common is read
once, and its cache copied, for models with whose caches that gives the same answers (`ForeignModel` tries it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gsa.errors import GSAError, memory_errors
from gsa.eval.foreign_model import ForeignModel, Grown
from gsa.eval.foreign_tokenizer import ForeignTokenizer
from gsa.eval.reader import Continuation, Reader, Score
from gsa.eval.scoring import (
    LEAST_SAVED,
    Asked,
    Beginnings,
    Context,
    Ids,
    Job,
    Tally,
    alike,
    contexts_of,
    prompts_of,
    room,
    share_beginnings,
)
from gsa.infer.reading import checked_ids
from gsa.infer.stop_strings import StopStrings
from gsa.options import check_count

PIECE = 1024
"""Tokens of a text that `log_probs` reads at once."""


class Text(NamedTuple):
    """The state of `log_probs`: the cache of all ids but the last, and the last, which is read with what comes behind.

    Of a model whose caches are of no use, all ids.
    """

    cache: Grown | None
    ids: Ids


class ForeignReader(Reader):
    """Reads with a model of transformers."""

    tokenizer: ForeignTokenizer

    def __init__(self, model: ForeignModel, tokenizer: ForeignTokenizer, name: str, max_length: int | None = None):
        self.name, self.tokenizer, self._model = name, tokenizer, model
        self.max_length = model.positions if max_length is None else max_length
        self.rereads = not model.caches
        self.about = {"kind": "transformers", **model.about}

    @classmethod
    def open(
        cls, model: str | Path, *, dtype: str = "auto", device: str = "auto", max_length: int | None = None
    ) -> ForeignReader:
        """The reader of a name, a folder or a GGUF file; see `open_reader`."""
        found = ForeignModel.open(model, dtype, device)
        return cls(found, ForeignTokenizer.open(model, found.ends), str(model), max_length)

    def score(
        self, requests: Sequence[Continuation], *, batch_size: int, reuse: bool = True
    ) -> Iterator[tuple[int, Score]]:
        check_count("batch_size", batch_size)
        contexts = contexts_of(requests, self.max_length, self._model.vocab_size)
        copied = reuse and self._model.caches
        if copied:
            share_beginnings(contexts)
        beginnings = Beginnings(self._begun)
        for members in _alike(contexts):
            whole: list[Job[Grown]] = []
            for context in members:
                start, read = beginnings.of(context)
                rest, continuations = context.ids[read:], context.continuations
                if reuse and all(len(own) == 1 for own in continuations.values()):
                    whole.append(Job.context(rest, start, continuations))
                elif copied and (len(continuations) - 1) * (len(rest) + alike(continuations)) >= LEAST_SAVED:
                    yield from self._continued(Job.context(rest, start, continuations), continuations, batch_size)
                else:
                    whole += [Job.whole(rest, start, request, own) for request, own in continuations.items()]
            whole.sort(key=lambda job: -len(job.ids))
            for begin in range(0, len(whole), batch_size):
                tally = Tally()
                self._read(whole[begin : begin + batch_size], tally)
                yield from tally.scores()

    def _continued(
        self, job: Job[Grown], continuations: dict[int, Ids], batch_size: int
    ) -> Iterator[tuple[int, Score]]:
        """A context, and then all that it is to go on with, from copies of its cache."""
        tally = Tally()
        cache = self._read([job], tally)
        shared = alike(continuations)
        more = [(request, own) for request, own in continuations.items() if len(own) > shared + 1]
        later = [Job.later(cache, request, own, shared) for request, own in more]
        for begin in range(0, len(later), batch_size):
            self._read(later[begin : begin + batch_size], tally)
        yield from tally.scores()

    def _begun(self, ids: Ids, start: Grown | None) -> Grown:
        """The cache behind ids."""
        return self._read([Job(ids, start)], Tally())

    def _read(self, jobs: Sequence[Job[Grown]], tally: Tally) -> Grown:
        """Jobs that all start from the same cache, as rows with pads on the right; the cache behind them."""
        with memory_errors("score"):
            longest = max(len(job.ids) for job in jobs)
            ids = torch.tensor([[*job.ids, *[0] * (longest - len(job.ids))] for job in jobs])
            # Logits are wanted from the first place that something is asked of.
            first = min((asked.place for job in jobs for asked in job.asked), default=longest - 1)
            logits, cache = self._model(ids, jobs[0].start, last=longest - first)
            for job, row in zip(jobs, logits, strict=True):
                tally.add(job, answers(row, [asked._replace(place=asked.place - first) for asked in job.asked]))
        return cache

    def log_probs(self, ids: Sequence[int], state: object = None) -> tuple[Tensor, object]:
        if state is not None and not isinstance(state, Text):
            raise GSAError(f"log_probs: state must be one that log_probs gave, got {type(state).__name__}")
        more: Ids = tuple(checked_ids(ids, self._model.vocab_size, "log_probs").tolist())
        known, cache = ((), None) if state is None else (state.ids, state.cache)
        if not more:
            if state is None:
                raise GSAError("log_probs: there are no ids, and there is no state to go on from")
            return torch.empty(0), state
        inputs, targets = (known + more)[:-1], (known + more)[1:]
        wanted = len(more) if known else len(more) - 1
        size = PIECE if self._model.caches else max(len(inputs), 1)
        parts = [torch.empty(0)]
        for begin in range(0, len(inputs), size):
            piece = inputs[begin : begin + size]
            last = min(len(piece), wanted)
            asked = enumerate(targets[begin + len(piece) - last : begin + len(piece)])
            with memory_errors("log_probs"):
                logits, cache = self._model(torch.tensor([piece]), cache, last=last, own=begin > 0)
                parts.append(answers(logits[0], [Asked(i, id_) for i, id_ in asked])[:, 0])
        return torch.cat(parts), Text(cache, more[-1:]) if self._model.caches else Text(None, known + more)

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, until: Sequence[str], batch_size: int
    ) -> Iterator[tuple[int, str]]:
        check_count("batch_size", batch_size)
        StopStrings(until)  # which refuses what cannot be one
        contexts = prompts_of(prompts, room(self.max_length, max_tokens), self._model.vocab_size)
        if self._model.caches:
            share_beginnings(contexts)
        beginnings = Beginnings(self._begun)
        for members in _alike(contexts):
            start, read = beginnings.of(members[0])
            for batch in self._together([(context, context.ids[read:]) for context in members], batch_size):
                with memory_errors("generate"):
                    written = self._written([ids for _, ids in batch], start, max_tokens, until)
                    for (context, _), text in zip(batch, written, strict=True):
                        yield from ((number, text) for number in context.continuations)

    def _together(self, prompts: list[tuple[Context, Ids]], batch_size: int) -> Iterator[list[tuple[Context, Ids]]]:
        """Prompts that are read as one batch: with pads on the left if the model takes them, else of one length."""
        prompts.sort(key=lambda prompt: -len(prompt[1]))
        runs = [prompts]
        if not self._model.left_pads:
            runs = [list(run) for _, run in groupby(prompts, lambda prompt: len(prompt[1]))]
        for run in runs:
            yield from (run[begin : begin + batch_size] for begin in range(0, len(run), batch_size))

    def _written(self, prompts: list[Ids], start: Grown | None, max_tokens: int, until: Sequence[str]) -> list[str]:
        """How each prompt goes on. Rows that have ended leave the batch."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[*[0] * (longest - len(own)), *own] for own in prompts])
        mask = torch.tensor([[*[0] * (longest - len(own)), *[1] * len(own)] for own in prompts])
        made: list[list[int]] = [[] for _ in prompts]
        rows, own = list(range(len(prompts))), False
        while rows and len(made[rows[0]]) < max_tokens:
            logits, cache = self._model(ids, start, mask=mask, own=own)
            going = []
            for place, (row, token) in enumerate(zip(rows, logits[:, -1].argmax(-1).tolist(), strict=True)):
                made[row].append(token)
                if token not in self._model.ends and not self._text(made[row], until)[1]:
                    going.append(place)
            rows = [rows[place] for place in going]
            last = torch.tensor([made[row][-1:] for row in rows])
            if self._model.caches and rows:
                start, own, ids, mask = cache.selected(going), True, last, torch.ones_like(last)
            elif rows:  # everything is read again
                ids, mask = (
                    torch.cat([old[going], new], 1) for old, new in ((ids, last), (mask, torch.ones_like(last)))
                )
        return [self._text(own, until)[0] for own in made]

    def _text(self, made: list[int], until: Sequence[str]) -> tuple[str, bool]:
        """The text of tokens up to the first stop string, and whether there is one."""
        stops = StopStrings(until)
        text, found = stops.add(self.tokenizer.text([token for token in made if token not in self._model.ends]))
        return (text, True) if found else (text + stops.end(), False)


def _alike(contexts: list[Context]) -> Iterator[list[Context]]:
    """Groups of sorted contexts that go on from the same shared beginning; first those that share none."""
    by_beginning = sorted(contexts, key=lambda context: bool(context.cuts))
    for _, group in groupby(by_beginning, lambda context: context.ids[: context.cuts[-1]] if context.cuts else ()):
        yield list(group)


def answers(logits: Tensor, asked: Sequence[Asked]) -> Tensor:
    """Log-probability of tokens by logits [T, V], and whether each is the highest [asked, 2], in fp32."""
    if not asked:
        return torch.empty(0, 2)
    places, tokens, _ = torch.tensor(asked, device=logits.device).T
    rows = logits[places].float()
    found = -cross_entropy(rows, tokens, reduction="none")
    return torch.stack([found, (rows.argmax(-1) == tokens).float()], 1).cpu()
