"""Estimates: work is counted as by hand, memory as a real step keeps it, and every setting has its effect."""

import io
import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gsa.errors import GSAError
from gsa.mixers.base import Options
from gsa.models import LM, ModelConfig, preset
from gsa.models.backbone import Block
from gsa.train import measure, peak
from gsa.train.estimate import Estimate, available_bytes, duration, estimate, show
from gsa.train.measure import Seconds
from gsa.train.peak import Peak, flops_per_token, matmul_peak
from tests.models.cases import CASES, VOCABULARY, config

D, V, LAYERS = 32, VOCABULARY, 3
MLP = 3 * D * 256
CASE_FLOPS: dict[str, tuple[float, float]] = {
    # weights of a layer's linear maps, and FLOPs on its memory
    "gsa": (2 * D * D + 2 * D * 16 + D * 2 * 8 + MLP, 2 * (2 * 8 * 16) + 2 * (4 * 8 * 16)),
    "gsa, convolved": (4 * D * D + 3 * D * 4 + D * 2 * 8 + MLP, 4 * (2 * 8 * 32)),
    "gla": (D * 16 + D * 8 + D * 16 + 2 * D * D + D * 16 + 16 * 8 + MLP, 2 * (2 * 4 * 8) + 2 * (4 * 4 * 8)),
    "hgrn2": (4 * D * D + MLP, 4 * (4 * 8 * 8)),
    # a decay belongs to a query head, so no memory is shared
    "retnet": (D * D + D * 16 + D * 32 + 2 * D * 64 + MLP, 4 * (4 * 8 * 16)),
    # the feature map is used by each head of queries and keys
    "supra": (4 * D * D + 8 * 8 * 8 + MLP, 4 * (4 * 8 * 8)),
    "mamba": (D * 128 + 64 * 4 + 64 * (2 + 32) + 2 * 64 + 64 * D, 4 * (64 * 16)),
    "attention": (2 * D * D + 2 * D * 16 + MLP, 4 * D * (1 + 9) / 2),
    # tokens see 1, 2, 3, 4, 5, 5, 5, 5, 5
    "attention, window": (4 * D * D + MLP, 4 * D * 35 / 9),
    # tokens see 1, 2, 3, 3, ... in the window, the last 6 of 9 see a sink, and the last 5 four slots of two heads of 8,
    # written by gates with 2 x 4 x 16 weights, asked by 4 queries of 8 behind 8 x 8 weights
    "hybrid mixer": (
        2 * D * D + 2 * D * 16 + MLP,
        4 * D * (24 + 6) / 9 + 5 / 9 * (2 * (2 * 4 * 16 + 4 * 8 * 8) + 4 * 8 * 4 * (2 + 4)),
    ),
}


@pytest.mark.parametrize("case", CASE_FLOPS)
def test_work_is_what_a_hand_counts(case: str) -> None:
    weights, memory = CASE_FLOPS[case]
    expected = 3 * (LAYERS * (2 * weights + memory) + 2 * D * V)
    assert flops_per_token(config(case), 9) == pytest.approx(expected, rel=1e-12)


def test_work_counts_the_head_tied_or_not_and_attention_by_length() -> None:
    tied = flops_per_token(config("gsa", tie_word_embeddings=True), 100)
    assert tied == flops_per_token(config("gsa"), 100) == flops_per_token(config("gsa"), 10)
    assert flops_per_token(config("attention"), 100) > flops_per_token(config("attention"), 10)
    with pytest.raises(GSAError, match="length must be at least 1, got 0"):
        flops_per_token(config("gsa"), 0)


