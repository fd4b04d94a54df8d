"""The probes: what is asked can be answered from the prompt, and answers are graded right."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gsa.errors import GSAError
from gsa.eval.probes import copy, mqar, needle, phonebook
from gsa.eval.probes.asking import Probe, answered
from gsa.eval.probes.options import unusual
from gsa.eval.reader import Reader
from tests.eval.standins import StandIn, ignorant, knowing, look_up, look_up_token, look_up_word

TEXT = "It rained. Nobody went out, and all was quiet! Was it? " * 30

PROBES: dict[str, Callable[[Reader], Probe]] = {
    "phonebook": lambda reader: phonebook.probe(reader, [3, 20], 3, 0),
    "needle": lambda reader: needle.probe(reader, [600, 900], [0, 50, 100], 2, 0, TEXT, "rain.txt"),
    "copy words": lambda reader: copy.probe(reader, [2, 12], "words", 3, 0),
    "copy letters": lambda reader: copy.probe(reader, [2, 12], "letters", 3, 0),
}
RECALL: dict[str, Callable[[Reader], Probe]] = {
    "tokens": lambda reader: mqar.probe(reader, [2, 16], "tokens", 3, 2, 0),
    "words": lambda reader: mqar.probe(reader, [2, 16], "words", 3, 2, 0),
}


def asked(reader: Reader, make: Callable[[Reader], Probe], folder: Path, plot: Path | None = None) -> dict:
    options = copy.Copy("stand-in", batch_size=4, output=str(folder), plot=None if plot is None else str(plot))
    return answered(reader, make(reader), options)


@pytest.mark.parametrize("name", PROBES)
def test_who_looks_it_up_is_right_and_who_does_not_know_is_wrong(name: str, tmp_path: Path) -> None:
    result = asked(knowing(), PROBES[name], tmp_path)
    assert {metric["value"] for metric in result["metrics"].values()} == {1.0}
    assert all(row[name] == 1 for row in result["cells"] for name in result["metrics"])
    result = asked(ignorant(), PROBES[name], tmp_path)
    assert {metric["value"] for metric in result["metrics"].values()} == {0.0}


@pytest.mark.parametrize("form", RECALL)
def test_associative_recall(form: str, tmp_path: Path) -> None:
    look = {"tokens": look_up_token, "words": look_up_word}[form]
    result = asked(StandIn(value=look), RECALL[form], tmp_path)
    assert [(row["pairs"], row["candidates"], row["vocabulary"]) for row in result["cells"]] == [(2, 1, 1), (16, 1, 1)]
    result = asked(StandIn(value=lambda *request: not look(*request)), RECALL[form], tmp_path)
    assert [(row["candidates"], row["vocabulary"]) for row in result["cells"]] == [(0, 0), (0, 0)]
    assert result["settings"]["form"] == form


def test_what_is_written_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    plot = tmp_path / "map.png"
    asked(knowing(), PROBES["needle"], tmp_path / "new", plot)
    out, err = capsys.readouterr()
    assert "Needle in a haystack" in out
    assert "████100%" in out
    assert "needle.json: written" in err
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["needle.json"]
    result = json.loads((tmp_path / "new" / "needle.json").read_text())
    assert (result["format"], result["task"], result["main"]) == ("gsa-eval-1", "needle", "found")
    assert len(result["samples"]["answer"]) == len(result["samples"]["found"]) == 12
    assert result["samples"]["right"][0] in result["samples"]["answer"][0]


def test_what_is_asked_otherwise_gets_a_file_of_its_own(tmp_path: Path) -> None:
    assert unusual(copy.Copy("a", batch_size=3, json=True, output="b")) == {}
    assert unusual(mqar.Mqar("a", lengths="3,5", seed=1)) == {"lengths": "3,5", "seed": 1}
    made = PROBES["copy words"](knowing())
    for options in ({}, {"lengths": "2,12"}, {"lengths": "2,12", "form": "letters"}):
        answered(knowing(), made, copy.Copy("stand-in", output=str(tmp_path), **options))
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["copy-lengths=2-12-form=letters.json", "copy-lengths=2-12.json", "copy.json"]


def test_a_single_question_has_no_standard_error(tmp_path: Path) -> None:
    result = asked(knowing(), lambda reader: phonebook.probe(reader, [3], 1, 0), tmp_path)
    assert result["metrics"]["exact"] == {"value": 1.0, "stderr": None, "higher_is_better": True}


def test_prompts_are_as_long_as_was_asked_and_needles_as_deep() -> None:
    for question in PROBES["needle"](knowing()).questions:
        length, depth = question.cell
        assert length - 60 < len(question.prompt) <= length  # within a sentence
        text = bytes(question.prompt).decode().split("\n")[1]
        before, after = text.split("One of the special magic numbers")
        after = after.partition(". ")[2]
        assert abs(100 * len(before) / (len(before) + len(after)) - depth) < 12
        assert not (depth == 0 and before)
        assert not (depth == 100 and after)


def test_a_phone_book_ends_with_two_lines_of_it_and_a_name_of_another() -> None:
    (question, *_) = PROBES["phonebook"](knowing()).questions
    *book, empty, first, second, name = bytes(question.prompt).decode().split("\n")
    assert (len(book), empty) == (3, "")
    assert {first, second} < set(book)
    assert first != second
    assert f"{name} {question.right}" in set(book) - {first, second}
    assert len(question.right) == 10


def test_seeds_decide_what_is_asked() -> None:
    for make in (
        lambda seed: phonebook.probe(knowing(), [5], 2, seed),
        lambda seed: needle.probe(knowing(), [450], [50], 2, seed, TEXT),
        lambda seed: copy.probe(knowing(), [5], "words", 2, seed),
        lambda seed: mqar.probe(knowing(), [5], "tokens", 2, 1, seed),
    ):
        prompts = [[question.prompt for question in make(seed).questions] for seed in (0, 0, 1)]
        assert prompts[0] == prompts[1] != prompts[2]
        assert prompts[0][0] != prompts[0][1]


def test_it_goes_on_where_it_was_stopped(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    done = []

    def answer(prompt: str) -> str:
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append(prompt)
        return look_up(prompt)

    with pytest.raises(KeyboardInterrupt):
        asked(StandIn(answer), PROBES["phonebook"], tmp_path)
    journal = tmp_path / "phonebook.answers"
    assert f"{journal}: what is answered so far; the same command goes on from there" in capsys.readouterr().err
    journal.write_bytes(journal.read_bytes() + b'{"key": "cut sho')  # as by a kill
    reader = knowing()
    result = asked(reader, PROBES["phonebook"], tmp_path)
    assert reader.asked == 2
    assert result["metrics"]["exact"]["value"] == 1
    assert "goes on with 4 answers of before" in capsys.readouterr().err
    assert not journal.exists()


def test_lengths_beyond_what_a_model_sees_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    reader = StandIn(look_up, max_length=800)
    result = asked(reader, PROBES["needle"], tmp_path)
    assert {row["length"] for row in result["cells"]} == {600}
    assert "sees at most 800 tokens at once; left out: length 900" in capsys.readouterr().err
    with pytest.raises(GSAError, match="sees at most 100 tokens at once, expected shorter lengths"):
        asked(StandIn(look_up, max_length=100), PROBES["needle"], tmp_path)


def test_lines_of_one_length_are_written_together() -> None:
    questions = copy.probe(knowing(), [5, 9], "words", 4, 0).questions
    assert len({question.spare for question in questions}) == 2
    for question in questions:
        assert question.spare > len(question.right.encode()) + 1


def test_copies_are_graded_word_by_word() -> None:
    (question, *_) = copy.probe(knowing(), [5], "letters", 1, 0).questions
    right = question.right.split(" ")
    wrong = [*right[:2], "?", right[3]]
    assert copy.grade(question, " " + " ".join(wrong)) == {"exact": 0, "parts": 0.75}
    assert copy.grade(question, " " + " ".join([*right, "more"])) == {"exact": 0, "parts": 1}
    assert copy.grade(question, "") == {"exact": 0, "parts": 0}


def test_only_a_whole_number_is_right() -> None:
    probe = PROBES["phonebook"](knowing())
    question = probe.questions[0]
    assert probe.grade(question, f" {question.right} ")["exact"] == 1
    assert probe.grade(question, f" {question.right}0")["exact"] == 0
    assert probe.grade(question, f"\n{question.right}")["exact"] == 0


def test_what_cannot_be_asked() -> None:
    with pytest.raises(GSAError, match="lengths must be at most 59, half of the 118 different tokens, got 64"):
        mqar.probe(knowing(), [64], "tokens", 1, 1, 0)
    with pytest.raises(GSAError, match="lengths must be at least 376, the tokens of a question alone, got 200"):
        needle.probe(knowing(), [200], [0], 1, 0, TEXT)
    with pytest.raises(GSAError, match="there is no text to hide a number in"):
        needle.probe(knowing(), [450], [0], 1, 0, " \n ")
