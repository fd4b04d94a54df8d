"""Tiny checkpoints in flash-linear-attention's layout (0.6.0), and what that library computes with them.

Nothing of gsa is used here: this is the independent side that an importer of such checkpoints is held against. The
formulas are those of fla.layers and fla.models, the operators are fla's own references where these fit.

Fields that fla stores in config.json and that never reach the logits:
    all          max_position_embeddings (sizes a table), use_cache, *_token_id, initializer_range, fuse_swiglu,
                 fuse_cross_entropy, fuse_linear_cross_entropy, use_l2warp; attn_mode picks a kernel, not a formula
    fuse_norm    changes a tensor's name in gla and retnet and nothing else anywhere
    gsa          use_output_gate, use_norm (there is no gate, and always a norm), clamp_min, clamp_max
    gla          use_gk, use_gv
    retnet       use_short_conv, conv_size (the model does not hand them to the layer: there are no convolutions)
    hgrn2        num_heads, which expand_ratio overrules
    abc          gate_low_rank_dim
    transformer  elementwise_affine
Fields with a shorter reach than they seem to have:
    norm_eps            not the output norm of gsa and hgrn2, nor q_norm and k_norm
    elementwise_affine  only the mixer's output norm
    hidden_act          only "swish" runs in gla and retnet; in the others also "powlu", for the MLP alone
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.fla_naive import naive

Config = dict[str, Any]
Weights = dict[str, Tensor]

KINDS = ("gsa", "gla", "retnet", "hgrn2", "abc", "transformer")

ARCHITECTURES = {
    "gsa": "GSAForCausalLM",
    "gla": "GLAForCausalLM",
    "retnet": "RetNetForCausalLM",
    "hgrn2": "HGRN2ForCausalLM",
    "abc": "ABCForCausalLM",
    "transformer": "TransformerForCausalLM",
}

# The defaults of fla's config classes, but for the sizes; slots and heads have distinct widths, so that mixing them up
# shows.
EVERY_KIND: Config = {
    "attnres_block_size": None,
    "bos_token_id": 1,
    "dtype": "float32",
    "elementwise_affine": True,
    "eos_token_id": 2,
    "fuse_cross_entropy": True,
    "fuse_linear_cross_entropy": False,
    "fuse_norm": True,
    "fuse_swiglu": True,
    "hidden_act": "swish",
    "hidden_ratio": 4,
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": None,
    "max_position_embeddings": 2048,
    "norm_eps": 1e-6,
    "num_heads": 4,
    "num_hidden_layers": 3,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "transformers_version": "5.22.2",
    "use_cache": True,
    "use_l2warp": False,
    "vocab_size": 97,
}
SHORT_CONV: Config = {"use_short_conv": False, "conv_size": 4}
FIELDS: dict[str, Config] = {
    # The classes of gsa and abc spell the arguments exapnd_k and exapnd_v, but store, and so write, expand_k.
    "gsa": {
        "attn": None,
        **SHORT_CONV,
        "clamp_max": None,
        "clamp_min": None,
        "expand_k": 1,
        "expand_v": 1,
        "feature_map": "swish",
        "gate_logit_normalizer": 8,
        "num_kv_heads": None,
        "num_slots": 6,
        "use_norm": True,
        "use_output_gate": False,
    },
    "gla": {
        "attn": None,
        **SHORT_CONV,
        "attn_mode": "chunk",
        "clamp_min": None,
        "expand_k": 0.5,
        "expand_v": 1.0,
        "feature_map": None,
        "num_kv_heads": None,
        "use_gk": True,
        "use_gv": False,
        "use_output_gate": True,
    },
    "retnet": {
        "attn": None,
        **SHORT_CONV,
        "attn_mode": "chunk",
        "expand_k": 1.0,
        "expand_v": 2.0,
        "feature_map": None,
        "hidden_ratio": 2,
        "num_kv_heads": None,
        "use_output_gate": True,
    },
    "hgrn2": {
        "attn": None,
        **SHORT_CONV,
        "attn_mode": "chunk",
        "expand_ratio": 8,
        "num_heads": None,
        "use_lower_bound": True,
    },
    "abc": {
        "attn": None,
        **SHORT_CONV,
        "clamp_max": 32,
        "clamp_min": -32,
        "expand_k": 0.5,
        "expand_v": 1,
        "gate_low_rank_dim": 16,
        "num_slots": 6,
        "use_rope": True,
    },
    "transformer": {
        "num_kv_heads": None,
        "qk_norm": False,
        "qkv_bias": False,
        "rope_theta": 10000.0,
        "window_size": None,
    },
}

# Arguments of gla's layer that no config reaches.
GLA_GATE_RANK = 16
GLA_GATE_NORMALIZER = 16
KERNEL_NORM_EPS = 1e-5  # where fla calls a norm with its default: gsa's and hgrn2's output norm, q_norm and k_norm
ROPE_BASE = 10000.0  # of retnet and abc, whose configs have no rope_theta


# --- the checkpoint


def checkpoint(kind: str, *, seed: int = 0, **overrides: Any) -> tuple[Config, Weights]:
    """A random checkpoint: config.json as fla writes it, and the weights that go with it in fla's names."""
    config = configuration(kind, **overrides)
    generator = torch.Generator().manual_seed(seed)
    return config, {name: random_weight(name, shape, generator) for name, shape in shapes(config).items()}


