"""Prompts, windows and scores of the tasks that are defined here."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("lm_eval")

from gsa.errors import GSAError
from gsa.eval.groups import TASKS
from gsa.eval.local_data import DataFolder
from gsa.eval.tasks.cloze import Cutter, _drop_questions, cloze_task
from gsa.eval.tasks.documents import from_folder
from gsa.eval.tasks.long import geometric_mean, long_task
from gsa.eval.tasks.scores import contains, exact_match, f1
from tests.eval.byte_tokenizer import ByteTokenizer
from tests.examples import examples

DATA = DataFolder(Path(__file__).parent / "data")


def prompts(name: str, length: int = 2048) -> list[dict]:
    task = TASKS[name]
    documents = from_folder(task, DATA)
    assert documents is not None
    made = (
        cloze_task(task, documents, ByteTokenizer(), length)
        if task.kind == "cloze"
        else long_task(task, documents, task.shots)
    )
    return list(made.test_docs())


def test_documents_are_followed_by_what_they_complete() -> None:
    fda, swde, nq, trivia = (prompts(f"cloze_{name}")[0] for name in ("fda", "swde", "nq", "triviaqa"))
    assert fda["prompt"].endswith("Type of test: quantitative. Measurand:")
    assert fda["right"] == ["glucose"]
    assert swde["prompt"] == "The Lighthouse (film). Directed by A. Keeper. Runtime 95 min. Runtime:"
    assert nq["prompt"] == "The lighthouse was built in 1831 by the harbour board. The lighthouse was built in"
    assert trivia["prompt"] == "Lamps  The lamp burns oil. The lamp burns"


def test_squad_and_drop_take_the_form_of_questions() -> None:
    squad, drop = prompts("cloze_squad")[0], prompts("cloze_drop")[0]
    assert squad["prompt"].endswith("?")
    assert squad["right"]
    assert squad["prompt"].startswith("The Panthers finished the regular season")
    assert "Passage:" not in drop["prompt"]
    assert "Answer type" not in drop["prompt"]
    assert drop["prompt"].endswith("any possible attempt. How many field goals did Kris Brown kick?")
    assert drop["right"] == ["3"]
    with pytest.raises(GSAError, match=r"examples\[0\]"):
        list(_drop_questions({"examples": [{"input": "Passage: p", "target": ["1."]}]}, "file"))


def test_long_documents_are_cut_around_what_is_sought() -> None:
    text = "a" * 500 + "KEY" + "b" * 500
    cut = Cutter(ByteTokenizer(), 100)
    assert cut(text, ["key"]) == "a" * 50 + "KEY" + "b" * 47
    assert cut(text, ["nowhere"]) == cut(text, []) == "a" * 100
    assert cut("b" * 990 + "KEY", ["KEY"]) == "b" * 50 + "KEY"
    assert cut("short", ["key"]) == "short"
    with pytest.raises(GSAError, match="more than 50, got 50"):
        prompts("cloze_fda", 50)


@examples(50)
@given(st.text("ab é😀", max_size=60), st.integers(1, 40), st.text("ab", max_size=2))
def test_no_window_is_longer_than_asked_for(text: str, length: int, sought: str) -> None:
    cut = Cutter(ByteTokenizer(), length)(text, [sought])
    assert len(cut.encode()) <= length + 4  # half a character at an end may be shown as another
    assert cut == text or cut.strip("\N{REPLACEMENT CHARACTER}") == cut


def test_examples_of_long_tasks_are_of_other_documents() -> None:
    for question in prompts("long_qmsum"):
        *examples_, asked = question["prompt"].split("\n\nQuestion: ")
        assert len(examples_) == 2
        assert asked.endswith("\nAnswer:")
        meetings = [part.rpartition("\n\n")[2][:60] for part in examples_]
        assert meetings[0] != meetings[1]


def test_choices_of_long_tasks() -> None:
    lamp, _boat = prompts("long_quality")
    assert lamp["choices"] == ["at six", "at noon", "at night", "never"]
    assert lamp["right"] == ["at six"]
    assert "(A)" not in lamp["prompt"]
    free, yes = prompts("long_qasper")
    assert free["choices"] == []
    assert free["right"] == ["at six", "six"]
    assert yes["choices"] == ["yes", "no"]
    assert [each["right"] for each in prompts("long_qasper_yesno")] == [["Yes"], ["No"]]


def test_scores() -> None:
    assert contains("it was PARIS.", [" paris", "rome"]) == 1
    assert contains("par is", ["paris"]) == 0
    assert exact_match(" at  six", ["at six"]) == 1
    assert exact_match("six", ["at six"]) == 0
    assert f1("the keeper, of course", ["keeper"]) == pytest.approx(0.5)
    assert f1("", [""]) == 1
    assert f1("", ["a keeper"]) == 0
    assert geometric_mean([(1.0, 0.5, 0.5), (1.0, 0.0, 0.5)]) == pytest.approx((1 * 0.25 * 0.5) ** (1 / 3))
