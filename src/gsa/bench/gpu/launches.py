"""What the GPU engine launches for each operation, without a GPU: the kernels of `gsa kernels`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gsa.ops.triton.launch import Target

if TYPE_CHECKING:
    from torch import Tensor

    from gsa.ops.triton.ahead_of_time import Source

BATCH, LENGTH = 8, 2048
"""The paper's: 16384 tokens at a time."""
MODEL_WIDTH = 2048
"""Features of all heads together, as in the paper's model of 1.3 billion parameters."""

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Case:
    """Sizes for which the kernels are compiled."""

    target: Target
    dtype: str
    width: int
    """Of keys and values of a head."""
    slots: int
    thorough: bool
    """Not only as layers train and decode, but also with all else that operations may be given."""

    @property
    def heads(self) -> int:
        """As many as a model of the paper's width has."""
        return max(1, MODEL_WIDTH // self.width)

    def __str__(self) -> str:
        return f"{self.target.name}, {self.dtype}, width {self.width}, {self.slots} slots"


def sources(case: Case) -> list[tuple[str, Source]]:
    """The operations and the kernels they launch; each kernel with its settings once per operation."""
    from gsa.ops.triton.ahead_of_time import source
    from gsa.ops.triton.launch import recording

    found: dict[tuple[str, Source], None] = {}
    for name, operation in _operations(case).items():
        with recording(case.target) as launches:
            operation(launches.clear)
        found |= dict.fromkeys((name, source(launch, case.target)) for launch in launches)
    return list(found)


Operation = Callable[[Callable[[], None]], object]
"""Something whose launches are recorded. It is passed a function that deletes those recorded so far: a backward pass
needs a forward pass first, calls the function after it, and so leaves only its own launches."""


def _operations(case: Case) -> dict[str, Operation]:
    """What to do, by name."""
    import torch

    from gsa.ops.calls import LinearCall, SlotCall, StepCall
    from gsa.ops.state import compute_dtype
    from gsa.ops.triton import linear_attention, slot_attention
    from gsa.ops.triton.step import step

    B, T, H, W, M = BATCH, LENGTH, case.heads, case.width, case.slots
    dtype: torch.dtype = getattr(torch, DTYPES[case.dtype])
    carried = compute_dtype(dtype)

    def made(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x, g, s = made(B, T, H, W), made(B, T, H, M, dtype=carried), made(B, T, H, M)
    memories = made(B, H, W, M, dtype=carried), made(B, H, M, W, dtype=carried)
    state, decays = made(B, H, W, W, dtype=carried), made(B, T, H, W, dtype=carried)
    # The same tokens as sequences that lie end to end.
    packed, ends = [t.reshape(1, B * T, *t.shape[2:]) for t in (x, g, s, decays)], made(B + 1, dtype=torch.int64)

    def both(kernels: Any, call: Any, *dfinals: Tensor) -> Operation:
        """Forward and backward, with gradients of final states if these are given."""

        def run(forget: Callable[[], None]) -> None:
            results, saved = kernels.forward(call)
            missing = (None,) * (len(results) - 1)
            kernels.backward(call, saved, (call.q, *(dfinals or missing)))

        return run

    def slots(save: str, *begin: Tensor) -> SlotCall:
        initial_k, initial_v = begin or (None, None)
        return SlotCall(x, x, x, g, None, initial_k, initial_v, None, 1.0, "softmax", save, False)

    def slots_backward(forget: Callable[[], None]) -> None:
        call = slots("marks")
        _, saved = slot_attention.forward(call)
        forget()
        slot_attention.backward(call, saved, (x, None, None))

    def linear(gk: Tensor | None, gv: Tensor | None) -> Operation:
        return both(linear_attention, LinearCall(x, x, x, gk, gv, None, None, 1.0, "marks", False))

    def one_step(forget: Callable[[], None]) -> None:
        q, gate = made(B, H, W), made(B, H, M, dtype=carried)
        step(StepCall(q, q, q, gate, None, *memories, 1.0, "softmax", False), inplace=True)

    usual: dict[str, Operation] = {
        "gsa forward": lambda forget: slot_attention.forward(slots("marks")),
        "gsa backward": slots_backward,
        "gla": linear(decays, None),
        "step": one_step,
    }
    if not case.thorough:
        return usual
    px, pg, ps, pdecays = packed
    packed_slots = SlotCall(px, px, px, pg, ps, *memories, ends, 1.0, "softmax", "states", False)
    packed_linear = LinearCall(px, px, px, pdecays, None, state, ends, 1.0, "states", False)
    return usual | {
        "gsa prompt": lambda forget: slot_attention.forward(slots("nothing", *memories)),
        "gsa packed": both(slot_attention, packed_slots, *memories),
        "gla, gates of values": linear(None, decays),
        "gla, one gate a head": linear(made(B, T, H, 1, dtype=carried), None),
        "gla, no gates": linear(None, None),
        "gla packed": both(linear_attention, packed_linear, state),
    }
