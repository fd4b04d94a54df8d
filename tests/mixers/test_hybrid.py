"""The mixer `hybrid`: softmax attention until a token is written; then sinks, window and slots, with any gate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gsa.mixers import State, mixer
from gsa.mixers.hybrid import Hybrid
from gsa.mixers.rotary import rotate
from gsa.ops import use_backend
from tests.ops.cases import relative_error

D = 16
SMALL: dict[str, Any] = {
    "hidden_size": D,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "window": 5,
    "num_sinks": 2,
    "num_slots": 3,
}


def layer(dtype: torch.dtype = torch.float64, **options: Any) -> Hybrid:
    """With random weights everywhere."""
    torch.manual_seed(0)
    found = mixer("hybrid", **{**SMALL, **options}).to(torch.float64)
    for name, weight in found.named_parameters():
        torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.4)
    assert isinstance(found, Hybrid)
    return found.to(dtype)


def tokens(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)


def by_steps(own: Hybrid, x: Tensor, state: State) -> tuple[Tensor, State]:
    parts = []
    for token in x.split(1, 1):
        y, after = own(token, state)
        assert after is not None
        parts, state = [*parts, y], after
    return torch.cat(parts, 1), state


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "every head its own": {"num_key_value_heads": 4},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 6},
    "no positions": {"rope_theta": 0},
    "no sinks": {"num_sinks": 0},
    "own positions": {"slot_positions": "own"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_softmax_attention_until_a_token_is_written(family: str) -> None:
    """Whatever the weights of slots; the token after that sees another thing."""
    options = FAMILIES[family]
    own = layer(**options)
    shared = {key: value for key, value in {**SMALL, **options}.items() if "slot" not in key and key != "num_sinks"}
    attention = mixer("attention", **{**shared, "window": None}).double()
    missing = attention.load_state_dict(own.state_dict(), strict=False)
    assert not missing.missing_keys
    last = own.options.window + own.options.num_sinks
    x = tokens(2, last + 1)
    expected = attention(x)[0]
    for y in (own(x)[0], by_steps(own, x, own.init_state(2))[0]):
        assert relative_error(y[:, :last], expected[:, :last]) < 1e-13
        assert relative_error(y[:, last:], expected[:, last:]) > 1e-3


GATES = {"never forget": 1000.0, "hardly forget": 25.0, "very slow": 15.0, "forget all": -1e30, "and fast": -1000.0}


@pytest.mark.parametrize("gate", GATES)
def test_extreme_gates(gate: str) -> None:
    """As the token loop has it; without NaN, also in gradients."""
    own = layer(slot_router="gates")
    with torch.no_grad():
        own.slot_router.bias[:, 0] = GATES[gate]
        if gate in ("never forget", "forget all"):
            own.slot_router.bias[:] = GATES[gate]
    x = tokens(1, 30)
    found = own(x)
    with use_backend("reference"):
        exact = own(x)
    assert relative_error(found[0], exact[0]) < 1e-9
    assert found[1].keys() == exact[1].keys()
    for name, value in exact[1].items():
        assert relative_error(found[1][name], value) < 1e-9, name
    stepped, left = by_steps(own, x, own.init_state(1))
    assert relative_error(stepped, exact[0]) < 1e-9
    assert all(relative_error(left[name], value) < 1e-9 for name, value in exact[1].items())
    for parts in ((x,), x.split([13, 1, 16], 1)):
        y, state = [], None
        narrow = layer(torch.float32, slot_router="gates")
        narrow.load_state_dict(own.state_dict())
        for part in parts:
            given = part.float().requires_grad_()
            out, state = narrow(given, state)
            y.append(out)
        gradients = torch.autograd.grad(torch.cat(y, 1).square().sum(), [given, *narrow.parameters()])
        assert all(torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("lengths", [[20, 10], [3, 1, 4, 1, 21]], ids=str)
@pytest.mark.parametrize("positions", ["window", "own"])
def test_gradients_go_through_states(lengths: list[int], positions: str) -> None:
    own, x = layer(slot_positions=positions), tokens(2, 30)
    whole, parts = (x.clone().requires_grad_() for _ in range(2))
    exact = torch.autograd.grad(own(whole)[0].square().sum(), [whole, *own.parameters()])
    state, y = own.init_state(2), []
    for part in parts.split(lengths, 1):
        out, state = own(part, state)
        y.append(out)
    found = torch.autograd.grad(torch.cat(y, 1).square().sum(), [parts, *own.parameters()])
    for a, b in zip(found, exact, strict=True):
        assert relative_error(a, b) < 1e-9


@pytest.mark.parametrize("positions", ["window", "own"])
def test_far_positions_lose_nothing(positions: str) -> None:
    """A state whose sequence is a million tokens further on, in single precision, against the one that is not."""
    exact, narrow = layer(slot_positions=positions), layer(torch.float32, slot_positions=positions)
    x, far = tokens(1, 60), 1_000_000
    _, state = exact(x[:, :30])
    moved = dict(state)
    shift, rope = torch.full((1, 1), far), exact.options.rope
    moved["position"] = state["position"] + far
    moved["window_k"] = rotate(state["window_k"], shift, rope)
    if positions == "own":
        moved["slot_k"] = rotate(state["slot_k"].permute(0, 3, 1, 2), shift, rope).permute(0, 2, 3, 1)
    moved = {name: x if name == "position" else x.float() for name, x in moved.items()}
    expected = exact(x[:, 30:], state)[0]
    rest = x[:, 30:].float()
    assert relative_error(narrow(rest, moved)[0], expected) < 1e-5
    assert relative_error(by_steps(narrow, rest, moved)[0], expected) < 1e-5


def test_twenty_thousand_tokens_in_single_precision() -> None:
    own, x = layer(torch.float32, num_attention_heads=2, num_key_value_heads=1), tokens(1, 20_500, dtype=torch.float32)
    exact = layer(num_attention_heads=2, num_key_value_heads=1)
    with torch.no_grad():
        y, state = own(x)
        expected, last = exact(x.double())
    assert relative_error(y[:, -500:], expected[:, -500:]) < 1e-4
    assert {name: value.shape for name, value in state.items()} == {
        name: value.shape for name, value in own.init_state(1).items()
    }
    for name in ("slot_k", "slot_v", "mass"):
        assert relative_error(state[name], last[name]) < 1e-4, name


def test_sinks_stay_where_they_left_the_window() -> None:
    """With a window of themselves alone, all later tokens with the same content see the same."""
    own = layer(num_slots=1, window=1)
    with torch.no_grad():
        own.slot_bias.fill_(-1e9)
    x = tokens(1, 40)
    x[:, 2:] = x[:, 2:3]
    y = own(x)[0]
    assert relative_error(y[:, 3:], y[:, 3:4].expand_as(y[:, 3:])) < 1e-12


def test_half_precision_and_autocast() -> None:
    exact, x = layer(), tokens(2, 40)
    expected = exact(x)[0]
    narrow = layer(torch.bfloat16)
    y, state = narrow(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert all(value.dtype in (torch.float32, torch.int64) for value in state.values())
    y_, _ = narrow(tokens(2, 1).bfloat16(), state)
    assert y_.dtype == torch.bfloat16
    assert relative_error(y, expected) < 0.05
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(torch.float32)(x.float())
    assert relative_error(y, expected) < 0.05