def test_work_of_a_large_model_is_about_six_times_its_parameters() -> None:
    assert flops_per_token(preset("gsa-1.3b"), 2048) == pytest.approx(6 * 1.37e9, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_peak_is_a_rate(dtype: torch.dtype) -> None:
    assert matmul_peak("cpu", dtype) > 1e6


def test_a_peak_of_what_is_no_number_is_refused() -> None:
    with pytest.raises(GSAError, match=r"dtype must be float32, bfloat16 or float16, got torch.int64"):
        matmul_peak("cpu", torch.int64)


def peaks(monkeypatch: pytest.MonkeyPatch, *measured: float) -> Peak:
    """A peak that is found to be these rates, one after another, and the last one from then on."""
    rates = list(measured)
    monkeypatch.setattr(peak, "matmul_peak", lambda device, dtype: rates.pop(0) if len(rates) > 1 else rates[0])
    return Peak(torch.device("cpu"), torch.float32, world_size=2)


def test_a_peak_measured_on_a_busy_machine_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = peaks(monkeypatch, 0.5e9, 5e9)
    assert found.share(0.8e9) == pytest.approx(0.8)
    assert found.share(9e9) == pytest.approx(0.9)
    assert found.share(1e9) == pytest.approx(0.1)


@given(st.floats(1e3, 1e15), st.lists(st.floats(1e3, 1e15)))
def test_a_share_of_the_peak_is_never_above_all_of_it(rate: float, steps: list[float]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = peaks(monkeypatch, rate)
        shares = [found.share(step) for step in steps]
    assert all(0 < share <= 1 for share in shares)
    fastest = max([2 * rate, *steps])
    assert [found.share(step) for step in steps] == [step / fastest for step in steps]


BASE: dict[str, Any] = {
    "length": 64,
    "rows": 2,
    "accumulation": 1,
    "world_size": 1,
    "engine": "single",
    "precision": "fp32",
    "ema": False,
    "gradient_checkpointing": False,
    "steps": 10,
    "device": "cpu",
}


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gsa.train.measure.ENOUGH_SECONDS", 0.0)
    monkeypatch.setattr("gsa.train.estimate.matmul_peak", lambda device, dtype: 1e12)


def estimated(case: str = "gsa", **changes: Any) -> Estimate:
    return estimate(config(case), **{**BASE, **changes})


def kept_by_a_step(lm: LM, rows: int, length: int, precision: str, packed: bool) -> int:
    """Bytes of everything but parameters that the pass forward of a whole model keeps."""
    kept: dict[int, int] = {}
    ids = torch.randint(VOCABULARY, (1, rows * length) if packed else (rows, length))
    borders = torch.arange(rows + 1) * length if packed else None

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
    ):
        loss = lm(ids, labels=ids, cu_seqlens=borders).loss
    for parameter in lm.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    assert loss is not None
    return sum(kept.values())


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_activations_are_those_of_a_real_step(case: str, precision: str, packed: bool) -> None:
    expected = kept_by_a_step(LM(config(case)), 2, 64, precision, packed)
    found = estimated(case, precision=precision, reset_at_documents=packed)
    assert found.activation_bytes == pytest.approx(expected, rel=0.05)
    assert found.parameters == LM(config(case)).num_parameters
    assert not found.scaled


def test_large_work_is_cut_and_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rows, then shorter ones; what is said of a micro-batch is about the same."""
    whole = estimated(rows=4)
    work = flops_per_token(config("gsa"), 64) / LAYERS
    for tokens, least in ((64 * 1.7, 64), (40, 40)):
        monkeypatch.setattr("gsa.train.measure.WORK_SECONDS", tokens * work / 1e12)
        cut = estimated(rows=4)
        assert cut.scaled
        assert least <= cut.measured_tokens < 4 * 64
        assert cut.activation_bytes == pytest.approx(whole.activation_bytes, rel=0.1)
        assert (cut.tokens, cut.flops_per_step) == (whole.tokens, whole.flops_per_step)


def test_counts_of_tokens_steps_and_bytes() -> None:
    found = estimated(accumulation=3, world_size=4, engine="ddp", steps=7)
    assert found.tokens_per_step == 2 * 64 * 3 * 4
    assert found.tokens == 7 * found.tokens_per_step
    assert found.flops_per_step == flops_per_token(config("gsa"), 64) * found.tokens_per_step
    assert found.seconds == found.seconds_per_step * 7
    assert 0 < found.seconds_per_step.low <= found.seconds_per_step.high
    weights = 4 * found.parameters
    assert (found.weight_bytes, found.gradient_bytes) == (weights, weights)
    assert (found.optimizer_bytes, found.ema_bytes) == (2 * weights, 0)
    assert found.total_bytes == 4 * weights + found.activation_bytes + found.working_bytes


def test_gradients_share_their_place_with_activations_that_go() -> None:
    once, often = estimated(), estimated(accumulation=2)
    assert once.activation_bytes == often.activation_bytes > once.gradient_bytes
    assert often.total_bytes - once.total_bytes == once.gradient_bytes


def test_an_average_is_one_more_copy_of_the_weights() -> None:
    assert estimated(ema=True).total_bytes - estimated().total_bytes == estimated().weight_bytes


@pytest.mark.parametrize(
    ("engine", "stage", "shares"),
    [
        ("ddp", 3, (1, 1, 1)),
        ("fsdp", 1, (4, 4, 4)),
        ("deepspeed", 1, (1, 1, 4)),
        ("deepspeed", 2, (1, 4, 4)),
        ("deepspeed", 3, (4, 4, 4)),
    ],
)
def test_sharded_parts_are_divided(engine: str, stage: int, shares: tuple[int, int, int]) -> None:
    alone, found = estimated(), estimated(engine=engine, world_size=4, zero_stage=stage)
    for part, share in zip(("weight_bytes", "gradient_bytes", "optimizer_bytes"), shares, strict=True):
        assert getattr(found, part) == pytest.approx(getattr(alone, part) / share, abs=4)


def test_gradient_checkpointing_keeps_inputs_of_blocks_and_one_block() -> None:
    plain, saving = estimated(rows=8, length=128), estimated(rows=8, length=128, gradient_checkpointing=True)
    inputs = LAYERS * 8 * 128 * D * 4
    assert inputs < saving.activation_bytes < plain.activation_bytes / 2 + inputs
    assert saving.total_bytes < plain.total_bytes


def test_training_draws_the_same_after_an_estimate() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    estimated()
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 0}, "estimate: rows must be at least 1, got 0"),
        ({"steps": -1}, "steps must be at least 1, got -1"),
        ({"engine": "horovod"}, "engine must be one of single, ddp, fsdp, deepspeed, got 'horovod'"),
        ({"precision": "int8"}, "precision must be one of fp32, bf16, fp16, got 'int8'"),
        ({"zero_stage": 4}, "zero_stage must be 1, 2 or 3, got 4"),
    ],
)
def test_wrong_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GSAError, match=message):
        estimated(**changes)


def test_of_each_kind_of_block_one_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a model may be larger than the memory."""
    built: list[str] = []

    class Counted(Block):
        def __init__(self, config: ModelConfig, options: Options):
            super().__init__(config, options)
            if not self.mixer_norm.weight.is_meta:
                built.append(options.mixer)

    for module in ("gsa.train.measure", "gsa.models.backbone"):
        monkeypatch.setattr(f"{module}.Block", Counted)
    estimate(config("hybrid", num_hidden_layers=100), **BASE)
    assert built == ["gsa", "attention"]


def test_memory_of_the_machine_is_shared_by_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = available_bytes(torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    part = available_bytes(torch.device("cpu"))
    assert whole is not None
    assert part == whole // 4
    assert available_bytes(torch.device("meta")) is None


SHOWN = Estimate(
    parameters=1_300_000_000,
    precision="fp32",
    weight_bytes=5_200_000_000,
    gradient_bytes=5_200_000_000,
    optimizer_bytes=10_400_000_000,
    ema_bytes=0,
    activation_bytes=900_000_000,
    working_bytes=300_000_000,
    total_bytes=21_100_000_000,
    available_bytes=24_000_000_000,
    flops_per_step=3.2e16,
    tokens_per_step=4_000_000,
    steps=25_000,
    tokens=100_000_000_000,
    seconds_per_step=Seconds(1.5, 1.6),
    seconds=Seconds(37_500.0, 40_000.0),
    measured_tokens=512,
    scaled=True,
)


def shown(found: Estimate) -> str:
    console = Console(file=io.StringIO(), width=100)
    show(found, console)
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())


def test_an_estimate_is_shown_in_plain_words() -> None:
    text = shown(SHOWN)
    for words in (
        "parameters 1,300,000,000",
        "memory 21.1 GB of 24.0 GB a process",
        "activations 900 MB",
        "tokens 100,000,000,000: 25,000 steps of 4,000,000",
        "time 10 h 25 min to 11 h 6 min: 1.5 to 1.6 s a step",
        "Measured on 512 tokens and scaled",
    ):
        assert words in text
    assert "average" not in text
    assert "Other processes" not in text
    assert "does not fit" not in text


def test_a_range_of_one_time_is_one_time() -> None:
    exact = replace(SHOWN, seconds=Seconds(37_500.0, 37_510.0), seconds_per_step=Seconds(1.5, 1.5))
    assert "time 10 h 25 min: 1.5 s a step" in shown(exact)


def test_a_measurement_that_others_disturbed_says_so() -> None:
    """The same work took very different times."""
    disturbed = replace(SHOWN, seconds=Seconds(37_500.0, 100_000.0))
    assert "Other processes seem to use this machine: the shorter time is what it takes alone." in shown(disturbed)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1))
