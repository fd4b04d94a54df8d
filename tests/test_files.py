"""Files that appear whole or not at all, and what is opened: regular files, at once. Leftovers of the killed go."""

import os
import shutil
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from gsa.errors import GSAError
from gsa.files import (
    NotAFile,
    open_file,
    read_file,
    read_json,
    read_text,
    remove_leftovers,
    sha256,
    unfinished,
    whole_folder,
    written,
)


def make(kind: str, path: Path) -> None:
    """Something that is no regular file."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "socket"])
def test_what_is_no_file_is_told_at_once(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's name is short
    path = Path("x")
    make(kind, path)
    for read in (open_file, read_file, read_text, sha256):
        with pytest.raises(NotAFile, match="not a regular file: 'x'"):
            read(path)
    with pytest.raises(GSAError, match=r"x: cannot be read: .*not a regular file"):
        read_json(path)


def test_files_are_read_through_links(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b'{"a":\r\n1}')
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "loop").symlink_to("loop")
    assert read_file(tmp_path / "link") == b'{"a":\r\n1}'
    assert read_text(tmp_path / "link") == (tmp_path / "link").read_text()
    assert read_json(tmp_path / "link") == {"a": 1}
    with pytest.raises(GSAError, match="there is no such file"):
        read_json(tmp_path / "nowhere")
    with pytest.raises(GSAError, match=r"loop: cannot be read: .*[Ll]ink"):
        read_json(tmp_path / "loop")


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def test_leftovers_go_with_the_next_writer_of_the_name(tmp_path: Path) -> None:
    """Of any kind, and only those: another's are not ours to remove, nor is what has another kind of name. Another
    machine may still be writing what is not old."""
    half = unfinished(tmp_path / "a")
    half.mkdir()
    (half / "half").touch()
    unfinished(tmp_path / "a").touch()
    unfinished(tmp_path / "a").symlink_to("nowhere")
    unfinished(tmp_path / "a.old").mkdir()
    elsewhere, old = ".a.beef0123abcd.unfinished", tmp_path / ".a.beef4567abcd.unfinished"
    old.mkdir()
    os.utime(old, (0, 0))
    another = unfinished(tmp_path / "ab").name
    others = sorted([".a.20240101", ".a.mine.unfinished", ".a.unfinished", elsewhere, another])
    for name in others:
        (tmp_path / name).mkdir()
    with written(tmp_path / "a") as place:
        assert len(hidden(tmp_path)) == len(others) + 1
        place.write_text("whole")
    assert hidden(tmp_path) == others
    assert (tmp_path / "a").read_text() == "whole"
    remove_leftovers(tmp_path)
    assert hidden(tmp_path) == [name for name in others if name != another]


def test_who_holds_a_folder_removes_files_in_it_without_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every network's disk lets a file be locked that is only read."""
    unfinished(tmp_path / "tokens").touch()
    monkeypatch.setattr("gsa.files.held", lambda path: nullcontext(False))
    remove_leftovers(tmp_path, "tokens")
    assert len(hidden(tmp_path)) == 1
    remove_leftovers(tmp_path)
    assert hidden(tmp_path) == []


def test_what_a_living_writer_holds_stays(tmp_path: Path) -> None:
    with written(tmp_path / "a") as first, whole_folder(tmp_path / "b", "test", 1) as folder:
        first.write_text("first")
        (folder / "x").write_text("first")
        with written(tmp_path / "a") as second, whole_folder(tmp_path / "b", "test", 1) as other:
            second.write_text("second")
            (other / "x").write_text("second")
        remove_leftovers(tmp_path)
        assert ((tmp_path / "a").read_text(), (tmp_path / "b" / "x").read_text()) == ("second", "second")
    assert ((tmp_path / "a").read_text(), (tmp_path / "b" / "x").read_text()) == ("first", "first")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_a_folder_that_is_lost_before_it_is_held_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another writer had come between the making of a folder and its lock."""
    mkdir, taken = Path.mkdir, []

    def make_and_lose(path: Path, *args: object, **options: object) -> None:
        mkdir(path, *args, **options)  # type: ignore[arg-type]
        if len(taken) < 3:
            taken.append(path)
            shutil.rmtree(path)

    monkeypatch.setattr(Path, "mkdir", make_and_lose)
    with written(tmp_path / "a") as place:
        place.write_text("whole")
    assert len(taken) == 3
    assert os.listdir(tmp_path) == ["a"]


def test_a_link_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "x").write_text("old")
    for target in ("there", "nowhere"):
        (tmp_path / "a").symlink_to(target)
        with whole_folder(tmp_path / "a", "test", 1) as folder:
            (folder / "x").write_text("new")
        assert not (tmp_path / "a").is_symlink()
        assert (tmp_path / "a" / "x").read_text() == "new"
        shutil.rmtree(tmp_path / "a")
    assert (tmp_path / "there" / "x").read_text() == "old"
    assert os.listdir(tmp_path) == ["there"]


_WRITERS = """
import os, signal, sys, time
from pathlib import Path
from gsa.files import whole_folder, written
os.fsync = lambda handle: None
folder = Path(sys.argv[1])

def hidden():
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]

# Four at once write the same names: none takes away what another writes.
children = []
for number in range(4):
    child = os.fork()
    if child == 0:
        for _ in range(60):
            with written(folder / "file") as place:
                place.write_text(str(number) * 100)
            try:
                with whole_folder(folder / "whole", "test", 1) as place:
                    (place / "x").write_text(str(number))
                    (place / "y").write_text(str(number))
            except ValueError as error:  # two that replace the same folder may meet; what they wrote in is theirs
                assert "unfinished/" not in str(error), error
        os._exit(0)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
assert len(set((folder / "file").read_text())) == 1
with written(folder / "file") as place, whole_folder(folder / "whole", "test", 1) as other:
    place.write_text("last")
    (other / "x").touch()
assert hidden() == [], hidden()

# A writer is killed; the child that it has forked lives on, and holds nothing.
told, tell = os.pipe()
writer = os.fork()
if writer == 0:
    with written(folder / "file") as place:
        place.write_text("half")
        if os.fork() == 0:
            time.sleep(60)
        os.write(tell, str(os.getpid()).encode())
        time.sleep(60)
os.read(told, 10)
assert len(hidden()) == 1
with written(folder / "file") as place:
    place.write_text("meanwhile")
assert len(hidden()) == 1, "the writer lives"
os.kill(writer, signal.SIGKILL)
os.waitpid(writer, 0)
assert len(hidden()) == 1
with written(folder / "file") as place:
    place.write_text("last")
assert hidden() == [], hidden()
assert (folder / "file").read_text() == "last"
os.killpg(0, signal.SIGTERM)
"""


def test_writers_at_once_and_writers_that_are_killed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WRITERS, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )
    assert done.returncode == -15, done.stderr


@pytest.mark.slow
def test_whatever_writes_leaves_nothing_hidden_once_it_was_done_again_after_kills(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.killed_writers", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
