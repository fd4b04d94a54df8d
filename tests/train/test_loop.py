"""A run goes the same way however often it is interrupted, and says what went wrong when something did."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gsa.errors import GSAError
from gsa.models.checkpoint import load_model
from gsa.train.loop import Trainer
from gsa.train.run import preview, train
from gsa.train.settings import TrainSettings
from tests.train.runs import (
    MODEL,
    final_weights,
    losses,
    options,
    prepared,
    run_settings,
    same_bits,
    use_cpu,
    wait_for_steps,
)

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    prepared(folder)
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """A run of 12 steps without interruption."""
    threads = torch.get_num_threads()
    train(run_settings(folder, "whole"))
    torch.set_num_threads(threads)
    return folder / "whole"


def interrupt(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Lets the step of this number break off."""
    step = Trainer._step

    def broken(self: Trainer, *args: object) -> object:
        if self.position.step == at:
            raise RuntimeError("power cut")
        return step(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "_step", broken)


def test_training_learns_and_leaves_a_model(whole: Path) -> None:
    values = losses(whole)
    assert len(values) == 12
    assert values[-1] < values[0] - 0.3
    newest = sorted((whole / "checkpoints").iterdir())[-1]
    assert newest.name == "step-00000012"
    assert load_model(newest).config.hidden_size == 32
    assert json.loads((whole / "settings.json").read_text())["settings"]["lr"] == 3e-3
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval_loss" in line] == [4, 8, 12]


def test_no_step_is_told_to_be_faster_than_the_machine(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the machine's rate was measured while something else took nearly all of it."""
    monkeypatch.setattr("gsa.train.peak.matmul_peak", lambda device, dtype: 1.0)
    train(run_settings(folder, str(tmp_path / "run"), steps=3))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    assert all(0 < line["peak_share"] <= 1 for line in lines)


def test_a_run_and_its_estimate_watch_whether_other_processes_want_the_cores(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the mixer: torch's threads are to sleep soon then."""
    watched: list[bool] = []
    monkeypatch.setattr("gsa.ops.native.library.unavailable", lambda device: None)
    monkeypatch.setattr("gsa.ops.native.library.watch_crowd", lambda: watched.append(True))
    settings = run_settings(folder, str(tmp_path / "run"), steps=3)
    preview(settings)
    assert watched == [True]
    train(settings)
    assert watched == [True, True]


@pytest.mark.parametrize("at", [1, 3, 7, 11])
def test_an_interrupted_run_ends_with_the_same_bits(
    folder: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    settings = run_settings(folder, str(tmp_path / "run"))
    with monkeypatch.context() as broken:
        interrupt(broken, at)
        with pytest.raises(RuntimeError, match="power cut"):
            train(settings)
    outcome = train(settings)
    assert (outcome.begin, outcome.step) == (at - at % 3 if at < 8 else 9, 12)  # saved at 3, 4 (the best), 6, ...
    assert same_bits(final_weights(tmp_path / "run"), final_weights(whole))
    assert losses(tmp_path / "run") == losses(whole)


def test_an_interrupted_run_draws_the_noise_it_would_have_drawn(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settings(out: str) -> TrainSettings:
        routed = {**MODEL, "router": "sigmoid", "routed_slots": 2}
        return run_settings(folder, str(tmp_path / out), steps=6, model_options=routed)

    train(settings("whole"))
    with monkeypatch.context() as broken:
        interrupt(broken, 5)
        with pytest.raises(RuntimeError, match="power cut"):
            train(settings("run"))
    assert train(settings("run")).begin == 4
    assert same_bits(final_weights(tmp_path / "run"), final_weights(tmp_path / "whole"))


@pytest.mark.parametrize(("steps", "kills"), [(6, 2), pytest.param(40, 20, marks=pytest.mark.slow)])
def test_a_run_killed_at_random_moments_ends_with_the_same_bits(
    folder: Path, tmp_path: Path, steps: int, kills: int
) -> None:
    train(run_settings(folder, str(tmp_path / "whole"), steps=steps))
    (tmp_path / "settings.json").write_text(json.dumps(options(folder, str(tmp_path / "run"), steps=steps)))
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.killed", str(tmp_path / "settings.json"), "0", str(kills)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    begins = json.loads(done.stdout)
    assert len(begins) > kills // 4
    assert begins == sorted(begins)
    assert len(set(begins)) > kills // 6  # it went on, and did not begin anew
    assert same_bits(final_weights(tmp_path / "run"), final_weights(tmp_path / "whole"))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_checkpoint_is_said_and_the_one_before_is_used(
    folder: Path,
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    damage: str,
) -> None:
    settings = run_settings(folder, str(tmp_path / "run"), json=False)
    with monkeypatch.context() as broken:
        interrupt(broken, 10)
        with pytest.raises(RuntimeError):
            train(settings)
    newest = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[-1]
    file = newest / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif damage == "truncate":
        file.write_bytes(content[:-100])
    else:
        file.unlink()
    assert 0 < train(settings).begin < int(newest.name.removeprefix("step-"))
    assert "optimizer.safetensors" in capsys.readouterr().err
    assert same_bits(final_weights(tmp_path / "run"), final_weights(whole))


@pytest.mark.parametrize("micro", [1, 2])
def test_accumulation_gives_the_same_losses(folder: Path, whole: Path, tmp_path: Path, micro: int) -> None:
    train(run_settings(folder, str(tmp_path / "run"), micro_batch_size=micro))
    assert losses(tmp_path / "run") == pytest.approx(losses(whole), rel=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"lr": 1e-3},
        {"min_lr": 1e-3},
        {"warmup_steps": 5},
        {"warmup_steps": None, "warmup_tokens": 1280},
        {"weight_decay": 0.5},
        {"weight_decay": 0.5, "decay_all": True},
        {"beta1": 0.5},
        {"beta2": 0.5},
        {"eps": 1e-2},
        {"clip": 0.01},
        {"clip": None},
        {"seed": 1},
        {"reset_at_documents": False},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"length": 32},
        {"batch_size": 2},
    ],
    ids=str,
)
def test_every_setting_changes_the_run(
    folder: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object]
) -> None:
    use_cpu(monkeypatch, "AVX-512 BF16")  # bf16 is right on every CPU, but refused where it is slow
    train(run_settings(folder, str(tmp_path / "run"), **change))
    found = losses(tmp_path / "run")
    assert found != losses(whole)
    assert found[-1] < 5.6
    if change.get("decay_all"):
        train(run_settings(folder, str(tmp_path / "some"), weight_decay=0.5))
        assert found != losses(tmp_path / "some")