def configuration(kind: str, **overrides: Any) -> Config:
    config = EVERY_KIND | FIELDS[kind]
    unknown = sorted(set(overrides) - set(config))
    if unknown:
        raise TypeError(f"fla's {kind} has no such fields: {', '.join(unknown)}")
    config = {"model_type": kind, "architectures": [ARCHITECTURES[kind]]} | config | overrides
    if kind == "hgrn2":  # each is filled in from the other, and both are written
        if config["expand_ratio"] is None:
            config["expand_ratio"] = config["hidden_size"] // config["num_heads"]
        elif config["num_heads"] is None:
            config["num_heads"] = config["hidden_size"] // config["expand_ratio"]
    attn = config.get("attn")
    if attn is not None:
        config["attn"] = [attention_spec(a) for a in attn] if isinstance(attn, list) else attention_spec(attn)
    return config


def attention_spec(spec: Config) -> Config:
    """The settings of a hybrid's attention layers with the defaults filled in, as fla does before it writes them."""
    defaults = {"qkv_bias": False, "window_size": None, "rope_theta": 10000.0, "num_kv_heads": spec["num_heads"]}
    return defaults | spec


def random_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=generator)
    if "norm" in name.split(".")[-2]:
        return 1 + 0.3 * x
    if len(shape) == 1 or name in ("model.embeddings.weight", "model.lower_bounds"):
        return x
    return x / math.sqrt(math.prod(shape[1:]))


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint and its shape."""
    hidden, vocab, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    width = mlp_width(config)
    tensors: dict[str, tuple[int, ...]] = {"model.embeddings.weight": (vocab, hidden)}
    if config.get("use_lower_bound"):
        tensors["model.lower_bounds"] = (layers, hidden)
    for i in range(layers):
        softmax = softmax_settings(config, i)
        mixer = SHAPES[config["model_type"]](config) if softmax is None else softmax_shapes(hidden, softmax)
        layer = {
            "attn_norm.weight": (hidden,),
            **{f"attn.{name}": shape for name, shape in mixer.items()},
            "mlp_norm.weight": (hidden,),
            "mlp.gate_proj.weight": (width, hidden),
            "mlp.up_proj.weight": (width, hidden),
            "mlp.down_proj.weight": (hidden, width),
        }
        if config["attnres_block_size"] is not None:
            for part in ("attn_res", "mlp_res"):
                layer |= {f"{part}_proj.weight": (1, hidden), f"{part}_norm.weight": (hidden,)}
        tensors |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    tensors["model.norm.weight"] = (hidden,)
    if config["attnres_block_size"] is not None:
        tensors |= {"model.res_proj.weight": (1, hidden), "model.res_norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = (vocab, hidden)
    return tensors


def mlp_width(config: Config) -> int:
    """Two thirds of hidden_ratio times the width, up to the next multiple of 256."""
    if config["intermediate_size"] is not None:
        return config["intermediate_size"]
    ratio = 4 if config["hidden_ratio"] is None else config["hidden_ratio"]
    return 256 * math.ceil(int(config["hidden_size"] * ratio * 2 / 3) / 256)


def softmax_settings(config: Config, layer: int) -> Config | None:
    """What a softmax attention layer is made of, None where the layer is of the kind's own mixer."""
    if config["model_type"] == "transformer":
        return config
    specs = config["attn"] if isinstance(config["attn"], list) else [config["attn"] or {"layers": []}]
    for spec in specs:
        if layer in spec["layers"]:
            return spec | {"qk_norm": False}  # which the hybrids have no way to ask for
    return None


