"""What all strategies for several processes share: how the processes talk to each other."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from gsa.train.strategies.base import Strategy
from gsa.train.strategies.launch import connect


class Distributed(Strategy):
    """A strategy on one of several processes that a launcher started."""

    def __init__(self, precision: str, device: torch.device | None):
        place = connect(self.name, device)
        super().__init__(precision, place.device)
        self.rank, self.world_size, self._opened = place.rank, place.world_size, place.opened

    def sum(self, *values: float) -> list[float]:
        x = torch.tensor([float(value) for value in values], dtype=torch.float64, device=self.device)
        dist.all_reduce(x)
        return x.tolist()

    def close(self) -> None:
        if self._opened and dist.is_initialized():
            dist.destroy_process_group()

    def _broadcast(self, x: Tensor) -> None:
        dist.broadcast(x, src=0)
