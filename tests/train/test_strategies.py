"""Every strategy is the same training: one process or two, whole weights or shards, saved by one, loaded by another."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore

import gsa
from gsa import GSAError
from gsa.train.strategies import Strategy, strategy
from gsa.train.strategies.launch import SAID_BY_LAUNCHER
from tests.train.ranks import on_ranks

# Relative; the order of sums is all that differs, but AdamW makes much of little where gradients are small.
LOSS_TOLERANCE, NORM_TOLERANCE, WEIGHT_TOLERANCE = 1e-6, 1e-5, 1e-5
BATCH, LENGTH, VOCABULARY = 8, 16, 64
MIDDLE, END = 3, 5  # steps: state is saved after the first three, of five
Saved = tuple[dict[str, Tensor], dict[str, Tensor]]


def model(tied: bool = True, seed: int = 0) -> gsa.LM:
    torch.manual_seed(seed)
    return gsa.LM(
        gsa.ModelConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_slots=8,
            vocab_size=VOCABULARY,
            tie_word_embeddings=tied,
        )
    )


def adamw(lm: gsa.LM) -> torch.optim.AdamW:
    """Two groups, as weight decay wants them."""
    parameters = list(lm.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, eps=1e-6, fused=True)


def rows(step: int) -> Tensor:
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def started(name: str, *, tied: bool = True, precision: str = "fp32", zero_stage: int = 2) -> Strategy:
    carrier = strategy(name, precision=precision, device="cpu", zero_stage=zero_stage)
    carrier.start(model(tied, seed=carrier.rank), adamw, compile=False)
    return carrier


def train(carrier: Strategy, steps: range) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step: two sequences in a micro-batch, clipped."""
    found = []
    for step in steps:
        micro_batches = rows(step)[carrier.rank :: carrier.world_size].split(2)
        total = 0.0
        for i, ids in enumerate(micro_batches):
            share = carrier.loss(ids, ids, None) * (len(ids) / BATCH)
            carrier.backward(share, last=i == len(micro_batches) - 1)
            total += float(share.detach())
        norm = carrier.gradient_norm()
        carrier.scale_gradients(min(1.0, 0.5 / norm))
        carrier.step(1e-2)
        found.append((carrier.sum(total)[0], norm))
    return found


@dataclass
class Course:
    """What a process saw of a training."""

    steps: list[tuple[float, float]]
    again: list[tuple[float, float]]
    """The last steps once more, from what was saved in the middle and after gradients that were thrown away."""
    saved: Saved
    weights: dict[str, Tensor]
    ema: dict[str, Tensor]
    eval: tuple[float, float]
    """Loss on other data of the averaged weights, and of the last ones."""
    resumed: list[tuple[float, float]]
    """The last steps from what another strategy saved."""


def course(name: str, tied: bool, others: Saved | None, *, zero_stage: int = 2) -> Course:
    """All that is compared, with fresh strategies for what is loaded; on every process of a run."""
    carrier = started(name, tied=tied, zero_stage=zero_stage)
    with_ema = name != "deepspeed"
    if with_ema:
        carrier.start_ema(0.5)
    steps = train(carrier, range(MIDDLE))
    saved = (carrier.weights(), carrier.optimizer_state())
    if with_ema:
        carrier.update_ema()
    steps += train(carrier, range(MIDDLE, END))
    weights, ema = carrier.weights(), carrier.ema_weights() if with_ema else {}
    evaluated = (evaluation_loss(carrier, ema=with_ema), evaluation_loss(carrier, ema=False))
    assert all(torch.equal(x, weights[key]) for key, x in carrier.weights().items())

    carrier.load(*saved)
    throw_away(carrier)
    again = train(carrier, range(MIDDLE, END))
    carrier.close()
    if others is None:
        return Course(steps, again, saved, weights, ema, evaluated, [])
    carrier = started(name, tied=tied, zero_stage=zero_stage)
    carrier.load(*(others if carrier.rank == 0 else (None, {})))
    resumed = train(carrier, range(MIDDLE, END))
    carrier.close()
    return Course(steps, again, saved, weights, ema, evaluated, resumed)


