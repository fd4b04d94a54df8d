"""Softmax attention as in Llama: rotary positions, grouped queries, all tokens before or a sliding window of them.

Shape letters: B batch, T time, S keys, H key/value heads, HQ query heads, K width of a head, N sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from gsa.mixers.attend import attend, attend_packed
from gsa.mixers.base import MAX_HEADS, MAX_WIDTH, Mixer, State
from gsa.mixers.norm import RMSNorm
from gsa.mixers.rotary import RotaryOptions
from gsa.mixers.sequences import Sequences
from gsa.options import divides, number


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(RotaryOptions):
    """Options of softmax attention."""

    num_attention_heads: int | None = number(None, least=1, most=MAX_HEADS)
    """Heads of queries; of width 64 by default."""
    num_key_value_heads: int | None = number(None, least=1, most=MAX_HEADS)
    """Heads of keys and values, each shared by a group of query heads; as many as queries by default."""
    head_dim: int | None = number(None, least=1, most=MAX_WIDTH)
    """Width of a head; the model width over the heads by default."""
    window: int | None = number(None, least=1)
    """Tokens that a token sees, itself among them; all before it by default."""
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values have biases."""
    qk_norm: bool = False
    """Whether queries and keys pass an RMS norm, before rotary positions."""
    qk_norm_eps: float | None = number(None, above=0)
    """Added to the mean square there; `rms_norm_eps` by default."""

    mixer: ClassVar[str] = "attention"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.qk_norm_eps is not None and not self.qk_norm:
            raise self.fail("qk_norm_eps does nothing without qk_norm")
        if self.head_dim is None:
            divides(self.heads, self.hidden_size, self.mixer, "num_attention_heads must divide hidden_size")
        divides(self.kv_heads, self.heads, self.mixer, "num_key_value_heads must divide num_attention_heads")

    @property
    def heads(self) -> int:
        return max(self.hidden_size // 64, 1) if self.num_attention_heads is None else self.num_attention_heads

    @property
    def kv_heads(self) -> int:
        return self.heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def key_width(self) -> int:
        return self.hidden_size // self.heads if self.head_dim is None else self.head_dim


class Attention(Mixer):
    """The mixer `attention`. Its state are the keys and values [N, S, H, K] of earlier tokens, the newest last.

    A row that has seen fewer tokens than S begins with unused places; `position` [N] counts what it has seen.
    """

    Options: ClassVar[type[AttentionOptions]] = AttentionOptions
    options: AttentionOptions
    grows = True

    def __init__(self, options: AttentionOptions):
        super().__init__(options)
        D, K, bias = options.hidden_size, options.key_width, options.qkv_bias
        self.q_proj = nn.Linear(D, options.heads * K, bias=bias)
        self.k_proj = nn.Linear(D, options.kv_heads * K, bias=bias)
        self.v_proj = nn.Linear(D, options.kv_heads * K, bias=bias)
        self.o_proj = nn.Linear(options.heads * K, D, bias=False)
        if options.qk_norm:
            eps = options.rms_norm_eps if options.qk_norm_eps is None else options.qk_norm_eps
            self.q_norm = RMSNorm(K, eps)
            self.k_norm = RMSNorm(K, eps)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, T, HQ, K], keys and values [B, T, H, K], before rotary positions."""
        options = self.options
        q, k, v = (proj(x).unflatten(-1, (-1, options.key_width)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return (self.q_norm(q), self.k_norm(k), v) if options.qk_norm else (q, k, v)

    def mix(
        self, x: Tensor, state: State | None, sequences: Sequences, return_state: bool = True
    ) -> tuple[Tensor, State | None]:
        options = self.options
        q, k, v = self.project(x)
        q, k, _ = options.turn(q, k, state, sequences)
        seen = None if state is None else state["position"]
        now = sequences.lengths() if seen is None else seen + sequences.lengths()
        if sequences.packed:
            o, k, v = self._packed(q, k, v, state, sequences, return_state)
        elif torch.compiler.is_exporting() and options.window is not None and sequences.length > 1:
            # How a window is computed depends on the length. The operator for packed sequences hides that from a graph.
            q, k, v = (part.flatten(0, 1)[None] for part in (q, k, v))
            o, k, v = self._packed(q, k, v, state, sequences.end_to_end(), return_state)
            o = o[0].unflatten(0, x.shape[:2])
        else:
            if state is not None:
                k, v = (torch.cat([state[name].to(new.dtype), new], 1) for name, new in (("k", k), ("v", v)))
            begun = state is not None and state["k"].shape[1] > 0
            o = attend(q, k, v, options.window, now if begun else None)
        y = self.o_proj(o.flatten(-2))
        return y, {"k": self._kept(k), "v": self._kept(v), "position": now} if return_state else None

    def _kept(self, x: Tensor) -> Tensor:
        """The keys or values that a later token can still see; a copy, since a view would keep the others too."""
        window = self.options.window
        if window is None:
            return x
        if torch.compiler.is_exporting():  # always as many, some of them unused
            return nn.functional.pad(x, (0, 0, 0, 0, window - 1, 0))[:, x.shape[1] :].clone()
        return x[:, max(x.shape[1] - window + 1, 0) :].clone()

    def _packed(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None, sequences: Sequences, return_state: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs [1, T, HQ, K], and keys and values [N, S, H, K] as the state holds them."""
        assert sequences.cu_seqlens is not None
        cu_queries = cu_keys = sequences.cu_seqlens.to(torch.int64)
        lengths = sequences.lengths()
        if state is not None:
            lengths, k, v = _joined(state, k, v, sequences)
            cu_keys = nn.functional.pad(lengths.cumsum(0), (1, 0))
        o = attend_packed(q[0], k[0], v[0], cu_queries, cu_keys, self.options.window)[None]
        if return_state:
            before = 0 if state is None else state["k"].shape[1]
            k, v = (_rows(x[0], lengths, before + sequences.longest, self.options.window) for x in (k, v))
        return o, k, v

    def init_state(self, batch_size: int) -> State:
        options, (device, dtype) = self.options, self.device_and_dtype
        empty = torch.zeros(batch_size, 0, options.kv_heads, options.key_width, dtype=dtype, device=device)
        position = torch.zeros(batch_size, dtype=torch.int64, device=device)
        return {"k": empty, "v": empty.clone(), "position": position}

    @property
    def state_size(self) -> int | None:
        options = self.options
        return None if options.window is None else 2 * (options.window - 1) * options.kv_heads * options.key_width


