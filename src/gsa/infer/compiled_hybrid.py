"""The mixer `hybrid` as the native engine takes it: what stands beside its projections, and what its state is kept in.

Shape letters: H key/value heads, HQ query heads, K width of a head, M slots, S sinks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gsa.infer.compiled_parts import PADDING, Cached, Kept, Parts, packed_weight, padded
from gsa.mixers.hybrid import Hybrid
from gsa.mixers.slots import LEAST
from gsa.ops.native.structs import MEMORY_CODES, GsaBlock, int32


def window_sinks_and_slots(layer: Parts, mixer: Hybrid) -> None:
    """All of a layer but its heads and its output."""
    options, hybrid, memory = mixer.options, layer.block.hybrid, layer.block.memory
    H, HQ, K, M = options.kv_heads, options.heads, options.key_width, options.num_slots
    layer.block.kind, layer.block.cache.window = MEMORY_CODES["hybrid"], options.window
    layer.cached = Cached("window_k", "window_v", options.window, filled=True)
    memory.slots, hybrid.sinks = int32("slots", M), int32("sinks", options.num_sinks)
    hybrid.own_positions = options.slot_positions == "own"
    hybrid.temperature, hybrid.least = options.gate_temperature, LEAST
    hybrid.sink_query, hybrid.slot_query, hybrid.left = (layer.place(n * K) for n in (HQ, HQ, 2 * H))
    memory.decay, memory.write, hybrid.inverse, hybrid.log_mass = (layer.place(H * padded(M)) for _ in range(4))
    hybrid.bf16 = packed_weight(mixer.o_proj).format != "fp32"
    dtype = torch.bfloat16 if hybrid.bf16 else torch.float32
    router = mixer.slot_router
    hybrid.router_weight = layer.rows("slot_router.weight", router.weight.mT, dtype)
    hybrid.query_weight = layer.rows("slot_query", mixer.slot_query, dtype)
    # Slots that are not there take nothing: their part of a softmax is none, and their gates forget nothing.
    by_softmax = options.slot_router == "softmax"
    nothing = -math.inf if by_softmax else math.inf
    hybrid.router_bias = layer.rows("slot_router.bias", F.pad(router.bias, (0, padded(M) - M), value=nothing))
    if by_softmax:
        for field, x in (("rates", router.log_rate), ("fades", router.log_fade)):
            setattr(hybrid, field, layer.rows(f"slot_router.{field}", F.pad(x.exp(), (0, padded(M) - M))))
    hybrid.scale = layer.rows("slot_scale", mixer.slot_scale.exp() * layer.block.heads.scale)
    hybrid.mass_power, hybrid.bias = layer.rows("slot_mass", mixer.slot_mass), layer.rows("slot_bias", mixer.slot_bias)
    _keep_sinks(layer, options.num_sinks, H, K)
    layer.keep_memory("slot_k", "keys", H, K, M)
    layer.keep_memory("slot_v", "values", H, M, K)
    layer.kept["mass"] = Kept.plain((H, padded(M)), lambda x: x[..., :M], _bind("mass"))


def _keep_sinks(layer: Parts, S: int, H: int, K: int) -> None:
    """Sinks [S, H, K], which lie as a cache does: keys in blocks of 16 that lie the other way round."""
    blocks = padded(S) // PADDING

    def keys(x: Tensor) -> list[Tensor]:
        return [x[:, i].permute(2, 0, 1)[: S - i * PADDING] for i in range(blocks)]

    def pieces(x: Tensor) -> list[Tensor]:
        return list(x.split(PADDING)) if blocks else []

    def joined(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts) if parts else torch.zeros(0, H, K, dtype=torch.float32, device="cpu")

    layer.kept["sink_k"] = Kept((H, blocks, K, PADDING), keys, pieces, joined, _bind("sink_keys"))
    layer.kept["sink_v"] = Kept.plain(
        (H, padded(S), padded(K)), lambda x: x[:, :S, :K].transpose(0, 1), _bind("sink_values")
    )


def _bind(field: str) -> Any:
    def bind(block: GsaBlock, products: Any, where: int) -> None:
        setattr(block.hybrid, field, where)

    return bind
