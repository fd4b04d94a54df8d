"""Every option changes something, wrong values are refused by name, and configs go to JSON and back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gsa import LM, GSAError, ModelConfig
from gsa.mixers import MIXERS, mixer
from gsa.options import _limits
from tests.examples import examples

SHARED = {"hidden_size", "rms_norm_eps"}
D = 32

# Values to try for every option; those equal to a mixer's default are left out there.
VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_size": (48,),
    "rms_norm_eps": (0.5,),
    "num_attention_heads": (2,),
    "num_key_value_heads": (1, 2),
    "head_dim": (4,),
    "expand_k": (0.5, 1.0, 2.0),
    "expand_v": (0.5, 1.0, 2.0),
    "num_slots": (5,),
    "gate": ("constant", "none", "data", "head"),
    "router": ("sigmoid", "softmax", "none"),
    "routed_slots": (3,),
    "router_noise": (0.0, 0.5),
    "gate_temperature": (1.5,),
    "gate_bias": (True,),
    "gate_rank": (3,),
    "gate_clamp": (0.1,),
    "readout": ("softmax", "identity", "swish", "relu", "relu2"),
    "normalise": (False,),
    "decay": ("fixed", "none"),
    "lower_bound": (False,),
    "feature_map": ("none", "swish", "relu", "relu2", "gelu", "sigmoid", "elu1", "t2r", "softmax"),
    "value_activation": ("none", "swish", "relu", "relu2", "gelu", "sigmoid", "elu1"),
    "output_activation": ("none", "swish", "relu", "relu2", "gelu", "sigmoid", "elu1"),
    "output_gate": (True, False),
    "output_norm": ("full", "heads", "none", "sum"),
    "output_norm_eps": (0.5,),
    "scale": (0.37, None),
    "conv_size": (3, 5),
    "conv_bias": (True, False),
    "rope_theta": (0, 50.0),
    "window": (1, 3),
    "num_sinks": (0, 2),
    "slot_router": ("softmax", "gates"),
    "slot_positions": ("window", "own"),
    "qkv_bias": (True,),
    "qk_norm": (True,),
    "qk_norm_eps": (0.5,),
    "expand": (1.0, 1.5),
    "ssm_state_size": (3,),
    "time_step_rank": (5,),
}
# What else must be set so that an option, or one value of it, can do something.
WITH: dict[tuple[str, ...], dict[str, Any]] = {
    **{(name, "num_key_value_heads"): {"num_attention_heads": 4} for name in ("attention", "hybrid")},
    **{(name, "rms_norm_eps"): {"qk_norm": True} for name in ("attention", "hybrid")},
    **{(name, "qk_norm_eps"): {"qk_norm": True} for name in ("attention", "hybrid")},
    **{("hybrid", option): {"window": 2} for option in ("num_sinks", "slot_router", "slot_positions")},
    ("hybrid", "gate_temperature"): {"window": 2, "slot_router": "gates"},
    **{(name, "conv_bias"): {"conv_size": 3} for name in MIXERS if name != "mamba"},
    **{(name, "output_norm"): {"feature_map": "relu"} for name in ("gla", "retnet", "supra", "linear")},
    ("gsa", "gate", "head"): {"router": "sigmoid", "router_noise": 0},
    ("gsa", "routed_slots"): {"router": "sigmoid", "router_noise": 0},
    ("gsa", "router_noise"): {"router": "sigmoid"},
    **{(name, "scale"): {"rms_norm_eps": 0.5} for name in MIXERS},  # otherwise the output's norm takes it back
}
# What a mixer by itself does not have: the model's own norms, and bounds that layers of a model share.
ONLY_IN_MODELS = {("mamba", "rms_norm_eps"), ("hgrn2", "lower_bound")}


def options_of(name: str) -> dict[str, Field[Any]]:
    return {entry.name: entry for entry in fields(MIXERS[name].Options)}


def cases(name: str) -> list[tuple[str, Any]]:
    """Each option of a mixer, with every value that is not the default."""
    return [
        (option, value)
        for option, entry in options_of(name).items()
        for value in VALUES.get(option, ())
        if value != entry.default
        if value is not None or type(None) in allowed(name, option)
        if value in (_limits(MIXERS[name].Options)[option].get("names") or (value,))
    ]


def needed(name: str, option: str, value: Any) -> dict[str, Any]:
    """What else must be set."""
    return WITH.get((name, option, value)) or WITH.get((name, option), {})


every_mixer = pytest.mark.parametrize("name", MIXERS)


def allowed(name: str, option: str) -> tuple[type, ...]:
    """The types of an option."""
    hint = get_type_hints(MIXERS[name].Options)[option]
    return get_args(hint) or (hint,)


def randomise(module: nn.Module) -> None:
    """The same weights for the same shapes: large, so that a change of anything shows."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 1.5 * weight.shape[-1] ** -0.5)


def shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in module.named_parameters()}


def differs(a: Tensor, b: Tensor) -> bool:
    return (a - b).norm().item() > 1e-3 * b.norm().item()


def test_every_option_has_values_here() -> None:
    """An option without an entry in VALUES would not be tested; an entry without an option is a leftover."""
    assert set(VALUES) == {option for name in MIXERS for option in options_of(name)}
    for name in MIXERS:
        assert {option for option, _ in cases(name)} == set(options_of(name))


def test_every_choice_is_tried() -> None:
    for name in MIXERS:
        for option in options_of(name):
            assert set(_limits(MIXERS[name].Options)[option].get("names", ())) <= set(VALUES[option]), option


@every_mixer
def test_every_option_of_every_mixer_changes_something(name: str) -> None:
    """Other weights, or with the same weights other outputs."""
    x = torch.randn(2, 12, D)
    for option, value in cases(name):
        if (name, option) in ONLY_IN_MODELS:
            continue
        base = {"hidden_size": D, **needed(name, option, value)}
        before, after = mixer(name, **base), mixer(name, **{**base, option: value})
        assert getattr(after.options, option) == value
        if shapes(before) == shapes(after):
            for layer in (before, after):
                randomise(layer)
            assert differs(after(x)[0], before(x)[0]), f"{option}={value!r} changes nothing"


def test_gate_clamp_of_zero_is_no_limit() -> None:
    clamped, free = (mixer("abc", hidden_size=D, gate_clamp=clamp) for clamp in (32.0, 0))
    for layer in (clamped, free):
        randomise(layer)
    x = 100 * torch.randn(2, 12, D)
    assert differs(free(x)[0], clamped(x)[0])


def test_slots_of_a_hybrid_begin_at_half_lives_that_the_temperature_does_not_change() -> None:
    for temperature in (1.0, 8.0, 50.0):
        gate = mixer("hybrid", hidden_size=D, slot_router="gates", gate_temperature=temperature).slot_router
        kept = torch.sigmoid(gate.bias.detach().double()) ** (1 / temperature)
        half_lives = torch.log(torch.tensor(0.5)) / kept[0].log()
        assert half_lives[0].item() == pytest.approx(16, rel=1e-4)
        assert half_lives[-1].item() == pytest.approx(1024, rel=1e-4)
        steps = half_lives.log().diff()
        assert torch.allclose(steps, steps.mean(), rtol=1e-3)


def test_constant_gates_begin_at_time_scales_that_the_temperature_does_not_change() -> None:
    for temperature in (1.0, 8.0, 50.0):
        layer = mixer("gsa", hidden_size=D, gate="constant", gate_temperature=temperature)
        kept = torch.sigmoid(layer.gate_logits.double()) ** (1 / temperature)
        scales = 1 / (1 - kept[0])
        assert scales[0].item() == pytest.approx(10**0.3, rel=1e-3)
        assert scales[-1].item() == pytest.approx(10**3.3, rel=1e-2)
        assert (scales.diff() > 0).all()


