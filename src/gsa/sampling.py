"""Sampling: how a text is continued. Its defaults are those of Python and of the command line alike.

This module needs no torch, so that the help of a command can tell the defaults at once.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from gsa.errors import GSAError
from gsa.options import MOST, SEED, check, number
from gsa.terminal import quoted

ANY = sys.float_info.max  # every number is of use here


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a request is continued. Filters mean what they mean in transformers, and are applied in this order:
    repetition penalty, temperature, top-k, top-p, min-p.

    >>> Sampling(max_tokens=64, temperature=0.5, seed=1).top_p
    0.95
    >>> Sampling(temperature=0).greedy
    True
    """

    max_tokens: int = number(512, least=0, most=10**9)
    """Tokens at most; 0 reads the prompt and says nothing."""
    temperature: float = number(0.8, least=0, most=ANY)
    """What scores are divided by; 0 always takes the likeliest token, of several the one with the lowest id."""
    top_k: int = number(0, least=0)
    """So many of the likeliest tokens are left, and those as likely as the last of them; 0 leaves all."""
    top_p: float = number(0.95, least=0, most=1)
    """The likeliest tokens that together have this probability are left, at least one; of equals, lower ids first."""
    min_p: float = number(0.0, least=0, most=1)
    """Tokens with at least this share of the likeliest one's probability are left."""
    repetition_penalty: float = number(1.0, above=0, most=ANY)
    """What positive scores are divided by, and negative ones multiplied with, of tokens that stand in the request's
    prompt or in what came out; tokens that were read into a state earlier are not known."""
    seed: int | None = number(None, least=0, most=SEED)
    """Of the random numbers; without one, they differ each time."""
    stop: tuple[int, ...] = ()
    """Tokens that end the text; they are not part of it."""
    logprobs: int | None = number(None, least=0)
    """With each token, report its log-probability and this many of the likeliest tokens with theirs. They are the
    model's own, before penalty and temperature."""

    def __post_init__(self) -> None:
        check(self, "sampling")
        for token in self.stop:
            if type(token) is not int or not 0 <= token <= MOST[int]:
                raise GSAError(f"sampling: stop must hold ids of tokens, got {quoted(token)}")

    @property
    def greedy(self) -> bool:
        """Whether no chance is involved."""
        return self.temperature == 0

    @property
    def penalises(self) -> bool:
        """Whether earlier tokens matter."""
        return self.repetition_penalty != 1


DEFAULT = Sampling()
"""What holds where nothing else is asked for."""
