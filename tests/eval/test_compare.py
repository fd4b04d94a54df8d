"""`gsa compare`: values, differences, and what is said where results are not of the same thing."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gsa.errors import GSAError
from gsa.eval import contenders
from gsa.eval.compare import chart, tables
from gsa.eval.comparison import Comparison, Contender, Settings
from gsa.eval.contenders import contender
from gsa.eval.results import save_result
from gsa.models.checkpoint import CONFIG
from gsa.train.checkpoint import FOLDER
from gsa.train.manifest import MANIFEST
from tests import hostile
from tests.cli.running import run
from tests.eval.results import result, saved, text_result
from tests.examples import examples

FEW = Settings(resamples=400)


def report(*models: list[dict[str, Any]], settings: Settings = FEW) -> dict[str, Any]:
    return Comparison([Contender(f"folder/{n}", results) for n, results in enumerate(models)], settings).report()


def cell(found: dict[str, Any], header: str, place: int, kind: str = "differences") -> Any:
    (task,) = [task for task in found["tasks"] if task["header"] == header]
    return task[kind][place]


def answers(count: int, right: int) -> list[int]:
    return [1] * right + [0] * (count - right)


def test_values_differences_and_averages() -> None:
    first = [result("a", "piqa", answers(100, 50)), result("a", "boolq", answers(50, 20))]
    second = [result("b", "piqa", answers(100, 70)), result("b", "boolq", answers(50, 20))]
    found = report(first, second)
    assert found["warnings"] == []
    assert [model["label"] for model in found["models"]] == ["a", "b"]
    assert cell(found, "PIQA", 1, "values") == {"value": 0.7, "stderr": pytest.approx(0.0461, abs=1e-4)}
    piqa, boolq = cell(found, "PIQA", 1), cell(found, "BOOLQ", 1)
    assert piqa["value"] == pytest.approx(0.2)
    assert piqa["better"] is True
    assert 0.1 < piqa["low"] < 0.2 < piqa["high"] < 0.3
    assert boolq == {"value": 0.0, "low": 0.0, "high": 0.0, "better": None, "documents": 50}  # the same answers
    average = found["average"]
    assert average["tasks"] == ["PIQA", "BOOLQ"]
    assert [value["value"] for value in average["values"]] == pytest.approx([0.45, 0.55])
    assert average["differences"][0] is None
    assert average["differences"][1]["low"] == pytest.approx(piqa["low"] / 2)
    json.dumps(found, allow_nan=False)


def test_lower_is_better_for_texts() -> None:
    sizes = np.arange(10, 50)
    found = report([text_result("a", sizes * 2.0, sizes)], [text_result("b", sizes * 1.5, sizes)])
    assert cell(found, "TEXT", 1)["value"] == pytest.approx(-0.5 / np.log(2))
    assert cell(found, "TEXT", 1)["better"] is True
    assert found["average"] is None
    values, differences = tables(found)
    assert values.headers() == ["model", "TEXT bits_per_byte ↓"]
    assert differences.cells() == [["b", "-0.7213 [-0.7213, -0.7213] *"]]


def test_averages_are_of_what_all_have() -> None:
    both = [result("a", "piqa", [1, 0]), result("a", "boolq", [1, 1]), result("a", "arc", [0, 1])]
    other = [result("b", "piqa", [1, 0]), result("b", "boolq", [1, 1])]
    found = report(both, other)
    assert found["average"]["tasks"] == ["PIQA", "BOOLQ"]
    assert cell(found, "ARC", 1, "values") is None
    assert report(both, other[:1])["average"] is None  # of one task
    assert tables(found)[0].cells()[1] == ["b", "50.0 ± 50.0", "100.0 ± 0.0", "", "75.0 ± 25.0"]


def test_pairs_are_found_by_their_ids() -> None:
    scores = np.random.default_rng(0).random(200) < 0.5
    order = np.random.default_rng(1).permutation(200)
    mixed = result("b", "piqa", scores[order], samples={"id": order.tolist(), "acc": scores[order].tolist()})
    assert cell(report([result("a", "piqa", scores)], [mixed]), "PIQA", 1)["high"] == 0


def test_other_documents_are_said_and_common_ones_compared() -> None:
    first = result("a", "piqa", [1, 0, 1, 0])
    second = result("b", "piqa", [1, 1], samples={"id": [2, 3], "acc": [1, 1]})
    found = report([first], [second])
    assert cell(found, "PIQA", 1)["value"] == 0.5
    assert cell(found, "PIQA", 1)["documents"] == 2
    assert found["warnings"] == ["PIQA: a has 4 documents, b 2; the difference is over the 2 that both have"]
    assert "come out too narrow: 2 of PIQA." in tables(found)[1].notes[0]
    second["samples"]["id"] = [7, 8]
    found = report([first], [second])
    assert cell(found, "PIQA", 1) is None
    assert found["warnings"] == ["PIQA: a has 4 documents, b 2; none is in both"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "PIQA: the versions differ: 1 (a), 2 (b)"),
        ({"shots": 5}, "PIQA: the shots differ: 0 (a), 5 (b)"),
        ({"limit": 2}, "PIQA: the limits differ: none (a), 2 (b)"),
        ({"data": "hub/piqa"}, "PIQA: the data differ: piqa.jsonl (a), hub/piqa (b)"),
        ({"settings": {"max_length": 2048}}, "PIQA: the settings of max_length differ: none (a), 2048 (b)"),
        ({"identity": {"documents": "0" * 64}}, "PIQA: the contents of the data differ: none (a), 000000000000 (b)"),
        ({"samples": {"id": [0, 0], "acc": [1, 0]}}, "PIQA: no interval, since in b ids of documents come twice"),
        ({"samples": {"id": [0, 1], "acc": [1, 1]}}, "since in b the samples give a acc of 1, the file says 0.5"),
    ],
)
def test_what_differs_is_named(change: dict[str, Any], said: str) -> None:
    found = report([result("a", "piqa", [1, 0])], [result("b", "piqa", [1, 0]) | change])
    assert [said in warning for warning in found["warnings"]] == [True]
    assert any(f"Warning: {found['warnings'][0]}" in table.notes for table in tables(found))


def test_a_batch_size_changes_nothing() -> None:
    other = result("b", "piqa", [1, 0], settings={"batch_size": 1})
    assert report([result("a", "piqa", [1, 0])], [other])["warnings"] == []


def test_another_metric_is_said() -> None:
    other = result("b", "piqa", [1, 0])
    other |= {"metrics": {"f1": other["metrics"]["acc"]}, "main": "f1"}
    found = report([result("a", "piqa", [1, 0])], [other])
    assert found["warnings"] == ["PIQA: b has no acc, but f1"]
    assert cell(found, "PIQA", 1, "values") is None


def test_all_metrics() -> None:
    first, second = (result(name, "lambada", [1, 0]) for name in "ab")
    for each, nats in ((first, [1.0, 3.0]), (second, [1.0, 2.0])):
        value = float(np.exp(np.mean(nats)))
        each["metrics"]["perplexity"] = {"value": value, "stderr": None, "higher_is_better": False}
        each["samples"]["nats"] = nats
    contenders = [Contender("a", [first]), Contender("b", [second])]
    assert [task["metric"] for task in report([first], [second])["tasks"]] == ["acc"]
    found = Comparison(contenders, FEW, all_metrics=True).report()
    assert [(task["metric"], task["main"]) for task in found["tasks"]] == [("acc", True), ("perplexity", False)]
    assert found["tasks"][1]["differences"][1]["value"] == pytest.approx(np.exp(1.5) - np.exp(2))


def test_perplexities_without_end_have_no_interval() -> None:
    metrics = {"word_perplexity": {"value": None, "stderr": None, "higher_is_better": False}}
    samples = {"id": [0, 1], "nats": [3000.0, 1.0], "words": [1, 1]}
    endless = result("b", "text", [0], metrics=metrics, main="word_perplexity", samples=samples)
    found = report([endless], [endless | {"model": {"name": "c"}}])
    assert cell(found, "TEXT", 1) is None
    assert "no interval, since in b the samples give a word_perplexity of inf" in found["warnings"][0]
    assert tables(found)[0].cells()[0] == ["b", "inf"]
    json.dumps(found, allow_nan=False)


def test_a_probe_with_other_settings() -> None:
    asked = [{"lengths": [3, 5], "samples": 2}, {"lengths": [3, 5], "samples": 9}, {"lengths": [3], "samples": 2}]
    found = report([result("a", "copy", [1, 0], settings=settings | {"batch_size": 3}) for settings in asked])
    headers = [task["header"] for task in found["tasks"]]
    assert headers == ["COPY, lengths 3,5, samples 2", "COPY, lengths 3,5, samples 9", "COPY, lengths 3, samples 2"]
    with pytest.raises(GSAError, match="two results of COPY, expected one"):
        report([result("a", "copy", [1, 0])] * 2)


def test_one_task_several_times() -> None:
    """Lengths of a task are columns of their own; models that are called alike go by what was given."""
    runs = [result("a", "qmsum", [1, 0], settings={"max_length": length}) for length in (2048, 4096)]
    found = report(runs, runs[1:])
    headers = [task["header"] for task in found["tasks"]]
    assert headers == ["QMSUM, max_length 2048", "QMSUM, max_length 4096"]
    assert [cell(found, header, 1, "values") is None for header in headers] == [True, False]
    assert [model["label"] for model in found["models"]] == ["folder/0", "folder/1"]
    with pytest.raises(GSAError, match="two results of QMSUM, expected one"):
        report([runs[0], runs[0]])


def test_tasks_with_one_title_go_by_their_names() -> None:
    models = [result("a", task, [1, 0], title="TriviaQA") for task in ("triviaqa", "cloze_triviaqa")]
    assert [task["header"] for task in report(models)["tasks"]] == ["triviaqa", "cloze_triviaqa"]


def test_charts() -> None:
    found = report([result("a", "piqa", [1, 0])], [result("bcd", "piqa", [1, 1])])
    assert chart(found, width=4).splitlines() == ["PIQA acc", "  a   ██ 50.0", "  bcd ████ 100.0"]


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    sizes, nats = np.arange(40) + 10, np.random.default_rng(0).random((2, 40))
    a = saved(tmp_path / "a", result("a", "piqa", answers(40, 10)), text_result("a", nats[0], sizes))
    b = saved(tmp_path / "b", result("b", "piqa", answers(40, 30)), text_result("b", nats[1], sizes))
    code, out, err = run(capsys, "compare", a, b, "--resamples", "200", "--plot", tmp_path / "new.png")
    assert (code, err) == (0, "")
    assert "Differences to a" in out
    assert (tmp_path / "new.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = run(capsys, "compare", a / "piqa-0.json", b / "piqa-0.json", "--json", "--resamples", "200")
    found = json.loads(out)
    assert code == 0
    assert [task["task"] for task in found["tasks"]] == ["piqa"]
    assert found["tasks"][0]["differences"][1]["better"] is True
    others = [
        json.loads(run(capsys, "compare", a, b, "--json", *more)[1])["tasks"][1]["differences"][1]
        for more in ((), ("--resamples", "200"), ("--seed", "1"), ("--confidence", "0.5"))
    ]
    assert len({(other["low"], other["high"]) for other in others}) == 4
    code, out, _ = run(capsys, "compare", a, b, "--markdown", "--by-task")
    assert code == 0
    assert "| PIQA acc | 25.0 ± 6.9 | 75.0 ± 6.9 |" in out
    assert "| task | b |" in out
    code, out, _ = run(capsys, "compare", a, b, "--all-metrics")
    assert (code, "PIQA acc" in out) == (0, True)


def test_results_of_a_model_are_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(Path("evaluations/some-model"), result("org/some-model", "piqa", [1, 0]))
    found = contender("org/some-model", None)
    assert contenders.OF_MODELS == (CONFIG, MANIFEST, FOLDER)
    assert (found.name, len(found.results)) == ("org/some-model", 1)
    code, _, err = run(capsys, "compare", "org/another")
    assert code == 2
    assert "compare: org/another is no result file and no folder of results" in err
    assert "--tasks" in err


def test_models_are_evaluated_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    data = str(Path(__file__).parent / "data")
    monkeypatch.chdir(tmp_path)
    save_result(result("other", "piqa", [1, 0], title="PIQA"), Path("other.json"))
    given = ("compare", "gsa-tiny", "other.json", "--tasks", "piqa", "--data", data, "--limit", "2", "--json")
    code, out, err = run(capsys, *given)
    assert code == 0
    assert "gsa-tiny is evaluated" in err
    first = json.loads(out)
    assert [model["label"] for model in first["models"]] == ["gsa-tiny", "other"]
    assert (tmp_path / "evaluations/gsa-tiny/piqa-limit=2.json").exists()
    assert "PIQA: the limits differ: 2 (gsa-tiny), none (other)" in first["warnings"]
    monkeypatch.setattr("gsa.eval.run._run", None)  # what is there is taken
    code, out, err = run(capsys, *given)
    assert (code, json.loads(out)) == (0, first)
    assert "is finished" in err


MISTAKES = {
    "resamples must be 100 to 10,000,000, got 99": ("--resamples", "99"),
    "confidence must be between 0 and 1, got 1.0": ("--confidence", "1"),
    "seed must be at least 0, got -1": ("--seed", "-1"),
    "json and markdown exclude each other": ("--json", "--markdown"),
    "limit, weights would do nothing": ("--limit", "3", "--weights", "int8"),
    "--tasks would do nothing": ("--tasks", "piqa"),
}


@pytest.mark.parametrize("said", MISTAKES)
def test_mistakes(said: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = saved(tmp_path, result("a", "piqa", [1, 0]))
    code, out, err = run(capsys, "compare", folder, *MISTAKES[said])
    assert (code, out) == (2, "")
    assert f"compare: {said}" in err


def test_a_model_twice(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = saved(tmp_path, result("a", "piqa", [1, 0]))
    code, _, err = run(capsys, "compare", folder, folder)
    assert code == 2
    assert "compare: expected each model once" in err


def test_folders_and_files_that_are_no_results(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.json").write_text('{"format": "gsa-ev')
    (tmp_path / "foreign.json").write_text('{"results": {}}')
    saved(tmp_path / "mixed", result("a", "piqa", [1]), result("b", "boolq", [1]))
    for name, said in {
        "empty": "no result files in this folder",
        "broken.json": "not JSON",
        "foreign.json": "expected a result of gsa eval (gsa-eval-1), got format None",
        "mixed": "expected results of one model in a folder, got those of a, b",
    }.items():
        code, _, err = run(capsys, "compare", tmp_path / name)
        assert code == 2, name
        assert said in err, name


@given(data=st.data())
@examples(80)
def test_hostile_results_give_a_report_or_a_sentence(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """Any field of a result file may hold anything."""
    broken = result("b", "piqa", [1, 0, 1])
    place: Any = broken
    for _ in range(data.draw(st.integers(0, 2))):
        inner = [key for key, value in place.items() if isinstance(value, dict)]
        place = place[data.draw(st.sampled_from(inner))] if inner else place
    name = data.draw(st.sampled_from([*place, "another"]))
    value = data.draw(hostile.values)
    place[name] = data.draw(st.sampled_from([value, [value] * 3]))
    try:
        text = json.dumps(broken)
    except (TypeError, ValueError, RecursionError):  # JSON has no such value
        return
    path = tmp_path_factory.mktemp("results") / "piqa.json"
    path.write_text(text)

    def compared() -> dict[str, Any]:
        good = Contender("a", [result("a", "piqa", [1, 1, 0])])
        return Comparison([good, contender(str(path), None)], FEW).report()

    found = hostile.ended(compared)
    if found is not None:
        assert all(table.markdown() for table in tables(found))
        assert chart(found)
        json.dumps(found, allow_nan=False)
