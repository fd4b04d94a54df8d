"""One record per operator: all that a call passes to an engine, checked before.

An engine computes an operator with `forward(call)`, which returns the results and what it saves for backward, and
`backward(call, saved, gradients)`, which turns the gradients of the results into those of the call's tensors. All are
tuples: results and what is saved in the order of the `Operation`, gradients in the order of the record's fields.

Shape letters: B batch, T time, H key/value heads, HQ query heads, K, V widths of a head, M slots, N sequences; of the
selective scan: E channels, S states of a channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from gsa.ops.sequences import sequence_count
from gsa.ops.state import compute_dtype

if TYPE_CHECKING:
    from gsa.ops.weights import PackedWeight

Shape = tuple[int, ...]
Tensors = tuple[Tensor, ...]
Gradients = tuple[Tensor | None, ...]

# What a forward pass saves for backward, the field `save` of the records:
#   "nothing", as no backward pass can follow;
#   "marks", a few states, from which backward computes the others again;
#   "states", every state that backward needs.
#
# Whether gates are looked at by value is the field `check`: if so, forward refuses bad ones (see gsa.ops.gates).


class LinearCall(NamedTuple):
    """Gated linear attention: q, k, v, gates gk and gv, and states [N, H, K, V] to begin with."""

    q: Tensor
    k: Tensor
    v: Tensor
    gk: Tensor | None
    gv: Tensor | None
    initial: Tensor | None
    cu_seqlens: Tensor | None
    scale: float
    save: str
    check: bool

    def result_shapes(self) -> tuple[Shape, ...]:
        """Outputs [B, T, HQ, V] and final states [N, H, K, V]."""
        N, V = sequence_count(self.q, self.cu_seqlens), self.v.shape[3]
        return (*self.q.shape[:3], V), (N, *self.k.shape[2:], V)


class SlotCall(NamedTuple):
    """Gated slot attention: q, k, v, log gate g, write strength s, and memories [N, H, K, M], [N, H, M, V]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    s: Tensor | None
    initial_k: Tensor | None
    initial_v: Tensor | None
    cu_seqlens: Tensor | None
    scale: float
    readout: str
    save: str
    check: bool

    def result_shapes(self) -> tuple[Shape, ...]:
        """Outputs [B, T, HQ, V] and final memories [N, H, K, M] and [N, H, M, V]."""
        N, (H, K), V, M = (
            sequence_count(self.q, self.cu_seqlens),
            self.k.shape[2:],
            self.v.shape[3],
            self.g.shape[3],
        )
        return (*self.q.shape[:3], V), (N, H, K, M), (N, H, M, V)

    def scores_shape(self) -> Shape:
        """Of the slot scores that are saved for backward, [B, T, HQ, M]."""
        return (0,) if self.save == "nothing" else (*self.q.shape[:3], self.g.shape[3])


class ScanCall(NamedTuple):
    """Mamba's selective scan: u, dt, A, B, C, and states [N, E, S] to begin with. It saves "nothing" or "marks"."""

    u: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    initial: Tensor | None
    cu_seqlens: Tensor | None
    save: str
    check: bool

    def result_shapes(self) -> tuple[Shape, ...]:
        """Outputs [B, T, E] and final states [N, E, S]."""
        return tuple(self.u.shape), (sequence_count(self.u, self.cu_seqlens), *self.A.shape)


class WindowCall(NamedTuple):
    """Attention in a sliding window: q [B, T, HQ, K], keys and values [B, P + T, H, .] with P before the first query
    (packed: [1, N P + T, H, .]), sinks with queries of their own [B, T, HQ, K], [N, S, H, .], and how many tokens of
    each sequence came before [N]. It saves "nothing" or "marks"."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink_q: Tensor | None
    sink_k: Tensor | None
    sink_v: Tensor | None
    position: Tensor | None
    cu_seqlens: Tensor | None
    window: int
    scale: float
    save: str
    check: bool

    def result_shapes(self) -> tuple[Shape, ...]:
        """Outputs [B, T, HQ, V] and log-sum-exps [B, T, HQ]."""
        return (*self.q.shape[:3], self.v.shape[3]), tuple(self.q.shape[:3])

    @property
    def past(self) -> int:
        """P: the keys before the first query of each sequence."""
        beginnings = 1 if self.cu_seqlens is None else max(self.cu_seqlens.shape[0] - 1, 1)
        return (self.k.shape[1] - self.q.shape[1]) // beginnings


class JoinedSlotsCall(NamedTuple):
    """Slots in one softmax with what else a token sees: q, k, v, log gate g, write strength s, `near` [B, T, HQ, V]
    with its log-sum-exp [B, T, HQ], numbers t, c, b of the heads [HQ], and memories [N, H, K, M], [N, H, M, V],
    [N, H, M]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    s: Tensor
    near: Tensor
    near_lse: Tensor
    slot_scale: Tensor
    slot_mass: Tensor
    slot_bias: Tensor
    initial_k: Tensor | None
    initial_v: Tensor | None
    initial_mass: Tensor | None
    cu_seqlens: Tensor | None
    scale: float
    save: str
    check: bool

    def result_shapes(self) -> tuple[Shape, ...]:
        """Outputs [B, T, HQ, V] and final memories [N, H, K, M], [N, H, M, V], [N, H, M]."""
        N, (H, K), V, M = (
            sequence_count(self.q, self.cu_seqlens),
            self.k.shape[2:],
            self.v.shape[3],
            self.g.shape[3],
        )
        return (*self.q.shape[:3], V), (N, H, K, M), (N, H, M, V), (N, H, M)


