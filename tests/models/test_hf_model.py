"""The models in transformers' clothes: known to the Auto classes, saved, loaded, trained, compiled, in a pipeline."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    pipeline,
)

import gsa
from gsa import LM, GSACache, GSAConfig, GSAForCausalLM, GSAModel, ModelConfig
from gsa.errors import GSAError
from tests.models.hf_models import (
    MIXERS,
    PAD,
    VOCABULARY,
    assert_same,
    every_mixer,
    left_padded,
    tiny_config,
    tiny_model,
    tokens,
    uncached_logits,
)

# --- registration


def run_python(code: str) -> str:
    """What a fresh interpreter prints, in which warnings are errors too."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


REGISTERED = """
config = AutoConfig.for_model("gated_slot_attention", hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
print(type(config).__name__, type(AutoModel.from_config(config)).__name__, end=" ")
print(type(AutoModelForCausalLM.from_config(config)).__name__)
"""


@pytest.mark.parametrize(
    "imports",
    [
        "import gsa\nfrom transformers import AutoConfig, AutoModel, AutoModelForCausalLM",
        pytest.param(
            "from transformers import AutoConfig, AutoModel, AutoModelForCausalLM\nimport gsa", marks=pytest.mark.slow
        ),
    ],
    ids=["gsa first", "transformers first"],
)
def test_the_auto_classes_know_the_models_whatever_is_imported_first(imports: str) -> None:
    assert run_python(imports + REGISTERED).split() == ["GSAConfig", "GSAModel", "GSAForCausalLM"]


@pytest.mark.slow
def test_looking_for_a_module_of_transformers_does_not_undo_the_registration() -> None:
    code = """
import gsa
from importlib.util import find_spec
assert find_spec("transformers.models.auto.configuration_auto") is not None
from transformers import AutoConfig
print(type(AutoConfig.for_model("gated_slot_attention")).__name__)
"""
    assert run_python(code).split() == ["GSAConfig"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "again", ["importlib.reload(gsa)", "[sys.modules.pop(n) for n in ('gsa.auto_classes', 'gsa')]"]
)
def test_gsa_may_be_imported_again(again: str) -> None:
    code = f"""
import importlib, sys
import gsa
{again}
import gsa
from transformers import AutoConfig
print(type(AutoConfig.for_model("gated_slot_attention")).__name__)
print(sum(type(finder).__name__ == "_Watcher" for finder in sys.meta_path) <= 1)
"""
    assert run_python(code).split() == ["GSAConfig", "True"]


@pytest.mark.parametrize("first", ["gsa", "transformers"])
def test_a_transformers_that_is_too_old_gives_a_warning(first: str, tmp_path: Path) -> None:
    """Whatever is imported first; what does not need it works."""
    for folder in ("transformers", "transformers/models", "transformers/models/auto"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("__version__ = '4.1'\n")
    (tmp_path / "transformers/models/auto/configuration_auto.py").write_text("class AutoConfig: pass\n")
    code = f"""
import sys, warnings
sys.path.insert(0, {str(tmp_path)!r})
old = "transformers.models.auto.configuration_auto"
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    for name in ("gsa", old) if {first!r} == "gsa" else (old, "gsa"):
        __import__(name)
print(*[str(warning.message) for warning in found], sep="\\n")
sys.modules["gsa"].Sampling()
"""
    said = run_python(code).splitlines()
    assert len(said) == 1
    assert said[0].startswith("gsa: transformers 4.1 does not know gsa's models, since it lacks what they need: cannot")


@pytest.mark.slow
def test_an_import_of_transformers_that_failed_may_be_tried_again() -> None:
    code = """
import gsa, sys
name, tries = "transformers.models.auto.configuration_auto", []
class Fails:
    def find_spec(self, wanted, path, target=None):
        if wanted == name and not tries:
            tries.append(wanted)
            import importlib.machinery
            return importlib.machinery.ModuleSpec(wanted, self)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        raise ImportError("not yet")
sys.meta_path.insert(1, Fails())
import transformers
try:
    __import__(name)
except ImportError as error:
    print(str(error)[:7])
from transformers.models.auto.configuration_auto import AutoConfig
print(type(AutoConfig.for_model("gated_slot_attention")).__name__)
"""
    assert run_python(code).split() == ["not", "yet", "GSAConfig"]


def test_importing_gsa_imports_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "triton", "datasets", "matplotlib", "numpy", "safetensors")
    assert run_python(f"import sys, gsa; print([name for name in {heavy} if name in sys.modules])").strip() == "[]"


