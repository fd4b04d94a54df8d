"""A document that is read as one context goes on within it after a stop, for models whose states can be stored."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from gsa.errors import GSAError
from gsa.eval import midway
from gsa.eval.journal import Journal
from gsa.eval.ours import OurReader
from gsa.eval.perplexity import run
from gsa.eval.reader import Reader
from tests.eval.cases import VOCABULARY, reader_of
from tests.eval.standins import StandIn
from tests.models.cases import model

NAME = "perplexity-a.txt"


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gsa.eval.losses.PIECE", 50)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("".join(chr(97 + number % 23) for number in range(320)))
    return path


def small(case: str = "gsa") -> OurReader:
    return reader_of(model(case, vocab_size=VOCABULARY))


def stopped(reader: Reader, text: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads a document whole, and is stopped after three pieces."""
    read, calls = reader.log_probs, []

    def three_times(ids: list[int], state: object = None) -> tuple[torch.Tensor, object]:
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(ids)
        return read(ids, state)

    monkeypatch.setattr(reader, "log_probs", three_times)
    with pytest.raises(KeyboardInterrupt):
        run(reader, [str(text)], output=str(folder))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("case", ["gsa, convolved", "attention", "hybrid"])
def test_it_goes_on_within_a_document(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, case: str
) -> None:
    whole = run(small(case), [str(text)], output=str(tmp_path / "whole"))
    folder = tmp_path / "out"
    stopped(small(case), text, folder, monkeypatch)
    assert files(folder) == [f"{NAME}.answers", f"{NAME}.midway"]
    reader = small(case)
    read, own = [], reader.log_probs

    def counted(ids: list[int], state: object = None) -> tuple[torch.Tensor, object]:
        read.extend(ids)
        return own(ids, state)

    monkeypatch.setattr(reader, "log_probs", counted)
    result = run(reader, [str(text)], output=str(folder))
    assert f"{NAME}.midway: goes on behind {321 - len(read)} tokens of a.txt" in capsys.readouterr().err
    assert 100 < len(read) < 200
    assert (result["metrics"], result["positions"]) == (whole["metrics"], whole["positions"])
    assert files(folder) == [f"{NAME}.json"]


def test_it_goes_on_from_the_end_of_a_document(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be stopped when all is read, and the sums are not kept yet."""
    whole = run(small(), [str(text)], output=str(tmp_path / "whole"))
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(small(), [str(text)], output=str(tmp_path / "out"))
    reader = small()
    monkeypatch.setattr(reader, "log_probs", None)
    assert run(reader, [str(text)], output=str(tmp_path / "out"))["metrics"] == whole["metrics"]


def test_the_file_is_written_now_and_then(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a kill, after which nothing can be written, costs little."""
    saved: list[int] = []
    monkeypatch.setattr(midway.Midway, "save", lambda self: saved.append(self._last.read))
    for every, places in ((1000.0, []), (0.0, [46, 92, 138, 183, 229, 275, 321])):
        monkeypatch.setattr(midway, "EVERY", every)
        saved.clear()
        run(small(), [str(text)], output=str(tmp_path / str(every)))
        assert saved == places


def test_places_to_go_on_from_are_checked(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "out"
    stopped(small(), text, folder, monkeypatch)
    file = folder / f"{NAME}.midway"
    tensors = load_file(file)
    with safe_open(file, framework="pt") as opened:
        place = opened.metadata()["place"]
    unknown, other = {"state.last": torch.tensor([10**6])}, {"state.last": torch.tensor([0.5])}
    for broken, told, said in (
        (tensors, "{}", "its metadata do not say which"),
        (tensors, place.replace('"window": 0', '"window": -1'), "its metadata do not say which"),
        (tensors | unknown, place, "state: ids must be in 0..299"),
        (tensors | other, place, "tensor last is F32"),
        (
            {"sums.tokens": tensors["sums.tokens"]},
            place,
            "sums.nats must be torch.float64 of one dimension",
        ),
        (tensors, place.replace('"read": 1', '"read": 2'), "none of which begins at"),
        (tensors, place.replace('"window": 0', '"window": 7'), "there is no window 7"),
    ):
        save_file(broken, file, {"place": told})
        with pytest.raises(GSAError, match=said):
            run(small(), [str(text)], output=str(folder))
    file.write_bytes(b"nothing")
    with pytest.raises(GSAError, match=r"no place to go on from: .*; remove it to start anew"):
        run(small(), [str(text)], output=str(folder))
    save_file(tensors, file, {"place": place})
    text.write_text("another text")  # of which that is no place
    assert run(small(), [str(text)], output=str(folder))["samples"]["tokens"] == [12]


def test_other_readers_start_again(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(StandIn(), text, tmp_path / "out", monkeypatch)
    assert files(tmp_path / "out") == [f"{NAME}.answers"]
    again = StandIn()
    run(again, [str(text)], output=str(tmp_path / "out"))
    assert again.asked == 321


def test_who_reads_all_anew_gets_a_document_in_one_piece(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, sizes = StandIn(), []
    own, reader.rereads = reader.log_probs, True

    def counted(ids: list[int], state: object = None) -> tuple[torch.Tensor, object]:
        sizes.append(len(ids))
        return own(ids, state)

    monkeypatch.setattr(reader, "log_probs", counted)
    run(reader, [str(text)], output=str(tmp_path))
    assert sizes == [321]
