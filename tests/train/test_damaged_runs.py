"""A run whose folder was damaged goes on to the same weights, or says what is wrong; it never just begins anew."""

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from gsa.errors import GSAError
from gsa.train.checkpoint import newest_checkpoint
from gsa.train.manifest import _text as manifest_text
from gsa.train.position import Outcome
from gsa.train.run import train
from gsa.train.settings import TrainSettings
from tests.examples import examples
from tests.train.runs import final_weights, prepared, run_settings, same_bits

STEPS, SAVED = 6, (2, 4)
SMALL = {
    "model_options": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_slots": 4},
    **{"length": 16, "batch_size": 2, "steps": STEPS, "eval_every": 2, "eval_rows": 1, "sample_tokens": 0},
    **{"save_every": 2, "keep_last": 3, "ema": 0.9},
}


@contextmanager
def hang_is_an_error() -> Iterator[None]:
    def hangs(*args: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Case:
    """A run that was stopped after its checkpoints 2 and 4, and what it becomes undisturbed."""

    def __init__(self, folder: Path):
        prepared(folder)
        self.folder, self.base = folder, folder / "base"
        train(self.settings(self.base))
        self.expected = final_weights(self.base)
        shutil.rmtree(self.base / "checkpoints" / f"step-{STEPS:08d}")

    def settings(self, run: Path) -> TrainSettings:
        return run_settings(self.folder, str(run), **SMALL)

    @contextmanager
    def copy(self) -> Iterator[Path]:
        run = self.folder / "run"
        shutil.copytree(self.base, run)
        try:
            yield run
        finally:
            shutil.rmtree(run)

    def resumed(self, run: Path) -> Outcome:
        """How a run ends that goes on."""
        with hang_is_an_error():
            outcome = train(self.settings(run))
        assert outcome.begin in SAVED
        assert same_bits(final_weights(run), self.expected)
        return outcome


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)  # nothing here depends on the disk, nor on speed
        patch.setattr("gsa.train.peak.matmul_peak", lambda *args, **options: 1e12)
        yield Case(tmp_path_factory.mktemp("damaged"))


def step(run: Path, number: int) -> Path:
    return run / "checkpoints" / f"step-{number:08d}"


def moved_behind_a_link(path: Path) -> None:
    place = path.with_name(f"moved-{path.name.replace('.', '-')}")  # which is not taken for weights
    os.rename(path, place)
    path.symlink_to(place)


def replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        make(path)

    return replace


REPLACED: dict[str, Callable[[Path], None]] = {
    "nothing": replaced(lambda path: None),
    "an empty file": replaced(Path.touch),
    "a folder": replaced(Path.mkdir),
    "a pipe": replaced(os.mkfifo),
    "a device": replaced(lambda path: path.symlink_to("/dev/zero")),
    "a link to nowhere": replaced(lambda path: path.symlink_to("nowhere")),
    "a loop of links": replaced(lambda path: path.symlink_to(path.name)),
    "a long link": replaced(lambda path: path.symlink_to("n" * 300)),
    "a link to it": moved_behind_a_link,
}


def rewrite(folder: Path, name: str, content: bytes) -> None:
    """Changes a file and the manifest with it, as nothing but intention does."""
    (folder / name).write_bytes(content)
    fields = json.loads((folder / "manifest.json").read_text())
    fields.pop("sha256")
    fields["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(manifest_text(fields))


def test_a_run_whose_checkpoints_are_links_goes_on_from_them(case: Case) -> None:
    with case.copy() as run:
        for number in SAVED:
            moved_behind_a_link(step(run, number))
        assert case.resumed(run).begin == 4
        # They count as others do: the oldest is removed with the next save, and what it leads to stays.
        settings = case.settings(run)
        shutil.rmtree(step(run, STEPS))
        train(type(settings)(**{**vars(settings), "keep_last": 1, "keep_best": False}))
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
            *("moved-step-00000002", "moved-step-00000004", "step-00000006")
        ]


@pytest.mark.parametrize("kind", [kind for kind in REPLACED if kind != "nothing"])
def test_a_checkpoint_in_whose_place_is_something_else(case: Case, kind: str) -> None:
    """The one before is found, unless it is a link to the checkpoint itself."""
    with case.copy() as run:
        REPLACED[kind](step(run, 4))
        assert case.resumed(run).begin == (4 if kind == "a link to it" else 2)
        assert os.path.lexists(run / "checkpoints" / "broken-step-00000004") == (kind != "a link to it")


@pytest.mark.parametrize("kind", REPLACED)
def test_a_file_in_whose_place_is_something_else(case: Case, kind: str) -> None:
    """It is damage: nothing waits for a pipe, and a loop of links does not stop the run."""
    for name in ("manifest.json", "state.json", "config.json", "model.safetensors", "tokenizer.json"):
        with case.copy() as run, hang_is_an_error():
            REPLACED[kind](step(run, 4) / name)
            found = newest_checkpoint(run, lambda line: None)
            assert found is not None
            assert found.step == (4 if kind == "a link to it" else 2), name


@pytest.mark.parametrize("name", [".step-mine", ".step-00000002.0123abcd", ".step-00000002.0123abcd.unfinished"])
def test_a_stray_hidden_file_or_link_does_not_stop_a_run(case: Case, name: str) -> None:
    with case.copy() as run:
        (run / "checkpoints" / name).touch()
        assert case.resumed(run).begin == 4
    with case.copy() as run:
        (run / "checkpoints" / name).symlink_to(step(run, 2))
        assert case.resumed(run).begin == 4
        assert step(run, 2).is_dir()


