"""`gsa tokenizer train`, `gsa data prepare` and `gsa data check`, as one types them."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from gsa.data.shards import Tokens
from tests.cli.running import run
from tests.infer.talking import write_model

ALICE = Path(__file__).parent.parent / "material" / "alice.txt"


def test_from_text_to_tokens(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    code, out, err = run(capsys, "tokenizer", "train", ALICE, "--vocab-size", "400", "--out", tmp_path / "tokenizer")
    assert (code, "400 tokens" in out) == (0, True), err
    other = tmp_path / "other.txt"
    other.write_text("A second text.\n")
    prepare = ("data", "prepare", ALICE, other, "--tokenizer", tmp_path / "tokenizer", "--out", tmp_path / "data")
    code, out, err = run(capsys, *prepare, "--processes", "1", "--json")
    assert code == 0, err
    summary = json.loads(out)
    assert summary["documents"] == 2
    assert summary["tokenizer"]["vocab_size"] == 400
    tokens = Tokens.open(tmp_path / "data")
    text = ALICE.read_text()
    ids = tokens.read(0, int(tokens.document_starts(1, tokens.length)[0]))
    assert AutoTokenizer.from_pretrained(tmp_path / "data" / "tokenizer").decode(ids[:-1]) == text
    code, out, _ = run(capsys, "data", "check", tmp_path / "data", "--json")
    assert (code, json.loads(out)) == (0, summary)
    code, out, _ = run(capsys, "data", "check", tmp_path / "data")
    assert f"whole; {tokens.length:,} tokens in 2 documents" in out

    shard = tmp_path / "data" / "tokens-00000.npy"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    code, _, err = run(capsys, "data", "check", tmp_path / "data")
    assert code == 2
    assert "tokens-00000.npy" in err


def test_max_tokens_ends_at_a_block_and_is_part_of_the_record(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gsa.data.portions.PORTION_BYTES", 10_000)
    prepare = (
        "data",
        "prepare",
        ALICE,
        "--tokenizer",
        "bytes",
        "--out",
        tmp_path / "data",
        "--processes",
        "1",
        "--json",
    )
    code, out, _ = run(capsys, *prepare, "--max-tokens", "25000")
    assert code == 0
    assert 25_000 <= json.loads(out)["tokens"] < 35_000
    assert json.loads(out)["text_bytes"] == json.loads(out)["tokens"]  # the document goes on, so no end of text
    code, _, err = run(capsys, *prepare, "--max-tokens", "30000")
    assert code == 2
    assert "max_tokens" in err


def test_options_arrive(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "in").mkdir()
    row = json.dumps({"body": (ALICE.read_text() * 9)[:70_000]})
    (tmp_path / "in" / "a.jsonl").write_text(row + '\n{"body": ""}\n')
    (tmp_path / "in" / "b.log").write_text("noise")
    options = ("--field", "body", "--exclude", " *.log, ")
    code, out, err = run(
        capsys, "tokenizer", "train", tmp_path / "in", "--vocab-size", "300", "--out", tmp_path / "tok", *options
    )
    assert (code, "300 tokens, fingerprint " in out) == (0, True), err
    assert "left out: 1 rows (empty)" in err
    options = ("--tokenizer", "bytes", "--processes", "1", *options)
    code, out, _ = run(
        capsys,
        "data",
        "prepare",
        tmp_path / "in",
        "--out",
        tmp_path / "out",
        "--shard-tokens",
        "65536",
        "--json",
        *options,
    )
    assert (code, json.loads(out)["documents"], json.loads(out)["shards"]) == (0, 1, 2)
    code, out, _ = run(capsys, "data", "check", tmp_path / "out")
    assert "left out: 1 rows (empty)" in out
    code, _, err = run(capsys, "data", "prepare", tmp_path / "in", "--out", tmp_path / "strict", "--strict", *options)
    assert (code, "line 2" in err) == (2, True)
    shutil.rmtree(tmp_path / "out" / "tokenizer")
    code, _, err = run(capsys, "data", "check", tmp_path / "out")
    assert (code, "tokenizer: the folder is missing" in err) == (2, True)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("data", "prepare", "--tokenizer", "bytes", "--out", "x"), "SOURCE is missing"),
        (("data", "prepare", "nowhere.txt", "--tokenizer", "bytes", "--out", "x"), "nowhere.txt"),
        (("data", "prepare", str(ALICE), "--out", "x"), "tokenizer"),
        (("data", "prepare", str(ALICE), "--tokenizer", "nowhere/at/all", "--out", "x"), "nowhere/at/all"),
        (("data", "prepare", str(ALICE), "--tokenizer", "bytes", "--out", "x", "--max-tokens", "0"), "max_tokens must"),
        (("data", "prepare", str(ALICE), "--tokenizer", "bytes", "--out", ""), "out is empty"),
        (
            ("data", "prepare", str(ALICE), "--tokenizer", "bytes", "--out", "x", "--shard-tokens", "9"),
            "at least 65536",
        ),
        (("data", "prepare", str(ALICE), "--tokenizer", "bytes", "--out", "x", "--exclude", "y"), "'y' fits no file"),
        (("data", "check", "nowhere"), "nowhere"),
        (("tokenizer", "train", str(ALICE), "--vocab-size", "10", "--out", "x"), "vocab_size must be at least 257"),
    ],
)
def test_mistakes_end_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *args)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert not any(tmp_path.iterdir())


def test_a_model_talks_and_its_talk_becomes_tokens(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = write_model(tmp_path / "model")
    (tmp_path / "questions.txt").write_text("Who is Ahab?\nWhere is the whale?\n")
    chats = ("data", "chats", folder, tmp_path / "questions.txt", "--out", tmp_path / "chats.jsonl")
    lengths = ("--shortest", "60", "--longest", "90", "--answer-tokens", "8", "--batch-size", "2")
    code, out, err = run(capsys, *chats, *lengths, "--tokens", "200", "--json")
    assert code == 0, err
    written = json.loads(out)
    code, out, err = run(capsys, *chats, *lengths, "--tokens", "200")
    assert (code, f"{written['conversations']} conversations, {written['tokens']} tokens" in out) == (0, True), err
    code, _, err = run(capsys, *chats, *lengths, "--tokens", "400", "--seed", "1")
    assert (code, "other settings" in err) == (2, True)
    prepare = ("data", "prepare", tmp_path / "chats.jsonl", "--tokenizer", folder, "--out", tmp_path / "data")
    code, out, err = run(capsys, *prepare, "--chat-field", "messages", "--processes", "1", "--json")
    assert (code, json.loads(out)["documents"]) == (0, written["conversations"]), err


def test_what_is_held_out_is_checked_too(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"Text {i}."}) + "\n" for i in range(50)))
    prepare = ("data", "prepare", tmp_path / "rows.jsonl", "--tokenizer", "bytes", "--out", tmp_path / "data")
    code, _, err = run(capsys, *prepare, "--holdout", "20%", "--processes", "1")
    assert code == 0, err
    assert run(capsys, "data", "check", tmp_path / "data")[0] == 0
    shard = tmp_path / "data" / "heldout" / "tokens-00000.npy"
    shard.write_bytes(shard.read_bytes()[:-1])
    code, _, err = run(capsys, "data", "check", tmp_path / "data")
    assert code == 2
    assert "heldout" in err