def evaluation_loss(carrier: Strategy, *, ema: bool) -> float:
    with torch.no_grad(), carrier.evaluation(ema=ema):
        assert not carrier.model.training
        loss = float(carrier.loss(rows(99), rows(99), None))
    assert carrier.model.training
    return loss


def throw_away(carrier: Strategy) -> None:
    """Everything that may come before a step that is not made."""
    ids = rows(50)
    carrier.loss(ids, ids, None)
    carrier.discard()
    carrier.backward(carrier.loss(ids, ids, None), last=False)
    carrier.discard()
    carrier.backward(carrier.loss(ids, ids, None), last=True)
    by_name = carrier.gradient_norms()
    assert set(by_name) == set(dict(model(carrier.model.config.tie_word_embeddings).named_parameters()))
    assert math.isclose(math.hypot(*by_name.values()), carrier.gradient_norm(), rel_tol=1e-6)
    carrier.discard()
    carrier.backward(carrier.loss(ids, ids, None) * math.nan, last=True)
    assert not math.isfinite(carrier.gradient_norm())
    carrier.discard()


def one_process() -> dict[tuple[str, bool], Course]:
    return {(name, tied): course(name, tied, None) for name in ("single", "ddp", "fsdp") for tied in (True, False)}


def two_processes(saved: dict[bool, Saved]) -> dict[tuple[str, bool], Course]:
    first = strategy("auto", device="cpu")  # its connection serves those that follow
    assert (first.name, first.world_size) == ("ddp", 2)
    found = {(name, tied): course(name, tied, saved[tied]) for name in ("ddp", "fsdp") for tied in (True, False)}
    assert first.sum(1.0, first.rank, 0.1 + first.rank * 1e-9) == [2.0, 1.0, 0.2 + 1e-9]
    for name in ("ddp", "fsdp"):
        carrier = started(name)
        with pytest.raises(GSAError, match=r"load: (tensor step is missing|refused by the first process)"):
            carrier.load(None, {k: v for k, v in found[name, True].saved[1].items() if k != "step"})
    with pytest.raises(GSAError, match="a launcher started 2 processes"):
        strategy("single")
    first.sum(0.0)  # waits for the other process, which may still need the connection
    first.close()
    return found


def threads_that_stay() -> list[str]:
    """Threads of the group of processes, by their names, after a strategy is closed."""
    carrier = started("fsdp")
    train(carrier, range(2))
    carrier.sum(0.0)  # waits for the other process
    carrier.close()
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are listed here on Linux")
@pytest.mark.slow
def test_no_thread_outlives_fsdp() -> None:
    """One that does can abort the process while Python shuts down."""
    assert on_ranks(2, threads_that_stay) == [[], []]


def waits_for_ever() -> None:
    time.sleep(1000)


def breaks() -> None:
    raise ValueError("as it should")


def test_a_process_that_hangs_or_breaks_is_seen() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0\] did not answer in time"):
        on_ranks(1, waits_for_ever, timeout=0.5)
    with pytest.raises(RuntimeError, match=r"(?s)rank 0:.*ValueError: as it should"):
        on_ranks(1, breaks)


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, bool], Course]:
    return on_ranks(1, one_process)[0]


@pytest.fixture(scope="module")
def pair(alone: dict[tuple[str, bool], Course]) -> list[dict[tuple[str, bool], Course]]:
    return on_ranks(2, two_processes, {tied: alone["single", tied].saved for tied in (True, False)})


def assert_same(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    assert len(found) == len(expected)
    for (loss, norm), (other_loss, other_norm) in zip(found, expected, strict=True):
        assert math.isclose(loss, other_loss, rel_tol=LOSS_TOLERANCE)
        assert math.isclose(norm, other_norm, rel_tol=NORM_TOLERANCE)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert list(found) == list(expected)
    for name, x in found.items():
        assert x.dtype == torch.float32
        assert x.device.type == "cpu"
        assert float((x - expected[name]).norm()) <= tolerance * float(expected[name].norm()), name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["single", "ddp", "fsdp"])
