"""Precision auto: what it takes, what it says, and that a run keeps it."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gsa.cli.doctor import examine
from gsa.errors import GSAError
from gsa.train import precision
from gsa.train.folder import recorded_precision
from gsa.train.run import preview, train
from gsa.train.settings import TrainSettings
from gsa.train.strategies import strategy

from . import runs
from .runs import final_weights, prepared, use_cpu

CPU = torch.device("cpu")
CURVE = Path(__file__).parents[2] / "docs" / "results" / "precision.csv"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("precision")
    prepared(folder)
    return folder


def run_settings(folder: Path, out: str, precision: str = "auto", **changes: Any) -> TrainSettings:
    return runs.run_settings(folder, out, precision=precision, **changes)


def test_auto_asks_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for unit, chosen in (("AVX-512 BF16", "bf16"), ("AMX BF16", "bf16"), (None, "fp32")):
        use_cpu(monkeypatch, unit)
        assert precision.bf16_unit(CPU) == unit
        assert precision.automatic(CPU) == chosen
        assert examine()["precision"]["auto"] == chosen or torch.cuda.is_available()
        assert unit is None or unit in str(precision.told(chosen, CPU, asked="auto", goes_on=False))
    for able, chosen in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, able=able: able)
        assert precision.automatic(torch.device("cuda")) == chosen


def test_auto_is_the_default(folder: Path) -> None:
    assert TrainSettings(data=str(folder), out="run", steps=1).precision == "auto"


def test_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(name: str, asked: str, goes_on: bool = False) -> str | None:
        return precision.told(name, CPU, asked=asked, goes_on=goes_on)

    use_cpu(monkeypatch, None)
    assert told("fp32", "auto") == "precision fp32: chosen by auto, this CPU has no unit for bf16"
    assert told("fp32", "fp32") is None
    assert "a hundred times as long" in str(told("bf16", "bf16", goes_on=True))
    use_cpu(monkeypatch, "AVX-512 BF16")
    assert told("bf16", "bf16") is None
    assert told("fp32", "auto", goes_on=True) == "precision fp32, as the run began"
    assert told("fp32", "auto") == "precision fp32: chosen by auto, as not every process has a unit for bf16"


def test_a_run_keeps_the_precision_it_began_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    use_cpu(monkeypatch, "AVX-512 BF16")
    whole = train(run_settings(folder, "whole", steps=4, save_every=2))
    assert whole.precision == "bf16"
    assert "precision bf16: chosen by auto, AVX-512 BF16 is there" in capsys.readouterr().err
    # The same, but from the third step on a machine that would choose otherwise.
    train(run_settings(folder, "moved", steps=2, save_every=2, lr=3e-3))
    assert json.loads((folder / "moved" / "settings.json").read_text())["settings"]["precision"] == "bf16"
    use_cpu(monkeypatch, None)
    assert preview(run_settings(folder, "moved", steps=4))[1].precision == "bf16"
    moved = train(run_settings(folder, "moved", steps=4, save_every=2))
    assert moved.precision == "bf16"
    said = capsys.readouterr().err
    assert "precision bf16: this CPU has no unit for it (AVX-512 BF16, AMX BF16)" in said
    assert "from now on" not in said.replace("steps was 2 until here, and is 4 from now on", "")
    # A wish is followed, and said.
    assert train(run_settings(folder, "moved", steps=6, precision="fp32")).precision == "fp32"
    assert "precision was bf16 until here, and is fp32 from now on" in capsys.readouterr().err
    assert train(run_settings(folder, "moved", steps=7)).precision == "fp32"


def test_a_run_does_not_begin_in_bf16_without_a_unit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cpu(monkeypatch, None)
    expected = r"train: precision bf16: this CPU has no unit for it \(AVX-512 BF16, AMX BF16\).*; choose auto or fp32"
    settings = run_settings(folder, "refused", steps=2, precision="bf16")
    with pytest.raises(GSAError, match=expected):
        train(settings)
    assert preview(settings)[1].precision == "bf16"  # which may be meant for another machine
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    with pytest.raises(GSAError, match="this GPU has no unit for it; choose fp16 or fp32"):
        precision.refuse_missing_unit("bf16", torch.device("cuda"))
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    precision.refuse_missing_unit("bf16", CPU)  # nobody has asked such CPUs


def test_no_unit_means_fp32(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cpu(monkeypatch, None)
    assert preview(run_settings(folder, "none", steps=2))[1].precision == "fp32"
    assert train(run_settings(folder, "none", steps=2)).precision == "fp32"
    train(run_settings(folder, "asked", steps=2, precision="fp32"))
    for name, weight in final_weights(folder / "none").items():
        assert torch.equal(weight, final_weights(folder / "asked")[name])


def test_all_processes_take_what_the_weakest_can(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cpu(monkeypatch, "AVX-512 BF16")
    from gsa.models import LM, ModelConfig

    for able, chosen in ((2, "bf16"), (1, "fp32")):
        chief = strategy("single", precision="auto", device="cpu")
        monkeypatch.setattr(chief, "world_size", 2)
        monkeypatch.setattr(chief, "sum", lambda *values, able=able: [float(able)])
        model = LM(ModelConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=1, vocab_size=8))
        chief.start(model, lambda model: torch.optim.AdamW(model.parameters()), compile=False)
        assert chief.precision == chosen


def test_settings_that_cannot_be_read_name_no_precision(tmp_path: Path) -> None:
    assert recorded_precision(tmp_path) is None
    for text in ("", "[]", '{"settings": 3}', '{"settings": {"precision": "int8"}}'):
        (tmp_path / "settings.json").write_text(text)
        assert recorded_precision(tmp_path) is None


def test_a_few_steps_in_bf16_are_close_to_fp32(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cpu(monkeypatch, "AVX-512 BF16")
    losses = {}
    for name in ("fp32", "bf16"):
        train(run_settings(folder, f"few-{name}", steps=8, precision=name))
        lines = (folder / f"few-{name}" / "metrics.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line)["loss"] for line in lines]
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=5e-3)


def test_the_curve_of_500_steps_holds_the_bar() -> None:
    with CURVE.open() as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    assert [row["step"] for row in rows] == list(range(1, 501))
    assert rows[-1]["fp32"] < 0.7 * rows[0]["fp32"]  # it has learned
    means = {name: [sum(row[name] for row in rows[i : i + 10]) / 10 for i in range(0, 500, 10)] for name in rows[0]}
    assert means["bf16"] == pytest.approx(means["fp32"], rel=5e-3)
