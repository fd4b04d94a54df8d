"""What is wrong with a command is told in plain words and few lines, and so is help, for every verb."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from jsonargparse import auto_parser

from gsa.cli.parser import Parser
from gsa.cli.values import Value, WrongValue
from gsa.cli.verbs import GSA, Group, Verb, load
from tests.cli.running import run

JARGON = ("Literal", "Union", "<class", "NoneType", "typing.", "type:", "null", "Parser key", "str |", "Traceback")


def every_verb(group: Group = GSA, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Verb]]:
    for name, entry in group.verbs.items():
        if isinstance(entry, Group):
            yield from every_verb(entry, (*path, name))
        else:
            yield (*path, name), entry


VERBS = {" ".join(path): (path, verb) for path, verb in every_verb()}


def told(capsys: pytest.CaptureFixture, *args: str | Path) -> str:
    """What is said about a mistake; it stands in the first of at most five lines, and the others say where to go."""
    code, out, err = run(capsys, *args)
    first, *others = err.splitlines()
    assert (code, out) == (2, "")
    assert len(others) <= 4
    assert others[0].startswith("usage: gsa ")
    assert others[-1].endswith(" --help tells more")
    for word in JARGON:
        assert word not in err, err
    return first


@pytest.mark.parametrize("name", VERBS)
def test_help_speaks_plainly(capsys: pytest.CaptureFixture, name: str) -> None:
    path, verb = VERBS[name]
    code, out, err = run(capsys, *path, "--help")
    assert (code, err) == (0, "")
    summary = GSA.summary if name == "help" else verb.summary  # `gsa help --help` lists the verbs
    assert "".join(summary.split()) in "".join(out.split())
    assert max(map(len, out.splitlines())) <= 80
    for word in JARGON:
        assert word not in out, word
    if name not in ("help",):
        assert out.startswith(f"usage: gsa {name} ")


@pytest.mark.parametrize("name", [name for name in VERBS if name != "help"])
def test_every_verb_tells_mistakes_plainly(capsys: pytest.CaptureFixture, name: str) -> None:
    path, verb = VERBS[name]
    assert told(capsys, *path, "--zzzzzz") == f"gsa {name}: there is no --zzzzzz"
    kinds: dict[str, str] = {}
    for action in auto_parser(load(verb), prog=f"gsa {name}", parser_class=Parser)._actions:
        option = next((option for option in action.option_strings if option.startswith("--")), "")
        if option not in ("", "--recipe") and isinstance(action.type, Value):
            kinds.setdefault(action.type.words, option)  # one of each kind: all take the same way
    for words, option in kinds.items():
        wrong = option[:-1] + option[-1] * 2
        assert told(capsys, *path, wrong) == f"gsa {name}: there is no {wrong}; did you mean {option}?"
        assert told(capsys, *path, option) == f"gsa {name}: {option} needs a value"
        if words not in ("text", "the name of a file"):
            assert told(capsys, *path, option, "abc") == f"gsa {name}: {option} must be {words}, got 'abc'"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("generate", "a", "-n", "abc"), "gsa generate: -n must be a whole number, got 'abc'"),
        (("generate", "a", "--max-tokens=1.5"), "gsa generate: --max-tokens must be a whole number, got '1.5'"),
        (("generate", "a", "--tempature", "1"), "gsa generate: there is no --tempature; did you mean --temperature?"),
        (("generate", "a", "--temperature", "hot"), "gsa generate: --temperature must be a number, got 'hot'"),
        (("generate", "a", "b"), "gsa generate: 'b' is one word too many; text with spaces goes into quotes"),
        (("generate", "a", "--json=3"), "gsa generate: --json takes no value"),
        (
            ("generate", "--", "-x", "-n", "3"),
            "gsa generate: -n stands behind --, where all is text; options go in front of it",
        ),
        (("models", "a"), "gsa models: 'a' is one word too many"),
        (("export",), "gsa export: CHECKPOINT and OUT are missing"),
        (
            ("export", "a", "b", "--dtype", "float16"),
            "gsa export: --dtype must be one of fp32, bf16, fp16, got 'float16'",
        ),
        (
            ("train", "--precision", "float32"),
            "gsa train: --precision must be one of auto, fp32, bf16, fp16, got 'float32'",
        ),
        (("train", "--model-options", "3"), "gsa train: --model-options must be names with values, as in "),
        (("train", "--config", "nowhere.yaml"), "gsa train: there is no file "),
        (("data", "prepare", "--out", "x"), "gsa data prepare: SOURCE and --tokenizer are missing"),
        (("state", "save", "--out", "x"), "gsa state save: --file is missing"),
        (("kernels", "--dtype", "float"), "gsa kernels: --dtype must be one of all, bf16, fp16, fp32, got 'float'"),
    ],
)
def test_the_first_line_says_what_is_wrong(capsys: pytest.CaptureFixture, args: tuple[str, ...], message: str) -> None:
    assert told(capsys, *args).startswith(message)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("batch_size: abc", "--batch-size must be a whole number, got 'abc'"),
        ("batchsize: 3", "there is no setting 'batchsize'; did you mean batch_size?"),
        ("precision: float32", "--precision must be one of auto, fp32, bf16, fp16, got 'float32'"),
        ("data: 3", "--data must be text, got 3"),
        ("compile: 3", "a switch must be true or false, got 3"),
        ("- 1", "the file of settings must be names with values, got - 1"),
        ("a: [", "the file of settings is not YAML: "),
    ],
)
def test_mistakes_in_recipes(capsys: pytest.CaptureFixture, tmp_path: Path, recipe: str, message: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe)
    assert told(capsys, "train", "--config", path).startswith(f"gsa train: {message}")


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("{}", "gsa: the file of settings has no verb with its options"),
        ("bench: {ops: {threads: x}}", "gsa: bench.ops.threads must be a whole number, got 'x'"),
        ("bench: {ops: {threds: 1}}", "gsa: of 'bench' there is a setting that it does not have"),
    ],
)
def test_mistakes_in_files_with_a_verb(
    capsys: pytest.CaptureFixture, tmp_path: Path, recipe: str, message: str
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe)
    assert told(capsys, "--config", path) == message


def test_values() -> None:
    count, share, name = Value.of(int), Value.of(float | None), Value.of(str, ("a", "b"))
    assert count is not None
    assert share is not None
    assert name is not None
    assert [count("12"), count(12), count("1e9"), count("1_000"), count(3.0)] == [12, 12, 10**9, 1000, 3]
    assert [share("null"), share(None), share("1"), share(2)] == [None, None, 1.0, 2.0]
    assert name("a") == "a"
    for value, given in (
        (count, "x"),
        (count, True),
        (count, None),
        (count, "1e-1"),
        (share, "x"),
        (name, "c"),
        (name, 1),
    ):
        with pytest.raises(WrongValue, match="must be"):
            value(given)
