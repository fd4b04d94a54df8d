"""Preparing: the same bytes for any number of processes and any interruption; nothing is lost; trouble is told."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gsa.data import portions, worker
from gsa.data import prepare as module
from gsa.data.prepare import prepare
from gsa.data.record import Progress
from gsa.data.shards import Tokens
from gsa.data.sources import plan
from gsa.data.tokenizer import load_tokenizer, tokenizer_paths
from gsa.errors import GSAError
from gsa.locks import locked
from tests.data.cases import PACK, contents, documents, jsonl, parquet, read_documents, text


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portions, "PORTION_BYTES", 2000)


def corpus(folder: Path) -> list[str]:
    """Files of every format; what documents they hold, in order."""
    folder.mkdir()
    long, rows, column = text(20_000), documents(30), documents(20, 100)
    (folder / "a.txt").write_text(long)
    (folder / "b.jsonl.gz").write_bytes(PACK[".gz"](jsonl(rows)))
    parquet(folder / "c.parquet", column)
    (folder / "d.md.zst").write_bytes(PACK[".zst"](long[::-1].encode()))
    return [long, *rows, *column, long[::-1]]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe", pytest.param("mistral", marks=pytest.mark.slow)])
def test_nothing_is_lost_and_processes_change_nothing(tmp_path: Path, bpe: str, tokenizer: str) -> None:
    expected = corpus(tmp_path / "in")
    name = bpe if tokenizer == "bpe" else tokenizer
    for i, processes in enumerate((1, 2)):
        out = tmp_path / f"out{i}"
        manifest = prepare([str(tmp_path / "in")], name, out, processes=processes, shard_tokens=9999, progress=False)
        assert read_documents(out) == expected
        assert manifest == Tokens.open(out).manifest
        assert manifest.documents == len(expected)
        assert manifest.text_bytes == sum(len(document.encode()) for document in expected)
        assert [shard.token_count for shard in manifest.shards[:-1]] == [9999] * (len(manifest.shards) - 1)
    assert contents(tmp_path / "out0") == contents(tmp_path / "out1")
    Tokens.open(out).verify()


COMMAND = """
import sys, time
from gsa.data import portions, prepare
portions.PORTION_BYTES = 2000
source, tokenizer, out, stop = sys.argv[1:]
record = prepare.record

def record_and_wait(out, settings, progress):
    record(out, settings, progress)
    if len(progress.shards) > int(stop):
        time.sleep(60)

prepare.record = record_and_wait
prepare.prepare([source], tokenizer, out, processes=2, shard_tokens=3000)
"""


def start(source: Path, tokenizer: str, out: Path, stop: int = 1000) -> subprocess.Popen[bytes]:
    """A process at work, which waits for its end once shard `stop` is finished."""
    command = [sys.executable, "-c", COMMAND, str(source), tokenizer, str(out), str(stop)]
    return subprocess.Popen(command, stderr=subprocess.PIPE)


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < until
        time.sleep(0.002)


def workers_of(process: subprocess.Popen[bytes]) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(process.pid).children()]


def gone(pids: list[int]) -> bool:
    import psutil

    until = time.monotonic() + 20
    while time.monotonic() < until:
        alive = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
        if not alive:
            return True
        time.sleep(0.02)
    return False


def test_killed_again_and_again_it_ends_with_the_same_bytes(tmp_path: Path, bpe: str) -> None:
    corpus(tmp_path / "in")
    whole = start(tmp_path / "in", bpe, tmp_path / "whole")
    assert whole.wait() == 0, whole.stderr.read()
    out = tmp_path / "out"
    for shard in (0, 2, 5):
        process = start(tmp_path / "in", bpe, out, shard + 1)
        wait_for(out / f"tokens-{shard:05d}.npy", process)
        workers = workers_of(process)
        process.kill()
        process.wait()
        assert gone(workers)
        process.stderr.close()
        assert not (out / "manifest.json").exists()
        with pytest.raises(GSAError, match="not finished"):
            Tokens.open(out)
    last = start(tmp_path / "in", bpe, out)
    assert last.wait() == 0
    assert contents(out) == contents(tmp_path / "whole")
    last.stderr.close()
    whole.stderr.close()


def test_ctrl_c_ends_the_workers_and_keeps_what_is_finished(tmp_path: Path, bpe: str) -> None:
    corpus(tmp_path / "in")
    out = tmp_path / "out"
    process = start(tmp_path / "in", bpe, out, 2)
    wait_for(out / "tokens-00001.npy", process)
    workers = workers_of(process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert b"KeyboardInterrupt" in err
    assert gone(workers)
    assert len(json.loads((out / "progress.json").read_text())["progress"]["shards"]) >= 1


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("at", range(1, 12, 3))
def test_a_stop_at_any_record_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    corpus(tmp_path / "in")
    options = {"shard_tokens": 4000, "processes": 1, "progress": False}
    prepare([str(tmp_path / "in")], "bytes", tmp_path / "whole", **options)
    record, calls = module.record, []

    def stop(*args: object) -> None:
        record(*args)
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "record", stop)
    with pytest.raises(KeyboardInterrupt):
        prepare([str(tmp_path / "in")], "bytes", tmp_path / "out", **options)
    prepare([str(tmp_path / "in")], "bytes", tmp_path / "out", **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@contextmanager
def stopped_after(shards: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is called here is interrupted when so many shards are on record."""
    record = module.record

    def stop(out: Path, settings: dict[str, object], progress: Progress) -> None:
        record(out, settings, progress)
        if len(progress.shards) == shards:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "record", stop)
        with pytest.raises(KeyboardInterrupt):
            yield


