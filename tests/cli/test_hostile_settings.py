"""Recipes and options of any values end at once, with one message and exit code 2; no file is quoted but the recipe."""

from __future__ import annotations

import os
import threading
from contextlib import redirect_stderr, suppress
from dataclasses import fields
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gsa.cli import main
from gsa.errors import GSAError
from gsa.files import named
from gsa.sampling import Sampling
from gsa.train.settings import TrainSettings
from tests.cli.running import run
from tests.examples import examples
from tests.hostile import TEXTS, assert_readable, ended, texts, values

NAMES = [entry.name for entry in fields(TrainSettings)]
VALID = {"data": "nowhere", "out": "nowhere-either", "steps": 3}


def refused(capsys: pytest.CaptureFixture, *args: str | Path) -> str:
    """The message that a command ends with."""
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, ""), err
    assert "Traceback" not in err
    assert_readable(err)
    return err


@examples(300)
@given(st.dictionaries(st.sampled_from(NAMES), values, max_size=3))
def test_settings_of_any_values(given_values: dict[str, Any]) -> None:
    ended(lambda: TrainSettings(**{**VALID, **given_values}))


@examples(200)
@given(st.dictionaries(st.sampled_from([entry.name for entry in fields(Sampling)]), values, max_size=3))
def test_sampling_of_any_values(given_values: dict[str, Any]) -> None:
    ended(lambda: Sampling(**given_values))


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)
recipes = st.dictionaries(
    st.sampled_from([*NAMES, "config", "recipe", "help", "print_config"]) | st.text(max_size=9), plain
)


@examples(120)
@given(recipes.map(lambda given: yaml.safe_dump({**given, "data": "nowhere"}, allow_unicode=True)) | texts)
def test_a_recipe_of_any_text(text: str) -> None:
    told = StringIO()
    with TemporaryDirectory() as folder, redirect_stderr(told):
        path = Path(folder) / "recipe.yaml"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        with pytest.raises(SystemExit) as ended_with:
            main(["train", "--config", str(path)])
    assert ended_with.value.code == 2
    assert_readable(told.getvalue())


def _written_to(pipe: Path, text: str) -> None:
    with suppress(BrokenPipeError):  # one that is too long is not read to its end
        pipe.write_text(text)