class StepCall(NamedTuple):
    """One token of gated slot attention per row: q [B, HQ, K], k, v, g, s, and the memories before it."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    s: Tensor | None
    memory_k: Tensor
    memory_v: Tensor
    scale: float
    readout: str
    check: bool

    def written_and_read(self) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
        """What a step in place writes, and what it only reads, by the names that users know."""
        written = {"state.k": self.memory_k, "state.v": self.memory_v}
        return written, {"q": self.q, "k": self.k, "v": self.v, "g": self.g, "s": self.s}


class BoundedMemoryCall(NamedTuple):
    """ABC: q, k, v, write logits w, the memories and the log normaliser [N, H, M] to begin with."""

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    initial_k: Tensor | None
    initial_v: Tensor | None
    initial_log_z: Tensor | None
    cu_seqlens: Tensor | None
    normalise: bool
    scale: float
    save: str
    check: bool


class MatvecCall(NamedTuple):
    """A matrix times a few columns of activations, for decoding."""

    weight: PackedWeight
    x: Tensor
    columns: int
    """Of activations, in x."""
    activations: str
    norm: tuple[Tensor, float] | None
    swiglu: bool
    residual: Tensor | None
    out: Tensor | None


Call = TypeVar("Call", bound=LinearCall | SlotCall | ScanCall | WindowCall | JoinedSlotsCall)
AnyCall = TypeVar("AnyCall", bound=LinearCall | SlotCall | ScanCall | WindowCall | JoinedSlotsCall, contravariant=True)


@dataclass(frozen=True)
class Operation(Generic[Call]):
    """An operator with a backward pass of its own: what goes in, what comes out, and what is saved for backward."""

    name: str
    short: str
    """In the names of torch's operators."""
    record: type[Call]
    results: tuple[str, ...]
    saved: tuple[str, ...]
    counts: tuple[str, ...] = ("cu_seqlens",)
    """The tensors of whole numbers, which have no gradient; they are the last of the record's tensors."""

    @property
    def tensor_count(self) -> int:
        """How many fields of the record are tensors: they come first, up to cu_seqlens."""
        return self.record._fields.index("cu_seqlens") + 1

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The fields that have a gradient."""
        return self.record._fields[: self.tensor_count - len(self.counts)]


GATED_LINEAR_ATTENTION = Operation("gated_linear_attention", "gla", LinearCall, ("o", "final"), ("kept",))
GATED_SLOT_ATTENTION = Operation(
    "gated_slot_attention", "gsa", SlotCall, ("o", "final_k", "final_v"), ("scores", "kept_k", "kept_v")
)
SELECTIVE_SCAN = Operation("selective_scan", "scan", ScanCall, ("y", "final"), ("kept",))
WINDOW_ATTENTION = Operation(
    "window_attention", "window", WindowCall, ("o", "lse"), ("sums",), counts=("position", "cu_seqlens")
)
JOINED_SLOTS = Operation(
    "joined_slots",
    "joined_slots",
    JoinedSlotsCall,
    ("o", "final_k", "final_v", "final_mass"),
    ("scores", "kept_k", "kept_v", "kept_mass"),
)


class Kernels(Protocol[AnyCall]):
    """What an engine brings along for such an operator: a module with these functions."""

    def forward(self, call: AnyCall) -> tuple[Tensors, Tensors]:
        """The results, and what is saved for backward."""

    def backward(self, call: AnyCall, saved: Tensors, gradients: Gradients) -> Gradients:
        """Gradients of the differentiable fields, from those of the results; of these only the first is sure to be
        there. What comes out for a field that is None is passed over."""

    def saved_shapes(self, call: AnyCall) -> tuple[Shape, ...]:
        """Of what is saved, in the dtype sums are carried in; from shapes alone, without reading cu_seqlens."""


def sums_dtype(call: Any) -> torch.dtype:
    """The dtype in which sums and states of a call are carried."""
    return compute_dtype(call[0].dtype)


def tensors_of(call: Any) -> list[Tensor]:
    return [x for x in call if isinstance(x, Tensor)]
