"""Perplexity: the same as a plain loop, by place and by length, whatever the windows."""

import gzip
import json
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gsa
from gsa.errors import GSAError
from gsa.eval.extrapolation import _row, ends, fits, tensor_bytes
from gsa.eval.journal import Journal
from gsa.eval.losses import Passage, perplexity, windows
from gsa.eval.ours import OurReader
from gsa.eval.perplexity import run
from gsa.eval.reader import Reader
from gsa.eval.sums import Sums
from gsa.eval.texts import documents, lengths_of
from tests.eval.standins import StandIn
from tests.examples import examples

ALICE = Path(__file__).parent.parent / "material" / "alice.txt"


@pytest.fixture(scope="module")
def tiny() -> OurReader:
    return OurReader.open("gsa-tiny", weights="fp32", compute="fp32")


@pytest.fixture(scope="module")
def alice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "alice.txt"
    path.write_text(ALICE.read_text()[:5000])
    return path


def plain_losses(reader: Reader, text: str, context: int | None, stride: int | None) -> dict[int, list[float]]:
    """Losses by the number of tokens before, from the logits of the language model, window by window, in fp64."""
    lm = gsa.LM.from_pretrained("gsa-tiny").float().eval()
    ids = torch.tensor([reader.tokenizer.eos_id, *reader.tokenizer.encode(text)])
    context = len(ids) if context is None else context
    found: dict[int, list[float]] = {}
    counted = 0  # ids, of which the first is given
    while counted < len(ids) - 1:
        end = min(counted + (context if counted == 0 else stride or context), len(ids) - 1)
        first = max(0, end - context)
        with torch.no_grad():
            logits = lm(ids[None, first:end]).logits[0]
        log_probs = logits.double().log_softmax(-1)
        for place in range(counted, end):
            found.setdefault(place + 1 - first, []).append(-float(log_probs[place - first, ids[place + 1]]))
        counted = end
    return found


@pytest.mark.parametrize(("context", "stride"), [(None, None), (300, None), (256, 100)])
def test_it_equals_a_plain_loop(
    tiny: OurReader, alice: Path, tmp_path: Path, context: int | None, stride: int | None
) -> None:
    result = run(tiny, [str(alice)], context=context, stride=stride, output=str(tmp_path))
    text = alice.read_text()
    expected = plain_losses(tiny, text, context, stride)
    every = [loss for losses in expected.values() for loss in losses]
    total = math.fsum(every)
    metrics = {name: metric["value"] for name, metric in result["metrics"].items()}
    assert abs(metrics["loss"] - total / len(every)) < 1e-6
    assert abs(metrics["perplexity"] / math.exp(total / len(every)) - 1) < 1e-6
    assert abs(metrics["bits_per_byte"] - total / math.log(2) / len(text.encode())) < 1e-6
    for row in result["positions"]:
        here = [loss for before, losses in expected.items() if row["from"] <= before <= row["to"] for loss in losses]
        assert row["tokens"] == len(here)
        assert abs(row["loss"] - math.fsum(here) / len(here)) < 2e-6
    assert sum(row["tokens"] for row in result["positions"]) == len(every) == result["samples"]["tokens"][0]


@examples(100)
@given(st.integers(2, 200), st.none() | st.integers(1, 60), st.integers(1, 60))
def test_windows_count_every_token_once(length: int, context: int | None, stride: int) -> None:
    stride_ = None if context is None or stride > context else stride
    found = list(windows(length, context, stride_))
    assert [place for window in found for place in range(window.begin, window.end)] == list(range(1, length))
    for window in found:
        assert 0 <= window.first < window.begin < window.end
        assert context is None or window.end - 1 - window.first <= context
    for window in found[1:]:
        assert context is not None
        assert window.end - 1 - window.first == context  # as much as can be read is read


def test_windows_are_those_of_the_harness() -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    for length in (5, 40, 41, 100):
        ids = list(range(1, length))  # behind the prefix, 0
        theirs = get_rolling_token_windows(ids, prefix_token=0, max_seq_len=20, context_len=1)
        found = [(list(context), list(counted)) for context, counted in map(make_disjoint_window, theirs)]
        every = [0, *ids]
        ours = [(every[w.first : w.begin], every[w.begin : w.end]) for w in windows(length, 20, None)]
        assert ours == found


def test_sums_are_by_powers_of_two() -> None:
    sums = Sums.of(np.ones(9), 1) + Sums.of(np.full(2, 10.0), 3)
    assert sums.tokens.tolist() == [1, 3, 5, 2]
    assert sums.nats.tolist() == [1, 12, 14, 2]


def stand_in_loss(ids: list[int]) -> float:
    return math.fsum(math.log1p(place) + id_ / 256 for place, id_ in enumerate(ids) if place)


