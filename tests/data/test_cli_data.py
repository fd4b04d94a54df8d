"""The commands' functions: what they print, and that options arrive."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gsa.cli.data import check, prepare, train_tokenizer
from gsa.errors import GSAError
from tests.data.cases import documents, jsonl, text


def test_from_text_to_tokens(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(jsonl([text(9000)]).replace(b'"text"', b'"body"'))
    (tmp_path / "in" / "b.log").write_text("noise")
    options = {"field": "body", "exclude": "*.log,*.tmp"}
    train_tokenizer([str(tmp_path / "in")], vocab_size=300, out=str(tmp_path / "tok"), **options)
    assert "300 tokens, fingerprint " in capsys.readouterr().out
    out = str(tmp_path / "out")
    options |= {"tokenizer": str(tmp_path / "tok"), "processes": 1, "shard_tokens": 500}
    prepare([str(tmp_path / "in")], out=out, json=True, **options)
    made = json.loads(capsys.readouterr().out)
    assert (made["folder"], made["documents"], made["tokenizer"]["vocab_size"]) == (out, 1, 300)
    assert made["shards"] > 1
    check(out)
    assert f"{out}: whole; {made['tokens']:,} tokens in 1 documents" in capsys.readouterr().out
    check(out, json=True)
    assert json.loads(capsys.readouterr().out) == made


def test_check_finds_a_changed_byte(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl([*documents(3), ""]))
    prepare([str(tmp_path / "a.jsonl")], tokenizer="bytes", out=str(tmp_path / "out"))
    check(str(tmp_path / "out"))
    assert "left out: 1 rows (empty)" in capsys.readouterr().out
    path = tmp_path / "out" / "tokens-00000.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\7")
    with pytest.raises(GSAError, match="its bytes have changed"):
        check(str(tmp_path / "out"))


def test_strict_arrives(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl([""]))
    with pytest.raises(GSAError, match="line 1"):
        prepare([str(tmp_path / "a.jsonl")], tokenizer="bytes", out=str(tmp_path / "out"), strict=True)