def small(tmp_path: Path) -> str:
    (tmp_path / "in.txt").write_text(text(3000))
    return str(tmp_path / "in.txt")


def test_a_finished_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = small(tmp_path)
    first = prepare([source], "bytes", tmp_path / "out")
    assert "tokens/s" in capsys.readouterr().err
    before = contents(tmp_path / "out")
    os.utime(source)  # what is done stays done
    assert prepare([source], "bytes", tmp_path / "out", processes=1, strict=True) == first
    err = capsys.readouterr().err
    assert "already done" in err
    assert "the sources were changed after" in err
    assert contents(tmp_path / "out") == before
    shutil.rmtree(tmp_path / "out" / "tokenizer")
    prepare([source], "bytes", tmp_path / "out")
    assert contents(tmp_path / "out") == before
    (tmp_path / "out" / "tokenizer" / "tokenizer_config.json").unlink()
    prepare([source], "bytes", tmp_path / "out")
    assert contents(tmp_path / "out") == before
    (tmp_path / "out" / "tokens-00000.npy").write_bytes(b"")
    with pytest.raises(GSAError, match="0 bytes are there"):
        prepare([source], "bytes", tmp_path / "out")


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer": "bpe"}, r"tokenizer \("),
        ({"field": "body"}, r"field \(text, now body\)"),
        ({"shard_tokens": 7}, r"shard_tokens \(1000, now 7\)"),
        ({"exclude": ["b.txt"]}, r'exclude \(\[\], now \["b.txt"\]\)'),
        ({"sources": 2}, r"sources \(.*in, now .*in, .*in\)"),
        ({"longer": True}, "the files of the sources"),
    ],
)
def test_other_settings_are_refused_by_name(
    tmp_path: Path, bpe: str, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], message: str, finished: bool
) -> None:
    (tmp_path / "in").mkdir()
    for i, name in enumerate("ab"):
        (tmp_path / "in" / f"{name}.txt").write_text(text(2000, i))

    def run(tokenizer: str = "bytes", sources: int = 1, longer: bool = False, **options: object) -> None:
        if longer:
            (tmp_path / "in" / "a.txt").write_text(text(4000))
        name = bpe if tokenizer == "bpe" else tokenizer
        prepare(
            [str(tmp_path / "in")] * sources,
            name,
            tmp_path / "out",
            **{"shard_tokens": 1000, "progress": False, **options},
        )

    if finished:
        run()
    else:
        with stopped_after(1, monkeypatch):
            run()
    before = contents(tmp_path / "out")
    with pytest.raises(GSAError, match=message + r".*Remove the folder, or choose another"):
        run(**change)
    assert contents(tmp_path / "out") == before