@every_mixer
def test_one_model_type_serves_every_mixer(name: str) -> None:
    config = tiny_config(name)
    assert config.model_type == "gated_slot_attention"
    assert type(AutoModel.from_config(config)) is GSAModel
    assert type(AutoModelForCausalLM.from_config(config)) is GSAForCausalLM


# --- the config


def test_every_preset_is_a_config_of_transformers_and_back() -> None:
    for name in gsa.presets():
        config = gsa.preset(name)
        theirs = GSAConfig.from_model_config(config, eos_token_id=2)
        assert theirs.to_model_config() == config
        assert (theirs.eos_token_id, theirs.vocab_size) == (2, config.vocab_size)


def test_defaults_are_those_of_the_models_own_config() -> None:
    assert GSAConfig().to_model_config() == ModelConfig()


@every_mixer
def test_a_config_survives_copies_pickles_and_files(name: str, tmp_path: Path) -> None:
    config = tiny_config(name, eos_token_id=[3, 4], bos_token_id=1)
    config.save_pretrained(tmp_path)
    others = [
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        AutoConfig.from_pretrained(tmp_path),
        GSAConfig.from_dict(config.to_dict()),
    ]
    for other in others:
        assert type(other) is GSAConfig
        assert other.to_model_config() == config.to_model_config()
        assert (other.eos_token_id, other.bos_token_id, other.pad_token_id) == ([3, 4], 1, PAD)
        where = {"_name_or_path": ""}  # from which file it came
        assert {**other.to_dict(), **where} == {**config.to_dict(), **where}


def test_a_misspelt_field_is_refused_with_the_right_spelling() -> None:
    with pytest.raises(ValueError, match=r"config: unknown field 'num_slotz' \(did you mean 'num_slots'\?\)"):
        GSAConfig(num_slotz=8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": "wide"}, "hidden_size must be a whole number, got 'wide'"),
        ({"num_slots": 8.5}, "num_slots must be a whole number or none, got 8.5"),
        ({"mixer": "gsaa"}, "unknown mixer 'gsaa'"),
        ({"window": 4}, "window is not an option of mixer 'gsa'"),
        ({"num_attention_heads": 5}, "num_key_value_heads must divide num_attention_heads"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_by_its_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config("gsa", **fields)


# --- files


def saved(path: Path, name: str = "gsa", **options: Any) -> GSAForCausalLM:
    """A tiny model that was saved there."""
    model = tiny_model(name, **options)
    model.save_pretrained(path)
    return model


@every_mixer
@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_comes_back_bit_for_bit(name: str, tied: bool, tmp_path: Path) -> None:
    model = saved(tmp_path, name, tie_word_embeddings=tied)
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "modeling_gsa.py",
    }
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert names == set(model.state_dict()) - ({"lm_head.weight"} if tied else set())
    ids, mask = left_padded([9, 5])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is GSAForCausalLM
    assert not loaded.training
    assert (loaded.lm_head.weight is loaded.model.embeddings.weight) == tied
    assert torch.equal(uncached_logits(loaded, ids, mask), uncached_logits(model, ids, mask))
    for key, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], weight)


def test_the_features_alone_are_loaded_from_the_checkpoint_of_a_language_model(tmp_path: Path) -> None:
    model, ids = saved(tmp_path), tokens(2, 9)
    features = AutoModel.from_pretrained(tmp_path)
    assert type(features) is GSAModel
    assert torch.equal(features(ids).last_hidden_state, model.model(ids).last_hidden_state)


@pytest.mark.parametrize("tied", [False, True])
def test_large_models_are_saved_in_shards(tied: bool, tmp_path: Path) -> None:
    model, ids = tiny_model("hybrid", tie_word_embeddings=tied), tokens(2, 9)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert not list(tmp_path.glob("*.bin"))
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)


