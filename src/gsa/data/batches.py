"""Tokens as training steps: rows of fixed length, shuffled, cut at documents, the same for any number of processes.

The tokens of a prepared folder are taken as one long line and cut into rows. Step i of a run takes the rows at
positions i * batch_size and following of the shuffled order; each process computes its own part. So the position in the
data is one number, the step, and neither processes nor loading workers change what a step learns from.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gsa.data.order import Shuffle
from gsa.errors import GSAError

if TYPE_CHECKING:
    from gsa.data.shards import Tokens


@dataclass(frozen=True)
class MicroBatch:
    """What goes through the model at once."""

    ids: Tensor
    """int64 tokens: [1, T] with `cu_seqlens`, else [B, T]."""
    cu_seqlens: Tensor | None
    """Where the sequences begin, and the end, [N+1]: rows, and documents in them."""
    targets: int
    """Number of tokens to be predicted: all but the first of each sequence."""


class Rows:
    """Rows of `length` tokens; the model forgets at the start of each, and if asked at the start of a document."""

    def __init__(self, tokens: Tokens, length: int, *, reset_at_documents: bool):
        self.tokens, self.length, self.reset_at_documents = tokens, length, reset_at_documents

    def __len__(self) -> int:
        """Number of whole rows."""
        return self.tokens.length // self.length

    def micro_batch(self, rows: list[int]) -> MicroBatch:
        """These rows, end to end if documents are kept apart, one below the other if not."""
        spans = [(row * self.length, min((row + 1) * self.length, self.tokens.length)) for row in rows]
        ids = torch.from_numpy(np.concatenate([self.tokens.read(*span) for span in spans]))
        if not self.reset_at_documents and len({end - begin for begin, end in spans}) == 1:
            return MicroBatch(ids.view(len(rows), -1), None, ids.numel() - len(rows))
        offsets = np.cumsum([0] + [end - begin for begin, end in spans])
        starts = [self._starts(*span) + offset for span, offset in zip(spans, offsets[:-1], strict=True)]
        cu_seqlens = torch.from_numpy(np.concatenate([*starts, offsets[-1:]]).astype(np.int64))
        return MicroBatch(ids[None], cu_seqlens, ids.numel() - len(cu_seqlens) + 1)

    def _starts(self, begin: int, end: int) -> NDArray[np.int64]:
        """Where sequences begin in a row, from its first token on."""
        inside = (
            self.tokens.document_starts(begin + 1, end) - begin if self.reset_at_documents else np.zeros(0, np.int64)
        )
        # A row of one-token documents only would leave nothing to predict: it counts as one document.
        return np.concatenate([[0], inside if len(inside) < end - begin - 1 else inside[:0]])


def rows_at_once(batch_size: int, micro_batch_size: int | None, processes: int) -> int:
    """Rows that each process takes through the model at once: as many as asked for, or its whole share of a batch."""
    rows = max(batch_size // processes, 1) if micro_batch_size is None else micro_batch_size
    if batch_size % (processes * rows):
        raise GSAError(
            f"batch_size {batch_size} must be a multiple of processes x micro_batch_size, {processes} x {rows}"
        )
    return rows


class Steps(Dataset[list[MicroBatch]]):
    """The micro-batches of one process, by step."""

    def __init__(
        self, rows: Rows, *, batch_size: int, micro_batch_size: int | None, seed: int, rank: int, world_size: int
    ):
        if len(rows) == 0:
            raise GSAError(
                f"data: {rows.tokens.folder} has {rows.tokens.length} tokens, fewer than one row of {rows.length}"
            )
        self.rows, self.shuffle = rows, Shuffle(len(rows), seed)
        self.batch_size, self.micro_batch_size = batch_size, rows_at_once(batch_size, micro_batch_size, world_size)
        self.share = batch_size // world_size
        self.first = rank * self.share

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all processes."""
        return self.batch_size * self.rows.length

    def __getitem__(self, step: int) -> list[MicroBatch]:
        return [self.rows.micro_batch(chosen) for chosen in self.chosen(step)]

    def chosen(self, step: int) -> list[list[int]]:
        """The rows of a step, by micro-batch."""
        first = step * self.batch_size + self.first
        rows = [self.shuffle[position] for position in range(first, first + self.share)]
        return [rows[begin : begin + self.micro_batch_size] for begin in range(0, self.share, self.micro_batch_size)]

    def run(self, begin: int, end: int, workers: int) -> Iterator[list[MicroBatch]]:
        """Steps begin..end-1 in order, loaded ahead by so many processes if any."""
        loader = DataLoader(
            self,
            batch_size=None,
            sampler=range(begin, end),
            num_workers=workers,
            worker_init_fn=_undisturbed,
            generator=torch.Generator(),
        )
        return iter(loader)


def _undisturbed(worker: int) -> None:
    """Ctrl-C reaches all processes of a terminal: the one that trains decides, and its workers end with it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def in_order(rows: Rows, micro_batch_size: int, limit: int | None = None) -> list[list[int]]:
    """All rows in order, or the first so many, the unfinished last one too, by micro-batch: for evaluation."""
    count = -(-rows.tokens.length // rows.length)
    if rows.tokens.length % rows.length == 1:
        count -= 1  # a single token predicts nothing
    count = count if limit is None else min(count, limit)
    return [list(range(begin, min(begin + micro_batch_size, count))) for begin in range(0, count, micro_batch_size)]