# Models


SMALL: dict[str, Any] = {"hidden_size": D, "num_hidden_layers": 2, "vocab_size": 20, "intermediate_size": 24}
MODEL_VALUES: dict[str, tuple[Any, ...]] = {
    "mixer": (*(name for name in MIXERS if name not in ("gsa", "mamba")), "gsa,gla", "gsa(num_slots=8)"),
    "vocab_size": (30,),
    "hidden_size": (48,),
    "num_hidden_layers": (1, 3),
    "intermediate_size": (None, 40),
    "rms_norm_eps": (0.5,),
    "tie_word_embeddings": (True,),
    "initializer_range": (0.1,),
}


def small(name: str, **values: Any) -> ModelConfig:
    sizes = {key: size for key, size in SMALL.items() if name != "mamba" or key != "intermediate_size"}
    return ModelConfig(**{**sizes, "mixer": name, **values})


def changed(before: ModelConfig, after: ModelConfig) -> bool:
    """Whether parameters, their first values, or the logits of equal weights differ."""
    models = []
    for config in (before, after):
        torch.manual_seed(0)
        models.append(LM(config))
    if shapes(models[0]) != shapes(models[1]):
        return True
    fresh = [dict(model.named_parameters()) for model in models]
    if any(differs(fresh[1][name], weight) for name, weight in fresh[0].items()):
        return True
    ids = torch.randint(20, (2, 12))
    for model in models:
        randomise(model)
    with torch.no_grad():
        return differs(models[1](ids).logits, models[0](ids).logits)


def test_options_of_a_model_are_those_of_its_mixers() -> None:
    union = {option for name in MIXERS for option in options_of(name)}
    assert set(ModelConfig.option_names()) == union - SHARED
    assert {entry.name for entry in fields(ModelConfig)} == set(MODEL_VALUES) | set(ModelConfig.option_names())


def test_every_field_of_a_model_changes_something() -> None:
    for field, values in MODEL_VALUES.items():
        for value in values:
            assert changed(small("gsa"), small("gsa", **{field: value})), f"{field}={value!r} changes nothing"


def test_nothing_changed_is_nothing_changed() -> None:
    """Otherwise the tests above would find changes anywhere."""
    for name in MIXERS:
        assert not changed(small(name), small(name))


@every_mixer
def test_every_option_changes_a_model(name: str) -> None:
    for option, value in cases(name):
        if option not in SHARED and value is not None:
            base = needed(name, option, value)
            message = f"{option}={value!r} changes nothing"
            assert changed(small(name, **base), small(name, **{**base, option: value})), message


@every_mixer
def test_initializer_range_is_the_deviation_of_every_matrix(name: str) -> None:
    """But for those that a mixer begins with in a way of its own; the last of a block is smaller."""
    torch.manual_seed(0)
    model = LM(small(name, hidden_size=256, vocab_size=256, num_hidden_layers=2, initializer_range=0.3))
    for path, weight in model.named_parameters():
        if weight.dim() == 2 and "dt_proj" not in path and path.endswith(".weight"):
            expected = 0.15 if "o_proj" in path or "down_proj" in path else 0.3
            assert weight.std().item() == pytest.approx(expected, rel=0.1), path


@every_mixer
def test_norms_of_every_model_have_its_epsilon(name: str) -> None:
    assert changed(small(name), small(name, rms_norm_eps=0.5))


@every_mixer
def test_a_pattern_sets_options_as_the_config_does(name: str) -> None:
    for option, value in cases(name):
        if option in SHARED:
            continue
        base = needed(name, option, value)
        word = str(value).lower() if value is None or isinstance(value, bool) else value
        pattern = f"{name}({option}={word})"
        expected = mixer(name, **{"hidden_size": D, **base, option: value}).options
        assert small(name, **{**base, "mixer": pattern}).layers == (expected, expected), pattern


