"""Folders and names: models load by the names of the package, and without `import gsa`, with what others put in."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

import gsa
from gsa import GSAConfig, GSAForCausalLM, GSAModel
from gsa.data.tokenizer import load_tokenizer
from gsa.extras import how_to_install
from gsa.models import remote
from gsa.models.checkpoint import load_config, load_model, save_model
from tests.models.hf_models import tiny_config, tiny_model, tokens

PACKAGED = gsa.pretrained.folder("gsa-tiny")

# --- names of the package


@pytest.fixture
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.usefixtures("_no_network")
def test_packaged_models_load_by_name_without_the_network() -> None:
    assert type(AutoConfig.from_pretrained("gsa-tiny")) is type(GSAConfig.from_pretrained("gsa-tiny")) is GSAConfig
    assert type(AutoModel.from_pretrained("gsa-tiny")) is type(GSAModel.from_pretrained("gsa-tiny")) is GSAModel
    tokenizer = AutoTokenizer.from_pretrained("gsa-tiny")
    ids = tokenizer("It is a truth", return_tensors="pt").input_ids
    plain = load_model(PACKAGED)
    for kind in (AutoModelForCausalLM, GSAForCausalLM):
        model = kind.from_pretrained(pretrained_model_name_or_path="gsa-tiny")
        assert torch.equal(model(ids).logits, plain(ids).logits)


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("gsa").save_pretrained(tmp_path / "gsa-tiny")
    monkeypatch.chdir(tmp_path)
    for kind in (AutoModelForCausalLM, GSAForCausalLM):
        assert kind.from_pretrained("gsa-tiny").config.hidden_size == 32
    assert GSAConfig.from_pretrained("gsa-tiny").hidden_size == 32


@pytest.mark.usefixtures("_no_network")
def test_a_pipeline_of_a_packaged_model_takes_batches() -> None:
    texts = ["It is a truth universally", "He"]
    generator = transformers.pipeline("text-generation", model="gsa-tiny", device="cpu")
    options = {"max_new_tokens": 5, "do_sample": False, "return_full_text": False}
    together = generator(texts, batch_size=2, **options)
    for text, [found] in zip(texts, together, strict=True):
        assert generator(text, **options) == [found]


# --- pads


def test_tokenizers_have_a_token_for_pads(tmp_path: Path) -> None:
    load_tokenizer("bytes").save(tmp_path / "bytes")
    load_tokenizer(PACKAGED).save(tmp_path / "copied")
    for folder in (PACKAGED, tmp_path / "bytes", tmp_path / "copied"):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.pad_token == tokenizer.eos_token == "<|endoftext|>"
        batch = tokenizer(["a", "bb, bb, bb"], padding=True, return_tensors="pt")
        assert batch.attention_mask[0, 0] == 0
        assert batch.attention_mask[:, -1].all()
    assert len(AutoTokenizer.from_pretrained(PACKAGED)) == 4096


def test_a_tokenizer_keeps_the_pad_token_it_has(tmp_path: Path) -> None:
    load_tokenizer(PACKAGED).save(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pad_token": "!", "padding_side": "right"}))
    load_tokenizer(tmp_path).save(tmp_path / "copy")
    again = AutoTokenizer.from_pretrained(tmp_path / "copy")
    assert (again.pad_token, again.padding_side) == ("!", "right")


# --- fields of others


def test_fields_that_others_put_into_a_config_are_kept(tmp_path: Path) -> None:
    model = tiny_model("gsa")
    model.config.note, model.config.hidden_act = "x", "silu"
    model.save_pretrained(tmp_path / "first")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    loaded.save_pretrained(tmp_path / "second")
    for config in (loaded.config, AutoConfig.from_pretrained(tmp_path / "second")):
        assert (config.note, config.hidden_act) == ("x", "silu")
    assert load_config(tmp_path / "second") == model.config.to_model_config()


def test_a_misspelt_field_is_refused_before_it_is_saved(tmp_path: Path) -> None:
    config = tiny_config("gsa")
    config.num_slotz = 16
    with pytest.raises(ValueError, match=r"unknown field 'num_slotz' \(did you mean 'num_slots'\?\)"):
        config.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


# --- folders without `import gsa`

LOAD = """
import sys
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
folder, out = sys.argv[1:]
assert "gsa" not in sys.modules
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
features = AutoModel.from_pretrained(folder, trust_remote_code=True)
model.save_pretrained(out)
print(type(config).__module__, type(model).__module__, type(features).__name__)
"""


def test_every_folder_carries_the_module_that_leads_to_the_classes(tmp_path: Path) -> None:
    model = tiny_model("gsa")
    model.save_pretrained(tmp_path / "theirs")
    save_model(load_model(tmp_path / "theirs"), tmp_path / "ours")
    for folder in (tmp_path / "theirs", tmp_path / "ours", PACKAGED):
        assert (folder / remote.MODULE).read_text() == remote.TEXT
        assert json.loads((folder / "config.json").read_text())["auto_map"] == remote.AUTO_MAP
    for name in remote.AUTO_MAP.values():
        assert hasattr(gsa, name.removeprefix("modeling_gsa."))


def test_a_folder_loads_where_nobody_has_imported_gsa(tmp_path: Path) -> None:
    tiny_model("gsa").save_pretrained(tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOAD, tmp_path / "model", tmp_path / "again"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == ["gsa.models.hf.config", "gsa.models.hf.modeling", "GSAModel"]
    # What such a process saves has our module, and no copies of our code.
    before, after = ({path.name for path in (tmp_path / name).iterdir()} for name in ("model", "again"))
    assert after == before
    ids = tokens(1, 5)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(again(ids).logits, tiny_model("gsa")(ids).logits)


def test_without_the_package_the_module_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gsa", None)
    with pytest.raises(ImportError, match=re.escape(how_to_install("hf"))):
        exec(remote.TEXT, {})
