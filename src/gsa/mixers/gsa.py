"""Gated slot attention, the paper's layer (section 3.3), with its ablations.

    q, k, v = swish(W x),  a = sigmoid(W_f x)^(1/tau),  y = W_o norm(swish(o)),  o = gated slot attention of q, k, v, a

With a router, a token writes to few of the slots (as Raven does): log gates are multiplied by their weights, so that
a slot that is not chosen forgets nothing and takes nothing.

Shape letters: B batch, T time, H key/value heads, M slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from gsa.mixers.activations import ACTIVATIONS, log_forget_gate
from gsa.mixers.base import MAX_WIDTH, State
from gsa.mixers.chosen_slots import ROUTERS, HeadGate, SlotChoice
from gsa.mixers.heads import HeadMixer, HeadOptions
from gsa.mixers.norm import RMSNorm
from gsa.mixers.sequences import Sequences
from gsa.mixers.slots import half_life_bias, spread_half_lives
from gsa.ops import (
    BoundedMemoryState,
    SlotState,
    attention_with_bounded_memory,
    gated_slot_attention,
    gated_slot_attention_step,
)
from gsa.ops.readout import READOUTS
from gsa.ops.state import compute_dtype
from gsa.options import choice, number

GATES = ("data", "constant", "none", "head")


@dataclass(frozen=True, kw_only=True)
class GSAOptions(HeadOptions):
    """Options of gated slot attention; the defaults are the paper's."""

    num_slots: int = number(64, least=1, most=MAX_WIDTH)
    """Memory slots M of each key/value head."""
    gate: str = choice("data", GATES)
    """Forget gate: from the token (`data`), learned and the same for all tokens (`constant`), or `none`, as in ABC.
    With a router, also `head`: from the token, one for all slots of a head, as in Mamba-2."""
    gate_temperature: float = number(8.0, above=0)
    """tau: gates are sigmoid(logits)^(1/tau); larger forgets more slowly."""
    gate_bias: bool = False
    """Whether logits of gates have a bias; it begins with half-lives from 16 to 1024 tokens over the slots."""
    router: str = choice("none", ROUTERS)
    """What chooses the slots that a token writes to, and their weights: the largest of `sigmoid` scores, which then sum
    to 1, or of `softmax` scores; or `none`, and all slots take it."""
    routed_slots: int = number(8, least=1, most=MAX_WIDTH)
    """How many a router chooses."""
    router_noise: float = number(1.0, least=0)
    """Gumbel noise on a router's logits while it is trained, times this."""
    qk_norm: bool = False
    """Whether queries and keys pass an RMS norm, behind their feature map."""
    readout: str = choice("softmax", READOUTS)
    """How slots are read."""
    feature_map: str = "swish"
    value_activation: str = choice("swish", ACTIVATIONS)
    """Applied to values."""
    output_activation: str = choice("swish", ACTIVATIONS)
    """Applied to the output, before its norm."""
    output_norm: str = "full"
    scale: float | None = 1.0

    mixer: ClassVar[str] = "gsa"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gate == "none":
            for name in ("gate_temperature", "readout"):
                if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                    raise self.fail(f"{name} does nothing with gate none")
        if self.gate_bias and self.gate != "data":
            raise self.fail(f"gate_bias does nothing with gate {self.gate}")
        if self.gate == "head" and self.gate_temperature != type(self).gate_temperature:
            raise self.fail("gate_temperature does nothing with gate head")
        if self.router == "none":
            if self.gate == "head":
                raise self.fail("gate head needs a router: without one, all slots of a head would stay equal")
            for name in ("routed_slots", "router_noise"):
                if getattr(self, name) != getattr(type(self), name):
                    raise self.fail(f"{name} does nothing with router none")
        elif self.gate not in ("data", "head"):
            raise self.fail(f"a router needs gate data or head, got {self.gate}")
        elif self.routed_slots > self.num_slots:
            raise self.fail(f"routed_slots: there are {self.num_slots} slots (num_slots), got {self.routed_slots}")


