"""What products over many tokens are computed in when a prompt is read: fp32, bf16 or int8.

It is a choice of speed beside exactness, and no property of a model or a state: either can go on with another.
"""

from __future__ import annotations

from gsa.errors import GSAError
from gsa.ops.matmul import UNITS, missing_unit
from gsa.ops.weights import DENSE

COMPUTE = ("auto", "fp32", *UNITS)
AUTO = {"fp32": "fp32", "bf16": "bf16", "int8": "int8", "int4": "int8"}
"""What `auto` is for each format of the weights, where the processor has the unit; elsewhere it is fp32. Who asks for
weights in fp32 wants exact products; the others have given up more than the products do."""


def check_compute(compute: str, weights: str) -> None:
    """Refuses what does not exist or cannot be had with a format of weights, before anything is loaded."""
    if compute not in COMPUTE:
        raise GSAError(f"Model: unknown compute {compute!r}; expected one of {', '.join(COMPUTE)}")
    if compute in UNITS:
        missing = missing_unit(compute)
        if missing is not None:
            raise GSAError(f"Model: compute {compute} was asked for, and {missing}; auto and fp32 run everywhere")
    if compute == "int8" and weights in DENSE:
        raise GSAError(f"Model: compute int8 needs weights in int8 or int4, got {weights}")


def chosen_compute(compute: str, weights: str) -> str:
    """fp32, bf16 or int8, for weights in a format."""
    check_compute(compute, weights)
    return automatic(weights) if compute == "auto" else compute


def automatic(weights: str) -> str:
    """What `auto` is here."""
    best = AUTO[weights]
    return best if best == "fp32" or missing_unit(best) is None else "fp32"
