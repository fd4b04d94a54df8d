"""FSDP: every process holds a part of each weight, its gradient and its moments."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, debug, distribute_tensor

from gsa.errors import GSAError
from gsa.train.strategies.base import LossOf
from gsa.train.strategies.distributed import Distributed


class FSDP(Distributed):
    """torch's FSDP2.

    Each block is gathered when it is its turn. Embedding, last norm and head are gathered for the whole pass, since the
    head's weight is used outside of its module and may be the embedding's. Gradients are summed into shards after every
    micro-batch: that sends more than waiting for the last one, but no process ever holds a whole gradient.
    """

    name = "fsdp"

    def __init__(self, precision: str, device: torch.device | None):
        if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
            raise GSAError(f"engine fsdp: torch {torch.__version__} is too old, its FSDP2 cannot sum gradients")
        super().__init__(precision, device)

    def loss(self, ids: Tensor, labels: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        loss = super().loss(ids, labels, cu_seqlens)
        if not torch.is_grad_enabled():
            self._reshard()  # otherwise the pass backward does
        return loss

    def discard(self) -> None:
        super().discard()
        self._reshard()

    def close(self) -> None:
        super().close()
        # Threads of the group run until the last reference to it is gone. One that is still busy with a tensor while
        # Python shuts down aborts the process.
        for name in ("_wrapped", "model", "optimizer", "_parameters", "_ema"):
            self.__dict__.pop(name, None)
        debug._clear_sharding_prop_cache()  # torch remembers tensors in it, with the group they are spread over
        gc.collect()

    def _reshard(self) -> None:
        """Lets go of gathered weights, which would not follow when the shards change."""
        assert isinstance(self._wrapped, FSDPModule)
        self._wrapped.reshard()

    def _wrap(self, loss: LossOf) -> nn.Module:
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        for module in (*loss.model.model.layers, loss):
            sharded = fully_shard(module, mesh=mesh)
            assert isinstance(sharded, FSDPModule)
            sharded.set_gradient_divide_factor(1.0)  # sums, not means
            sharded.set_force_sum_reduction_for_comms(True)
        return loss

    def _sum_of_shards(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def _whole(self, x: Tensor) -> Tensor:
        assert isinstance(x, DTensor)
        return x.full_tensor()

    def _take(self, x: Tensor, whole: Tensor) -> None:
        assert isinstance(x, DTensor)
        # Every process has the whole: it only cuts out its own part.
        part = distribute_tensor(whole, x.device_mesh, x.placements, src_data_rank=None)
        x.to_local().copy_(part.to_local())
