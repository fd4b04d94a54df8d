"""The layers of a model as the native engine takes them: every mixer, in terms of the same few parts.

Shape letters: D model width, H key/value heads, HQ query heads, K, V widths of a head, M slots, E channels, S states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gsa.errors import GSAError
from gsa.infer.compiled_hybrid import window_sinks_and_slots
from gsa.infer.compiled_parts import NOWHERE, Cached, Parts, function_code, packed_weight
from gsa.mixers.abc import BoundedMemoryAttention
from gsa.mixers.activations import log_forget_gate
from gsa.mixers.attention import Attention
from gsa.mixers.base import Mixer
from gsa.mixers.gla import GatedLinearAttention
from gsa.mixers.gsa import GatedSlotAttention
from gsa.mixers.heads import HeadMixer
from gsa.mixers.hgrn2 import HGRN2
from gsa.mixers.hybrid import Hybrid
from gsa.mixers.mamba import Mamba
from gsa.mixers.retention import SUPRA, LinearAttention, Retention, head_decay
from gsa.mixers.rotary import Rope
from gsa.mixers.shared import shared_inputs
from gsa.models.backbone import Backbone, Block
from gsa.ops.native.structs import MEMORY_CODES, NORM_CODES, READOUT_CODES, ROUTER_CODES, int32


class Layer(Parts):
    """A layer of a model, without a state."""

    def __init__(self, block: Block, shared: Tensor | None, frequencies: Frequencies):
        super().__init__()
        self.frequencies = frequencies
        self.state_names = list(block.mixer.init_state(0))
        describe = DESCRIBED.get(type(block.mixer))
        if describe is None:
            raise GSAError(f"its mixer is {type(block.mixer).__name__}, which is not compiled")
        self.block.norm, self.block.epsilon = self.norm(block.mixer_norm)
        describe(self, block.mixer, shared)
        if block.mlp is not None:
            mlp = self.block.mlp
            for name in ("gate", "up", "down"):
                setattr(mlp, name, packed_weight(getattr(block.mlp, f"{name}_proj")).matrix())
            mlp.norm, mlp.epsilon = self.norm(block.mlp_norm)

    def turn(self, rope: Rope, width: int) -> None:
        """Rotary positions of heads so wide, unless theta is 0."""
        if rope.theta:
            self.block.heads.frequencies = self.frequencies.of(rope, width // 2)
            self.count_positions()


class Frequencies:
    """Rotary frequencies [half], the same tensor for the same numbers: layers that share one share their angles."""

    def __init__(self) -> None:
        self._known: dict[tuple[Rope, int], Tensor] = {}

    def of(self, rope: Rope, half: int) -> int:
        """Where the frequencies lie."""
        if (rope, half) not in self._known:
            self._known[rope, half] = rope.frequencies(half, torch.device("cpu"), torch.float64)
        return self._known[rope, half].data_ptr()


def described(backbone: Backbone) -> list[Layer]:
    """The layers of a model. Raises a GSAError that names the first that cannot be described, and why."""
    layers, frequencies = [], Frequencies()
    options = [block.mixer.options for block in backbone.layers]
    with torch.inference_mode(False), torch.no_grad():
        shared = shared_inputs(backbone, options)
        for number, (block, own) in enumerate(zip(backbone.layers, shared, strict=True)):
            try:
                layers.append(Layer(block, own, frequencies))
            except GSAError as error:
                raise GSAError(f"layer {number}: {error}") from None
    return layers


def _heads(layer: Layer, heads: int, queries: int, key_width: int, value_width: int, scale: float | None) -> None:
    """The numbers of heads, and a place for their outputs."""
    h = layer.block.heads
    h.heads, h.queries = int32("heads", heads), int32("query heads", queries)
    h.key_width, h.value_width = int32("the width of keys", key_width), int32("the width of values", value_width)
    h.scale = key_width**-0.5 if scale is None else scale
    h.o = layer.place(heads * queries * value_width)


def _norms(layer: Layer, mixer: GatedSlotAttention | Attention | Hybrid) -> None:
    """The norms of queries and keys."""
    h = layer.block.heads
    h.query_norm, h.epsilon = layer.norm(mixer.q_norm)
    h.key_norm, _ = layer.norm(mixer.k_norm)


def _output(
    layer: Layer, mixer: Mixer, o: int, *, gate: int = NOWHERE, norm: str = "none", function: str = "none"
) -> None:
    output = layer.block.output
    output.matrix, output.o, output.gate = packed_weight(mixer.o_proj).matrix(), o, gate
    output.norm_kind, output.function = NORM_CODES[norm], function_code(function)
    if norm != "none":
        output.norm, output.epsilon = layer.norm(mixer.norm)  # type: ignore[arg-type]


def _head_mixer(layer: Layer, mixer: HeadMixer, values: str = "none", function: str = "none") -> None:
    """Projections, convolutions, feature maps and output, which all mixers of this class have."""
    options, h = mixer.options, layer.block.heads
    if options.output_norm not in NORM_CODES:
        raise GSAError(f"its output_norm is {options.output_norm}, which is not compiled")
    feature: Any = mixer.feature_map.activation
    if mixer.feature_map.layer is not None:  # then the function, relu, comes behind its matrix
        feature = "none"
        h.map = layer.rows("feature_map", mixer.feature_map.layer.weight.t())
    if isinstance(mixer, GatedSlotAttention) and mixer.options.qk_norm:
        _norms(layer, mixer)
    for name, own in (("q", feature), ("k", feature), ("v", values)):
        convolution = layer.convolution_of(mixer, name)
        setattr(h, name, layer.product(getattr(mixer, f"{name}_proj"), function=own, convolution=convolution))
    gate = layer.product(mixer.g_proj, function="swish") if options.output_gate else NOWHERE
    H, HQ = options.kv_heads, options.num_attention_heads
    _heads(layer, H, HQ // H, options.key_width, options.value_width, options.scale)
    _output(layer, mixer, h.o, gate=gate, norm=options.output_norm, function=function)


def _slots(layer: Layer, options: Any, readout: str = "softmax") -> None:
    """A memory of slots."""
    layer.block.kind, memory = MEMORY_CODES["slots"], layer.block.memory
    memory.slots, memory.readout = int32("slots", options.num_slots), READOUT_CODES[readout]
    H, K, M = options.kv_heads, options.key_width, options.num_slots
    layer.keep_memory("k", "keys", H, K, M)
    layer.keep_memory("v", "values", H, M, options.value_width)


def _written(layer: Layer, projection: torch.nn.Module, options: Any, clamp: float, normalise: bool) -> None:
    """Slots with the gates of ABC."""
    gate = layer.write_gate(options.kv_heads, options.num_slots, clamp, normalise)
    layer.block.memory.decay, layer.block.memory.write = layer.product(projection, gate=gate), gate["write"]


def _gated_slots(layer: Layer, mixer: GatedSlotAttention, shared: Tensor | None) -> None:
    options, memory = mixer.options, layer.block.memory
    _head_mixer(layer, mixer, options.value_activation, options.output_activation)
    _slots(layer, options, options.readout)
    if options.gate == "none":
        _written(layer, mixer.f_proj, options, 0.0, False)
    elif options.router != "none":
        _routed(layer, mixer)
    elif options.gate == "constant":
        g = log_forget_gate(mixer.gate_logits, options.gate_temperature)
        layer.constant_gates(g.exp(), -torch.expm1(g))
    else:
        gate = layer.forget_gate(options.kv_heads * options.num_slots, options.gate_temperature, write=True)
        memory.decay, memory.write = layer.product(mixer.f_proj, gate=gate), gate["write"]


def _routed(layer: Layer, mixer: GatedSlotAttention) -> None:
    """Slots that a router chooses. Their decays take the place of its logits."""
    options, memory = mixer.options, layer.block.memory
    router = memory.router
    router.kind, router.chosen = ROUTER_CODES[options.router], int32("chosen slots", options.routed_slots)
    router.logits = memory.decay = layer.product(mixer.router.proj)
    memory.write = layer.place(options.kv_heads * options.num_slots)
    if options.gate == "head":
        gate = mixer.head_gate
        router.gates = layer.product(gate.proj, bias=gate.bias, function="softplus")
        router.rates = layer.rows("rates", gate.log_rate.exp())
    else:
        router.gates, router.temperature = layer.product(mixer.f_proj), options.gate_temperature


def _bounded_slots(layer: Layer, mixer: BoundedMemoryAttention, shared: Tensor | None) -> None:
    options = mixer.options
    _head_mixer(layer, mixer)
    layer.turn(options.rope, options.key_width)
    _slots(layer, options)
    _written(layer, mixer.s_proj, options, options.gate_clamp, options.normalise)


def _linear(layer: Layer, heads: int, key_width: int, value_width: int) -> None:
    """A memory of linear attention."""
    layer.block.kind = MEMORY_CODES["linear"]
    layer.keep_memory("S", "values", heads, key_width, value_width)


def _gated_linear(layer: Layer, mixer: GatedLinearAttention, shared: Tensor | None) -> None:
    options = mixer.options
    _head_mixer(layer, mixer)
    _linear(layer, options.kv_heads, options.key_width, options.value_width)
    low, high = mixer.gk_proj
    gate = layer.forget_gate(options.kv_heads * options.key_width, options.gate_temperature, write=False)
    layer.block.memory.decay = layer.product(high, input=layer.product(low), gate=gate)


def _retention(layer: Layer, mixer: Retention, shared: Tensor | None) -> None:
    options, memory = mixer.options, layer.block.memory
    _head_mixer(layer, mixer)
    layer.turn(options.rope, options.key_width)
    memory.own = options.decay == "fixed"
    heads = options.num_attention_heads if memory.own else options.kv_heads
    _linear(layer, heads, options.key_width, options.value_width)
    decay = torch.ones(heads, dtype=torch.float32, device="cpu")
    if memory.own:
        decay = head_decay(heads, decay).exp()
    layer.constant_gates(decay[:, None].expand(heads, options.key_width))


def _hgrn2(layer: Layer, mixer: HGRN2, shared: Tensor | None) -> None:
    options, h = mixer.options, layer.block.heads
    D, width = options.hidden_size, options.width
    gate = layer.forget_gate(D, 1.0, write=True, bounds=shared)
    for name, projection, more in (
        ("q", "q", {"function": "swish"}),
        ("decay", "f", {"gate": gate}),
        ("v", "i", {}),
    ):
        part = layer.block.memory if name == "decay" else h
        product = layer.product(
            getattr(mixer, f"{projection}_proj"), convolution=layer.convolution_of(mixer, projection), **more
        )
        setattr(part, name, product)
    h.k = gate["write"]
    _heads(layer, options.heads, 1, width, width, options.scale)
    _linear(layer, options.heads, width, width)
    _output(layer, mixer, h.o, norm="full")


def _mamba(layer: Layer, mixer: Mamba, shared: Tensor | None) -> None:
    options, scan = mixer.options, layer.block.scan
    E, S, rank = options.channels, options.ssm_state_size, options.rank
    # Channels and gate are two halves of one product, both behind the same function.
    scan.u = layer.product(
        mixer.in_proj,
        function=mixer.conv.activation,
        convolution=("conv", mixer.conv),
        convolution_function="none",
    )
    scan.gate = scan.u + E
    low = layer.product(mixer.x_proj, input=scan.u)
    scan.B, scan.C = low + rank, low + rank + S
    scan.dt = layer.product(mixer.dt_proj, input=low, function="softplus")
    scan.y = layer.place(E)
    scan.channels, scan.states = int32("channels", E), int32("states", S)
    scan.A = layer.matrix("A_log", -torch.exp(mixer.A_log).t())
    scan.skip = layer.rows("D", mixer.D)
    layer.block.kind = MEMORY_CODES["scan"]
    layer.keep_channels("h", S, E)
    _output(layer, mixer, scan.y)


def _attention(layer: Layer, mixer: Attention, shared: Tensor | None) -> None:
    _attention_heads(layer, mixer)
    window = mixer.options.window
    layer.block.kind, layer.block.cache.window = MEMORY_CODES["cache"], window or 0
    layer.cached = Cached("k", "v", None if window is None else window - 1, filled=False)


def _hybrid(layer: Layer, mixer: Hybrid, shared: Tensor | None) -> None:
    _attention_heads(layer, mixer)
    window_sinks_and_slots(layer, mixer)


def _attention_heads(layer: Layer, mixer: Attention | Hybrid) -> None:
    """Projections, norms, rotary positions and output."""
    options, h = mixer.options, layer.block.heads
    for name in ("q", "k", "v"):
        setattr(h, name, layer.product(getattr(mixer, f"{name}_proj")))
    _heads(layer, options.kv_heads, options.heads // options.kv_heads, options.key_width, options.key_width, None)
    if options.qk_norm:
        _norms(layer, mixer)
    layer.turn(options.rope, options.key_width)
    layer.count_positions()
    _output(layer, mixer, h.o)


DESCRIBED: dict[type[Mixer], Callable[[Layer, Any, Tensor | None], None]] = {
    GatedSlotAttention: _gated_slots,
    BoundedMemoryAttention: _bounded_slots,
    GatedLinearAttention: _gated_linear,
    Retention: _retention,
    SUPRA: _retention,
    LinearAttention: _retention,
    HGRN2: _hgrn2,
    Mamba: _mamba,
    Attention: _attention,
    Hybrid: _hybrid,
}
"""How a mixer of each class is described."""
