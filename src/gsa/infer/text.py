"""Text in, text out: an engine with a tokenizer. Text is given as soon as no later token can change it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from weakref import WeakMethod, finalize

import numpy as np
from numpy.typing import NDArray

from gsa.data.tokenizer import Tokenizer, load_tokenizer
from gsa.data.vocabulary import vocabulary
from gsa.errors import GSAError, raised_by
from gsa.files import read_json
from gsa.infer.detokenizer import Detokenizer
from gsa.infer.engine import READ_TOKENS, Engine
from gsa.infer.model import Model, chosen_device
from gsa.infer.reading import Ids, Prompt
from gsa.infer.requests import Alternatives, Token, Until
from gsa.infer.state import State
from gsa.infer.stop_strings import StopStrings
from gsa.sampling import DEFAULT, Sampling
from gsa.train.find import find_model, read_live, warn

GENERATION = "generation_config.json"
ADVISED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields of it that say how to sample, if it says `do_sample`. They mean there what they mean here."""
ENDS = (GENERATION, "config.json")
"""Files beside a model that may name tokens which end a text."""

MARKED = 4
"""Messages of a conversation behind which states are kept; each takes memory, and nearly all that comes goes on from
the last ones."""


@dataclass(frozen=True)
class Piece:
    """What one round of the engine brought: nothing while the prompt is read, else a token and the text it made final.

    The last piece has no token; it has the rest of the text and the reason of the end ("length", "stop" or
    "cancelled").
    """

    text: str = ""
    token: Token | None = None
    reason: str | None = None
    length: int = 0
    """Characters of the text that the token has made final, also those that are held back because a stop string may
    begin there."""


class TextEngine:
    """An engine with a tokenizer, which continues texts; what `gsa.load` gives is a simpler view of it.

    >>> engine = TextEngine.load("gsa-tiny")
    >>> "".join(piece.text for piece in engine.stream("She was", Sampling(max_tokens=10, temperature=0)))
    ' very well, but she was not\\na little'
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        ends: Iterable[int] = (),
        advised: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """`ends`: tokens that end a text beside the tokenizer's own. `advised`: how its makers sample from it."""
        self.engine, self.tokenizer, self.advised = engine, tokenizer, dict(advised)
        # An id beyond the model's vocabulary never comes.
        self.ends = tuple(sorted(end for end in {tokenizer.eos_id, *ends} if end < engine.model.vocab_size))

    def as_advised(self, sampling: Sampling, given: Mapping[str, float | None]) -> Sampling:
        """The settings; those of which nothing was given (None, or not there) are as the model's makers advise, if
        they do."""
        advised = {name: value for name, value in self.advised.items() if given.get(name) is None}
        return replace(sampling, **advised)  # type: ignore[arg-type]

    @classmethod
    def load(
        cls,
        model: str | Path = "gsa-tiny",
        weights: str = "auto",
        *,
        compute: str = "auto",
        device: str = "auto",
        batch_size: int = 1,
        state_cache_bytes: int = 0,
        state_dir: str | Path | None = None,
        state_dir_bytes: int = 4 << 30,
        reading: str = "auto",
        read_tokens: int = READ_TOKENS,
        say: Callable[[str], None] = warn,
    ) -> TextEngine:
        """A model by name or folder, as `find_model` finds it, with the tokenizer beside its weights.

        Options are those of `Engine`. Broken checkpoints of a run that are passed over are told to `say`.
        """
        chosen_device(device, weights, compute)  # refuses what cannot be, before a model is fetched or read

        def read() -> TextEngine:
            folder = find_model(model, say).folder
            engine = Engine(
                Model.from_folder(folder, weights, compute=compute, device=device),
                batch_size=batch_size,
                state_cache_bytes=state_cache_bytes,
                state_dir=state_dir,
                state_dir_bytes=state_dir_bytes,
                reading=reading,
                read_tokens=read_tokens,
                say=say,
            )
            return cls.beside(folder, engine)

        return read_live(model, read)

    @classmethod
    def beside(cls, folder: Path, engine: Engine) -> TextEngine:
        """An engine with the tokenizer in the folder of its model."""
        tokenizer, size = load_tokenizer(folder), engine.model.vocab_size
        if tokenizer.vocab_size > size:  # a smaller one is usual: models have room for more
            raise GSAError(
                f"{folder}: the tokenizer does not fit the model: it has a vocabulary of {tokenizer.vocab_size:,}, the "
                f"model of {size:,}"
            )
        return cls(engine, tokenizer, _ends(folder), _advised(folder))

    def encode(self, text: str, *, continues: bool = False) -> NDArray[np.int64]:
        """The ids of a text; unless it continues another, behind what the tokenizer puts in front of one."""
        (ids,) = self.tokenizer.encode([text], continues=continues)
        lead = () if continues else vocabulary(self.tokenizer).lead
        return np.concatenate([np.asarray(lead, np.int64), ids.astype(np.int64)])

    def message_ends(self, ids: Ids) -> list[int]:
        """After how many of these ids messages end, of the last few: places at which a conversation may be told
        differently, as `Engine.prompt` takes them for `marks`."""
        return [i + 1 for i, id_ in enumerate(np.asarray(ids).tolist()) if id_ in self.ends][-MARKED:]

    def stream(
        self,
        prompt: str | NDArray[Any] | Prompt,
        sampling: Sampling = DEFAULT,
        *,
        stop: str | Sequence[str] | None = (),
        state: State | None = None,
        keep_state: bool = False,
        continues: bool = True,
    ) -> Writing:
        """Continues a prompt, which itself continues what a state has read; ids are taken as they are, and so is a
        prompt of the engine, which may be continued more than once.

        The text ends before the first of the `stop` strings. With `continues` False a space in front of its first
        word is left out, as tokenizers do that put one there.
        """
        ids = self.encode(prompt, continues=state is not None) if isinstance(prompt, str) else prompt
        text, stops = Detokenizer(self.tokenizer, continues=continues), StopStrings(stop)
        sampling = replace(sampling, stop=(*sampling.stop, *self.ends))
        return Writing(self.engine, ids, sampling, text, stops, state=state, keep_state=keep_state)


