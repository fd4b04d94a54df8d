"""Fresh weights."""

from __future__ import annotations

from torch import nn

from gsa.mixers.base import Mixer
from gsa.models.backbone import SwiGLU
from gsa.models.config import ModelConfig


def initialise(module: nn.Module, config: ModelConfig) -> None:
    """Gives one module fresh weights; its children have theirs already (`model.apply` goes in that order).

    Matrices are normal, biases 0, norms 1. The last matrix of each mixer and MLP is divided by the square root of how
    many of them add to the stream of features, so that it does not grow with depth. What a mixer begins with in a way
    of its own comes last.
    """
    deviation = config.initializer_range
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, 0.0, deviation)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    if isinstance(module, (Mixer, SwiGLU)):
        last = module.down_proj if isinstance(module, SwiGLU) else module.o_proj
        nn.init.normal_(last.weight, 0.0, deviation / (2 * config.num_hidden_layers) ** 0.5)
    if isinstance(module, Mixer):
        module.reset_parameters()
