"""Length extrapolation: how well the same tokens are predicted with more text before them, and what that costs.

For each length, contexts of so many tokens are read that all end in the same places of a text, so that every length is
asked for the same tokens, the last ones of each context. Beside the loss stand the tokens read in a second, the memory
that reading took, and the size of what the model keeps of a context.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gsa.bench.memory import forget_peak, gpu_peak, measurable, peak, resident
from gsa.errors import GSAError
from gsa.eval.journal import Journal
from gsa.eval.losses import Passage, perplexity, pieces
from gsa.eval.progress import Progress
from gsa.eval.sums import LARGEST

if TYPE_CHECKING:
    from gsa.eval.reader import Reader


def ends(read: Sequence[Passage], longest: int, samples: int) -> list[NDArray[np.int32]]:
    """Contexts of `longest` tokens and one in front, from all over the passages, which are joined if they are short.

    Each id that begins a passage stays where it is, and parts the texts.
    """
    whole = [passage.ids for passage in read if len(passage.ids) > longest]
    texts = whole or [np.concatenate([passage.ids for passage in read])]
    room = [len(ids) - longest for ids in texts]
    if room[0] < 1:
        raise GSAError(
            f"perplexity: a context of {longest:,} tokens is longer than all texts together, which have "
            f"{len(texts[0]):,}; expected shorter --lengths, or more text"
        )
    # Evenly over all places where a context can begin.
    starts = np.linspace(0, sum(room) - 1, samples).astype(int) if samples > 1 else np.array([sum(room) // 2])
    bounds = np.cumsum([0, *room])
    found = []
    for start in dict.fromkeys(starts.tolist()):
        text = int(np.searchsorted(bounds, start, side="right")) - 1
        begin = start - int(bounds[text])
        found.append(texts[text][begin : begin + longest + 1])
    return found


def extrapolate(
    reader: Reader,
    contexts: Sequence[NDArray[np.int32]],
    lengths: Sequence[int],
    *,
    last: int,
    journal: Journal,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """A row for each length: losses of the last tokens of every context, tokens a second, bytes of memory and state."""
    asked = enumerate(length for length in lengths for _ in contexts)
    left = sum(length for number, length in asked if number not in journal.answers)
    before = resident() if measurable() else 0
    if left:
        reader.log_probs(contexts[0][: min(lengths) + 1].tolist())  # what is made once, at the first use
    with Progress(left, "tokens", quiet=quiet) as progress:
        rows: list[dict[str, Any]] = []
        for length in lengths:
            answers: list[dict[str, Any]] = []
            for context in contexts:
                number = len(rows) * len(contexts) + len(answers)
                if number not in journal.answers:
                    journal.add(number, _read(reader, context[-length - 1 :], last, before))
                    progress.advance(length)
                answers.append(journal.answers[number])
            rows.append(_row(length, answers))
    return rows


def fits(answer: Any) -> bool:
    """Whether something from JSON is what reading a context gives."""
    numbers = ("loss", "seconds", "peak_bytes", "state_bytes")
    if not isinstance(answer, dict) or set(answer) != set(numbers):
        return False
    known = [answer[name] for name in numbers if name != "peak_bytes" or answer[name] is not None]
    return all(type(value) in (int, float) and 0 <= value < LARGEST for value in known) and answer["seconds"] > 0


def _row(length: int, answers: list[dict[str, Any]]) -> dict[str, Any]:
    memory = [answer["peak_bytes"] for answer in answers if answer["peak_bytes"] is not None]
    loss = math.fsum(answer["loss"] for answer in answers) / len(answers)
    return {
        "length": length,
        "loss": loss,
        "perplexity": perplexity(loss),
        "losses": [answer["loss"] for answer in answers],
        "tokens_per_second": length * len(answers) / sum(answer["seconds"] for answer in answers),
        "peak_bytes": max(memory, default=None),
        "state_bytes": answers[-1]["state_bytes"],
    }


def _read(reader: Reader, ids: NDArray[np.int32], last: int, before: int) -> dict[str, Any]:
    """Reads a context, and measures that; `before` is what memory was in use when nothing had been read."""
    nats: list[NDArray[np.float64]] = []
    states: list[object] = []

    def work() -> None:
        for piece in pieces(reader, ids):
            nats.append(piece.nats)
            states[:] = [piece.state]

    began = time.perf_counter()
    used = _peak_of(reader, work, before)
    seconds = time.perf_counter() - began
    return {
        "loss": float(np.concatenate(nats)[-last:].mean()),
        "seconds": seconds,
        "peak_bytes": used,
        "state_bytes": tensor_bytes(states[0]),
    }


def _peak_of(reader: Reader, work: Callable[[], None], before: int) -> int | None:
    """Bytes at the peak of some work beyond those that were in use before; None where the system does not tell."""
    if str(reader.about.get("device", "cpu")).startswith("cuda"):
        return gpu_peak(work)
    if not measurable():
        work()
        return None
    forget_peak()
    work()
    return max(0, peak() - before)


def tensor_bytes(state: object) -> int:
    """Bytes of all tensors in a state, of whatever kind it is; what shares memory counts once."""
    from torch import Tensor

    seen: set[int] = set()
    storages: dict[int, int] = {}

    def visit(node: Any) -> None:
        if id(node) in seen:
            return
        seen.add(id(node))
        if isinstance(node, Tensor):
            storages[node.untyped_storage().data_ptr()] = node.untyped_storage().nbytes()
        elif isinstance(node, dict):
            for value in node.values():
                visit(value)
        elif isinstance(node, list | tuple):
            for value in node:
                visit(value)
        elif hasattr(node, "__dict__"):
            visit(vars(node))

    visit(state)
    return sum(storages.values())
