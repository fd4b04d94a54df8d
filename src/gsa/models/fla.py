"""Checkpoints of flash-linear-attention (FLA): their config and tensors in our names, or a refusal that names a field.

Names and meanings are those of FLA 0.6. Where its layers ignore a field, so do we; what is fixed in its code (the
epsilon of some norms, GLA's temperature) becomes a field of ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gsa.errors import GSAError
from gsa.files import named, read_file, read_json, written
from gsa.mixers.registry import MAX_LAYERS
from gsa.models.checkpoint import (
    CONFIG,
    check_tied,
    companions,
    load_weights,
    write_model,
)
from gsa.models.config import ModelConfig
from gsa.models.fields import FieldReader, Fields
from gsa.models.sizes import tensor_shapes
from gsa.terminal import quoted

# Fields that do not change what a model of any kind computes, besides transformers' own.
_SILENT = {
    "attn_mode",
    "fuse_cross_entropy",
    "fuse_linear_cross_entropy",
    "fuse_norm",  # only changes the name of a norm in GLA and RetNet
    "fuse_swiglu",
    "max_position_embeddings",
    "tokenizer_class",
    "use_l2warp",
}
# Fields that FLA stores in the config of a kind of model, and never reads.
_UNREAD = {
    "gsa": {"clamp_max", "clamp_min", "use_norm", "use_output_gate"},
    "gla": {"use_gk", "use_gv"},
    "retnet": {"conv_size", "use_short_conv"},
    "hgrn2": {"num_heads"},
    "abc": {"gate_low_rank_dim"},
    "transformer": {"elementwise_affine"},
}
_ACTIVATIONS = {"swish": "swish", "silu": "swish", "relu": "relu", "sigmoid": "sigmoid"}
_EPSILON = 1e-5  # of the norms that FLA gives no epsilon
_THETA = 10000.0  # of rotary positions that FLA gives no base


def _reader(fields: Fields, kind: str) -> FieldReader:
    return FieldReader(fields, f"import: {kind}", known=_SILENT | _UNREAD[kind])


def convert_config(fields: Fields) -> ModelConfig:
    """The config of a FLA checkpoint as ours."""
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise GSAError(f"import: model_type is {quoted(kind)}, expected one of {', '.join(_KINDS)}")
    reader = _reader(fields, kind)
    reader.must_be("hidden_act", "swish", "silu")
    reader.must_be("attnres_block_size", None)
    width, layers = reader.count("hidden_size"), reader.count("num_hidden_layers", most=MAX_LAYERS)
    inner = reader.count("intermediate_size", None)
    ratio = reader.get("hidden_ratio", int, 2 if kind == "retnet" and "hidden_ratio" not in fields else 4)
    options = _KINDS[kind](reader)
    reader.get("elementwise_affine", bool, True)  # see `convert_weights`
    mixer = "attention" if kind == "transformer" else _pattern(kind, reader, layers)
    config = ModelConfig(
        mixer=mixer,
        vocab_size=reader.count("vocab_size"),
        hidden_size=width,
        num_hidden_layers=layers,
        intermediate_size=-(-int(width * ratio * 2 / 3) // 256) * 256 if inner is None else inner,
        rms_norm_eps=reader.get("norm_eps", float, 1e-6),
        tie_word_embeddings=reader.get("tie_word_embeddings", bool, False),
        initializer_range=reader.get("initializer_range", float, 0.02),
        **options,
    )
    reader.finish()
    return config


def _heads(reader: FieldReader, expand_k: float, expand_v: float) -> Fields:
    """Fields that most kinds share."""
    return {
        "num_attention_heads": reader.count("num_heads"),
        "expand_k": reader.get("expand_k", float, expand_k),
        "expand_v": reader.get("expand_v", float, expand_v),
    }


def _convolution(reader: FieldReader) -> Fields:
    size = reader.count("conv_size", 4)
    return {"conv_size": size} if reader.get("use_short_conv", bool, False) else {}


def _slots(reader: FieldReader, heads: Fields) -> int:
    width = round(reader.count("hidden_size") * heads["expand_k"]) // heads["num_attention_heads"]
    return reader.count("num_slots", width)


def _feature_map(reader: FieldReader, names: dict[str, str], default: str = "none") -> str:
    name = reader.get("feature_map", str, "none" if "feature_map" in reader.fields else default)
    if name != "none" and name not in names:
        raise reader.fail("feature_map", f"only null, {', '.join(names)} can be represented")
    return names.get(name, name)


def _gsa(reader: FieldReader) -> Fields:
    reader.must_be("expand_v", 1)  # FLA's own layer runs with no other
    heads = _heads(reader, 1.0, 1.0)
    return {
        **heads,
        **_convolution(reader),
        "num_key_value_heads": reader.count("num_kv_heads", None),
        "num_slots": _slots(reader, heads),
        "feature_map": _feature_map(reader, {"swish": "swish", "relu": "relu", "t2r": "t2r"}, "swish"),
        "gate_temperature": reader.get("gate_logit_normalizer", float, 8.0),
        "output_norm_eps": _EPSILON,
    }


def _gla(reader: FieldReader) -> Fields:
    reader.must_be("clamp_min", None)
    return {
        **_heads(reader, 0.5, 1.0),
        **_convolution(reader),
        "num_key_value_heads": reader.count("num_kv_heads", None),
        "feature_map": _feature_map(reader, {**_ACTIVATIONS, "sqrelu": "relu2"}),
        "output_gate": reader.get("use_output_gate", bool, True),
    }


def _retnet(reader: FieldReader) -> Fields:
    return {
        **_heads(reader, 1.0, 2.0),
        "num_key_value_heads": reader.count("num_kv_heads", None),
        "feature_map": _feature_map(reader, {**_ACTIVATIONS, "relu2": "relu2", "gelu": "gelu"}),
        "output_gate": reader.get("use_output_gate", bool, True),
    }


def _hgrn2(reader: FieldReader) -> Fields:
    width = reader.count("hidden_size")
    given = "num_heads" if reader.count("expand_ratio", None) is None else "expand_ratio"  # the width of a head
    part = reader.count(given)
    if width % part:
        raise reader.fail(given, f"it must divide hidden_size {width}")
    return {
        **_convolution(reader),
        "num_attention_heads": part if given == "num_heads" else width // part,
        "lower_bound": reader.get("use_lower_bound", bool, True),
        "output_norm_eps": _EPSILON,
    }


def _abc(reader: FieldReader) -> Fields:
    low, high = reader.get("clamp_min", float, None), reader.get("clamp_max", float, None)
    if low is None or high is None or low != -high or high <= 0:
        raise reader.fail("clamp_min", f"only limits -x and x can be represented, clamp_max is {quoted(high)}")
    heads = _heads(reader, 0.5, 1.0)
    return {
        **heads,
        **_convolution(reader),
        "num_slots": _slots(reader, heads),
        "gate_clamp": high,
        "normalise": True,
        "rope_theta": _THETA if reader.get("use_rope", bool, True) else 0.0,
    }


def _attention(reader: FieldReader) -> Fields:
    norm = reader.get("qk_norm", bool, False)
    return {
        "num_attention_heads": reader.count("num_heads"),
        "num_key_value_heads": reader.count("num_kv_heads", None),
        "qkv_bias": reader.get("qkv_bias", bool, False),
        "qk_norm": norm,
        **({"qk_norm_eps": _EPSILON} if norm else {}),
        "window": reader.count("window_size", None),
        "rope_theta": reader.get("rope_theta", float, _THETA),
    }


_KINDS: dict[str, Callable[[FieldReader], Fields]] = {
    "gsa": _gsa,
    "gla": _gla,
    "retnet": _retnet,
    "hgrn2": _hgrn2,
    "abc": _abc,
    "transformer": _attention,
}


def _pattern(mixer: str, reader: FieldReader, layers: int) -> str:
    """The mixer of every layer: FLA puts softmax attention into those that `attn` names."""
    reader.read.add("attn")
    specs = reader.fields.get("attn")
    if specs is None:
        return mixer
    names = [mixer] * layers
    listed = [specs] if isinstance(specs, dict) else specs
    for spec in listed if isinstance(listed, list) else [None]:
        if not isinstance(spec, dict) or not isinstance(spec.get("layers"), list):
            raise reader.fail("attn", "expected an object with `layers`, or a list of such")
        own = _reader({"model_type": "attention", **spec}, "transformer")
        own.what = f"{reader.what}: attn"
        own.must_be("qk_norm", False)
        options = _attention(own)
        text = ",".join(f"{key}={str(value).lower()}" for key, value in options.items())
        for layer in spec["layers"]:
            if type(layer) is not int or not 0 <= layer < layers:
                raise reader.fail("attn", f"layer {quoted(layer)} is not in 0..{layers - 1}")
            names[layer] = f"attention({text})"
    return ",".join(names)


_RENAMED = (
    (re.compile(r"^(model\.layers\.\d+)\.attn_norm\."), r"\1.mixer_norm."),
    (re.compile(r"^(model\.layers\.\d+)\.attn\.(?:g_norm_swish_gate|g_norm)\."), r"\1.mixer.norm."),
    (re.compile(r"^(model\.layers\.\d+)\.attn\.([qkvfi])_conv1d\."), r"\1.mixer.\2_conv."),
    (re.compile(r"^(model\.layers\.\d+)\.attn\."), r"\1.mixer."),
)


def convert_weights(weights: dict[str, Tensor], config: ModelConfig, affine: bool = True) -> dict[str, Tensor]:
    """The tensors of a FLA checkpoint by our names, all that the config asks for and no other.

    Without `affine`, output norms have no weights there, and get ones.
    """
    expected = tensor_shapes(config)
    renamed = {_rename(name): x for name, x in weights.items() if not name.endswith("rotary.inv_freq")}
    check_tied(config, renamed, "import")
    if config.tie_word_embeddings:
        renamed.pop("lm_head.weight", None)
        expected.pop("lm_head.weight")
    dtype = renamed["model.embeddings.weight"].dtype if "model.embeddings.weight" in renamed else torch.float32
    for name, like in expected.items():
        up = name.replace(".gate_proj.", ".up_proj.")
        together = (2 * like[0], *like[1:])
        if name.endswith("mlp.gate_proj.weight") and name in renamed and tuple(renamed[name].shape) == together:
            # Older versions keep both matrices of the MLP in one.
            renamed[name], renamed[up] = (part.contiguous() for part in renamed[name].chunk(2))
        if name.endswith("mixer.norm.weight") and not affine:
            renamed.setdefault(name, torch.ones(like, dtype=dtype))
        if name not in renamed:
            raise GSAError(f"import: tensor {name} is missing from the checkpoint")
        if tuple(renamed[name].shape) != like:
            raise GSAError(f"import: tensor {name} is {list(renamed[name].shape)}, the config asks for {list(like)}")
    for name, x in renamed.items():
        if not x.is_floating_point():
            raise GSAError(f"import: tensor {name} is {x.dtype}, expected floating point")
        if name not in expected:
            raise GSAError(f"import: tensor {name} has no place in the model that the config describes")
    return renamed


def _rename(name: str) -> str:
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name


@dataclass(frozen=True)
class Imported:
    """What was imported."""

    kind: str
    config: ModelConfig
    parameters: int
    copied: list[str]


def import_checkpoint(path: str | Path, out: str | Path) -> Imported:
    """Reads a FLA checkpoint folder and writes ours, with the tokenizer if there is one."""
    path, out = named(path, "import"), named(out, "import")
    if not path.is_dir():
        raise GSAError(f"import: {path} is not a folder")
    if out.resolve() == path.resolve():
        raise GSAError(f"import: {out} is the checkpoint itself; write to another folder")
    if (out / CONFIG).exists():
        raise GSAError(f"import: {out} holds a model already")
    if out.exists() and not out.is_dir():
        raise GSAError(f"import: {out} is a file, expected a folder")
    fields = read_json(path / CONFIG)
    config = convert_config(fields)
    weights = convert_weights(load_weights(path), config, fields.get("elementwise_affine") is not False)
    ids = {
        name: fields[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if fields.get(name) is not None
    }
    for name, value in ids.items():
        if type(value) is not int and not (isinstance(value, list) and all(type(x) is int for x in value)):
            raise GSAError(f"import: {name} is {quoted(value)}, expected a whole number")
    out.mkdir(parents=True, exist_ok=True)
    beside = companions(path)
    for file in beside:
        with written(out / file.name) as copy:
            copy.write_bytes(read_file(file))
    write_model(config, weights, out, **ids)  # last: a folder with a config counts as a finished model
    parameters = sum(x.numel() for x in weights.values())
    return Imported(fields["model_type"], config, parameters, [file.name for file in beside])
