"""Sinks, window and slots as compiled steps: what only they have."""

import pytest
import torch

from gsa.errors import GSAError
from gsa.infer import Model
from gsa.infer.compiled_runner import CompiledRunner
from gsa.infer.torch_runner import TorchRunner
from gsa.models import LM
from gsa.models.state import ModelState
from gsa.ops.native.structs import CACHE_BLOCK
from tests.infer.test_compiled_steps import SLOTS, compare, relative, stepped
from tests.models.cases import ids, model
from tests.ops.isas import needs_native

pytestmark = needs_native


def hybrid(**more: object) -> LM:
    """With slots that say more than a token does."""
    torch.manual_seed(2)
    lm = model("attention", num_hidden_layers=2, **{**SLOTS, **more})
    for key, x in lm.named_parameters():
        if "slot_" in key:
            x.data += 0.3 * torch.randn_like(x)
        if key.endswith("slot_bias"):
            x.data += 1.0
    return lm


@pytest.mark.parametrize(
    ("window", "sinks", "positions"),
    [
        (3, 4, "window"),
        pytest.param(CACHE_BLOCK - 16, 0, "own", marks=pytest.mark.slow),
        (CACHE_BLOCK - 15, 20, "own"),
        pytest.param(CACHE_BLOCK + 1, CACHE_BLOCK + 3, "window", marks=pytest.mark.slow),
    ],
)
def test_long_texts_as_in_fp64(window: int, sinks: int, positions: str) -> None:
    """By the model's forward, 16 tokens at a time and one by one, from nothing and from a state."""
    lm = hybrid(window=window, num_sinks=sinks, slot_positions=positions)
    loaded, text = Model.load(lm, "fp32"), ids(window + sinks + CACHE_BLOCK + 40)
    mine, other = CompiledRunner(loaded, 2), TorchRunner(loaded, 1)
    _, state = mine.read(text[:70], None)
    for begin in range(70, len(text), 60):
        logits, state = mine.read(text[begin : begin + 60], state)
    mine.put(1, loaded.init_state())
    assert relative(stepped(mine, text, 1)[-1], logits) < 1e-5
    with torch.no_grad():
        exact = lm.double()(text[None]).logits[0, -1]
    assert relative(logits, exact) < 1e-5
    for here in (mine, other):
        here.put(0, state)
    assert relative(stepped(mine, ids(8)), stepped(other, ids(8))) < 1e-5
    compare(mine.take(0), other.take(0), 1e-5)


def worn(loaded: Model, position: int) -> ModelState:
    """A state as it might be behind so many tokens."""
    layers = []
    for layer in loaded.init_state().layers:
        held = {key: torch.randn_like(x) for key, x in layer.items() if x.is_floating_point()}
        held |= {"mass": held["mass"].exp()}
        layers.append({**held, "position": torch.tensor([position])})
    return ModelState(layers)


def test_sinks_and_slots_do_not_drift_away() -> None:
    """Far behind the first tokens, everything is turned as the mixer turns it."""
    torch.manual_seed(0)
    for positions in ("window", "own"):
        loaded = Model.load(hybrid(slot_positions=positions, rope_theta=1e6), "fp32")
        mine, other = CompiledRunner(loaded, 1), TorchRunner(loaded, 1)
        state = worn(loaded, 10_000_019)
        for here in (mine, other):
            here.put(0, state)
        assert relative(stepped(mine, ids(12)), stepped(other, ids(12))) < 1e-5, positions
        compare(mine.take(0), other.take(0), 1e-5)


def test_slots_that_nothing_is_written_to() -> None:
    """Gates that keep all write nothing, and what is empty is not seen: with all of them, or all but one."""
    for kept in (8, 7):
        lm = hybrid(slot_router="gates")
        for block in lm.model.layers:
            block.mixer.slot_router.weight.data.zero_()
            block.mixer.slot_router.bias.data[:, :kept] = 1e4
        loaded = Model.load(lm, "fp32")
        mine, other = CompiledRunner(loaded, 1), TorchRunner(loaded, 1)
        for here in (mine, other):
            here.put(0, loaded.init_state())
        assert relative(stepped(mine, ids(20)), stepped(other, ids(20))) < 1e-5
        state = mine.take(0)
        compare(state, other.take(0), 1e-5)
        assert not state.layers[0]["mass"][..., :kept].any()


@pytest.mark.parametrize("position", [-1, 2**62])
def test_a_count_of_tokens_that_cannot_be(position: int) -> None:
    loaded = Model.load(hybrid(), "fp32")
    with pytest.raises(GSAError, match=f"expected a count of tokens as the position of attention, got {position}"):
        CompiledRunner(loaded, 1).put(0, worn(loaded, position))
