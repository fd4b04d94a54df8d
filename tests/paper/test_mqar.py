"""`gsa paper mqar`: what is trained, and what is told of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gsa.data.recall import IGNORED
from gsa.data.recall import mqar as examples
from gsa.errors import GSAError
from gsa.paper import mqar as module
from gsa.paper.mqar import SETTINGS, Grid, _merit, mqar
from gsa.paper.mqar_report import PAPER
from gsa.paper.recall_model import SYSTEMS, RecallModel
from gsa.paper.recall_run import RecallRun, _batch, _learned, run_recall, settings_of
from tests.paper.inline import Inline

TINY = RecallRun(
    width=8, slots=4, length=16, pairs=2, vocab_size=16, examples=64, test_examples=20, batch_size=16, epochs=2
)


def model(system: str, **options: object) -> RecallModel:
    torch.manual_seed(0)
    sizes = {"width": 8, "heads": 1, "slots": 4, "vocab_size": 16, "layers": 2, "dropout": 0.0, "std": 0.3}
    return RecallModel(system, **{"convolution": True, **sizes, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("system", SYSTEMS)
def test_features_are_those_of_the_places_that_are_asked_and_know_no_later_token(system: str) -> None:
    lm = model(system).eval()
    ids = torch.randint(16, (3, 10), generator=torch.Generator().manual_seed(1))
    everywhere = lm(ids, torch.arange(30))
    asked = torch.tensor([4, 17, 29])
    torch.testing.assert_close(lm(ids, asked), everywhere[asked])
    changed = ids.clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % 16
    torch.testing.assert_close(lm(changed, torch.tensor([4])), everywhere[[4]])
    bare = model(system, convolution=False).eval()
    same = [p.shape for p in bare.parameters()] == [p.shape for p in lm.parameters()]
    assert same == (system == "mamba")  # which has a convolution of its own


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_is_trained(system: str) -> None:
    result = run_recall(settings_of(replace(TINY, system=system)))
    assert 0 <= result["accuracy"] <= 1
    assert len(result["by_epoch"]) == 2
    assert (result["state"] is None) == (system == "xfmr")


def test_the_same_run_gives_the_same_accuracies_and_another_seed_others() -> None:
    settings = settings_of(replace(TINY, lr=0.03, test_examples=200))
    again = settings_of(replace(TINY, lr=0.03, test_examples=200, seed=1))
    assert run_recall(settings) == run_recall(settings)
    assert run_recall(settings)["by_epoch"] != run_recall(again)["by_epoch"]


def test_a_run_ends_when_the_task_is_solved() -> None:
    """One pair with a tiny vocabulary: the only value in sight is the answer."""
    easy = replace(TINY, system="xfmr", width=16, length=8, pairs=1, vocab_size=8, examples=2048, epochs=40, lr=0.02)
    result = run_recall(settings_of(replace(easy, std=0.2)))
    assert result["accuracy"] > 0.99
    assert len(result["by_epoch"]) < 40


def test_labels_are_taken_where_something_is_asked() -> None:
    task = examples(4, length=16, pairs=2, vocab_size=16)
    inputs, labels, places = _batch(task, torch.arange(4).numpy())
    assert len(labels) == len(places) == 8
    for label, place in zip(labels.tolist(), places.tolist(), strict=True):
        row, column = divmod(place, 16)
        key = inputs[row, column].item()
        pairs = dict(zip(inputs[row, 0:4:2].tolist(), inputs[row, 1:4:2].tolist(), strict=True))
        assert pairs[key] == label


def test_a_third_of_what_is_learned_is_easy() -> None:
    run = replace(TINY, pairs=4, easy_pairs=1, examples=60)
    learned = _learned(run)
    counts = (learned.labels != IGNORED).sum(1).tolist()
    assert counts == [1] * 20 + [4] * 40
    assert len({row.tobytes() for row in learned.inputs}) > 50
    assert set((_learned(replace(run, easy_pairs=0)).labels != IGNORED).sum(1).tolist()) == {4}


def test_heads_are_free_for_slots_alone() -> None:
    sizes = {(system, heads): model(system, heads=heads).state_size for system in ("gsa", "gla") for heads in (1, 2)}
    assert sizes["gsa", 1] == sizes["gsa", 2]
    assert sizes["gla", 1] == 2 * sizes["gla", 2]


def test_systems_without_slots_do_not_depend_on_their_number() -> None:
    assert settings_of(replace(TINY, system="gla", slots=3)) == settings_of(replace(TINY, system="gla", slots=9))
    assert settings_of(replace(TINY, slots=3)) != settings_of(replace(TINY, slots=9))


def test_the_full_setting_is_the_papers() -> None:
    base = SETTINGS["full"].base
    assert (base.length, base.pairs, base.vocab_size, base.examples, base.epochs) == (512, 64, 8192, 100_000, 64)
    assert SETTINGS["full"].widths == tuple(PAPER["gsa"])
    assert [f"{rate:.3g}" for rate in SETTINGS["full"].rates] == ["0.0001", "0.000464", "0.00215", "0.01"]


def test_the_better_rate_recalls_more_or_has_learned_sooner() -> None:
    found = {0.5: (0.5, 8), 0.991: (0.991, 3), 0.998: (0.998, 5), 0.99: (0.99, 8)}
    results = [{"accuracy": accuracy, "by_epoch": [0.0] * epochs} for accuracy, epochs in found.values()]
    assert sorted(results, key=_merit) == [results[0], results[3], results[2], results[1]]


def test_the_command_writes_tables_pictures_and_all_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    variants = ({"system": "gsa", "slots": 2}, {"system": "gla", "heads": 2})
    monkeypatch.setitem(
        SETTINGS, "quick", Grid(TINY, ("gsa", "mamba"), (8, 12), (1e-2, 3e-2), 2, (8,), variants, gain=0.8)
    )
    cells = Inline()
    monkeypatch.setattr(module, "run_cells", cells)
    out = str(tmp_path / "out")
    mqar(out=out, quick=True)
    printed = capsys.readouterr()
    assert "MQAR, 2 pairs in 16 tokens, width 8" in printed.out
    assert "without short convolution" in printed.out
    assert "The paper: 64 pairs in 512 tokens" in printed.out
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"mqar.json", "mqar.svg", "mqar.png"}
    record = json.loads((tmp_path / "out" / "mqar.json").read_text())
    assert record["paper"]["gsa"]["64"] == PAPER["gsa"][64]
    (variant,) = (row for row in record["rows"] if row["variant"])
    assert (variant["system"], variant["slots"], variant["width"]) == ("gsa", 2, 8)
    rows = {(row["system"], row["width"], row["convolution"]): row for row in record["rows"] if not row["variant"]}
    assert set(rows) == {(s, w, True) for s in ("gsa", "mamba") for w in (8, 12)} | {("gsa", 8, False)}
    for row in rows.values():
        assert len(row["accuracies"]) == 2
        assert len(row["by_rate"]) == 2
        assert row["accuracies"][0] >= min(max(row["by_rate"].values()), 0.99)
    before, computed = (tmp_path / "out" / "mqar.svg").read_bytes(), len(cells.results)
    assert computed == 6 * 3  # two rates, and another seed of the better one
    mqar(out=out, quick=True, json=True)
    printed = capsys.readouterr()
    assert len(cells.results) == computed  # all of it was there
    assert json.loads(printed.out)["rows"] == record["rows"]
    assert (tmp_path / "out" / "mqar.svg").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"full": True, "quick": True}, "full and quick exclude each other"),
        ({"json": True, "markdown": True}, "json and markdown exclude each other"),
        ({"systems": "gsa,glb"}, "^paper: systems: 'glb' is not known .did you mean 'gla'"),
        ({"widths": "0"}, "^paper: widths must be whole numbers from 2"),
        ({"seeds": 0}, "seeds"),
        ({"processes": 0}, "processes"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(options: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(GSAError, match=message):
        mqar(out=str(tmp_path / "out"), **options)
    assert not (tmp_path / "out").exists()


def test_the_plan_tells_the_cost_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(SETTINGS, "scaled", Grid(TINY, ("gsa",), (8,), (1e-2, 3e-2), 2))
    mqar(out=str(tmp_path / "out"), plan=True, processes=1)
    assert "3 runs of at most 8 steps each, 1 at a time" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
