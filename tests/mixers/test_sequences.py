"""The protocol of mixers: what they refuse, and what pads, packing, states and empty sequences do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gsa import GSAError
from gsa.mixers import MIXERS, Mixer, State, mixer
from gsa.mixers.sequences import Padding, Sequences, padding_of, sequences_of
from tests.examples import examples

D, B, T = 32, 3, 7
# Every mixer, and those whose state depends on their options.
SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in MIXERS},
    "gsa, convolutions": ("gsa", {"conv_size": 4, "conv_bias": True}),
    "gsa, no gate": ("gsa", {"gate": "none"}),
    "gsa, constant gate": ("gsa", {"gate": "constant", "num_key_value_heads": 2}),
    "gsa, router": ("gsa", {"router": "sigmoid", "routed_slots": 2, "router_noise": 0, "num_key_value_heads": 2}),
    "gsa, router, gate of heads": (
        "gsa",
        {"router": "softmax", "routed_slots": 3, "router_noise": 0, "gate": "head", "qk_norm": True, "conv_size": 3},
    ),
    "gla, convolutions": ("gla", {"conv_size": 3}),
    "hgrn2, convolutions": ("hgrn2", {"conv_size": 3}),
    "retnet, grouped": ("retnet", {"num_key_value_heads": 2}),
    "linear, grouped": ("linear", {"num_key_value_heads": 2}),
    "attention, window": ("attention", {"window": 3, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "attention, window of one": ("attention", {"window": 1}),
    "attention, no positions": ("attention", {"rope_theta": 0}),
    "hybrid, small": (
        "hybrid",
        {"window": 3, "num_sinks": 1, "num_slots": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    ),
    "hybrid, positions of the window": (
        "hybrid",
        {"window": 1, "num_sinks": 0, "num_slots": 3, "slot_positions": "window"},
    ),
}
every_system = pytest.mark.parametrize("system", SYSTEMS)


def build(system: str, **options: Any) -> Mixer:
    """With random weights, also where they begin as 0 or 1."""
    name, own = SYSTEMS[system]
    layer = mixer(name, **{"hidden_size": D, **own, **options}).double()
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, 0.0, weight.shape[-1] ** -0.5)
    return layer


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, D, dtype=torch.float64)


def copied(state: State) -> State:
    return {name: x.clone() for name, x in state.items()}


def assert_equal_states(actual: State | None, expected: State | None) -> None:
    assert actual is not None
    assert expected is not None
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert actual[name].shape == x.shape, name
        assert torch.allclose(actual[name].double(), x.double(), rtol=1e-9, atol=1e-12), name


def row(layer: Mixer, state: State | None, i: int) -> State:
    """One sequence's state; of attention, without the unused places before what it has seen."""
    assert state is not None
    left = {name: x[i : i + 1] for name, x in state.items()}
    if layer.options.mixer == "attention":
        places = left["k"].shape[1]
        unused = max(places - int(left["position"]), 0)
        left |= {name: left[name][:, unused:] for name in ("k", "v")}
    return left


# What is refused


@pytest.mark.parametrize("name", MIXERS)
def test_x_of_another_shape_is_refused(name: str) -> None:
    layer, sentence = build(name), rf"^{name}: x must be a floating tensor \[B, T, D\] with D = 32, got"
    for shape in ((2, 3, D + 1), (2, 3, 0), (3, D), (1, 2, 3, D), (D,), ()):
        with pytest.raises(GSAError, match=rf"{sentence} torch.float32 {re.escape(str(list(shape)))}"):
            layer(torch.zeros(shape))
    with pytest.raises(GSAError, match=f"{sentence} torch.int64"):
        layer(torch.zeros(2, 3, D, dtype=torch.int64))
    for x, kind in ((None, "NoneType"), ([[[0.0] * D]], "list"), (torch.zeros(2, 3, D).numpy(), "ndarray")):
        with pytest.raises(GSAError, match=f"{sentence} {kind}"):
            layer(x)


BAD_MASKS: dict[str, Callable[[], Any]] = {
    "shorter": lambda: torch.ones(B, T - 1, dtype=torch.int64),
    "longer": lambda: torch.ones(B, T + 1, dtype=torch.int64),
    "of one row": lambda: torch.ones(1, T, dtype=torch.int64),
    "without rows": lambda: torch.ones(T, dtype=torch.int64),
    "with features": lambda: torch.ones(B, T, D, dtype=torch.int64),
    "of attention": lambda: torch.ones(B, 1, T, T, dtype=torch.int64),
    "a list": lambda: [[1] * T] * B,
    "turned": lambda: torch.ones(T, B, dtype=torch.int64),
}


