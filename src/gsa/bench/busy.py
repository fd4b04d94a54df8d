"""`gsa bench busy`: the choice of threads, on a machine that is idle and on one that is not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gsa.bench.arguments import prepare, require_native
from gsa.table import Column, Table, show

TURN = 0.3  # seconds at least
SETTINGS = ("default", "one", "all")
"""As many threads as the work is worth; one; and all that torch has, whatever the work."""
BUSY = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(1_000_000):
        pass
"""


def busy(
    processes: int | None = None,
    quick: bool = False,
    threads: int | None = None,
    json: bool = False,
    markdown: bool = False,
) -> None:
    """Speed with the threads chosen by default, beside one thread and all of them, while other processes are busy.

    Decoding with gsa-tiny and in the shape of SmolLM2-135M, calls of the operator, and training steps, first on the
    machine as it is, then beside processes that never rest. The three settings take turns, and rates are averages: the
    best of several runs would not show what a busy machine does. Nothing else should run meanwhile. Takes a minute.

    Args:
        processes: How many busy processes; as many as torch has threads by default.
        quick: Short turns, and a model of three layers: half a minute, to see that it works.
        threads: Threads of torch; its own choice by default.
        json: Print JSON instead of a table.
        markdown: Print the table as Markdown.
    """
    import torch
    from rich.console import Console

    prepare("bench", json=json, markdown=markdown, threads=threads, processes=processes)
    require_native()
    number = torch.get_num_threads() if processes is None else processes
    with Console(stderr=True, quiet=json).status("making the models") as status:
        report = measure(number, quick, lambda what: status.update(what))
    show(report, [busy_table(report)], json=json, markdown=markdown)


def measure(processes: int, quick: bool, tick: Callable[[str], None]) -> dict[str, Any]:
    """All numbers of the benchmark."""
    import torch

    from gsa.ops.native import library

    works, rows = workloads(quick), []
    for number in (0, processes):
        with busy_processes(number):
            for name, run in works.items():
                tick(f"{name}, beside {number} busy processes")
                rates, asked = compare(run, 2 if quick else 5)
                best = max(rates["one"], rates["all"])
                row = {"work": name, "busy": number, "asked": asked, "rates": rates, "share": rates["default"] / best}
                rows.append(row)
    return {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "isa": library.isa(),
        "rows": rows,
    }


def workloads(quick: bool) -> dict[str, Callable[[], object]]:
    """What is measured, by name; a call is a token, a pass of the operator or a training step."""
    import torch

    from gsa.bench import decode_model
    from gsa.bench.ops import Entry, slots_and_softmax
    from gsa.bench.train import stepper
    from gsa.infer import Model
    from gsa.infer.runners import make_runner
    from gsa.models import LM, ModelConfig

    lm = decode_model.random_model(decode_model.shape(quick))
    sizes = {
        "gsa-tiny": Model.load("gsa-tiny", "bf16", device="cpu"),
        f"{lm.num_parameters / 1e6:.0f}M": Model.load(lm, "bf16"),
    }
    found = {f"token, {name}": decode_model.token(make_runner(model, 1), [0]) for name, model in sizes.items()}
    length = 512 if quick else 2048
    found["operator, forward"] = slots_and_softmax(Entry(4, 128, length, False), "native")[0]
    found["operator, both passes"] = slots_and_softmax(Entry(4, 128, length, True), "native")[0]
    torch.manual_seed(0)
    config = ModelConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_slots=32, vocab_size=4096, mixer="gsa"
    )
    found["training step"] = stepper(LM(config), length // 4)
    return found


def compare(run: Callable[[], object], rounds: int) -> tuple[dict[str, float], int]:
    """Calls a second with every setting, in turns; and the threads that the native engine wanted by default."""
    calls, seconds = dict.fromkeys(SETTINGS, 0), dict.fromkeys(SETTINGS, 0.0)
    asked = 0
    run()
    for _ in range(rounds):
        for setting in SETTINGS:
            with threads_of(setting):
                begin = time.perf_counter()
                while (spent := time.perf_counter() - begin) < TURN:
                    run()
                    calls[setting] += 1
                seconds[setting] += spent
                if setting == "default":
                    asked = _asked()
    return {setting: calls[setting] / seconds[setting] for setting in SETTINGS}, asked


def _asked() -> int:
    from gsa.ops.native import library

    return library.threads_asked()


@contextmanager
def threads_of(setting: str) -> Iterator[None]:
    """One of SETTINGS, for a while."""
    import torch

    from gsa.ops.native import library

    threads = torch.get_num_threads()
    library.use_every_thread(setting == "all")
    torch.set_num_threads(1 if setting == "one" else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        library.use_every_thread(False)


@contextmanager
def busy_processes(number: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many processes that compute without rest, for a while; they also end when this process does."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        command = [sys.executable, "-S", "-c", BUSY, str(os.getpid())]
        started.extend(subprocess.Popen(command) for _ in range(number))
        if started:
            time.sleep(0.5)  # until they compute
        yield started
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


def busy_table(report: dict[str, Any]) -> Table:
    """Rates and shares as a table."""
    columns = [
        Column("work", "work", left=True),
        Column("busy processes", "busy"),
        Column("one thread", lambda row: row["rates"]["one"], "{:.1f}/s"),
        Column(f"{report['threads']} threads", lambda row: row["rates"]["all"], "{:.1f}/s"),
        Column("default", lambda row: row["rates"]["default"], "{:.1f}/s"),
        Column("share of the better", "share", "{:.2f}x"),
    ]
    notes = [
        "default: as many threads as the work is worth; averages of settings that took turns",
        f"{report['isa']}, torch {report['torch']}",
    ]
    return Table("Threads on a busy machine", columns, report["rows"], notes)
