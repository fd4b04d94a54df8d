"""Models for inference: what their layers compute, how they are found, what they are called."""

from pathlib import Path

import pytest
import torch

from gsa import LM
from gsa.errors import GSAError
from gsa.infer import Model
from gsa.infer.compiled_runner import SHORT_READ
from gsa.infer.layers import InferenceLinear
from gsa.infer.runner import MAX_READ
from gsa.infer.runners import make_runner
from gsa.models.checkpoint import load_model, save_model
from gsa.models.state import ModelState
from gsa.pretrained import folder
from tests.models.cases import CASES, ids, model


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def whole(lm: LM, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return lm(tokens[None]).logits[0, -1]


def read(loaded: Model, tokens: torch.Tensor) -> tuple[torch.Tensor, ModelState]:
    return make_runner(loaded, 1).read(tokens, None)


@pytest.mark.parametrize("length", [1, SHORT_READ, SHORT_READ + 1, 200])
@pytest.mark.parametrize("case", CASES)
def test_reads_as_the_model_runs(case: str, length: int) -> None:
    lm, tokens = model(case), ids(length)
    logits, state = read(Model.load(lm, "fp32"), tokens)
    assert relative(logits, whole(lm, tokens)) < 1e-4
    with torch.no_grad():
        after = lm(tokens[None]).state
    for mine, other in zip(state.layers, after.layers, strict=True):
        assert mine.keys() == other.keys()
        assert all(mine[key].shape == other[key].shape for key in mine)


@pytest.mark.parametrize(("format", "error"), [("fp32", 1e-5), ("bf16", 0.03), ("int8", 0.1), ("int4", 0.7)])
def test_formats(format: str, error: float) -> None:
    """Both ways through a layer: the matrix-vector kernels, and a matrix product of unpacked weights."""
    lm = model("gsa", tie_word_embeddings=True)
    loaded = Model.load(lm, format)
    assert loaded.weights == format
    for length in (3, 100):
        found, expected = read(loaded, ids(length))[0], whole(lm, ids(length))
        assert relative(found, expected) < error
        assert format == "fp32" or relative(found, expected) > 1e-4


def test_sizes() -> None:
    lm = model("gsa", hidden_size=64, vocab_size=640, tie_word_embeddings=True)
    sizes = {format: Model.load(lm, format).nbytes for format in ("fp32", "bf16", "int8", "int4")}
    assert sizes["fp32"] == 4 * lm.num_parameters
    assert 0.5 < sizes["bf16"] / sizes["fp32"] < 0.51
    assert 0.26 < sizes["int8"] / sizes["fp32"] < 0.29
    assert 0.14 < sizes["int4"] / sizes["fp32"] < 0.17


def test_state_given_is_not_changed() -> None:
    runner = make_runner(Model.load(model("gsa")), 1)
    for length in (3, 100):
        _, state = runner.read(ids(70), None)
        before = state.clone()
        runner.read(ids(length), state)
        assert all(torch.equal(x[key], y[key]) for x, y in zip(state.layers, before.layers, strict=True) for key in x)


def test_the_source_stays_as_it_is() -> None:
    lm = model("gsa")
    before = {name: x.clone() for name, x in lm.state_dict().items()}
    Model.load(lm, "int4")
    assert not any(isinstance(layer, InferenceLinear) for layer in lm.modules())
    assert all(torch.equal(x, before[name]) for name, x in lm.state_dict().items())


def test_sources(tmp_path: Path) -> None:
    by_name = Model.load("gsa-tiny")
    assert by_name.weights == "bf16"
    assert by_name.fingerprint == Model.load(folder("gsa-tiny")).fingerprint
    assert by_name.fingerprint == Model.load("gsa-tiny", "int4").fingerprint
    lm = model("gsa", tie_word_embeddings=True)
    save_model(lm, tmp_path / "model")
    saved = Model.load(tmp_path / "model")
    assert saved.weights == "fp32"
    assert saved.fingerprint == Model.load(lm).fingerprint
    assert torch.equal(read(saved, ids(5))[0], read(Model.load(lm), ids(5))[0])


def test_fingerprints_differ_by_a_weight_and_by_the_config() -> None:
    lm = model("gsa")
    first = Model.load(lm).fingerprint
    with torch.no_grad():
        lm.model.layers[1].mixer.o_proj.weight[3, 5] += 1e-3  # type: ignore[index]
    assert Model.load(lm).fingerprint != first
    assert Model.load(model("gsa", rms_norm_eps=2e-2)).fingerprint != first


def test_state_bytes() -> None:
    tiny = Model.load("gsa-tiny")
    assert tiny.state_bytes == 4 * load_model(folder("gsa-tiny")).state_size  # type: ignore[operator]
    assert Model.load(model("attention")).state_bytes is None
    window = Model.load(model("attention, window"))  # full after four tokens
    assert window.state_bytes == read(window, ids(9))[1].nbytes


@pytest.mark.parametrize(
    ("source", "weights", "message"),
    [
        ("gsa-tiny", "int3", "Model: unknown weights 'int3'; expected one of auto, fp32, bf16, int8, int4"),
        (
            "nowhere",
            "auto",
            "model 'nowhere' was not found: there is no folder nowhere, the package has gsa-smol, gsa-tiny, and models "
            "of the Hugging Face Hub are named owner/name",
        ),
    ],
)
def test_refuses(source: str, weights: str, message: str) -> None:
    with pytest.raises(GSAError, match=message):
        Model.load(source, weights)


@pytest.mark.parametrize("length", [0, MAX_READ + 1])
def test_refuses_too_many_at_once(length: int) -> None:
    with pytest.raises(GSAError, match=f"read: expected 1 to {MAX_READ} ids"):
        read(Model.load(model("gsa")), ids(length))