@pytest.mark.parametrize("name", MIXERS)
def test_mask_of_another_shape_is_refused(name: str) -> None:
    layer = build(name)
    for kind, make in BAD_MASKS.items():
        got = "got list" if kind == "a list" else r"got torch.int64 \[.*\]"
        with pytest.raises(GSAError, match=rf"^{name}: mask must be a tensor \[B, T\] = \[3, 7\], {got}"):
            layer(tokens(B, T), mask=make())


BAD_BORDERS: dict[str, tuple[Callable[[], Any], str]] = {
    "a list": (lambda: [0, 7], r"an int32 or int64 tensor \[N\+1\], got list"),
    "floats": (lambda: torch.tensor([0.0, 7.0]), r"an int32 or int64 tensor \[N\+1\], got torch.float32 \[2\]"),
    "bytes": (lambda: torch.tensor([0, 7], dtype=torch.uint8), r"an int32 or int64 tensor .*got torch.uint8"),
    "booleans": (lambda: torch.tensor([False, True]), r"an int32 or int64 tensor .*got torch.bool"),
    "two dimensions": (lambda: torch.tensor([[0, 7]]), r"an int32 or int64 tensor .*got torch.int64 \[1, 2\]"),
    "no dimension": (lambda: torch.tensor(7), r"an int32 or int64 tensor .*got torch.int64 \[\]"),
    "empty": (lambda: torch.zeros(0, dtype=torch.int64), r"N\+1 entries of N >= 1 sequences, got 0"),
    "no sequence": (lambda: torch.tensor([0]), r"N\+1 entries of N >= 1 sequences, got 1"),
    "begins late": (lambda: torch.tensor([1, 7]), r"from 0 to 7 \(T\), got \[1, 7\]"),
    "ends early": (lambda: torch.tensor([0, 6]), r"from 0 to 7 \(T\), got \[0, 6\]"),
    "ends late": (lambda: torch.tensor([0, 8]), r"from 0 to 7 \(T\), got \[0, 8\]"),
    "falls": (lambda: torch.tensor([0, 5, 3, 7]), r"from 0 to 7 \(T\), got \[0, 5, 3, 7\]"),
    "negative": (lambda: torch.tensor([0, -1, 7]), r"from 0 to 7 \(T\), got \[0, -1, 7\]"),
    "long": (lambda: torch.tensor([0, *range(9), 6]), r"from 0 to 7 \(T\), got \[0, 0, 1, 2, '...', 7, 8, 6\]"),
}


@pytest.mark.parametrize("name", MIXERS)
def test_wrong_borders_are_refused(name: str) -> None:
    layer = build(name)
    for make, message in BAD_BORDERS.values():
        with pytest.raises(GSAError, match=f"^{name}: cu_seqlens must (be|hold|rise) {message}"):
            layer(tokens(1, T), cu_seqlens=make())
    with pytest.raises(GSAError, match=f"^{name}: cu_seqlens packs sequences into a batch of 1, but there are 3 rows"):
        layer(tokens(B, T), cu_seqlens=torch.tensor([0, T]))


@pytest.mark.parametrize("name", MIXERS)
def test_mask_and_borders_together_are_refused(name: str) -> None:
    for mask in (torch.ones(1, T), torch.zeros(1, T)):
        with pytest.raises(GSAError, match=f"^{name}: mask and cu_seqlens exclude each other"):
            build(name)(tokens(1, T), mask=mask, cu_seqlens=torch.tensor([0, T]))


@every_system
def test_a_state_of_another_number_of_sequences_is_refused(system: str) -> None:
    layer = build(system)
    sentence = rf"^{layer.options.mixer}: state\['\w+'\] is of 2 sequences, there are"
    for state in (layer.init_state(2), layer(tokens(2, T))[1]):
        with pytest.raises(GSAError, match=f"{sentence} 3"):
            layer(tokens(B, T), state)
        with pytest.raises(GSAError, match=f"{sentence} 3"):
            layer(tokens(B, T), state, mask=torch.tensor([[1, 1, 0, 0, 1, 0, 1]] * B))
        with pytest.raises(GSAError, match=f"{sentence} 1"):
            layer(tokens(1, T), state, cu_seqlens=torch.tensor([0, T]))