@pytest.mark.parametrize("kind", ["an empty file", "a pipe", "a link to nowhere", "a loop of links"])
def test_no_folder_of_checkpoints_is_told(case: Case, kind: str) -> None:
    with case.copy() as run:
        REPLACED[kind](run / "checkpoints")
        with pytest.raises(GSAError, match=r"checkpoints of .*: the folder cannot be read"):
            case.resumed(run)


def changed(state: dict[str, Any], keys: tuple[str, ...], value: object) -> bytes:
    inner = state
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    return json.dumps(state).encode()


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("skipped",), "3", "position: skipped must be a whole number, got '3'"),
        (("loss_scale",), None, "position: loss_scale must be a number, got None"),
        (("loss_scale",), float("nan"), "position: loss_scale must be finite"),
        (("loss_scale",), 0, "position: loss_scale must be above 0"),
        (("seconds",), [], "position: seconds must be a number"),
        (("best",), 3, "position: best must be names with values or none, got 3"),
        (("best",), {}, "best must have step and loss"),
        (("best", "loss"), "low", "best: loss must be a number, got 'low'"),
        (("eval", "step"), {}, "eval: step must be a whole number"),
        (("settings",), None, "settings must be names with values, got None"),
        (("settings", "precision"), 3, "settings: precision must be a name, got 3"),
        (("settings", "ema"), "x", "settings: ema must be a number or none"),
        (("model",), [], "model must be names with values"),
        (("model", "hidden_size"), "16", "model: hidden_size must be a whole number, got '16'"),
        (("data",), 3, "data must have the fingerprint"),
        (("data", "fingerprint"), 3, "data must have the fingerprint"),
    ],
)
def test_a_state_with_wrong_types_is_broken(
    case: Case, keys: tuple[str, ...], value: object, message: str, capsys: pytest.CaptureFixture
) -> None:
    with case.copy() as run:
        folder = step(run, 4)
        rewrite(folder, "state.json", changed(json.loads((folder / "state.json").read_text()), keys, value))
        assert case.resumed(run).begin == 2
        assert f"step-00000004: state.json: {message}" in capsys.readouterr().err


@pytest.mark.parametrize("group", ["model", "optimizer", "ema"])
def test_tensors_that_are_not_the_models_are_broken(case: Case, group: str, capsys: pytest.CaptureFixture) -> None:
    """An optimiser without tensors once was no optimiser, and the run went on with other numbers."""
    prefix = "exp_avg_sq." if group == "optimizer" else ""
    name = f"{prefix}model.embeddings.weight"
    damages: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
        "is missing": dict.clear,
        f"tensor {name} is missing": lambda tensors: tensors.pop(name),
        f"tensor {name} is [3]": lambda tensors: tensors.update({name: torch.zeros(3)}),
        f"tensor {name} is torch.int32": lambda tensors: tensors.update({name: tensors[name].int()}),
        "tensor other is not part of the model": lambda tensors: tensors.update(other=torch.zeros(())),
    }
    if group == "optimizer":
        damages["tensor step is missing"] = lambda tensors: tensors.pop("step")
        damages["tensor step is [2], expected []"] = lambda tensors: tensors.update(step=torch.zeros(2))
    for message, damage in damages.items():
        with case.copy() as run:
            path = step(run, 4) / f"{group}.safetensors"
            tensors = load_file(path)
            damage(tensors)
            save_file(tensors, run / "other")
            rewrite(step(run, 4), path.name, (run / "other").read_bytes())
            assert case.resumed(run).begin == 2
            said = capsys.readouterr().err
            assert f"step-00000004: {group}: " in said
            assert message in said


# Anything.


def files(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())


@examples(60)
@given(data=st.data())
def test_any_damage_to_one_file_ends_with_the_same_weights_or_an_error(case: Case, data: st.DataObject) -> None:
    with case.copy() as run:
        path = run / data.draw(st.sampled_from(files(run)))
        content = path.read_bytes()
        kind = data.draw(st.sampled_from([*REPLACED, "cut", "changed", "swapped", "other bytes"]))
        if kind in REPLACED:
            REPLACED[kind](path)
        elif kind == "cut":
            path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
        elif kind == "changed":
            at, by = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(1, 255))
            path.write_bytes(content[:at] + bytes([content[at] ^ by]) + content[at + 1 :])
        elif kind == "swapped":
            other = run / data.draw(st.sampled_from(files(run)))
            path.write_bytes(other.read_bytes())
            other.write_bytes(content)
        else:
            path.write_bytes(data.draw(st.binary(max_size=40)))
        with suppress(GSAError):
            case.resumed(run)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


def kind_of(value: object) -> type:
    return float if type(value) is int else type(value)


@examples(60)
@given(data=st.data(), value=JSON)
def test_any_other_type_in_the_state_ends_with_the_same_weights_or_an_error(
    case: Case, data: st.DataObject, value: object
) -> None:
    with case.copy() as run:
        folder = step(run, data.draw(st.sampled_from(SAVED)))
        state = inner = json.loads((folder / "state.json").read_text())
        keys: list[str] = []
        while isinstance(inner, dict) and inner and (not keys or data.draw(st.booleans())):
            keys.append(data.draw(st.sampled_from(sorted(inner))))
            inner = inner[keys[-1]]
        if kind_of(inner) is kind_of(value):
            value = None if inner is not None else {}
        rewrite(folder, "state.json", changed(state, tuple(keys), value))
        with suppress(GSAError):
            case.resumed(run)
