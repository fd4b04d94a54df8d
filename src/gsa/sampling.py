"""Sampling: how a text is continued. Its defaults are those of Python and of the command line alike.

This module needs no torch, so that the help of a command can tell the defaults at once.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from hashlib import sha256

from gsa.errors import GSAError
from gsa.options import MOST, SEED, check, number
from gsa.terminal import quoted

ANY = sys.float_info.max  # every number is of use here


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a request is continued. Filters mean what they mean in transformers, and are applied in this order:
    repetition penalty, presence and frequency penalty, bias, temperature, top-k, top-p, min-p.

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
    presence_penalty: float = number(0.0)
    """What is taken from the score of a token that has come out already; below 0, added to it. The prompt does not
    count."""
    frequency_penalty: float = number(0.0)
    """The same for each time that it has come out."""
    logit_bias: dict[int, float] = field(default_factory=dict, hash=False)
    """What is added to the scores of some tokens, by their ids."""
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
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # nobody else may change it
        for token, bias in self.logit_bias.items():
            if type(token) is not int or not 0 <= token <= MOST[int]:
                raise GSAError(f"sampling: logit_bias must be given by ids of tokens, got {quoted(token)}")
            if type(bias) not in (int, float) or not abs(bias) <= MOST[float]:  # which also refuses NaN
                raise GSAError(f"sampling: logit_bias of {token} must be a finite number, got {quoted(bias)}")

    @property
    def greedy(self) -> bool:
        """Whether no chance is involved."""
        return self.temperature == 0

    @property
    def changes_scores(self) -> bool:
        """Whether scores are not taken as the model gives them."""
        changed = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return changed or bool(self.logit_bias)

    def several(self, count: int) -> list[Sampling]:
        """Settings for so many answers to one prompt: the first has these, the others seeds that follow from this one.

        >>> [one.seed for one in Sampling(seed=7).several(2)]
        [7, 3953241476459023457]
        """
        return [self, *(replace(self, seed=self._seed(i)) for i in range(1, count))][:count]

    def _seed(self, number: int) -> int | None:
        if self.seed is None:
            return None
        return int.from_bytes(sha256(f"answer {number} of {self.seed}".encode()).digest()[:8], "little")


DEFAULT = Sampling()
"""What holds where nothing else is asked for."""