def test_one_process_of_any_strategy_is_bit_exact(alone: dict[tuple[str, bool], Course], name: str, tied: bool) -> None:
    """Saved and loaded, with gradients thrown away in between, nothing changes; nor from strategy to strategy."""
    found, single = alone[name, tied], alone["single", tied]
    assert found.again == found.steps[MIDDLE:]
    assert found.steps == single.steps
    assert found.eval == single.eval
    for part in (0, 1):
        assert_close(found.saved[part], single.saved[part], 0.0)
    assert_close(found.weights, single.weights, 0.0)
    assert_close(found.ema, single.ema, 0.0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_two_processes_train_as_one(
    alone: dict[tuple[str, bool], Course], pair: list[dict[tuple[str, bool], Course]], name: str, tied: bool
) -> None:
    single, (first, second) = alone["single", tied], (rank[name, tied] for rank in pair)
    assert first.steps == second.steps  # the same numbers on both, though their weights began differently
    assert first.again == first.steps[MIDDLE:]
    assert first.eval == second.eval
    assert second.weights == second.ema == second.saved[0] == second.saved[1] == {}
    assert_same(first.steps, single.steps)
    assert_close(first.weights, single.weights, WEIGHT_TOLERANCE)
    assert_close(first.ema, single.ema, WEIGHT_TOLERANCE)
    assert first.eval == pytest.approx(single.eval, rel=LOSS_TOLERANCE)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_what_one_saved_two_resume_and_the_reverse(
    alone: dict[tuple[str, bool], Course], pair: list[dict[tuple[str, bool], Course]], name: str, tied: bool
) -> None:
    single, found = alone["single", tied], pair[0][name, tied]
    assert_same(found.resumed, single.steps[MIDDLE:])
    carrier = started("single", tied=tied)
    carrier.load(*found.saved)
    for given, taken in zip(found.saved, (carrier.weights(), carrier.optimizer_state()), strict=True):
        assert_close(taken, given, 0.0)
    assert_same(train(carrier, range(MIDDLE, END)), found.steps[MIDDLE:])


def test_names_are_those_of_the_model_with_a_tied_head_once() -> None:
    for tied in (True, False):
        carrier = started("single", tied=tied)
        names = [name for name in carrier.model.state_dict() if not (tied and name == "lm_head.weight")]
        assert list(carrier.weights()) == names
        moments = [f"{moment}.{name}" for moment in ("exp_avg", "exp_avg_sq") for name in names]
        state = carrier.optimizer_state()
        assert list(state) == [*moments, "step"]
        assert all(not x.any() for x in state.values())  # before the first step
        carrier.load(carrier.weights(), state)
        train(carrier, range(2))
        assert carrier.optimizer_state()["step"] == 2


def test_what_is_given_is_a_copy() -> None:
    carrier = started("single")
    before = carrier.weights()
    kept = {name: x.clone() for name, x in before.items()}
    train(carrier, range(1))
    assert all(torch.equal(x, kept[name]) for name, x in before.items())


def test_weights_are_kept_in_fp32() -> None:
    carrier = strategy("single", precision="bf16", device="cpu")
    carrier.start(model().bfloat16(), adamw, compile=False)
    assert {x.dtype for x in carrier.weights().values()} == {torch.float32}


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 1e-2), ("fp16", 1e-3)])
def test_precision_is_that_of_the_pass_forward_alone(precision: str, tolerance: float) -> None:
    exact, rough = started("single"), started("single", precision=precision)
    losses = [carrier.loss(rows(0), rows(0), None) for carrier in (exact, rough)]
    assert 0 < float((losses[0] - losses[1]).detach().abs()) < tolerance
    rough.backward(losses[1], last=True)
    assert {p.grad.dtype for p in rough.model.parameters()} == {torch.float32}


