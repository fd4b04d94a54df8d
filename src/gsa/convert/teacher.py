"""The Transformer that is converted: every field of its config is read, and what cannot be represented is refused."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

from gsa.errors import GSAError
from gsa.mixers.registry import MAX_LAYERS
from gsa.models.config import ModelConfig
from gsa.models.fields import FieldReader, Fields
from gsa.terminal import quoted

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Kinds of models by `model_type`, with the class that computes them in transformers."""
# Fields that do not change what a trained model computes.
_HARMLESS = {
    "attention_dropout",
    "is_llama_config",
    "pretraining_tp",  # how products were cut into pieces
    "tokenizer_class",
}
# Fields with which models of these kinds, or their relatives, compute something else; with their neutral values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "attention_multiplier": (None, 1),
    "attn_logit_softcapping": (None,),
    "auto_map": (None,),
    "embedding_multiplier": (None, 1),
    "expert_count": (None, 0),
    "final_logit_softcapping": (None,),
    "hidden_act": ("silu", "swish"),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "mlp_bias": (False, None),
    "no_rope_layers": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "o_proj_bias": (False, None),
    "partial_rotary_factor": (None, 1),
    "quantization_config": (None,),
    "query_pre_attn_scalar": (None,),
    "residual_multiplier": (None, 1),
    "rope_interleaved": (False, None),
    "use_qk_norm": (False, None),
}
SCALED: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "rope_factor"},
    "llama3": {
        "factor": "rope_factor",
        "original_max_position_embeddings": "rope_context",
        "low_freq_factor": "rope_low",
        "high_freq_factor": "rope_high",
    },
}
"""Kinds of rotary positions, with the fields that each needs and what they are here."""
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Teacher:
    """A Transformer, in our terms."""

    family: str
    sizes: Fields
    """Fields of `ModelConfig` that every student keeps."""
    heads: int
    kv_heads: int
    head_dim: int
    rope: Fields
    """Options of rotary positions."""
    qkv_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    """Tokens that each layer sees; None is all."""
    context: int | None
    """Tokens that it was trained to see."""
    tokens: dict[str, int | list[int]]
    """Special tokens, by the names that config.json has for them."""
    unknown: dict[str, str]
    """Fields that are not known here, and their values: transformers ignores them too."""

    @property
    def config(self) -> ModelConfig:
        """The same model as ours, with the mixer `attention`."""
        more: Fields = {}
        if len(set(self.windows)) == 1:
            mixer, more["window"] = "attention", self.windows[0]
        else:
            runs = [(window, len(list(run))) for window, run in groupby(self.windows)]
            mixer = ",".join(f"attention(window={str(window).lower()})*{count}" for window, count in runs)
        return ModelConfig(mixer=mixer, **self.sizes, **self.attention, **more)

    @property
    def attention(self) -> Fields:
        """Options that `attention` and `hybrid` share."""
        return {
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            **self.rope,
            "qkv_bias": self.qkv_bias,
            "qk_norm": self.qk_norm,
        }


def read_teacher(fields: Fields) -> Teacher:
    """The Transformer that a config.json describes; raises by name for what cannot be represented."""
    family = fields.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise GSAError(f"convert: model_type is {quoted(family)}, expected one of {', '.join(FAMILIES)}")
    reader = FieldReader(fields, f"convert: {family}", known=_HARMLESS)
    classes = fields.get("architectures")
    if classes not in (None, [FAMILIES[family]]):
        raise reader.fail("architectures", f"expected {FAMILIES[family]}")
    for name, values in _NEUTRAL.items():
        reader.must_be(name, *values)
    width, heads = reader.count("hidden_size"), reader.count("num_attention_heads")
    layers = reader.count("num_hidden_layers", most=MAX_LAYERS)
    kv_heads = reader.count("num_key_value_heads", heads if family == "llama" else ...)
    head_dim = reader.count("head_dim", 128 if family == "qwen3" else None)
    if head_dim is None:
        if width % heads:
            raise reader.fail("num_attention_heads", f"it must divide hidden_size {width}")
        head_dim = width // heads
    rope = _rope(reader)
    teacher = Teacher(
        family=family,
        sizes={
            "vocab_size": reader.count("vocab_size"),
            "hidden_size": width,
            "num_hidden_layers": layers,
            "intermediate_size": reader.count("intermediate_size"),
            "rms_norm_eps": reader.get("rms_norm_eps", float, 1e-6),
            "tie_word_embeddings": reader.get("tie_word_embeddings", bool, False),
            "initializer_range": reader.get("initializer_range", float, 0.02),
        },
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=rope,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        windows=_windows(reader, family, layers),
        context=reader.count("max_position_embeddings", None),
        tokens=_tokens(reader),
        unknown={},
    )
    teacher.unknown.update({name: quoted(fields[name]) for name in reader.unread()})
    _ = teacher.config  # which checks all that is left
    return teacher


