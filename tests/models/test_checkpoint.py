"""Models as folders: what is written is read back, by us and by transformers; what is broken is named."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gsa.errors import GSAError
from gsa.models import LM, preset
from gsa.models.checkpoint import load_config, load_model, save_model
from gsa.train.checkpoint import save_checkpoint
from tests.models.cases import CASES, ids, model


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case: str, tmp_path: Path) -> None:
    lm = model(case)
    save_model(lm, tmp_path / "new" / "model")
    again = load_model(tmp_path / "new" / "model").eval()
    assert again.config == lm.config
    assert torch.equal(again(ids(2, 9)).logits, lm(ids(2, 9)).logits)
    assert all(p.requires_grad for p in again.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_ours_and_we_read_theirs(tied: bool, tmp_path: Path) -> None:
    from gsa import GSAForCausalLM

    lm = model("hybrid", tie_word_embeddings=tied)
    save_model(lm, tmp_path / "ours", eos_token_id=3)
    theirs = GSAForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert theirs.config.eos_token_id == 3
    assert torch.equal(theirs(ids(2, 9)).logits, lm(ids(2, 9)).logits)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    again = load_model(tmp_path / "theirs").eval()
    assert torch.equal(again(ids(2, 9)).logits, lm(ids(2, 9)).logits)


def test_dtypes(tmp_path: Path) -> None:
    save_model(model("gsa").to(torch.bfloat16), tmp_path)
    assert load_model(tmp_path).lm_head.weight.dtype == torch.bfloat16
    assert load_model(tmp_path, dtype=torch.float32).lm_head.weight.dtype == torch.float32
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_nothing_half_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When writing fails, an older model stays whole, and no other file is left."""
    save_model(model("gsa"), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(weights: object, path: Path, **options: object) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("gsa.models.checkpoint.save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        save_model(model("gla"), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_weights(folder: Path, **changes: object) -> None:
    weights = load_file(folder / "model.safetensors")
    for name, x in changes.items():
        if x is None:
            del weights[name]
        else:
            weights[name] = x
    save_file(weights, folder / "model.safetensors")


def index(folder: Path, text: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda d: change_config(d, num_slot=8),
            r"config.json: config: unknown field 'num_slot' \(did you mean 'num_slots'",
        ),
        (lambda d: change_config(d, num_slots="8"), "config: num_slots must be a whole number"),
        (lambda d: change_config(d, mixer="gza"), "unknown mixer 'gza'"),
        (lambda d: change_config(d, model_type="llama"), "model_type is 'llama', expected 'gated_slot_attention'"),
        (lambda d: (d / "config.json").write_text("{"), "config.json: not JSON"),
        (lambda d: (d / "config.json").write_text("[]"), "config.json: expected a JSON object, got list"),
        (lambda d: (d / "config.json").unlink(), r"is neither a model \(config.json\), nor a checkpoint"),
        (lambda d: (d / "model.safetensors").unlink(), "there is neither model.safetensors nor"),
        (lambda d: change_weights(d, **{"model.norm.weight": None}), "tensor model.norm.weight is missing"),
        (lambda d: change_weights(d, extra=torch.zeros(2)), "tensor extra is not part of the model"),
        (
            lambda d: change_weights(d, **{"lm_head.weight": torch.zeros(3, 32)}),
            r"tensor lm_head.weight is \[3, 32\], the config asks for \[50, 32\]",
        ),
        (lambda d: change_config(d, num_slots=16), r"f_proj.weight is \[16, 32\], the config asks for \[32, 32\]"),
        (lambda d: change_config(d, num_hidden_layers=4), "tensor model.layers.3.mixer_norm.weight is missing"),
        (lambda d: change_config(d, num_hidden_layers=2), "tensor model.layers.2.* is not part of the model"),
        (
            lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-100]),
            "model.safetensors: not a whole safetensors file",
        ),
        (lambda d: (d / "model.safetensors").write_bytes(b"junk" * 100), "not a whole safetensors file"),
        (
            lambda d: index(d, '{"weight_map": {"a": "../../secret.safetensors"}}'),
            "is not the name of a safetensors file beside the index",
        ),
        (lambda d: index(d, '{"weight_map": 3}'), "weight_map must map"),
        (
            lambda d: change_weights(d, **{"model.norm.weight": torch.zeros(32, dtype=torch.int64)}),
            "norm.weight is torch.int64",
        ),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: object, message: str) -> None:
    save_model(model("gsa"), tmp_path)
    damage(tmp_path)
    with pytest.raises(GSAError, match=message):
        load_model(tmp_path)