@every_system
def test_a_state_of_another_mixer_is_refused(system: str) -> None:
    """In one sentence, whether names differ or only sizes."""
    layer, x = build(system), tokens(B, T)
    own = {name: width_of(layer, value) for name, value in layer(x)[1].items()}
    for other in SYSTEMS:
        other_layer = build(other)
        state = other_layer(x)[1]
        sizes = {name: width_of(other_layer, value) for name, value in state.items()}
        if sizes != own:  # otherwise nothing tells them apart
            with pytest.raises(GSAError, match=r"state.*(must hold .*, got |must be a tensor .*, got )"):
                layer(x, state)


def width_of(layer: Mixer, x: Tensor) -> list[int]:
    """The shape of a part of a state, without what may grow."""
    return list(x.shape[2:] if layer.options.mixer == "attention" else x.shape[1:])


@every_system
def test_a_state_of_other_sizes_is_refused(system: str) -> None:
    """Never an output for more or fewer tokens than came, as a longer window of a convolution would give."""
    layer, mask = build(system), torch.tensor([[1, 1, 0, 0, 1, 0, 1]] * B)
    state = layer(tokens(B, T))[1]
    for name, x in state.items():
        wrong = [torch.cat([x, x[..., :1]], -1) if x.dim() > 1 else x[:, None].expand(-1, 2)]
        if x.dim() > 1 and layer.options.mixer != "attention":
            wrong += [torch.cat([x, x[:, :1]], 1), x[:, 1:]]
        for other in (other for other in wrong if other.shape != x.shape):  # what is empty stays so
            with pytest.raises(GSAError, match="state"):
                layer(tokens(B, T), {**state, name: other})
            with pytest.raises(GSAError, match="state"):
                layer(tokens(B, T), {**state, name: other}, mask=mask)


@every_system
def test_what_is_no_state_is_refused(system: str) -> None:
    layer = build(system)
    state = layer.init_state(B)
    first = next(iter(state))
    for wrong in (
        [],
        (),
        0,
        "state",
        tuple(state.values()),
        {},
        {**state, "more": torch.zeros(B)},
        {name: x for name, x in state.items() if name != first},
        {**state, first: None},
        {**state, first: state[first].tolist()},
        {**state, first: torch.tensor(0.0)},
    ):
        with pytest.raises(GSAError, match=f"^{layer.options.mixer}: state"):
            layer(tokens(B, T), wrong)


@every_system
def test_a_misspelt_argument_is_refused(system: str) -> None:
    layer, x = build(system), tokens(1, T)
    for wrong in ({"cu_seqlen": torch.tensor([0, T])}, {"attention_mask": torch.ones(1, T)}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            layer(x, **wrong)
    if layer.options.mixer != "hgrn2":
        with pytest.raises(TypeError, match="shared"):
            layer(x, shared=torch.zeros(2, D))


# What is promised


@every_system
def test_a_state_that_is_not_wanted_does_not_come_back(system: str) -> None:
    layer, x = build(system), tokens(2, T)
    mask = torch.tensor([[1] * T, [0] + [1] * (T - 1)])
    for how in ({}, {"mask": mask}):
        y, state = layer(x, **how, return_state=False)
        assert state is None
        assert torch.equal(y, layer(x, **how)[0])


def test_a_bound_keeps_at_least_so_much() -> None:
    """HGRN2 by itself takes a bound too: with one of nearly 1, gates keep nearly everything."""
    layer, x = build("hgrn2"), tokens(1, T)
    kept = torch.tensor(0.999, dtype=torch.float64)
    bound = torch.stack([kept.log(), (1 - kept).log()])[:, None].expand(2, D)
    free, bounded = (layer(x, shared=given)[1]["S"] for given in (None, bound))
    assert bounded.abs().max() < 0.1 * free.abs().max()  # what is not forgotten is not written either


@every_system
def test_outputs_are_zero_at_pads_and_nothing_else_changes(system: str) -> None:
    """Wherever the pads lie, each row is what its tokens alone would be; NaN in a pad reaches nothing."""
    layer, x = build(system), tokens(5, T)
    mask = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0], [0, 1, 0, 0, 1, 1, 0], [0] * 7]).bool()
    past = layer(tokens(5, 4))[1]
    for before in (None, past):
        y, after = layer(x.masked_fill(~mask[..., None], torch.nan), before, mask=mask)
        assert (y[~mask] == 0).all()
        for i in range(5):
            state = None if before is None else {name: value[i : i + 1] for name, value in before.items()}
            alone, left = layer(x[i : i + 1, mask[i]], state)
            assert torch.allclose(y[i][mask[i]], alone[0], rtol=1e-9, atol=1e-12)
            assert_equal_states(row(layer, after, i), row(layer, left, 0))