def test_recipes_that_once_broke_something(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("root:x:0:0\nnobody:x:1:1\n")
    laughs = "a: &a [x, x]\n" + "".join(
        f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    for text, message in (
        (f"config: {secret}\n", "has the name 'config'"),
        (f"config: {secret}\nout:\t y\n", "has the name 'config'"),
        (f'"con\\x66ig": {secret}\n', "has the name 'config'"),
        (f"model_options: {{config: {secret}}}\n", "has the name 'config'"),
        (f"data: [{{config: {secret}}}]\n", "has the name 'config'"),
        (f"- config: {secret}\n", "must be names with values"),
        ("seed: !!bool foo", "has the tag 'tag:yaml.org,2002:bool'"),
        ("seed: !!timestamp foo", "has the tag"),
        ("seed: !!int ''", "has the tag"),
        ("out: 2026-02-30\nsteps: 3", "data is missing"),
        ("seed: " + "9" * 5000, "a number of thousands of digits"),
        ("seed: 1e400", "--seed must be a whole number, got inf"),
        ("seed: 100000000000000000000", "seed must be at most 18446744073709551615"),
        ("threads: 1000000000", "threads must be at most 1024"),
        ("workers: 1000000000", "workers must be at most 256"),
        ("epochs: 1e300", "epochs must be at most 1000000.0"),
        ("epochs: .nan", "epochs must be finite"),
        ("batch_size: 1000000000000", "batch_size must be at most 1048576"),
        ('data: "a\\0b"', r"data: 'a\x00b' cannot be the name of a file"),
        ("data: " + "x" * 5000, "cannot be used: File name too long"),
        ("model_options: " + "{a: " * 3000, "nested more than 20 deep"),
        (laughs, "repeats a part of itself (*a)"),
        ("x" * 10**6, "has more than 65,536 bytes"),
        ("lr: \x1b[2J", "the file of settings is not YAML"),
    ):
        (tmp_path / "recipe.yaml").write_text(text)
        told = refused(capsys, "train", "--config", tmp_path / "recipe.yaml")
        assert message in told, told
        assert "root:x" not in told
    for name in ("a\0b", "a\ud800b"):
        assert "cannot be the name of a file" in refused(capsys, "train", "--config", name)


def test_settings_from_a_pipe_are_looked_at_too(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    secret, pipe = tmp_path / "secret", tmp_path / "pipe"
    secret.write_text("root:x:0:0\n")
    os.mkfifo(pipe)
    for text, message in (
        (f"config: {secret}\n", "has the name 'config'"),
        ("x" * 10**6, "has more than 65,536 bytes"),
        ("data: nowhere\nthreads: 1000000000", "threads must be at most 1024"),
    ):
        writer = threading.Thread(target=_written_to, args=(pipe, text))
        writer.start()
        assert message in refused(capsys, "train", "--config", pipe)
        writer.join()


@pytest.mark.parametrize("text", [text for text in TEXTS if text.strip() and text not in ("gsa", "none", "\x1b[2J")])
def test_names_that_no_file_can_have(capsys: pytest.CaptureFixture, tmp_path: Path, text: str) -> None:
    """Or that none has here."""
    source, out = tmp_path / "text.txt", tmp_path / text.replace("../", "./") if "\0" not in text else text
    source.write_text("text")
    for args in (
        ("generate", "a", "--model", text),
        ("generate", "a", "--file", text),
        ("generate", "a", "--state", text),
        ("generate", "a", "-n", text),
        ("generate", "a", "--seed", text),
        ("import", text, tmp_path / "out"),
        ("export", text, tmp_path / "out"),
        ("state", "show", text),
        ("data", "check", text),
        ("data", "prepare", text, "--tokenizer", "bytes", "--out", tmp_path / "out"),
        ("data", "prepare", source, "--tokenizer", "bytes", "--out", tmp_path / "out", "--holdout", text),
    ):
        refused(capsys, *args)
    if len(text) > 4000 or "\0" in text or "\ud800" in text:
        for args in (
            ("generate", "a", "--save-state", out),
            ("import", tmp_path, out),
            ("export", tmp_path, out),
            ("state", "save", "--file", source, "--out", out),
            ("data", "prepare", source, "--tokenizer", "bytes", "--out", out),
            ("tokenizer", "train", source, "--vocab-size", "300", "--out", out),
        ):
            refused(capsys, *args)


def test_a_name_of_bytes_that_are_no_text_works(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    """File systems have such names, and Python writes them with halves of surrogates."""
    out = tmp_path / "a\udcffb"
    source = tmp_path / "c\udcff.txt"
    source.write_text("some text " * 20)
    code, _, err = run(capsys, "data", "prepare", source, "--tokenizer", "bytes", "--out", out, "--processes", "1")
    assert code == 0, err
    code, shown, err = run(capsys, "data", "check", out)
    assert (code, r"a\udcffb: whole" in shown) == (0, True), err


def test_counts_have_limits(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    source.write_text("text")
    prepare = ("data", "prepare", source, "--tokenizer", "bytes", "--out", tmp_path / "out")
    for args, message in (
        ((*prepare, "--processes", "100000"), "processes must be at most 1024, got 100000"),
        ((*prepare, "--max-tokens", "9" * 30), "max_tokens must be at most 9223372036854775807"),
        ((*prepare, "--holdout", "9" * 5000), "holdout must be a share as in 1%"),
        (("bench", "train", "--rounds", "9" * 12), "at most 2147483647"),
    ):
        assert message in refused(capsys, *args)


def test_paths_that_are_fine(tmp_path: Path) -> None:
    assert named(tmp_path / "new" / "place", "test") == tmp_path / "new" / "place"
    assert named("owner/name", "test") == Path("owner/name")
    with pytest.raises(GSAError, match=r"test: .* cannot be used: File name too long"):
        named("x" * 300, "test")
