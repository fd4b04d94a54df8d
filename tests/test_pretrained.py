"""The model in the package is whole, small, loads everywhere, and predicts English."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import gsa.pretrained
from gsa.data.tokenizer import load_tokenizer
from gsa.errors import GSAError
from gsa.models.checkpoint import load_model
from gsa.recipes import recipe

FOLDER = gsa.pretrained.folder("gsa-tiny")
TEXT = (Path(__file__).parent / "material" / "alice.txt").read_text()[5000:15000]
ROOT = Path(__file__).parent.parent


def test_it_is_small_and_complete() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size < 10_000_000
    names = {"README.md", "config.json", "metrics.jsonl", "recipe.yaml", "tokenizer.json", "tokenizer_config.json"}
    assert names <= {path.name for path in FOLDER.iterdir()}
    assert gsa.pretrained.names() == ["gsa-tiny"]


def test_another_name_is_refused() -> None:
    with pytest.raises(GSAError, match="there is no model 'gsa-huge', only gsa-tiny"):
        gsa.pretrained.folder("gsa-huge")


def test_it_predicts_english_the_same_through_transformers() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    ids = torch.tensor([tokenizer(TEXT).input_ids])
    assert tokenizer.decode(ids[0]) == TEXT
    assert ids[0].tolist() == load_tokenizer(str(FOLDER)).encode([TEXT])[0].tolist()
    model = load_model(FOLDER, dtype=torch.float32).eval()
    other = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
        assert loss is not None
        torch.testing.assert_close(other(ids, labels=ids).loss, loss)
    bits_per_byte = float(loss) * ids.shape[1] / len(TEXT.encode()) / math.log(2)
    assert bits_per_byte < 2.0  # this text was among the training data


def test_the_card_says_what_the_log_says() -> None:
    card = (FOLDER / "README.md").read_text()
    best = min(
        (json.loads(line) for line in (FOLDER / "metrics.jsonl").read_text().splitlines() if "eval_loss" in line),
        key=lambda line: line["eval_loss"],
    )
    assert f"| bits per byte | {best['eval_bits_per_byte']:.4f} |" in card
    for word in ("public domain", "gsa train --recipe gsa-tiny", "xfmr-tiny", "gla-tiny", "license: "):
        assert word in card
    table = re.findall(r"^\| `(\w+)-tiny` \|.*\| ([\d.]+) \|$", card, re.MULTILINE)
    assert {name for name, _ in table} == {"gsa", "gla", "xfmr"}


def test_the_recipe_is_the_one_in_recipes() -> None:
    assert (FOLDER / "recipe.yaml").read_text() == recipe("gsa-tiny").read_text()
