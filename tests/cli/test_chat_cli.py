"""`gsa chat`, as one types it, and through a pipe."""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path

import pytest

from gsa.cli import main
from gsa.cli.console import Output
from gsa.infer import Sampling, State
from gsa.infer.chat import Chat
from gsa.infer.text import TextEngine
from tests.infer.talking import write_model

OPTIONS = ("-n", "6", "--temperature", "0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def run(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, folder: Path, typed: str | bytes, *args: str
) -> tuple[int, str, str]:
    """The end of a conversation with these lines, as bytes or text."""
    content = typed if isinstance(typed, bytes) else typed.encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
    code = 0
    try:
        main(["chat", "--model", str(folder), *args])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    return (code, *capsys.readouterr())


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def replies(folder: Path, *texts: str, system: str | None = None) -> list[str]:
    chat = Chat(TextEngine.load(folder), Sampling(max_tokens=6), system)
    return ["".join(piece.text for piece in chat.reply(text)) for text in texts]


def test_a_conversation_through_a_pipe(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    code, out, err = run(capsys, monkeypatch, folder, "Who?\n\nnaïve: where\n", *OPTIONS)
    assert (code, err) == (0, "")
    assert out == "".join(f"{reply}\n" for reply in replies(folder, "Who?", "naïve: where"))
    code, out, _ = run(capsys, monkeypatch, folder, "Who?", *OPTIONS, "--system", "Be brief.")
    assert out == replies(folder, "Who?", system="Be brief.")[0] + "\n"


def test_commands(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> None:
    state = tmp_path / "my talk.state"
    typed = f"/save {state}\nWho?\n/save {state}\n/save\n/fly\n/save {tmp_path}\n/reset\nWho?\n/exit\nnever read\n"
    code, out, err = run(capsys, monkeypatch, folder, typed, *OPTIONS)
    assert code == 0
    assert out == 2 * f"{replies(folder, 'Who?')[0]}\n"
    lines = err.splitlines()
    engine = TextEngine.load(folder)
    saved = State.load(state, engine.engine.model)
    assert lines == [
        "gsa: there is no state to save before the first reply",
        f"gsa: {state}: the state after {saved.tokens} tokens",
        "gsa: there is no '/save'; there are /save FILE, /reset, /exit",
        "gsa: there is no '/fly'; there are /save FILE, /reset, /exit",
        lines[4],
        "gsa: the conversation begins anew",
    ]
    assert str(tmp_path) in lines[4]


def test_options_arrive(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    arrived: list[Sampling] = []
    begin = Chat.__init__

    def watched(self: Chat, engine: TextEngine, sampling: Sampling, system: str | None) -> None:
        arrived.append(sampling)
        begin(self, engine, sampling, system)

    monkeypatch.setattr(Chat, "__init__", watched)
    filters = ("--top-k", "9", "--top-p", "0.5", "--min-p", "0.1", "--repetition-penalty", "1.2", "--seed", "4")
    weights = ("--weights", "int8", "--threads", "1")
    assert run(capsys, monkeypatch, folder, "", "-n", "3", "--temperature", "0.7", *filters, *weights)[0] == 0
    expected = Sampling(max_tokens=3, temperature=0.7, top_k=9, top_p=0.5, min_p=0.1, repetition_penalty=1.2, seed=4)
    assert arrived == [expected]


def test_on_a_terminal_there_is_a_prompt(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(io.BytesIO(b"Who?\n"), encoding="utf-8"))
    main(["chat", "--model", str(folder), *OPTIONS])
    out, err = capsys.readouterr()
    assert out.startswith("> ")
    assert err == "/save FILE, /reset, /exit; Ctrl-C stops a reply, Ctrl-D ends\n"


def interrupt(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Sends a signal when the first text of a reply is shown."""
    write, waiting = Output.write, [number]

    def interrupted(self: Output, text: str) -> None:
        write(self, text)
        if text and waiting:
            signal.raise_signal(waiting.pop())

    monkeypatch.setattr(Output, "write", interrupted)


def test_ctrl_c_stops_a_reply_and_nothing_else(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    interrupt(monkeypatch, signal.SIGINT)
    code, out, err = run(capsys, monkeypatch, folder, "Who?\n/reset\nWho?\n", *OPTIONS)
    assert (code, err) == (0, "gsa: the conversation begins anew\n")
    whole = replies(folder, "Who?")[0]
    first = out.removesuffix(f"\n{whole}\n")
    assert len(first) < len(whole)
    assert whole.startswith(first)


def test_sigterm_ends_all(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    interrupt(monkeypatch, signal.SIGTERM)
    code, out, _ = run(capsys, monkeypatch, folder, "Who?\nWhere?\n", *OPTIONS)
    assert (code, out[-1]) == (143, "\n")


def test_nobody_reading_ends_all(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Who?\nWhere?\n")))
    with open(writing, "w", encoding="utf-8") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        with pytest.raises(SystemExit) as exit_:
            main(["chat", "--model", str(folder), *OPTIONS])
    assert exit_.value.code == 141


@pytest.mark.parametrize(
    ("args", "typed", "message"),
    [
        (("--model", "gsa-tiny"), b"", "has no chat template"),
        (("--model", "nowhere"), b"", "there is no folder nowhere"),
        (("--top-p", "2"), b"", "top_p must be at most 1"),
        ((), b"\xff\n", "standard input is not UTF-8"),
    ],
)
def test_mistakes_end_with_a_sentence(
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    args: tuple[str, ...],
    typed: bytes,
    message: str,
) -> None:
    code, _, err = run(capsys, monkeypatch, folder, typed, *args)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