def test_documents_of_rows_and_packed_files(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "alpha"}\n{"text": "beta é"}\nnonsense\n')
    with gzip.open(tmp_path / "more.txt.gz", "wt") as file:
        file.write("gamma delta")
    folder = tmp_path / "out"
    result = run(StandIn(), [str(rows), str(tmp_path / "more.txt.gz")], output=str(folder), json=True)
    out, err = capsys.readouterr()
    assert json.loads(out) == result == json.loads((folder / "perplexity-rows.jsonl-more.txt.gz.json").read_text())
    assert "left out 1 rows or files: invalid JSON" in err
    texts = ["alpha", "beta é", "gamma delta"]
    assert result["samples"]["bytes"] == [len(text.encode()) for text in texts]
    losses = [stand_in_loss([256, *text.encode()]) for text in texts]
    assert result["samples"]["nats"] == pytest.approx(losses, rel=1e-6)
    assert result["metrics"]["loss"]["stderr"] > 0
    assert [document.text for document in documents([str(rows)], "text", print)] == texts[:2]


def test_models_that_see_no_more_get_windows(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghij" * 10)
    reader = StandIn(max_length=32)
    result = run(reader, [str(tmp_path / "a.txt")], output=str(tmp_path))
    assert reader.longest == 33  # the last of which is only predicted
    assert max(row["to"] for row in result["positions"]) < 64
    assert result["settings"]["context"] == 32


def test_tokens_can_be_limited(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("é" * 100)
    (tmp_path / "b.txt").write_text("b" * 100)
    sources = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    result = run(StandIn(), sources, output=str(tmp_path), limit_tokens=205)
    assert result["samples"]["tokens"] == [200, 5]
    result = run(StandIn(), sources, output=str(tmp_path), limit_tokens=7)
    assert (result["samples"]["tokens"], result["samples"]["bytes"]) == ([7], [6])  # half a character is none


def test_it_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abcdefghij" * 10)
    whole = run(StandIn(), [str(path)], output=str(tmp_path / "whole"), context=10)
    reader = StandIn()
    read = reader.log_probs

    def three_times(ids: list[int], state: object = None) -> tuple[torch.Tensor, object]:
        if reader.asked >= 33:
            raise KeyboardInterrupt
        return read(ids, state)

    monkeypatch.setattr(reader, "log_probs", three_times)
    with pytest.raises(KeyboardInterrupt):
        run(reader, [str(path)], output=str(tmp_path / "out"), context=10)
    assert "context=10.answers: what is measured so far; the same command" in capsys.readouterr().err
    again = StandIn()
    result = run(again, [str(path)], output=str(tmp_path / "out"), context=10)
    assert "perplexity-a.txt-context=10.answers: goes on with 3 windows of before" in capsys.readouterr().err
    assert again.asked == 77  # of ten windows of 11 ids each
    assert result["metrics"] == whole["metrics"]
    assert result["positions"] == whole["positions"]


def test_results_of_other_texts_with_the_same_name_are_told(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for number, text in enumerate(("one", "one", "other")):
        place = tmp_path / str(number)
        place.mkdir()
        (place / "a.txt").write_text(text)
        run(StandIn(), [str(place / "a.txt")], output=str(tmp_path))
        assert ("was of other documents of this name" in capsys.readouterr().err) == (number == 2), number


def test_losses_without_bounds() -> None:
    assert perplexity(1.0) == math.e
    assert perplexity(1e4) == math.inf


def anything(answer: object) -> bool:
    return answer is not None


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=2), st.lists))
@examples(40)
def test_answers_that_fit_can_be_used(value: object) -> None:
    good = {"loss": 1.5, "seconds": 0.1, "peak_bytes": None, "state_bytes": 8}
    assert fits(good)
    assert Sums.fits(Sums.of(np.ones(3), 1).as_json())
    assert not fits({"loss": 1})
    for name in good:
        if fits(answer := good | {name: value}):
            _row(64, [answer])
    for name in ("tokens", "nats"):
        if Sums.fits(answer := {"tokens": [1], "nats": [0.5], name: value}):
            Sums.from_json(answer)


def test_journals(tmp_path: Path) -> None:
    path = tmp_path / "new" / "journal"
    with Journal(path, {"a": 1}, anything) as journal:
        journal.add(3, {"nats": [0.1]})
        with pytest.raises(GSAError, match="another process is writing to it"), Journal(path, {"a": 1}, anything):
            pass
    with Journal(path, {"a": 1}, anything) as journal:
        assert journal.answers == {3: {"nats": [0.1]}}
    with Journal(path, {"a": 2}, anything) as journal:  # something else is measured, and starts anew
        assert journal.answers == {}
    head = path.read_bytes()
    for line in (b"nonsense\n", b"[1]\n", b'["1", ""]\n', b"[[], 1]\n", b"\xff\n", b"[true, 1]\n", b"[1, null]\n"):
        path.write_bytes(head + line)
        with (
            pytest.raises(GSAError, match="expected a number and an answer in each line"),
            Journal(path, {"a": 2}, anything),
        ):
            pass
    path.unlink()
    path.mkdir()
    with pytest.raises(GSAError, match="answers cannot be kept there"), Journal(path, {"a": 2}, anything):
        pass