def test_a_file_that_is_removed_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened_too_late(path: Path, framework: str) -> object:
        path.unlink()
        return torch.UntypedStorage.from_file(str(path), False, 8)  # as safetensors does behind the header

    save_model(model("gsa"), tmp_path)
    monkeypatch.setattr("gsa.models.checkpoint.safe_open", opened_too_late)
    with pytest.raises(GSAError, match=r"model.safetensors: the file was removed while it was read"):
        load_model(tmp_path)


def test_config_alone(tmp_path: Path) -> None:
    save_model(model("hybrid"), tmp_path)
    assert load_config(tmp_path) == model("hybrid").config


def test_one_file_replaces_shards(tmp_path: Path) -> None:
    """A folder that held an older model in several files holds the newer one, and nothing of the older."""
    from gsa import GSAConfig, GSAForCausalLM

    lm = model("gsa")
    GSAForCausalLM(GSAConfig.from_model_config(lm.config)).save_pretrained(tmp_path, max_shard_size="20KB")
    save_model(lm, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "modeling_gsa.py",
    }
    assert torch.equal(load_model(tmp_path).lm_head.weight, lm.lm_head.weight)


def test_a_compiled_model_is_saved_under_its_own_names(tmp_path: Path) -> None:
    lm = model("gsa")
    save_model(torch.compile(lm), tmp_path)
    assert torch.equal(load_model(tmp_path).lm_head.weight, lm.lm_head.weight)
    with pytest.raises(GSAError, match=r"expected a gsa.LM, got Linear"):
        save_model(torch.nn.Linear(2, 2), tmp_path)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(GSAError, match=r"unknown field 'eos_token' \(did you mean 'eos_token_id'\?\)"):
        save_model(model("gsa"), tmp_path / "new", eos_token=3)
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    with pytest.raises(GSAError, match="is a file, expected a folder"):
        save_model(model("gsa"), tmp_path / "file")


def test_a_tied_model_with_a_head_of_its_own_is_refused(tmp_path: Path) -> None:
    save_model(model("gsa"), tmp_path)
    change_config(tmp_path, tie_word_embeddings=True)
    with pytest.raises(GSAError, match=r"tie_word_embeddings is true, but lm_head.weight is not"):
        load_model(tmp_path)


def test_a_kill_between_the_files_leaves_no_config_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(model("gsa"), tmp_path)
    replaced = []

    def kill(source: object, target: Path) -> None:
        if replaced:
            raise KeyboardInterrupt
        replaced.append(Path(target).name)
        Path(source).rename(target)

    monkeypatch.setattr("os.replace", kill)
    with pytest.raises(KeyboardInterrupt):
        save_model(model("gsa", gate_temperature=2.0), tmp_path)
    assert replaced == ["model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "modeling_gsa.py"]


def test_fields_of_transformers_are_no_mistake(tmp_path: Path) -> None:
    save_model(model("gsa"), tmp_path)
    change_config(tmp_path, torch_dtype="float32", _name_or_path="x", auto_map={}, num_labels=2)
    assert load_config(tmp_path) == model("gsa").config


def test_loading_imports_no_compiler() -> None:
    """Parameters about to be replaced are not filled, which on the device `meta` would import torch's dynamo."""
    code = (
        "import sys, gsa.pretrained; from gsa.models.checkpoint import load_model\n"
        "load_model(gsa.pretrained.folder('gsa-tiny')); print('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_models_go_by_name_without_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the package, folders and runs; all that a name can be is tested with `find_model`."""
    monkeypatch.setattr("gsa.train.find.on_hub", lambda name: pytest.fail(f"the Hub was asked for {name}"))
    tiny = load_model("gsa-tiny")
    assert (tiny.config, tiny.lm_head.weight.dtype) == (preset("gsa-tiny"), torch.bfloat16)
    assert LM.from_pretrained("gsa-tiny", dtype=torch.float32).lm_head.weight.dtype == torch.float32
    lm = model("gsa")
    lm.save_pretrained(tmp_path / "model")
    save_checkpoint(tmp_path / "run", 1, lm.config, {"model": lm.state_dict()}, {})
    for source in (tmp_path / "model", str(tmp_path / "model"), tmp_path / "run"):
        again = LM.from_pretrained(source)
        assert again.config == lm.config
        for name, x in lm.state_dict().items():
            assert torch.equal(again.state_dict()[name], x), (source, name)
    with pytest.raises(GSAError, match="model 'gsa-huge' was not found"):
        load_model("gsa-huge")
