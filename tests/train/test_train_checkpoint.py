"""Checkpoints of training: whatever is killed, damaged or full, what is read back is whole and the newest there is."""

import errno
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from torch import Tensor

from gsa.errors import GSAError
from gsa.models import LM, ModelConfig
from gsa.models.checkpoint import load_config, load_model
from gsa.train.checkpoint import (
    BrokenCheckpoint,
    Checkpoint,
    checkpoint_bytes,
    checkpoints,
    clean,
    newest_checkpoint,
    prune,
    read_checkpoint,
    save_checkpoint,
)
from gsa.train.manifest import _text as manifest_text
from tests.examples import examples

CONFIG = ModelConfig(hidden_size=16, num_hidden_layers=1, vocab_size=20, num_attention_heads=2, num_slots=4)
Groups = dict[str, dict[str, Tensor]]
FSYNC = os.fsync


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kill or a damage leaves is seen without the disk, which may be busy; one test below syncs."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@cache
def groups(seed: int, config: ModelConfig = CONFIG) -> Groups:
    torch.manual_seed(seed)
    weights = LM(config).state_dict()
    average = {name: x + 1 for name, x in weights.items()}
    if config.tie_word_embeddings:
        average["lm_head.weight"] = average["model.embeddings.weight"]
    moments = {f"{name}.exp_avg": torch.randn_like(x) for name, x in weights.items()}
    return {"model": weights, "optimizer": {**moments, "step": torch.tensor(seed)}, "ema": average}


def state(seed: int) -> dict:
    return {"tokens": seed * 1000, "best": {"step": 1, "loss": 0.1 + 0.2}, "eval": None}


def save(run: Path, step: int, seed: int | None = None, **options: object) -> Path:
    seed = step if seed is None else seed
    return save_checkpoint(run, step, CONFIG, groups(seed), state(seed), **options)


def is_of(checkpoint: Checkpoint | None, step: int, seed: int | None = None) -> bool:
    """Whether a checkpoint is, to the bit, what `save` of these has written."""
    seed = step if seed is None else seed
    if checkpoint is None or checkpoint.step != step or checkpoint.state != {**state(seed), "step": step}:
        return False
    read = {group: checkpoint.tensors(group) for group in checkpoint.groups}
    expected = groups(seed)
    return read.keys() == expected.keys() and all(
        read[group].keys() == named.keys()
        and all(torch.equal(read[group][name], x) and read[group][name].dtype == x.dtype for name, x in named.items())
        for group, named in expected.items()
    )


