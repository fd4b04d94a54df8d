"""The command line: help, versions, and how it ends."""

import builtins
import inspect
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gsa import __version__, presets
from gsa.cli import main
from gsa.cli.verbs import GSA, Group, Verb, load
from gsa.errors import GSAError
from gsa.pretrained import lacking


def run(capsys: pytest.CaptureFixture, *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(list(args))
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((), ["demo", "bench"]),
        (("--help",), ["demo", "bench", "Sequence models with slot memory."]),
        (("demo", "--help"), ["book into a state", "--out"]),
        (("models", "--help"), ["Lists presets and models", "--json"]),
        (("import", "--help"), ["flash-linear-attention", "PATH", "OUT"]),
        (("bench", "--help"), ["ops", "linear", "train"]),
        (("bench", "train", "--help"), ["--lengths", "--mixers", "--rounds", "with commas between"]),
        (
            ("bench", "ops", "--help"),
            ["--device", "--quick", "--threads", "--backend", "--no-json", "softmax attention"],
        ),
    ],
)
def test_help(capsys: pytest.CaptureFixture, args: tuple[str, ...], expected: list[str]) -> None:
    code, out, _ = run(capsys, *args)
    assert code == 0
    for text in expected:
        assert text in out


def verbs(group: Group = GSA) -> Iterator[Verb]:
    for entry in group.verbs.values():
        yield from [entry] if isinstance(entry, Verb) else verbs(entry)


def test_summaries_are_the_first_sentences_of_docstrings() -> None:
    for verb in verbs():
        first, *_ = (inspect.getdoc(load(verb)) or "").split("\n\n")
        assert verb.summary == " ".join(first.split()), verb.target


@pytest.mark.parametrize("args", [[], ["--help"], ["help"], ["--version"], ["help", "bench"], ["bnech"]])
def test_help_imports_nothing_heavy(args: list[str]) -> None:
    """Neither the parser nor any verb; the command is there in a fraction of a second."""
    script = f"""
import sys
from gsa.cli import main
try:
    main({args!r})
except SystemExit:
    print("loaded:", sorted(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = done.stdout.split("loaded: ")[1]
    for name in ("gsa.cli.verbs", "torch", "numpy", "jsonargparse", "rich", "gsa.bench", "gsa.train", "gsa.ops"):
        assert (f"'{name}'" in loaded) == (name == "gsa.cli.verbs"), name


def test_a_group_takes_a_file_with_a_verb(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("bench: {ops: {threads: 0}}")
    assert run(capsys, "--config", str(recipe)) == (2, "", "gsa: bench: threads must be at least 1, got 0\n")
    recipe.write_text("ops: {threads: 0}")
    assert run(capsys, "bench", "--config", str(recipe))[2] == "gsa: bench: threads must be at least 1, got 0\n"
    code, out, _ = run(capsys, "--print_config", "bench", "ops", "--quick")
    assert (code, "quick: true" in out) == (0, True)


def test_version(capsys: pytest.CaptureFixture) -> None:
    assert run(capsys, "--version")[1].strip() == f"gsa {__version__}"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("fly",), "gsa: there is no 'fly'; expected one of help, demo, doctor"),
        (("exprot",), "gsa: there is no 'exprot'; did you mean 'export'? expected one of help, demo"),
        (("data",), "gsa data: a verb is missing; expected one of prepare, chats, check\n"),
        (("--print-config",), "gsa: a verb is missing; expected one of help, demo"),
        (("data", "--print-config"), "gsa data: a verb is missing; expected one of prepare, chats, check\n"),
        (("--verzion",), "gsa: there is no --verzion; did you mean --version?"),
        (("help", "train", "extra"), "gsa: help: 'extra' is one word too many; expected a verb, as in gsa help data"),
        (("help", "train", "--zzz"), "gsa: help: '--zzz' is one word too many"),
        (("help", "--zzz"), "gsa: help: '--zzz' is one word too many"),
        (("bench", "dcode"), "gsa: bench: there is no 'dcode'; did you mean 'decode'? expected one of ops"),
        (("import", "nowhere"), "gsa import: OUT is missing"),
        (("import", "nowhere", "out"), "gsa: import: nowhere is not a folder"),
        (("bench", "train", "--mixers", "gza"), "gsa: bench: mixers: 'gza' is not known (did you mean 'gsa'?)"),
        (("bench", "train", "--lengths", "short"), "gsa: bench: lengths must be whole numbers"),
        (("bench", "ops", "--thread", "2"), "gsa bench ops: there is no --thread; did you mean --threads?"),
        (("bench", "ops", "--threads", "two"), "gsa bench ops: --threads must be a whole number, got 'two'"),
        (("bench", "ops", "--threads", "0"), "gsa: bench: threads must be at least 1, got 0"),
        (("bench", "ops", "--threads", "9999"), "gsa: bench: threads must be at most 1024, got 9999"),
        (("bench", "accuracy", "--json", "--markdown"), "gsa: bench: json and markdown exclude each other"),
        (("kernels", "--json", "--markdown"), "gsa: kernels: json and markdown exclude each other"),
        (("bench", "ops", "--quick", "--backend", "abacus"), "unknown engine 'abacus'"),
    ],
)
def test_mistakes_end_with_a_sentence(capsys: pytest.CaptureFixture, args: tuple[str, ...], message: str) -> None:
    code, _, err = run(capsys, *args)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("raised", "code"), [(KeyboardInterrupt(), 130), (GSAError("no"), 2)])
def test_interruptions(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, raised: BaseException, code: int
) -> None:
    def stop(*args: object, **options: object) -> None:
        raise raised

    monkeypatch.setattr("gsa.bench.ops.measure", stop)
    assert run(capsys, "bench", "ops")[0] == code


def test_ctrl_c_may_come_before_the_first_import(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = builtins.__import__

    def interrupted(name: str, *args: object, **options: object) -> object:
        if name == "jsonargparse":
            raise KeyboardInterrupt
        return known(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", interrupted)
    assert run(capsys, "models") == (130, "", "\ngsa: stopped\n")


@pytest.mark.parametrize(("raised", "code"), [("KeyboardInterrupt", 130), ("GSAError('no')", 2), ("SystemExit(3)", 3)])
def test_ctrl_c_while_it_ends_changes_nothing(raised: str, code: int) -> None:
    script = f"""
