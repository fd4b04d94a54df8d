"""Loss, perplexity and bits per byte of a model on texts, by how much of a text stands before a token.

Every token of a document is predicted, the first one after the token that begins texts (or ends them, for tokenizers
that have no other). A document is read as a whole, or in windows of `context` tokens: each window goes on where the one
before ended, and sees one token before its first; with a `stride` below `context`, windows overlap, and each counts
only its last `stride` tokens, which all have at least context - stride + 1 tokens before them. The last window of a
document reaches back as far as it can.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gsa.console import tell
from gsa.errors import GSAError
from gsa.eval.journal import Journal
from gsa.eval.midway import Midway, Point
from gsa.eval.progress import Progress
from gsa.eval.standard_error import ratio_error
from gsa.eval.sums import NOTHING, Sums
from gsa.eval.texts import documents
from gsa.options import check_count

if TYPE_CHECKING:
    from gsa.eval.reader import Reader

PIECE = 2048
"""Tokens of a long text that are read between two signs of progress, at most."""
_LONGEST_TOKEN = 32
"""Characters of a token, generously: a text is cut to so many for each token that is wanted before it is encoded."""
_MOST_NATS = 709.0
"""Whose exponential is a number."""


class Window(NamedTuple):
    """Ids that are read, from `first` to before `end`, of which those from `begin` on count."""

    first: int
    begin: int
    end: int


@dataclass(frozen=True)
class Passage:
    """A document, or its beginning, as ids [1 + tokens]: a token that begins texts, then the text."""

    name: str
    ids: NDArray[np.int32]
    text_bytes: int
    digest: str = ""
    """Of the text of the whole document."""

    @property
    def tokens(self) -> int:
        return len(self.ids) - 1


def passages(
    reader: Reader, sources: Sequence[str], *, field: str, limit_tokens: int | None, say: Callable[[str], None]
) -> list[Passage]:
    """The documents of files as ids, up to so many tokens in all; the last one may be cut."""
    tokenizer, found = reader.tokenizer, []
    lead = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    room = math.inf if limit_tokens is None else limit_tokens
    for name, text in documents(sources, field, say):
        whole = len(text) <= _LONGEST_TOKEN * room
        ids = tokenizer.encode(text if whole else text[: int(_LONGEST_TOKEN * room)])
        cut = ids if whole and len(ids) <= room else ids[: int(room)]
        size = len(text.encode()) if len(cut) == len(ids) and whole else _bytes_of(reader, cut)
        if cut:
            digest = hashlib.sha256(text.encode()).hexdigest()
            found.append(Passage(name, np.array([lead, *cut], np.int32), size, digest))
            room -= len(cut)
        if room <= 0:
            break
    if not found:
        raise GSAError(f"perplexity: the tokenizer of {reader.name} finds no token in {', '.join(sources)}")
    return found


def _bytes_of(reader: Reader, ids: Sequence[int]) -> int:
    """Bytes of text that ids stand for; of a character that they begin but do not end, none."""
    return len(reader.tokenizer.decode(ids).rstrip("\ufffd").encode())


def windows(length: int, context: int | None, stride: int | None) -> Iterator[Window]:
    """The windows of a passage of so many ids.

    >>> list(windows(8, 4, 2))
    [Window(first=0, begin=1, end=5), Window(first=2, begin=5, end=7), Window(first=3, begin=7, end=8)]
    """
    if context is None:
        yield Window(0, 1, length)
        return
    begin, end = 1, min(1 + context, length)
    while begin < length:
        yield Window(end - 1 - min(context, end - 1), begin, end)
        begin, end = end, min(end + (stride or context), length)


class Piece(NamedTuple):
    """What came of some ids of a text, from `begin` to before `end`."""

    begin: int
    end: int
    nats: NDArray[np.float64]
    """The losses of these ids; the first of all ids has none."""
    state: object
    """After them."""


def pieces(reader: Reader, ids: NDArray[np.int32], read: int = 0, state: object = None) -> Iterator[Piece]:
    """Reads ids, a piece at a time, from where the first `read` of them were read and left this state."""
    # Pieces of about one size: for a very short one, models would have to be read in another way.
    size = max(len(ids) - 1, 1) if reader.rereads else PIECE
    borders = np.linspace(1, len(ids), -(-(len(ids) - 1) // size) + 1).astype(int).tolist()
    starts = [0, *borders[1:-1]]
    if read not in (*starts, len(ids)):
        raise GSAError(f"perplexity: a text of {len(ids):,} ids is read in pieces, none of which begins at {read:,}")
    for begin, end in zip(starts, borders[1:], strict=True):
        if begin < read:
            continue
        log_probs, state = reader.log_probs(ids[begin:end].tolist(), state)
        nats = -log_probs.double().cpu().numpy()
        if not np.isfinite(nats).all():
            wrong = int(np.flatnonzero(~np.isfinite(nats))[0])
            raise GSAError(
                f"perplexity: {reader.name} gives a loss of {nats[wrong]} for token {end - len(nats) + wrong}, "
                "expected a number"
            )
        yield Piece(begin, end, nats, state)


@dataclass(frozen=True)
class Outcome:
    """What was measured: the sums of each passage."""

    passages: list[Passage]
    sums: list[Sums]
    seconds: float

    @property
    def total(self) -> Sums:
        return sum(self.sums, NOTHING)

    @property
    def tokens(self) -> int:
        return int(self.total.tokens.sum())

    @property
    def text_bytes(self) -> int:
        return sum(passage.text_bytes for passage in self.passages)

    def metrics(self) -> dict[str, dict[str, Any]]:
        """Loss in nats a token, perplexity, bits per byte: values, and their standard errors over documents."""
        nats = [float(part.nats.sum()) for part in self.sums]
        tokens, sizes = zip(*((passage.tokens, passage.text_bytes) for passage in self.passages), strict=True)
        loss, error = math.fsum(nats) / sum(tokens), ratio_error(nats, tokens)
        values = {"loss": (loss, error), "perplexity": (perplexity(loss), error and perplexity(loss) * error)}
        if self.text_bytes:
            bits = [value / math.log(2) for value in nats]
            values["bits_per_byte"] = math.fsum(bits) / sum(sizes), ratio_error(bits, sizes)
        return {
            name: {"value": value, "stderr": stderr, "higher_is_better": False}
            for name, (value, stderr) in values.items()
        }

    def positions(self) -> list[dict[str, Any]]:
        """Loss by tokens before, a row for each power of two."""
        total = self.total
        return [
            {"from": 2**place, "to": 2 ** (place + 1) - 1, "tokens": int(count), "loss": float(nats / count)}
            for place, (count, nats) in enumerate(zip(total.tokens, total.nats, strict=True))
            if count
        ]


def perplexity(loss: float) -> float:
    """Of a loss in nats; inf where that is beyond all numbers."""
    return math.exp(loss) if loss < _MOST_NATS else math.inf


def measure(
    reader: Reader,
    read: list[Passage],
    *,
    context: int | None,
    stride: int | None,
    journal: Journal,
    midway: Midway,
    quiet: bool = False,
) -> Outcome:
    """The loss of all passages, window by window; those that the journal has are not read again.

    A window that was stopped midway is read from there.
    """
    began = time.monotonic()
    sums = [NOTHING for _ in read]
    asked = [(place, window) for place, part in enumerate(read) for window in windows(len(part.ids), context, stride)]
    left = sum(window.end - window.first for number, (_, window) in enumerate(asked) if number not in journal.answers)
    begun = midway.load()
    if begun is not None and begun.window not in journal.answers:
        if begun.window >= len(asked):
            raise GSAError(f"{midway.path}: there is no window {begun.window}; remove it to start anew")
        left -= begun.read
        name = read[asked[begun.window][0]].name
        tell(f"{midway.path}: goes on behind {begun.read:,} tokens of {name}")
    with Progress(left, "tokens", quiet=quiet) as progress:
        try:
            for number, (place, window) in enumerate(asked):
                if number not in journal.answers:
                    ids = read[place].ids[window.first : window.end]
                    point = begun if begun is not None and begun.window == number else Point(number, 0, NOTHING, None)
                    for piece in pieces(reader, ids, point.read, point.state):
                        point = Point(number, piece.end, point.sums + _counted(piece, window), piece.state)
                        midway.reached(point)
                        progress.advance(piece.end - piece.begin)
                    journal.add(number, point.sums.as_json())
                    midway.finished()
                sums[place] += Sums.from_json(journal.answers[number])
        except BaseException:
            midway.save()
            raise
    return Outcome(read, sums, time.monotonic() - began)


def _counted(piece: Piece, window: Window) -> Sums:
    """The losses of a piece of a window, without those that the window does not count."""
    first = piece.end - len(piece.nats)
    skipped = max(0, window.begin - window.first - first)
    return Sums.of(piece.nats[skipped:], first + skipped)


def checked_windows(reader: Reader, context: int | None, stride: int | None) -> tuple[int | None, int | None]:
    """The windows that a model reads: of `context` tokens, by default of as many as it may see at once."""
    check_count("perplexity: context", context)
    check_count("perplexity: stride", stride)
    limit = reader.max_length
    if context is not None and limit is not None and context > limit:
        raise GSAError(
            f"perplexity: context must be at most {limit}, which {reader.name} may see at once, got {context}"
        )
    context = limit if context is None else context
    if stride is not None and (context is None or stride > context):
        expected = "needs --context" if context is None else f"must be at most the context, {context}"
        raise GSAError(f"perplexity: stride {expected}, got {stride}")
    return context, stride