def fail(line: str) -> None:
    raise AssertionError(line)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    folder = save(tmp_path, 120)
    assert folder == tmp_path / "checkpoints" / "step-00000120"
    assert {path.name for path in folder.iterdir()} == {
        *("config.json", "model.safetensors", "optimizer.safetensors", "ema.safetensors"),
        *("state.json", "manifest.json"),
    }
    checkpoint = newest_checkpoint(tmp_path, fail)
    assert is_of(checkpoint, 120)
    assert checkpoint.config() == CONFIG
    assert is_of(read_checkpoint(folder), 120)
    with pytest.raises(GSAError, match="there is no 'momentum', only model, optimizer, ema"):
        checkpoint.tensors("momentum")
    files = {path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert len(files) == 1, "every file may be read by the same people"


@pytest.mark.parametrize("shard_bytes", [2**30, 2000])
@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_is_a_model(tmp_path: Path, shard_bytes: int, tied: bool) -> None:
    """For us and for transformers, in one file or in several."""
    from gsa import GSAForCausalLM

    config = ModelConfig.from_dict({**CONFIG.to_dict(), "tie_word_embeddings": tied})
    tensors = groups(3, config)
    folder = save_checkpoint(tmp_path, 3, config, tensors, {}, shard_bytes=shard_bytes)
    sharded = [path.name for path in folder.glob("*-of-*.safetensors")]
    assert bool(sharded) == (shard_bytes == 2000)
    assert {name.split("-")[0] for name in sharded} in (set(), {"model", "optimizer", "ema"})
    theirs = GSAForCausalLM.from_pretrained(folder)
    for loaded in (load_model(folder).state_dict(), theirs.state_dict()):
        assert all(torch.equal(loaded[name], x) for name, x in tensors["model"].items())
    read = read_checkpoint(folder).tensors("ema")
    assert all(torch.equal(x, tensors["ema"][name]) for name, x in read.items())
    assert len(read) == len(tensors["ema"]) - tied


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    source = tmp_path / "tokenizer"
    source.mkdir()
    with pytest.raises(GSAError, match="holds no tokenizer"):
        save(tmp_path, 1, tokenizer=source)
    with pytest.raises(GSAError, match="the tokenizer cannot be read"):
        save(tmp_path, 1, tokenizer=tmp_path / "nowhere")
    (source / "tokenizer.json").write_text("{}")
    (source / "tokenizer_config.json").write_text("{}")
    (source / "notes.txt").write_text("private")
    folder = save(tmp_path, 1, tokenizer=source)
    assert sorted(path.name for path in folder.glob("*t*.*"))[-2:] == ["tokenizer.json", "tokenizer_config.json"]
    assert not (folder / "notes.txt").exists()
    (folder / "tokenizer.json").write_text("[]")
    with pytest.raises(BrokenCheckpoint, match=r"the content of tokenizer.json has changed"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": -1}, "step must be a whole number from 0, got -1"),
        ({"step": True}, "step must be a whole number from 0, got True"),
        ({"state": {"step": 4}}, "state is of step 4, the checkpoint of step 5"),
        ({"state": {"x": torch.zeros(1)}}, "state must be JSON: .*Tensor"),
        ({"tensors": {}}, "must hold a group 'model', got none"),
        ({"tensors": {**groups(5), "../x": {}}}, "a group's name is lower-case letters, got '../x'"),
        ({"tensors": {"model": {}}}, "save_checkpoint: model: tensor model.embeddings.weight is missing"),
        (
            {"tensors": {"model": groups(5)["model"], "ema": {**groups(5)["model"], "x": torch.zeros(1)}}},
            "save_checkpoint: ema: tensor x is not part of the model",
        ),
    ],
)
def test_what_could_not_be_read_back_is_not_saved(tmp_path: Path, change: dict, message: str) -> None:
    given = {"step": 5, "config": CONFIG, "tensors": groups(5), "state": {}, **change}
    with pytest.raises(GSAError, match=message):
        save_checkpoint(tmp_path, **given)
    assert not (tmp_path / "checkpoints").exists()


# Killed.


class Killed(BaseException):
    """From its moment on, the process does nothing more: everything that would change the disk raises it."""


@contextmanager
def killed_at(moment: int) -> Iterator[list[str]]:
    """Everything that changes the disk is counted; at one of them, of which half is done, the process is killed."""
    done: list[str] = []

    def dying(name: str, action: Callable, half: Callable[..., None] | None) -> Callable:
        def act(*args: object, **options: object) -> object:
            done.append(name)
            if len(done) >= moment:
                if len(done) == moment and half is not None:
                    half(*args)
                raise Killed
            return action(*args, **options)

        return act

    with pytest.MonkeyPatch.context() as patch:
        for name in ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir", "chmod"):
            patch.setattr(os, name, dying(name, getattr(os, name), None))
        write_text, write_bytes = Path.write_text, Path.write_bytes
        patch.setattr(Path, "write_text", dying("write", write_text, lambda path, text: write_text(path, text[:9])))
        patch.setattr(Path, "write_bytes", dying("write", write_bytes, lambda path, _: write_bytes(path, b"")))
        save_file = sys.modules["gsa.models.checkpoint"].save_file
        patch.setattr(
            "gsa.models.checkpoint.save_file", dying("write", save_file, lambda _, path: write_bytes(path, b"half"))
        )
        try:
            yield done
        except Killed:
            assert moment <= len(done)


def moments(action: Callable[[], object]) -> int:
    """How many moments an action has at which it can be killed."""
    with killed_at(10**9) as done:
        action()
    return len(done)


