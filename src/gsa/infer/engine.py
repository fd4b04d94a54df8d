"""Engine: requests that start, go on and end at any time, decoded together. Ids in, ids out; it knows no tokenizer.

What a request gives does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import cast, overload
from weakref import finalize

import numpy as np
from torch import Tensor

from gsa.errors import GSAError, OutOfMemory, memory_errors, raised_by
from gsa.files import named
from gsa.infer.model import Model
from gsa.infer.reading import Ids, Prompt, checked_ids
from gsa.infer.requests import Completion, Generation, Request, Token, Until
from gsa.infer.runners import chosen_reading, computation, make_runner
from gsa.infer.sampling import Sampler
from gsa.infer.scheduler import NOT_FINITE, Scheduler, is_finite
from gsa.infer.state import State
from gsa.infer.state_cache import StateCache
from gsa.models.lm import LM
from gsa.options import check, choice, number
from gsa.sampling import DEFAULT, Sampling
from gsa.terminal import quoted
from gsa.train.find import warn

READ_TOKENS = 64
"""Tokens of prompts that a step reads while others write, unless asked for otherwise."""

MAX_MARKS = 64
"""Of a prompt: each is a state that is kept, and a piece that is read by itself."""


@dataclass(frozen=True)
class _Options:
    batch_size: int = number(least=1)
    state_cache_bytes: int = number(least=0)
    state_dir_bytes: int = number(least=0)
    read_tokens: int = number(least=1)
    reading: str = choice("auto", ("auto", "fast", "exact"))


@dataclass(frozen=True)
class _PromptOptions:
    salt: str
    reuse: bool
    logprobs: int | None = number(least=0)


class Engine:
    """Generates from a model: a `Model`, an `LM`, or a name or folder that `gsa.train.find.find_model` knows.

    Args:
        model: What generates.
        weights: Format of the weights: "fp32", "bf16", "int8", "int4", or "auto".
        compute: What prompts are computed in: "fp32", "bf16", "int8", or "auto"; see `Model.load`.
        device: Where it computes: "cpu", "cuda", or "auto"; see `Model.load`.
        batch_size: Requests that are decoded together; others wait.
        state_cache_bytes: Memory for states that prompts and answers leave, from which prompts that begin alike go on;
            0 is none.
        state_dir: Folder in which they are kept too, so that they are there when an engine starts again; it needs
            memory for them (`state_cache_bytes`), and one engine at a time has it. See `close`.
        state_dir_bytes: Bytes of the files in that folder, at most.
        reading: "fast" reads long prompts in pieces of 512 tokens by the model's forward; states can be kept and found
            where pieces end. "exact" reads with the arithmetic of writing: a state is a function of its tokens, and can
            be kept and found anywhere. "auto" is exact where states are kept, if that can be here, and else fast.
        read_tokens: Tokens of prompts that a step reads at most while others write, whose tokens wait for it; where
            reading is fast, at least 512, a whole piece.
        say: Told of files in `state_dir` that are not used, and of states that cannot be written there.

    >>> engine = Engine("gsa-tiny")
    >>> len(engine.generate([10, 11, 12], Sampling(max_tokens=5)).tokens)
    5
    """

    def __init__(
        self,
        model: Model | LM | str | Path = "gsa-tiny",
        *,
        weights: str = "auto",
        compute: str = "auto",
        device: str = "auto",
        batch_size: int = 16,
        state_cache_bytes: int = 0,
        state_dir: str | Path | None = None,
        state_dir_bytes: int = 4 << 30,
        reading: str = "auto",
        read_tokens: int = READ_TOKENS,
        say: Callable[[str], None] = warn,
    ):
        check(_Options(batch_size, state_cache_bytes, state_dir_bytes, read_tokens, reading), "engine")
        if state_dir is not None and not state_cache_bytes:
            raise GSAError("engine: state_dir needs memory for states: give state_cache_bytes, too")
        self.model = _loaded(model, weights, compute, device)
        self.batch_size = batch_size
        self.cache = StateCache(state_cache_bytes) if state_cache_bytes else None
        """States that were kept."""
        reading = chosen_reading(reading, self.model, self.cache is not None)
        try:
            self._runner = make_runner(self.model, batch_size, reading)
        except (MemoryError, OverflowError, RuntimeError, TypeError) as error:  # for sizes that cannot be had
            raise OutOfMemory(f"engine: no memory for the states of {batch_size} sequences: {error}") from None
        self._scheduler = Scheduler(self._runner, read_tokens)
        self._ids = count()
        if self.cache is not None and state_dir is not None:
            folder = named(state_dir, "folder")
            self.cache.use_folder(folder, state_dir_bytes, self.model, computation(self._runner), say)
            finalize(self, self.cache.close)  # also at the end of the program

    def close(self, *, write: bool = True) -> None:
        """Writes the states that are still to be written to `state_dir`, unless they are to be dropped, and leaves it
        to others; the end of a `with` block does so, too. The engine can be used further, and keeps states in memory
        alone."""
        if self.cache is not None:
            self.cache.close(write=write)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        return self._scheduler.busy

    def prompt(
        self,
        ids: Ids,
        *,
        state: State | None = None,
        marks: Sequence[int] = (),
        salt: str = "",
        reuse: bool = True,
        logprobs: int | None = None,
    ) -> Prompt:
        """A prompt, behind a state if one is given, that any number of requests can answer; it is read once.

        Args:
            ids: The tokens.
            state: What they go on from; it stays as it is.
            marks: Numbers of tokens of the prompt after which a state is kept, besides the places where that is done
                anyway (multiples of 512, the end of the prompt and of the answer); at most 64.
            salt: States are only found by prompts with the same salt.
            reuse: Whether states are looked for and kept at all.
            logprobs: Tell the log-probability of every token of the prompt (`prompt.logprobs`), and of so many of the
                likeliest in its place (`prompt.top`), once it is read.

        >>> engine = Engine("gsa-tiny")
        >>> prompt = engine.prompt([10, 11, 12])
        >>> len([engine.generate(prompt, one).tokens for one in Sampling(max_tokens=5, seed=1).several(3)])
        3
        """
        return self._prompt("prompt", ids, state, marks, salt, reuse, logprobs)

    def submit(
        self,
        ids: Ids | Prompt,
        sampling: Sampling = DEFAULT,
        *,
        state: State | None = None,
        keep_state: bool = False,
        until: Until | None = None,
    ) -> Generation:
        """A request that starts in one of the next steps, when there is a place for it.

        It answers a prompt, or ids. Those go on from a state if one is given, which stays as it is; then there may be
        none. With `keep_state`, the state at its end is kept. `until` is called with every token as it comes, in
        whichever thread makes the step, and ends the request if it says true; if it raises, the request ends with that
        as its error. It may cancel requests, which then end with the step, and must ask nothing else of the engine.
        """
        request = self._request("submit", ids, sampling, state, keep_state)
        request.until = until
        self._scheduler.add(request)
        return request.generation

    def step(self) -> list[Token]:
        """The tokens of one round. There may be none while long prompts are read; see `busy`.

        If it is interrupted, requests that run end with an error, those that wait do not, and the engine stays usable.
        """
        return self._scheduler.step()

    def stream(
        self, ids: Ids | Prompt, sampling: Sampling = DEFAULT, *, state: State | None = None, keep_state: bool = False
    ) -> Generator[Token, None, None]:
        """The tokens of one request as they come. It is cancelled when the iterator is closed.

        Other requests go on with it.
        """
        return self._streamed(self._request("stream", ids, sampling, state, keep_state))

    @overload
    def generate(
        self,
        prompts: Ids | Prompt,
        sampling: Sampling = DEFAULT,
        *,
        state: State | None = None,
        keep_state: bool = False,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Ids | Prompt],
        sampling: Sampling | Sequence[Sampling] = DEFAULT,
        *,
        state: State | None = None,
        keep_state: bool = False,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompts: Ids | Prompt | Sequence[Ids | Prompt],
        sampling: Sampling | Sequence[Sampling] = DEFAULT,
        *,
        state: State | None = None,
        keep_state: bool = False,
    ) -> Completion | list[Completion]:
        """What comes of a prompt, or of each of several, which may have settings of their own. All go on from the same
        state if one is given."""
        one = _is_one(prompts)
        each = cast("list[Ids | Prompt]", [prompts] if one else list(cast("Sequence[Ids | Prompt]", prompts)))
        settings = [sampling] * len(each) if isinstance(sampling, Sampling) else sampling
        if not isinstance(settings, list | tuple) or len(settings) != len(each) or (one and settings is sampling):
            raise GSAError(f"generate: sampling must be a Sampling, or one for each of several prompts ({len(each)})")
        pairs = zip(each, settings, strict=True)
        requests = [self._request("generate", ids, own, state, keep_state) for ids, own in pairs]
        try:
            self._scheduler.add(*requests)
            completions = [self._completed(request.generation) for request in requests]
        finally:
            self._scheduler.cancel(*(request.generation for request in requests))
        return completions[0] if one else completions

    def read(self, ids: Ids, state: State | None = None, progress: Callable[[int], None] | None = None) -> State:
        """The state after a document of any length, from the beginning or from a state.

        `progress` is called after every piece with the number of ids read so far.
        """
        prompt = self._prompt("read", ids, state, reuse=False)
        while not prompt.done:
            with memory_errors("read"):
                prompt.advance()
            if progress is not None:
                progress(prompt.position)
        assert prompt.state is not None
        assert prompt.scores is not None
        with memory_errors("read"):
            state_after = prompt.source.snapshot(prompt.state.clone(), prompt.scores.clone(), len(prompt))
        if not is_finite(state_after):
            raise GSAError(f"read: {NOT_FINITE}")
        return state_after

    def _completed(self, generation: Generation) -> Completion:
        while not generation.done:
            self.step()
        return generation.completion()

    def _streamed(self, request: Request) -> Generator[Token, None, None]:
        generation, sent = request.generation, 0
        try:
            self._scheduler.add(request)
            while True:
                done = generation.done  # asked first: another thread may add the last token at any moment
                if sent < len(generation.tokens):
                    yield generation.token(sent)
                    sent += 1
                elif done:
                    break
                else:
                    self.step()
            generation.completion()  # raises if it ended with an error
        finally:
            generation.cancel()

    def _prompt(
        self,
        what: str,
        ids: Ids,
        state: State | None,
        marks: Sequence[int] = (),
        salt: str = "",
        reuse: bool = True,
        logprobs: int | None = None,
        more: int = 0,
    ) -> Prompt:
        """A prompt that can be read, from a state that fits, and go on for so many tokens more."""
        checked = checked_ids(ids, self.model.vocab_size, what)
        if state is None:
            if not len(checked):
                raise GSAError(f"{what}: there are no ids, and there is no state to go on from")
        elif not isinstance(state, State):
            raise GSAError(f"{what}: state must be a gsa.State, got {type(state).__name__}")
        else:
            with raised_by(what):
                state.check(self.model, len(checked) + more)
        check(_PromptOptions(salt, reuse, logprobs), what)
        if not isinstance(marks, list | tuple) or len(marks) > MAX_MARKS:
            raise GSAError(f"{what}: marks must be a list of at most {MAX_MARKS}, got {quoted(marks)}")
        for mark in marks:
            if type(mark) is not int or not 1 <= mark <= len(checked):
                raise GSAError(f"{what}: marks must be from 1 to {len(checked)} (the tokens), got {quoted(mark)}")
        cache = self.cache if reuse else None
        prompt = Prompt(self._runner, checked, state, cache=cache, salt=salt, marks=marks, logprobs=logprobs)
        prompt.source.prepare()
        return prompt

    def _request(
        self, what: str, ids: Ids | Prompt, sampling: Sampling, state: State | None, keep_state: bool
    ) -> Request:
        if not isinstance(sampling, Sampling):
            raise GSAError(f"{what}: sampling must be a Sampling, got {type(sampling).__name__}")
        vocab_size = self.model.vocab_size
        for name in ("stop", "logit_bias"):
            for token in getattr(sampling, name):
                if token >= vocab_size:
                    raise GSAError(f"{what}: {name} has the id {token}, the vocabulary ends with {vocab_size - 1}")
        if isinstance(ids, Prompt):
            prompt = ids
            if not prompt.is_of(self._runner):
                raise GSAError(f"{what}: the prompt is of another engine")
            if state is not None:
                raise GSAError(f"{what}: a prompt has its state already, so none can be given with it")
            if prompt.source.start is not None:
                with raised_by(what):
                    prompt.source.start.check_room(len(prompt) + sampling.max_tokens)
        else:
            prompt = self._prompt(what, ids, state, more=sampling.max_tokens)
        source = prompt.source
        generation = Generation(self._scheduler, next(self._ids), len(prompt), sampling)
        return Request(generation, source, prompt, Sampler(sampling, source.ids, vocab_size), keep_state)


def _loaded(model: Model | LM | str | Path, weights: str, compute: str, device: str) -> Model:
    if not isinstance(model, Model):
        if not isinstance(model, LM | str | Path):
            raise GSAError(f"engine: model must be a Model, an LM, a name or a folder, got {type(model).__name__}")
        return Model.load(model, weights, compute=compute, device=device)
    if weights not in ("auto", model.weights):
        raise GSAError(f"engine: weights {weights!r} were asked for, the model has {model.weights!r}")
    if compute not in ("auto", model.compute):
        raise GSAError(f"engine: compute {compute!r} was asked for, the model has {model.compute!r}")
    if device not in ("auto", model.device.type, str(model.device)):
        raise GSAError(f"engine: device {device!r} was asked for, the model is on {str(model.device)!r}")
    return model


def _is_one(prompts: object) -> bool:
    """Whether this is one prompt, which may be empty, and not several."""
    if not isinstance(prompts, list | tuple):
        return True
    return not any(isinstance(ids, list | tuple | Tensor | np.ndarray | Prompt) for ids in prompts)
