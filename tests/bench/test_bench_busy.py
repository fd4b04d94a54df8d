"""The benchmark of a busy machine compares the settings it names, and leaves nothing running."""

import json
import subprocess
import sys
import time

import pytest
import torch

from gsa.bench import busy
from gsa.cli import main
from gsa.errors import GSAError
from gsa.ops.native import library

from ..tables import printed

pytestmark = pytest.mark.skipif(library.unavailable(None) is not None, reason="the native engine cannot run here")


@pytest.fixture(autouse=True)
def _without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy, "TURN", 0.0001)
    torch.set_num_threads(2)


def test_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole command, with work that is quickly done."""
    works = {"token": lambda: None, "operator": lambda: None}
    monkeypatch.setattr(busy, "workloads", lambda quick: works)
    main(["bench", "busy", "--quick", "--json", "--processes", "1"])
    report = json.loads(capsys.readouterr().out)
    assert report["threads"] == 2
    assert [(row["work"], row["busy"]) for row in report["rows"]] == [(name, n) for n in (0, 1) for name in works]
    for row in report["rows"]:
        assert row["share"] == pytest.approx(row["rates"]["default"] / max(row["rates"]["one"], row["rates"]["all"]))
    shown = printed(busy.busy_table(report))
    assert "2 threads" in shown
    assert f"{report['rows'][-1]['share']:.2f}x" in shown


def test_settings_are_what_they_are_called() -> None:
    seen = {}
    weight = torch.nn.Linear(64, 64).weight.detach()
    from gsa.ops.linear import matvec, pack

    small, x = pack(weight, "fp32"), torch.randn(64)
    library.assume_crowd(True)
    try:
        for setting in busy.SETTINGS:
            with busy.threads_of(setting):
                matvec(small, x, backend="native")
                seen[setting] = (torch.get_num_threads(), library.threads_asked())
    finally:
        library.assume_crowd(None)
    assert seen == {"default": (2, 1), "one": (1, 1), "all": (2, 2)}
    assert torch.get_num_threads() == 2


def test_works_run() -> None:
    works = busy.workloads(quick=True)
    assert list(works) == [
        "token, gsa-tiny",
        "token, 39M",
        "operator, forward",
        "operator, both passes",
        "training step",
    ]
    for run in works.values():
        run()


def test_busy_processes_end_with_whoever_started_them() -> None:
    """Even with one that had no time to clean up."""
    code = (
        "import os\n"
        "from gsa.bench.busy import busy_processes\n"
        "with busy_processes(1) as started: print(started[0].pid, flush=True); os._exit(1)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    pid = int(run.stdout)
    end = time.monotonic() + 30
    while _lives(pid):
        assert time.monotonic() < end
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return state.strip() != "" and not state.startswith("Z")


def test_mistakes() -> None:
    with pytest.raises(GSAError, match="processes must be at least 1, got 0"):
        busy.busy(processes=0)
