"""What gates may be, by value: log gates are at most 0, and NaN is never one.

The compiled engine notices bad gates while it reads them; the others take a maximum first. Both raise the errors that
are made here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gsa.errors import GSAError
from gsa.ops.transforms import recorded


def refuse_gates(**gates: Tensor | None) -> None:
    """Raises if one of these log gates is above 0, or NaN."""
    for name, gate in gates.items():
        g = _numbers(gate)
        if g is None:
            continue
        highest = float(g.amax())  # NaN if any is
        if not highest <= 0:
            probabilities = highest <= 1 and float(g.amin()) >= 0
            advice = f"; if they are probabilities, pass {name}.log()" if probabilities else ""
            wanted = f"{name} must be log gates, at most 0 (-inf is a full reset)"
            raise GSAError(f"{wanted}, but {_found(g, 'largest', highest)}{advice}")


def refuse_rates(A: Tensor, dt: Tensor) -> None:
    """Raises if a rate of the selective scan is above 0, a length of time below 0, or one of them NaN."""
    rates, lengths = _numbers(A), _numbers(dt)
    if rates is not None:
        highest = float(rates.amax())
        if not highest <= 0:
            raise GSAError(f"A must be decay rates, at most 0, but {_found(rates, 'largest', highest)}")
    if lengths is not None:
        lowest = float(lengths.amin())
        if not lowest >= 0:
            raise GSAError(f"dt must be lengths of time, at least 0, but {_found(lengths, 'smallest', lowest)}")


def refuse_logits(w: Tensor, log_z: Tensor | None) -> None:
    """Raises if a write logit of ABC, or the normaliser to begin with, is NaN or inf."""
    for name, what, x in (("w", "write logits", w), ("initial_state.log_z", "the logarithm of a sum", log_z)):
        numbers = _numbers(x)
        if numbers is None:
            continue
        highest = float(numbers.amax())
        if not highest < torch.inf:
            wanted = f"{name} must be {what}, below inf (-inf is nothing written)"
            raise GSAError(f"{wanted}, but {_found(numbers, 'largest', highest)}")


def refuse_strengths(s: Tensor) -> None:
    """Raises if a slot is said to take less than nothing of a token, or NaN."""
    strengths = _numbers(s)
    if strengths is not None:
        lowest = float(strengths.amin())
        if not lowest >= 0:
            raise GSAError(f"s must be write strengths, at least 0, but {_found(strengths, 'smallest', lowest)}")


def refuse_positions(position: Tensor | None) -> None:
    """Raises if fewer than no tokens are said to come before a sequence's first."""
    counts = _numbers(position)
    if counts is not None and int(counts.amin()) < 0:
        raise GSAError(f"position must count tokens, from 0, but the smallest is {int(counts.amin())}")


def _found(x: Tensor, which: str, value: float) -> str:
    unknown = int(x.isnan().sum())
    return f"{unknown} of {x.numel()} are NaN" if unknown else f"the {which} is {value:.6g}"


def _numbers(x: Tensor | None) -> Tensor | None:
    """x without what torch.func wraps around it; None if there are no numbers to look at, as while something traces."""
    if x is None or recorded():
        return None
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    # A subclass that only adds to Tensor has its numbers; one with a dispatch of its own may have none.
    plain = type(x).__torch_dispatch__ is Tensor.__torch_dispatch__ and not x.is_meta and x.numel() > 0
    return x.detach().as_subclass(Tensor) if plain else None
