"""DDP: every process holds the whole model, and gradients are summed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gsa.train.strategies.base import LossOf
from gsa.train.strategies.distributed import Distributed


class DDP(Distributed):
    """torch's DistributedDataParallel.

    Buckets of gradients are sent while the pass backward goes on, after the last micro-batch of a step only. Whether
    they are is decided in the communication hook and not by `no_sync`, which would have to be known before the loss.
    """

    name = "ddp"

    def __init__(self, precision: str, device: torch.device | None):
        super().__init__(precision, device)
        self._last = False

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self._last = last
        try:
            loss.backward()
        finally:
            self._last = False

    def _wrap(self, loss: LossOf) -> nn.Module:
        # All begin with the same weights already.
        wrapped = DistributedDataParallel(loss, init_sync=False, gradient_as_bucket_view=True)
        wrapped.register_comm_hook(None, lambda state, bucket: self._sum_of(bucket.buffer()))
        return wrapped

    def _sum_of(self, bucket: Tensor) -> Future[Tensor]:
        """A bucket of gradients to come: summed over processes if this is the last micro-batch, or else as it is."""
        if not self._last:
            kept: Future[Tensor] = Future()
            kept.set_result(bucket)
            return kept
        work = dist.all_reduce(bucket, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])
