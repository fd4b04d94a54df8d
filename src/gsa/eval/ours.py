"""OurReader: a model of `gsa.infer` as evaluation reads with it.

What contexts have in common is read once, contexts are read together, and their continuations go on from their states.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gsa.data.tokenizer import CONFIG, Tokenizer
from gsa.data.vocabulary import vocabulary
from gsa.errors import GSAError, memory_errors
from gsa.eval.packed import PIECE, PackedModel, Start
from gsa.eval.reader import Continuation, Reader, ReaderTokenizer, Score
from gsa.eval.scoring import (
    Asked,
    Beginnings,
    Context,
    Ids,
    Job,
    Tally,
    alike,
    batches,
    contexts_of,
    prompts_of,
    room,
    share_beginnings,
)
from gsa.files import parse_json
from gsa.infer.engine import Engine
from gsa.infer.reading import checked_ids
from gsa.infer.state_file import Kind, check_kinds, kind_of
from gsa.infer.text import TextEngine, Writing
from gsa.models.state import ModelState
from gsa.options import check_count
from gsa.sampling import Sampling

MOST_TOKENS = 4096
"""Tokens of all sequences of a pass, unless it is one sequence."""
LAST = "last"
"""The name of the last id among the tensors of a stored state."""


class Text(NamedTuple):
    """The state of `log_probs`: that of all ids but the last, and the last, which is read with what comes behind."""

    start: Start | None
    last: int


class OurTokenizer(ReaderTokenizer):
    """A tokenizer of `gsa.data`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary(tokenizer)
        self.eos_id, self.vocab_size = tokenizer.eos_id, tokenizer.vocab_size
        bos = parse_json(tokenizer.files()[CONFIG], CONFIG).get("bos_token")
        name = bos.get("content") if isinstance(bos, dict) else bos
        self.bos_id = next((token.id for token in self._vocabulary.special if token.name == name), None)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        (ids,) = self._tokenizer.encode([text])
        return [*(self._vocabulary.lead if special else ()), *ids.tolist()]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)


