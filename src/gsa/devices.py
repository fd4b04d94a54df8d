"""Where a model computes: on the CPU, or on a GPU that torch can use."""

from __future__ import annotations

import torch

from gsa.errors import GSAError

DEVICES = ("auto", "cpu", "cuda")
"""What can be asked for; `cuda` is also what torch calls AMD's GPUs, and `cuda:1` the second of several."""


def best_device() -> torch.device:
    """A GPU if torch can use one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def find_device(name: str, what: str) -> torch.device:
    """The device that was asked for by name; raises, in the name of `what`, if there is none here.

    >>> find_device("cpu", "example")
    device(type='cpu')
    """
    kind, colon, number = str(name).partition(":")
    if kind not in DEVICES or (colon and (kind != "cuda" or not number.isdecimal())):
        raise GSAError(f"{what}: unknown device {name!r}; expected one of {', '.join(DEVICES)}, or cuda:1 and the like")
    if kind == "auto":
        return best_device()
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise GSAError(
                f"{what}: device cuda was asked for, and torch finds no GPU that it can use; choose cpu or auto"
            )
        if number and int(number) >= torch.cuda.device_count():
            raise GSAError(f"{what}: there is no GPU {number}, there are {torch.cuda.device_count()}")
    return torch.device(name)