@examples(60)
@given(st.binary(max_size=60) | st.text(max_size=20).map(lambda text: json.dumps([1, text]).encode() + b"\n"))
def test_any_content_of_a_journal_is_read_or_refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        with Journal(path, {}, anything):
            head = path.read_bytes()
        path.write_bytes(head + content)
        try:
            with Journal(path, {}, anything) as journal:
                assert all(type(number) is int for number in journal.answers)
                journal.add(2, "more")
        except GSAError:
            return
        with Journal(path, {}, anything) as journal:
            assert journal.answers[2] == "more"


def test_lengths_ask_for_the_same_tokens(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path, plot = tmp_path / "a.txt", tmp_path / "lengths.png"
    path.write_text("abcdefghij" * 30)
    result = run(
        StandIn(max_length=128),
        [str(path)],
        lengths="64,128,256",
        last=8,
        samples=3,
        output=str(tmp_path),
        plot=str(plot),
    )
    out, err = capsys.readouterr()
    assert "left out: 256" in err
    assert "loss of the last 8 tokens of 3 contexts" in out
    assert plot.read_bytes().startswith(b"\x89PNG")
    short, long = result["lengths"]
    assert (short["length"], long["length"]) == (64, 128)
    # The stand-in's loss is that of the token and that of its place: tokens are the same, places are not.
    places = [np.log1p(np.arange(length - 7, length + 1)).mean() for length in (64, 128)]
    assert long["loss"] - short["loss"] == pytest.approx(places[1] - places[0], abs=1e-5)
    assert short["state_bytes"] == 8
    assert short["tokens_per_second"] > 0
    assert result["main"] == "loss_128"
    assert len(result["samples"]["loss_64"]) == 3


def test_contexts_come_from_all_over_the_texts() -> None:
    long = [Passage("a", np.arange(100, dtype=np.int32), 1), Passage("b", np.arange(1000, 1050, dtype=np.int32), 1)]
    found = ends(long, 20, 5)
    assert [len(ids) for ids in found] == [21] * 5
    assert (found[0][0], found[-1][-1]) == (0, 1049)
    assert all((np.diff(ids) == 1).all() for ids in found)  # none reaches from one text into another
    joined = ends(long, 120, 1)  # longer than any
    assert len(joined[0]) == 121
    with pytest.raises(GSAError, match="a context of 200 tokens is longer than all texts together, which have 150"):
        ends(long, 200, 1)


def test_bytes_of_states() -> None:
    x = torch.zeros(10)
    assert tensor_bytes({"a": [x, x[:5]], "b": (torch.zeros(2, dtype=torch.int64),), "c": "text"}) == 56


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"context": 0}, "perplexity: context must be at least 1, got 0"),
        ({"stride": 4}, "perplexity: stride needs --context, got 4"),
        ({"context": 8, "stride": 9}, "perplexity: stride must be at most the context, 8, got 9"),
        ({"context": 64, "max_length": 32}, "perplexity: context must be at most 32, which stand-in may see at once"),
        ({"lengths": "1K", "context": 8}, "expected no --context and no --stride with them"),
        ({"lengths": "1K,many"}, "lengths must be whole numbers from 256 with commas between, as in 512,1K,2K, got"),
        (
            {"lengths": "64", "last": 8, "max_length": 32},
            "sees at most 32 tokens at once, expected a length up to that",
        ),
        ({"limit_tokens": 0}, "perplexity: limit_tokens must be at least 1"),
        ({"sources": ["nowhere.txt"]}, "there is no file or folder nowhere.txt"),
        ({"plot": "nowhere/plot.png"}, "'nowhere/plot.png' cannot be written"),
    ],
)
def test_wrong_wishes(tmp_path: Path, wrong: dict, message: str) -> None:
    (tmp_path / "a.txt").write_text("text")
    reader = StandIn(max_length=wrong.pop("max_length", None))
    with pytest.raises(GSAError, match=message):
        run(reader, **{"sources": [str(tmp_path / "a.txt")], "output": str(tmp_path), **wrong})


def test_losses_that_are_no_numbers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")
    reader = StandIn()
    monkeypatch.setattr(reader, "log_probs", lambda ids, state=None: (torch.tensor([0.0, -math.inf, 0, 0]), None))
    with pytest.raises(GSAError, match="stand-in gives a loss of inf for token 2"):
        run(reader, [str(tmp_path / "a.txt")], output=str(tmp_path))


def test_lengths_as_people_write_them() -> None:
    assert lengths_of(" 2k,1M, 7 ", "lengths") == [7, 2048, 2**20]
    for text in ("", "1,", "-1", "0", "1G", "1e3", "²"):
        with pytest.raises(GSAError, match="lengths must be whole numbers from 1"):
            lengths_of(text, "lengths")