@every_mixer
@pytest.mark.parametrize("tied", [False, True])
def test_the_weights_are_those_of_the_plain_model(name: str, tied: bool) -> None:
    model = tiny_model(name, tie_word_embeddings=tied)
    plain = LM(model.config.to_model_config()).eval()
    assert list(plain.state_dict()) == list(model.state_dict())
    plain.load_state_dict(model.state_dict())
    ids, mask = left_padded([9, 5])
    assert torch.equal(plain(ids, mask=mask).logits, uncached_logits(model, ids, mask))


@every_mixer
def test_fresh_weights_are_drawn_as_those_of_the_plain_model(name: str) -> None:
    """transformers skips modules of ours that have no parameters of their own; what they draw for others must count."""
    config = tiny_config(name, hidden_size=64, initializer_range=0.02)
    theirs, ours = GSAForCausalLM(config).state_dict(), LM(config.to_model_config()).state_dict()
    for key, weight in ours.items():
        for moment in (Tensor.mean, lambda x: x.std(correction=0)):
            spread = float(weight.std(correction=0))
            assert abs(float(moment(theirs[key])) - float(moment(weight))) <= 0.3 * spread + 1e-6, key


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}], ids=str)
def test_a_model_is_loaded_where_a_device_map_says(device_map: Any, tmp_path: Path) -> None:
    model, ids = saved(tmp_path, "hybrid"), tokens(2, 9)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
    assert {p.device.type for p in loaded.parameters()} == {"cpu"}
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def edited(path: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    """Changes the tensors of a checkpoint."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


TENSOR = "model.layers.1.mixer.k_proj.weight"


@pytest.mark.parametrize(
    ("edit", "name"),
    [
        (lambda tensors: tensors.pop(TENSOR), TENSOR),
        (lambda tensors: tensors.pop("lm_head.weight"), "lm_head.weight"),
        (lambda tensors: tensors.update(surprise=torch.zeros(3)), "surprise"),
        (lambda tensors: tensors.update({TENSOR: torch.zeros(3, 5)}), TENSOR),
    ],
    ids=["missing", "head missing", "extra", "shape"],
)
def test_a_checkpoint_that_does_not_fit_is_an_error_that_names_the_tensor(
    edit: Callable[[dict[str, Tensor]], Any], name: str, tmp_path: Path
) -> None:
    saved(tmp_path)
    edited(tmp_path, edit)
    with pytest.raises((ValueError, RuntimeError), match=name.replace(".", r"\.")):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("kept", [0.5, 0.0])
def test_a_truncated_file_is_an_error_that_names_it(kept: float, tmp_path: Path) -> None:
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(GSAError, match=r"model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_truncated_shard_is_an_error_that_names_it(tmp_path: Path) -> None:
    tiny_model("gsa").save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(GSAError, match=shard.name):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_slotz": 8}, r"unknown field 'num_slotz' \(did you mean 'num_slots'\?\)"),
        ({"hidden_size": "32"}, "hidden_size must be a whole number, got '32'"),
        ({"num_slots": [8]}, "num_slots must be a whole number or none"),
        ({"model_type": "gated_slots", "auto_map": {}}, "gated_slots"),
    ],
    ids=str,
)
def test_a_wrong_config_file_is_an_error_that_names_the_field(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    saved(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_config_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "config.json").write_text("{ not json")
    with pytest.raises(OSError, match=r"config\.json.* is not a valid JSON file"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_what_was_loaded_is_told_when_asked(tmp_path: Path) -> None:
    saved(tmp_path)
    model, info = GSAForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(model) is GSAForCausalLM
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


# --- calls


@every_mixer
def test_the_loss_is_the_cross_entropy_of_the_next_token(name: str) -> None:
    model, ids = tiny_model(name), tokens(3, 9)
    labels = torch.where(torch.rand(3, 9) < 0.3, -100, ids)
    output = model(ids, labels=labels)
    logits = uncached_logits(model, ids)
    assert_same(output.loss, F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100))
    assert_same(output.logits, logits)


@every_mixer
@pytest.mark.parametrize("side", ["left", "right"])
def test_pads_count_neither_as_labels_nor_as_what_predicts_them(name: str, side: str) -> None:
    model, lengths = tiny_model(name), [9, 5, 7]
    ids, mask = left_padded(lengths)
    if side == "right":
        ids, mask = ids.flip(1), mask.flip(1)
    total = 0.0
    for row, real in zip(ids, mask.bool(), strict=True):
        alone = row[real][None]
        total += F.cross_entropy(uncached_logits(model, alone)[0, :-1], alone[0, 1:], reduction="sum")
    # Labels at pads may be anything.
    for labels in (ids, torch.where(mask.bool(), ids, -100), torch.where(mask.bool(), ids, 3)):
        assert_same(model(ids, attention_mask=mask, labels=labels).loss, total / (sum(lengths) - 3))


def test_while_training_labels_give_the_loss_alone() -> None:
    model, ids = tiny_model("gsa"), tokens(2, 9)
    evaluated = model(ids, labels=ids)
    trained = model.train()(ids, labels=ids)
    assert (list(trained), trained.past_key_values) == (["loss"], None)
    assert_same(trained.loss, evaluated.loss)
    assert evaluated.logits.shape == (2, 9, VOCABULARY)
    assert model(ids).logits.shape == (2, 9, VOCABULARY)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("count", [3, torch.tensor(7), torch.tensor([7])], ids=["int", "tensor", "tensor of one"])
def test_the_loss_is_a_sum_over_the_number_of_items_of_the_batch(count: Any, training: bool) -> None:
    model, ids = tiny_model("gsa").train(training), tokens(2, 9)
    logits = uncached_logits(model, ids)[:, :-1].flatten(0, 1)
    total = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum")
    loss = model(ids, labels=ids, num_items_in_batch=count).loss
    assert_same(loss.reshape(()), total / int(count))


def test_labels_of_another_shape_are_refused() -> None:
    model, ids = tiny_model("gsa"), tokens(2, 9)
    with pytest.raises(ValueError, match=r"labels must be int64 in the shape of ids \[2, 9\], got .* \[2, 8\]"):
        model(ids, labels=ids[:, 1:])


def test_packed_sequences_have_the_loss_and_logits_of_each_alone() -> None:
    model, ids = tiny_model("hybrid"), tokens(1, 12)
    borders = torch.tensor([0, 5, 12])
    alone = [uncached_logits(model, ids[:, :5]), uncached_logits(model, ids[:, 5:])]
    output = model(ids, cu_seqlens=borders, labels=ids)
    assert_same(output.logits, torch.cat(alone, 1))
    total = sum(
        F.cross_entropy(logits[0, :-1], part[0, 1:], reduction="sum")
        for logits, part in zip(alone, (ids[:, :5], ids[:, 5:]), strict=True)
    )
    assert_same(output.loss, total / 10)


@every_mixer
def test_hidden_states_are_what_enters_each_layer_and_at_last_what_enters_the_head(name: str) -> None:
    model = tiny_model(name)
    ids, mask = left_padded([9, 5])
    for padding in (None, mask):
        output = model(ids, attention_mask=padding, output_hidden_states=True)
        hidden = output.hidden_states
        assert len(hidden) == model.config.num_hidden_layers + 1
        assert {tuple(x.shape) for x in hidden} == {(2, 9, 32)}
        real = torch.ones(2, 9, dtype=torch.bool) if padding is None else padding.bool()
        assert torch.equal(hidden[0][real], model.get_input_embeddings()(ids)[real])
        assert torch.equal(hidden[-1], model.model(ids, attention_mask=padding).last_hidden_state)
        assert_same(model.lm_head(hidden[-1]), output.logits)
    assert model(ids).hidden_states is None


def test_the_config_may_ask_for_hidden_states_and_for_tuples() -> None:
    ids = tokens(1, 4)
    assert len(tiny_model("gsa", output_hidden_states=True)(ids).hidden_states) == 3
    assert isinstance(tiny_model("gsa", return_dict=False)(ids), tuple)


def test_outputs_may_be_tuples() -> None:
    model, ids = tiny_model("gsa"), tokens(2, 6)
    output = model(ids, labels=ids)
    loss, logits, cache = model(ids, labels=ids, return_dict=False)
    assert torch.equal(loss, output.loss)
    assert torch.equal(logits, output.logits)
    assert isinstance(cache, GSACache)
    features, cache = model.model(ids, return_dict=False)
    assert features.shape == (2, 6, 32)
    assert isinstance(cache, GSACache)
    assert len(model(ids, use_cache=False, output_hidden_states=True, return_dict=False)) == 2


def test_exactly_one_of_tokens_and_embeddings_must_be_given() -> None:
    model, ids = tiny_model("gsa"), tokens(1, 4)
    for given in ({}, {"input_ids": ids, "inputs_embeds": torch.zeros(1, 4, 32)}):
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
            model(**given)


@pytest.mark.parametrize("shape", [(2, 1, 6, 6), (2, 5), (3, 6)], ids=str)
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="mask must be"):
        tiny_model("gsa")(tokens(2, 6), attention_mask=torch.ones(shape))


@every_mixer
def test_no_tokens_have_no_logits_and_change_no_state(name: str) -> None:
    model, ids = tiny_model(name), tokens(2, 6)
    assert model(ids[:, :0]).logits.shape == (2, 0, VOCABULARY)
    cache = model(ids[:, :4]).past_key_values
    assert model(ids[:, :0], past_key_values=cache).logits.shape == (2, 0, VOCABULARY)
    assert_same(model(ids[:, 4:], past_key_values=cache).logits, uncached_logits(model, ids)[:, 4:])


@every_mixer
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_gradient_checkpointing_gives_the_same_gradients(name: str, reentrant: bool | None) -> None:
    ids, mask = left_padded([9, 5])
    gradients = []
    for checkpointed in (False, True):
        model = tiny_model(name).train()
        if checkpointed:
            options = None if reentrant is None else {"use_reentrant": reentrant}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
            assert model.is_gradient_checkpointing
            assert all(block.gradient_checkpointing for block in model.model.layers)
        model(ids, attention_mask=mask, labels=ids).loss.backward()
        gradients.append({key: parameter.grad for key, parameter in model.named_parameters()})
    for key, gradient in gradients[0].items():
        assert gradient is not None, key
        torch.testing.assert_close(gradients[1][key], gradient, atol=1e-6, rtol=1e-5)


# --- other numbers


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Equal up to the rounding of bfloat16, seen over all numbers: a norm of something small enlarges it in places."""
    assert float((actual.float() - expected).norm() / expected.norm()) < 0.1


@every_mixer
def test_bfloat16_weights_give_bfloat16_logits_near_those_of_float32(name: str, tmp_path: Path) -> None:
    model = saved(tmp_path, name)
    ids, mask = left_padded([9, 5])
    expected = uncached_logits(model, ids, mask)
    real = mask.bool()
    for half in (AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16), model.to(torch.bfloat16)):
        assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
        logits = uncached_logits(half, ids, mask)
        assert logits.dtype == torch.bfloat16
        assert_near(logits[real], expected[real])
        # In pieces, with the cache.
        with torch.no_grad():
            cache = half(ids[:, :6], attention_mask=mask[:, :6]).past_key_values
            rest = half(ids[:, 6:], attention_mask=mask, past_key_values=cache).logits
        assert_near(rest[real[:, 6:]], expected[:, 6:][real[:, 6:]])
        output = half.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=3)
        assert output.shape == (2, 12)


