"""`gsa convert --verify FOLDER --text FILE`: figures of a converted folder."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from gsa import pretrained
from gsa.convert import Choices, recall, report
from gsa.convert.audit import Sizes
from gsa.convert.by_position import compare
from gsa.convert.load import load_teacher
from gsa.convert.recall import answered, distances, questions_of
from gsa.convert.report_tables import tables
from gsa.convert.texts import read_pieces
from gsa.data.tokenizer import load_tokenizer
from gsa.errors import GSAError
from gsa.eval.local_data import DataFolder
from gsa.eval.ours import OurTokenizer
from gsa.models.checkpoint import load_model
from tests.cli.running import run
from tests.convert.families import made, saved

SMALL = {"window": 20, "sinks": 2, "slots": 8}
SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": f"{'x' * 60} Ada wrote it {'y' * 40}.",
                    "qas": [{"id": "0", "question": "Who wrote it?", "answers": [{"text": "Ada"}, {"text": "she"}]}],
                },
                {
                    "context": "Ada was first.",
                    "qas": [
                        {"id": "1", "question": "Was it Ada?", "answers": [{"text": "Ada"}]},
                        {"id": "2", "question": "Who?", "answers": [{"text": "Ada"}]},
                    ],
                },
            ]
        }
    ]
}


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    """Two parts of a book."""
    book = pretrained.book()
    for name, begin in (("first.txt", 0), ("second.txt", 100_000)):
        (tmp_path / name).write_text(book[begin : begin + 2000])
    return [tmp_path / "first.txt", tmp_path / "second.txt"]


def test_a_hybrid(
    tmp_path: Path, texts: list[Path], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "LENGTH", 150)
    monkeypatch.setattr(recall, "SAMPLES", 2)  # none of which is as near as the first distance, in bytes
    source = saved(tmp_path / "source")
    made(source, tmp_path / "out", Choices(to="hybrid", **SMALL))  # type: ignore[arg-type]
    (tmp_path / "squad_dev_v1.1.json").write_text(json.dumps(SQUAD))
    asked = ["convert", "--verify", tmp_path / "out", "--text", texts[0], "--text", texts[1], "--text-tokens", "302"]
    capsys.readouterr()
    code, out, _ = run(capsys, *asked, "--questions", "2", "--data", tmp_path, "--json")
    assert code == 0
    found = json.loads(out)["report"]
    assert (found["texts"], found["pieces"], found["length"]) == (["first.txt", "second.txt"], 2, 151)
    names = ["window 20", "window 28", "student", "slots alone", "slots of another text"]
    assert list(found["positions"]) == names
    losses = {name: [place["student_ce"] for place in found["positions"][name]] for name in names}
    assert len({tuple(values) for values in losses.values()}) == len(names)
    assert losses["student"][0] == pytest.approx(losses["slots of another text"][0])
    student, teacher = load_model(tmp_path / "out"), load_teacher(source)
    pieces = read_pieces(load_tokenizer(source), [str(path) for path in texts], length=151, tokens=302, say=print)
    expected = compare(student, teacher, pieces.ids).places()
    assert [place["kl"] for place in found["positions"]["student"]] == [place.kl for place in expected]
    assert {share["name"] for share in found["recovered"]} <= {*names} - {"window 20", "slots alone"}
    gained = losses["window 28"][-1] - losses["student"][-1]
    assert [figure["value"] for figure in found["ahead"] if figure["begin"] == 128] == [pytest.approx(gained)]
    assert {(cell["kind"], *cell["back"]) for cell in found["recall"]} == {
        ("needle", 31, None),
        ("pairs", 23, 30),
        ("pairs", 31, None),
        ("SQuAD", 31, None),
    }
    assert {cell["model"] for cell in found["recall"]} == {"teacher", "window 20", "window 28", "student"}
    again = report.report_folder(tmp_path / "out", [str(path) for path in texts], text_tokens=302, questions=2)
    alone = report.report_folder(tmp_path / "out", [str(texts[0])], text_tokens=1, questions=0)
    assert list(alone.compared) == names[:-1]  # there is no other text
    titles = [table.title for table in tables(again)]
    assert titles[:2] == ["The student beside its teacher", "Cross-entropy by position"]
    assert titles[-1] == "Recall: nats of an answer"
    (losses_table, *_) = (table for table in tables(again) if table.title == titles[1])
    assert losses_table.cells()[3] == ["student", *(f"{value:.3f}" for value in losses["student"])]


def test_a_student_without_a_window(
    tmp_path: Path, texts: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(report, "LENGTH", 80)
    made(saved(tmp_path / "source"), tmp_path / "out", Choices(to="gsa", slots=8))
    asked = ["convert", "--verify", tmp_path / "out", "--text", texts[0], "--text-tokens", "1", "--questions", "0"]
    code, out, _ = run(capsys, *asked)
    assert code == 0
    assert "64-127" in out
    assert "window" not in out
    assert "Recall" not in out


def test_after_training_the_windows_have_the_teachers_weights(tmp_path: Path, texts: list[Path]) -> None:
    made(saved(tmp_path / "source"), tmp_path / "out", Choices(to="hybrid", **SMALL))  # type: ignore[arg-type]
    teacher, student = load_teacher(tmp_path / "source"), load_model(tmp_path / "out").requires_grad_(False)
    student.get_parameter("model.layers.1.mixer.q_proj.weight").mul_(2)
    ids = torch.arange(15)[None]
    found = report.windows(student, teacher, Sizes.of(student), trained=True)
    assert list(found) == ["window 20", "window 28", "slots off"]
    for name, expected in (("window 20", teacher), ("window 28", teacher), ("slots off", student)):
        assert torch.allclose(found[name](ids).logits, expected(ids).logits, atol=1e-4), name


def test_pieces_lie_apart_and_take_turns(texts: list[Path], tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Too short.")
    told: list[str] = []
    tokenizer, names = load_tokenizer("bytes"), [str(path) for path in (*texts, tmp_path / "short.txt")]
    pieces = read_pieces(tokenizer, names, length=100, tokens=650, say=told.append)
    assert tuple(pieces.ids.shape) == (6, 100)
    assert (pieces.texts, pieces.others()) == ([0, 1] * 3, [1, 2, 3, 4, 5, 0])
    assert told == ["left out 1 of 3 texts, which have fewer than 100 tokens"]
    whole = texts[1].read_text()
    places = [whole.find(tokenizer.decode(row)) for row in pieces.ids[1::2].tolist()]
    assert places[0] == 0
    assert all(later - earlier > 600 for earlier, later in pairwise(places))
    (one,) = read_pieces(tokenizer, names[:1], length=100, tokens=1, say=told.append).others()
    assert one == 0
    with pytest.raises(GSAError, match="has the 5,000 tokens of a piece"):
        read_pieces(tokenizer, names, length=5000, tokens=1, say=told.append)


def test_answers_are_beyond_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "SAMPLES", 20)
    (tmp_path / "squad_dev_v1.1.json").write_text(json.dumps(SQUAD))
    tokenizer, sizes = OurTokenizer(load_tokenizer("bytes")), Sizes(200, 4, 60)
    data, book = DataFolder(tmp_path), pretrained.book()[:20000]
    found = questions_of(tokenizer, book, sizes, 6, data)
    assert [distance.name for distance in distances(sizes)] == ["205 to 264", "265 or more"]
    assert [question.kind for question in found] == ["needle"] * 6 + ["pairs"] * 6
    for distance in distances(sizes):
        assert sum(distance.holds(question.back) for question in found) == 6
    text = tokenizer.decode(found[-1].prompt)
    *lines, asked = text.split("\n")
    pairs = dict(line.split(":") for line in lines)
    assert len({*pairs, *pairs.values()}) == 2 * len(lines)
    assert pairs[asked.removesuffix(":")] == tokenizer.decode(found[-1].answer)
    assert found[-1].back == len(text) - text.index(f" {pairs[asked.removesuffix(':')].strip()}")
    (question,) = (one for one in questions_of(tokenizer, book, Sizes(70, 4, 20), 6, data) if one.kind == "SQuAD")
    text = tokenizer.decode(question.prompt)
    assert text.endswith('\nQuestion: Who wrote it?\nThe answer in the text is "')
    assert tokenizer.decode(question.answer) == "Ada"
    assert question.back == len(text) - text.index("Ada")


def test_an_answer_is_written_if_greedy_decoding_writes_it(tmp_path: Path) -> None:
    tokenizer = OurTokenizer(load_tokenizer("bytes"))
    (question, *_) = questions_of(tokenizer, pretrained.book()[:20000], Sizes(), 1, DataFolder(None))
    model = load_teacher(saved(tmp_path / "source"))
    ids, nats = list(question.prompt), 0.0
    for right in question.answer:
        log_probs = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        nats -= float(log_probs[right])
        ids.append(right)
    assert answered(model, question) == (False, pytest.approx(nats, rel=1e-4))
    greedy = list(question.prompt)
    for _ in range(5):
        greedy.append(int(model(torch.tensor([greedy])).logits[0, -1].argmax()))
    assert answered(model, replace(question, answer=greedy[-5:]))[0]


def test_what_would_do_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "empty/inside").mkdir(parents=True)
    (tmp_path / "squad_dev_v1.1.json").write_text(json.dumps(SQUAD))
    (tmp_path / "book.txt").write_text("A book.")
    measured = ["--verify", "a", "--text", str(tmp_path / "book.txt")]
    for args, said in (
        (["a", "b", "--text", "c"], "--text is for --verify"),
        (["--verify", "a", "--text-tokens", "5"], "--text-tokens does nothing without --text"),
        (["--verify", "a", "--data", "d"], "--data does nothing without --text"),
        (["a", "b", "--questions", "0"], "--questions does nothing without --text"),
        ([*measured, "--questions", "0", "--data", str(tmp_path)], "data does nothing without questions"),
        ([*measured, "--data", str(tmp_path / "empty/inside")], "there is no squad_dev_v1.1.json.gz"),
        ([*measured, "--text-tokens", "0"], "text_tokens must be at least 1, got 0"),
        (["--verify", "a", "--text", str(tmp_path / "none.txt")], "there is no file or folder"),
        (measured, "there is no such file; `gsa convert` writes it"),
    ):
        code, _, err = run(capsys, "convert", *args)
        assert code != 0
        assert said in err
