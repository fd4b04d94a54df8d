"""The benchmark of training steps measures what it says, for every mixer."""

import json

import pytest
import torch

from gsa.bench import train
from gsa.bench.memory import measurable, measured_alone
from gsa.errors import GSAError
from gsa.mixers import MIXERS

from ..tables import printed


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models, and no process of its own for memory."""
    monkeypatch.setattr(train, "SIZES", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 50})
    monkeypatch.setattr("gsa.bench.timing.TURN", 0.0001)
    monkeypatch.setattr("gsa.bench.memory.measured_alone", lambda task, setting: {"peak": setting["T"] * 2**20})


def test_every_mixer_is_measured() -> None:
    assert set(train.MODELS) == set(MIXERS)
    sizes = {}
    for name in train.MODELS:
        with torch.device("meta"):
            sizes[name] = train._model(name).num_parameters
    assert max(sizes.values()) / min(sizes.values()) < 1.07  # what is compared is of one size


def test_shapes() -> None:
    for name in train.MODELS:
        config = train._config(name, "smollm2")
        assert (config.mixer, config.hidden_size, config.vocab_size) == (name, 576, 49152)
    with pytest.raises(GSAError, match="shape must be one of small, smollm2, got 'big'"):
        train.train(shape="big")


@pytest.mark.usefixtures("_small")
def test_report() -> None:
    report = train.measure([16, 32], list(train.MODELS), ["fp32"], rounds=1, progress=False)
    rows = {(row["mixer"], row["T"]): row for row in report["rows"]}
    assert len(rows) == 2 * len(MIXERS)
    for (name, T), row in rows.items():
        assert row["tokens_per_second"] == pytest.approx(T / row["seconds"])
        assert row["speedup"] == pytest.approx(rows["attention", T]["seconds"] / row["seconds"])
        assert row["peak_bytes"] in (T * 2**20, None)
        assert row["parameters"] > 1000, name
    shown = printed(train.speed_table(report))
    assert "tokens/s" in shown
    assert "attention" in shown


@pytest.mark.usefixtures("_small")
def test_precisions_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    report = train.measure([16], ["attention", "gsa"], ["fp32", "bf16"], rounds=1, progress=False)
    assert [(row["precision"], row["mixer"]) for row in report["rows"]] == [
        (precision, mixer) for precision in ("fp32", "bf16") for mixer in ("attention", "gsa")
    ]
    assert {row["precision"]: row["flops"] > 0 for row in report["products"]} == {"fp32": True, "bf16": True}
    assert all(row["product_share"] > 0 for row in report["rows"])
    monkeypatch.setattr("gsa.train.precision.bf16_unit", lambda device: None)
    assert train._precisions("auto,fp32") == ["fp32"]
    with pytest.raises(GSAError, match="this CPU has no unit for bf16"):
        train.train(precision="bf16")


@pytest.mark.usefixtures("_small")
def test_a_step_trains() -> None:
    step = train.stepper(train._model("gsa"), 24)
    losses = [step() for _ in range(30)]
    assert losses[-1] < losses[0]


@pytest.mark.usefixtures("_small")
def test_command(capsys: pytest.CaptureFixture) -> None:
    train.train(lengths="16", mixers="gsa", rounds=1, json=True)
    assert [row["mixer"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["attention", "gsa"]
    train.train(lengths="16,17", mixers="gsa,gla", rounds=1)
    assert "speed-up" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixers": "gsa,gza"}, r"mixers: 'gza' is not known \(did you mean 'gsa'\?\); .*, got 'gsa,gza'"),
        ({"lengths": "2048,1"}, "lengths must be whole numbers from 2 to 2147483647, with .* between, got '2048,1'"),
        ({"lengths": "short"}, "got 'short'"),
        (
            {"precision": "fp16"},
            "precision: 'fp16' is not known .*; expected auto, fp32, bf16, or several with commas between, got 'fp16'",
        ),
        ({"threads": 0}, "threads must be at least 1, got 0"),
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
    ],
)
def test_mistakes(options: dict, message: str) -> None:
    with pytest.raises(GSAError, match=message):
        train.train(**options)


@pytest.mark.skipif(not measurable(), reason="this system does not tell a process's peak memory")
@pytest.mark.slow
def test_memory_holds_model_gradients_and_optimiser() -> None:
    peak = measured_alone(
        "gsa.bench.train:memory_of_step", {"mixer": "gsa", "shape": "small", "T": 16, "precision": "fp32", "threads": 1}
    )["peak"]
    assert peak > 3.5 * 4 * 36e6
