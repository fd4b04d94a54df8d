"""What a Transformer can become: the config of each student, how its new weights begin, and what it leaves out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gsa.convert.teacher import Teacher
from gsa.errors import GSAError
from gsa.mixers.activations import SOFTMAX
from gsa.mixers.base import Options
from gsa.mixers.hybrid import HybridOptions
from gsa.mixers.registry import mixer_class
from gsa.mixers.slots import half_life_bias, spread_half_lives
from gsa.models.config import ModelConfig
from gsa.models.fields import Fields
from gsa.models.init import initialise
from gsa.terminal import quoted


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a user chose of a student; None leaves it at the student's default."""

    to: str
    paper: bool = False
    """The plain form of the paper's section on finetuning."""
    slots: int | None = None
    window: int | None = None
    sinks: int | None = None
    slot_router: str | None = None
    slot_positions: str | None = None
    feature_map: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class Student:
    """One thing that a Transformer can become."""

    fields: Callable[[Teacher, Choices], Fields]
    """Mixer and options, beside the sizes that all students keep."""
    takes: tuple[str, ...] = ()
    """The choices that change something."""
    without: tuple[str, ...] = ()
    """What of the teacher has no place in it, in words."""


def _attention(teacher: Teacher, choices: Choices) -> Fields:
    return {"mixer": "attention"}


def _heads(teacher: Teacher) -> Fields:
    """Options that mixers with heads share."""
    expansion = teacher.heads * teacher.head_dim / teacher.sizes["hidden_size"]
    return {
        "num_attention_heads": teacher.heads,
        "num_key_value_heads": teacher.kv_heads,
        "expand_k": expansion,
        "expand_v": expansion,
        "qkv_bias": teacher.qkv_bias,
    }


def _gsa(teacher: Teacher, choices: Choices) -> Fields:
    """The teacher's q, k and v as they are, and gates with a bias; in the paper's form, its layer."""
    fields = {"mixer": "gsa", **_heads(teacher), "num_slots": 64 if choices.slots is None else choices.slots}
    if choices.paper:
        _refuse_norms(teacher, "the paper's form of gsa")
        return fields
    fields["qk_norm"] = teacher.qk_norm
    plain = dict.fromkeys(("feature_map", "value_activation", "output_activation", "output_norm"), "none")
    return {**fields, **plain, "scale": teacher.head_dim**-0.5, "gate_bias": True}


def _refuse_norms(teacher: Teacher, student: str) -> None:
    """Of queries and keys, which Qwen3 has."""
    if teacher.qk_norm:
        raise GSAError(
            f"convert: the norms of queries and keys (q_norm, k_norm) have no place in {student}; attention, hybrid "
            "and gsa keep them"
        )


def _gla(teacher: Teacher, choices: Choices) -> Fields:
    _refuse_norms(teacher, choices.to)
    return {"mixer": "gla", **_heads(teacher), **_features(choices, "relu"), "output_gate": False}


def _retnet(teacher: Teacher, choices: Choices) -> Fields:
    return {**_gla(teacher, choices), "mixer": "retnet", **teacher.rope}


def _supra(teacher: Teacher, choices: Choices) -> Fields:
    _refuse_norms(teacher, choices.to)
    return {"mixer": "supra", **_heads(teacher), **_features(choices, "t2r"), **teacher.rope}


def _hybrid(teacher: Teacher, choices: Choices) -> Fields:
    """All of the teacher's attention, in a window; slots for what leaves it. What is not chosen is the mixer's."""
    names = {"window": "window", "sinks": "num_sinks", "slots": "num_slots"}
    names |= {name: name for name in ("slot_router", "slot_positions")}
    chosen = {option: getattr(choices, name) for name, option in names.items()}
    options = {option: HYBRID[option].default if given is None else given for option, given in chosen.items()}
    fields: Fields = {"mixer": "hybrid", **teacher.attention, **options}
    near = fields["window"] + fields["num_sinks"]
    for window in teacher.windows:
        if window is not None and near > window:
            raise GSAError(f"convert: window and sinks are {near} tokens, the teacher sees no more than {window}")
    return fields


def _features(choices: Choices, default: str) -> Fields:
    """Features of queries and keys. Two softmaxes come with what a softmax has: outputs are means of values."""
    chosen = choices.feature_map or default
    return {"feature_map": chosen, **({"output_norm": "sum", "scale": 1.0} if chosen == SOFTMAX else {})}


HYBRID = HybridOptions.__dataclass_fields__
_NO_POSITIONS = "rotary positions"
_NO_SOFTMAX = "the softmax over tokens"
STUDENTS: dict[str, Student] = {
    "attention": Student(_attention),
    "gsa": Student(_gsa, ("paper", "slots"), (_NO_POSITIONS,)),
    "gla": Student(_gla, ("paper", "feature_map"), (_NO_POSITIONS, _NO_SOFTMAX)),
    "retnet": Student(_retnet, ("feature_map",), (_NO_SOFTMAX,)),
    "supra": Student(_supra, ("feature_map",), (_NO_SOFTMAX,)),
    "hybrid": Student(_hybrid, ("slots", "window", "sinks", "slot_router", "slot_positions")),
}


def student_config(teacher: Teacher, choices: Choices) -> ModelConfig:
    """The config of what a teacher becomes; a choice that would do nothing is refused."""
    if choices.to not in STUDENTS:
        raise GSAError(f"convert: cannot convert to {quoted(choices.to)}, expected one of {', '.join(STUDENTS)}")
    student = STUDENTS[choices.to]
    for name in ("paper", "slots", "window", "sinks", "slot_router", "slot_positions", "feature_map"):
        given = getattr(choices, name)
        if given is not None and given is not False and name not in student.takes:
            raise GSAError(f"convert: {name} does nothing for {choices.to}")
    if choices.to == "attention":
        return teacher.config
    return ModelConfig(**teacher.sizes, **student.fields(teacher, choices))


def left_out(teacher: Teacher, choices: Choices) -> list[str]:
    """What of the teacher the student does not have, in words."""
    found = list(STUDENTS[choices.to].without)
    windows = sorted({window for window in teacher.windows if window is not None})
    if windows and choices.to != "attention":
        found.append(f"the sliding window of {', '.join(map(str, windows))} tokens")
    return found


def new_weights(
    options: Options, names: list[str], choices: Choices, layer: int, student: ModelConfig
) -> dict[str, Tensor]:
    """Those weights of a layer's mixer that its teacher does not have, as they begin."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(choices.seed + layer)
        mixer = mixer_class(options.mixer)(options)
        mixer.apply(lambda module: initialise(module, student.initializer_range, student.num_hidden_layers))
        weights = {name: x.detach() for name, x in mixer.state_dict().items() if name in names}
    for name, begin in BEGINNINGS.items():
        if name in weights and not (choices.paper and name == _GLA_BIAS):
            weights[name] = begin(weights[name], options)
    return weights


def _identity(x: Tensor, options: Options) -> Tensor:
    return torch.eye(x.shape[0])


def _gate_bias(x: Tensor, options: Any) -> Tensor:
    """GLA's gates begin with half-lives spread over the features of each head."""
    half_lives = spread_half_lives(options.feature_width).repeat(options.kv_heads)
    return half_life_bias(half_lives, options.gate_temperature)


_GLA_BIAS = "gk_proj.1.bias"
BEGINNINGS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "feature_map.layer.weight": _identity,
    _GLA_BIAS: _gate_bias,
}
"""Weights that do not begin as they do in a model that is trained from the start, and how they do."""
