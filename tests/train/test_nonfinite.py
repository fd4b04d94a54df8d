"""A loss or gradient that is not finite is skipped, counted, explained, and in the end stops the run."""

import json
from pathlib import Path

import pytest
import torch

from gsa.errors import GSAError
from gsa.train.loop import Trainer
from gsa.train.run import train
from gsa.train.strategies import Strategy
from tests.train.runs import losses, prepared, run_settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    prepared(folder)
    return folder


def break_steps(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Puts a nan into a norm's weight for these steps only."""
    step = Trainer._step

    def broken(self: Trainer, *args: object) -> object:
        weight = self.strategy.model.model.layers[1].mlp_norm.weight
        kept = weight.detach().clone()
        if self.position.step in steps:
            with torch.no_grad():
                weight[3] = torch.nan
        try:
            return step(self, *args)  # type: ignore[arg-type]
        finally:
            if self.position.step - 1 in steps:
                with torch.no_grad():
                    weight.copy_(kept)

    monkeypatch.setattr(Trainer, "_step", broken)


def test_a_bad_step_is_skipped_and_counted(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_steps(monkeypatch, {4, 5})
    outcome = train(run_settings(folder, str(tmp_path / "run")))
    assert (outcome.step, outcome.skipped) == (12, 2)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["skipped"] for line in lines] == [0] * 4 + [1] + [2] * 7
    assert losses(tmp_path / "run")[-1] < 5.5


def test_too_many_in_a_row_stop_the_run_and_name_the_first_tensor(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_steps(monkeypatch, set(range(7, 100)))
    with pytest.raises(GSAError) as raised:
        train(run_settings(folder, str(tmp_path / "run"), steps=100, max_skipped=3))
    assert "3 steps in a row" in str(raised.value)
    assert "weight of model.layers.1.mlp_norm.weight" in str(raised.value)
    assert "step-00000009" in str(raised.value)  # weights had not changed since step 7
    report = json.loads((tmp_path / "run" / "nonfinite.json").read_text())
    assert report["step"] == 8
    assert report["first_by_process"][0]["nan"] == 1


def test_a_learning_rate_beyond_reason_ends_with_a_sentence(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(GSAError, match=r"not finite.*last good checkpoint is .*step-0"):
        train(run_settings(folder, str(tmp_path / "run"), steps=60, lr=1e30, save_every=1, warmup_steps=40))
    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        from safetensors.torch import load_file

        assert all(bool(x.isfinite().all()) for x in load_file(checkpoint / "model.safetensors").values())


def test_outputs_and_gradients_are_told_apart(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output * torch.inf

    start = Strategy.start

    def started(self: Strategy, *args: object, **options: object) -> None:
        start(self, *args, **options)  # type: ignore[arg-type]
        self.model.model.layers[0].mlp.down_proj.register_forward_hook(spoil)

    monkeypatch.setattr(Strategy, "start", started)
    with pytest.raises(GSAError, match=r"output of model.layers.0.mlp"):
        train(run_settings(folder, str(tmp_path / "run"), max_skipped=1))


def test_fp16_finds_its_scale(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gsa.train.loop.FIRST_LOSS_SCALE", 2.0**40)
    outcome = train(run_settings(folder, str(tmp_path / "run"), precision="fp16", steps=40))
    assert 5 < outcome.skipped < 35
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-00000040" / "state.json").read_text())
    assert state["loss_scale"] == 2.0 ** (40 - outcome.skipped)
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0]
