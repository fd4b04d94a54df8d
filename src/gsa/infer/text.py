"""Text in, text out: an engine with a tokenizer. Text is given as soon as no later token can change it."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gsa.data.tokenizer import Tokenizer, load_tokenizer
from gsa.errors import GSAError
from gsa.files import read_json
from gsa.infer.engine import Engine
from gsa.infer.model import Model, check_format
from gsa.infer.requests import Generation, Token
from gsa.infer.sampling import Sampling
from gsa.infer.state import State
from gsa.infer.vocabulary import vocabulary
from gsa.train.find import find_model, warn

CONTEXT = 4
"""Ids before the new ones that are decoded with them: a token's text depends on whether others stand before it."""
ENDS = ("generation_config.json", "config.json")
"""Files beside a model that may name tokens which end a text."""


class Detokenizer:
    """Gives the text of ids that come one by one; all of it together is what `tokenizer.decode` gives of all ids.

    With `continues`, it is the text that these ids add to an earlier one: a space in front of the first word stays.
    An id that the tokenizer does not know (models may have room for more) is no text.

    >>> text = Detokenizer(load_tokenizer("bytes"))
    >>> [text.add(id) for id in [72, 195, 169]], text.end()
    (['H', '', 'é'], '')
    """

    def __init__(self, tokenizer: Tokenizer, *, continues: bool = False) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary(tokenizer)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[int] = tokenizer.encode(["a"])[0].tolist() if continues else []
        self._waiting: list[int] = []

    def add(self, id_: int) -> str:
        """The text that has become final with this id; none if it may still change."""
        if id_ >= self._tokenizer.vocab_size:
            return ""
        if self._vocabulary.spelt is not None:
            return self._utf8.decode(self._vocabulary.spelt[id_])
        self._waiting.append(id_)
        return "" if id_ in self._vocabulary.in_runs else self._decoded(final=False)

    def end(self) -> str:
        """The rest: bytes that are no UTF-8 without more become U+FFFD. After it another text may begin."""
        if self._vocabulary.spelt is not None:
            return self._utf8.decode(b"", final=True)
        return self._decoded(final=True)

    def _decoded(self, *, final: bool) -> str:
        ids = self._context + self._waiting
        text = self._tokenizer.decode(ids)[len(self._tokenizer.decode(self._context)) :]
        if not final and self._vocabulary.joins_bytes and text.endswith("\ufffd"):
            return ""
        self._context, self._waiting = ids[-CONTEXT:], []
        return text


def detokenized(tokenizer: Tokenizer, ids: Iterable[int], *, continues: bool = False) -> str:
    """The text of all ids."""
    text = Detokenizer(tokenizer, continues=continues)
    return "".join([*map(text.add, ids), text.end()])


