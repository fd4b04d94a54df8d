"""`gsa paper ablation`: rows that differ in one thing, trained alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gsa import LM, preset
from gsa.errors import GSAError
from gsa.models import ModelConfig
from gsa.paper.ablation import PAPER, RECIPE, Row, _packaged_book, ablation, measure
from gsa.paper.ablation_report import ablation_tables, chance
from gsa.paper.language_run import LanguageRun, run_language, settings_of
from tests.paper.inline import Inline
from tests.train.runs import prepared

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_slots": 8, "vocab_size": 264}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> LanguageRun:
    data, held_out = prepared(tmp_path_factory.mktemp("data"))
    return LanguageRun(data=str(data), eval_data=str(held_out), tokens=1024, length=64, options=SMALL)


def test_every_row_is_a_model_that_differs_in_what_it_says() -> None:
    for row in [*PAPER.values(), *RECIPE.values()]:
        config = ModelConfig(**{**preset(row.model).to_dict(), **row.options})
        with torch.device("meta"):
            assert 3e6 < LM(config).num_parameters < 6e6, row.label
    assert len({json.dumps(row.options, sort_keys=True) for row in PAPER.values()}) == len(PAPER)
    assert [row.paper for row in PAPER.values()] == [
        13.51,
        16.94,
        15.83,
        14.03,
        13.71,
        13.69,
        13.95,
        13.74,
        13.46,
        None,
    ]


def test_a_run_is_reproducible_and_its_seed_matters(base: LanguageRun) -> None:
    first, again = run_language(settings_of(base)), run_language(settings_of(base))
    other = run_language({**settings_of(base), "seed": 1})
    assert first == again
    assert first["loss"] != other["loss"]
    assert first["steps"] == 8
    assert first["loss"] < 6  # the log of 264 is 5.6 before anything is learned


def test_rows_are_measured_with_all_seeds_and_shown_beside_the_first(
    base: LanguageRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = Inline()
    monkeypatch.setattr("gsa.paper.ablation.run_cells", cells)
    rows = {"a": Row("first", SMALL), "b": Row("second", {**SMALL, "num_slots": 4}, paper=14.0, lr=1e-2)}
    found = measure(rows, base, 2, tmp_path, processes=1)
    assert [row["row"] for row in found] == ["a", "b"]
    computed = list(cells.results.values())
    assert sorted(one["loss"] for one in computed) == sorted(loss for row in found for loss in row["losses"])
    assert {one["settings"]["lr"] for one in computed} == {2e-3, 1e-2}
    assert {one["settings"]["seed"] for one in computed} == {0, 1}
    record = {"settings": {"table": "paper", "seeds": 2, "tokens": 1024}, "rows": found}
    text = ablation_tables(record)[0].markdown()
    assert f"{found[1]['loss'] - found[0]['loss']:+.4f}" in text
    assert f"± {chance(found[1], found[0]):.4f}" in text
    assert "14.00" in text


def test_the_error_of_a_difference_is_that_of_two_means() -> None:
    one, two = {"losses": [1.0] * 4, "spread": 0.2}, {"losses": [1.0] * 4, "spread": 0.2}
    assert chance(one, two) == pytest.approx(0.2 * 0.5**0.5)
    assert chance({**one, "spread": None}, two) is None


def test_the_book_of_the_package_is_prepared_once_with_a_part_held_out(tmp_path: Path) -> None:
    data, held_out = _packaged_book(tmp_path)
    before = {file: file.stat().st_mtime_ns for file in Path(data).rglob("*") if file.is_file()}
    assert before
    assert Path(held_out).is_dir()
    assert _packaged_book(tmp_path) == (data, held_out)
    assert {file: file.stat().st_mtime_ns for file in Path(data).rglob("*") if file.is_file()} == before


@pytest.mark.slow
def test_the_quick_form_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    ablation(out=str(tmp_path / "out"), quick=True, rows="gsa,no-decay", processes=1)
    assert "without decay (ABC)" in capsys.readouterr().out
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"ablation.json", "ablation.svg", "ablation.png", "cells"} <= names


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"table": "papers"}, "table must be one of paper, recipe, got 'papers'"),
        ({"rows": "gsa,reluu"}, "did you mean 'relu'"),
        ({"tokens": 0}, "tokens"),
        ({"seeds": 0}, "seeds"),
        ({"json": True, "markdown": True}, "exclude each other"),
        ({"eval_data": "x"}, "eval_data does nothing without data"),
        ({"data": "nowhere", "eval_data": "nowhere"}, "nowhere: there is no such folder"),
        ({"data": "nowhere"}, "nowhere: there is no such folder"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(options: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(GSAError, match=message):
        ablation(out=str(tmp_path / "out"), **options)
    assert not (tmp_path / "out").exists()


def test_data_without_a_part_held_out_is_refused(base: LanguageRun, tmp_path: Path) -> None:
    with pytest.raises(GSAError, match="keeps nothing to evaluate on: give --eval-data"):
        ablation(out=str(tmp_path / "out"), data=base.data)
