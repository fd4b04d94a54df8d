"""Configs and patterns of any kind end at once, in a valid config or in a sentence; models are counted before built."""

from __future__ import annotations

import json
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensorMode

import gsa
from gsa import ModelConfig
from gsa.errors import GSAError, OutOfMemory
from gsa.mixers import MIXERS
from gsa.mixers.registry import MAX_LAYERS, pattern
from gsa.models import LM
from gsa.models.checkpoint import save_model
from gsa.models.fla import convert_config, import_checkpoint
from gsa.models.hf.config import GSAConfig
from gsa.models.init import without_memory
from gsa.models.sizes import check_memory, parameter_count, tensor_shapes
from gsa.train.estimate import estimate
from tests.examples import examples
from tests.hostile import ended, texts, values
from tests.models.cases import CASES, config, model

NAMES = [entry.name for entry in fields(ModelConfig)]
mixers = st.sampled_from(list(MIXERS)) | st.lists(st.sampled_from(list(MIXERS)), min_size=1, max_size=3).map(",".join)


@examples(400)
@given(mixers, st.dictionaries(st.sampled_from(NAMES), values, max_size=3))
def test_a_config_of_any_values(mixer: str, given_values: dict[str, Any]) -> None:
    found = ended(ModelConfig.from_dict, {"mixer": mixer, **given_values})
    if found is not None:
        assert ModelConfig.from_json(found.to_json()) == found
        assert 0 < ended(parameter_count, found) < 2**80


@examples(200)
@given(st.sampled_from(NAMES), values)
def test_a_config_of_transformers_with_any_value(name: str, value: Any) -> None:
    from huggingface_hub.errors import StrictDataclassError

    try:
        ended(lambda: GSAConfig(**{name: value}))
    except StrictDataclassError:  # how transformers says that a type is wrong
        assert isinstance(value, (str, float, list, dict, bytes, tuple, bool, int)) or value is None


HOSTILE_JSON = [
    '{"hidden_size": ' + "9" * 5000 + "}",
    '{"expand_k": 1e999}',
    '{"expand_k": NaN}',
    '{"hidden_size": ' + "[" * 100_000,
    '{"a": ' * 100_000,
    '{"mixer": "' + "x" * 10**6 + '"}',
    '{"' + "x" * 10**6 + '": 1}',
    '{"mixer": "\\ud800"}',
    "[" * 900 + "]" * 900,
    "",
]


@examples(200)
@given(
    st.sampled_from(HOSTILE_JSON) | texts | st.recursive(st.none() | st.floats() | st.text(), st.lists).map(json.dumps)
)
def test_a_config_of_any_text(text: str) -> None:
    ended(ModelConfig.from_json, text)


signs = st.sampled_from(
    [*MIXERS, "gsa", ",", "(", ")", "*", "=", " ", "\t" * 3000, "999999", "window", "9" * 5000, "[" * 3000]
)


@examples(300)
@given(st.lists(signs, max_size=12).map("".join), st.integers(1, 30))
def test_patterns_end_at_once(text: str, times: int) -> None:
    found = ended(pattern, text * times)
    assert found is None or len(found) <= MAX_LAYERS


def test_what_once_took_minutes_is_refused_by_name() -> None:
    for make, message in (
        (lambda: ModelConfig(num_hidden_layers=10**5), "num_hidden_layers must be at most 4096, got 100000"),
        (lambda: ModelConfig(mixer="gsa*999999,gsa*999999"), "names more layers than a model may have, 4096"),
        (lambda: ModelConfig(mixer="gsa" + " " * 10**6 + "x"), "cannot read 'gsa   "),
        (lambda: ModelConfig(mixer="gsa," * 10**5), "names more layers"),
        (lambda: ModelConfig(hidden_size=10**9), "hidden_size must be at most 1048576"),
        (lambda: ModelConfig(mixer="mamba", expand=1e29), "mamba: expand must be at most 256"),
        (lambda: ModelConfig(expand_k=10**5000), "expand_k must be at most 1e+30, got a number of about 5001 digits"),
        (lambda: ModelConfig.load("a\0b"), r"'a\x00b' cannot be the name of a file"),
        (lambda: ModelConfig.load("a\ud800"), r"'a\ud800' cannot be the name of a file"),
    ):
        with pytest.raises(GSAError) as raised:
            make()
        assert message in str(raised.value)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tied", [False, True])
def test_sizes_are_those_of_the_model(case: str, tied: bool) -> None:
    sizes = config(case, tie_word_embeddings=tied, num_hidden_layers=5)
    with without_memory():
        built = LM(sizes)
    assert tensor_shapes(sizes) == {name: tuple(x.shape) for name, x in built.state_dict().items()}
    assert parameter_count(sizes) == built.num_parameters


ABSURD = {"hidden_size": 2**20, "num_hidden_layers": 4096, "num_attention_heads": 4}


def test_a_model_is_counted_before_it_is_built() -> None:
    sizes = ModelConfig(**ABSURD)
    count = f"{parameter_count(sizes):,} parameters"
    for build in (LM, lambda config: gsa.GSAForCausalLM(gsa.GSAConfig.from_model_config(config))):
        with pytest.raises(OutOfMemory) as raised:
            build(sizes)
        assert count in str(raised.value)


