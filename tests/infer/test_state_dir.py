"""Kept states on disk: there after a restart, within their bytes, never trusted unless whole and of this model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gsa import GSAError
from gsa.infer import Completion, Engine, Sampling
from gsa.infer.state import State
from tests.examples import examples
from tests.infer.engines import loaded
from tests.models.cases import VOCABULARY, ids
from tests.ops.isas import needs_native

pytestmark = needs_native
FEW = Sampling(max_tokens=6, temperature=1.0, seed=4, logprobs=2)
LOTS = 10**9


def started(folder: Path, case: str = "gsa", **options: Any) -> tuple[Engine, list[str]]:
    """An engine over a folder, and what it says."""
    said: list[str] = []
    settings = {"state_cache_bytes": LOTS, "state_dir": folder, "batch_size": 2, "say": said.append, **options}
    return Engine(loaded(case), **settings), said


def answer(engine: Engine, prompt: Any, **options: Any) -> Completion:
    """Also checks that the same comes of it without any state that was kept."""
    found = engine.generate(engine.prompt(prompt, **options), FEW)
    without = engine.generate(engine.prompt(prompt, reuse=False), FEW)
    assert (found.tokens, found.logprobs, found.top) == (without.tokens, without.logprobs, without.top)
    return found


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


@pytest.mark.parametrize("case", ["gsa", "attention", "hybrid"])
def test_states_are_found_again_after_a_restart(tmp_path, case):
    with started(tmp_path, case)[0] as engine:
        said = [*ids(40).tolist(), *answer(engine, ids(40)).tokens]
        answer(engine, ids(20, seed=3), salt="mine")
    assert len(files(tmp_path)) == 4  # the ends of two prompts and of two answers
    engine, told = started(tmp_path, case)
    with engine:
        assert answer(engine, [*said, 1, 2]).cached_tokens == len(said)
        assert answer(engine, ids(20, seed=3)).cached_tokens == 0
        assert answer(engine, ids(20, seed=3), salt="mine").cached_tokens == 20
        report = engine.cache.report()
        assert (report.hits, report.tokens_reused, report.disk.hits) == (2, len(said) + 20, 2)
        assert answer(engine, [*said, 1, 2]).cached_tokens == len(said) + 2
        assert engine.cache.report().disk.hits == 2  # what is in memory is not read again
    assert told == []


def test_what_has_left_memory_is_found_on_disk(tmp_path):
    one = loaded().state_bytes + 4 * VOCABULARY
    with started(tmp_path)[0] as engine:
        for seed in range(4):
            answer(engine, ids(30, seed=seed))
    engine, _ = started(tmp_path, state_cache_bytes=2 * one)
    with engine:
        for seed in (0, 1, 2, 3, 0):
            assert answer(engine, ids(30, seed=seed)).cached_tokens == 30
            assert engine.cache.nbytes <= 2 * one


def test_files_stay_within_their_bytes_and_the_least_recently_used_go(tmp_path):
    with started(tmp_path)[0] as engine:
        answer(engine, ids(30))
    size = sum(path.stat().st_size for path in files(tmp_path)) // 2
    limit = 5 * size
    for seed in range(2, 7):
        with started(tmp_path, state_dir_bytes=limit)[0] as engine:
            assert answer(engine, ids(30)).cached_tokens == 30  # so it is used each time
            answer(engine, ids(30, seed=seed))
        assert sum(path.stat().st_size for path in files(tmp_path)) <= limit
    with started(tmp_path, state_dir_bytes=limit)[0] as engine:
        assert answer(engine, ids(30)).cached_tokens == 30
        assert answer(engine, ids(30, seed=2)).cached_tokens == 0
    smaller, _ = started(tmp_path, state_dir_bytes=size + size // 2)
    with smaller:
        report = smaller.cache.report().disk
        assert (report.states, report.nbytes <= 2 * size, report.evictions > 0) == (1, True, True)
    none, _ = started(tmp_path, state_dir_bytes=0)
    with none:
        answer(none, ids(30))
    assert files(tmp_path) == []


def test_states_of_another_model_or_computation_are_left_alone_until_their_room_is_needed(tmp_path):
    with started(tmp_path)[0] as engine:
        answer(engine, ids(30))
    theirs = files(tmp_path)
    for options in ({"case": "mamba"}, {"reading": "fast"}):
        engine, told = started(tmp_path, **options)
        with engine:
            assert answer(engine, ids(30)).cached_tokens == 0
            assert engine.cache.report().disk.skipped == 2
        assert told == [
            f"state_dir: {tmp_path} has 2 states of other models, or that were computed otherwise; they are left alone "
            "until their room is needed"
        ]
        for path in set(files(tmp_path)) - set(theirs):
            path.unlink()
    (tmp_path / "notes.txt").write_text("not a state")
    engine, _ = started(tmp_path, "mamba")
    with engine:
        answer(engine, ids(30))
    room = sum(path.stat().st_size for path in set(files(tmp_path)) - set(theirs) if path.suffix == ".state")
    with started(tmp_path, "mamba", state_dir_bytes=room)[0] as engine:
        assert answer(engine, ids(30)).cached_tokens == 30
    assert not set(theirs) & set(files(tmp_path))
    assert (tmp_path / "notes.txt").exists()


@examples(60)
@given(st.sampled_from(["cut", "longer", "flipped", "empty"]), st.floats(0, 0.999))
def test_a_file_that_was_changed_is_skipped_counted_and_told(tmp_path_factory, change, where):
    folder = tmp_path_factory.mktemp("states")
    with started(folder)[0] as engine:
        engine.generate(ids(30), Sampling(max_tokens=0))
    (path,) = files(folder)
    content = path.read_bytes()
    place = int(where * len(content))
    flipped = content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :]
    path.write_bytes({"cut": content[:place], "longer": content + b" ", "flipped": flipped, "empty": b""}[change])
    engine, told = started(folder)
    with engine:
        assert answer(engine, ids(30)).cached_tokens == 0
        assert (engine.cache.report().disk.skipped, len(told)) == (1, 1)
    assert State.load(path, loaded()).tokens == 30  # it is written anew


def test_a_file_under_the_name_of_another_is_not_used(tmp_path):
    with started(tmp_path)[0] as engine:
        for seed in range(2):
            engine.generate(ids(30, seed=seed), Sampling(max_tokens=0))
    first, second = files(tmp_path)
    second.write_bytes(first.read_bytes())
    engine, told = started(tmp_path)
    with engine:
        assert sorted(answer(engine, ids(30, seed=seed)).cached_tokens for seed in range(2)) == [0, 30]
    assert len(told) == 1
    assert "it is of other tokens than its name says" in told[0]


def test_what_a_kill_has_left_is_removed(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    state = Engine(loaded()).read(ids(3))
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", killed)
        patch.setattr("shutil.rmtree", lambda *_, **__: None)
        with pytest.raises(Killed):
            state.save(tmp_path / f"3-{'0' * 16}-{'0' * 40}.state")
    (leftover,) = files(tmp_path)
    assert leftover.name.startswith(".")
    with started(tmp_path)[0]:
        assert files(tmp_path) == []


def test_states_that_cannot_be_written_are_counted_and_told_and_nothing_else_happens(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    engine, told = started(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("gsa.files.sync", full)
        answer(engine, ids(30))
        engine.close()
    assert (files(tmp_path), engine.cache.report().disk.failures, len(told)) == ([], 2, 2)
    assert "No space left on device" in told[0]
    assert answer(engine, ids(30)).cached_tokens == 30  # memory is as it was, and close may come twice
    engine.close()
    with started(tmp_path)[0] as other:
        answer(other, ids(40, seed=7))
    assert answer(engine, ids(40, seed=7)).cached_tokens == 0  # the folder is no longer its own


def test_folders_that_cannot_be(tmp_path):
    with pytest.raises(GSAError, match=r"^engine: state_dir needs memory for states"):
        started(tmp_path, state_cache_bytes=0)
    with pytest.raises(GSAError, match=r"^engine: state_dir_bytes must be at least 0, got -1"):
        started(tmp_path, state_dir_bytes=-1)
    (tmp_path / "file").write_text("")
    with pytest.raises(GSAError, match=r"^state_dir: .*file cannot be used: "):
        started(tmp_path / "file")
    first, _ = started(tmp_path / "a" / "b")
    with pytest.raises(GSAError, match=r"^state_dir: another process is at work on"):
        started(tmp_path / "a" / "b")
    first.close()
    started(tmp_path / "a" / "b")[0].close()


def test_links_are_not_followed(tmp_path):
    folder, elsewhere = tmp_path / "states", tmp_path / "elsewhere"
    with started(folder)[0] as engine:
        engine.generate(ids(30), Sampling(max_tokens=0))
    (path,) = files(folder)
    path.rename(elsewhere)
    os.symlink(elsewhere, path)
    with started(folder)[0] as engine:
        assert answer(engine, ids(30)).cached_tokens == 0
    assert elsewhere.exists()


def test_an_engine_that_is_dropped_writes_what_it_kept(tmp_path):
    engine, _ = started(tmp_path)
    answer(engine, ids(30))
    del engine
    with started(tmp_path)[0] as engine:
        assert answer(engine, ids(30)).cached_tokens == 30


def test_what_waits_is_dropped_where_there_is_no_time_to_write_it(tmp_path, monkeypatch):
    monkeypatch.setattr("gsa.infer.state_dir.PAUSE", 1e6)  # so that after the first file, the rest waits
    engine, _ = started(tmp_path)
    for seed in range(4):
        engine.generate(ids(20, seed=seed), FEW)
    engine.close(write=False)
    assert len(files(tmp_path)) <= 1