@pytest.mark.parametrize("change", [{"gradient_checkpointing": True}, {"workers": 2}])
def test_what_changes_only_the_cost_changes_no_loss(
    folder: Path, whole: Path, tmp_path: Path, change: dict[str, object]
) -> None:
    train(run_settings(folder, str(tmp_path / "run"), **change))
    assert losses(tmp_path / "run") == pytest.approx(losses(whole), rel=1e-5)


@pytest.mark.slow
def test_a_compiled_run_has_the_same_losses(folder: Path, whole: Path, tmp_path: Path) -> None:
    train(run_settings(folder, str(tmp_path / "run"), compile=True))
    assert losses(tmp_path / "run") == pytest.approx(losses(whole), rel=1e-4)


def test_tokens_and_epochs_are_steps(folder: Path, tmp_path: Path) -> None:
    outcome = train(run_settings(folder, str(tmp_path / "a"), steps=None, tokens=1000))
    assert (outcome.step, outcome.tokens) == (4, 1024)
    rows = 52  # about 53 KB of text in rows of 1024
    outcome = train(run_settings(folder, str(tmp_path / "b"), steps=None, epochs=0.5, length=1024, batch_size=2))
    assert outcome.step == pytest.approx(rows / 4, abs=2)


def test_the_average_of_weights_is_kept_resumed_and_evaluated(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(run_settings(folder, str(tmp_path / "whole"), ema=0.8))
    settings = run_settings(folder, str(tmp_path / "run"), ema=0.8)
    with monkeypatch.context() as broken:
        interrupt(broken, 7)
        with pytest.raises(RuntimeError):
            train(settings)
    assert train(settings).begin > 0
    newest, other = (sorted((tmp_path / name / "checkpoints").glob("step-*"))[-1] for name in ("run", "whole"))
    assert (newest / "ema.safetensors").read_bytes() == (other / "ema.safetensors").read_bytes()
    assert (newest / "ema.safetensors").read_bytes() != (newest / "model.safetensors").read_bytes()


def test_patience_stops_early_and_the_best_is_kept(folder: Path, tmp_path: Path) -> None:
    outcome = train(
        run_settings(
            folder,
            str(tmp_path / "run"),
            steps=200,
            lr=0.3,
            min_lr=0.3,
            eval_every=2,
            patience=2,
            keep_last=1,
            clip=None,
        )
    )
    assert outcome.reason == "early"
    assert outcome.best is not None
    assert outcome.best["step"] < outcome.step
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {f"step-{int(outcome.best['step']):08d}", f"step-{outcome.step:08d}"}


def test_going_on_needs_the_same_model_data_and_batches(folder: Path, whole: Path) -> None:
    for change, message in (
        ({"model_options": {"hidden_size": 32, "num_hidden_layers": 3}}, "another model .*num_hidden_layers"),
        ({"data": str(folder / "eval")}, "another data"),
        ({"batch_size": 8}, "run with batch_size 4, now it is 8: choose another out"),
        ({"seed": 3}, "run with seed 0, now it is 3"),
    ):
        with pytest.raises(GSAError, match=message):
            train(run_settings(folder, "whole", **change))


def test_a_finished_run_stays_as_it_is_and_can_be_prolonged(folder: Path, tmp_path: Path) -> None:
    settings = run_settings(folder, str(tmp_path / "run"))
    train(settings)
    before = final_weights(tmp_path / "run")
    assert train(settings).step == 12
    assert same_bits(before, final_weights(tmp_path / "run"))
    assert train(dataclasses.replace(settings, steps=14)).step == 14
    assert len(losses(tmp_path / "run")) == 14


def test_two_processes_cannot_train_in_one_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer._step

    def again(self: Trainer, *args: object) -> object:
        with pytest.raises(GSAError, match="another process is at work on"):
            train(run_settings(folder, str(tmp_path / "run")))
        return step(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "_step", again)
    train(run_settings(folder, str(tmp_path / "run"), steps=2))


def test_finetuning_starts_from_the_weights(folder: Path, whole: Path, tmp_path: Path) -> None:
    newest = sorted((whole / "checkpoints").iterdir())[-1]
    train(run_settings(folder, str(tmp_path / "run"), model=str(newest), model_options={}, warmup_steps=0, lr=1e-3))
    assert losses(tmp_path / "run")[0] < losses(whole)[2]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_saves_and_the_same_command_goes_on(
    folder: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    recipe = tmp_path / "recipe.yaml"
    changes = {"json": False, "steps": 5000, "save_every": 10**6, "workers": 2}
    recipe.write_text(json.dumps(options(folder, str(tmp_path / "run"), **changes)))
    command = [sys.executable, "-m", "gsa", "train", "--config", str(recipe)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for_steps(process, tmp_path / "run")
    os.killpg(process.pid, number)  # as a terminal does: to the workers too
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert f"stopped by {number.name}" in err
    assert "stopping after this step" in err
    assert "the same command goes on" in err
    assert "forward, backward and optimiser" in out
    saved = json.loads((sorted((tmp_path / "run" / "checkpoints").iterdir())[-1] / "state.json").read_text())["step"]
    outcome = train(run_settings(folder, str(tmp_path / "run"), steps=saved + 2, save_every=10**6))
    assert (outcome.begin, outcome.step) == (saved, saved + 2)


def test_a_wish_to_stop_ends_the_step_in_which_it_came(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = Trainer._loss

    def interrupted(self: Trainer, *args: object) -> torch.Tensor:
        if self.position.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "_loss", interrupted)
    outcome = train(run_settings(folder, str(tmp_path / "run")))
    assert (outcome.reason, outcome.signal, outcome.step) == ("stopped", signal.SIGTERM, 5)


def test_a_killed_run_lets_go_of_its_folder_although_workers_live_on(folder: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(options(folder, str(tmp_path / "run"), steps=5000, workers=2)))
    process = subprocess.Popen([sys.executable, "-m", "gsa", "train", "--config", str(recipe)])
    wait_for_steps(process, tmp_path / "run")
    process.kill()
    process.wait()
    assert train(run_settings(folder, str(tmp_path / "run"), steps=5)).begin > 0


def test_a_kill_at_the_very_first_file_leaves_a_folder_that_can_be_used(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".settings.json.unfinished").touch()
    assert train(run_settings(folder, str(tmp_path / "run"), steps=2)).step == 2


def test_changed_settings_begin_anew_where_they_must(folder: Path, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    train(run_settings(folder, run, steps=4))
    train(run_settings(folder, run, steps=6, precision="fp16", eval_rows=2, eval_every=100))
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-00000006" / "state.json").read_text())
    assert state["loss_scale"] > 1
    assert state["best"]["step"] == 6  # another evaluation cannot be compared
    train(run_settings(folder, run, steps=7))
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-00000007" / "state.json").read_text())
    assert state["loss_scale"] == 1


def test_an_evaluation_that_is_not_finite_is_never_the_best(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gsa.train import loop

    evaluate, calls = loop.evaluate, []

    def spoilt(*args: object) -> dict[str, float]:
        calls.append(1)
        return evaluate(*args) if len(calls) > 1 else {"loss": float("nan"), "perplexity": 1.0, "bits_per_byte": 1.0}

    monkeypatch.setattr(loop, "evaluate", spoilt)
    outcome = train(run_settings(folder, str(tmp_path / "run")))
    assert outcome.best is not None
    assert outcome.best["step"] == 12


def test_a_disk_without_room_is_told_before_the_first_step(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gsa.train.folder.free_bytes", lambda path: 1_000_000)
    with pytest.raises(GSAError, match=r"4 checkpoints of .* are to come, the disk of .* has .* free"):
        train(run_settings(folder, str(tmp_path / "run")))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