import atexit, os, signal, sys
import gsa.bench.ops, gsa.cli, gsa.console
from gsa.errors import GSAError
from gsa.pretrained import lacking

def stop(*args, **options):
    raise {raised}

def again(*args, **options):
    signal.raise_signal(signal.SIGINT)
    tell(*args, **options)

gsa.bench.ops.measure, tell, gsa.cli.tell = stop, gsa.cli.tell, again
atexit.register(signal.raise_signal, signal.SIGINT)
sys.argv = ["gsa", "bench", "ops"]
gsa.cli.main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    expected = {130: "\ngsa: stopped\n", 2: "gsa: no\n", 3: ""}[code]
    assert (done.returncode, done.stderr) == (code, expected)


def test_sigterm_leaves_nothing_half_written(tmp_path: Path) -> None:
    script = f"""
import signal, sys, pathlib
import gsa.bench.ops, gsa.cli
from gsa.files import whole_folder

def stop(*args, **options):
    with whole_folder(pathlib.Path({str(tmp_path)!r}, "out"), "test", 1) as folder:
        (folder / "half").write_text("half")
        signal.raise_signal(signal.SIGTERM)

gsa.bench.ops.measure = stop
sys.argv = ["gsa", "bench", "ops"]
gsa.cli.main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "")
    assert list(tmp_path.iterdir()) == []


def test_models_says_which_have_weights_in_80_columns(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    main(["models"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    known = {line.split()[0]: line.split()[1] for line in lines if line.startswith(" gsa-") and len(line.split()) == 9}
    assert known == {"gsa-smol": "here" if lacking("gsa-smol") is None else "missing", "gsa-tiny": "here"}
    for name in presets():
        assert sum(line.split()[:1] == [name] and line.startswith(" ") for line in lines) == 1  # none is wrapped
    assert "gsa-tiny has weights in the package." in lines
    assert lines[-1] == "The others are configurations to train."