def test_an_option_in_a_pattern_overrules_the_models() -> None:
    config = small("gsa(num_slots=8),gsa,attention(window=none),attention", num_hidden_layers=8, num_slots=16, window=4)
    assert [layer.num_slots for layer in config.layers if layer.mixer == "gsa"] == [8, 16, 8, 16]
    assert [layer.window for layer in config.layers if layer.mixer == "attention"] == [None, 4, None, 4]


def test_a_pattern_is_repeated_and_cut_off() -> None:
    names = [layer.mixer for layer in small(" gsa * 2 , gla,attention ( window = 3 )", num_hidden_layers=7).layers]
    assert names == ["gsa", "gsa", "gla", "attention", "gsa", "gsa", "gla"]


# Wrong values


def wrong_values(types: tuple[type, ...], limits: dict[str, Any]) -> list[Any]:
    """Values of other types, out of range, or of no choice."""
    wrong: list[Any] = [[], {}, (1,), b"x"]
    if str not in types:
        wrong += ["x", "1"]
    if bool not in types:
        wrong += [True, False]
    if int not in types and float not in types:
        wrong += [0, 1, 1.0]
    if int in types and float not in types:
        wrong += [1.5, 2.0, float("nan")]
    if float in types:
        wrong += [float("nan"), float("inf"), -float("inf")]
    if type(None) not in types:
        wrong.append(None)
    if "names" in limits:
        wrong += ["", "foo", limits["names"][0].upper()]
    if limits.get("least") is not None:
        wrong.append(limits["least"] - 1)
    if limits.get("above") is not None:
        wrong += [limits["above"], limits["above"] - 1]
    return wrong


def refusal(call: Callable[[], object]) -> str:
    """The sentence a call is refused with; nothing, if it is not refused."""
    try:
        call()
    except GSAError as error:
        return str(error)
    return ""


def assert_refused(call: Callable[[], object], message: str, given: str) -> None:
    """Like pytest.raises, for one of many values: it says which one was not refused, or with another sentence."""
    assert re.search(message, refusal(call)), given


@every_mixer
def test_wrong_options_are_refused_by_name(name: str) -> None:
    limits = _limits(MIXERS[name].Options)
    for option in options_of(name):
        for value in wrong_values(allowed(name, option), limits[option]):
            build = partial(mixer, name, **{"hidden_size": D, option: value})
            assert_refused(build, rf"^{name}: {option} must be .*, got ", f"{option}={value!r}")