class OurReader(Reader):
    """Reads with a model of ours.

    >>> reader = OurReader.open("gsa-tiny")
    >>> she, was, green = (reader.tokenizer.encode(text) for text in ("She", " was", " green"))
    >>> scores = dict(reader.score([Continuation(she, was), Continuation(she, green)], batch_size=8))
    >>> scores[0].log_likelihood > scores[1].log_likelihood
    True
    """

    tokenizer: ReaderTokenizer

    def __init__(self, texts: TextEngine, name: str, max_length: int | None = None) -> None:
        model = texts.engine.model
        self.name, self.max_length, self.tokenizer = name, max_length, OurTokenizer(texts.tokenizer)
        self.about = {
            "kind": "gsa",
            "mixer": model.config.mixer,
            "parameters": model.num_parameters,
            "weights": model.weights,
            "compute": model.compute,
            "device": str(model.device),
            "fingerprint": model.fingerprint,
        }
        self._texts, self._model, self._packed = texts, model, PackedModel(model)

    @classmethod
    def open(
        cls,
        model: str | Path,
        *,
        weights: str = "auto",
        compute: str = "auto",
        device: str = "auto",
        max_length: int | None = None,
    ) -> OurReader:
        """The reader of a name or folder that `gsa.load` takes; see `open_reader`."""
        return cls(TextEngine.load(model, weights, compute=compute, device=device), str(model), max_length)

    def score(
        self, requests: Sequence[Continuation], *, batch_size: int, reuse: bool = True
    ) -> Iterator[tuple[int, Score]]:
        check_count("batch_size", batch_size)
        contexts = contexts_of(requests, self.max_length, self._model.vocab_size)
        if reuse:
            share_beginnings(contexts)
        else:
            contexts = [Context(c.ids, {number: ids}) for c in contexts for number, ids in c.continuations.items()]
        beginnings = Beginnings(self._begun)
        for batch in batches(contexts, batch_size, MOST_TOKENS):
            with memory_errors("score"):
                answers = self._scored(batch, beginnings, batch_size)
            yield from answers

    def _scored(self, batch: list[Context], beginnings: Beginnings[Start], batch_size: int) -> list[tuple[int, Score]]:
        """The answers to all requests of some contexts: in one pass over contexts, and others over continuations."""
        jobs: list[Job[Start]] = []
        later: list[tuple[int, int, Ids, int]] = []  # job that it goes on from, request, continuation, how much is read
        for context in batch:
            start, read = beginnings.of(context)
            rest, continuations = context.ids[read:], context.continuations
            if len(continuations) == 1:
                jobs += [Job.whole(rest, start, request, own) for request, own in continuations.items()]
            else:
                shared = alike(continuations)
                more = [(request, own) for request, own in continuations.items() if len(own) > shared + 1]
                later += [(len(jobs), request, own, shared) for request, own in more]
                jobs.append(Job.context(rest, start, continuations))
        tally = Tally()
        states = self._read(jobs, tally, keep=bool(later))
        for begin in range(0, len(later), batch_size):
            assert states is not None
            group = later[begin : begin + batch_size]
            jobs = [Job.later(Start(states, i), request, own, shared) for i, request, own, shared in group]
            self._read(jobs, tally)
        return tally.scores()

    def _read(self, jobs: list[Job[Start]], tally: Tally, *, keep: bool = False) -> ModelState | None:
        answers, states = self._packed.read(jobs, keep=keep)
        for job, answer in zip(jobs, answers, strict=True):
            tally.add(job, answer)
        return states

    def log_probs(self, ids: Sequence[int], state: object = None) -> tuple[Tensor, object]:
        if state is not None and not isinstance(state, Text):
            raise GSAError(f"log_probs: state must be one that log_probs gave, got {type(state).__name__}")
        ids = checked_ids(ids, self._model.vocab_size, "log_probs").tolist()
        if not ids:
            if state is None:
                raise GSAError("log_probs: there are no ids, and there is no state to go on from")
            return torch.empty(0), state
        start = None if state is None else state.start
        inputs, targets = (ids[:-1], ids[1:]) if state is None else ([state.last, *ids[:-1]], ids)
        parts = [torch.empty(0)]
        for begin in range(0, len(inputs), PIECE):
            piece = slice(begin, begin + PIECE)
            with memory_errors("log_probs"):
                job = Job(tuple(inputs[piece]), start, [Asked(i, id_) for i, id_ in enumerate(targets[piece])])
                (answer,), states = self._packed.read([job], keep=True)
            assert states is not None
            start = Start(states, 0)
            parts.append(answer[:, 0])
        return torch.cat(parts), Text(start, ids[-1])

    def stored(self, state: object) -> dict[str, Tensor] | None:
        if not isinstance(state, Text) or state.start is None:  # a single id, of which nothing is read yet
            return None
        one = state.start.states.select(torch.tensor([state.start.number]))
        return {**one.tensors(), LAST: torch.tensor([state.last])}

    def restored(self, tensors: Mapping[str, Tensor], ids: int) -> object:
        expected = {**self._model.state_kinds(ids - 1), LAST: Kind("I64", (1,))}
        check_kinds({name: kind_of(x) for name, x in tensors.items()}, expected)
        (last,) = checked_ids(tensors[LAST].tolist(), self._model.vocab_size, "state").tolist()
        states = ModelState.from_tensors({name: x for name, x in tensors.items() if name != LAST})
        return Text(Start(states.to(self._model.device), 0), last)

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, until: Sequence[str], batch_size: int
    ) -> Iterator[tuple[int, str]]:
        check_count("batch_size", batch_size)
        sampling = Sampling(max_tokens=max_tokens, temperature=0)
        contexts = prompts_of(prompts, room(self.max_length, max_tokens), self._model.vocab_size)
        share_beginnings(contexts)
        texts = self._texts_of(batch_size)
        beginnings = Beginnings(texts.engine.read)
        waiting = deque(contexts)
        writings: list[tuple[Context, Writing]] = []
        while waiting or writings:
            while waiting and len(writings) < 2 * batch_size:  # as soon as one ends, another is there
                context = waiting.popleft()
                state, read = beginnings.of(context)
                ids = np.array(context.ids[read:])
                writings.append((context, texts.stream(ids, sampling, stop=until, state=state)))
            texts.engine.step()
            for context, writing in [entry for entry in writings if entry[1].generation.done]:
                text = str(writing.rest())
                yield from ((number, text) for number in context.continuations)
            writings = [entry for entry in writings if not entry[1].generation.done]

    def _texts_of(self, batch_size: int) -> TextEngine:
        """An engine that writes so many texts at once."""
        if self._texts.engine.batch_size != batch_size:
            engine = Engine(self._model, batch_size=batch_size)
            self._texts = TextEngine(engine, self._texts.tokenizer, self._texts.ends)
        return self._texts

    def _begun(self, ids: Ids, start: Start | None) -> Start:
        """Where a sequence goes on after ids."""
        _, states = self._packed.read([Job(ids, start)], keep=True)
        assert states is not None
        return Start(states, 0)
