"""Every mixer computes what its paper says: formulas written out here around fla's own references, and transformers."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.mamba.modeling_mamba import MambaMixer

from gsa import LM, ModelConfig, preset
from gsa.mixers import MIXERS, mixer
from tests.fla_naive import naive
from tests.ops.cases import relative_error

Parameters = dict[str, Tensor]

B, T, D = 2, 37, 48
# Of outputs and gradients, against the formula in fp64.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


@cache
def exact(operation: str) -> ModuleType:
    """fla.ops.<operation>.naive computing in fp64 instead of fp32."""
    path = naive(operation).__file__
    assert path is not None
    source = re.sub(r"torch\.float(32)?\b", "torch.float64", Path(path).read_text()).replace(".float()", ".double()")
    module = ModuleType(f"fla_exact_{operation}")
    exec(compile(source, path, "exec"), module.__dict__)
    return module


def randomise(module: nn.Module) -> None:
    """Weights so large that a wrong scale, sign or order shows, norms and biases that are neither 1 nor 0."""
    with torch.no_grad():
        for name, weight in module.named_parameters():
            nn.init.normal_(weight, 0.0, 1.5 * weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.5)
            if "norm" in name:
                weight.add_(1)


# The pieces of a layer, in plain torch. x is [B, T, features], with heads [B, T, heads, width].


def split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def convolved(x: Tensor, p: Parameters, name: str) -> Tensor:
    """sum_i weight[:, size - 1 - i] x_{t-i}, plus bias; x itself if the mixer has no such convolution."""
    weight = p.get(f"{name}.weight")
    if weight is None:
        return x
    size, y = weight.shape[-1], torch.zeros_like(x)
    for t in range(x.shape[1]):
        for back in range(min(size, t + 1)):
            y[:, t] += weight[:, 0, size - 1 - back] * x[:, t - back]
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def turned(x: Tensor, theta: float) -> Tensor:
    """Rotary positions: features i and i + K/2 are a complex number, turned by t theta^(-2i/K)."""
    if theta == 0:
        return x
    half = x.shape[-1] // 2
    speed = torch.tensor([theta ** (-2 * i / (2 * half)) for i in range(half)], dtype=torch.float64)
    turn = torch.polar(torch.ones(1, dtype=torch.float64), torch.arange(x.shape[1])[:, None, None] * speed)
    y = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat([y.real, y.imag], -1)


FEATURES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "swish": swish,
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0) ** 2,
    "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "elu1": lambda x: torch.where(x > 0, x + 1, torch.exp(x.clamp(max=0))),
}


def softmaxes(x: Tensor) -> Tensor:
    return torch.cat([y.exp() / y.exp().sum(-1, keepdim=True) for y in (x, -x)], -1)


def projected(p: Parameters, x: Tensor, features: str, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v: projection, convolution with swish, feature map; keys and values once for every query head."""
    q, k, v = (x @ p[f"{name}_proj.weight"].T + p.get(f"{name}_proj.bias", 0) for name in "qkv")
    if "q_conv.weight" in p:
        q, k, v = (swish(convolved(part, p, f"{name}_conv")) for part, name in ((q, "q"), (k, "k"), (v, "v")))
    q, k, v = split(q, heads), split(k, kv_heads), split(v, kv_heads)
    if features == "t2r":
        q, k = (FEATURES["relu"](part @ p["feature_map.layer.weight"].T) for part in (q, k))
    else:
        apply = softmaxes if features == "softmax" else FEATURES[features]
        q, k = apply(q), apply(k)
    k, v = (shared(part, heads) for part in (k, v))
    return q, k, v