def test_the_dtype_of_a_checkpoint_is_kept_or_chosen(tmp_path: Path) -> None:
    tiny_model("gsa").to(torch.bfloat16).save_pretrained(tmp_path)
    load = AutoModelForCausalLM.from_pretrained
    assert load(tmp_path).dtype == load(tmp_path, dtype="auto").dtype == torch.bfloat16
    assert load(tmp_path, dtype=torch.float32).dtype == torch.float32


@pytest.fixture
def _every_warning() -> Iterator[None]:
    """torch warns of some things once only, and then only the first test of all would see it."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@every_mixer
@pytest.mark.usefixtures("_every_warning")
def test_autocast_trains_in_bfloat16_with_gradients_in_float32(name: str) -> None:
    model = tiny_model(name, initializer_range=0.1).train()
    ids, mask = left_padded([9, 5])
    expected = model(ids, attention_mask=mask, labels=ids).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, attention_mask=mask, labels=ids).loss
        assert model(ids).logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, atol=0.02, rtol=0.02)
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad.dtype == torch.float32
        assert bool(parameter.grad.isfinite().all())


def test_hidden_states_under_autocast_have_the_dtypes_of_others() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
    other = LlamaModel(LlamaConfig(**sizes, intermediate_size=64))
    ours = GSAModel(GSAConfig(**sizes, num_slots=8))
    ids = torch.randint(50, (2, 9))
    for dtype in (torch.float32, torch.bfloat16):
        found, expected = [], []
        for model, dtypes in ((ours.to(dtype), found), (other.to(dtype), expected)):
            with torch.autocast("cpu", torch.bfloat16):
                output = model(ids, output_hidden_states=True)
            dtypes += [x.dtype for x in (output.last_hidden_state, *output.hidden_states)]
        assert found == expected == [dtype] * 4


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [70, 40])
def test_the_vocabulary_may_grow_and_shrink(size: int, tied: bool, tmp_path: Path) -> None:
    model = tiny_model("gsa", tie_word_embeddings=tied)
    ids = torch.randint(1, 40, (2, 9))
    before = uncached_logits(model, ids)
    model.resize_token_embeddings(size)
    assert model.config.vocab_size == model.config.to_model_config().vocab_size == size
    assert (model.lm_head.weight is model.model.embeddings.weight) == tied
    after = uncached_logits(model, ids)
    assert after.shape == (2, 9, size)
    assert_same(after[..., :40], before[..., :40])
    last = torch.full((1, 3), size - 1)
    assert model(last, labels=last).logits.shape == (1, 3, size)
    with pytest.raises(ValueError, match=f"vocab_size {size}"):
        model(last + 1)
    model.save_pretrained(tmp_path)
    assert torch.equal(uncached_logits(AutoModelForCausalLM.from_pretrained(tmp_path), ids), after)


# --- what is built on the models


def mean_loss(model: GSAForCausalLM, rows: list[dict[str, Any]]) -> float:
    """Over all labels of all rows."""
    total, count = 0.0, 0
    for row in rows:
        ids, labels = (torch.tensor(row[name]) for name in ("input_ids", "labels"))
        logits = uncached_logits(model, ids[None])[0, :-1]
        total += float(F.cross_entropy(logits, labels[1:], reduction="sum", ignore_index=-100))
        count += int((labels[1:] != -100).sum())
    return total / count


def training_rows(count: int) -> list[dict[str, Any]]:
    """Rows of which each counts another number of labels."""
    rows = []
    for row in range(count):
        ids = tokens(1, 12)[0]
        labels = ids.clone()
        labels[: row % 6] = -100
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return rows


def trainer(path: Path, model: GSAForCausalLM, rows: list[dict[str, Any]], **options: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(path),
        use_cpu=True,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **{"max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **options},
    )
    return Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:5])


def test_the_trainer_trains_saves_and_resumes(tmp_path: Path) -> None:
    rows = training_rows(12)
    model = tiny_model("gsa", initializer_range=0.1)
    before = mean_loss(model, rows)
    whole = trainer(tmp_path / "whole", model, rows, save_steps=2)
    whole.train()
    model.eval()
    assert mean_loss(model, rows) < before
    # Evaluation gives logits and loss, and no cache.
    predictions = whole.predict(rows[:4])
    assert predictions.predictions.shape == (4, 12, VOCABULARY)
    ids = torch.tensor([row["input_ids"] for row in rows[:4]])
    assert_same(torch.tensor(predictions.predictions), uncached_logits(model, ids))
    # Going on from the checkpoint at step 2 ends where the whole run ended.
    resumed = trainer(tmp_path / "resumed", tiny_model("gsa", initializer_range=0.1), rows, save_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert resumed.state.global_step == 3
    for key, weight in model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[key], weight)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "checkpoint-3")
    assert torch.equal(uncached_logits(loaded, ids), uncached_logits(model, ids))


def test_evaluation_in_the_trainer_is_the_mean_loss_of_batches_of_one(tmp_path: Path) -> None:
    rows = training_rows(5)
    model = tiny_model("gsa")
    metrics = trainer(tmp_path, model, rows, per_device_eval_batch_size=1).evaluate()
    expected = sum(mean_loss(model, [row]) for row in rows) / 5
    assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-4)


def test_accumulated_batches_train_as_one_large_batch_does(tmp_path: Path) -> None:
    """Rows count unequally many labels, so this holds only if the loss is divided by the number of all of them."""
    rows, weights = training_rows(4), []
    for size in (4, 1):
        model = tiny_model("gsa", initializer_range=0.1)
        run = trainer(
            tmp_path / str(size),
            model,
            rows,
            optim="sgd",
            max_grad_norm=0.0,
            max_steps=1,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=4 // size,
        )
        run.train()
        weights.append(model.state_dict())
    fresh = tiny_model("gsa", initializer_range=0.1).state_dict()
    assert any(not torch.equal(weights[0][key], fresh[key]) for key in fresh)
    for key, weight in weights[0].items():
        torch.testing.assert_close(weights[1][key], weight, atol=1e-6, rtol=1e-5)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each of the words w1, w2, ..."""
    tokenizer = Tokenizer(WordLevel({"[PAD]": PAD, **{f"w{i}": i for i in range(1, VOCABULARY)}}))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", padding_side="left")


