"""`gsa eval MODEL --tasks`: what is typed, what is written, what goes on where it was stopped."""

import json
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

from lm_eval.tasks import TaskManager

from gsa.eval import hub
from gsa.eval.groups import GROUPS, TASKS
from gsa.eval.ours import OurReader
from gsa.eval.results import load_result
from gsa.eval.run import _shares
from gsa.eval.tasks import harness_tasks
from gsa.eval.tasks.scores import rouge
from tests.cli.running import run

DATA = Path(__file__).parent / "data"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub is not asked."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.why_unreachable.cache_clear()


def test_gsa_tiny_on_two_documents_of_every_task(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    options = ("--data", DATA, "--limit", "2", "--output", tmp_path, "--max-length", "1200")
    code, out, told = run(capsys, "eval", "gsa-tiny", "--tasks", ",".join(GROUPS), *options, "--markdown")
    assert code == 0, told
    results = {path.name.partition("-")[0]: load_result(path) for path in tmp_path.glob("*.json")}
    assert set(results) == set(TASKS)
    assert not list(tmp_path.glob("*.answers"))
    for name, result in results.items():
        assert result["main"] == TASKS[name].main, name
        assert result["limit"] == len(result["samples"]["id"]) == 2, name
        assert all(len(column) == 2 for column in result["samples"].values()), name
        for key in set(result["samples"]) & set(result["metrics"]):
            assert result["metrics"][key]["value"] == pytest.approx(sum(result["samples"][key]) / 2), (name, key)
    assert set(results["mmlu"]["parts"]) == {"mmlu_abstract_algebra", "mmlu_anatomy"}
    assert set(results["lambada_openai"]["samples"]) == {"id", "acc", "nats"}
    assert {"nats", "words", "bytes"} <= set(results["wikitext"]["samples"])
    for group in GROUPS.values():
        assert f"**{group.name}: {group.title}**" in out
    assert "| GSA | 2.7B | 100B | 39.1 | 33.5 | 39.0 | 26.9 | 60.8 | 19.9 | 36.5 |" in out
    assert out.count("| gsa-tiny, 1,200 tokens | 4.6M |") == 4
    for note in ("SQuAD (question form)", "NQ: the 5 examples are drawn from the evaluated set itself"):
        assert note in out
    assert "no average" not in out


def test_what_cannot_be_had_is_named_and_the_rest_is_run(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "drop_answers.json").write_bytes((DATA / "drop_answers.json").read_bytes())
    options = ("--data", data, "--limit", "1", "--output", tmp_path / "results")
    code, out, told = run(capsys, "eval", "gsa-tiny", "--tasks", "paper-recall,wikitext", *options, "--json")
    assert code == 1
    report = json.loads(out)
    assert [each["task"] for each in report["results"]] == ["cloze_drop"]
    missing = {each["task"]: each for each in report["missing"]}
    assert set(missing) == {*GROUPS["paper-recall"].tasks, "wikitext"} - {"cloze_drop"}
    assert missing["cloze_fda"]["file"] == "based_fda.validation.jsonl.gz"
    assert "HF_HUB_OFFLINE is set" in missing["wikitext"]["reason"]
    assert "FDA (cloze_fda) cannot be had: there is no based_fda.validation.jsonl.gz in --data" in told
    code, out, told = run(capsys, "eval", "gsa-tiny", "--tasks", "paper-recall", *options)
    assert code == 1
    assert "DROP (question form) is finished" in told
    assert "There is no average of ours, since these columns are missing: FDA, SWDE, SQuAD, NQ, TriviaQA." in out
    code, out, told = run(capsys, "eval", "gsa-tiny", "--tasks", "cloze_fda", "--json")
    assert code == 1
    assert "none of the tasks can be run" in told
    assert json.loads(out)["results"] == []


def test_a_run_goes_on_where_it_was_stopped(
    capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("eval", "gsa-tiny", "--tasks", "arc_easy,winogrande", "--data", DATA, "--output", tmp_path)
    whole, asked = OurReader.score, []

    def stopped(self, requests, **options):
        asked.append(len(requests))
        for number, answer in enumerate(whole(self, requests, **options)):
            if len(asked) == 2 and number == 2:
                raise KeyboardInterrupt
            yield answer

    monkeypatch.setattr(OurReader, "score", stopped)
    code, _, told = run(capsys, *command)
    assert code == 130
    assert "stopped in task 2 of 2 (WinoGrande)" in told
    assert (tmp_path / "arc_easy.json").exists()
    code, _, told = run(capsys, *command)
    assert code == 0
    assert "task 1 of 2: ARC-e is finished" in told
    assert asked == [12, 6, 4]  # two answers of the second task were kept
    first = load_result(tmp_path / "winogrande.json")
    code, _, told = run(capsys, *command, "--again", "--batch-size", "1")
    assert code == 0
    assert asked[3:] == [12, 6]
    assert load_result(tmp_path / "winogrande.json")["samples"] == first["samples"]


def test_results_of_other_settings_and_models_are_not_taken(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    command = ("eval", "gsa-tiny", "--tasks", "piqa", "--data", DATA, "--output", tmp_path)
    plot = tmp_path / "bars.png"
    for options, name in [
        ((), "piqa.json"),
        (("--limit", "2"), "piqa-limit=2.json"),
        (("--shots", "1"), "piqa-shots=1.json"),
        (("--max-length", "999,1K"), "piqa-length=1024.json"),
    ]:
        code, _, told = run(capsys, *command, *options, "--plot", plot)
        assert code == 0, told
        assert "finished" not in told
        assert plot.read_bytes().startswith(b"\x89PNG")
        plot.unlink()
        assert load_result(tmp_path / name)["samples"]["acc"], name
    code, _, told = run(capsys, *command, "--weights", "int8")
    assert code == 0
    assert "PIQA is run anew" in told
    assert "is of another weights" in told


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tasks", "piqqa"), "there is no task 'piqqa', here or in lm-evaluation-harness; did you mean piqa"),
        (("--tasks", "paper-lang"), "did you mean paper-long?"),
        (("--tasks", "piqa", "--limit", "0"), "limit must be a whole number of at least 1, got 0"),
        (("--tasks", "piqa", "--max-length", "2X"), "eval: --max-length must be whole numbers from 2"),
        (("--tasks", "cloze_drop", "--shots", "2"), "is a zero-shot task, got --shots 2"),
        (("--tasks", "piqa", "--data", "nowhere"), "is not a folder"),
        (("--tasks", "piqa", "--plot", "nowhere/a.png"), "'nowhere/a.png' cannot be written"),
        (("--tasks", "piqa", "--json", "--markdown"), "json and markdown exclude each other"),
        ((), "expected a model and either --tasks or --text"),
    ],
)
def test_mistakes_are_told_before_the_model_is_opened(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], said: str
) -> None:
    some = partial(TaskManager, include_defaults=False, include_path=harness_tasks._FOLDER / "piqa")
    monkeypatch.setattr(harness_tasks, "_all_tasks", some)  # to look through all of them takes seconds
    monkeypatch.setattr(OurReader, "open", None)
    data = () if "--data" in options else ("--data", DATA)
    code, _, told = run(capsys, "eval", "gsa-tiny", *options, *data)
    assert code == 2
    assert said in told


