"""One process, on a CPU or a GPU."""

from __future__ import annotations

import torch

from gsa.train.strategies.base import Strategy


class Single(Strategy):
    """Everything here, on one device, and the same to the bit from run to run."""

    name = "single"

    def __init__(self, precision: str, device: torch.device | None):
        if device is None:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(precision, device)
