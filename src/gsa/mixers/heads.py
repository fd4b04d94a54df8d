"""What the mixers with queries, keys and values share: projections, convolutions, feature maps, norm, gate, output.

Shape letters: B batch, T time, D model width, H key/value heads, HQ query heads, K, V widths of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from gsa.mixers.activations import ACTIVATIONS, FEATURE_MAPS, NOT_NEGATIVE, SOFTMAX, FeatureMap
from gsa.mixers.base import MAX_HEADS, Mixer, State
from gsa.mixers.convolution import ConvolutionOptions, Projections
from gsa.mixers.fused import swiglu
from gsa.mixers.norm import RMSNorm
from gsa.mixers.sequences import Sequences
from gsa.options import choice, divides, number

MAX_EXPANSION = 256
NORMS = ("full", "heads", "none")
SUM = "sum"


@dataclass(frozen=True, kw_only=True)
class HeadOptions(ConvolutionOptions):
    """Options of every mixer with heads."""

    num_attention_heads: int = number(4, least=1, most=MAX_HEADS)
    """Heads of queries."""
    num_key_value_heads: int | None = number(None, least=1, most=MAX_HEADS)
    """Heads of keys and values, each shared by a group of query heads; as many as queries by default."""
    expand_k: float = number(1.0, above=0, most=MAX_EXPANSION)
    """Width of all queries together, over the model width."""
    expand_v: float = number(1.0, above=0, most=MAX_EXPANSION)
    """Width of all values together (one per query head), over the model width."""
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values have biases."""
    feature_map: str = choice("none", FEATURE_MAPS)
    """Applied to queries and keys."""
    output_gate: bool = False
    """Whether the output is multiplied by swish(W x)."""
    output_norm: str = choice("heads", NORMS)
    """RMS norm of the output: over each head (`heads`), over all of them together (`full`), or `none`."""
    output_norm_eps: float | None = number(None, above=0)
    """Added to the mean square there; `rms_norm_eps` by default."""
    scale: float | None = None
    """Of queries; one over the square root of a head's width by default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output_norm_eps is not None and self.output_norm == "none":
            raise self.fail("output_norm_eps does nothing with output_norm none")
        heads = self.num_attention_heads
        divides(self.kv_heads, heads, self.mixer, "num_key_value_heads must divide num_attention_heads")
        for name, width in (("expand_k", self.expand_k), ("expand_v", self.expand_v)):
            total = self.hidden_size * width
            if abs(total - round(total)) > 1e-6 or round(total) < 1:
                raise self.fail(f"{name}: {width} x hidden_size {self.hidden_size} is not a whole number from 1")
            divides(heads, round(total), self.mixer, f"num_attention_heads must divide {name} x hidden_size")

    @property
    def norm_eps(self) -> float:
        """Of the output's norm."""
        return self.rms_norm_eps if self.output_norm_eps is None else self.output_norm_eps

    @property
    def kv_heads(self) -> int:
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def key_width(self) -> int:
        """Of one head."""
        return round(self.hidden_size * self.expand_k) // self.num_attention_heads

    @property
    def feature_width(self) -> int:
        """Of the keys of one head behind their feature map."""
        return 2 * self.key_width if self.feature_map == SOFTMAX else self.key_width

    @property
    def value_width(self) -> int:
        """Of one head."""
        return round(self.hidden_size * self.expand_v) // self.num_attention_heads


@dataclass(frozen=True, kw_only=True)
class LinearMemoryOptions(HeadOptions):
    """Options of mixers whose memory is a sum over tokens."""

    feature_map: str = choice("none", (*FEATURE_MAPS, SOFTMAX))
    """Applied to queries and keys. `softmax` makes two features of each, and comes behind rotary positions."""
    output_norm: str = choice("heads", (*NORMS, SUM))
    """RMS norm of the output: over each head (`heads`), over all of them together (`full`), or `none`; or `sum`: the
    output is divided by the sum of its weights, as a softmax is, and the memory has a column more for it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output_norm == SUM and self.feature_map not in NOT_NEGATIVE:
            raise self.fail(f"output_norm sum needs a feature_map that is never negative: {', '.join(NOT_NEGATIVE)}")

    @property
    def sum_eps(self) -> float | None:
        """Added to the sum of weights that outputs are divided by; None if they are not."""
        return self.norm_eps if self.output_norm == SUM else None

    @property
    def memory_width(self) -> int:
        """Columns of the memory of one head."""
        return self.value_width + (self.output_norm == SUM)


class Projected(NamedTuple):
    """Queries, keys and values [B, T, heads, width], and what the convolutions leave behind."""

    q: Tensor
    k: Tensor
    v: Tensor
    state: State


class HeadMixer(Mixer):
    """A mixer with queries, keys and values: projects, lets a subclass mix them, and projects back."""

    def __init__(self, options: HeadOptions):
        super().__init__(options)
        D, HQ, H = options.hidden_size, options.num_attention_heads, options.kv_heads
        K, V = options.key_width, options.value_width
        widths = {"q": HQ * K, "k": H * K, "v": H * V}
        self.projections = Projections(self, options, widths, "swish", bias=options.qkv_bias)
        self.o_proj = nn.Linear(HQ * V, D, bias=False)
        if options.output_gate:
            self.g_proj = nn.Linear(D, HQ * V, bias=False)
        if options.output_norm in ("heads", "full"):
            self.norm = RMSNorm(V if options.output_norm == "heads" else HQ * V, options.norm_eps)
        self.feature_map = FeatureMap(options.feature_map, K)

    def project(
        self, x: Tensor, state: State | None, sequences: Sequences, return_state: bool, *, mapped: bool = True
    ) -> Projected:
        """q [B, T, HQ, K] and k [B, T, H, K] behind convolution and feature map, v [B, T, H, V] behind convolution.

        Unless they are to be `mapped` by the caller.
        """
        (q, k, v), left = self.projections.project(self, x, state, sequences, return_state)
        K, V = self.options.key_width, self.options.value_width
        q, k, v = (part.unflatten(-1, (-1, width)) for part, width in ((q, K), (k, K), (v, V)))
        return Projected(self.feature_map(q), self.feature_map(k), v, left) if mapped else Projected(q, k, v, left)

    def output(self, o: Tensor, x: Tensor, activation: str = "none") -> Tensor:
        """y [B, T, D] from the heads' outputs o [B, T, HQ, V]: activation, norm, gate, projection."""
        options = self.options
        o = ACTIVATIONS[activation](o)
        if options.output_norm == "heads":
            o = self.norm(o)
        o = o.flatten(-2)
        if options.output_norm == "full":
            o = self.norm(o)
        if options.output_gate:
            o = swiglu(self.g_proj(x), o)
        return self.o_proj(o)