def test_a_malformed_row_stops_everything_before_it_begins(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "piqa.validation.jsonl").write_text('{"goal": "a", "sol1": "b", "sol2": "c", "label": 7}\n')
    code, _, told = run(capsys, "eval", "gsa-tiny", "--tasks", "piqa", "--data", tmp_path)
    assert code == 2
    assert "piqa.validation.jsonl, line 1: 'label' is 7, expected 0 or 1" in told


def test_list_tells_where_documents_come_from(capsys: pytest.CaptureFixture) -> None:
    code, out, _ = run(capsys, "eval", "--list", "--data", DATA, "--json")
    assert code == 0
    facts = json.loads(out)
    assert facts["groups"]["paper-long"] == GROUPS["paper-long"].tasks
    assert facts["tasks"]["piqa"]["here"] == "piqa.validation.jsonl.gz"
    assert facts["tasks"]["cloze_squad"]["file"] == "based_squad.validation.jsonl.gz or squad_dev_v1.1.json.gz"
    code, out, _ = run(capsys, "eval", "--list")
    assert "Hub: hazyresearch/based-fda" in out
    assert "missing: qasper_yesno.validation.jsonl.gz" in out


def test_examples_never_include_the_document_itself() -> None:
    from gsa.eval.local_data import DataFolder
    from gsa.eval.tasks.documents import from_folder

    task = TASKS["nq_open"]
    documents = from_folder(task, DataFolder(DATA))
    assert documents is not None
    (made,) = harness_tasks.local_tasks(task, documents, 5, None)
    for doc in made.eval_docs:
        context = made.fewshot_context(doc, 5)
        assert context.count("Q: ") == 6
        assert context.count(doc["question"]) == 1


def test_a_limit_is_spread_over_parts() -> None:
    assert _shares([5, 1, 9], None) == [5, 1, 9]
    assert _shares([5, 1, 9], 4) == [2, 1, 1]
    assert _shares([5, 1, 9], 99) == [5, 1, 9]
    assert _shares([3, 3, 3], 2) == [1, 1, 0]


def test_rouge_counts_stemmed_words_of_the_best_reference() -> None:
    assert rouge("rouge1")("the lamps burned", ["a lamp burns", "no"]) == pytest.approx(2 / 3)
    assert rouge("rouge2")("one two three", ["one two four"]) == pytest.approx(0.5)
