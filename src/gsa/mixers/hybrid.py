"""Sinks, a sliding window and gated slots in one softmax: what a Transformer becomes with a state of constant size.

A token t sees the window, tokens t - W < j <= t, as softmax attention does; the sinks, tokens j < S, for ever; and all
between through slots, to which a token is written when it leaves the window (see gsa.ops.joined_slots and
gsa.mixers.slots). While t < W + S it is softmax attention exactly.

Rotary positions are exact in the window. Sinks stay at the distance where they left it: a query that asks for them is
turned by min(t, W + S - 1). With `slot_positions` "window", slots hold keys that are not turned, as if they all had
just left the window: queries are turned by W. With "own", keys and queries of slots are turned by their own positions.

Shape letters: B batch, T time, H key/value heads, HQ query heads, K width of a head, M slots, S sinks, W window,
N sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from gsa.mixers.attention import Attention, AttentionOptions
from gsa.mixers.base import MAX_WIDTH, State
from gsa.mixers.hybrid_step import Token, hybrid_step
from gsa.mixers.ring import Ring
from gsa.mixers.rotary import rotate
from gsa.mixers.sequences import Sequences
from gsa.mixers.slots import ROUTERS, SlotRouter
from gsa.ops import JoinedSlotState, joined_slots, window_attention
from gsa.ops.portable_slots import HeadNumbers
from gsa.ops.state import compute_dtype
from gsa.options import choice, number

POSITIONS = ("window", "own")
MEMORY = ("slot_k", "slot_v", "mass")


@dataclass(frozen=True, kw_only=True)
class HybridOptions(AttentionOptions):
    """Options of sinks, window and slots."""

    window: int = number(64, least=1, most=MAX_WIDTH)
    """Tokens W that a token sees exactly, itself among them."""
    num_sinks: int = number(4, least=0, most=MAX_WIDTH)
    """First tokens S of a sequence that are kept for ever."""
    num_slots: int = number(64, least=1, most=MAX_WIDTH)
    """Memory slots M of each key/value head, for what has left the window."""
    slot_router: str = choice("softmax", ROUTERS)
    """How slots share a token: by a `softmax` over them, or by `gates` as in gsa, each with a time scale of its own."""
    gate_temperature: float = number(8.0, above=0)
    """tau: with slot_router `gates`, these are sigmoid(logits)^(1/tau); larger forgets more slowly."""
    slot_positions: str = choice("own", POSITIONS)
    """Rotary positions of what slots hold: all as if it had just left the `window`, or each its `own`."""

    mixer: ClassVar[str] = "hybrid"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slot_router != "gates" and self.gate_temperature != type(self).gate_temperature:
            raise self.fail(f"gate_temperature does nothing with slot_router {self.slot_router}")
        if not self.rope_theta and self.slot_positions != type(self).slot_positions:
            raise self.fail("slot_positions does nothing with rope_theta 0")


class _Leaving(NamedTuple):
    """What leaves the window as tokens come: keys as slots hold them, values [B, T, H, K], and log gates and shares
    of slots [B, T, H, M], 0 where nothing is written."""

    key: Tensor
    v: Tensor
    g: Tensor
    s: Tensor


class Hybrid(Attention):
    """The mixer `hybrid`. Its state has the same size from the beginning (see `init_state`)."""

    Options = HybridOptions
    options: HybridOptions
    grows = False

    def __init__(self, options: HybridOptions):
        super().__init__(options)
        H, HQ, K, M = options.kv_heads, options.heads, options.key_width, options.num_slots
        self.slot_router = SlotRouter(options.slot_router, H, M, K, options.gate_temperature)
        self.slot_query = nn.Parameter(torch.empty(HQ, K, K))
        self.slot_scale = nn.Parameter(torch.empty(HQ))
        self.slot_mass = nn.Parameter(torch.empty(HQ))
        self.slot_bias = nn.Parameter(torch.empty(HQ))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Slots begin as tokens of a Transformer: with the same queries, and as many of them as were written."""
        self.slot_router.reset()
        for weight in (self.slot_query, self.slot_scale, self.slot_bias):
            nn.init.zeros_(weight)
        nn.init.ones_(self.slot_mass)

    def mix(
        self, x: Tensor, state: State | None, sequences: Sequences, return_state: bool = True
    ) -> tuple[Tensor, State | None]:
        q, k, v = self.project(x)
        if state is not None and sequences.length == 1 and not sequences.packed:
            o, after = self._step(q, k, v, state)
            return self.o_proj(o), after if return_state else None
        W, S = self.options.window, self.options.num_sinks
        start = None if state is None else state["position"]
        positions = sequences.positions(start)
        turned = self.turned(k, positions)
        ring = Ring(sequences, W)
        past_k, past_v = (None, None) if state is None else (state["window_k"], state["window_v"])
        sink_k, sink_v = self._sinks(ring, state, turned, v)
        near, near_lse = window_attention(
            self.turned(q, positions),
            ring.joined(past_k, turned),
            ring.joined(past_v, v),
            window=W,
            sinks=(self.turned(q, positions.clamp(max=W + S - 1)), sink_k, sink_v),
            position=start,
            cu_seqlens=sequences.cu_seqlens,
            check=False,
        )
        left, late = self._leaving(ring, state, k, turned, v)
        o, memory = joined_slots(
            self.slot_queries(q[:, late:], positions[:, late:]),
            left.key,
            left.v,
            left.g,
            left.s,
            near[:, late:],
            near_lse[:, late:],
            slot_scale=self.slot_scale,
            slot_mass=self.slot_mass,
            slot_bias=self.slot_bias,
            initial_state=None if state is None else JoinedSlotState(*(state[name] for name in MEMORY)),
            output_final_state=return_state,
            cu_seqlens=sequences.cu_seqlens,
            check=False,
        )
        y = self.o_proj((torch.cat([near[:, :late], o], 1) if late else o).flatten(-2))
        if memory is None:
            return y, None
        dtype = compute_dtype(x.dtype)
        return y, {
            "sink_k": sink_k.to(dtype),
            "sink_v": sink_v.to(dtype),
            "window_k": ring.last(past_k, turned).to(dtype),
            "window_v": ring.last(past_v, v).to(dtype),
            **dict(zip(MEMORY, memory, strict=True)),
            "position": sequences.lengths() if start is None else start + sequences.lengths(),
        }

    def _leaving(self, ring: Ring, state: State | None, k: Tensor, turned: Tensor, v: Tensor) -> tuple[_Leaving, int]:
        """What each token finds leaving the window, but for the first few of the call, which find nothing: how many."""
        W, S, own = self.options.window, self.options.num_sinks, self.options.slot_positions == "own"
        sequences, T = ring.sequences, k.shape[1]
        if state is None and not sequences.packed and not torch.compiler.is_exporting():
            gone = slice(S, max(T - W, S))
            k, turned, v = k[:, gone], turned[:, gone], v[:, gone]
            return _Leaving(turned if own else k, v, *self.slot_router(k, v)), min(W + S, T)
        if state is None:
            past_k, past_v, unturned, start = None, None, None, None
        else:
            past_k, past_v, start = state["window_k"], state["window_v"], state["position"]
            # The window holds no keys that are not turned.
            unturned = self.turned(past_k, torch.arange(W, 0, -1, device=k.device) - start[:, None])
        k, v = ring.leaving(unturned, k), ring.leaving(past_v, v)
        written = (sequences.positions(start) >= W + S)[:, :, None, None]
        g, s = (torch.where(written, x, 0.0) for x in self.slot_router(k, v))
        return _Leaving(ring.leaving(past_k, turned) if own else k, v, g, s), 0

    def _step(self, q: Tensor, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, State]:
        """Outputs [N, 1, HQ K] of one token each."""
        W, S, (H, K) = self.options.window, self.options.num_sinks, k.shape[2:]
        positions, dtype = state["position"][:, None], compute_dtype(q.dtype)
        old_k, left_v = state["window_k"][:, :1], state["window_v"][:, :1]
        left_k = self.turned(old_k, W - positions)
        written = (positions >= W + S)[:, :, None, None]
        g, s = (torch.where(written, x, 0.0)[:, 0].to(dtype) for x in self.slot_router(left_k, left_v))
        near, sinks, slots = (
            x[:, 0].unflatten(1, (H, -1)).to(dtype) * K**-0.5
            for x in (
                self.turned(q, positions),
                self.turned(q, positions.clamp(max=W + S - 1)),
                self.slot_queries(q, positions),
            )
        )
        token = Token(
            near,
            sinks,
            slots,
            self.turned(k, positions)[:, 0].to(dtype),
            v[:, 0].to(dtype),
            (old_k if self.options.slot_positions == "own" else left_k)[:, 0],
            left_v[:, 0],
            g,
            s,
        )
        o, after = hybrid_step(token, state, HeadNumbers(self.slot_scale, self.slot_mass, self.slot_bias))
        return o.flatten(1)[:, None].to(q.dtype), after

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, T, heads, K] by rotary positions [B or 1, T]."""
        return rotate(x, positions, self.options.rope) if self.options.rope_theta else x

    def slot_queries(self, q: Tensor, positions: Tensor) -> Tensor:
        """What queries [B, T, HQ, K] ask the slots with: q + q U, turned."""
        dtype = compute_dtype(q.dtype)
        matrix = self.slot_query.to(dtype) + torch.eye(q.shape[-1], device=q.device, dtype=dtype)
        if self.options.slot_positions == "own":
            return self.turned(torch.einsum("bthk,hkl->bthl", q, matrix.to(q.dtype)), positions)
        # A turn that is the same for all is part of the matrix.
        place = torch.full((1, 1), self.options.window, device=q.device)
        matrix = self.turned(matrix[:, :, None], place)[:, :, 0]
        return torch.einsum("bthk,hkl->bthl", q, matrix.to(q.dtype))

    def _sinks(self, ring: Ring, state: State | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [N, S, H, K] of the first tokens, 0 for those that have not come."""
        first = torch.arange(self.options.num_sinks, device=k.device)
        if state is None:
            places = first.expand(ring.sequences.count, -1)
            return ring.picked(None, k, places), ring.picked(None, v, places)
        places = first - state["position"][:, None]
        known = (places < 0)[:, :, None, None]
        return tuple(
            torch.where(known, state[name].to(new.dtype), ring.picked(None, new, places))
            for name, new in (("sink_k", k), ("sink_v", v))
        )  # type: ignore[return-value]

    def init_state(self, batch_size: int) -> State:
        """Nothing yet. The state holds:

        - sink_k, sink_v [N, S, H, K]: the first tokens, from when they come, with keys turned by their positions;
        - window_k, window_v [N, W, H, K]: the last tokens, newest last, keys turned by their positions;
        - slot_k [N, H, K, M], slot_v [N, H, M, K]: what was written, not divided by n;
        - mass [N, H, M]: n, how many tokens a slot stands for;
        - position [N]: how many tokens there were.
        """
        options, (device, dtype) = self.options, self.device_and_dtype
        H, K, M, S, W = options.kv_heads, options.key_width, options.num_slots, options.num_sinks, options.window
        shapes = {
            "sink_k": (S, H, K),
            "sink_v": (S, H, K),
            "window_k": (W, H, K),
            "window_v": (W, H, K),
            "slot_k": (H, K, M),
            "slot_v": (H, M, K),
            "mass": (H, M),
        }
        dtype = compute_dtype(dtype)
        return {
            **{name: torch.zeros(batch_size, *shape, dtype=dtype, device=device) for name, shape in shapes.items()},
            "position": torch.zeros(batch_size, dtype=torch.int64, device=device),
        }

    @property
    def state_size(self) -> int:
        options = self.options
        H, K, M = options.kv_heads, options.key_width, options.num_slots
        return 2 * H * K * (options.num_sinks + options.window + M) + H * M
