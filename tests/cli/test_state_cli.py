"""`gsa state`, as one types it."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import gsa.pretrained
from gsa.infer import Engine, State
from gsa.infer.text import TextEngine
from gsa.infer.tokens import TokenHash
from tests.cli.running import run
from tests.cli.streams import ENDS, output

ALICE = Path(__file__).parent.parent / "material" / "alice.txt"
START = "Alice was beginning to get very tired"


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(START + " of sitting by her sister on the bank. naïve\n")
    return path


def test_a_document_is_read_once(capsys: pytest.CaptureFixture, tmp_path: Path, book: Path) -> None:
    state = tmp_path / "book.state"
    code, out, err = run(capsys, "state", "save", "--file", book, "--out", state)
    engine = TextEngine.load()
    ids = engine.encode(book.read_text())
    assert (code, err) == (0, "")
    assert out.startswith(f"{state}: {len(ids)} tokens, ")
    assert out.endswith(" s\n")
    assert State.load(state, engine.engine.model).digest == TokenHash.advance(TokenHash.EMPTY, ids).hex()
    shared = ("-n", "8", "--temperature", "0")
    whole = run(capsys, "generate", "--file", book, "She said", *shared)[1]
    assert run(capsys, "generate", "--state", state, "She said", *shared) == (0, whole, "")


def test_a_state_goes_on_from_an_earlier_one(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, book: Path
) -> None:
    first, second = tmp_path / "first.state", tmp_path / "second.state"
    run(capsys, "state", "save", "--file", book, "--out", first, "--model", gsa.pretrained.folder())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"And on.")))
    code, out, _ = run(capsys, "state", "save", "--file", "-", "--out", second, "--state", first, "--weights", "int8")
    engine = TextEngine.load()
    ids = [*engine.encode(book.read_text()), *engine.encode("And on.", continues=True)]
    assert (code, f"tokens after {State.load(first, engine.engine.model).tokens}, " in out) == (0, True)
    found = State.load(second, engine.engine.model)
    assert (found.digest, found.weights) == (TokenHash.advance(TokenHash.EMPTY, ids).hex(), "int8")


def test_what_a_state_is(capsys: pytest.CaptureFixture, tmp_path: Path, book: Path) -> None:
    state = tmp_path / "book.state"
    run(capsys, "state", "save", "--file", book, "--out", state, "--threads", "1")
    loaded = State.load(state, Engine("gsa-tiny").model)
    code, out, _ = run(capsys, "state", "show", state, "--json")
    assert (code, json.loads(out)) == (
        0,
        {
            "file": str(state),
            "tokens": loaded.tokens,
            "bytes": state.stat().st_size,
            "tensors": 9,
            "vocab_size": 4096,
            "digest": loaded.digest,
            "fingerprint": loaded.fingerprint,
            "weights": "bf16",
        },
    )
    code, out, _ = run(capsys, "state", "show", state)
    assert code == 0
    assert f"{state}: whole; a state after {loaded.tokens} tokens, " in out
    assert f"model {loaded.fingerprint[:12]}, vocabulary 4096" in out

    content = bytearray(state.read_bytes())
    content[-1] ^= 1
    state.write_bytes(content)
    code, _, err = run(capsys, "state", "show", state)
    assert (code, f"state: {state}: the content does not have the hash" in err) == (2, True)


@pytest.mark.parametrize("kind", ENDS)
def test_an_output_that_fails_ends_with_a_sentence(
    capsys: pytest.CaptureFixture, tmp_path: Path, book: Path, kind: str
) -> None:
    state = tmp_path / "book.state"
    for args in (("save", "--file", book, "--out", state), ("show", state), ("show", state, "--json")):
        with output(kind):
            code, _, err = run(capsys, "state", *args)
        assert (code, err) == ENDS[kind]
    State.load(state, Engine("gsa-tiny").model)


def test_long_documents_show_how_far_they_are_read(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("gsa.reading_bar.WORTH_SHOWING", 600)
    (tmp_path / "long.txt").write_text("the whale " * 600)
    code, _, err = run(capsys, "state", "save", "--file", tmp_path / "long.txt", "--out", tmp_path / "long.state")
    assert code == 0
    assert "tokens/s" in err


def test_an_interruption_leaves_nothing(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stop(self: object, tokens: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gsa.reading_bar.ReadingBar.update", stop)
    code, _, err = run(capsys, "state", "save", "--file", ALICE, "--out", tmp_path / "alice.state")
    assert (code, err, os.listdir(tmp_path)) == (130, "\ngsa: stopped\n", [])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("save", "--file", "empty.txt", "--out", "a.state"), "empty.txt is empty"),
        (("save", "--file", "nowhere", "--out", "a.state"), "nowhere cannot be read"),
        (("save", "--file", "empty.txt"), "out"),
        (("save", "--file", str(ALICE), "--out", "nowhere/a.state"), "cannot be written"),
        (("save", "--file", str(ALICE), "--out", ""), "cannot be written"),
        (("save", "--file", str(ALICE), "--out", "a.state", "--model", "nowhere"), "there is no folder nowhere"),
        (("save", "--file", str(ALICE), "--out", "a.state", "--state", "empty.txt"), "empty.txt"),
        (("show", "nowhere"), "state: nowhere: there is no such file"),
        (("show", "."), "state: .: is not a file"),
        (("show", "pipe"), "state: pipe: is not a file"),
        (("show", "empty.txt"), "state: empty.txt: not a safetensors file: it has 0 bytes"),
        (("show", "other.safetensors"), "state: other.safetensors: not a state that gsa saved"),
    ],
)
def test_mistakes_end_with_a_sentence(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, args: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    os.mkfifo("pipe")
    save_file({"logits": torch.zeros(2)}, "other.safetensors")
    before = sorted(os.listdir())
    code, out, err = run(capsys, "state", *args)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert sorted(os.listdir()) == before