def test_what_takes_no_memory_is_never_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        check_memory(ModelConfig(**ABSURD), "LM")
    with torch.device("meta"):
        check_memory(ModelConfig(**ABSURD), "LM")
    monkeypatch.setattr("gsa.memory._text", lambda path: "")  # files of the system that may not be read
    monkeypatch.setattr(os, "sysconf", lambda name: -1)
    check_memory(ModelConfig(**ABSURD), "LM")  # nothing is known


def test_a_model_without_head_is_counted_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gsa.models.sizes.memory_of", lambda device: 1)
    with pytest.raises(OutOfMemory) as raised:
        gsa.GSAModel(gsa.GSAConfig.from_model_config(config("gsa")))
    with pytest.raises(OutOfMemory) as with_head:
        LM(config("gsa"))
    counts = [
        int(re.search(r"([\d,]+) parameters", str(found.value))[1].replace(",", "")) for found in (raised, with_head)
    ]
    assert counts[1] - counts[0] == config("gsa").vocab_size * config("gsa").hidden_size


def test_a_model_is_refused_at_the_last_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = config("gsa")
    bytes_ = 4 * parameter_count(sizes)
    monkeypatch.setattr("gsa.models.sizes.swap", lambda: 0)
    monkeypatch.setattr("gsa.models.sizes.memory_of", lambda device: bytes_)
    LM(sizes)
    monkeypatch.setattr("gsa.models.sizes.memory_of", lambda device: bytes_ - 1)
    with pytest.raises(OutOfMemory, match="LM: the model has"):
        LM(sizes)
    with without_memory():
        check_memory(sizes, "LM")
    monkeypatch.setattr("gsa.models.sizes.swap", lambda: 1)
    LM(sizes)


def test_a_dry_run_measures_no_block_that_cannot_be() -> None:
    run = {"length": 8, "rows": 1, "accumulation": 1, "world_size": 1, "steps": 1, "engine": "single", "device": "cpu"}
    with pytest.raises(OutOfMemory, match=r"a block of the model, with gradients, has [\d,]+ parameters"):
        estimate(ModelConfig(**ABSURD), **run, precision="fp32", ema=False, gradient_checkpointing=False)


def claiming(folder: Path, **fields_: Any) -> Path:
    """A small model whose config claims another size."""
    save_model(model("gsa"), folder)
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stored | fields_))
    return folder


def test_a_checkpoint_is_compared_before_a_model_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claiming(tmp_path, num_hidden_layers=4096)
    monkeypatch.setattr("gsa.models.checkpoint.LM", lambda config: pytest.fail("a model was built"))
    with pytest.raises(GSAError, match=r"tensor model.layers.3\S+ is missing"):
        LM.from_pretrained(tmp_path)


def test_transformers_takes_no_memory_for_what_is_missing(tmp_path: Path) -> None:
    claiming(tmp_path, hidden_size=2**20, num_hidden_layers=2)
    with pytest.raises(GSAError, match=r"the config asks for and the checkpoint lacks has [\d,]+ parameters"):
        gsa.GSAForCausalLM.from_pretrained(tmp_path)


FLA = {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4, "vocab_size": 50}
KINDS = ("gsa", "gla", "retnet", "hgrn2", "abc", "transformer")
FLA_NAMES = (*FLA, "hidden_ratio", "num_slots", "expand_k", "expand_v", "conv_size", "norm_eps", "attn", "expand_ratio")


@examples(300)
@example("hgrn2", {"num_heads": 65})  # more heads than its width
@given(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(FLA_NAMES), values, max_size=3))
def test_an_import_of_any_values(kind: str, given_values: dict[str, Any]) -> None:
    ended(convert_config, {"model_type": kind, **FLA, **given_values})


def test_an_import_of_absurd_sizes(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    for change, message in (
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000: expected at most 4096"),
        ({"num_hidden_layers": 10**9, "attn": {"layers": [1], "num_heads": 1}}, "expected at most 4096"),
        ({"hidden_size": 2**40}, "hidden_size must be at most"),
        ({"hidden_ratio": 10**4000}, "hidden_ratio is a number of about 4001 digits"),
        ({"hidden_size": 2**20}, "tensor model.embeddings.weight is missing"),
    ):
        text = json.dumps({"model_type": "gsa", **FLA, **change})
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(GSAError) as raised:
            import_checkpoint(tmp_path, tmp_path / "out")
        assert message in str(raised.value)


PICKLED = r"its weights are pickled \(pytorch_model.bin\), which is never read, .*; convert them to safetensors"


def test_pickled_weights_get_one_sentence_everywhere(tmp_path: Path) -> None:
    save_model(model("gsa"), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    for load in (gsa.load, LM.from_pretrained, gsa.Engine, gsa.GSAForCausalLM.from_pretrained):
        with pytest.raises(GSAError, match=PICKLED):
            load(tmp_path)
    with pytest.raises(GSAError, match=PICKLED):
        gsa.GSAForCausalLM.from_pretrained(tmp_path, use_safetensors=None)
    with pytest.raises(GSAError, match="weights are read from safetensors only"):
        gsa.GSAForCausalLM.from_pretrained(tmp_path, use_safetensors=False)