def _joined(state: State, k: Tensor, v: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor, Tensor]:
    """Lengths [N] of old and new keys together, and those keys and values end to end [1, sum of lengths, H, K]."""
    old = state["k"].shape[1]
    valid = state["position"].clamp(max=old)
    lengths = valid + sequences.lengths()
    ends = lengths.cumsum(0)
    # Compiled code cannot know how many there are. Places behind the last are copies that nobody reads.
    most = len(valid) * old + k.shape[1] if torch.compiler.is_compiling() else int(ends[-1])
    places = torch.arange(most, device=k.device)
    rows = torch.searchsorted(ends, places, right=True).clamp(max=len(valid) - 1)
    offsets = places - (ends - lengths)[rows] - valid[rows]  # negative: an old one
    starts = sequences.lengths().cumsum(0) - sequences.lengths()
    source = torch.where(offsets < 0, rows * old + old + offsets, len(valid) * old + starts[rows] + offsets)
    source = source.clamp(max=len(valid) * old + k.shape[1] - 1)
    joined = [
        torch.cat([state[name].to(new.dtype).flatten(0, 1), new[0]])[source][None] for name, new in (("k", k), ("v", v))
    ]
    return lengths, joined[0], joined[1]


def _rows(x: Tensor, lengths: Tensor, most: int, window: int | None) -> Tensor:
    """Sequences end to end [sum of lengths, H, K] as rows [N, longest, H, K], each at the right end of its row.

    With a window, rows hold no more than a later token can see. Compiled code cannot look at the lengths: there, rows
    are as long as any sequence could be, which is `most`, or as the window.
    """
    if torch.compiler.is_compiling():
        longest = most if window is None else window - 1
    else:
        longest = int(lengths.max()) if window is None else min(int(lengths.max()), window - 1)
    ends = lengths.cumsum(0)[:, None]
    back = torch.arange(longest, 0, -1, device=x.device)[None]
    rows = x[(ends - back).clamp(min=0)]
    return rows * (back <= lengths[:, None])[..., None, None]
