"""What layers of one mixer class share in a model: the model holds the parameters, and every layer gets its part."""

from __future__ import annotations

from torch import Tensor, nn

from gsa.mixers.base import Layers, Mixer
from gsa.mixers.registry import mixer_class


def add_shared_parameters(model: nn.Module, layers: Layers) -> None:
    """Gives a model what layers with these options share."""
    for kind in _classes(layers):
        for name, parameter in kind.shared_parameters(layers).items():
            assert not hasattr(model, name), f"{kind.__name__} shares {name}, which the model has already"
            model.register_parameter(name, parameter)


def shared_inputs(model: nn.Module, layers: Layers) -> list[Tensor | None]:
    """What each layer gets as `shared` in a pass; None where the layer's class shares nothing."""
    found: dict[int, Tensor] = {}
    for kind in _classes(layers):
        found.update(kind.shared_inputs(layers, model))
    return [found.get(number) for number in range(len(layers))]


def _classes(layers: Layers) -> list[type[Mixer]]:
    """The classes of these layers, each once."""
    return [mixer_class(name) for name in dict.fromkeys(options.mixer for options in layers)]
