"""ModelConfig: one dataclass says everything about a model, is checked, and goes to JSON and back."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from gsa.errors import GSAError, raised_by
from gsa.files import named, parse_json, read_json
from gsa.mixers.base import MAX_WIDTH, Options
from gsa.mixers.registry import (
    MAX_LAYERS,
    mixer_class,
    mixer_options,
    option_names,
    pattern,
    suggestion,
)
from gsa.options import check, number
from gsa.terminal import quoted


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A language model: embedding, blocks (norm, mixer, norm, SwiGLU), norm, head.

    Fields down to `initializer_range` are the model's. The others are options of mixers: None leaves them at the
    mixer's own default, and one that no layer's mixer has is refused. The sentence beneath each begins with the mixers
    that have it; more about it stands in the options of the mixer, e.g. `gsa.mixers.gsa.GSAOptions`.

    >>> config = ModelConfig(mixer="gsa*3,attention(window=512)", hidden_size=256, num_hidden_layers=8, vocab_size=4096)
    >>> [options.mixer for options in config.layers[:4]]
    ['gsa', 'gsa', 'gsa', 'attention']
    """

    mixer: str = "gsa"
    """A mixer's name, or a pattern that is repeated over the layers, e.g. `gsa*3,attention(window=512)`."""
    vocab_size: int = number(32000, least=1, most=2**24)
    """Number of tokens."""
    hidden_size: int = number(2048, least=1, most=MAX_WIDTH)
    """Model width."""
    num_hidden_layers: int = number(24, least=1, most=MAX_LAYERS)
    """Number of blocks."""
    intermediate_size: int | None = number(None, least=1, most=16 * MAX_WIDTH)
    """Width of the MLPs; 8/3 of the model width, rounded up to a multiple of 256, by default."""
    rms_norm_eps: float = number(1e-6, above=0)
    """Added to the mean square in norms."""
    tie_word_embeddings: bool = False
    """Whether the head has the embedding's weights."""
    initializer_range: float = number(0.02, above=0)
    """Standard deviation of fresh weights."""

    num_attention_heads: int | None = None
    """All but mamba: query heads; 4, 8 (retnet, supra, linear), or of width 128 (hgrn2), 64 (attention, hybrid)."""
    num_key_value_heads: int | None = None
    """All but hgrn2, mamba: heads of keys and values, each for a group of query heads; as many by default."""
    head_dim: int | None = None
    """attention, hybrid: width of a head; the model width over the heads by default."""
    expand_k: float | None = None
    """All but hgrn2, mamba, attention, hybrid: width of all queries together, over the model width."""
    expand_v: float | None = None
    """All but hgrn2, mamba, attention, hybrid: width of all values (one per query head), over the model width."""
    num_slots: int | None = None
    """gsa, abc, hybrid: memory slots of each key/value head; 64 by default."""
    gate: str | None = None
    """gsa: forget gate from the token (`data`, the default), the same for all tokens (`constant`), or `none`; with a
    router also `head`, one for all slots of a head."""
    gate_temperature: float | None = None
    """gsa, gla, hybrid: tau in gates sigmoid(logits)^(1/tau), larger forgets more slowly; 8 by default (gla: 16)."""
    gate_bias: bool | None = None
    """gsa: whether logits of gates have a bias, which begins with half-lives from 16 to 1024 tokens."""
    router: str | None = None
    """gsa: slots that take a token: the largest of `sigmoid` or `softmax` scores, or all (`none`, the default)."""
    routed_slots: int | None = None
    """gsa: how many slots a router chooses; 8 by default."""
    router_noise: float | None = None
    """gsa: Gumbel noise on a router's logits while it is trained, times this; 1 by default."""
    gate_rank: int | None = None
    """gla: rank of the map from token to gates; 16 by default."""
    gate_clamp: float | None = None
    """abc: write logits are kept between minus this and this, 0 for no limit; 32 by default."""
    readout: str | None = None
    """gsa: how slots are read: `softmax` (the default), `identity`, `swish`, `relu` or `relu2`."""
    normalise: bool | None = None
    """abc: whether memory is a running average of what was written (the default), or a growing sum."""
    decay: str | None = None
    """retnet, supra, linear: whether each head forgets at a rate of its own (`fixed`) or nothing (`none`)."""
    lower_bound: bool | None = None
    """hgrn2: whether gates are bounded below, by bounds that the layers learn together; true by default."""
    feature_map: str | None = None
    """All but hgrn2, mamba, attention, hybrid: applied to queries and keys, e.g. `relu`, `t2r`, `softmax` or `none`."""
    value_activation: str | None = None
    """gsa: applied to values; `swish` by default."""
    output_activation: str | None = None
    """gsa: applied to the output, before its norm; `swish` by default."""
    output_gate: bool | None = None
    """All but hgrn2, mamba, attention, hybrid: whether the output is multiplied by swish(W x)."""
    output_norm: str | None = None
    """All but hgrn2, mamba, attention, hybrid: RMS norm of the output by `heads`, over all (`full`), or `none`."""
    output_norm_eps: float | None = None
    """All but mamba, attention, hybrid: added to the mean square in the output's norm; `rms_norm_eps` by default."""
    scale: float | None = None
    """All but mamba, attention, hybrid: factor of queries; 1 (gsa), or one over the root of a head's width."""
    conv_size: int | None = None
    """All but attention, hybrid: tokens that a causal convolution spans; 0 for none, the default but for mamba (4)."""
    conv_bias: bool | None = None
    """All but attention, hybrid: whether the convolution has a bias."""
    rope_theta: float | None = None
    """abc, retnet, attention, supra, linear, hybrid: base of the rotary frequencies; 0 for no rotary embedding."""
    window: int | None = None
    """attention, hybrid: tokens that a token sees, itself among them; all before it, or 64 (hybrid), by default."""
    num_sinks: int | None = None
    """hybrid: first tokens of a sequence that are kept for ever; 4 by default."""
    slot_router: str | None = None
    """hybrid: how slots share a token: by a `softmax` over them (the default), or by `gates` as in gsa."""
    slot_positions: str | None = None
    """hybrid: rotary positions of slots, each its `own` (the default), or as if all had just left the `window`."""
    qkv_bias: bool | None = None
    """All but hgrn2, mamba: whether the projections to queries, keys and values have biases."""
    qk_norm: bool | None = None
    """gsa, attention, hybrid: whether queries and keys pass an RMS norm, before rotary positions."""
    qk_norm_eps: float | None = None
    """attention, hybrid: added to the mean square in that norm; `rms_norm_eps` by default."""
    expand: float | None = None
    """mamba: channels over the model width; 2 by default."""
    ssm_state_size: int | None = None
    """mamba: numbers in the state of a channel; 16 by default."""
    time_step_rank: int | None = None
    """mamba: rank of the map to time steps; a sixteenth of the model width by default."""

    def __post_init__(self) -> None:
        check(self, "config")
        used = {name for options in self.layers for name in option_names(options.mixer)}
        for name in self.option_names():
            if getattr(self, name) is not None and name not in used:
                raise GSAError(f"config: {name} is not an option of mixer {quoted(self.mixer)}, and would do nothing")
        with_mlp = any(mixer_class(options.mixer).with_mlp for options in self.layers)
        if self.intermediate_size is not None and not with_mlp:
            raise GSAError(f"config: intermediate_size: blocks of mixer {quoted(self.mixer)} have no MLP")

    @property
    def mlp_width(self) -> int:
        """Width of the MLPs: `intermediate_size`, or what stands for it."""
        return self.intermediate_size or -(-self.hidden_size * 8 // 3 // 256) * 256

    @cached_property
    def layers(self) -> tuple[Options, ...]:
        """The options of each layer's mixer."""
        period = pattern(self.mixer)
        if len(period) > self.num_hidden_layers:
            raise GSAError(
                f"config: mixer {quoted(self.mixer)} names {len(period)} layers, there are {self.num_hidden_layers} "
                "(num_hidden_layers)"
            )
        everywhere = ("hidden_size", "rms_norm_eps")
        shared = {name: getattr(self, name) for name in (*everywhere, *self.option_names())}
        layers = []
        for name, own in period:
            for option in everywhere:
                if option in own:
                    raise GSAError(f"config: {option} is the same for all layers and cannot be set in a pattern")
            known = option_names(name)
            given = {key: value for key, value in shared.items() if key in known and value is not None}
            layers.append(mixer_options(name, {**given, **own}))
        return tuple(layers[i % len(layers)] for i in range(self.num_hidden_layers))

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """The fields that are options of mixers."""
        names = [entry.name for entry in fields(cls)]
        return tuple(names[names.index("initializer_range") + 1 :])

    def to_dict(self) -> dict[str, Any]:
        """What was set, by name; options at their default are left out."""
        model = {entry.name for entry in fields(self)} - set(self.option_names())
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: value for name, value in values.items() if name in model or value is not None}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """The config with these fields; a name that is none is refused."""
        if not isinstance(values, dict):
            raise GSAError(f"config: expected an object with fields, got {type(values).__name__}")
        known = [entry.name for entry in fields(cls)]
        for name in values:
            if name not in known:
                raise GSAError(f"config: unknown field {quoted(name)}{suggestion(name, known)}")
        return cls(**values)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> ModelConfig:
        """The config in a JSON text."""
        return cls.from_dict(parse_json(text, "config"))

    @classmethod
    def load(cls, path: str | Path) -> ModelConfig:
        """The config in a JSON file."""
        with raised_by("config"):
            fields = read_json(named(path, "file"))
        return cls.from_dict(fields)