class StopStrings:
    """Lets text pass until a stop string stands in it; what may be the beginning of one waits.

    The stop string that is complete first counts, of two that end together the longer; how the text was cut into
    pieces makes no difference.

    >>> stops = StopStrings(["\\n\\n", "END"])
    >>> stops.add("a\\nE"), stops.add("Nb"), stops.add("\\n"), stops.add("\\nc")
    (('a\\n', False), ('ENb', False), ('', False), ('', True))
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        for stop in self._stops:
            if not isinstance(stop, str) or not stop:
                raise GSAError(f"stop strings must be texts of at least one character, got {stop!r}")
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """The text to show, and whether a stop string was found, which is not shown."""
        held = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := held.find(stop)) >= 0]
        if found:
            self._held = ""
            _, start = min(found)  # the one that ends first; of two that end together the longer
            return held[:start], True
        show = len(held) - self._begun(held)
        self._held = held[show:]
        return held[:show], False

    def end(self) -> str:
        """What was held back."""
        rest, self._held = self._held, ""
        return rest

    def _begun(self, text: str) -> int:
        """How many characters at the end of a text may be the beginning of a stop string."""
        for count in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stops):
                return count
        return 0


@dataclass(frozen=True)
class Piece:
    """What one round of the engine brought: nothing while the prompt is read, else a token and the text it made final.

    The last piece has no token; it has the rest of the text and the reason of the end ("length", "stop" or
    "cancelled").
    """

    text: str = ""
    token: Token | None = None
    reason: str | None = None


class TextEngine:
    """Continues texts.

    >>> engine = TextEngine.load("gsa-tiny")
    >>> for piece in engine.stream("Call me", Sampling(max_tokens=20)):
    ...     print(piece.text, end="")
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, ends: Iterable[int] = ()) -> None:
        """`ends`: tokens that end a text beside the tokenizer's own."""
        self.engine, self.tokenizer = engine, tokenizer
        # An id beyond the model's vocabulary never comes.
        self.ends = tuple(sorted(end for end in {tokenizer.eos_id, *ends} if end < engine.model.vocab_size))

    @classmethod
    def load(
        cls,
        model: str | Path = "gsa-tiny",
        weights: str = "auto",
        *,
        batch_size: int = 1,
        say: Callable[[str], None] = warn,
    ) -> TextEngine:
        """A model by name or folder, as `find_model` finds it, with the tokenizer beside its weights.

        Broken checkpoints of a run that are passed over are told to `say`.
        """
        check_format(weights)  # before a model is fetched or read
        folder = find_model(model, say).folder
        engine = Engine(Model.from_folder(folder, weights), batch_size=batch_size)
        tokenizer, size = load_tokenizer(folder), engine.model.vocab_size
        if tokenizer.vocab_size > size:  # a smaller one is usual: models have room for more
            raise GSAError(
                f"{folder}: the tokenizer does not fit the model: it has a vocabulary of {tokenizer.vocab_size:,}, the "
                f"model of {size:,}"
            )
        return cls(engine, tokenizer, _ends(folder))

    def encode(self, text: str, *, continues: bool = False) -> NDArray[np.int64]:
        """The ids of a text; unless it continues another, behind what the tokenizer puts in front of one."""
        (ids,) = self.tokenizer.encode([text], continues=continues)
        lead = () if continues else vocabulary(self.tokenizer).lead
        return np.concatenate([np.asarray(lead, np.int64), ids.astype(np.int64)])

    def stream(
        self,
        prompt: str | NDArray[Any],
        sampling: Sampling | None = None,
        *,
        stop: Sequence[str] = (),
        state: State | None = None,
        keep_state: bool = False,
        continues: bool = True,
    ) -> Writing:
        """Continues a prompt, which itself continues what a state has read; ids are taken as they are.

        The text ends before the first of the `stop` strings. With `continues` False a space in front of its first
        word is left out, as tokenizers do that put one there.
        """
        ids = self.encode(prompt, continues=state is not None) if isinstance(prompt, str) else prompt
        sampling = sampling or Sampling()
        stops = StopStrings(stop)
        sampling = replace(sampling, stop=(*sampling.stop, *self.ends))
        generation = self.engine.submit(ids, sampling, state=state, keep_state=keep_state)
        return Writing(self.engine, generation, Detokenizer(self.tokenizer, continues=continues), stops)


class Writing:
    """A text being written: an iterator of pieces, which can be cancelled at any time."""

    def __init__(self, engine: Engine, generation: Generation, text: Detokenizer, stops: StopStrings) -> None:
        self.generation = generation
        self._engine, self._text, self._stops = engine, text, stops
        self._pieces = self._run()

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def cancel(self) -> None:
        """Ends it; what was made and not yet given is given as the last piece."""
        self.generation.cancel()

    def close(self) -> None:
        """Ends it without another piece."""
        self._pieces.close()
        self.generation.cancel()

    def _run(self) -> Generator[Piece, None, None]:
        generation, found = self.generation, False
        try:
            while not (found or generation.done):
                mine = [token for token in self._engine.step() if token.request is generation]
                for token in mine:
                    text, found = self._stops.add(self._text.add(token.id))
                    if found:
                        generation.cancel()  # at once: who reads the piece may take long
                    yield Piece(text, token)
                if not mine:
                    yield Piece()
        finally:
            generation.cancel()
        if generation.error is not None:
            raise GSAError(generation.error)
        rest, found_last = ("", True) if found else self._stops.add(self._text.end())
        yield Piece(rest + self._stops.end(), reason="stop" if found_last else generation.reason)


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