class Writing(Iterator[Piece]):
    """A text being written: an iterator of pieces, which can be cancelled at any time.

    A step of the engine makes tokens of all its requests, so tokens of this one may come while another text is asked
    for, in this thread or in another. Each becomes text when it comes, and waits here until it is asked for.
    """

    def __init__(
        self,
        engine: Engine,
        ids: Ids | Prompt,
        sampling: Sampling,
        text: Detokenizer,
        stops: StopStrings,
        *,
        state: State | None,
        keep_state: bool,
    ) -> None:
        self.reason: str | None = None
        """Why it ended, once the last piece was given."""
        self._engine, self._text, self._stops = engine, text, stops
        self._made: list[tuple[str, int]] = []  # what each token let be given, and the length of what it made final
        self._given = 0
        self._found = False  # a stop string
        until = _while_alive(self._take)
        self.generation = engine.submit(ids, sampling, state=state, keep_state=keep_state, until=until)
        # Also while no token comes, because its prompt waits or is read.
        finalize(self, self.generation.abandon).atexit = False

    def _take(self, id_: int) -> bool:
        """Turns a token into text, and says whether a stop string is complete."""
        final = self._text.add(id_)
        text, self._found = self._stops.add(final)
        self._made.append((text, len(final)))
        return self._found

    def __next__(self) -> Piece:
        if self.reason is not None:
            raise StopIteration
        done = self.generation.done  # asked first: another thread may add the last token at any moment
        if self._given == len(self._made):
            if done:
                return self._last()
            self._step()
        if self._given == len(self._made):
            return Piece()
        self._given += 1
        text, length = self._made[self._given - 1]
        return Piece(text, self.generation.token(self._given - 1), length=length)

    def ready(self) -> list[Piece]:
        """The pieces that there are by now, for those who make the steps elsewhere; it waits for none."""
        pieces: list[Piece] = []
        while self.reason is None and (self._given < len(self._made) or self.generation.done):
            pieces.append(next(self))
        return pieces

    def _step(self) -> None:
        try:
            self._engine.step()
        except BaseException:
            self.close()
            raise

    def _last(self) -> Piece:
        """The rest of the text, and why there is no more."""
        self.reason = self.generation.reason
        if self.generation.error is not None:
            raise self.generation.error_type(self.generation.error)
        if self._found:
            return Piece(reason=self.reason)
        rest, found = self._stops.add(self._text.end())
        self.reason = "stop" if found else self.reason
        return Piece(rest + self._stops.end(), reason=self.reason)

    def cancel(self) -> None:
        """Ends it; what was made and not yet given is still given."""
        self.generation.cancel()

    def close(self) -> None:
        """Ends it without another piece."""
        self.generation.cancel()
        self.reason = self.reason or self.generation.reason

    def rest(self) -> Text:
        """All that has not been given yet, as one text."""
        try:
            return Text.of("".join(piece.text for piece in self), self)
        finally:
            self.close()


