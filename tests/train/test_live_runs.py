"""Runs that go on while others read them: a checkpoint that is removed meanwhile is no error, the next is read."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import gsa.pretrained
from gsa import GSAError
from gsa.infer.model import Model
from gsa.infer.text import TextEngine
from gsa.models import checkpoint as model_checkpoint
from gsa.models.checkpoint import load_model
from gsa.train import checkpoint, export, manifest
from gsa.train.checkpoint import prune, save_checkpoint
from gsa.train.export import export_checkpoint
from tests.models.cases import model

TOKENIZER = gsa.pretrained.folder("gsa-tiny")


def save(run: Path, step: int) -> None:
    """A checkpoint whose weights tell its step."""
    lm = model("gsa", vocab_size=4096)
    with torch.no_grad():
        lm.lm_head.weight.fill_(step)
    state = {"best": {"step": step, "loss": 1.0}}
    save_checkpoint(run, step, lm.config, {"model": lm.state_dict()}, state, tokenizer=TOKENIZER)


def step_of(run: Path) -> int:
    return int(load_model(run).lm_head.weight[0, 0])


READERS: dict[str, Callable[[Path, Path], object]] = {
    "load_model": lambda run, out: load_model(run),
    "Model": lambda run, out: Model.load(run),
    "TextEngine": lambda run, out: TextEngine.load(run),
    "export": lambda run, out: export_checkpoint(run, out, fail),
    "export --best": lambda run, out: export_checkpoint(run, out, fail, best=True),
}
# Where the run saves and removes: before a file is hashed, before the state, a config, the weights or a copy is read.
MOMENTS = [(manifest, "sha256"), (checkpoint, "read_json"), (model_checkpoint, "read_json"), (export, "read_file")]
MOMENTS += [(model_checkpoint, "load_weights"), (model_checkpoint, "safe_open"), (checkpoint, "load_weights")]


def fail(line: str) -> None:
    raise AssertionError(line)


@pytest.mark.parametrize("reader", READERS)
def test_a_checkpoint_that_is_removed_while_it_is_read(
    reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    run, step, met = tmp_path / "run", 0, 0
    for place, name in MOMENTS:
        step += 1
        save(run, step)
        function, newest = getattr(place, name), step

        def moving(*args: object, **options: object) -> object:
            nonlocal step
            if step == newest:  # noqa: B023  (called within this round)
                step += 1
                save(run, step)
                prune(run, 1, set())
            return function(*args, **options)  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(place, name, moving)
            READERS[reader](run, tmp_path / name / str(step))
        met += step > newest
    assert met >= 3
    assert step_of(run) == step


def test_what_is_broken_stays_an_error_and_tries_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    save(tmp_path, 1)
    tries, load = [], model_checkpoint.load_weights

    def moving(folder: Path, **options: str) -> object:
        tries.append(folder)
        save(tmp_path, len(tries) + 1)
        prune(tmp_path, 1, set())
        return load(folder, **options)

    with monkeypatch.context() as patch:
        patch.setattr(model_checkpoint, "load_weights", moving)
        with pytest.raises(GSAError, match=r"model\.safetensors"):
            load_model(tmp_path)
    assert len(set(tries)) == len(tries) == 20
    for path in tmp_path.rglob("model.safetensors"):
        path.write_bytes(b"")
    with pytest.warns(UserWarning, match="model.safetensors has 0 bytes"), pytest.raises(GSAError, match="no whole"):
        load_model(tmp_path)


_RUN = """
import sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.train.test_live_runs import save
from gsa.train.checkpoint import prune
run, step = Path(sys.argv[1]), 0
while True:
    step += 1
    save(run, step)
    prune(run, 1, set())
    print(step, flush=True)
    time.sleep(0.05)
"""


def test_a_run_that_saves_and_removes_all_the_time_can_be_read(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-c", _RUN, str(run)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        seen = [int(process.stdout.readline())]
        while seen[-1] < 20:
            seen.append(step_of(run))
        export_checkpoint(run, tmp_path / "out", fail)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert seen == sorted(seen)
    assert len(seen) > 3