def shared(x: Tensor, heads: int) -> Tensor:
    """Head i of a group of heads that share one: the first group, then the second."""
    return torch.stack([x[:, :, i * x.shape[2] // heads] for i in range(heads)], 2)


def counted(v: Tensor, norm: str) -> Tensor:
    """Values with a 1 behind them, if the sum of weights is wanted."""
    return torch.cat([v, torch.ones_like(v[..., :1])], -1) if norm == "sum" else v


def put_out(p: Parameters, x: Tensor, o: Tensor, norm: str, eps: float) -> Tensor:
    """Norm, gate and projection of the heads' outputs."""
    if norm == "sum":
        o = o[..., :-1] / (o[..., -1:] + eps)
    if norm == "heads":
        o = rms_norm(o, p["norm.weight"], eps)
    o = o.flatten(2)
    if norm == "full":
        o = rms_norm(o, p["norm.weight"], eps)
    if "g_proj.weight" in p:
        o = o * swish(x @ p["g_proj.weight"].T)
    return o @ p["o_proj.weight"].T


def slots(q: Tensor, k: Tensor, v: Tensor, g: Tensor, s: Tensor, scale: float, readout: str) -> Tensor:
    """The paper's recurrence (equation 8) for readouts that fla has not."""
    read = {"identity": lambda y: y, "softmax": lambda y: y.softmax(-1)} | FEATURES
    keys = values = q.new_zeros(())
    out = []
    for t in range(q.shape[1]):
        keys = g[:, t, :, :, None].exp() * keys + s[:, t, :, :, None] * k[:, t, :, None]
        values = g[:, t, :, :, None].exp() * values + s[:, t, :, :, None] * v[:, t, :, None]
        p = read[readout]((keys * scale * q[:, t, :, None]).sum(-1))
        out.append((p[..., None] * values).sum(-2))
    return torch.stack(out, 1)


# Each mixer's formula, with its options by name and its defaults. Options that only change the sizes of weights are
# seen there, so the formulas pass over them (`others`).


def gsa_formula(
    p: Parameters,
    x: Tensor,
    *,
    num_attention_heads: int = 4,
    num_key_value_heads: int | None = None,
    gate: str = "data",
    gate_temperature: float = 8.0,
    feature_map: str = "swish",
    value_activation: str = "swish",
    output_activation: str = "swish",
    output_norm: str = "full",
    readout: str = "softmax",
    scale: float | None = 1.0,
    router: str = "none",
    routed_slots: int = 8,
    **others: Any,
) -> Tensor:
    heads, kv_heads = num_attention_heads, num_key_value_heads or num_attention_heads
    q, k, v = projected(p, x, feature_map, heads, kv_heads)
    if "q_norm.weight" in p:
        eps = others.get("rms_norm_eps", 1e-6)
        q, k = rms_norm(q, p["q_norm.weight"], eps), rms_norm(k, p["k_norm.weight"], eps)
    v = FEATURES[value_activation](v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if gate == "constant":
        logits = p["gate_logits"].expand(*x.shape[:2], -1, -1)
    elif gate == "head":  # then, with temperature 1, the sigmoid of these is the decay that Mamba-2 has
        step = (1 + torch.exp(x @ p["head_gate.proj.weight"].T + p["head_gate.bias"])).log()
        decay = torch.exp(-p["head_gate.log_rate"].exp() * step)
        logits, gate_temperature = (decay / (1 - decay)).log()[..., None], 1.0
    else:
        logits = split(x @ p["f_proj.weight"].T + p.get("f_proj.bias", 0), kv_heads)
    logits = shared(logits, heads)
    if gate == "none":  # ABC's writing: shares of what was written until now, and nothing is forgotten
        g = torch.zeros_like(logits)
        s = logits.exp() / logits.exp().cumsum(1)
    else:
        a = torch.sigmoid(logits) ** (1 / gate_temperature)
        if router != "none":
            a = a ** shared(chosen(split(x @ p["router.proj.weight"].T, kv_heads), router, routed_slots), heads)
        g, s = a.log(), 1 - a
    if readout == "softmax":
        o, _ = exact("gsa").naive_recurrent_gsa(q, k, v, s, g, scale=scale)
    else:
        o = slots(q, k, v, g, s, scale, readout)
    return put_out(p, x, FEATURES[output_activation](o), output_norm, epsilon(others))


def chosen(logits: Tensor, router: str, count: int) -> Tensor:
    """Scores of the largest logits of each row, 0 for the others."""
    scores = logits.softmax(-1) if router == "softmax" else torch.sigmoid(logits)
    rank = logits.argsort(-1, descending=True).argsort(-1)
    kept = torch.where(rank < count, scores, 0.0)
    return kept if router == "softmax" else kept / kept.sum(-1, keepdim=True)


def epsilon(options: dict[str, Any]) -> float:
    """Of the output's norm."""
    return options.get("output_norm_eps", options.get("rms_norm_eps", 1e-6))


def abc_formula(
    p: Parameters,
    x: Tensor,
    *,
    num_attention_heads: int = 4,
    num_key_value_heads: int | None = None,
    feature_map: str = "none",
    rope_theta: float = 10000.0,
    gate_clamp: float = 32.0,
    normalise: bool = True,
    scale: float | None = None,
    **others: Any,
) -> Tensor:
    heads, kv_heads = num_attention_heads, num_key_value_heads or num_attention_heads
    q, k, v = projected(p, x, feature_map, heads, kv_heads)
    q, k = turned(q, rope_theta), turned(k, rope_theta)
    w = shared(split(x @ p["s_proj.weight"].T, kv_heads), heads)
    if gate_clamp:
        w = w.clamp(-gate_clamp, gate_clamp)
    if normalise:
        q, k, v, w = (part.transpose(1, 2) for part in (q, k, v, w))
        o = exact("abc").naive_recurrent_abc(q, k, v, w, scale=scale)[0].transpose(1, 2)
    else:
        s = w.exp() / w.exp().cumsum(1)
        o = exact("gsa").naive_recurrent_gsa(q, k, v, s, torch.zeros_like(s), scale=scale)[0]
    return put_out(p, x, o, "heads", epsilon(others))


def rescaled(q: Tensor, scale: float | None) -> Tensor:
    """For references that always divide by the root of a head's width."""
    return q if scale is None else q * scale * q.shape[-1] ** 0.5


def gla_formula(
    p: Parameters,
    x: Tensor,
    *,
    num_attention_heads: int = 4,
    num_key_value_heads: int | None = None,
    feature_map: str = "none",
    gate_temperature: float = 16.0,
    output_norm: str = "heads",
    scale: float | None = None,
    **others: Any,
) -> Tensor:
    heads, kv_heads = num_attention_heads, num_key_value_heads or num_attention_heads
    q, k, v = projected(p, x, feature_map, heads, kv_heads)
    v = counted(v, output_norm)
    logits = x @ p["gk_proj.0.weight"].T @ p["gk_proj.1.weight"].T + p["gk_proj.1.bias"]
    gk = shared(split((torch.sigmoid(logits) ** (1 / gate_temperature)).log(), kv_heads), heads)
    o = exact("gla").naive_recurrent_gla(rescaled(q, scale), k, v, gk)[0]
    return put_out(p, x, o, output_norm, epsilon(others))


def hgrn2_formula(
    p: Parameters,
    x: Tensor,
    *,
    num_attention_heads: int = 1,
    scale: float | None = None,
    bound: Tensor | float = 0.0,
    **others: Any,
) -> Tensor:
    q, f, i = (convolved(x @ p[f"{name}_proj.weight"].T, p, f"{name}_conv") for name in "qfi")
    kept = bound + (1 - bound) * torch.sigmoid(f)
    q, k, i, g = (split(part, num_attention_heads) for part in (swish(q), 1 - kept, i, kept.log()))
    o = exact("gla").naive_recurrent_gla(rescaled(q, scale), k, i, g)[0]
    return put_out(p, x, o, "full", epsilon(others))


def retention_formula(
    p: Parameters,
    x: Tensor,
    *,
    num_attention_heads: int = 8,
    num_key_value_heads: int | None = None,
    feature_map: str = "none",
    rope_theta: float = 10000.0,
    decay: str = "fixed",
    output_norm: str = "heads",
    scale: float | None = None,
    **others: Any,
) -> Tensor:
    heads, late = num_attention_heads, feature_map == "softmax"  # which comes behind positions
    q, k, v = projected(p, x, "none" if late else feature_map, heads, num_key_value_heads or heads)
    q, k = turned(q, rope_theta), turned(k, rope_theta)
    if late:
        q, k = softmaxes(q), softmaxes(k)
    q, v = rescaled(q, scale), counted(v, output_norm)
    if decay == "fixed":
        o = exact("retention").naive_retention(*(part.transpose(1, 2) for part in (q, k, v))).transpose(1, 2)
    else:
        o = exact("linear_attn").naive_recurrent_linear_attn(q, k, v)[0]
    return put_out(p, x, o, output_norm, epsilon(others))


def mamba_formula(p: Parameters, x: Tensor, **others: Any) -> Tensor:
    u, z = (x @ p["in_proj.weight"].T).chunk(2, -1)
    u = swish(convolved(u, p, "conv"))
    S, rank = p["A_log"].shape[1], p["dt_proj.weight"].shape[1]
    dt, write, read = (u @ p["x_proj.weight"].T).split([rank, S, S], -1)
    dt = (1 + (dt @ p["dt_proj.weight"].T + p["dt_proj.bias"]).exp()).log()
    h, y = u.new_zeros(()), []
    for t in range(x.shape[1]):
        h = (-dt[:, t, :, None] * p["A_log"].exp()).exp() * h + (dt * u)[:, t, :, None] * write[:, t, None]
        y.append((h * read[:, t, None]).sum(-1))
    return ((torch.stack(y, 1) + u * p["D"]) * swish(z)) @ p["o_proj.weight"].T


def attention_formula(
    p: Parameters,
    x: Tensor,
    *,
    num_attention_heads: int = 1,
    num_key_value_heads: int | None = None,
    rope_theta: float = 10000.0,
    window: int = T,
    qk_norm: bool = False,
    rms_norm_eps: float = 1e-6,
    qk_norm_eps: float | None = None,
    **others: Any,
) -> Tensor:
    heads, kv_heads = num_attention_heads, num_key_value_heads or num_attention_heads
    q, k, v = (x @ p[f"{name}_proj.weight"].T + p.get(f"{name}_proj.bias", torch.zeros(())) for name in "qkv")
    q, k, v = split(q, heads), split(k, kv_heads), split(v, kv_heads)
    if qk_norm:
        eps = rms_norm_eps if qk_norm_eps is None else qk_norm_eps
        q, k = rms_norm(q, p["q_norm.weight"], eps), rms_norm(k, p["k_norm.weight"], eps)
    q, k, v = turned(q, rope_theta), shared(turned(k, rope_theta), heads), shared(v, heads)
    out = []
    for t in range(x.shape[1]):
        seen = slice(max(t - window + 1, 0), t + 1)
        weights = (torch.einsum("bhk,bshk->bhs", q[:, t], k[:, seen]) / q.shape[-1] ** 0.5).softmax(-1)
        out.append(torch.einsum("bhs,bshk->bhk", weights, v[:, seen]).flatten(1))
    return torch.stack(out, 1) @ p["o_proj.weight"].T


def hybrid_formula(
    p: Parameters,
    x: Tensor,
    *,
    num_attention_heads: int = 1,
    num_key_value_heads: int | None = None,
    rope_theta: float = 10000.0,
    window: int = 64,
    num_sinks: int = 4,
    num_slots: int = 64,
    gate_temperature: float = 8.0,
    slot_router: str = "softmax",
    slot_positions: str = "own",
    qk_norm: bool = False,
    rms_norm_eps: float = 1e-6,
    **others: Any,
) -> Tensor:
    heads, kv_heads, W, S = num_attention_heads, num_key_value_heads or num_attention_heads, window, num_sinks
    q, k, v = (x @ p[f"{name}_proj.weight"].T + p.get(f"{name}_proj.bias", torch.zeros(())) for name in "qkv")
    q, k, v = split(q, heads), split(k, kv_heads), split(v, kv_heads)
    if qk_norm:
        q, k = rms_norm(q, p["q_norm.weight"], rms_norm_eps), rms_norm(k, p["k_norm.weight"], rms_norm_eps)
    logits = torch.einsum("bthc,hmc->bthm", torch.cat([k, v], -1), p["slot_router.weight"]) + p["slot_router.bias"]
    if slot_router == "softmax":
        share = logits.softmax(-1)
        gate = torch.exp(-p["slot_router.log_rate"].exp() * share - p["slot_router.log_fade"].exp())
    else:
        gate = torch.sigmoid(logits) ** (1 / gate_temperature)
        share = (1 - gate) / (1 - gate).sum(-1, keepdim=True)
    scale, own = q.shape[-1] ** -0.5, slot_positions == "own"
    asking = q + torch.einsum("bthk,hkl->bthl", q, p["slot_query"])
    near_q, near_k = turned(q, rope_theta), turned(k, rope_theta)
    # Rows of time that are all of one token are that token at every position.
    at_last, at_window = (
        torch.stack([turned(y[:, None].expand(-1, place + 1, -1, -1), rope_theta)[:, -1] for y in part.unbind(1)], 1)
        for part, place in ((q, W + S - 1), (asking, W))
    )
    sink_q = torch.cat([near_q[:, : W + S], at_last[:, W + S :]], 1)
    slot_q, slot_k = (turned(asking, rope_theta), near_k) if own else (at_window, k)

    keys, values = (x.new_zeros(x.shape[0], kv_heads, num_slots, k.shape[-1]) for _ in range(2))
    n = x.new_zeros(x.shape[0], kv_heads, num_slots, 1)
    out = []
    for t in range(x.shape[1]):
        left = t - W
        near, sinks = slice(max(left + 1, 0), t + 1), slice(0, min(max(left + 1, 0), S))
        seen = [(near_q[:, t], near_k[:, near], v[:, near])]
        seen += [(sink_q[:, t], near_k[:, sinks], v[:, sinks])]
        scores = [torch.einsum("bhk,bshk->bhs", y, shared(key, heads)) * scale for y, key, _ in seen]
        found = [shared(value, heads) for *_, value in seen]
        if left >= S:
            a, s = gate[:, left, :, :, None], share[:, left, :, :, None]
            keys, values = a * keys + s * slot_k[:, left, :, None], a * values + s * v[:, left, :, None]
            n = a * n + s
            key, value, log_n = (shared(y.transpose(1, 2), heads) for y in (keys / n, values / n, n.log()))
            score = torch.einsum("bhk,bmhk->bhm", slot_q[:, t], key) * scale * p["slot_scale"].exp()[:, None]
            mass = p["slot_mass"][:, None] * log_n[..., 0].transpose(1, 2)
            scores.append(score + mass + p["slot_bias"][:, None])
            found.append(value)
        weights = torch.cat(scores, -1).softmax(-1)
        out.append(torch.einsum("bhs,bshk->bhk", weights, torch.cat(found, 1)).flatten(1))
    return torch.stack(out, 1) @ p["o_proj.weight"].T


FORMULAS: dict[str, Callable[..., Tensor]] = {
    "gsa": gsa_formula,
    "abc": abc_formula,
    "gla": gla_formula,
    "hgrn2": hgrn2_formula,
    "retnet": retention_formula,
    "supra": partial(retention_formula, feature_map="t2r"),
    "linear": partial(retention_formula, feature_map="elu1", decay="none", rope_theta=0),
    "mamba": mamba_formula,
    "attention": attention_formula,
    "hybrid": hybrid_formula,
}
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}
EPS = {"rms_norm_eps": 0.1}  # so large that a norm in the wrong place, or behind a wrong scale, shows
CONV = {"conv_size": 4, "conv_bias": True}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("gsa", EPS),
    ("gsa", {}),
    ("gsa", GROUPED | EPS),
    ("gsa", {"expand_k": 0.5, "expand_v": 2, "num_slots": 5, **EPS}),
    ("gsa", {"conv_size": 4, **EPS}),
    ("gsa", {"conv_size": 3, "conv_bias": True}),
    ("gsa", {"gate_temperature": 0.5}),
    ("gsa", {"gate_bias": True, "qkv_bias": True, **GROUPED}),
    ("gsa", {"gate": "constant", **GROUPED}),
    ("gsa", {"gate": "none"}),
    ("gsa", {"gate": "none", **GROUPED, **CONV}),
    ("gsa", {"qk_norm": True, **GROUPED, **EPS}),
    ("gsa", {"router": "sigmoid", "routed_slots": 3, "router_noise": 0, "num_slots": 9, **GROUPED}),
    ("gsa", {"router": "softmax", "routed_slots": 9, "router_noise": 0, "num_slots": 9, "gate_temperature": 0.5}),
    ("gsa", {"router": "softmax", "routed_slots": 1, "router_noise": 0, "num_slots": 9, "gate": "head", **GROUPED}),
    (
        "gsa",
        {"router": "sigmoid", "routed_slots": 2, "router_noise": 0, "gate": "head", "qk_norm": True, "scale": None},
    ),
    ("gsa", {"scale": 0.3}),
    ("gsa", {"scale": None, "expand_k": 2}),
    ("gsa", {"output_gate": True, **EPS}),
    ("gsa", {"output_norm": "heads", **EPS}),
    ("gsa", {"output_norm": "none"}),
    ("gsa", {"output_norm_eps": 0.3, **EPS}),
    *(("gsa", {"readout": name, **EPS}) for name in ("identity", "swish", "relu", "relu2")),
    *(("gsa", {"feature_map": name, **EPS}) for name in (*FEATURES, "t2r")),
    *(("gsa", {"value_activation": name, **EPS}) for name in FEATURES),
    *(("gsa", {"output_activation": name, **EPS}) for name in FEATURES),
    ("abc", EPS),
    ("abc", GROUPED),
    ("abc", {"normalise": False, **EPS}),
    ("abc", {"gate_clamp": 0.5}),
    ("abc", {"gate_clamp": 0}),
    ("abc", {"rope_theta": 0, "expand_k": 1}),
    ("abc", {"rope_theta": 50, "scale": 0.7}),
    ("abc", {"feature_map": "swish", "output_gate": False}),
    ("abc", CONV),
    ("gla", EPS),
    ("gla", GROUPED | EPS),
    ("gla", {"expand_k": 1, "expand_v": 2, "num_attention_heads": 3}),
    ("gla", {"gate_rank": 3, "gate_temperature": 2}),
    ("gla", {"feature_map": "relu", "output_gate": False}),
    ("gla", CONV | EPS),
    ("gla", {"output_norm": "full", "scale": 2.0, **EPS}),
    ("gla", {"feature_map": "softmax", "output_norm": "sum", **GROUPED}),
    ("gla", {"feature_map": "relu", "output_norm": "sum", "output_norm_eps": 0.1}),
    ("hgrn2", EPS),
    ("hgrn2", {"num_attention_heads": 3, **EPS}),
    ("hgrn2", {"scale": 0.1, **EPS}),
    ("hgrn2", CONV),
    ("hgrn2", {"output_norm_eps": 0.3, **EPS}),
    ("retnet", EPS),
    ("retnet", GROUPED | EPS),
    ("retnet", {"decay": "none", **GROUPED}),
    ("retnet", {"feature_map": "softmax", "output_norm": "sum", **GROUPED}),
    ("retnet", {"rope_theta": 0, "scale": 0.4}),
    ("retnet", GROUPED | CONV),
    ("supra", EPS),
    ("supra", GROUPED | EPS),
    ("linear", EPS),
    ("linear", GROUPED | EPS),
    ("linear", {"decay": "fixed", "rope_theta": 20}),
    ("mamba", {}),
    ("mamba", {"expand": 1.5, "ssm_state_size": 5, "time_step_rank": 2, "conv_size": 2, "conv_bias": False}),
    ("attention", {}),
    ("attention", GROUPED),
    ("attention", {"window": 5, **GROUPED}),
    ("attention", {"window": 2}),
    ("attention", {"head_dim": 10, "num_attention_heads": 3}),
    ("attention", {"qk_norm": True, **GROUPED, **EPS}),
    ("attention", {"qk_norm": True, "qk_norm_eps": 0.3, **GROUPED, **EPS}),
    ("attention", {"qkv_bias": True, **GROUPED}),
    ("attention", {"rope_theta": 0}),
    ("attention", {"rope_theta": 30, "num_attention_heads": 2}),
    ("hybrid", {"window": 7, "num_sinks": 2, "num_slots": 5, **GROUPED}),
    ("hybrid", {"window": 4, "num_slots": 3, "slot_router": "gates", "gate_temperature": 0.5, **GROUPED}),
    ("hybrid", {"window": 5, "num_slots": 3, "slot_positions": "window", **GROUPED}),
    ("hybrid", {"window": 1, "num_sinks": 0, "num_slots": 2, "rope_theta": 0, "qkv_bias": True, **GROUPED}),
    ("hybrid", {"window": 9, "num_sinks": 6, "num_slots": 4, "qk_norm": True, **GROUPED, **EPS}),
]


def case_name(case: object) -> str | None:
    if not isinstance(case, tuple):
        return None
    return ",".join([case[0], *(f"{name}={value}" for name, value in case[1].items())])


def gradients(y: Tensor, by: list[Tensor]) -> tuple[Tensor, ...]:
    """Of a sum over y with random weights."""
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.autograd.grad(y, by, weights.to(y.dtype))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_formula(case: tuple[str, dict[str, Any]], dtype: torch.dtype) -> None:
    """Outputs, and gradients of the input and every parameter."""
    name, options = case
    layer = mixer(name, hidden_size=D, **options).to(dtype)
    randomise(layer)
    x = torch.randn(B, T, D, dtype=dtype, requires_grad=True)
    y, _ = layer(x)
    found = gradients(y, [x, *layer.parameters()])
    x_ = x.detach().double().requires_grad_()
    p = {key: value.detach().double().requires_grad_() for key, value in layer.named_parameters()}
    expected = FORMULAS[name](p, x_, **options)
    assert y.dtype == dtype
    assert relative_error(y, expected) < TOLERANCE[dtype]
    exact_gradients = gradients(expected, [x_, *p.values()])
    for key, grad, exact_grad in zip(["x", *p], found, exact_gradients, strict=True):
        assert relative_error(grad, exact_grad) < TOLERANCE[dtype], key


def test_every_mixer_has_a_formula() -> None:
    assert {name for name, _ in CASES} == set(MIXERS)


def test_a_window_of_one_token_sees_that_token() -> None:
    layer = mixer("attention", hidden_size=D, num_attention_heads=4, window=1).double()
    x = torch.randn(B, T, D, dtype=torch.float64)
    assert relative_error(layer(x)[0], layer.o_proj(layer.v_proj(x))) < 1e-9


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_hgrn2_gates_of_a_model_are_bounded_below_by_layer(dtype: torch.dtype) -> None:
    """Bound of layer l: sum_{i=1..l} of softmax(logits)_i, hence 0 in the first layer."""
    config = ModelConfig(mixer="hgrn2", hidden_size=D, num_hidden_layers=3, vocab_size=50, rms_norm_eps=0.1)
    model = LM(config).to(dtype)
    randomise(model)
    ids = torch.randint(50, (B, T))
    p = {name: value.detach().double().requires_grad_() for name, value in model.named_parameters()}
    logits = p["model.lower_bounds"]
    shares = logits.exp() / logits.exp().sum(0)
    x = p["model.embeddings.weight"][ids]
    for layer in range(3):
        own = {name.split(f"layers.{layer}.")[1]: value for name, value in p.items() if f"layers.{layer}." in name}
        mixing = {name.removeprefix("mixer."): value for name, value in own.items()}
        normed = rms_norm(x, own["mixer_norm.weight"], 0.1)
        x = x + hgrn2_formula(mixing, normed, rms_norm_eps=0.1, bound=shares[1 : layer + 1].sum(0))
        normed = rms_norm(x, own["mlp_norm.weight"], 0.1)
        up = swish(normed @ own["mlp.gate_proj.weight"].T) * (normed @ own["mlp.up_proj.weight"].T)
        x = x + up @ own["mlp.down_proj.weight"].T
    expected = rms_norm(x, p["model.norm.weight"], 0.1) @ p["lm_head.weight"].T
    found = model(ids).logits
    assert relative_error(found, expected) < TOLERANCE[dtype]
    exact_gradients = gradients(expected, list(p.values()))
    for key, grad, exact_grad in zip(p, gradients(found, list(model.parameters())), exact_gradients, strict=True):
        assert relative_error(grad, exact_grad) < TOLERANCE[dtype], key


# transformers: the same weights in models that others wrote. Their norms compute in fp32, so all of this does.

MAMBA_NAMES = {"conv1d": "conv", "out_proj": "o_proj"}
MODEL_NAMES = {
    **MAMBA_NAMES,
    "backbone.": "model.",
    "model.embed_tokens": "model.embeddings",
    "norm_f": "norm",
    "input_layernorm": "mixer_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn": "mixer",
}


def renamed(name: str, names: dict[str, str]) -> str:
    for old, new in names.items():
        name = name.replace(old, new)
    return re.sub(r"(layers\.\d+)\.norm\b", r"\1.mixer_norm", name)


def assert_same(ours: nn.Module, found: Tensor, theirs: nn.Module, expected: Tensor, names: dict[str, str]) -> None:
    """Outputs agree, and the gradients of all parameters."""
    assert relative_error(found, expected) < 1e-4
    pairs = {renamed(name, names): value for name, value in theirs.named_parameters()}
    own = dict(ours.named_parameters())
    assert own.keys() == pairs.keys()
    exact_gradients = gradients(expected, [pairs[name] for name in own])
    for name, grad, exact_grad in zip(own, gradients(found, list(own.values())), exact_gradients, strict=True):
        assert relative_error(grad, exact_grad) < 1e-4, name


def copy_weights(theirs: nn.Module, ours: nn.Module, names: dict[str, str]) -> None:
    randomise(theirs)
    ours.load_state_dict({renamed(name, names): value for name, value in theirs.state_dict().items()})


@pytest.mark.parametrize("bias", [True, False])
def test_mamba_is_transformers_mixer(bias: bool) -> None:
    sizes: dict[str, Any] = {"hidden_size": D, "expand": 2, "time_step_rank": 3}
    config = MambaConfig(**sizes, state_size=5, conv_kernel=3, use_conv_bias=bias, num_hidden_layers=1)
    theirs = MambaMixer(config, layer_idx=0)
    ours = mixer("mamba", **sizes, ssm_state_size=5, conv_size=3, conv_bias=bias)
    copy_weights(theirs, ours, MAMBA_NAMES)
    x = torch.randn(B, T, D)
    assert_same(ours, ours(x)[0], theirs, theirs(x), MAMBA_NAMES)


@pytest.mark.parametrize("tied", [True, False])
def test_mamba_is_transformers_model(tied: bool) -> None:
    sizes: dict[str, Any] = {"hidden_size": D, "vocab_size": 50, "num_hidden_layers": 3, "tie_word_embeddings": tied}
    theirs = MambaForCausalLM(MambaConfig(**sizes, state_size=5, layer_norm_epsilon=0.1, pad_token_id=None))
    ours = LM(ModelConfig(mixer="mamba", **sizes, ssm_state_size=5, rms_norm_eps=0.1))
    copy_weights(theirs, ours, MODEL_NAMES)
    ids = torch.randint(50, (B, T))
    assert_same(ours, ours(ids).logits, theirs, theirs(ids).logits, MODEL_NAMES)
    assert relative_error(ours(ids, labels=ids).loss, theirs(ids, labels=ids).loss) < 1e-5


def test_mamba_begins_as_transformers_model_does() -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "vocab_size": 50, "num_hidden_layers": 1}
    theirs = MambaForCausalLM(MambaConfig(**sizes, pad_token_id=None)).backbone.layers[0].mixer
    ours = LM(ModelConfig(mixer="mamba", **sizes)).model.layers[0].mixer
    assert torch.equal(ours.A_log, theirs.A_log)
    assert torch.equal(ours.D, theirs.D)
    steps = F.softplus(ours.dt_proj.bias)  # random: only their range can be promised
    assert steps.min() >= 1e-3 * 0.99
    assert steps.max() <= 0.1 * 1.01
    assert ours.dt_proj.weight.abs().max() <= ours.options.rank**-0.5
    assert ours.dt_proj.weight.abs().max() >= 0.8 * ours.options.rank**-0.5


ATTENTION: dict[str, tuple[type, type[PreTrainedModel], dict[str, Any], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"num_attention_heads": 4}, {}),
    "llama, grouped": (LlamaConfig, LlamaForCausalLM, GROUPED, {}),
    "llama, one key head": (LlamaConfig, LlamaForCausalLM, {"num_attention_heads": 4, "num_key_value_heads": 1}, {}),
    "llama, wide heads": (LlamaConfig, LlamaForCausalLM, {**GROUPED, "head_dim": 16}, {}),
    "llama, tied": (LlamaConfig, LlamaForCausalLM, {**GROUPED, "tie_word_embeddings": True}, {}),
    "mistral": (MistralConfig, MistralForCausalLM, GROUPED, {"sliding_window": None}),
    "mistral, window": (MistralConfig, MistralForCausalLM, {**GROUPED, "window": 5}, {"sliding_window": 5}),
    "mistral, window of 2": (MistralConfig, MistralForCausalLM, {**GROUPED, "window": 2}, {"sliding_window": 2}),
    "mistral, just all": (MistralConfig, MistralForCausalLM, {**GROUPED, "window": T}, {"sliding_window": T}),
    "mistral, nearly all": (MistralConfig, MistralForCausalLM, {**GROUPED, "window": T - 1}, {"sliding_window": T - 1}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {**GROUPED, "qkv_bias": True}, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {**GROUPED, "qk_norm": True, "head_dim": 10}, {}),
}
OWN_NAMES = ("window", "qkv_bias", "qk_norm")


