"""ModelState: its tensors by name, and files of them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gsa import GSAError, ModelState
from tests.models.cases import ids, model


def state_of(case: str) -> ModelState:
    with torch.no_grad():
        state = model(case)(ids(2, 9)).state
    assert state is not None
    return state


def assert_same(state: ModelState, other: ModelState) -> None:
    assert [sorted(layer) for layer in state.layers] == [sorted(layer) for layer in other.layers]
    for name, x in state.tensors().items():
        assert torch.equal(other.tensors()[name], x), name


@pytest.mark.parametrize("case", ["gsa", "attention", "mamba"])
def test_tensors_are_the_whole_state(case: str, tmp_path: Path) -> None:
    """What torch and safetensors write of them, they read, without a class of ours."""
    state = state_of(case)
    torch.save(state.tensors(), tmp_path / "state.pt")
    assert_same(state, ModelState.from_tensors(torch.load(tmp_path / "state.pt", weights_only=True)))
    save_file(state.tensors(), tmp_path / "state.safetensors")
    assert_same(state, ModelState.from_tensors(load_file(tmp_path / "state.safetensors")))


def test_torch_reads_a_state_that_it_wrote() -> None:
    state, file = state_of("gsa"), io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    again = torch.load(file, weights_only=True)
    assert type(again) is ModelState
    assert_same(state, again)
    more = ids(2, 3)
    with torch.no_grad():
        assert torch.equal(model("gsa")(more, again).logits, model("gsa")(more, state).logits)


def test_layers_have_an_order_whatever_that_of_the_tensors() -> None:
    tensors = {f"layers.{i}.k": torch.full((1, 2), i) for i in (10, 2, 0, 1, 9, 3, 4, 8, 7, 6, 5)}
    assert [int(layer["k"][0, 0]) for layer in ModelState.from_tensors(tensors).layers] == list(range(11))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), r"expected tensors of layers 0, 1, ..., got layers \[\]"),
        (("layers.1.k",), r"got layers \[1\]"),
        (("layers.0.k", "logits"), "expected tensors named layers.0.k and the like, got 'logits'"),
        (("layers.x.k",), "got 'layers.x.k'"),
    ],
)
def test_other_tensors_are_no_state(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(GSAError, match=f"ModelState: .*{message}"):
        ModelState.from_tensors(dict.fromkeys(names, torch.zeros(1)))
