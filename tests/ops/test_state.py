"""SlotState.zeros: where every sequence begins."""

import pytest
import torch

from gsa.errors import GSAError
from gsa.ops import SlotState, gated_slot_attention, gated_slot_attention_step

SIZES = {"batch": 2, "heads": 3, "slots": 4, "key_width": 5, "value_width": 6}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_from_zeros_are_the_whole_sequence(dtype: torch.dtype) -> None:
    T = 7
    q, k = torch.randn(2, 2, T, 3, 5, dtype=dtype)
    v, g = torch.randn(2, T, 3, 6, dtype=dtype), -torch.rand(2, T, 3, 4, dtype=dtype)
    state = SlotState.zeros(**SIZES, dtype=dtype)
    assert (state.k.dtype, state.k.abs().sum(), state.v.abs().sum()) == (dtype, 0, 0)
    steps = []
    for t in range(T):
        o, state = gated_slot_attention_step(q[:, t], k[:, t], v[:, t], g[:, t], state=state, inplace=True)
        steps.append(o)
    whole, after = gated_slot_attention(q, k, v, g, output_final_state=True, backend="reference")
    torch.testing.assert_close(torch.stack(steps, 1), whole)
    torch.testing.assert_close(state, after)


def test_a_device_may_be_named() -> None:
    assert SlotState.zeros(**SIZES, device="meta").v.device.type == "meta"
    assert SlotState.zeros(**{**SIZES, "batch": 0}).k.shape == (0, 3, 5, 4)


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_whole_numbers(name: str) -> None:
    for wrong in (-1, 2.0, None, True):
        with pytest.raises(GSAError, match=f"SlotState.zeros: {name} must be a whole number, at least ., got {wrong}"):
            SlotState.zeros(**{**SIZES, name: wrong})
    with pytest.raises(GSAError, match=r"dtype must be torch.float32 or torch.float64, got torch.bfloat16"):
        SlotState.zeros(**SIZES, dtype=torch.bfloat16)