def old_or_new(run: Path, old: Callable[[Checkpoint | None], bool], new: Callable[[Checkpoint | None], bool]) -> bool:
    """Whether the new one is there; before and after leftovers are removed, it is it or the old one, and whole."""
    found = newest_checkpoint(run, fail)
    assert old(found) or new(found)
    was_new = new(found)
    clean(run)
    assert new(newest_checkpoint(run, fail)) == was_new
    assert old(newest_checkpoint(run, fail)) == (not was_new)
    assert all(name.startswith("step-") and not name.endswith(".old") for name in names(run))
    assert clean(run) == []
    return was_new


@pytest.mark.parametrize(
    "case", [*(pytest.param(case, marks=pytest.mark.slow) for case in ("first", "second")), "replaced"]
)
def test_a_save_killed_at_any_moment_leaves_the_old_or_the_new_checkpoint(tmp_path: Path, case: str) -> None:
    base = tmp_path / "base"
    (base / "checkpoints").mkdir(parents=True)
    if case != "first":
        save(base, 1)
    step, old = {
        "first": (1, lambda found: found is None),
        "second": (2, lambda found: is_of(found, 1)),
        "replaced": (1, lambda found: is_of(found, 1)),
    }[case]
    counted = shutil.copytree(base, tmp_path / "counted")
    total = moments(lambda: save(counted, step, seed=9, shard_bytes=5000))
    assert total > 20
    seen = []
    for moment in range(1, total + 1):
        run = shutil.copytree(base, tmp_path / str(moment))
        with killed_at(moment):
            save(run, step, seed=9, shard_bytes=5000)
        seen.append(old_or_new(run, old, lambda found: is_of(found, step, seed=9)))
        save(run, 3)
        assert is_of(newest_checkpoint(run, fail), 3)
    assert seen == sorted(seen), "once the new one is there, it stays"
    assert not seen[0]
    assert seen[-1]


def test_a_replaced_checkpoint_is_there_all_the_time(tmp_path: Path) -> None:
    """Also when the removal of leftovers is killed, again and again, and when it finds a replacement broken."""
    save(tmp_path, 1)
    os.rename(tmp_path / "checkpoints/step-00000001", tmp_path / "checkpoints/step-00000001.old")
    assert is_of(newest_checkpoint(tmp_path, fail), 1)
    for moment in range(1, 10):
        with killed_at(moment):
            clean(tmp_path)
        assert is_of(newest_checkpoint(tmp_path, fail), 1)
    assert names(tmp_path) == ["step-00000001"]

    shutil.copytree(tmp_path / "checkpoints/step-00000001", tmp_path / "checkpoints/step-00000001.old")
    (tmp_path / "checkpoints/step-00000001/state.json").write_text("{}")
    assert clean(tmp_path) == []
    said: list[str] = []
    assert is_of(newest_checkpoint(tmp_path, said.append), 1)
    assert len(said) == 1
    assert clean(tmp_path) == []
    assert names(tmp_path) == ["broken-step-00000001", "step-00000001"]