@pytest.mark.parametrize("theta", [10000.0, 50.0])
@pytest.mark.parametrize("case", ATTENTION)
def test_attention_is_transformers_model(case: str, theta: float) -> None:
    """Llama, Mistral's window, Qwen2's biases and Qwen3's norms, whole models with the same weights."""
    config, kind, options, theirs_only = ATTENTION[case]
    sizes: dict[str, Any] = {"hidden_size": D, "vocab_size": 50, "num_hidden_layers": 2, "intermediate_size": 40}
    sizes["rms_norm_eps"] = 0.1
    theirs = kind(
        config(
            **sizes,
            **{name: value for name, value in options.items() if name not in OWN_NAMES},
            **{"num_key_value_heads": 4} if "num_key_value_heads" not in options else {},
            **theirs_only,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
            attn_implementation="eager",
            pad_token_id=None,
        )
    )
    ours = LM(ModelConfig(mixer="attention", **sizes, **options, rope_theta=theta))
    copy_weights(theirs, ours, MODEL_NAMES)
    ids = torch.randint(50, (B, T))
    assert_same(ours, ours(ids).logits, theirs, theirs(ids).logits, MODEL_NAMES)
    assert relative_error(ours(ids, labels=ids).loss, theirs(ids, labels=ids).loss) < 1e-5