def dims(config: Config) -> tuple[int, int, int, int]:
    """The widths of all query heads and of all value heads, then those of one head."""
    key, value = (round(config["hidden_size"] * config[name]) for name in ("expand_k", "expand_v"))
    return key, value, key // config["num_heads"], value // config["num_heads"]


def groups(config: Config) -> int:
    """Query heads per key/value head."""
    return config["num_heads"] // (config.get("num_kv_heads") or config["num_heads"])


def slots(config: Config) -> int:
    return dims(config)[2] if config["num_slots"] is None else config["num_slots"]


def conv_shapes(config: Config, **widths: int) -> dict[str, tuple[int, ...]]:
    if not config["use_short_conv"]:
        return {}
    return {f"{name}_conv1d.weight": (width, 1, config["conv_size"]) for name, width in widths.items()}


def gsa_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    hidden, (key, value, head_k, _), g = config["hidden_size"], dims(config), groups(config)
    tensors: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (key, hidden),
        "k_proj.weight": (key // g, hidden),
        "v_proj.weight": (value // g, hidden),
        "f_proj.weight": (config["num_heads"] // g * slots(config), hidden),
        "o_proj.weight": (hidden, value),
        **conv_shapes(config, q=key, k=key // g, v=value // g),
    }
    if config["feature_map"] == "t2r":
        tensors["feature_map.layer.weight"] = (head_k, head_k)
    if config["elementwise_affine"]:
        # Not the width of the values: with expand_v other than 1 fla builds the model, but cannot run it.
        tensors["g_norm.weight"] = (hidden,)
    return tensors


def gated_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """What gla and retnet share."""
    hidden, (key, value, _, head_v), g = config["hidden_size"], dims(config), groups(config)
    tensors: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (key, hidden),
        "k_proj.weight": (key // g, hidden),
        "v_proj.weight": (value // g, hidden),
        "o_proj.weight": (hidden, value),
    }
    if config["use_output_gate"]:
        tensors["g_proj.weight"] = (value, hidden)
    if config["elementwise_affine"]:
        tensors[f"{gate_norm(config)}.weight"] = (head_v,)
    return tensors


def gate_norm(config: Config) -> str:
    """The output norm's name in gla and retnet, which tells whether one kernel does the norm and the gate."""
    return "g_norm_swish_gate" if config["fuse_norm"] and config["use_output_gate"] else "g_norm"


def gla_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    hidden, (key, value, _, _), g = config["hidden_size"], dims(config), groups(config)
    return gated_shapes(config) | {
        "gk_proj.0.weight": (GLA_GATE_RANK, hidden),
        "gk_proj.1.weight": (key // g, GLA_GATE_RANK),
        "gk_proj.1.bias": (key // g,),
        **conv_shapes(config, q=key, k=key // g, v=value // g),
    }


def hgrn2_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    forget = hidden // config["expand_ratio"] * config["expand_ratio"]
    tensors: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (forget, hidden),
        "f_proj.weight": (forget, hidden),
        "i_proj.weight": (hidden, hidden),
        "o_proj.weight": (hidden, hidden),
        **conv_shapes(config, q=forget, f=forget, i=hidden),
    }
    if config["elementwise_affine"]:
        tensors["g_norm.weight"] = (hidden,)
    return tensors


def abc_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    hidden, (key, value, _, head_v) = config["hidden_size"], dims(config)
    tensors: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (key, hidden),
        "k_proj.weight": (key, hidden),
        "v_proj.weight": (value, hidden),
        "g_proj.weight": (value, hidden),
        "s_proj.weight": (config["num_heads"] * slots(config), hidden),
        "o_proj.weight": (hidden, value),
        **conv_shapes(config, q=key, k=key, v=value),
    }
    if config["elementwise_affine"]:
        tensors["g_norm.weight"] = (head_v,)
    return tensors


def softmax_shapes(hidden: int, settings: Config) -> dict[str, tuple[int, ...]]:
    head = hidden // settings["num_heads"]
    kv = head * (settings["num_kv_heads"] or settings["num_heads"])
    widths = {"q": hidden, "k": kv, "v": kv}
    tensors: dict[str, tuple[int, ...]] = {f"{name}_proj.weight": (width, hidden) for name, width in widths.items()}
    tensors["o_proj.weight"] = (hidden, hidden)
    if settings["qkv_bias"]:
        tensors |= {f"{name}_proj.bias": (width,) for name, width in widths.items()}
    if settings["qk_norm"]:
        tensors |= {"q_norm.weight": (head,), "k_norm.weight": (head,)}
    return tensors


SHAPES: dict[str, Callable[[Config], dict[str, tuple[int, ...]]]] = {
    "gsa": gsa_shapes,
    "gla": gla_shapes,
    "retnet": gated_shapes,
    "hgrn2": hgrn2_shapes,
    "abc": abc_shapes,
}


# --- the model


def forward(config: Config, weights: Weights, ids: Tensor) -> Tensor:
    """The logits [B, T, vocab], in the precision of the weights."""
    if config["attnres_block_size"] is not None:
        raise NotImplementedError("attention residuals")
    eps = config["norm_eps"]
    bounds = lower_bounds(weights["model.lower_bounds"]) if config.get("use_lower_bound") else None
    x = weights["model.embeddings.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        w = part(weights, f"model.layers.{i}.")
        normed = rms_norm(x, w["attn_norm.weight"], eps)
        mixer_weights, settings = part(w, "attn."), softmax_settings(config, i)
        if settings is not None:
            x = x + softmax_attention(settings, mixer_weights, normed)
        else:
            if bounds is not None and i > 0:  # the first layer's is zero
                mixer_weights["lower_bound"] = bounds[i]
            x = x + MIXERS[config["model_type"]](config, mixer_weights, normed)
        x = x + mlp(config, part(w, "mlp."), rms_norm(x, w["mlp_norm.weight"], eps))
    x = rms_norm(x, weights["model.norm.weight"], eps)
    return x @ weights["model.embeddings.weight" if config["tie_word_embeddings"] else "lm_head.weight"].T


def part(weights: Weights, prefix: str) -> Weights:
    return {name[len(prefix) :]: w for name, w in weights.items() if name.startswith(prefix)}


def lower_bounds(logits: Tensor) -> Tensor:
    """hgrn2's bounds on the forget gates: shares over the depth, added up from the second layer on."""
    shares = logits.softmax(0)
    return shares.cumsum(0) - shares[0]


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def projected(w: Weights, name: str, x: Tensor, activation: Callable[[Tensor], Tensor] | None = F.silu) -> Tensor:
    """A projection, then its short convolution and that one's activation where the layer has convolutions."""
    x = linear(w, f"{name}_proj", x)
    kernel = w.get(f"{name}_conv1d.weight")
    if kernel is None:
        return x
    # Each channel on its own; the last tap is the current token's.
    size = kernel.shape[-1]
    past = F.pad(x, (0, 0, size - 1, 0))
    x = sum((past[:, i : i + x.shape[1]] * kernel[:, 0, i] for i in range(size)), torch.zeros_like(x))
    return x if activation is None else activation(x)


def split(x: Tensor, head: int, groups: int = 1) -> Tensor:
    """[B, T, heads * head] to [B, T, heads, head], every head `groups` times in a row."""
    return x.unflatten(-1, (-1, head)).repeat_interleave(groups, 2)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x if weight is None else x * weight


def rotary(x: Tensor, base: float) -> Tensor:
    """[B, T, heads, head] turned by position: channel i of the first half pairs with channel i of the second."""
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), frequency)[:, None]
    a, b = x.split(half, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def mlp(config: Config, w: Weights, x: Tensor) -> Tensor:
    gate = {"swish": F.silu, "powlu": power_unit}[config["hidden_act"]]
    return linear(w, "down_proj", gate(linear(w, "gate_proj", x)) * linear(w, "up_proj", x))


def power_unit(x: Tensor) -> Tensor:
    """silu with a tamed positive side: x ** (3 / (sqrt(x) + 1)) stands in for x."""
    positive = x.clamp_min(0)
    return torch.where(x > 0, positive ** (3 / (positive.sqrt() + 1)), x) * x.sigmoid()


# --- the mixers: [B, T, hidden] to the same


def gsa(config: Config, w: Weights, x: Tensor) -> Tensor:
    (_, _, head_k, head_v), g = dims(config), groups(config)
    feature_map = {
        "swish": F.silu,
        "relu": F.relu,
        "t2r": lambda y: linear(w, "feature_map.layer", y).relu(),
    }[config["feature_map"]]
    # On top of the convolutions' own silu, where there are any.
    q = feature_map(split(projected(w, "q", x), head_k))
    k = feature_map(split(projected(w, "k", x), head_k, g))
    v = F.silu(split(projected(w, "v", x), head_v, g))
    f = F.logsigmoid(split(linear(w, "f_proj", x), slots(config), g)) / config["gate_logit_normalizer"]
    o = slot_attention(q, k, v, 1 - f.exp(), f).flatten(-2)
    return linear(w, "o_proj", rms_norm(F.silu(o), w.get("g_norm.weight"), KERNEL_NORM_EPS))


# gla takes its activations from a table of its own, retnet from transformers: gelu is not the same in both.
GLA_FEATURE_MAPS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "logsigmoid": F.logsigmoid,
    "silu": F.silu,
    "swish": F.silu,
    "sqrelu": lambda x: F.relu(x).square(),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
}
RETNET_FEATURE_MAPS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "swish": F.silu,
    "relu2": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "tanh": torch.tanh,
}


def gla(config: Config, w: Weights, x: Tensor) -> Tensor:
    (_, _, head_k, head_v), g = dims(config), groups(config)
    feature_map = GLA_FEATURE_MAPS[config["feature_map"]]
    q = feature_map(split(projected(w, "q", x), head_k))
    k = feature_map(split(projected(w, "k", x), head_k, g))
    v = split(projected(w, "v", x), head_v, g)
    low_rank = linear(w, "gk_proj.0", x)
    decay = F.logsigmoid(split(linear(w, "gk_proj.1", low_rank), head_k, g)) / GLA_GATE_NORMALIZER
    if config["clamp_min"] is not None:
        decay = decay.clamp_min(config["clamp_min"])
    return gated_output(config, w, x, linear_attention(q, k, v, decay))


def retnet(config: Config, w: Weights, x: Tensor) -> Tensor:
    (_, _, head_k, head_v), g = dims(config), groups(config)
    feature_map = RETNET_FEATURE_MAPS[config["feature_map"]]
    q = rotary(feature_map(split(linear(w, "q_proj", x), head_k)), ROPE_BASE)
    k = rotary(feature_map(split(linear(w, "k_proj", x), head_k, g)), ROPE_BASE)
    return gated_output(config, w, x, retention(q, k, split(linear(w, "v_proj", x), head_v, g)))


def gated_output(config: Config, w: Weights, x: Tensor, o: Tensor) -> Tensor:
    """A norm for each head, then the gate."""
    o = rms_norm(o, w.get(f"{gate_norm(config)}.weight"), config["norm_eps"]).flatten(-2)
    if config["use_output_gate"]:
        o = o * F.silu(linear(w, "g_proj", x))
    return linear(w, "o_proj", o)


def hgrn2(config: Config, w: Weights, x: Tensor) -> Tensor:
    head_f = config["expand_ratio"]
    head_i = config["hidden_size"] // (config["hidden_size"] // head_f)
    q = F.silu(projected(w, "q", x, activation=None))
    forget = F.logsigmoid(projected(w, "f", x, activation=None))
    i = projected(w, "i", x, activation=None)
    if "lower_bound" in w:
        # log(bound + (1 - bound) * sigmoid(f))
        forget = torch.logaddexp(w["lower_bound"].log(), torch.log1p(-w["lower_bound"]) + forget)
    k = 1 - forget.exp()
    o = linear_attention(split(q, head_f), split(k, head_f), split(i, head_i), split(forget, head_f)).flatten(-2)
    return linear(w, "o_proj", rms_norm(o, w.get("g_norm.weight"), KERNEL_NORM_EPS))


def abc(config: Config, w: Weights, x: Tensor) -> Tensor:
    _, _, head_k, head_v = dims(config)
    q, k = (split(projected(w, name, x), head_k) for name in "qk")
    v = split(projected(w, "v", x), head_v)
    if config["use_rope"]:
        q, k = rotary(q, ROPE_BASE), rotary(k, ROPE_BASE)
    s = split(linear(w, "s_proj", x), slots(config)).clamp(config["clamp_min"], config["clamp_max"])
    o = rms_norm(bounded_memory(q, k, v, s), w.get("g_norm.weight"), config["norm_eps"]).flatten(-2)
    return linear(w, "o_proj", o * F.silu(linear(w, "g_proj", x)))


def softmax_attention(settings: Config, w: Weights, x: Tensor) -> Tensor:
    head = x.shape[-1] // settings["num_heads"]
    g = groups(settings)
    q, k, v = split(linear(w, "q_proj", x), head), split(linear(w, "k_proj", x), head), linear(w, "v_proj", x)
    if settings["qk_norm"]:
        q, k = rms_norm(q, w["q_norm.weight"], KERNEL_NORM_EPS), rms_norm(k, w["k_norm.weight"], KERNEL_NORM_EPS)
    q, k = rotary(q, settings["rope_theta"]), rotary(k, settings["rope_theta"]).repeat_interleave(g, 2)
    time = torch.arange(x.shape[1])
    distance = time[:, None] - time
    visible = distance >= 0
    if settings["window_size"] is not None:  # the query's own token is one of the window
        visible &= distance < settings["window_size"]
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * head**-0.5
    p = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return linear(w, "o_proj", torch.einsum("bhij,bjhd->bihd", p, split(v, head, g)).flatten(-2))


MIXERS: dict[str, Callable[[Config, Weights, Tensor], Tensor]] = {
    "gsa": gsa,
    "gla": gla,
    "retnet": retnet,
    "hgrn2": hgrn2,
    "abc": abc,
}


# --- the operators, on [B, T, heads, width]: fla's references; these compute in float32 whatever they are given, so
# doubles go through a loop over the tokens instead


def heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def slot_attention(q: Tensor, k: Tensor, v: Tensor, s: Tensor, f: Tensor) -> Tensor:
    """gsa: queries read the slots' keys, unscaled, and what they find there reads the slots' values."""
    if q.dtype != torch.double:
        return naive("gsa").naive_recurrent_gsa(q, k, v, s, f, scale=1.0)[0]
    p = recurrence(q, k, s, value_decay=f).softmax(-1)
    return recurrence(p, s, v, key_decay=f)


def bounded_memory(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
    """abc: a slot holds the average of the past, in which token i weighs exp(s_i)."""
    if q.dtype != torch.double:
        return naive("abc").naive_recurrent_abc(*heads_first(q, k, v, s))[0].transpose(1, 2)
    total = s.logcumsumexp(1)
    decay = torch.cat([total[:, :1], total[:, :-1]], 1) - total
    return slot_attention(q * q.shape[-1] ** -0.5, k, v, (s - total).exp(), decay)


def linear_attention(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    if q.dtype != torch.double:
        return naive("gla").naive_recurrent_gla(q, k, v, decay)[0]
    return recurrence(q * q.shape[-1] ** -0.5, k, v, key_decay=decay)


def retention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.dtype != torch.double:
        return naive("retention").naive_retention(*heads_first(q, k, v)).transpose(1, 2)
    # Every query head has a decay of its own, also those that share keys and values.
    decay = torch.log1p(-(2.0 ** (-5 - torch.arange(q.shape[2], dtype=q.dtype))))
    return linear_attention(q, k, v, decay[:, None].expand(k.shape))


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, *, key_decay: Tensor | None = None, value_decay: Tensor | None = None
) -> Tensor:
    """Token by token: the state fades, by log-space decays, takes in the outer product of k and v, and is read by q."""
    state = q.new_zeros(*q[:, 0].shape, v.shape[-1])
    outputs = []
    for t in range(q.shape[1]):
        if key_decay is not None:
            state = state * key_decay[:, t].exp()[..., None]
        if value_decay is not None:
            state = state * value_decay[:, t].exp()[..., None, :]
        state = state + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1)