def test_removal_killed_at_any_moment_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    base = tmp_path / "base"
    for step in range(1, 5):
        save(base, step)
    counted = shutil.copytree(base, tmp_path / "counted")
    total = moments(lambda: prune(counted, 1, {2}))
    assert names(counted) == ["step-00000002", "step-00000004"]
    for moment in range(1, total + 1):
        run = shutil.copytree(base, tmp_path / str(moment))
        with killed_at(moment):
            prune(run, 1, {2})
        for step, folder in checkpoints(run):
            assert is_of(read_checkpoint(folder), step)
        with killed_at(moment // 2 + 1):
            clean(run)
        for step, folder in checkpoints(run):
            assert is_of(read_checkpoint(folder), step)
        clean(run)
        assert prune(run, 1, {2}) in ([1, 3], [3], [])
        assert names(run) == ["step-00000002", "step-00000004"]


_KILLED_RUN = """
import os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[2])
from tests.train.test_train_checkpoint import clean, fail, is_of, newest_checkpoint, prune, save, checkpoints
os.fsync = lambda handle: None  # what a kill leaves needs no disk
run, chance = Path(sys.argv[1]), random.Random(0)
save(run, 1)
began = time.perf_counter()
save(run, 1)
took, last = time.perf_counter() - began, 1
for kill in range(20):
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        for step in range(last, last + 1000):  # the first of them is there already
            save(run, step)
            os.write(tell, b".")
            prune(run, 2, set())
        os._exit(1)
    finished = chance.randint(0, 2)
    for _ in range(finished):
        assert os.read(told, 1) == b"."
    time.sleep(chance.uniform(0, took))
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    os.close(told), os.close(tell)
    clean(run)
    found = newest_checkpoint(run, fail)
    assert found.step >= last + finished - 1 and is_of(found, found.step), found
    assert all(path.name.startswith("step-") for path in (run / "checkpoints").iterdir())
    last = found.step
"""


def test_real_kills(tmp_path: Path) -> None:
    """Processes that only save and remove are killed at random moments; what they had finished is there."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", _KILLED_RUN, str(tmp_path), str(root)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[int] = set()
    renamed = []
    rename = os.rename

    def noted_fsync(handle: int) -> None:
        FSYNC(handle)
        synced.add(os.fstat(handle).st_ino)

    def noted_rename(source: Path, target: Path) -> None:
        content = [Path(source), *Path(source).iterdir()]
        assert {path.stat().st_ino for path in content} <= synced
        assert len(content) == 7
        rename(source, target)
        renamed.append(Path(target).name)
        synced.clear()

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    save(tmp_path, 1)
    assert renamed == ["step-00000001"]
    assert {(tmp_path / "checkpoints").stat().st_ino, tmp_path.stat().st_ino} <= synced


# Damaged.


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints 1 and 2, in several files each."""
    run = tmp_path_factory.mktemp("two")
    tokenizer = tmp_path_factory.mktemp("tokenizer")
    (tokenizer / "tokenizer.json").write_text('{"version": "1.0"}')
    for step in (1, 2):
        save(run, step, tokenizer=tokenizer, shard_bytes=6000)
    return run


def files_of(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints/step-00000002").iterdir())


@contextmanager
def damaged(two: Path, file: str, damage: Callable[[Path], object]) -> Iterator[list[str]]:
    """What is said about the run with a damaged file in its newest checkpoint; the one before has to be found."""
    run = two.parent / "damaged"
    shutil.copytree(two, run)
    try:
        damage(run / "checkpoints/step-00000002" / file)
        said: list[str] = []
        assert is_of(newest_checkpoint(run, said.append, set_aside=False), 1)
        assert names(run) == ["step-00000001", "step-00000002"]
        assert is_of(newest_checkpoint(run, said.append), 1)
        assert names(run) == ["broken-step-00000002", "step-00000001"]
        assert said[0].removesuffix("; the one before is looked at") == said[1].partition("; it is renamed to")[0]
        assert "broken-step-00000002" in said[1]
        assert file in said[1]
        assert is_of(newest_checkpoint(run, fail), 1)
        yield said
    finally:
        shutil.rmtree(run)


@examples(60)
@given(data=st.data())
def test_a_changed_byte_anywhere_is_found(two: Path, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(files_of(two)))
    content = bytearray((two / "checkpoints/step-00000002" / file).read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    with damaged(two, file, lambda path: path.write_bytes(content)):
        pass


@examples(30)
@given(data=st.data())
def test_a_file_that_was_cut_anywhere_is_found(two: Path, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(files_of(two)))
    content = (two / "checkpoints/step-00000002" / file).read_bytes()
    kept = data.draw(st.integers(0, len(content) - 1))
    with damaged(two, file, lambda path: path.write_bytes(content[:kept])) as said:
        assert file == "manifest.json" or f"{file} has {kept} bytes, it was written with {len(content)}" in said[0]


def test_any_missing_file_is_found(two: Path) -> None:
    for file in files_of(two):
        with damaged(two, file, Path.unlink) as said:
            assert f"{file} is missing" in said[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": None}, "files must be an object, got NoneType"),
        ({"files": []}, "files must be an object, got list"),
        ({"files": {"../../secret": {"size": 1, "sha256": ""}}}, "'../../secret' is not the name of a file beside it"),
        ({"files": {"a\0b": {"size": 1, "sha256": ""}}}, "is not the name of a file beside it"),
        ({"files": {"config.json": 3}}, "config.json must have a size and a sha256, got 3"),
        ({"files": {"config.json": {"size": "3", "sha256": ""}}}, "config.json must have a size and a sha256"),
        ({"files": {"config.json": {"size": True, "sha256": ""}}}, "config.json must have a size and a sha256"),
        ({"files": {"config.json": {"size": 3, "sha256": 4}}}, "config.json must have a size and a sha256"),
        ({"files": {}}, "there is no file of the group 'model'"),
        ({"groups": {}}, "groups must be a list, got dict"),
        ({"groups": [3]}, "there is no file of the group 3"),
        ({"groups": ["optimizer"]}, "does not name the group 'model'"),
        ({"groups": [], "files": {"state.json": {"size": 1, "sha256": ""}}}, r"does not name config.json"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(tmp_path: Path, changes: dict, message: str) -> None:
    path = save(tmp_path, 1) / "manifest.json"
    fields = {**json.loads(path.read_text()), **changes}
    fields.pop("sha256")
    path.write_text(manifest_text(fields))
    with pytest.raises(BrokenCheckpoint, match=message):
        read_checkpoint(path.parent)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}", "[" * 5000, "1" * 5000, '{"sha256": ""}', "\xff"])
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = save(tmp_path, 1) / "manifest.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(BrokenCheckpoint, match=r"manifest.json is not"):
        read_checkpoint(path.parent)


def rewrite(folder: Path, name: str, text: str) -> None:
    """Changes a file and the manifest with it, as nothing but intention does."""
    (folder / name).write_text(text)
    fields = json.loads((folder / "manifest.json").read_text())
    fields.pop("sha256")
    fields["files"][name] = {"size": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (folder / "manifest.json").write_text(manifest_text(fields))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "expected a JSON object, got list"),
        ("{}", "step is None, expected a whole number from 0"),
        ('{"step": "1"}', "step is '1', expected"),
        ('{"step": 1.0}', r"step is 1\.0, expected"),
        ('{"step": true}', "step is True, expected"),
        ('{"step": -1}', "step is -1, expected"),
        ('{"step": 2}', r"state\.json is of step 2"),
    ],
)
def test_a_state_without_its_step_is_refused(tmp_path: Path, text: str, message: str) -> None:
    folder = save(tmp_path, 1)
    rewrite(folder, "state.json", text)
    with pytest.raises(GSAError, match=message):
        read_checkpoint(folder)


def test_a_newer_format_and_files_that_may_not_be_read_are_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stop the run: going back to an older checkpoint would be wrong."""
    save(tmp_path, 1)
    path = save(tmp_path, 2) / "manifest.json"
    written = path.read_text()
    fields = {**json.loads(written), "format": 2}
    fields.pop("sha256")
    path.write_text(manifest_text(fields))
    with pytest.raises(GSAError, match="its format is 2, this version reads 1"):
        newest_checkpoint(tmp_path, fail)
    path.write_text(written)

    def refused(number: int) -> Callable:
        def raises(path: Path) -> str:
            raise OSError(number, os.strerror(number), str(path))

        return raises

    monkeypatch.setattr("gsa.train.manifest.sha256", refused(errno.EACCES))
    with pytest.raises(GSAError, match=r"cannot be read: .*Permission denied"):
        newest_checkpoint(tmp_path, fail)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    monkeypatch.setattr("gsa.train.manifest.sha256", refused(errno.EIO))
    said: list[str] = []
    assert newest_checkpoint(tmp_path, said.append) is None
    assert len(said) == 2
    assert "Input/output error" in said[0]


def test_other_files_do_no_harm_but_weights_do(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, shard_bytes=2000)
    (folder / "notes.txt").write_text("mine")
    assert is_of(read_checkpoint(folder), 1)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(BrokenCheckpoint, match=r"model.safetensors is not part of it"):
        read_checkpoint(folder)


def test_broken_ones_keep_their_place(tmp_path: Path) -> None:
    """Even when the same step breaks again."""
    for _ in range(3):
        (save(tmp_path, 7) / "config.json").unlink()
        assert newest_checkpoint(tmp_path, lambda line: None) is None
    assert names(tmp_path) == [f"broken-step-00000007{end}" for end in ("", ".2", ".3")]
    save(tmp_path, 7)
    assert is_of(newest_checkpoint(tmp_path, fail), 7)


# Full.


@pytest.mark.parametrize("where", ["tensors", "text", "sync", "rename", "replacement", "folder"])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    save(tmp_path, 1)

    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def full_for_safetensors(weights: object, path: Path, **options: object) -> None:
        Path(path).write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    rename = os.rename

    def full_for_new_ones(source: Path, target: Path) -> None:
        if source.name.startswith("."):
            full()
        rename(source, target)

    place, action = {
        "tensors": ("gsa.models.checkpoint.save_file", full_for_safetensors),
        "text": ("pathlib.Path.write_text", full),
        "sync": ("os.fsync", full),
        "rename": ("os.rename", full),
        "replacement": ("os.rename", full_for_new_ones),
        "folder": ("os.mkdir", full),
    }[where]
    for step in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(place, action)
            with pytest.raises(GSAError, match=r"No space left on device.*KB are needed, .*B are free.*is untouched"):
                save(tmp_path, step, seed=9)
        assert names(tmp_path) == ["step-00000001"]
        assert is_of(newest_checkpoint(tmp_path, fail), 1)


def test_a_limit_of_the_system_is_said(tmp_path: Path) -> None:
    """A real failure to write, of files larger than so many bytes."""
    save(tmp_path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
    try:
        with pytest.raises(GSAError, match="File too large"):
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path) == ["step-00000001"]


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(GSAError, match=r"cannot write .*step-00000001"):
        save(tmp_path, 1)
    with pytest.raises(GSAError, match=r"the folder cannot be read: .*Not a directory"):
        checkpoints(tmp_path)


def test_a_stop_by_the_user_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)

    def stop(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gsa.models.checkpoint.save_file", stop)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001"]


# Kept.


def test_checkpoints_are_listed_by_step(tmp_path: Path) -> None:
    assert checkpoints(tmp_path) == []
    assert newest_checkpoint(tmp_path, fail) is None
    assert clean(tmp_path) == []
    for name in ("step-00000010", "step-100000000", "step-00000009", ".step-00000011.ab", "step-x", "step-1", "best"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints/step-00000012").touch()
    (tmp_path / "checkpoints/step-00000013").symlink_to(tmp_path / "checkpoints/step-00000010")
    (tmp_path / "checkpoints/.step-00000014.ab.unfinished").symlink_to(tmp_path / "checkpoints/step-00000010")
    (tmp_path / "checkpoints/.step-00000015.ab").touch()
    (tmp_path / "checkpoints/.step-mine").touch()
    assert [step for step, _ in checkpoints(tmp_path)] == [9, 10, 12, 13, 100000000]
    removed = [".step-00000011.ab", ".step-00000014.ab.unfinished", ".step-00000015.ab"]
    assert clean(tmp_path) == removed
    assert (tmp_path / "checkpoints/.step-mine").exists()
    assert (tmp_path / "checkpoints/step-00000010").is_dir()


@examples(25)
@given(steps=st.sets(st.integers(0, 30)), keep=st.sets(st.integers(0, 30)), keep_last=st.integers(1, 4))
def test_the_newest_and_the_kept_stay(
    tmp_path_factory: pytest.TempPathFactory, steps: set[int], keep: set[int], keep_last: int
) -> None:
    run = tmp_path_factory.mktemp("run")
    for step in steps:
        (run / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    gone = prune(run, keep_last, keep)
    left = [step for step, _ in checkpoints(run)]
    assert left == sorted(set(sorted(steps)[-keep_last:]) | (steps & keep))
    assert sorted([*gone, *left]) == sorted(steps)


def test_at_least_one_is_kept(tmp_path: Path) -> None:
    with pytest.raises(GSAError, match="keep_last must be at least 1, got 0"):
        prune(tmp_path, 0, set())


def test_what_a_checkpoint_takes(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    taken = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert checkpoint_bytes(groups(1)) == pytest.approx(taken, rel=0.5)
    assert load_config(folder) == CONFIG
