"""The benchmark of decoding measures what it says."""

import json
import sys

import pytest
import torch

from gsa.bench import accuracy, decode_loss, decode_mixers, decode_model, rivals
from gsa.bench.decode_tables import tables
from gsa.cli import main
from gsa.infer import Model
from gsa.mixers import MIXERS
from gsa.models import ModelConfig
from gsa.ops.native import library

from ..tables import printed

needs_native = pytest.mark.skipif(library.unavailable(None) is not None, reason="the native engine cannot run here")
SMALL = ModelConfig(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_slots=8, vocab_size=300
)


@pytest.fixture(autouse=True)
def _without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gsa.bench.timing.TURN", 0.0001)


def quiet(what: str) -> None:
    pass


@needs_native
def test_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole command, with a small model."""
    monkeypatch.setattr(decode_model, "shape", lambda quick: SMALL)
    monkeypatch.setattr("gsa.bench.memory.measured_alone", lambda task, setting: {"peak": 5e6, "seconds": 1.0})
    race = __import__("gsa.bench.timing", fromlist=["race"]).race
    monkeypatch.setattr("gsa.bench.timing.race", lambda contenders, seconds, rounds=2: race(contenders, 0.0, 2))
    main(["bench", "decode", "--quick", "--json", "--threads", "1", "--mixers", "mamba,attention,hybrid"])
    report = json.loads(capsys.readouterr().out)
    assert report["threads"] == 1
    for name, row in report["weights"].items():
        assert row["share"] == pytest.approx(row["tokens_per_second"] / row["bound"])
        assert row["loss"] == pytest.approx(report["weights"]["fp32"]["loss"], abs=0.2), name
    sizes = [row["bytes"] for row in report["weights"].values()]
    assert sizes == sorted(sizes, reverse=True)
    assert report["weights"]["int4"]["loss_tiny"] > report["weights"]["fp32"]["loss_tiny"]
    assert report["agreement"] == {"requests": 20, "equal": 20}
    at = report["positions"]
    constant = Model.load(decode_model.random_model(SMALL)).state_bytes
    assert at["state_bytes"] == {"near": constant, "far": constant}
    assert at["ratio"] == pytest.approx(at["far_tokens_per_second"] / at["near_tokens_per_second"])
    assert all(rivals.TRANSFORMERS in row for row in report["rivals"].values())
    contexts = [("mamba", None), ("attention", 128), ("hybrid", None)]
    assert [(row["mixer"], row["context"]) for row in report["mixers"][::2]] == contexts
    for row in report["mixers"]:
        assert row["share"] == pytest.approx(row["tokens_per_second"] / row["bound"])
    shown = printed(*tables(report))
    assert "Mixers in the same shape" in shown
    assert "loss gsa-tiny" in shown
    assert "of 20 requests to gsa-tiny, 16 at a time, 20 gave the tokens they give alone" in shown


def test_mixers_have_the_shape_of_the_model() -> None:
    plain = decode_model.shape()
    for name in MIXERS:
        config = decode_mixers.shape_of(name, quick=False)
        assert (config.mixer, config.hidden_size, config.vocab_size) == (name, plain.hidden_size, plain.vocab_size)
        assert config.num_hidden_layers == (60 if name == "mamba" else 30)
        assert config.num_key_value_heads == (None if name in ("mamba", "hgrn2") else 3)


@needs_native
def test_loss_is_the_models_own() -> None:
    lm = decode_model.random_model(SMALL)
    ids = torch.randint(300, (16, 20))
    with torch.no_grad():
        expected = float(lm(ids, labels=ids).loss)
    assert decode_loss.losses({"fp32": Model.load(lm, "fp32")}, ids)["fp32"] == pytest.approx(expected, rel=1e-5)


def test_a_book_in_sequences() -> None:
    ids = decode_loss.of_a_book(30)
    assert ids.shape == (16, 30)
    assert len({tuple(row.tolist()) for row in ids}) == 16


def test_llama_of_the_same_shape_keeps_its_context() -> None:
    llama = rivals.TransformersLlama(SMALL)
    token = llama.at(10)
    cache = token.__closure__[0].cell_contents  # type: ignore[index]
    for _ in range(3):
        token()
        assert cache.get_seq_length() == 10
    stored = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    assert llama.cache_bytes(10) == stored


def test_llama_cpp_is_only_there_when_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    assert rivals.llama_cpp_model() is None


@needs_native
def test_reading_alone_tells_its_peak() -> None:
    found = decode_model.read_alone({"tokens": 700, "threads": 1})
    assert found["tokens"] == 700
    assert found["peak"] > 1e7


def test_accuracy(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    accuracy.accuracy(json=True)
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 4
    assert all(0 < row["outputs"] < 1e-6 and 0 < row["gradients"] < 5e-5 for row in rows.values())
    monkeypatch.setattr(accuracy, "measure", lambda: rows)
    accuracy.accuracy()
    shown = capsys.readouterr().out
    assert all(f"{row['gradients']:.1e}" in shown for row in rows.values())