def test_wrong_fields_are_refused_by_name() -> None:
    hints, own = get_type_hints(ModelConfig), set(ModelConfig.option_names())
    for field in (entry.name for entry in fields(ModelConfig)):
        types = get_args(hints[field]) or (hints[field],)
        message = rf"\b{field}\b.*\bmust be .*, got " if field != "mixer" else "mixer"
        for name in [name for name in MIXERS if field in options_of(name)] if field in own else ["gsa"]:
            limits = _limits(MIXERS[name].Options if field in own else ModelConfig)[field]
            for value in wrong_values(types, limits):
                assert_refused(partial(small, name, **{field: value}), message, f"{name}, {field}={value!r}")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gsa", {"conv_size": 1}, "conv_size"),
        ("gsa", {"conv_bias": True}, "conv_bias does nothing without conv_size"),
        ("gsa", {"gate": "none", "readout": "relu"}, "readout does nothing with gate none"),
        ("gsa", {"gate": "none", "gate_temperature": 2.0}, "gate_temperature does nothing with gate none"),
        ("gsa", {"gate": "constant", "gate_bias": True}, "gate_bias does nothing with gate constant"),
        ("gsa", {"gate": "head"}, "gate head needs a router"),
        ("gsa", {"routed_slots": 3}, "routed_slots does nothing with router none"),
        ("gsa", {"router_noise": 0.0}, "router_noise does nothing with router none"),
        ("gsa", {"router": "softmax", "gate": "constant"}, "a router needs gate data or head, got constant"),
        ("gsa", {"router": "softmax", "routed_slots": 65}, "routed_slots: there are 64 slots .num_slots., got 65"),
        ("gsa", {"router": "softmax", "gate": "head", "gate_temperature": 2.0}, "gate_temperature does nothing with"),
        ("gsa", {"output_norm": "none", "output_norm_eps": 0.1}, "output_norm_eps does nothing with output_norm none"),
        ("gla", {"output_norm": "sum"}, "output_norm sum needs a feature_map that is never negative"),
        ("gsa", {"num_attention_heads": 3}, "num_attention_heads must divide expand_k x hidden_size: 3 .* 32"),
        ("gsa", {"num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads: 3 .* 4"),
        ("gsa", {"num_key_value_heads": 8}, "num_key_value_heads must divide num_attention_heads: 8 .* 4"),
        ("gsa", {"expand_k": 0.3}, "expand_k: 0.3 x hidden_size 32 is not a whole number"),
        ("gsa", {"expand_v": 1.0625}, "num_attention_heads must divide expand_v x hidden_size: 4 .* 34"),
        ("gsa", {"expand_k": 1e-9}, "expand_k"),
        ("hgrn2", {"num_attention_heads": 3}, "num_attention_heads must divide hidden_size: 3 .* 32"),
        ("attention", {"num_attention_heads": 3}, "num_attention_heads must divide hidden_size: 3 .* 32"),
        ("attention", {"num_key_value_heads": 2}, "num_key_value_heads must divide num_attention_heads: 2 .* 1"),
        ("attention", {"qk_norm_eps": 0.1}, "qk_norm_eps does nothing without qk_norm"),
        ("mamba", {"expand": 1.01}, "expand: 1.01 x hidden_size 32 is not a whole number"),
        ("mamba", {"expand": 1e-9}, "expand"),
        ("retnet", {"num_attention_heads": 32}, "rope_theta: rotary positions need heads of even width, got 1"),
        ("abc", {"num_attention_heads": 16}, "rope_theta: rotary positions need heads of even width, got 1"),
        ("hybrid", {"qk_norm_eps": 0.1}, "qk_norm_eps does nothing without qk_norm"),
        ("hybrid", {"rope_theta": 0, "slot_positions": "window"}, "slot_positions does nothing with rope_theta 0"),
        ("hybrid", {"gate_temperature": 2}, "gate_temperature does nothing with slot_router softmax"),
        ("attention", {"head_dim": 7}, "rope_theta: rotary positions need heads of even width, got 7"),
    ],
)
def test_options_that_do_not_fit_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(GSAError, match=f"^{name}: {message}"):
        mixer(name, hidden_size=D, **options)


@every_mixer
def test_hidden_size_has_no_default(name: str) -> None:
    assert options_of(name)["hidden_size"].default is MISSING
    with pytest.raises(GSAError, match=f"^{name}: hidden_size is missing"):
        mixer(name)


def test_unknown_names_are_refused_with_a_suggestion() -> None:
    with pytest.raises(GSAError, match=r"unknown mixer 'gas' \(did you mean 'gsa'\?\); expected one of gsa, abc"):
        mixer("gas", hidden_size=D)
    with pytest.raises(GSAError, match=r"^gsa: unknown option 'num_slot' \(did you mean 'num_slots'\?\); expected "):
        mixer("gsa", hidden_size=D, num_slot=3)
    with pytest.raises(GSAError, match=r"^config: unknown field 'num_slot' \(did you mean 'num_slots'\?\)"):
        ModelConfig.from_dict({"num_slot": 3})
    with pytest.raises(GSAError, match=r"^gsa: unknown option 'num_slot' \(did you mean 'num_slots'\?\)"):
        small("gsa(num_slot=3)")
    with pytest.raises(GSAError, match=r"^gsa: unknown option 'zzz'; expected hidden_size"):
        mixer("gsa", hidden_size=D, zzz=3)


