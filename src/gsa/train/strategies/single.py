"""One process, on a CPU or a GPU."""

from __future__ import annotations

import torch

from gsa.devices import best_device, use_device
from gsa.train.strategies.base import Strategy


class Single(Strategy):
    """Everything here, on one device, and the same to the bit from run to run."""

    name = "single"

    def __init__(self, precision: str, device: torch.device | None):
        if device is None:
            device = best_device()
        use_device(device)
        super().__init__(precision, device)