@every_system
def test_mask_may_be_booleans_or_numbers(system: str) -> None:
    layer, x = build(system), tokens(2, T)
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1]])
    expected, after = layer(x, mask=mask)
    for dtype in (torch.bool, torch.uint8, torch.int32, torch.float32, torch.bfloat16):
        y, state = layer(x, mask=mask.to(dtype))
        assert torch.equal(y, expected)
        assert_equal_states(state, after)
    with pytest.raises(GSAError, match=r"mask must hold 1 at tokens and 0 at pads, got \[-inf, 0.0\]"):
        layer(x, mask=mask.float().log())  # as attention adds to its scores


@every_system
def test_a_mask_without_pads_is_no_mask(system: str) -> None:
    layer, x = build(system), tokens(B, T)
    y, state = layer(x)
    y_, state_ = layer(x, mask=torch.ones(B, T, dtype=torch.int64))
    assert torch.equal(y, y_)
    assert_equal_states(state_, state)


@every_system
def test_packed_sequences_do_not_see_each_other(system: str) -> None:
    layer = build(system)
    lengths = [3, 0, 1, 5, 0]
    borders = torch.tensor([0, *lengths]).cumsum(0)
    x, past = tokens(1, sum(lengths)), layer(tokens(5, 4))[1]
    for before in (None, past):
        for dtype in (torch.int32, torch.int64):
            y, after = layer(x, before, cu_seqlens=borders.to(dtype))
            for i, part in enumerate(x.split(lengths, 1)):
                state = None if before is None else {name: value[i : i + 1] for name, value in before.items()}
                alone, left = layer(part, state)
                assert torch.allclose(y[:, borders[i] : borders[i + 1]], alone, rtol=1e-9, atol=1e-12)
                assert_equal_states(row(layer, after, i), row(layer, left, 0))


@every_system
@pytest.mark.parametrize("lengths", [[9, 4], [1] * 13, [2, 1, 0, 5, 5]], ids=str)
def test_any_split_of_a_sequence_gives_the_same_answer(system: str, lengths: list[int]) -> None:
    layer, x = build(system), tokens(B, 13)
    expected, last = layer(x)
    state, parts = None, []
    for part in x.split(lengths, 1):
        y, state = layer(part, state)
        parts.append(y)
    assert torch.allclose(torch.cat(parts, 1), expected, rtol=1e-9, atol=1e-12)
    assert_equal_states(state, last)


CALLS: dict[str, Callable[[Mixer, State], tuple[Tensor, State | None]]] = {
    "sequence": lambda layer, state: layer(tokens(B, T), state),
    "token": lambda layer, state: layer(tokens(B, 1), state),
    "nothing": lambda layer, state: layer(tokens(B, 0), state),
    "pads": lambda layer, state: layer(tokens(B, T), state, mask=torch.tensor([[1, 1, 0, 0, 1, 0, 1]] * B)),
    "packed": lambda layer, state: layer(tokens(1, T), state, cu_seqlens=torch.tensor([0, 2, 2, T])),
}


@every_system
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("gradients", [True, False])
def test_a_state_is_not_changed_by_a_call(system: str, call: str, gradients: bool) -> None:
    layer = build(system)
    with torch.set_grad_enabled(gradients):
        for state in (layer.init_state(B), layer(tokens(B, 5))[1]):
            before = copied(state)
            _, after = CALLS[call](layer, state)
            assert state.keys() == before.keys()
            assert all(torch.equal(state[name], before[name]) for name in before)
            if not gradients and call != "nothing":  # what comes back is no view that a later call could write to
                kept = copied(after)
                CALLS[call](layer, after)
                assert all(torch.equal(after[name], kept[name]) for name in kept)


@every_system
@pytest.mark.parametrize("call", CALLS)
def test_a_fresh_state_is_the_same_as_none(system: str, call: str) -> None:
    layer = build(system)
    torch.manual_seed(1)
    y, state = CALLS[call](layer, None)
    torch.manual_seed(1)
    y_, state_ = CALLS[call](layer, layer.init_state(B))
    assert torch.allclose(y, y_, rtol=1e-9, atol=1e-12)
    assert_equal_states(state_, state)


