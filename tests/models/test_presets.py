"""Presets are at the paper's sizes, and known without weights."""

import json

import pytest
import torch

import gsa
from gsa.cli.models import describe, models
from gsa.errors import GSAError

SYSTEMS = ("gsa", "gla", "hgrn2", "retnet", "mamba", "xfmr", "abc", "raven")


def parameters(name: str) -> int:
    with torch.device("meta"):
        return gsa.LM(gsa.preset(name)).num_parameters


def test_names() -> None:
    sized = {f"{system}-{size}" for system in SYSTEMS for size in ("tiny", "small", "340m", "1.3b", "2.7b")}
    mistral = {f"{system}-7b-mistral" for system in ("gsa", "gla", "retnet", "supra", "xfmr")}
    assert set(gsa.presets()) == sized | mistral


@pytest.mark.parametrize(("size", "count"), [("1.3b", 1.3e9), ("2.7b", 2.7e9)])
def test_counts_are_those_of_the_paper_and_alike(size: str, count: float) -> None:
    counts = {system: parameters(f"{system}-{size}") for system in SYSTEMS}
    for system, found in counts.items():
        assert abs(found / count - 1) < 0.08, system
    assert max(counts.values()) / min(counts.values()) < 1.05


def test_other_counts() -> None:
    for system in SYSTEMS:
        assert parameters(f"{system}-340m") == pytest.approx(340e6, rel=0.05)
        assert 3e6 < parameters(f"{system}-tiny") < 6e6
        assert 25e6 < parameters(f"{system}-small") < 35e6
    for system in ("gsa", "gla", "retnet", "supra", "xfmr"):
        assert parameters(f"{system}-7b-mistral") == pytest.approx(7.24e9, rel=0.01)


@pytest.mark.parametrize("size", ["1.3b", "2.7b"])
def test_state_is_what_the_paper_says(size: str) -> None:
    """In units of layers x width, two of Mamba's layers for one of the others."""
    found = {system: describe(f"{system}-{size}")["state_over_width"] for system in SYSTEMS}
    expected = {"gsa": 128, "gla": 256, "hgrn2": 128, "retnet": 512, "mamba": 64, "xfmr": None}
    assert {system: found[system] for system in expected} == expected


def test_small_ones_run() -> None:
    for system in SYSTEMS:
        lm = gsa.LM(gsa.preset(f"{system}-tiny"))
        ids = torch.randint(4096, (1, 20))
        assert torch.isfinite(lm(ids, labels=ids).loss)


def test_unknown_names() -> None:
    with pytest.raises(GSAError, match=r"unknown preset 'gsa-1.3' \(did you mean 'gsa-1.3b'\?\)"):
        gsa.preset("gsa-1.3")


def test_the_list_holds_no_weights(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = set()
    initialise = torch.nn.Linear.__init__

    def spy(self: torch.nn.Linear, *args: object, **options: object) -> None:
        initialise(self, *args, **options)
        devices.add(self.weight.device.type)

    monkeypatch.setattr(torch.nn.Linear, "__init__", spy)
    models(json=True)
    rows = json.loads(capsys.readouterr().out)
    assert devices == {"meta"}
    assert [row["name"] for row in rows] == [*gsa.presets(), "gsa-smol"]
    row = next(row for row in rows if row["name"] == "gsa-1.3b")
    assert (row["width"], row["layers"], row["heads"], row["state"]) == (2048, 24, 4, 128 * 24 * 2048)


def test_the_table(capsys: pytest.CaptureFixture) -> None:
    models()
    out = capsys.readouterr().out
    assert "gsa-1.3b" in out
    assert "grows" in out
    assert "…" not in out
