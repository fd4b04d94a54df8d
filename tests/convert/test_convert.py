"""Pretrained Transformers become models of ours: the same one, exactly, or a recurrent one with its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import gsa
from gsa import pretrained
from gsa.convert import STUDENTS, Choices, convert
from gsa.data.tokenizer import load_tokenizer
from gsa.models.checkpoint import load_model, load_weights
from tests.cli.running import run
from tests.convert.families import CASES, VOCABULARY, made, model_of, saved

RECURRENT = [name for name in STUDENTS if name != "attention"]
"""Students with a state of constant size."""
PLAIN = ("--calibrate-tokens", "0")
IDS = torch.randint(VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("case", CASES)
def test_attention_is_the_same_model(tmp_path: Path, case: str) -> None:
    """Logits equal transformers', whatever the family: grouped heads, biases, norms, windows, tied embeddings."""
    made(saved(tmp_path / "source", case), tmp_path / "out", Choices(to="attention"))
    with torch.no_grad():
        found, expected = load_model(tmp_path / "out")(IDS).logits, model_of(case)(IDS).logits
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("to", RECURRENT)
def test_students_have_their_teachers_weights(tmp_path: Path, to: str) -> None:
    """Every tensor that both have is equal to the bit; what is new is finite; and it writes text."""
    source = saved(tmp_path / "source", "qwen2")
    made(source, tmp_path / "out", Choices(to=to))
    made(source, tmp_path / "teacher", Choices(to="attention"))
    student, teacher = load_weights(tmp_path / "out"), load_weights(tmp_path / "teacher")
    assert teacher.keys() <= student.keys()
    for name, x in teacher.items():
        assert torch.equal(student[name], x), name
    assert all(bool(torch.isfinite(x).all()) for x in student.values())
    model = load_model(tmp_path / "out")
    assert model.state_size is not None
    assert torch.isfinite(model(IDS).logits).all()
    assert gsa.load(tmp_path / "out").generate("It was", max_tokens=3, temperature=0).reason in ("length", "stop")


def test_gates_begin_with_half_lives_over_the_slots(tmp_path: Path) -> None:
    """A memory that is written once is half of it after 16 to 1024 tokens, by its bias alone."""
    source = saved(tmp_path / "source")
    for to, name, count in (("gsa", "f_proj.bias", 64), ("gla", "gk_proj.1.bias", 8)):
        made(source, tmp_path / to, Choices(to=to))
        model = load_model(tmp_path / to)
        bias = model.state_dict()[f"model.layers.1.mixer.{name}"].double().unflatten(0, (2, count))
        kept = torch.sigmoid(bias) ** (1 / model.model.layers[1].mixer.options.gate_temperature)
        half_lives = 1 / torch.log2(1 / kept)
        assert half_lives[:, 0].tolist() == pytest.approx([16, 16], rel=1e-4)
        assert half_lives[:, -1].tolist() == pytest.approx([1024, 1024], rel=1e-2)
        assert (half_lives.diff() > 0).all()


def test_the_papers_form(tmp_path: Path) -> None:
    """GSA as the paper's layer; GLA with ReLU, and gates that begin as in a model trained from the start."""
    source = saved(tmp_path / "source")
    made(source, tmp_path / "gsa", Choices(to="gsa", paper=True, slots=8))
    layer = load_model(tmp_path / "gsa").model.layers[0].mixer
    assert (layer.options.feature_map, layer.options.scale, layer.options.gate_bias) == ("swish", 1.0, False)
    assert layer.options.num_slots == 8
    made(source, tmp_path / "gla", Choices(to="gla", paper=True))
    layer = load_model(tmp_path / "gla").model.layers[0].mixer
    assert layer.options.feature_map == "relu"
    assert layer.gk_proj[1].bias.abs().max() == 0
    assert not layer.options.output_gate


def test_supras_map_begins_as_the_identity(tmp_path: Path) -> None:
    made(saved(tmp_path / "source"), tmp_path / "out", Choices(to="supra"))
    layer = load_model(tmp_path / "out").model.layers[0].mixer
    assert torch.equal(layer.feature_map.layer.weight, torch.eye(8))


@pytest.mark.parametrize("to", ["gla", "retnet", pytest.param("supra", marks=pytest.mark.slow)])
def test_softmax_features_average_values(tmp_path: Path, to: str) -> None:
    """Where all values are the same, so are outputs, whatever queries and keys are; and it writes text."""
    made(saved(tmp_path / "source"), tmp_path / "out", Choices(to=to, feature_map="softmax"))
    layer = load_model(tmp_path / "out").model.layers[0].mixer
    with torch.no_grad():
        layer.o_proj = torch.nn.Identity()
        layer.v_proj.bias = torch.nn.Parameter(torch.full((16,), 3.0))
        layer.v_proj.weight.zero_()
        y, _ = layer(torch.randn(1, 40, 32))
    assert torch.allclose(y, torch.full_like(y, 3.0), rtol=0.05)
    assert gsa.load(tmp_path / "out").generate("It was", max_tokens=3, temperature=0).reason in ("length", "stop")