def test_every_group_takes_the_learning_rate_of_the_step() -> None:
    def two_groups(lm: gsa.LM) -> torch.optim.AdamW:
        first, *rest = lm.parameters()
        return torch.optim.AdamW([{"params": [first], "lr": 0.0}, {"params": rest}])

    carrier = strategy("single", device="cpu")
    carrier.start(model(), two_groups, compile=False)
    before = carrier.weights()
    train(carrier, range(1))
    assert not any(torch.equal(x, before[name]) for name, x in carrier.weights().items())
    assert [group["lr"] for group in carrier.optimizer.param_groups] == [0.01, 0.01]


def test_ema_is_the_average_and_leaves_weights_alone() -> None:
    carrier = started("single")
    carrier.start_ema(0.75)
    expected = carrier.weights()
    for step in range(2):
        train(carrier, range(step, step + 1))
        carrier.update_ema()
        expected = {name: 0.75 * expected[name] + 0.25 * x for name, x in carrier.weights().items()}
    averaged, trained = carrier.ema_weights(), carrier.weights()
    for name, x in averaged.items():
        torch.testing.assert_close(x, expected[name])
    with carrier.with_ema():
        assert_close(carrier.weights(), averaged, 0.0)
        with pytest.raises(GSAError, match="the EMA is in use"):
            carrier.ema_weights()
    assert_close(carrier.weights(), trained, 0.0)

    other = started("single")
    other.start_ema(0.75)
    other.load_ema(averaged)
    assert_close(other.ema_weights(), averaged, 0.0)
    with pytest.raises(GSAError, match=r"load_ema: tensor model.norm.weight is missing"):
        other.load_ema({name: x for name, x in averaged.items() if name != "model.norm.weight"})


