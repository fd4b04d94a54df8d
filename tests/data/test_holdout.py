"""Documents that are held out: the same each time, on one side or the other, and found by training."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gsa.cli import main
from gsa.data.holdout import Holdout
from gsa.data.prepare import prepare
from gsa.data.shards import Manifest, Tokens
from gsa.errors import GSAError
from gsa.train.plan import make_plan
from tests.train.runs import run_settings


def rows(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def documents(folder: Path) -> list[str]:
    """All texts of a folder of bytes."""
    tokens = Tokens.open(folder)
    ids = tokens.read(0, tokens.length).tolist()
    end = tokens.tokenizer.eos_id
    text = ["\x00" if id_ == end else chr(id_) for id_ in ids]
    return "".join(text).split("\x00")[:-1]


def split(source: Path, out: Path, **options: object) -> tuple[Manifest, list[str], list[str]]:
    manifest = prepare([str(source)], "bytes", out, progress=False, **{"processes": 1, **options})
    return manifest, documents(out), documents(out / "heldout")


TEXTS = [f"text {number} " + "word " * (number % 17) for number in range(1000)]


def test_a_share_of_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = rows(tmp_path / "a.jsonl", TEXTS)
    manifest, kept, heldout = split(source, tmp_path / "out", holdout="10%")
    assert 60 < len(heldout) < 140
    assert sorted(kept + heldout) == sorted(TEXTS)
    assert manifest.documents == len(kept)
    assert manifest.text_bytes == sum(map(len, kept))
    assert Tokens.open(tmp_path / "out" / "heldout").text_bytes == sum(map(len, heldout))
    # In another order, portions, number of processes and place, the same documents are held out.
    monkeypatch.setattr("gsa.data.portions.PORTION_BYTES", 1000)
    (tmp_path / "elsewhere").mkdir()
    other = rows(tmp_path / "elsewhere" / "b.jsonl", TEXTS[::-1])
    assert split(other, tmp_path / "other", holdout="10%", processes=2)[1:] == (kept[::-1], heldout[::-1])
    # A larger share has all of the smaller one.
    assert set(heldout) < set(split(source, tmp_path / "more", holdout="30%")[2])


def test_a_number_of_documents(tmp_path: Path) -> None:
    books = tmp_path / "books"
    books.mkdir()
    for number in range(8):
        (books / f"{number}.txt").write_text(f"book {number}\n" * 400)
    _, kept, heldout = split(books, tmp_path / "out", holdout="2")
    assert (len(kept), len(heldout)) == (6, 2)
    assert not set(kept) & set(heldout)
    rows_ = rows(tmp_path / "a.jsonl", [*TEXTS[:20], TEXTS[0]])  # one of them twice: copies stay together
    _, kept, heldout = split(rows_, tmp_path / "rows", holdout="3")
    assert (len(set(heldout)), len(kept) + len(heldout)) == (3, 21)
    assert not set(kept) & set(heldout)


def test_a_file_in_several_portions_is_on_one_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gsa.data.portions.PORTION_BYTES", 1000)
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"a line of {number}\n" * 500)
    sources = [str(tmp_path / f"{number}.txt") for number in range(4)]
    prepare(sources, "bytes", tmp_path / "out", processes=1, progress=False, holdout="1")
    (heldout,) = documents(tmp_path / "out" / "heldout")
    assert heldout in {Path(source).read_text() for source in sources}
    assert len(documents(tmp_path / "out")) == 3


def test_the_same_command_again_has_nothing_to_do_and_another_is_refused(tmp_path: Path) -> None:
    source = rows(tmp_path / "a.jsonl", TEXTS)
    first = split(source, tmp_path / "out", holdout="10%")
    assert split(source, tmp_path / "out", holdout="10%") == first
    for other, told in (("20%", "10%, held out, now 20%, held out"), (None, "10%, the others, now none")):
        message = f"was begun with other settings; not the same are: holdout ({told}). Remove the folder"
        with pytest.raises(GSAError, match=re.escape(message)):
            split(source, tmp_path / "out", holdout=other)
    prepare([str(source)], "bytes", tmp_path / "all", processes=1, progress=False)
    with pytest.raises(GSAError, match="was begun without holdout"):
        split(source, tmp_path / "all", holdout="10%")
    assert not (tmp_path / "all" / "heldout").exists()


def test_bad_rows_are_counted_once_and_max_tokens_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gsa.data.portions.PORTION_BYTES", 1000)
    source = rows(tmp_path / "a.jsonl", [*TEXTS, ""])
    manifest, _, _ = split(source, tmp_path / "out", holdout="10%")
    assert manifest.bad_rows == {"empty": 1}
    assert Tokens.open(tmp_path / "out" / "heldout").manifest.bad_rows == {}
    split(source, tmp_path / "part", holdout="10%", max_tokens=10_000)
    assert 10_000 <= Tokens.open(tmp_path / "part").length < 12_000
    assert 1_000 <= Tokens.open(tmp_path / "part" / "heldout").length < 2_000
    with pytest.raises(GSAError, match="holdout 5 documents does not go with max_tokens; give a share"):
        split(source, tmp_path / "five", holdout="5", max_tokens=10_000)


@pytest.mark.parametrize("asked", ["0%", "100%", "0.01", "0", "-1", "many", "1 %", ""])
def test_what_cannot_be_held_out(asked: str) -> None:
    with pytest.raises(GSAError, match=re.escape(f"as in 1%, or a number of documents as in 5, got {asked!r}")):
        Holdout.parse(asked)


def test_none_and_all(tmp_path: Path) -> None:
    source = rows(tmp_path / "a.jsonl", TEXTS[:5])
    with pytest.raises(GSAError, match=r"holdout 0.1%, held out: that is none of the documents in"):
        split(source, tmp_path / "out", holdout="0.1%")
    with pytest.raises(GSAError, match=r"holdout 99.9%, the others: that is none of the documents in"):
        split(source, tmp_path / "out", holdout="99.9%")
    for count in ("5", "6"):
        message = f"holdout {count}: the sources have 5 documents, and some must be left to train on"
        with pytest.raises(GSAError, match=message):
            split(source, tmp_path / "out", holdout=count)
    assert not (tmp_path / "out").exists()
    assert len(split(source, tmp_path / "out", holdout="4")[1]) == 1
    with pytest.raises(GSAError, match=r"there is no text in .* --field is 'body', the first row has 'text'"):
        split(source, tmp_path / "other", holdout="1", field="body")


def test_files_of_the_same_name_are_documents_of_their_own(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / "books" / name).mkdir(parents=True)
        (tmp_path / "books" / name / "text.txt").write_text(f"book {name}")
    _, kept, heldout = split(tmp_path / "books", tmp_path / "out", holdout="1")
    assert (len(kept), len(heldout)) == (2, 1)
    (tmp_path / "books").rename(tmp_path / "moved")
    assert split(tmp_path / "moved", tmp_path / "again", holdout="1")[2] == heldout


def test_training_finds_it(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = rows(tmp_path / "a.jsonl", TEXTS)
    command = ["data", "prepare", str(source), "--tokenizer", "bytes", "--out", str(tmp_path / "train")]
    main([*command, "--holdout", "10%", "--processes", "1", "--json"])
    assert json.loads(capsys.readouterr().out)["options"]["holdout"] == "10%, the others"
    plan = make_plan(run_settings(tmp_path, eval_data=None, patience=2))
    assert plan.eval_tokens is not None
    assert plan.eval_tokens.folder == tmp_path / "train" / "heldout"
    (tmp_path / "other").mkdir()
    prepare([str(source)], "bytes", tmp_path / "other" / "train", processes=1, progress=False)
    assert make_plan(run_settings(tmp_path / "other", eval_data=None)).eval_tokens is None
    with pytest.raises(GSAError, match="train: patience needs eval_data, or data that was prepared with --holdout"):
        make_plan(run_settings(tmp_path / "other", eval_data=None, patience=2))