def _rope(reader: FieldReader) -> Fields:
    """Rotary positions: plain, linear or Llama 3's; others are refused."""
    found, scaled = Fields(rope_theta=10000.0), Fields()
    theta = reader.get("rope_theta", float, None)
    for name in ("rope_scaling", "rope_parameters"):
        within = FieldReader(reader.get(name, dict, {}), f"{reader.what}: {name}")
        theta = within.get("rope_theta", float, theta)
        kinds = {key: within.get(key, str, None) for key in ("rope_type", "type")}  # the second is of older versions
        kind = kinds["rope_type"] or kinds["type"] or "default"
        for key, value in kinds.items():
            if value is not None and (value != kind or kind not in SCALED):
                raise within.fail(key, f"only {', '.join(SCALED)} rotary positions can be represented")
        within.must_be("partial_rotary_factor", None, 1)
        if kind == "default":
            within.must_be("factor", None, 1)
        own = {
            ours: within.count(theirs, ...) if ours == "rope_context" else within.get(theirs, float, ...)
            for theirs, ours in SCALED[kind].items()
        }
        within.finish()
        if own and scaled and own != scaled:
            raise reader.fail(name, "rope_scaling says something else")
        scaled = own or scaled
    if scaled.get("rope_factor") != 1:  # else it is not scaled, whatever else is said of it
        found |= scaled
    return found if theta is None else {**found, "rope_theta": theta}


def _windows(reader: FieldReader, family: str, layers: int) -> tuple[int | None, ...]:
    """Tokens that each layer sees, as transformers has it."""
    if family == "llama":
        reader.must_be("sliding_window", None)
        return (None,) * layers
    if family == "mistral":
        reader.must_be("layer_types", None)
        return (_window(reader),) * layers
    window, kinds = _window(reader), reader.get("layer_types", list, None)
    first = reader.get("max_window_layers", int, 28)  # layers before it see everything
    if not reader.get("use_sliding_window", bool, False):
        return (None,) * layers
    if kinds is None:
        return tuple(window if layer >= first else None for layer in range(layers))
    known = {"full_attention": None, "sliding_attention": window}
    if len(kinds) != layers or not all(isinstance(kind, str) and kind in known for kind in kinds):
        raise reader.fail("layer_types", f"expected {layers} times {' or '.join(known)}")
    return tuple(known[kind] for kind in kinds)


def _window(reader: FieldReader) -> int | None:
    """Tokens of a sliding window: null is none, and where nothing is said it is transformers' default."""
    found: int | None = reader.count("sliding_window", None if "sliding_window" in reader.fields else 4096)
    return found


def _tokens(reader: FieldReader) -> dict[str, int | list[int]]:
    """Special tokens."""
    found: dict[str, int | list[int]] = {}
    for name in _TOKENS:
        value = reader.fields.get(name)
        if value is not None:
            if not all(type(one) is int and one >= 0 for one in (value if isinstance(value, list) else [value])):
                raise reader.fail(name, "expected a token or a list of them")
            found[name] = value
    return found