def test_a_source_touched_before_the_end_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = small(tmp_path)
    with stopped_after(1, monkeypatch):
        prepare([source], "bytes", tmp_path / "out", shard_tokens=1000, progress=False)
    os.utime(source, (1, 1))
    with pytest.raises(GSAError, match="the times of change of the sources"):
        prepare([source], "bytes", tmp_path / "out", shard_tokens=1000, progress=False)


def test_a_record_that_is_damaged_is_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = small(tmp_path)
    with stopped_after(1, monkeypatch):
        prepare([source], "bytes", tmp_path / "out", shard_tokens=1000, progress=False)
    path = tmp_path / "out" / "progress.json"
    values = json.loads(path.read_text())
    for sources in (["x"], 5):
        path.write_text(json.dumps({**values, "settings": {**values["settings"], "sources": sources}}))
        with pytest.raises(GSAError, match=r"sources \([x5], now "):
            prepare([source], "bytes", tmp_path / "out", shard_tokens=1000, progress=False)


@pytest.mark.usefixtures("small_blocks")
def test_a_stop_changes_nothing_where_the_tokens_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus(tmp_path / "in")
    options = {"shard_tokens": 3000, "max_tokens": 10_000, "processes": 1, "progress": False}
    whole = prepare([str(tmp_path / "in")], "bytes", tmp_path / "whole", **options)
    assert 10_000 <= whole.tokens < 12_500
    with stopped_after(2, monkeypatch):
        prepare([str(tmp_path / "in")], "bytes", tmp_path / "out", **options)
    prepare([str(tmp_path / "in")], "bytes", tmp_path / "out", **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_what_was_wrong_is_in_the_manifest_and_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n{"text": ""}\n{\n{"text": "\xff"}\n{"no": 1}\n')
    manifest = prepare([str(tmp_path / "a.jsonl")], "bytes", tmp_path / "out")
    assert manifest.bad_rows == {"empty": 1, "field missing": 1, "invalid JSON": 1}
    assert (manifest.undecodable_bytes, manifest.documents) == (1, 2)
    err = capsys.readouterr().err
    assert "left out: 1 rows (invalid JSON)" in err
    assert "replaced: 1 bytes that are not UTF-8" in err
    with pytest.raises(GSAError, match=r"a\.jsonl, line 2: 'text' is empty"):
        prepare([str(tmp_path / "a.jsonl")], "bytes", tmp_path / "strict", strict=True)


def test_no_text_at_all_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n{}\n")
    with pytest.raises(GSAError, match=r"there is no text in .*a\.jsonl \(field missing: 2\).* has no fields"):
        prepare([str(tmp_path / "a.jsonl")], "bytes", tmp_path / "out", progress=False)


def test_a_field_that_is_not_there_is_told_and_the_corrected_command_works(tmp_path: Path, bpe: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 1, "body": "words"}\n')
    with pytest.raises(GSAError, match=r"--field is 'text', the first row has 'id', 'body'"):
        prepare([str(tmp_path / "a.jsonl")], bpe, tmp_path / "out", progress=False)
    prepare([str(tmp_path / "a.jsonl")], "bytes", tmp_path / "out", field="body", progress=False)
    assert read_documents(tmp_path / "out") == ["words"]


def test_nothing_of_the_current_folder_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = small(tmp_path)
    (tmp_path / "json.py").write_text("raise SystemExit('this was run')")
    monkeypatch.chdir(tmp_path)
    assert prepare([source], "bytes", tmp_path / "out", progress=False).documents == 1


def test_whatever_fails_in_a_worker_is_told() -> None:
    def fail(error: BaseException) -> None:
        raise error

    class Panic(BaseException):
        """As `tokenizers` raises it."""

    assert worker._tried(lambda: 5) == 5
    assert worker._tried(lambda: fail(GSAError("data: x"))) == worker._Failure("data: x", GSAError)
    told = worker._tried(lambda: fail(Exception("no such token")))
    assert told == worker._Failure("data: the tokenizer cannot encode this: no such token", GSAError)
    assert "Panic: oh" in worker._tried(lambda: fail(Panic("oh"))).message


def test_a_tokenizer_in_the_source_is_no_text(tmp_path: Path, bpe: str) -> None:
    small(tmp_path)
    shutil.copytree(bpe, tmp_path / "tokenizer")
    for i, name in enumerate((tmp_path / "tokenizer", tmp_path / "tokenizer" / "tokenizer.json")):
        options = {"leave_out": tokenizer_paths(load_tokenizer(name))}
        assert [Path(entry.name).name for entry in plan([str(tmp_path)], **options)[0]] == ["in.txt"], i
    assert tokenizer_paths(load_tokenizer("bytes")) == []


def test_a_worker_that_dies_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_worker = worker._Worker.__init__

    def kill(self: worker._Worker, task: worker.Task) -> None:
        start_worker(self, task)
        self.helper.process.kill()

    monkeypatch.setattr(worker._Worker, "__init__", kill)
    with pytest.raises(GSAError, match=r"the process that encoded .+ ended: it was killed, perhaps for want"):
        prepare([small(tmp_path)], "bytes", tmp_path / "out", progress=False)


def test_workers_hold_no_torch(tmp_path: Path, bpe: str) -> None:
    code = (
        "import sys; from gsa.data.tokenizer import load_tokenizer; import gsa.data.worker; "
        f"load_tokenizer({bpe!r}).encode(['x']); "
        "print([name for name in ('torch', 'transformers', 'datasets', 'pyarrow') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.strip() == b"[]"


def test_a_full_disk_is_told_and_the_same_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = small(tmp_path)
    options = {"shard_tokens": 1000, "processes": 1, "progress": False}
    prepare([source], "bytes", tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        from gsa.data import writer

        append = writer._Row.append

        def full(self: writer._Row, values: object) -> None:
            if "00002" in self.path.name:
                raise OSError(errno.ENOSPC, "No space left on device")
            append(self, values)

        patch.setattr(writer._Row, "append", full)
        with pytest.raises(GSAError, match=r"the disk is full \([\d.]+ GB free\).*the same command goes on"):
            prepare([source], "bytes", tmp_path / "out", **options)
    prepare([source], "bytes", tmp_path / "out", **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_disk_that_is_too_small_is_told_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = small(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(5000, 0, 5000))
    with pytest.raises(GSAError, match=r"at least [\d.]+ .*B are needed, 4\.9 KB are free"):
        prepare([source], "bytes", tmp_path / "out", progress=False)
    prepare([source], "bytes", tmp_path / "fits", max_tokens=2000, progress=False)
    (tmp_path / "rows.jsonl").write_bytes(jsonl([""] * 1000 + ["x"]))
    prepare([str(tmp_path / "rows.jsonl")], "bytes", tmp_path / "rows", progress=False)


def test_a_folder_with_other_things_or_another_process_is_refused(tmp_path: Path) -> None:
    source = small(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(GSAError, match=r"has other things in it \(thesis\.tex\)"):
        prepare([source], "bytes", tmp_path / "out")
    with pytest.raises(GSAError, match="is a file, expected a folder"):
        prepare([source], "bytes", source)
    (tmp_path / "busy").mkdir()
    with locked(tmp_path / "busy", "test"), pytest.raises(GSAError, match="another process is at work on"):
        prepare([source], "bytes", tmp_path / "busy")


def test_the_result_may_stand_in_the_source(tmp_path: Path) -> None:
    small(tmp_path)
    for _ in range(2):
        manifest = prepare([str(tmp_path)], "bytes", tmp_path / "out", progress=False)
    assert manifest.documents == 1


@pytest.mark.parametrize("options", [{"processes": 0}, {"shard_tokens": 0}])
def test_numbers_below_one_are_refused(tmp_path: Path, options: dict[str, int]) -> None:
    with pytest.raises(GSAError, match=f"{next(iter(options))} must be at least 1, got 0"):
        prepare([small(tmp_path)], "bytes", tmp_path / "out", **options)
