"""Metrics and progress: what is written is strict, survives kills and resumes; what is shown fits where it is shown."""

import errno
import io
import json
import math
import os
import sys
import types
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gsa.errors import GSAError
from gsa.train import progress as progress_module
from gsa.train.metrics import Metrics
from gsa.train.position import Position
from gsa.train.progress import Progress, clock


def fail(line: str) -> None:
    raise AssertionError(line)


def metrics(
    run: Path,
    resume_step: int = 0,
    tensorboard: bool = False,
    wandb: str | None = None,
    say: Callable[[str], None] = fail,
) -> Metrics:
    return Metrics(run, resume_step=resume_step, tensorboard=tensorboard, wandb=wandb, settings={"lr": 0.1}, say=say)


def written(run: Path, steps: range, resume_step: int = 0, **options: Any) -> None:
    with metrics(run, resume_step, **options) as writer:
        for step in steps:
            writer.write(step, {"loss": 10.0 / step})


def test_every_step_is_a_line_of_json_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with metrics(tmp_path / "new" / "run") as writer:
        for step in (1, 2):
            writer.write(step, {"loss": 2.5, "skipped": 3, "note": 'a "quote"\nand a line'})
            lines = (tmp_path / "new" / "run" / "metrics.jsonl").read_text().splitlines()
            assert len(lines) == step
            assert json.loads(lines[-1]) == {
                "step": step,
                "loss": 2.5,
                "skipped": 3,
                "note": 'a "quote"\nand a line',
            }


def test_numbers_that_are_not_finite_are_null_for_strict_readers(tmp_path: Path) -> None:
    with metrics(tmp_path) as writer:
        writer.write(1, {"loss": math.nan, "grad_norm": math.inf, "lr": -math.inf})

    def refuse(word: str) -> None:
        raise AssertionError(word)

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line == {"step": 1, "loss": None, "grad_norm": None, "lr": None}