@every_mixer
def test_options_of_other_mixers_are_refused(name: str) -> None:
    others = [option for option in ModelConfig.option_names() if option not in options_of(name)]
    assert others
    for option in others:
        value = next(value for value in VALUES[option] if value is not None)
        with pytest.raises(GSAError, match=f"^config: {option} is not an option of mixer '{name}'"):
            small(name, **{option: value})
        with pytest.raises(GSAError, match=f"^{name}: unknown option '{option}'"):
            mixer(name, **{"hidden_size": D, option: value})


def test_an_mlp_that_no_block_has_is_refused() -> None:
    with pytest.raises(GSAError, match="intermediate_size: blocks of mixer 'mamba' have no MLP"):
        ModelConfig(mixer="mamba", intermediate_size=64)
    assert small("mamba").intermediate_size is None
    assert small("mamba", mixer="mamba,gsa", intermediate_size=64).intermediate_size == 64


BROKEN_PATTERNS = {
    "gsa*": r"cannot read 'gsa\*'",
    "gsa**2": r"cannot read 'gsa\*\*2'",
    "gsa*2*3": r"cannot read 'gsa\*2\*3'",
    "gsa*-1": r"cannot read 'gsa\*-1'",
    "gsa*1.5": r"cannot read 'gsa\*1.5'",
    "gsa(": r"cannot read 'gsa\('",
    "gsa)": r"cannot read 'gsa\)'",
    "gsa((num_slots=3))": r"cannot read 'gsa\(\(num_slots=3\)\)'",
    "gsa(num_slots=3": r"cannot read 'gsa\(num_slots=3'",
    "gsa gla": "cannot read 'gsa gla'",
    "gsa;gla": "cannot read 'gsa;gla'",
    "": "cannot read ''",
    " ": "cannot read ''",
    ",": "cannot read ''",
    "gsa,": "cannot read ''",
    "gsa,,gla": "cannot read ''",
    "gsa(window)": r"cannot read 'window' in 'gsa\(window\)'",
    "gsa(num_slots=)": r"cannot read 'num_slots=' in 'gsa\(num_slots=\)'",
    "gsa(=3)": r"cannot read '=3' in 'gsa\(=3\)'",
    "gsa*0": r"'gsa\*0' repeats 0 times",
    "foo": "unknown mixer 'foo'",
    "GSA": "unknown mixer 'GSA'",
    "gsa,foo": "unknown mixer 'foo'",
    "gsa(window=3)": "^gsa: unknown option 'window'",
    "gsa(hidden_size=3)": "hidden_size is the same for all layers",
    "gsa(rms_norm_eps=0.1)": "rms_norm_eps is the same for all layers",
    "gsa(vocab_size=3)": "unknown option 'vocab_size'",
    "gsa(num_slots=x)": "^gsa: num_slots must be a whole number",
    "gsa(num_slots=1.5)": "^gsa: num_slots must be a whole number",
    "gsa(num_slots=0)": "^gsa: num_slots must be at least 1",
    "gsa(num_slots=none)": "num_slots",
    "gsa(gate=foo)": "^gsa: gate must be one of",
    "gsa(scale=NaN)": "^gsa: scale must be finite",
    "gsa(num_slots=8,num_slots=4)": "num_slots",
    "gsa*3": "names 3 layers, there are 2",
    "gsa*1000000000000000000": "cannot read",
    "gsa*" + "9" * 5000: "cannot read",
}


def test_broken_patterns_are_refused_naming_the_item() -> None:
    for pattern, message in BROKEN_PATTERNS.items():
        assert_refused(partial(small, pattern), message, pattern[:40])