def test_a_range_covers_the_pace_of_the_runs_it_is_made_of(runs: list[float]) -> None:
    """So many steps at their average pace take a time within it, whatever the machine did meanwhile."""
    found, mean = Seconds.of(runs), sum(runs) / len(runs)
    assert found.low == min(runs)
    assert found.low <= mean * (1 + 1e-9)
    assert mean <= found.high * (1 + 1e-9)
    assert found.high <= max(runs) * (1 + 1e-9)


def test_one_slow_moment_is_not_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of 1 s, of which others take the machine for 10 s twice: several are measured, and the first is left out."""
    spent, now = iter([10.0, 1.0, 10.0, *[1.0] * 100]), [0.0]

    def run() -> None:
        now[0] += next(spent)

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(measure, "ENOUGH_SECONDS", 16.0)
    found = measure._seconds(run, torch.device("cpu"))
    assert found.low == 1.0
    assert 1.0 < found.high < 4.0


def test_what_does_not_fit_is_warned_of() -> None:
    assert "Warning: this does not fit into 20.0 GB." in shown(replace(SHOWN, available_bytes=20_000_000_000))
    unknown = replace(SHOWN, available_bytes=None, scaled=False)
    assert unknown.fits is None
    assert "memory 21.1 GB of unknown" in shown(unknown)
    assert "Warning" not in shown(unknown)
    assert "Measured" not in shown(unknown)


def test_an_estimate_is_json() -> None:
    assert json.loads(json.dumps(asdict(estimated()), allow_nan=False))["steps"] == 10


def test_durations_in_words() -> None:
    seconds = (0.2, 59, 60, 3725, 3600 * 5, 86400 * 12.5)
    assert [duration(x) for x in seconds] == ["0 s", "59 s", "1 min", "1 h 2 min", "5 h", "12 d 12 h"]
