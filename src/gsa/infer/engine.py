"""Engine: requests that start, go on and end at any time, decoded together. Ids in, ids out; it knows no tokenizer.

A step reads one piece of the prompts that wait for it, in turns, and then makes one token for every request whose
prompt is read. What a request gives does not depend on the others. Shape letters: V vocabulary, N requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import overload

import numpy as np
import torch
from torch import Tensor

from gsa.errors import GSAError
from gsa.infer.model import PIECE, Model
from gsa.infer.places import places
from gsa.infer.prefix import PrefixCache
from gsa.infer.reading import Ids, Reading, checked_ids
from gsa.infer.requests import Completion, Generation, Request, Token
from gsa.infer.sampling import Choice, Sampler, Sampling, choose
from gsa.infer.state import State
from gsa.models.lm import LM
from gsa.options import check, number

DEFAULT = Sampling()


@dataclass(frozen=True)
class _Options:
    batch_size: int = number(least=1)
    prefix_bytes: int = number(least=0)


class Engine:
    """Generates from a model: a `Model`, an `LM`, a name ("gsa-tiny") or a folder.

    Args:
        model: What generates.
        weights: Format of the weights: "fp32", "bf16", "int8", "int4", or "auto".
        batch_size: Requests that are decoded together; others wait.
        prefix_bytes: Memory for the states of earlier prompts, from which prompts that begin alike go on; 0 is none.

    >>> engine = Engine("gsa-tiny")
    >>> len(engine.generate([10, 11, 12], Sampling(max_tokens=5)).tokens)
    5
    """

    def __init__(
        self,
        model: Model | LM | str | Path = "gsa-tiny",
        *,
        weights: str = "auto",
        batch_size: int = 16,
        prefix_bytes: int = 0,
    ):
        check(_Options(batch_size, prefix_bytes), "engine")
        self.model = _loaded(model, weights)
        self.batch_size = batch_size
        self.prefixes = PrefixCache(prefix_bytes) if prefix_bytes else None
        """What is remembered of earlier prompts."""
        self._places = places(self.model, batch_size)
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}  # by place
        self._reading: deque[Request] = deque()  # those of the running whose prompt is not read yet, the next one first
        self._ids = count()

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._waiting or self._running)

    def submit(
        self, ids: Ids, sampling: Sampling = DEFAULT, *, state: State | None = None, keep_state: bool = False
    ) -> Generation:
        """A request that starts in one of the next steps, when there is a place for it.

        It goes on from a state if one is given, which stays as it is; then there may be no ids. With `keep_state`, the
        state at its end is kept.
        """
        request = self._request("submit", ids, sampling, state, keep_state)
        self._waiting.append(request)
        return request.generation

    def step(self) -> list[Token]:
        """The tokens of one round. There may be none while long prompts are read; see `busy`.

        If it is interrupted, requests that run end with an error, those that wait do not, and the engine stays usable.
        """
        try:
            with torch.inference_mode():
                self._admit()
                self._read_prompts()
                return self._decode()
        except BaseException as error:
            for request in self._running.values():
                self._fail(request, f"the engine's step ended with {type(error).__name__}: {error}")
            raise
        finally:
            self._clear_places()

    def stream(
        self, ids: Ids, sampling: Sampling = DEFAULT, *, state: State | None = None, keep_state: bool = False
    ) -> Generator[Token, None, None]:
        """The tokens of one request as they come. It is cancelled when the iterator is closed.

        Other requests go on with it.
        """
        return self._streamed(self._request("stream", ids, sampling, state, keep_state))

    @overload
    def generate(
        self,
        prompts: Sequence[int] | Tensor | np.ndarray,  # type: ignore[type-arg]
        sampling: Sampling = DEFAULT,
        *,
        state: State | None = None,
        keep_state: bool = False,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Ids],
        sampling: Sampling | Sequence[Sampling] = DEFAULT,
        *,
        state: State | None = None,
        keep_state: bool = False,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompts: Ids | Sequence[Ids],
        sampling: Sampling | Sequence[Sampling] = DEFAULT,
        *,
        state: State | None = None,
        keep_state: bool = False,
    ) -> Completion | list[Completion]:
        """What comes of a prompt, or of each of several; settings may be given for each. All go on from the same state
        if one is given."""
        ...