@every_system
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_state_keeps_its_names_and_dtypes(system: str, dtype: torch.dtype) -> None:
    """And but for attention, whose state grows, its shapes."""
    layer = build(system).to(dtype)
    fresh = layer.init_state(B)
    state = layer(tokens(B, T).to(dtype))[1]
    again = layer(tokens(B, 1).to(dtype), state)[1]
    for after in (state, again):
        assert {name: x.dtype for name, x in after.items()} == {name: x.dtype for name, x in fresh.items()}
        if "attention" not in system:
            assert {name: x.shape for name, x in after.items()} == {name: x.shape for name, x in fresh.items()}
    assert all(x.shape[0] == B for x in again.values())


@every_system
def test_no_tokens_leave_the_state_as_it_is(system: str) -> None:
    layer = build(system)
    for before in (None, layer(tokens(B, 5))[1]):
        expected = layer.init_state(B) if before is None else before
        y, after = layer(tokens(B, 0), before)
        assert y.shape == (B, 0, D)
        assert_equal_states(after, expected)
        y, after = layer(tokens(B, T), before, mask=torch.zeros(B, T, dtype=torch.int64))
        assert torch.equal(y, torch.zeros(B, T, D, dtype=torch.float64))
        assert_equal_states(after, expected)
        y, after = layer(tokens(1, 0), before, cu_seqlens=torch.zeros(B + 1, dtype=torch.int64))
        assert y.shape == (1, 0, D)
        assert_equal_states(after, expected)


@every_system
def test_no_tokens_have_no_gradient(system: str) -> None:
    layer = build(system)
    x = tokens(B, 0).requires_grad_()
    layer(x)[0].sum().backward()
    assert all(weight.grad is None or (weight.grad == 0).all() for weight in layer.parameters())


@every_system
def test_no_rows_are_no_outputs(system: str) -> None:
    layer = build(system)
    y, state = layer(tokens(0, T))
    assert y.shape == (0, T, D)
    assert all(x.shape[0] == 0 for x in state.values())


# Sequences and Padding by themselves

lengths_lists = st.lists(st.integers(0, 5), min_size=1, max_size=6)


@examples(100)
@given(lengths_lists, st.data())
def test_packed_sequences(lengths: list[int], data: st.DataObject) -> None:
    start = data.draw(st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths)))
    x = torch.zeros(1, sum(lengths), D)
    found = sequences_of(x, torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), "test")
    assert found.packed
    assert found.count == len(lengths)
    assert found.ids.tolist() == [i for i, length in enumerate(lengths) for _ in range(length)]
    assert found.positions(None).tolist() == [[t for length in lengths for t in range(length)]]
    began = [start[i] + t for i, length in enumerate(lengths) for t in range(length)]
    assert found.positions(torch.tensor(start)).tolist() == [began]
    assert found.lengths().tolist() == lengths


def test_sequences_that_are_rows() -> None:
    found = sequences_of(torch.zeros(B, T, D), None, "test")
    assert not found.packed
    assert found.count == B
    assert found.ids is None
    assert found.positions(None).tolist() == [list(range(T))]
    assert found.positions(torch.tensor([0, 5, 2])).tolist() == [[start + t for t in range(T)] for start in (0, 5, 2)]
    assert found.lengths().tolist() == [T] * B


@examples(100)
@given(st.integers(1, 4), st.integers(1, 6), st.data())
def test_padding_packs_what_is_real_and_unpacks_to_the_same_places(rows: int, length: int, data: st.DataObject) -> None:
    bits = data.draw(st.lists(st.booleans(), min_size=rows * length, max_size=rows * length))
    mask = torch.tensor(bits).reshape(rows, length)
    x = torch.arange(1.0, rows * length * 2 + 1).reshape(rows, length, 2)
    padding = padding_of(mask, x, None, "test")
    if mask.all():
        assert padding is None
        padding = Padding(mask)
    packed = padding.pack(x)
    assert torch.equal(packed[0], x[mask])
    assert Sequences(1, packed.shape[1], x.device, padding.cu_seqlens).lengths().tolist() == mask.sum(1).tolist()
    assert torch.equal(padding.unpack(packed), x * mask[..., None])
    assert padding.extra == 0


@pytest.mark.parametrize("name", ["gsa", "abc", "gla", "mamba", "hybrid"])
def test_a_layer_that_has_diverged_shows_it_in_its_outputs(name: str) -> None:
    """The operators refuse NaN gates, layers do not: training counts such steps and goes on."""
    layer = mixer(name, hidden_size=16)
    y, state = layer(torch.full((1, 4, 16), torch.nan))
    assert y.isnan().all()
    y, _ = layer(torch.full((1, 1, 16), torch.nan), state)
    assert y.isnan().all()
