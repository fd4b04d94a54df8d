"""Threads of the native engine: as many as the work is worth, asleep when they wait, and never more than asked for.

What depends on the system's scheduler runs in processes of its own; no test looks at a clock for speed.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gsa.bench.busy import busy_processes
from gsa.bench.decode_model import random_model, shape, token
from gsa.infer import Model
from gsa.infer.runners import make_runner
from gsa.ops import (
    SlotState,
    gated_linear_attention,
    gated_slot_attention,
    gated_slot_attention_step,
    joined_slots,
    selective_scan,
    window_attention,
)
from gsa.ops.linear import matvec, pack
from gsa.ops.native import library

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux about threads")
pytestmark = pytest.mark.skipif(library.unavailable(None) is not None, reason="the native engine cannot run here")


@pytest.fixture(autouse=True)
def _as_for_users() -> Iterator[None]:
    library.use_every_thread(False)
    torch.set_num_threads(2)
    yield
    library.assume_crowd(None)


def asked(run: Callable[[], object]) -> int:
    run()
    return library.threads_asked()


def attention(T: int) -> Callable[[], object]:
    q, g = torch.randn(1, T, 2, 64), -torch.rand(1, T, 2, 32)
    return lambda: gated_slot_attention(q, q, q, g, backend="native")


def step(B: int) -> Callable[[], object]:
    q, g = torch.randn(B, 4, 128), -torch.rand(B, 4, 64)
    state = SlotState(torch.zeros(B, 4, 128, 64), torch.zeros(B, 4, 64, 128))
    return lambda: gated_slot_attention_step(q, q, q, g, state=state)


def product(N: int) -> Callable[[], object]:
    weight, x = pack(torch.randn(N, 512), "bf16"), torch.randn(512)
    return lambda: matvec(weight, x, backend="native")


@pytest.mark.parametrize(
    ("work", "calm", "crowded"),
    [
        (attention(16), 1, 1),
        (attention(256), 2, 1),
        (attention(2048), 2, 2),
        (product(16), 1, 1),
        (product(256), 2, 1),
        (product(4096), 2, 2),
        (step(1), 1, 1),
        (step(8), 2, 1),
        (step(64), 2, 2),
    ],
)
def test_threads_are_as_many_as_the_work_is_worth(work: Callable[[], object], calm: int, crowded: int) -> None:
    """Beside other busy processes more work is needed to make one worth it."""
    for crowd, expected in ((False, calm), (True, crowded)):
        library.assume_crowd(crowd)
        assert asked(work) == expected
    library.use_every_thread(True)
    assert asked(work) == 2
    torch.set_num_threads(1)
    assert asked(work) == 1


def test_in_a_crowd_a_token_of_a_small_model_has_one_thread_and_of_a_larger_one_two() -> None:
    small = token(make_runner(Model.load("gsa-tiny", "bf16"), 1), [0])
    large = token(make_runner(Model.load(random_model(shape(quick=True)), "bf16"), 1), [0])
    for crowd, expected in ((False, (2, 2)), (True, (1, 2))):
        library.assume_crowd(crowd)
        assert (asked(small), asked(large)) == expected


@pytest.mark.parametrize("crowd", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_crowd_changes_no_bits(crowd: bool) -> None:
    """Other threads do the work then, and as many of them as come."""
    torch.manual_seed(0)
    weight, x = pack(torch.randn(300, 200), "int8"), torch.randn(3, 200)
    q, g = torch.randn(1, 300, 1, 40, requires_grad=True), -torch.rand(1, 300, 1, 24)
    u, B = torch.randn(1, 300, 40), torch.randn(1, 300, 8)
    one = torch.ones(1, requires_grad=True)

    def results() -> list[torch.Tensor]:
        o = gated_slot_attention(q, q, q, g, backend="native")[0]
        linear = gated_linear_attention(q, q, q, backend="native")[0]
        scanned = selective_scan(u, u.abs(), -torch.ones(40, 8), B, B, backend="native")[0]
        near, lse = window_attention(q, q, q, window=50, sinks=(q, q[:, :3], q[:, :3]), backend="native")
        heads = {"slot_scale": one, "slot_mass": one, "slot_bias": one}
        joined = joined_slots(q, q, q, g, -g, near, lse, **heads, backend="native")[0]
        gradients = torch.autograd.grad(o.sum() + linear.sum() + joined.sum(), (q, one))
        return [matvec(weight, x, backend="native"), *(y.detach() for y in (o, linear, joined)), scanned, *gradients]

    torch.set_num_threads(1)
    expected = results()
    library.use_every_thread(True)
    library.assume_crowd(crowd)
    assert library.crowded() == crowd
    for threads in (2, 3, 7):
        torch.set_num_threads(threads)
        for _ in range(10):
            assert all(torch.equal(a, b) for a, b in zip(results(), expected, strict=True))


def alone(code: str) -> Any:
    """What a program prints as JSON."""
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    return json.loads(run.stdout)


CALLS = """
import json, os, resource, threading, time
import torch
from gsa.ops import gated_slot_attention
from gsa.ops.linear import matvec, pack
from gsa.ops.native import library
library.use_every_thread(True)
library.assume_crowd(True)
weight, x = pack(torch.randn(512, 512), "bf16"), torch.randn(512)
ours, torchs = lambda: matvec(weight, x, backend="native"), torch.randn(40_000).exp
"""


@linux
def test_threads_sleep_between_calls_when_others_want_the_cores() -> None:
    """Processor time of calls with pauses, by two threads and by one: who spins through the pauses takes much more."""
    found = alone(
        CALLS
        + """