def test_a_resumed_run_leaves_the_file_of_one_that_was_never_interrupted(tmp_path: Path) -> None:
    written(tmp_path / "whole", range(1, 9))
    written(tmp_path / "cut", range(1, 7))
    path = tmp_path / "cut" / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 7, "lo')  # killed while writing
    written(tmp_path / "cut", range(5, 9), resume_step=4)
    assert path.read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    assert [entry.name for entry in (tmp_path / "cut").iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("torn", [b"{", b'{"step": 3, "loss": 1.0}', b"\0" * 40, b'\xff\n{"st', b"[3]\n"])
def test_a_torn_end_is_dropped(tmp_path: Path, torn: bytes) -> None:
    """Also a whole object without its newline: what would follow on the same line."""
    written(tmp_path, range(1, 3))
    path = tmp_path / "metrics.jsonl"
    before = path.read_bytes()
    path.write_bytes(before + torn)
    written(tmp_path, range(0), resume_step=5)
    assert path.read_bytes() == before


def test_a_kill_while_lines_are_dropped_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, range(1, 9))
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def kill(*names: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", kill)
    with pytest.raises(KeyboardInterrupt):
        metrics(tmp_path, resume_step=4)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "junk", [b'{"loss": 3}\n', b"\n", b"\xff\n", b"[" * 5000 + b"\n", b"1" * 5000 + b"\n", b'{"step": "2"}\n']
)
def test_damage_in_the_middle_is_told_and_kept_under_another_name(tmp_path: Path, junk: bytes) -> None:
    """What was measured of earlier steps is not worth that a run stops."""
    written(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = lines[0] + junk + lines[2]
    said: list[str] = []
    for kept in ("broken-metrics.jsonl", "broken-metrics.jsonl.2"):
        path.write_bytes(damaged)
        with metrics(tmp_path, resume_step=3, say=said.append) as writer:
            writer.write(4, {"loss": 1})
        assert "metrics.jsonl: line 2 is not a JSON object with a step; the file is kept as " + kept in said.pop()
        assert (tmp_path / kept).read_bytes() == damaged
        assert [json.loads(line)["step"] for line in path.read_bytes().splitlines()] == [1, 3, 4]
    with metrics(tmp_path, resume_step=4):
        pass


def test_a_pipe_in_place_of_the_file_is_told_and_kept(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    said: list[str] = []
    with metrics(tmp_path, say=said.append) as writer:
        writer.write(1, {"loss": 1})
    assert len(said) == 1
    assert "metrics.jsonl is not a file; it is renamed to broken-metrics.jsonl" in said[0]
    assert (tmp_path / "broken-metrics.jsonl").is_fifo()
    assert (tmp_path / "metrics.jsonl").is_file()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(GSAError, match=r"cannot write .*metrics.jsonl"):
        metrics(tmp_path / "file")


class Disk(io.RawIOBase):
    """A file on a disk that takes few bytes at a time, and only so many."""

    def __init__(self, room: int):
        self.room, self.content = room, b""

    def write(self, data: Any) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = bytes(data[: min(7, self.room)])
        self.room -= len(taken)
        self.content += taken
        return len(taken)


def test_lines_are_whole_or_an_error(tmp_path: Path) -> None:
    with metrics(tmp_path) as writer:
        writer._file.close()
        writer._file = disk = Disk(room=100)
        writer.write(1, {"loss": 1.25, "lr": 0.001})
        assert json.loads(disk.content) == {"step": 1, "loss": 1.25, "lr": 0.001}
        with pytest.raises(GSAError, match=r"metrics: cannot write .*metrics.jsonl: No space left on device"):
            writer.write(2, {"note": "x" * 100})


def points(run: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return {name: [(point.step, point.value) for point in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_has_each_step_once_after_a_resume(tmp_path: Path) -> None:
    with metrics(tmp_path, tensorboard=True) as writer:
        for step in range(1, 7):
            writer.write(step, {"loss": float(step), "phase": "warm-up"})
        assert [step for step, _ in points(tmp_path)["loss"]] == [1, 2, 3, 4, 5, 6]  # before it is closed
    with metrics(tmp_path, resume_step=4, tensorboard=True) as writer:
        for step in range(5, 9):
            writer.write(step, {"loss": 10.0 + step})
    assert points(tmp_path) == {"loss": [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), *((i, 10.0 + i) for i in range(5, 9))]}


class FakeRun:
    def __init__(self, calls: list[tuple[str, Any]]):
        self.calls = calls

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.calls.append(("define", (name, step_metric)))

    def log(self, values: dict[str, Any]) -> None:
        self.calls.append(("log", values))

    def finish(self, exit_code: int) -> None:
        self.calls.append(("finish", exit_code))


@pytest.fixture
def wandb_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What is asked of Weights & Biases, which is not installed."""
    calls: list[tuple[str, Any]] = []
    module = types.ModuleType("wandb")

    def init(**options: Any) -> FakeRun:
        if options["project"] == "closed":
            raise module.Error("permission denied")
        calls.append(("init", options))
        return FakeRun(calls)

    module.init, module.Error = init, type("Error", (RuntimeError,), {})
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def test_weights_and_biases_sees_one_run_however_often_it_is_resumed(
    tmp_path: Path, wandb_calls: list[tuple[str, Any]]
) -> None:
    written(tmp_path, range(1, 3), wandb="books")
    written(tmp_path, range(2, 3), resume_step=1, wandb="books")
    written(tmp_path / "other", range(0), wandb="books")
    inits = [options for name, options in wandb_calls if name == "init"]
    assert [options["resume"] for options in inits] == ["allow"] * 3
    assert all(options["config"] == {"lr": 0.1} and options["project"] == "books" for options in inits)
    assert inits[0]["id"] == inits[1]["id"] != inits[2]["id"]
    logs = [values for name, values in wandb_calls if name == "log"]
    assert logs == [{"step": 1, "loss": 10.0}, {"step": 2, "loss": 5.0}, {"step": 2, "loss": 5.0}]
    assert ("define", ("*", "step")) in wandb_calls
    assert wandb_calls[-1] == ("finish", 0)


def test_weights_and_biases_learns_of_a_failure(tmp_path: Path, wandb_calls: list[tuple[str, Any]]) -> None:
    with pytest.raises(GSAError, match="stop"), metrics(tmp_path, wandb="books"):
        raise GSAError("stop")
    assert wandb_calls[-1] == ("finish", 1)


def test_weights_and_biases_that_refuses_or_forgot_its_id_is_an_error(
    tmp_path: Path, wandb_calls: list[tuple[str, Any]]
) -> None:
    with pytest.raises(GSAError, match="wandb cannot start a run in project 'closed': permission denied"):
        metrics(tmp_path, wandb="closed")
    (tmp_path / "wandb.json").write_text("{}")
    with pytest.raises(GSAError, match=r"wandb.json has no id"):
        metrics(tmp_path, wandb="books")


@pytest.mark.parametrize(("module", "options"), [("torch.utils.tensorboard", {"tensorboard": True}), ("wandb", {})])
def test_what_is_not_installed_is_said_before_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, options: dict[str, Any]
) -> None:
    written(tmp_path, range(1, 4))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(GSAError, match=r"pip install 'gsa-lm\[train\]'"):
        metrics(tmp_path, **(options or {"wandb": "books"}))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_folder_named_wandb_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(GSAError, match="wandb is wanted, but cannot be imported"):
        metrics(tmp_path, wandb="books")
    sys.modules.pop("wandb", None)


STEP: dict[str, Any] = {
    "loss": 2.0,
    "lr": 3e-4,
    "tokens_per_second": 12345.0,
    "peak_share": 0.42,
    "grad_norm": 1.5,
    "skipped": 0,
}


class Clock:
    """A clock that tests turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 100.0
        monkeypatch.setattr(progress_module.time, "monotonic", lambda: self.now)


def log() -> Console:
    """What stands in for a file or a pipe."""
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def told(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_terminal_there_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """First step, every ten seconds, evaluations and last step; nothing that only a terminal understands."""
    console, hands = log(), Clock(monkeypatch)
    with Progress(100, 0, console=console) as progress:
        for step in range(1, 101):
            hands.now += 1.0
            progress.update(step, **STEP, eval_loss=1.75 if step == 34 else None)
    lines = told(console).splitlines()
    steps = [int(line.split()[1].split("/")[0]) for line in lines]
    assert steps == [1, 11, 21, 31, 34, 44, 54, 64, 74, 84, 94, 100]
    expected = "step 44/100  0:00:56 left  smoothed loss 2.0000  12.3K tokens/s  42% of peak  lr 3.00e-04  norm 1.50"
    assert lines[5] == expected  # on one line, however narrow the console
    assert "eval loss 1.7500" in lines[4]
    assert "left" not in lines[-1]
    assert all(character.isprintable() or character == "\n" for character in told(console))


def test_time_left_follows_recent_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    console, hands = log(), Clock(monkeypatch)
    with Progress(1000, 500, console=console) as progress:
        for step in range(501, 801):
            hands.now += 100.0 if step < 700 else 11.0  # slow at first
            progress.update(step, **STEP)
    assert told(console).splitlines()[0].startswith("step 501/1000  13:51:40 left")  # 499 steps of 100 s
    assert told(console).splitlines()[-1].startswith("step 800/1000  0:36:40 left")  # 200 of 11 s


def test_the_shown_loss_is_smooth_and_survives_a_bad_step() -> None:
    position = Position()
    for loss, smoothed in ((2.0, 2.0), (math.nan, 2.0), (1.0, 1.9)):
        position.note_loss(loss)
        assert position.smoothed_loss == pytest.approx(smoothed)
    console = log()
    with Progress(3, 0, console=console) as progress:
        progress.update(1, **STEP)
        progress.update(2, **{**STEP, "skipped": 1}, eval_loss=1.0)
    first, second = told(console).splitlines()
    assert "skipped" not in first
    assert "smoothed loss 2.0000" in second
    assert "1 skipped" in second


def test_a_checkpoint_without_a_smoothed_loss_is_read() -> None:
    state = {name: value for name, value in asdict(Position(step=3)).items() if name != "smoothed_loss"}
    assert Position.read(state) == Position(step=3)


def test_a_loss_that_has_grown_is_no_damage() -> None:
    grown = {"step": 3, "loss": 690.0, "perplexity": math.exp(690.0), "bits_per_byte": 300.0}
    assert Position.read({**asdict(Position(step=3)), "eval": grown}).eval == grown


def test_a_terminal_has_a_live_bar_with_notes_above_it() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=140, color_system=None, legacy_windows=False)
    with Progress(200, 20, console=console) as progress:
        progress.note("saved [checkpoint] step-20")
        progress.update(50, **{**STEP, "skipped": 2})
        progress.update(200, **STEP, eval_loss=1.5)
    shown = told(console)
    assert "\x1b[" in shown  # the bar moves the cursor
    for part in ("20/200", "200/200", "saved [checkpoint] step-20\n", "loss 2.0000", "12.3K tokens/s", "42% of peak"):
        assert part in shown
    assert "step 200: eval loss 1.5000\n" in shown
    assert shown.endswith("\x1b[?25h")  # the cursor is back


@pytest.mark.parametrize("terminal", [False, True])
def test_what_a_model_writes_does_not_drive_the_terminal(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80, color_system=None, legacy_windows=False)
    with Progress(2, 0, console=console) as progress:
        progress.note("step 1: Alice\n\tsaid \x1b[2J\x07\u202e")
    assert "said \\x1b[2J\\x07\\u202e\n" in told(console)
    assert "\x1b[2J" not in told(console)


def test_a_narrow_terminal_still_shows_step_time_and_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    console = Console(file=io.StringIO(), force_terminal=True, width=44, color_system=None, legacy_windows=False)
    with Progress(200, 0, console=console) as progress:
        progress.update(50, **STEP)
    assert "50/200  0:00:00 left  smoothed loss 2.0000" in told(console)


def test_other_ranks_are_silent(capfd: pytest.CaptureFixture[str]) -> None:
    with Progress(10, 0, quiet=True) as progress:
        progress.note("nothing")
        progress.update(10, **STEP, eval_loss=1.0)
    assert capfd.readouterr() == ("", "")


def test_progress_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with Progress(10, 0) as progress:
        progress.note("begin")
        progress.update(10, **STEP)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("begin\nstep 10/10  smoothed loss 2.0000")


def test_times_in_words() -> None:
    assert [clock(seconds) for seconds in (0.4, 59.6, 3725, 100000)] == ["0:00:00", "0:01:00", "1:02:05", "1 d 3:46:40"]
