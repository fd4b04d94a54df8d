"""One run of the recall experiment: a small model learns MQAR, and is asked on examples it has not seen."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gsa.data.recall import IGNORED, Recall, mqar
from gsa.models.loss import linear_cross_entropy
from gsa.options import SEED, check, choice, number
from gsa.paper.recall_model import SYSTEMS, RecallModel

SOLVED = 0.99
"""A run ends when it answers more than this."""
TEST_SEED = 2**32
"""Of the examples that are asked; those of training have the seeds of runs."""
EASY_SEED = 2**33
"""And those of them with few pairs the seeds from here."""


@dataclass(frozen=True, kw_only=True)
class RecallRun:
    """All that decides a run. The defaults that are not the grid's to vary are zoology's."""

    system: str = choice("gsa", tuple(SYSTEMS))
    width: int = number(64, least=1, most=4096)
    heads: int = number(1, least=1, most=64)
    slots: int = number(16, least=1, most=4096)
    convolution: bool = True
    length: int = number(64, least=4, most=2**16)
    pairs: int = number(16, least=1, most=2**14)
    easy_pairs: int = number(0, least=0, most=2**14)
    """Of a third of the examples that are learned from, where what is asked for is found sooner; 0 for no such third.
    Those that are asked when it has learned all have `pairs`."""
    vocab_size: int = number(8192, least=4, most=2**20)
    examples: int = number(100_000, least=1, most=10**8)
    test_examples: int = number(3000, least=1, most=10**7)
    batch_size: int = number(64, least=1, most=10**6)
    epochs: int = number(64, least=1, most=10**6)
    lr: float = number(1e-3, above=0)
    seed: int = number(0, least=0, most=2**32 - 1)
    layers: int = number(2, least=1, most=64)
    weight_decay: float = number(0.1, least=0)
    dropout: float = number(0.1, least=0, most=0.9)
    std: float = number(0.02, above=0)

    def __post_init__(self) -> None:
        check(self, "recall")

    @property
    def steps(self) -> int:
        """Of the optimiser, in all epochs."""
        return self.epochs * max(self.examples // self.batch_size, 1)

    @property
    def has_slots(self) -> bool:
        return SYSTEMS[self.system].slots


def run_recall(settings: dict[str, Any]) -> dict[str, Any]:
    """Accuracy after every epoch; the run ends at the last one, or when it has solved the task.

    AdamW, with a rate that follows a cosine from epoch to epoch, no warm-up and no clipping. The head is computed where
    something is asked and nowhere else, which changes nothing: other places have no loss.
    """
    run = RecallRun(**settings)
    torch.manual_seed(run.seed)
    model = RecallModel(
        run.system,
        width=run.width,
        heads=run.heads,
        slots=run.slots,
        convolution=run.convolution,
        vocab_size=run.vocab_size,
        layers=run.layers,
        dropout=run.dropout,
        std=run.std,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.lr, weight_decay=run.weight_decay, fused=True)
    learned, asked = _learned(run), _examples(run, run.test_examples, TEST_SEED, run.pairs)
    order = np.random.default_rng([run.seed, 1])
    accuracies: list[float] = []
    for epoch in range(run.epochs):
        for group in optimizer.param_groups:
            group["lr"] = run.lr * (1 + math.cos(math.pi * epoch / run.epochs)) / 2
        for rows in _batches(order.permutation(run.examples), run.batch_size):
            inputs, labels, places = _batch(learned, rows)
            loss = linear_cross_entropy(model(inputs, places), model.embeddings.weight, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        accuracies.append(_accuracy(model, asked))
        if accuracies[-1] > SOLVED:
            break
    return {
        "accuracy": accuracies[-1],
        "by_epoch": accuracies,
        "state": model.state_size,
        "parameters": sum(weight.numel() for weight in model.parameters()),
    }


def _learned(run: RecallRun) -> Recall:
    """The examples of training; every batch draws from all of them."""
    if not run.easy_pairs:
        return _examples(run, run.examples, run.seed, run.pairs)
    easy = _examples(run, run.examples // 3, EASY_SEED + run.seed, run.easy_pairs)
    rest = _examples(run, run.examples - run.examples // 3, run.seed, run.pairs)
    return Recall(*(np.concatenate(both) for both in zip(easy, rest, strict=True)))


def _examples(run: RecallRun, count: int, seed: int, pairs: int) -> Recall:
    assert seed <= SEED
    return mqar(count, length=run.length, pairs=pairs, vocab_size=run.vocab_size, seed=seed)


def _batches(rows: np.ndarray, size: int) -> list[np.ndarray]:
    """Whole batches of rows; or all rows, if there are fewer."""
    whole = len(rows) // size
    return np.split(rows[: whole * size], whole) if whole else [rows]


def _batch(examples: Recall, rows: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [B, T], and of the places where something is asked the labels and numbers [Q]."""
    labels = torch.from_numpy(examples.labels[rows].reshape(-1))
    places = (labels != IGNORED).nonzero()[:, 0]
    return torch.from_numpy(examples.inputs[rows]), labels[places], places


def _accuracy(model: RecallModel, examples: Recall, batch_size: int = 256) -> float:
    """The share of questions that are answered rightly."""
    right = asked = 0
    model.eval()
    for begin in range(0, len(examples.inputs), batch_size):
        inputs, labels, places = _batch(examples, np.arange(begin, min(begin + batch_size, len(examples.inputs))))
        right += int((model.answers(inputs, places) == labels).sum())
        asked += len(labels)
    model.train()
    return right / asked


def settings_of(run: RecallRun) -> dict[str, Any]:
    """What a cell is told; systems without slots do not depend on their number."""
    values = asdict(run)
    if not run.has_slots:
        values["slots"] = type(run).slots
    return values
