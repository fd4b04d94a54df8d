"""What layers of one mixer class share in a model: parameters of the model, and a part of them for each layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gsa import LM, ModelConfig
from gsa.mixers import MIXERS
from gsa.mixers.base import Layers
from gsa.mixers.gsa import GatedSlotAttention
from gsa.mixers.hgrn2 import lower_bounds
from gsa.mixers.shared import add_shared_parameters, shared_inputs


def layers(mixer: str, count: int = 4) -> Layers:
    return ModelConfig(mixer=mixer, hidden_size=16, num_hidden_layers=count, vocab_size=10).layers


@pytest.mark.parametrize(
    ("mixer", "bounded"),
    [
        ("hgrn2", [1, 2, 3]),
        ("gsa,hgrn2", [1, 3]),
        ("hgrn2,gsa", [2]),
        ("gsa,hgrn2(lower_bound=false)", []),
        *((name, []) for name in MIXERS if name != "hgrn2"),
    ],
)
def test_layers_of_hgrn2_behind_the_first_share_bounds(mixer: str, bounded: list[int]) -> None:
    model = nn.Module()
    add_shared_parameters(model, layers(mixer))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes == ({"lower_bounds": (4, 16)} if bounded else {})
    found = shared_inputs(model, layers(mixer))
    assert [i for i, x in enumerate(found) if x is not None] == bounded
    for i in bounded:
        assert torch.equal(found[i], lower_bounds(model.lower_bounds)[i])


def test_any_class_can_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model holds the parameter under its name, every layer gets its part, and gradients come back."""
    mix = GatedSlotAttention.mix

    def shared_parameters(layers: Layers) -> dict[str, nn.Parameter]:
        return {"scales": nn.Parameter(torch.ones(len(layers)))}

    def shared_inputs(layers: Layers, model: nn.Module) -> dict[int, Tensor]:
        return dict(enumerate(model.scales))

    def scaled(self: GatedSlotAttention, *args: object, shared: Tensor) -> tuple[Tensor, object]:
        y, state = mix(self, *args)
        return y * shared, state

    config = ModelConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_slots=4, vocab_size=10)
    ids = torch.randint(10, (2, 7))
    plain = LM(config)
    expected = plain(ids).logits
    monkeypatch.setattr(GatedSlotAttention, "shared_parameters", shared_parameters)
    monkeypatch.setattr(GatedSlotAttention, "shared_inputs", shared_inputs)
    monkeypatch.setattr(GatedSlotAttention, "mix", scaled)
    model = LM(config)
    model.load_state_dict({**plain.state_dict(), "model.scales": torch.tensor([1.0, 0.5])})
    model(ids, labels=ids).loss.backward()
    assert (model.model.scales.grad != 0).all()
    with torch.no_grad():
        model.model.layers[1].mixer.o_proj.weight *= 2  # undoes the second layer's scale
    torch.testing.assert_close(model(ids).logits, expected)