def spent(call, threads):
    torch.set_num_threads(threads)
    call()
    before = time.process_time()
    for _ in range(30):
        call()
        time.sleep(0.01)
    return time.process_time() - before
print(json.dumps([spent(call, 2) - spent(call, 1) for call in (ours, torchs)]))
"""
    )
    assert max(found) < 0.1, found  # spinning takes at least 0.2 s


@linux
def test_members_of_a_team_sleep_while_they_wait() -> None:
    """Two of them on one core: as often as they meet, one must leave the core to the other, of its own will."""
    found = alone(
        CALLS
        + """
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
q, g = torch.randn(1, 4096, 1, 32), -torch.rand(1, 4096, 1, 32)
def switches(threads):
    torch.set_num_threads(threads)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    for _ in range(10):
        gated_slot_attention(q, q, q, g, backend="native")
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before
print(json.dumps([switches(1), switches(2)]))
"""
    )
    assert found[1] > found[0] + 100, found


@linux
def test_calls_at_once_share_their_helpers() -> None:
    """Eight threads of Python that call with three threads each have two helpers between them, not sixteen."""
    found = alone(
        CALLS
        + """
def work():
    torch.set_num_threads(3)
    for _ in range(50):
        ours()
callers = [threading.Thread(target=work) for _ in range(8)]
for caller in callers: caller.start()
for caller in callers: caller.join()
names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
print(json.dumps(names.count("gsa helper")))
"""
    )
    assert found == 2


@linux
def test_busy_processes_are_noticed() -> None:
    calls = CALLS.replace("library.assume_crowd(True)", "torch.set_num_threads(2)")
    code = (
        calls
        + """
from gsa.bench.busy import busy_processes
def notices(wanted):
    end = time.monotonic() + 30
    while library.crowded() != wanted and time.monotonic() < end:
        ours()
    return library.crowded() == wanted
with busy_processes(2 * os.cpu_count()):
    print(json.dumps(notices(True)))
"""
    )
    assert alone(code) is True


def test_a_crowd_is_believed_at_once_and_doubted_now_and_then() -> None:
    """Threads of one process wait for each other, too: calm must be tried to see whether the others are gone."""
    seen = library.believed([0.0] * 20 + [0.5] * 2000)
    assert not any(seen[:20])
    assert seen[20]
    assert sum(seen[20:]) > 0.97 * 2000  # a window in four seconds is tried
    assert not all(seen[-100:])
    gone = library.believed([0.5] * 5 + [0.1] * 200)
    assert gone[5]
    assert not any(gone[40:])
    rested = library.believed([0.5] * 5 + [0.0] * 200)
    assert not any(rested[20:])


def test_busy_processes_end() -> None:
    with busy_processes(2) as started:
        assert all(process.poll() is None for process in started)
    assert all(process.poll() is not None for process in started)