# JSON


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """A model with one or several mixers, in a pattern, and some of their options."""
    names = draw(st.lists(st.sampled_from(list(MIXERS)), min_size=1, max_size=3))
    known = [option for option in ModelConfig.option_names() if any(option in options_of(name) for name in names)]
    # Options that must fit others, or each other, have their tests above.
    fitting = {"num_key_value_heads", "conv_bias", "gate", "output_norm", "qk_norm_eps", "head_dim"}
    fitting |= {"slot_positions", "gate_temperature"}
    options = {}
    for option in draw(st.lists(st.sampled_from(known), unique=True, max_size=6)):
        if option not in fitting:
            options[option] = draw(st.sampled_from([value for value in VALUES[option] if value is not None]))
    sizes = {
        "hidden_size": 32 * draw(st.integers(1, 5)),
        "vocab_size": draw(st.integers(1, 10**6)),
        "num_hidden_layers": draw(st.integers(3, 10)),
        "rms_norm_eps": draw(st.floats(1e-12, 1.0)),
        "initializer_range": draw(st.floats(1e-12, 1.0)),
        "tie_word_embeddings": draw(st.booleans()),
    }
    if any(MIXERS[name].with_mlp for name in names):
        sizes["intermediate_size"] = draw(st.none() | st.integers(1, 10**6))
    return ModelConfig(mixer=draw(st.sampled_from([",", " , "])).join(names), **sizes, **options)


@examples(100)
@given(configs())
def test_json_and_back(config: ModelConfig) -> None:
    again = ModelConfig.from_json(config.to_json())
    assert again == config
    assert again.layers == config.layers
    assert ModelConfig.from_dict(config.to_dict()) == config
    assert None not in {value for name, value in config.to_dict().items() if name != "intermediate_size"}


def test_json_of_a_file(tmp_path: Path) -> None:
    config = small("gsa*1,attention(window=5)", num_slots=8)
    (tmp_path / "config.json").write_text(config.to_json())
    assert ModelConfig.load(tmp_path / "config.json") == config
    assert ModelConfig.load(str(tmp_path / "config.json")) == config
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    for missing, problem in (("none.json", "no such file"), ("bytes", "not JSON"), ("", "cannot be read")):
        with pytest.raises(GSAError, match=f"config: .*{missing}: .*{problem}"):
            ModelConfig.load(tmp_path / missing)


WRONG_JSON = (
    ("", "config: not JSON"),
    ("gsa", "config: not JSON"),
    ('{"num_slots": 8', "config: not JSON"),
    ("[]", "config: expected a JSON object, got list"),
    ("3", "config: expected a JSON object, got int"),
    ("null", "config: expected a JSON object, got NoneType"),
    ('"gsa"', "config: expected a JSON object, got str"),
    ('{"num_slot": 8}', "config: unknown field 'num_slot' .did you mean 'num_slots'"),
    ('{"": 8}', "config: unknown field ''"),
    ('{"num_slots": "8"}', "config: num_slots must be a whole number"),
    ('{"num_slots": 8.0}', "config: num_slots must be a whole number"),
    ('{"num_slots": [8]}', "config: num_slots must be a whole number"),
    ('{"num_slots": true}', "config: num_slots must be a whole number"),
    ('{"vocab_size": null}', "config: vocab_size must be a whole number, got None"),
    ('{"rms_norm_eps": NaN}', "config: rms_norm_eps must be finite"),
    ('{"rms_norm_eps": 1e999}', "config: rms_norm_eps must be finite"),
    ('{"mixer": ["gsa"]}', "config: mixer must be a name"),
    ('{"tie_word_embeddings": 1}', "config: tie_word_embeddings must be true or false"),
)


def test_wrong_json_is_refused_naming_the_field() -> None:
    for text, message in WRONG_JSON:
        assert_refused(partial(ModelConfig.from_json, text), message, text)


def test_options_that_json_leaves_out_are_the_mixers_defaults() -> None:
    text = json.dumps({"mixer": "gsa", "hidden_size": D})
    assert ModelConfig.from_json(text).layers[0] == mixer("gsa", hidden_size=D).options
