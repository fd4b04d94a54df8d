"""The model of the recall experiment: embedding, mixers, and the embedding again as head. No MLPs.

Shape letters: B batch, T time, D model width, V vocabulary, Q places where something is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gsa.mixers.convolution import ShortConvolution
from gsa.mixers.norm import RMSNorm
from gsa.mixers.registry import mixer, option_names
from gsa.mixers.sequences import sequences_of
from gsa.models.init import initialise

EPSILON = 1e-6


class System(NamedTuple):
    """A mixer with its options in this experiment."""

    label: str
    mixer: str
    slots: bool = False
    """Whether it has slots. Their memory is as large whatever the number of heads; that of others shrinks with it."""
    options: Callable[[int, int], dict[str, Any]] = lambda width, slots: {}
    """More of them, by the width of a head and slots."""


def _raven(width: int, slots: int) -> dict[str, Any]:
    return {"router": "sigmoid", "routed_slots": max(slots // 8, 1), "qk_norm": True, "scale": width**-0.5}


SYSTEMS: dict[str, System] = {
    "xfmr": System("Xfmr++", "attention"),
    "gsa": System("GSA", "gsa", slots=True),
    "raven": System("GSA with a router", "gsa", slots=True, options=_raven),
    "abc": System("ABC", "abc", slots=True),
    "gla": System("GLA", "gla"),
    "hgrn2": System("HGRN2", "hgrn2"),
    "retnet": System("RetNet", "retnet"),
    "mamba": System("Mamba", "mamba"),
    "linear": System("linear", "linear"),
    "hybrid": System(
        "window and slots", "hybrid", slots=True, options=lambda width, slots: {"window": 8, "num_sinks": 0}
    ),
}
CONVOLUTION = 4
"""Tokens of the short convolution. It comes behind the projections to queries, keys and values; mixers that know no
such thing have it before them."""
CONVOLVED = ("mamba",)
"""Systems that have one by themselves."""


def options_of(system: str, *, width: int, heads: int, slots: int, convolution: bool) -> dict[str, Any]:
    """The options of a system's mixer."""
    known = SYSTEMS[system]
    options = {"hidden_size": width, **known.options(width // heads, slots)}
    if "num_attention_heads" in option_names(known.mixer):
        options["num_attention_heads"] = heads
    if known.slots:
        options["num_slots"] = slots
    return {**options, "conv_size": CONVOLUTION} if convolution and _behind_projections(system) else options


def _behind_projections(system: str) -> bool:
    return system not in CONVOLVED and "conv_size" in option_names(SYSTEMS[system].mixer)


class RecallModel(nn.Module):
    """What stands at the places where something is asked, from tokens."""

    def __init__(
        self,
        system: str,
        *,
        width: int,
        heads: int,
        slots: int,
        convolution: bool,
        vocab_size: int,
        layers: int,
        dropout: float,
        std: float,
    ):
        super().__init__()
        self.embeddings, self.dropout = nn.Embedding(vocab_size, width), dropout
        options = options_of(system, width=width, heads=heads, slots=slots, convolution=convolution)
        self.mixers = nn.ModuleList(mixer(SYSTEMS[system].mixer, **options) for _ in range(layers))
        before = convolution and system not in CONVOLVED and not _behind_projections(system)
        self.convolutions = nn.ModuleList(
            ShortConvolution(width, CONVOLUTION, bias=False, activation="none") if before else nn.Identity()
            for _ in range(layers)
        )
        self.norms = nn.ModuleList(RMSNorm(width, EPSILON) for _ in range(layers + 1))
        self.apply(lambda module: initialise(module, std, layers))

    def forward(self, ids: Tensor, asked: Tensor) -> Tensor:
        """Features [Q, D] at the places `asked` among the tokens ids [B, T], counted row by row."""
        x = self.embeddings(ids)
        if self.training and self.dropout:
            x = F.dropout(x, self.dropout)
        sequences = sequences_of(x, None, "recall")
        for norm, convolution, layer in zip(self.norms, self.convolutions, self.mixers, strict=False):
            y = norm(x)
            if isinstance(convolution, ShortConvolution):
                y, _ = convolution(y, None, sequences, False)
            x = x + layer(y, sequences=sequences, return_state=False)[0]
        return self.norms[-1](x.flatten(0, 1)[asked])

    @torch.no_grad()
    def answers(self, ids: Tensor, asked: Tensor) -> Tensor:
        """The likeliest token [Q] of the whole vocabulary."""
        return (self(ids, asked) @ self.embeddings.weight.T).argmax(-1)

    @property
    def state_size(self) -> int | None:
        """Numbers of recurrent memory a sequence holds; None if it grows."""
        sizes = [layer.state_size for layer in self.mixers]
        return None if None in sizes else sum(sizes)  # type: ignore[arg-type]
