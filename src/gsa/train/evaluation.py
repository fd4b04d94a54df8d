"""Loss on held-out tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from gsa.data.batches import MicroBatch, Rows, in_order
from gsa.train.strategies import Strategy


def evaluate(
    strategy: Strategy, loss_of: Callable[[MicroBatch], torch.Tensor], rows: Rows, micro: int, limit: int | None
) -> dict[str, float]:
    """Loss in nats per token, perplexity and bits per byte over all rows, or the first `limit`.

    Rows are read alone, so the first token of each is not predicted; for bits per byte it counts as the others do.
    """
    batches = in_order(rows, micro, limit)
    loss = targets = 0.0
    with torch.no_grad():
        # Every process computes in every round, since sharded weights need all of them. In the last round, those for
        # which no batch is left repeat the last batch, and it does not count.
        for begin in range(0, len(batches), strategy.world_size):
            mine = begin + strategy.rank
            batch = rows.micro_batch(batches[min(mine, len(batches) - 1)])
            value = float(loss_of(batch))
            if mine < len(batches):
                loss, targets = loss + value * batch.targets, targets + batch.targets
    loss, targets = strategy.sum(loss, targets)
    nats, tokens = loss / targets, rows.tokens
    return {
        "loss": nats,
        "perplexity": math.exp(min(nats, 700.0)),
        "bits_per_byte": nats * tokens.length / max(tokens.text_bytes, 1) / math.log(2),
    }