# The size of the state

PAPER = {"mamba": (32, 48), "retnet": (512, 24), "gla": (256, 24), "hgrn2": (128, 24), "gsa": (128, 24)}


@pytest.mark.parametrize("system", PAPER)
def test_state_size_of_the_papers_models(system: str) -> None:
    """Table 1's column, in units of model width per layer."""
    with torch.device("meta"):
        model = LM(preset(f"{system}-1.3b"))
    multiple, layers = PAPER[system]
    assert [block.mixer.state_size for block in model.model.layers] == [multiple * 2048] * layers
    assert model.state_size == multiple * 2048 * layers


def held(state: dict[str, Tensor]) -> int:
    """Numbers in a state without the last inputs of convolutions, counters, and ABC's normaliser."""
    left_out = ("position", "log_z")
    return sum(x.numel() for name, x in state.items() if name not in left_out and "conv" not in name)


@pytest.mark.parametrize("case", [case for case in CASES if case[0] != "attention"], ids=case_name)
def test_state_size_is_what_the_state_holds(case: tuple[str, dict[str, Any]]) -> None:
    name, options = case
    layer = mixer(name, hidden_size=D, **options)
    assert held(layer.init_state(1)) == layer.state_size
    assert held(layer.init_state(3)) == 3 * layer.state_size
    _, state = layer(torch.randn(1, 5, D))
    assert held(state) == layer.state_size


@pytest.mark.parametrize("window", [1, 2, 5])
def test_state_size_of_a_window_is_what_is_held_when_it_is_full(window: int) -> None:
    layer = mixer("attention", hidden_size=D, num_attention_heads=4, num_key_value_heads=2, window=window)
    state = layer.init_state(1)
    for token in range(2 * window + 1):
        assert held(state) == min(token, window - 1) * 2 * 2 * (D // 4)
        _, state = layer(torch.randn(1, 1, D), state)
    assert held(state) == layer.state_size
    _, state = layer(torch.randn(1, 3 * window, D))
    assert held(state) == layer.state_size


def test_state_size_of_attention_grows() -> None:
    layer = mixer("attention", hidden_size=D)
    assert layer.state_size is None
    assert held(layer(torch.randn(1, 7, D))[1]) == 2 * 7 * D
    assert LM(ModelConfig(mixer="gsa,attention", hidden_size=D, num_hidden_layers=2, vocab_size=9)).state_size is None