def test_ema_that_cannot_be() -> None:
    carrier = started("single")
    with pytest.raises(GSAError, match="the EMA was not started"):
        carrier.update_ema()
    for decay in (0.0, 1.0, math.nan):
        with pytest.raises(GSAError, match="decay of the EMA"):
            carrier.start_ema(decay)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, r"tensor model.norm.weight is missing"),
        ({"model.norm.weight": torch.zeros(3)}, r"tensor model.norm.weight is \[3\], expected \[32\]"),
        ({"model.norm.weight": torch.zeros(32, dtype=torch.int64)}, r"tensor model.norm.weight is torch.int64"),
        ({"lm_head.weight": torch.zeros(64, 32)}, r"tensor lm_head.weight is not part of the model"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(change: dict[str, Tensor | None], message: str) -> None:
    carrier = started("single")
    before = carrier.weights()
    given = {name: x + 1 for name, x in before.items()} | change
    with pytest.raises(GSAError, match=f"engine single: load: {message}"):
        carrier.load({name: x for name, x in given.items() if x is not None}, None)
    assert_close(carrier.weights(), before, 0.0)


def test_no_tensors_are_not_the_tensors_of_a_model() -> None:
    """They once passed for nothing to load, and training went on without the optimiser's moments."""
    carrier = started("single")
    with pytest.raises(GSAError, match=r"load: tensor model\.embeddings\.weight is missing"):
        carrier.load({}, None)
    with pytest.raises(GSAError, match=r"load: tensor exp_avg\.model\.embeddings\.weight is missing"):
        carrier.load(None, {})


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """An environment that no launcher has been at."""
    for variable in SAID_BY_LAUNCHER:
        monkeypatch.delenv(variable, raising=False)
    yield monkeypatch
    assert not torch.distributed.is_initialized()


def test_auto_without_a_launcher_is_single(launcher: pytest.MonkeyPatch) -> None:
    assert strategy("auto").name == "single"
    launcher.setenv("WORLD_SIZE", "1")
    assert strategy("auto").name == "single"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fdsp", {}, r"unknown engine 'fdsp' \(did you mean 'fsdp'\?\), expected auto, single, ddp, fsdp, deepspeed"),
        ("single", {"precision": "fp8"}, "precision is 'fp8', expected one of auto, fp32, bf16, fp16"),
        ("deepspeed", {"zero_stage": 0}, "zero_stage is 0, expected 1, 2 or 3"),
        ("ddp", {}, r"no launcher started this process \(RANK, .*`torchrun --nproc-per-node N -m gsa train"),
        ("fsdp", {}, r"no launcher started this process .* --engine fsdp`"),
    ],
)
def test_what_cannot_be_chosen(
    launcher: pytest.MonkeyPatch, name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(GSAError, match=message):
        strategy(name, **options)


def test_what_a_launcher_cannot_mean(launcher: pytest.MonkeyPatch) -> None:
    launcher.setenv("WORLD_SIZE", "two")
    with pytest.raises(GSAError, match="WORLD_SIZE is 'two' in the environment, expected a whole number from 1"):
        strategy("auto")
    for variable in SAID_BY_LAUNCHER:
        launcher.setenv(variable, "2")
    with pytest.raises(GSAError, match="RANK is 2, expected less than WORLD_SIZE 2"):
        strategy("ddp", device="cpu")


def test_processes_that_do_not_come_are_not_waited_for_for_ever(launcher: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    said = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    by_torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    for variable, value in {**said, **by_torchrun, "MASTER_PORT": str(store.port)}.items():
        launcher.setenv(variable, value)
    launcher.setattr("gsa.train.strategies.launch.CONNECT_TIMEOUT", timedelta(seconds=1))
    with pytest.raises(GSAError, match=r"process 0 of 2 could not connect to the others at 127.0.0.1:\d+ within 1 s"):
        strategy("ddp", device="cpu")


def test_compile_is_of_every_block() -> None:
    carrier = strategy("single", device="cpu")
    carrier.start(model(), adamw, compile=True)
    assert all(block._compiled_call_impl is not None for block in carrier.model.model.layers)
    assert list(carrier.weights()) == list(started("single").weights())


def compiled() -> dict[str, list[tuple[float, float]]]:
    first = strategy("ddp", device="cpu")
    found = {}
    for name in ("ddp", "fsdp"):
        carrier = strategy(name, device="cpu")
        lm = model()
        lm.gradient_checkpointing = True
        carrier.start(lm, adamw, compile=True)
        found[name] = train(carrier, range(3))
    first.close()
    return found


@pytest.mark.slow
def test_compiled_blocks_train_the_same(alone: dict[tuple[str, bool], Course]) -> None:
    for found in on_ranks(2, compiled, timeout=300)[0].values():
        for (loss, norm), expected in zip(found, alone["single", True].steps, strict=False):
            assert (loss, norm) == pytest.approx(expected, rel=1e-4)


def test_deepspeed_that_is_not_installed_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(GSAError, match=r"engine deepspeed needs deepspeed: pip install 'gsa-lm\[train\]'"):
        strategy("deepspeed")


def with_deepspeed(saved: dict[bool, Saved]) -> dict[tuple[int, bool], Course]:
    first = strategy("ddp", device="cpu")
    found = {}
    for stage in (1, 2, 3):
        for tied in (True, False):
            found[stage, tied] = course("deepspeed", tied, saved[tied], zero_stage=stage)
    carrier = strategy("deepspeed", device="cpu", zero_stage=3)
    with pytest.raises(GSAError, match="it keeps no EMA"):
        carrier.start_ema(0.9)
    with pytest.raises(GSAError, match=r"zero_stage 3 does not go with torch\.compile"):
        carrier.start(model(), adamw, compile=True)
    first.close()
    return found


@pytest.mark.slow
def test_deepspeed_trains_as_one_process(alone: dict[tuple[str, bool], Course]) -> None:
    """Every stage: the same losses, norms and weights; what one strategy saved, the other resumes."""
    given = {tied: alone["single", tied].saved for tied in (True, False)}
    first, second = on_ranks(2, with_deepspeed, given, timeout=300)
    for (stage, tied), found in first.items():
        single = alone["single", tied]
        assert found.steps == second[stage, tied].steps
        assert found.again == found.steps[MIDDLE:]
        assert_same(found.steps, single.steps)
        assert_close(found.weights, single.weights, WEIGHT_TOLERANCE)
        assert_same(found.resumed, single.steps[MIDDLE:])
        carrier = started("single", tied=tied)
        carrier.load(*found.saved)
        assert_same(train(carrier, range(MIDDLE, END)), found.steps[MIDDLE:])