@pytest.mark.parametrize("to", ["gla", "retnet", pytest.param("supra", marks=pytest.mark.slow)])
def test_norms_of_outputs_begin_with_the_size_of_the_teachers(tmp_path: Path, to: str) -> None:
    source = saved(tmp_path / "source")
    convert(source, tmp_path / "out", Choices(to=to), tokens=512)
    convert(source, tmp_path / "teacher", Choices(to="attention"))
    student, teacher = (load_model(tmp_path / name).model for name in ("out", "teacher"))
    (ids,) = load_tokenizer(tmp_path / "out").encode([pretrained.book()[:512]])
    sizes = []
    for backbone in (student, teacher):
        caught: list[torch.Tensor] = []
        last = backbone.layers[0].mixer.o_proj
        last.register_forward_pre_hook(lambda module, inputs, caught=caught: caught.append(inputs[0]))
        with torch.no_grad():
            backbone(torch.tensor(ids[None].astype("int64")))
        sizes.append(caught[0].unflatten(-1, (-1, 8)).square().mean((0, 1, 2)).sqrt())
    assert (sizes[1] < 0.7).any()  # of norms with weights of 1 it would be about 1 everywhere
    assert torch.allclose(student.layers[0].mixer.norm.weight, sizes[1], rtol=0.1)
    told = json.loads((tmp_path / "out" / "convert.json").read_text())["calibration"]["layers"][0]
    assert told["output_norm"] == pytest.approx(float(sizes[1].mean()), rel=0.1)
    assert "norm of outputs" in (tmp_path / "out" / "README.md").read_text()


def test_a_seed_gives_the_same_model_again(tmp_path: Path) -> None:
    source = saved(tmp_path / "source")
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        made(source, tmp_path / name, Choices(to="gsa", seed=seed))
    a, b, c = (load_weights(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["model.layers.0.mixer.f_proj.weight"], c["model.layers.0.mixer.f_proj.weight"])
    layers = [a[f"model.layers.{i}.mixer.f_proj.weight"] for i in range(2)]
    assert not torch.equal(*layers)


@pytest.mark.parametrize(("dtype", "expected"), [("bf16", torch.bfloat16), ("fp16", torch.float16), (None, None)])
def test_weights_have_the_dtype_that_was_asked_for(
    tmp_path: Path, dtype: str | None, expected: torch.dtype | None
) -> None:
    source = saved(tmp_path / "source")
    made(source, tmp_path / "out", Choices(to="gsa"), dtype)
    weights = load_weights(tmp_path / "out")
    assert {x.dtype for x in weights.values()} == {expected or torch.float32}
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == str(expected or torch.float32)[6:]


def test_the_folder_is_one_of_transformers_too(tmp_path: Path) -> None:
    made(saved(tmp_path / "source"), tmp_path / "out", Choices(to="gsa"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.allclose(model(IDS).logits, load_model(tmp_path / "out")(IDS).logits, atol=1e-5)


def test_what_was_decided_is_written_down(tmp_path: Path) -> None:
    made(saved(tmp_path / "source", "mistral, window"), tmp_path / "out", Choices(to="gsa", slots=16))
    record = json.loads((tmp_path / "out/convert.json").read_text())
    assert record["choices"]["slots"] == 16
    assert record["family"] == "mistral"
    assert record["teacher"]["window"] == 6
    assert "model.layers.2.mixer.f_proj.bias" in record["new"]
    card = (tmp_path / "out/README.md").read_text()
    for words in ("slots 16", "sliding window of 6 tokens", "rotary positions", "layers.*.mixer.f_proj.bias"):
        assert words in card
    assert str(tmp_path) not in card


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = saved(tmp_path / "source")
    code, out, _ = run(capsys, "convert", str(source), str(tmp_path / "out"), "--to", "gsa", "--slots", "8", *PLAIN)
    assert code == 0
    assert "gsa: " in out
    assert load_model(tmp_path / "out").config.num_slots == 8
    code, out, _ = run(capsys, "convert", str(source), str(tmp_path / "other"), "--to", "gla", "--json", *PLAIN)
    assert code == 0
    assert json.loads(out)["dtype"] == "float32"
    for words in ((), (str(source),)):
        code, _, err = run(capsys, "convert", *words)
        assert code != 0
        assert "is missing" in err
