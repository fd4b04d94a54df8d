"""An evaluation that was stopped goes on where it was, with the answers that it has."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gsa.errors import GSAError
from gsa.eval.answers import Answers
from gsa.eval.reader import Continuation, Score
from tests.eval.cases import Fixed
from tests.examples import examples

ASKED = [Continuation((i, 1), (2,) * (1 + i % 2)) for i in range(6)]


def ask(path: Path | None, reader: Fixed, asked: list[Continuation] = ASKED) -> list[Score]:
    with Answers(path, quiet=True) as answers:
        return answers.scores(reader, asked, batch_size=2)


def test_only_what_is_not_known_is_asked(tmp_path: Path) -> None:
    path, reader = tmp_path / "folder" / "answers.jsonl", Fixed()
    expected = ask(None, Fixed())
    assert [score.log_likelihood for score in expected] == [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]
    assert ask(path, reader, ASKED[:4]) == expected[:4]
    assert ask(path, reader) == expected
    assert ask(path, reader, [*ASKED, *ASKED]) == expected * 2
    assert reader.asked == 6
    # Another model, another way of computing, another limit: nothing is taken over.
    other = Fixed("b")
    assert ask(path, other) == expected
    other.about["compute"] = "bf16"
    ask(path, other)
    other.max_length = 10
    ask(path, other)
    assert other.asked == 18


def test_texts_depend_on_how_they_are_asked_for(tmp_path: Path) -> None:
    reader, prompts = Fixed(), [(1, 2), (3,)]
    for _ in range(2):
        with Answers(tmp_path / "a", quiet=True) as answers:
            for settings in (
                {"max_tokens": 5, "until": ["."]},
                {"max_tokens": 6, "until": ["."]},
                {"max_tokens": 5, "until": []},
            ):
                found = answers.texts(reader, prompts, batch_size=2, **settings)
                assert found == [f"3 {settings['max_tokens']} {settings['until']}"] * 2
    assert reader.asked == 6


@examples(20)
@given(st.integers(0, 10**6))
def test_a_torn_line_is_left_out_and_asked_again(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    """Whatever the moment at which a run was stopped."""
    path, reader = tmp_path_factory.mktemp("torn") / "answers.jsonl", Fixed()
    expected = ask(path, reader)
    content = path.read_bytes()
    kept = content[: cut % (len(content) + 1)]
    path.write_bytes(kept)
    again = Fixed()
    assert ask(path, again) == expected
    assert again.asked == 6 - kept.count(b"\n")
    assert len(path.read_bytes().splitlines()) == 6


def test_an_interruption_loses_only_what_had_not_come(tmp_path: Path) -> None:
    class Stopped(Fixed):
        def score(self, requests, *, batch_size, reuse=True):
            for answered, answer in enumerate(super().score(requests, batch_size=batch_size)):
                if answered == 4:
                    raise KeyboardInterrupt
                yield answer

    path = tmp_path / "answers.jsonl"
    with pytest.raises(KeyboardInterrupt):
        ask(path, Stopped())
    rest = Fixed()
    ask(path, rest)
    assert rest.asked == 2


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    for line in (
        "x",
        "[]",
        "{}",
        '{"key": "a"}',
        '{"key": 1, "answer": "text"}',
        '{"key": "a", "answer": [1, true]}',
        '{"key": "a", "answer": [NaN, true]}',
        '{"key": "a", "answer": [-1.0]}',
        "[" * 100_000,
    ):
        path.write_text('{"key": "a", "answer": [-1.0, true]}\n' + line + "\n")
        with pytest.raises(GSAError, match="line 2: expected"):
            Answers(path)
    with pytest.raises(GSAError, match="cannot be used"):
        Answers(tmp_path)
    # A key that means something else.
    path.unlink()
    with Answers(path, quiet=True) as answers:
        answers.texts(Fixed(), [(1,)], max_tokens=1, until=[], batch_size=1)
    key = json.loads(path.read_text())["key"]
    path.write_text(json.dumps({"key": key, "answer": [-1.0, True]}) + "\n")
    with Answers(path, quiet=True) as answers, pytest.raises(GSAError, match="is a score, expected a text"):
        answers.texts(Fixed(), [(1,)], max_tokens=1, until=[], batch_size=1)


def test_two_runs_do_not_write_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with Answers(path), pytest.raises(GSAError, match="another process is writing"):
        Answers(path)
    Answers(path).close()
