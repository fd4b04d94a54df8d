"""One token of `hybrid`: sinks, window and slots in one softmax, written out.

Shape letters: N sequences, H key/value heads, R queries per key/value head, K width of a head, M slots, S sinks,
W window.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gsa.mixers.base import State
from gsa.ops.portable_slots import HeadNumbers, slot_logits


class Token(NamedTuple):
    """A token of every sequence: queries [N, H, R, K] of the window, the sinks and the slots, with their scale; its key
    and value [N, H, K]; and of the token that leaves the window its key, value, log gates and shares of slots
    [N, H, M], 0 if it is not written."""

    q: Tensor
    sink_q: Tensor
    slot_q: Tensor
    k: Tensor
    v: Tensor
    left_k: Tensor
    left_v: Tensor
    g: Tensor
    s: Tensor


def hybrid_step(token: Token, state: State, numbers: HeadNumbers) -> tuple[Tensor, State]:
    """The output [N, H, R, K], and the state after it. Everything is of the state's dtype."""
    position, k, v = state["position"][:, None], token.k[:, None], token.v[:, None]
    window_k, window_v = (torch.cat([state[name][:, 1:], x], 1) for name, x in (("window_k", k), ("window_v", v)))
    W, S = window_k.shape[1], state["sink_k"].shape[1]
    own = (torch.arange(S, device=k.device) == position)[:, :, None, None]
    sink_k, sink_v = torch.where(own, k, state["sink_k"]), torch.where(own, v, state["sink_v"])
    # K~ <- a K~ + s k, and so on
    a, s = token.g.exp(), token.s
    slot_k = torch.addcmul(state["slot_k"] * a[:, :, None], token.left_k[..., None], s[:, :, None])
    slot_v = torch.addcmul(state["slot_v"] * a[..., None], s[..., None], token.left_v[:, :, None])
    mass = torch.addcmul(s, a, state["mass"])
    # A window that is not full yet begins with unused places; a sink is seen when it has left the window.
    unused = torch.arange(W - 1, -1, -1, device=k.device) > position
    near = torch.arange(S, device=k.device) > position - W
    by_window = torch.einsum("nhrk,nwhk->nhrw", token.q, window_k).masked_fill(unused[:, None, None], -torch.inf)
    by_sink = torch.einsum("nhrk,nshk->nhrs", token.sink_q, sink_k).masked_fill(near[:, None, None], -torch.inf)
    logits, n = slot_logits(token.slot_q @ slot_k, mass, numbers)
    weights = torch.cat([by_window, by_sink, logits], -1).softmax(-1)
    by_window, by_sink, by_slot = weights.split([W, S, mass.shape[2]], -1)
    o = torch.einsum("nhrw,nwhk->nhrk", by_window, window_v) + torch.einsum("nhrs,nshk->nhrk", by_sink, sink_v)
    return o + (by_slot / n[:, :, None]) @ slot_v, {
        "sink_k": sink_k,
        "sink_v": sink_v,
        "window_k": window_k,
        "window_v": window_v,
        "slot_k": slot_k,
        "slot_v": slot_v,
        "mass": mass,
        "position": state["position"] + 1,
    }
