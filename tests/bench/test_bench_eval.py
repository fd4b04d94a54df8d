"""The benchmark of evaluation measures what it says."""

import json
from pathlib import Path

import pytest

from gsa.bench import decode_model
from gsa.bench.eval import _documents, mmlu, piqa, real, tables
from gsa.cli import main
from gsa.errors import GSAError
from gsa.eval.reader import open_reader
from gsa.eval.scoring import alike, contexts_of, share_beginnings

from ..tables import printed
from .test_bench_decode import SMALL, needs_native

DATA = Path(__file__).parent.parent / "eval" / "data"
pytestmark = [needs_native, pytest.mark.filterwarnings("ignore")]  # of the harness and what it imports


def test_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole command, with a small model."""
    monkeypatch.setattr(decode_model, "shape", lambda quick: SMALL)
    main(["bench", "eval", "--quick", "--json", "--threads", "1", "--documents", "2", "--weights", "fp32"])
    report = json.loads(capsys.readouterr().out)
    assert [row["benchmark"] for row in report["rows"]] == ["PIQA", "MMLU"]
    for row in report["rows"]:
        rates = row["documents_per_second"]
        assert row["ratio"]["hf_1"] == pytest.approx(rates["ours"] / rates["hf_1"])
        assert row["apart"] < 1e-3  # the same model, by two programs
    (table,) = tables(report)
    assert "over hf, 8" in printed(table)


def test_real_documents() -> None:
    reader = open_reader("gsa-tiny")
    asked = real("piqa", _documents("piqa", str(DATA)), 3, reader)
    assert len(asked) == 2 * 3
    texts = [reader.tokenizer.decode(request.context) for request in asked]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("Question: ")
    contexts = contexts_of(real("mmlu", _documents("mmlu", str(DATA)), 2, reader), None, reader.tokenizer.vocab_size)
    assert [len(context.continuations) for context in contexts] == [4, 4]
    assert [reader.tokenizer.decode(context.ids).count("Answer:") for context in contexts] == [6, 6]  # five shots
    with pytest.raises(GSAError, match=r"there is no mmlu\.test\.jsonl\.gz in"):
        _documents("mmlu", str(DATA.parent))


def test_requests_have_the_shapes_of_the_benchmarks() -> None:
    contexts = contexts_of(piqa(200, 49152), None, 49152)
    assert [len(context.continuations) for context in contexts] == [2] * 200
    mean = {
        "question": sum(len(context.ids) for context in contexts) / 200,
        "ending": sum(len(own) for context in contexts for own in context.continuations.values()) / 400,
        "alike": sum(alike(context.continuations) for context in contexts) / 200,
    }
    assert mean == pytest.approx({"question": 13.5, "ending": 23, "alike": 8}, rel=0.1)
    contexts = contexts_of(mmlu(10, 49152), None, 49152)
    share_beginnings(contexts)
    assert [len(context.continuations) for context in contexts] == [4] * 10
    assert {350 <= context.cuts[0] <= 600 for context in contexts} == {True}
