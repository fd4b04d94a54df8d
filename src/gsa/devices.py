"""Where a model computes: on the CPU, or on a GPU that torch can use."""

from __future__ import annotations

import torch

from gsa.errors import GSAError
from gsa.terminal import quoted

DEVICES = ("auto", "cpu", "cuda")
"""What can be asked for; `cuda` is also what torch calls AMD's GPUs, and `cuda:1` the second of several."""


def best_device() -> torch.device:
    """A GPU if torch can use one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check_device(name: str, what: str) -> None:
    """Raises, in the name of `what`, if this is no name of a device, whether there is such a device here or not."""
    kind, colon, number = str(name).partition(":")
    numbered = kind == "cuda" and number.isascii() and number.isdecimal() and len(number) <= 4
    if kind not in DEVICES or (colon and not numbered):
        raise GSAError(
            f"{what}: unknown device {quoted(name)}; expected one of {', '.join(DEVICES)}, or cuda:1 and the like"
        )


def find_device(name: str, what: str) -> torch.device:
    """The device that was asked for by name; raises, in the name of `what`, if there is none here.

    >>> find_device("cpu", "example")
    device(type='cpu')
    """
    check_device(name, what)
    kind, _, number = str(name).partition(":")
    if kind == "auto":
        return best_device()
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise GSAError(
            f"{what}: device {name} was asked for, and torch finds no GPU that it can use; choose cpu or auto"
        )
    if not number:
        return torch.device("cuda")
    count = torch.cuda.device_count()
    if int(number) >= count:
        there = "the only one is cuda:0" if count == 1 else f"there are cuda:0 to cuda:{count - 1}"
        raise GSAError(f"{what}: there is no GPU {name}; {there}")
    return torch.device("cuda", int(number))


def use_device(device: torch.device) -> None:
    """Makes a GPU the current one of this process, which is where kernels of other packages start.

    Commands and strategies do that; of functions of the package, nobody expects it.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