class GatedSlotAttention(HeadMixer):
    """The mixer `gsa`."""

    Options = GSAOptions
    options: GSAOptions
    recompute = True
    """Whether the pass backward computes states again; if not, they are kept, which takes memory."""

    def __init__(self, options: GSAOptions):
        super().__init__(options)
        D, H, M = options.hidden_size, options.kv_heads, options.num_slots
        if options.gate == "constant":
            self.gate_logits = nn.Parameter(torch.empty(H, M))
        elif options.gate == "head":
            self.head_gate = HeadGate(D, H)
        else:
            self.f_proj = nn.Linear(D, H * M, bias=options.gate_bias)
        if options.router != "none":
            self.router = SlotChoice(D, H, M, options.router, options.routed_slots, options.router_noise)
        if options.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(options.key_width, options.rms_norm_eps) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Constant gates begin at time scales from 2 to 2000 tokens: equal slots would stay equal for ever.

        Biases begin with half-lives from 16 to 1024 tokens: without one, a memory of `gate_temperature` tokens.
        """
        options = self.options
        if options.gate_bias:
            bias = self.f_proj.bias
            half_lives = spread_half_lives(options.num_slots, bias.device).repeat(options.kv_heads)
            with torch.no_grad():
                bias.copy_(half_life_bias(half_lives, options.gate_temperature))
        if options.gate == "head":
            self.head_gate.reset()
        if options.gate == "constant":
            scales = torch.logspace(0.3, 3.3, options.num_slots, device=self.gate_logits.device)
            kept = torch.log1p(-1 / scales) * options.gate_temperature  # log sigmoid(logits)
            with torch.no_grad():
                self.gate_logits.copy_(kept - torch.log(-torch.expm1(kept)))

    def mix(
        self, x: Tensor, state: State | None, sequences: Sequences, return_state: bool = True
    ) -> tuple[Tensor, State | None]:
        options = self.options
        q, k, v, left = self.project(x, state, sequences, return_state)
        v = ACTIVATIONS[options.value_activation](v)
        if options.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if options.gate == "none":
            o, memory = self._bounded(q, k, v, self._logits(x), state, sequences, return_state)
        else:
            o, memory = self._gated(q, k, v, self._log_gate(x), state, sequences, return_state)
        return self.output(o, x, options.output_activation), {**memory, **left} if return_state else None

    def _log_gate(self, x: Tensor) -> Tensor:
        """[B, T, H, M]"""
        if self.options.gate == "constant":
            return log_forget_gate(self.gate_logits, self.options.gate_temperature).expand(*x.shape[:2], -1, -1)
        if self.options.gate == "head":
            g = self.head_gate(x)
        else:
            g = log_forget_gate(self._logits(x), self.options.gate_temperature)
        return g if self.options.router == "none" else g * self.router(x)

    def _logits(self, x: Tensor) -> Tensor:
        """[B, T, H, M]"""
        return self.f_proj(x).unflatten(-1, (-1, self.options.num_slots))

    def _gated(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: State | None, sequences: Sequences, return_state: bool
    ) -> tuple[Tensor, State]:
        slots = None if state is None else SlotState(state["k"], state["v"])
        options = self.options
        if slots is not None and sequences.length == 1 and not sequences.packed:
            o, after = gated_slot_attention_step(
                q[:, 0],
                k[:, 0],
                v[:, 0],
                g[:, 0],
                state=slots,
                scale=options.scale,
                readout=options.readout,
                check=False,
            )
            return o[:, None], after._asdict()
        o, final = gated_slot_attention(
            q,
            k,
            v,
            g,
            scale=options.scale,
            readout=options.readout,
            initial_state=slots,
            output_final_state=return_state,
            cu_seqlens=sequences.cu_seqlens,
            recompute=self.recompute,
            check=False,
        )
        return o, {} if final is None else final._asdict()

    def _bounded(
        self, q: Tensor, k: Tensor, v: Tensor, w: Tensor, state: State | None, sequences: Sequences, return_state: bool
    ) -> tuple[Tensor, State]:
        o, final = attention_with_bounded_memory(
            q,
            k,
            v,
            w,
            scale=self.options.scale,
            initial_state=bounded_memory(state),
            output_final_state=return_state,
            cu_seqlens=sequences.cu_seqlens,
            check=False,
        )
        return o, {} if final is None else final._asdict()

    def init_state(self, batch_size: int) -> State:
        memory = slot_memory(self, self.options.num_slots, batch_size)
        if self.options.gate == "none":
            memory |= normaliser(self, self.options.num_slots, batch_size)
        return {**memory, **self.projections.init_state(self, batch_size)}

    @property
    def state_size(self) -> int:
        return slot_memory_size(self, self.options.num_slots)


def slot_memory(mixer: HeadMixer, slots: int, batch_size: int) -> State:
    """Empty key and value memory [N, H, K, M], [N, H, M, V]."""
    options, (device, dtype) = mixer.options, mixer.device_and_dtype
    dtype, H = compute_dtype(dtype), options.kv_heads
    return {
        "k": torch.zeros(batch_size, H, options.key_width, slots, dtype=dtype, device=device),
        "v": torch.zeros(batch_size, H, slots, options.value_width, dtype=dtype, device=device),
    }


def normaliser(mixer: HeadMixer, slots: int, batch_size: int) -> State:
    """ABC's running normaliser [N, H, M] before the first token."""
    device, dtype = mixer.device_and_dtype
    shape = (batch_size, mixer.options.kv_heads, slots)
    return {"log_z": torch.full(shape, -torch.inf, dtype=compute_dtype(dtype), device=device)}


def bounded_memory(state: State | None) -> BoundedMemoryState | None:
    """The part of a mixer's state that is ABC's."""
    return None if state is None else BoundedMemoryState(state["k"], state["v"], state["log_z"])


def slot_memory_size(mixer: HeadMixer, slots: int) -> int:
    """2 x M x width for as many key/value heads as queries."""
    options = mixer.options
    return options.kv_heads * slots * (options.key_width + options.value_width)