def test_a_pipeline_continues_texts_in_a_batch(tmp_path: Path) -> None:
    saved(tmp_path, "hybrid")
    word_tokenizer().save_pretrained(tmp_path)
    generator = pipeline("text-generation", model=str(tmp_path), device="cpu")
    assert type(generator.model) is GSAForCausalLM
    prompts = ["w5 w9 w33 w2 w7", "w8 w40"]
    texts = generator(prompts, batch_size=2, max_new_tokens=6, do_sample=False, return_full_text=False)
    for prompt, [text] in zip(prompts, texts, strict=True):
        ids = torch.tensor([[int(word[1:]) for word in prompt.split()]])
        alone = ids
        for _ in range(6):
            alone = torch.cat([alone, uncached_logits(generator.model, alone)[:, -1:].argmax(-1)], 1)
        words = [f"w{token}" for token in alone[0, ids.shape[1] :].tolist() if token != PAD]
        assert len(words) > 3
        assert text["generated_text"].split() == words


@pytest.mark.parametrize("name", ["gsa", "mamba"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_model_answers_as_the_plain_one(name: str, backend: str) -> None:
    model, ids = tiny_model(name, num_hidden_layers=1), tokens(2, 9)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        actual, expected = (each(ids, labels=ids, use_cache=False) for each in (compiled, model))
    assert_same(actual.loss, expected.loss)
    assert_same(actual.logits, expected.logits)


def test_every_mixer_of_the_registry_is_among_these_models() -> None:
    from gsa.mixers.registry import MIXERS as KNOWN

    tested = {options.mixer for name in MIXERS for options in tiny_config(name).to_model_config().layers}
    assert tested == set(KNOWN)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("case", ["hgrn2", "gsa"])
def test_both_kinds_of_gradient_checkpointing(case: str, reentrant: bool) -> None:
    model, ids = tiny_model(case).train(), tokens(2, 9)
    model(ids, labels=ids).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model(ids, labels=ids).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], msg=name)


@pytest.mark.parametrize("case", ["mamba", "gsa-constant", "retnet", "hybrid"])
def test_layers_may_lie_on_disk(case: str, tmp_path: Path) -> None:
    """accelerate's hooks bring weights in when their module is called; parameters of mixers themselves among them."""
    model, ids = tiny_model(case).eval(), tokens(2, 9)
    model.save_pretrained(tmp_path / "model")
    places = {"model.embeddings": "cpu", "model.layers.0": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "disk" for i in range(1, model.config.num_hidden_layers)}
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    )
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


def test_a_trainer_that_computes_the_loss_shifts_labels() -> None:
    """Label smoothing is computed by the Trainer, which shifts for models that it knows by name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    tiny_model("gsa")
    assert "GSAForCausalLM" in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
