"""`torchrun -m gsa train` on two processes: the losses of one process, and checkpoints that either can go on from."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gsa.train.run import train
from tests.train.runs import final_weights, losses, options, prepared, run_settings, wait_for_steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, and a run of one process."""
    folder = tmp_path_factory.mktemp("runs")
    prepared(folder)
    threads = torch.get_num_threads()
    train(run_settings(folder, "one"))
    torch.set_num_threads(threads)
    return folder


def two_processes(folder: Path, out: Path, *launcher: str, **changes: object) -> None:
    """Trains on two processes of this machine."""
    recipe = folder / f"{out.name}.yaml"
    recipe.write_text(json.dumps(options(folder, str(out), **changes)))
    launch = launcher or ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [sys.executable, "-m", *launch, "-m", "gsa", "train", "--config", str(recipe)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout[done.stdout.index("{") :])["reason"] in ("finished", "stopped")


def assert_same_run(run: Path, one: Path) -> None:
    assert losses(run) == pytest.approx(losses(one), rel=1e-5)
    weights, expected = final_weights(run), final_weights(one)
    assert weights.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(weights[name], x, rtol=1e-4, atol=1e-5)


# Each launch takes many seconds. What the engines compute is compared in test_engines.py; here, one of them is enough
# for `make test`. Not FSDP2: now and then one of its processes aborts (seen twice, cause unknown).
@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_processes_train_as_one_and_go_on_as_one(folder: Path, tmp_path: Path, engine: str) -> None:
    run = tmp_path / engine
    # the schedule is that of 12 steps; a run that stops after 6 is made by keeping only the checkpoint of step 6
    two_processes(folder, run, engine=engine, micro_batch_size=1, keep_last=10)
    assert_same_run(run, folder / "one")
    forget_after(run, 6)
    train(run_settings(folder, str(run)))
    assert_same_run(run, folder / "one")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_what_one_process_began_two_go_on_with(folder: Path, tmp_path: Path, engine: str) -> None:
    run = tmp_path / engine
    train(run_settings(folder, str(run), keep_last=10))
    forget_after(run, 6)
    two_processes(folder, run, engine=engine)
    assert_same_run(run, folder / "one")


def forget_after(run: Path, step: int) -> None:
    """Takes a run back to a checkpoint."""
    for checkpoint in (run / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)


@pytest.mark.slow
def test_accelerate_launches_it_too(folder: Path, tmp_path: Path) -> None:
    launcher = ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1")
    two_processes(folder, tmp_path / "run", *launcher, device="cpu")
    assert_same_run(tmp_path / "run", folder / "one")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_trains_as_one_and_goes_on_as_one(folder: Path, tmp_path: Path, stage: int) -> None:
    run = tmp_path / "run"
    two_processes(folder, run, engine="deepspeed", zero_stage=stage, micro_batch_size=1, keep_last=10)
    assert_same_run(run, folder / "one")
    forget_after(run, 6)
    train(run_settings(folder, str(run)))
    assert_same_run(run, folder / "one")


@pytest.mark.slow
def test_a_signal_stops_all_processes_with_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(options(folder, str(tmp_path / "run"), steps=5000, save_every=10**6, json=False)))
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", *launcher, "-m", "gsa", "train", "--config", str(recipe)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_steps(process, tmp_path / "run")
    process.send_signal(signal.SIGTERM)  # torchrun hands it on
    _, err = process.communicate(timeout=60)
    assert "the same command goes on" in err
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
