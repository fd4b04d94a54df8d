"""Result files are written whole, and checked when they are read."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gsa.errors import GSAError
from gsa.eval.results import FORMAT, load_result, save_result
from tests.examples import examples

RESULT: dict[str, Any] = {
    "format": FORMAT,
    "model": {"name": "gsa-tiny"},
    "task": "piqa",
    "title": "PIQA",
    "group": None,
    "version": 1,
    "shots": 0,
    "limit": None,
    "data": "piqa.validation.jsonl",
    "metrics": {"acc": {"value": 0.5, "stderr": 0.1, "higher_is_better": True}},
    "main": "acc",
    "samples": {"id": [0, 1], "acc": [1.0, 0.0]},
    "settings": {},
    "seconds": 1.0,
}


def test_results_come_back_as_they_were_but_for_numbers_without_end(tmp_path: Path) -> None:
    save_result(RESULT, tmp_path / "new" / "piqa.json")
    assert load_result(tmp_path / "new" / "piqa.json") == RESULT
    endless = {"perplexity": {"value": math.inf, "stderr": math.nan, "higher_is_better": False}}
    save_result(RESULT | {"metrics": endless, "main": "perplexity"}, tmp_path / "endless.json")
    assert load_result(tmp_path / "endless.json")["metrics"]["perplexity"]["value"] is None


def test_what_is_no_result_is_refused(tmp_path: Path) -> None:
    for change, said in [
        ({"format": "other"}, "expected a result of gsa eval"),
        ({"task": 3}, "'task' must be str, got 3"),
        ({"limit": "all"}, "'limit' must be int or null"),
        ({"version": None}, "'version' must be int or float or str, got None"),
        ({"model": {"name": 3}}, "the 'name' of the model must be str, got 3"),
        ({"notes": "none"}, "'notes' must be list, got 'none'"),
        (
            {"metrics": {"acc": {"value": 0.5, "stderr": None}}},
            "'higher_is_better' of metric 'acc' must be true or false",
        ),
        ({"metrics": {"acc": {"value": 0.5, "higher_is_better": 1}}}, "'acc' must be true or false, got 1"),
        ({"main": "f1"}, "main metric 'f1' is not among the metrics"),
        ({"metrics": {"acc": {"value": "high"}}}, "metric 'acc' must have a value"),
        ({"samples": {"id": [0], "acc": []}}, "lists of one length"),
        ({"samples": {"id": 0}}, "lists of one length"),
    ]:
        path = tmp_path / "piqa.json"
        path.write_text(json.dumps(RESULT | change))
        with pytest.raises(GSAError, match=said):
            load_result(path)


@examples(40)
@given(
    st.sampled_from(sorted(RESULT)), st.none() | st.integers() | st.text(max_size=3) | st.lists(st.none()) | st.just({})
)
def test_any_other_value_is_taken_or_refused(tmp_path_factory: pytest.TempPathFactory, name: str, value: Any) -> None:
    path = tmp_path_factory.mktemp("results") / "result.json"
    path.write_text(json.dumps(RESULT | {name: value}))
    try:
        found = load_result(path)
    except GSAError:
        found = RESULT | {name: value}
    assert found[name] == value
