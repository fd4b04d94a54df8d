"""The benchmark of reading prompts measures what it says."""

import json

import pytest
import torch

from gsa.bench import decode_loss, decode_model, prefill, rivals
from gsa.bench.prefill_tables import tables
from gsa.cli import main
from gsa.infer import Model
from gsa.ops.matmul import UNITS, missing_unit
from gsa.ops.native.matmul import unit_rate
from gsa.train.precision import bf16_unit

from ..tables import printed
from ..train.runs import use_cpu
from .test_bench_decode import SMALL, needs_native

pytestmark = needs_native


def test_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole command, with a small model."""
    monkeypatch.setattr("gsa.bench.timing.TURN", 0.0001)
    monkeypatch.setattr(decode_model, "shape", lambda quick: SMALL)
    monkeypatch.setattr("gsa.train.peak.matmul_peak", lambda device, dtype: 1e9)
    race = __import__("gsa.bench.timing", fromlist=["race"]).race
    monkeypatch.setattr("gsa.bench.timing.race", lambda contenders, seconds, rounds: race(contenders, 0.0, 1))
    main(["bench", "prefill", "--quick", "--json", "--threads", "1"])
    report = json.loads(capsys.readouterr().out)
    here = {"fp32", *(compute for compute in UNITS if missing_unit(compute) is None)}
    assert set(report["peak"]) == here
    rows = report["prompts"]
    assert list(rows) == [f"{weights} {way}" for weights, ways in prefill.WAYS.items() for way in ways if way in here]
    for name, row in rows.items():
        plain = rows[f"{row['weights']} fp32"]
        assert row["ratio"] == pytest.approx(row["tokens_per_second"] / plain["tokens_per_second"])
        work = 2 * decode_model.products_per_token(Model.load(decode_model.random_model(SMALL)))
        assert row["share"] == pytest.approx(work * row["tokens_per_second"] / report["peak"][row["compute"]])
        assert row["loss_added"] == row["loss"] - plain["loss"], name
        assert abs(row["loss_tiny_added"]) < 0.01
    assert rows["int4 fp32"]["loss_tiny"] > rows["fp32 fp32"]["loss_tiny"]
    with_bf16 = bf16_unit(torch.device("cpu")) is not None
    assert list(report["rivals"]) == ["transformers fp32", "transformers bf16"][: 1 + with_bf16]
    assert (report["left_out"] is None) == with_bf16
    mixers = {(row["mixer"], row["compute"]): row for row in report["mixers"]}
    assert {mixer for mixer, _ in mixers} == {"gsa", "hybrid"}
    assert {compute for _, compute in mixers} == here
    for (mixer, compute), row in mixers.items():
        beside = mixers["gsa", compute]["tokens_per_second"] / row["tokens_per_second"]
        assert row["time"] == pytest.approx(beside), mixer
    assert "Other mixers" not in printed(*tables({**report, "mixers": []}))
    shown = printed(*tables(report))
    assert "time beside gsa" in shown
    assert "Prompts of 512 tokens" in shown
    assert "ours beside it" in shown
    for sentence in ("transformers in bf16 is left out: this CPU has no unit", None):
        assert ("is left out" in printed(*tables({**report, "left_out": sentence}))) == (sentence is not None)


def test_bf16_of_others_needs_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, torch would need minutes for what is measured in seconds."""
    lm = decode_model.random_model(SMALL)
    for unit, expected in ((None, {"transformers fp32"}), ("AMX BF16", {"transformers fp32", "transformers bf16"})):
        use_cpu(monkeypatch, unit)
        others, close = prefill._others(lm, 8, quick=True)
        close()
        assert set(others) == expected
        sentence = prefill.left_out()
        assert sentence is None if unit else "no unit for bf16 (AVX-512 BF16, AMX BF16)" in str(sentence)


def test_losses_are_the_models_own() -> None:
    lm = decode_model.random_model(SMALL)
    ids = torch.randint(300, (3, 40))
    with torch.no_grad():
        expected = float(lm(ids, labels=ids).loss)
    found = decode_loss.prompt_losses({"fp32": Model.load(lm, "fp32")}, ids)["fp32"]
    assert found == pytest.approx(expected, rel=1e-5)


def test_products_of_a_token() -> None:
    lm = decode_model.random_model(SMALL)
    matrices = sum(x.numel() for name, x in lm.model.layers.named_parameters() if name.endswith("proj.weight"))
    assert decode_model.products_per_token(Model.load(lm, "int4")) == matrices


@pytest.mark.parametrize("compute", UNITS)
def test_the_rate_of_a_unit(compute: str) -> None:
    if missing_unit(compute) is not None:
        pytest.skip(str(missing_unit(compute)))
    assert unit_rate(compute, 0.01) > 0


def test_llama_reads_a_prompt_again_and_again() -> None:
    read = rivals.TransformersLlama(SMALL, torch.float32).prompt(20)
    read()
    read()