def _while_alive(take: Callable[[int], bool]) -> Until:
    """Calls a method until its object is gone: a text that nobody waits for any more ends with the next token."""
    weak = WeakMethod(take)

    def until(id_: int) -> bool:
        alive = weak()
        return alive is None or alive(id_)

    return until


class Text(str):
    """A text that was written. It is a str, and knows how it came about.

    >>> text = TextEngine.load("gsa-tiny").stream("She was", Sampling(max_tokens=2, temperature=0)).rest()
    >>> text, text.reason, len(text.tokens)
    (' very well', 'length', 2)
    """

    reason: str = ""
    """Why it ended: "length" after `max_tokens`, "stop" at a stop string or where the model ended it, "cancelled"."""
    tokens: list[int]
    """Ids of all tokens that were made for it; those of a stop string are among them."""
    prompt_tokens: int
    """Tokens of the prompt."""
    cached_tokens: int
    """Those of them that were not read again, because a state behind them was kept."""
    logprobs: list[float] | None = None
    """Log-probabilities of its tokens, if asked for."""
    top: list[Alternatives] | None = None
    """The likeliest tokens in the place of each, if asked for."""
    state: State | None = None
    """The state behind its last token, if it was to be kept."""

    @classmethod
    def of(cls, text: str, writing: Writing) -> Text:
        """The text that was written, with what is known of its writing."""
        written, generation = cls(text), writing.generation
        written.reason = writing.reason or ""
        written.tokens, written.prompt_tokens = [*generation.tokens], generation.prompt_tokens
        written.cached_tokens = generation.cached_tokens
        written.logprobs = None if generation.logprobs is None else [*generation.logprobs]
        written.top = None if generation.top is None else [*generation.top]
        written.state = generation.kept
        return written


def _advised(folder: Path) -> dict[str, float]:
    """Options of `Sampling` that the makers of a model advise, if they do."""
    path = folder / GENERATION
    fields = read_json(path) if path.exists() else {}
    if fields.get("do_sample") is not True:
        return {}
    found = {name: fields[name] for name in ADVISED if fields.get(name) is not None}
    with raised_by(str(path)):
        Sampling(**found)
    return found


def _ends(folder: Path) -> list[int]:
    """The tokens that end a text by the files beside a model."""
    found: list[int] = []
    for path in (folder / name for name in ENDS):
        ends = read_json(path).get("eos_token_id") if path.exists() else None
        for end in ends if isinstance(ends, list) else [ends]:
            if end is not None and (type(end) is not int or end < 0):
                raise GSAError(f"{path}: eos_token_id must be a token or a list of them, got {ends!r}")
            found += [] if end is None else [end]
    return found
