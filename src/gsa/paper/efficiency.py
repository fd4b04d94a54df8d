"""`gsa paper efficiency`: the paper's figure of training throughput, memory in training and latency of decoding."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from gsa.bench.arguments import listed, listed_numbers
from gsa.console import tell
from gsa.devices import check_device, find_device
from gsa.errors import GSAError
from gsa.paper.cells import Cell, kept
from gsa.paper.efficiency_report import PAPER, efficiency_picture, efficiency_tables
from gsa.paper.record import folder_of, machine, save_record
from gsa.table import show
from gsa.threads import use_threads

if TYPE_CHECKING:
    import torch

    from gsa.models import LM

SYSTEMS = ("xfmr", "mamba", "retnet", "gla", "hgrn2", "gsa")
NO_RECOMPUTATION = "gsa, no recomputation"
"""GSA that keeps what its pass backward needs."""
PIECE = 128
"""Tokens that a model decodes before the next one takes its turn, so that all meet the same machine."""


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    size: str
    """Of the presets."""
    lengths: tuple[int, ...]
    """Of sequences in training; each step has as many tokens as the longest."""
    prompt: int
    decoded: tuple[int, ...]
    rounds: int


NORMAL = Sizes("small", (2048, 4096, 8192, 16384), 2048, (2048, 4096, 8192, 16384), 2)
QUICK = Sizes("tiny", (256, 512), 256, (128, 256), 1)


def efficiency(
    *,
    out: str = "paper/efficiency",
    systems: str = "all",
    size: str | None = None,
    lengths: str | None = None,
    decoded: str | None = None,
    device: str = "auto",
    threads: int | None = None,
    quick: bool = False,
    json: bool = False,
    markdown: bool = False,
) -> None:
    """Measures training throughput, memory in training and latency of decoding of the paper's systems.

    Training: a step (forward, backward, AdamW) on as many tokens as the longest sequence has, cut into shorter ones or
    not. Memory: the most that a process holds for model, optimiser and such a step. Decoding: one sequence behind a
    prompt, with the step of every system compiled on a CPU. All systems take turns. The machine should have nothing
    else to do; it takes about half an hour on two cores. After Ctrl-C the same command goes on with what is missing.

    Args:
        out: Folder for results: efficiency.json, a picture as SVG and PNG, and a file for every part.
        systems: Systems with commas between, or all: xfmr, mamba, retnet, gla, hgrn2, gsa.
        size: Of the presets: small (30M parameters) by default; the paper's is 1.3b, for a GPU.
        lengths: Lengths of sequences in training, with commas between.
        decoded: Tokens to decode behind the prompt, with commas between.
        device: Where it is measured: cpu, cuda, or auto, a GPU if torch can use one.
        threads: Threads of torch; its own choice by default.
        quick: Tiny models and short sequences: a look in less than three minutes.
        json: Print JSON instead of tables.
        markdown: Print the tables as Markdown.
    """
    import torch

    from gsa.models.catalogue import SIZES

    if json and markdown:
        raise GSAError("paper: json and markdown exclude each other")
    sizes = QUICK if quick else NORMAL
    chosen = listed("systems", systems, SYSTEMS, {"all": SYSTEMS}, "paper")
    if size is not None and size not in SIZES:
        raise GSAError(f"paper: size must be one of {', '.join(SIZES)}, got {size!r}")
    sizes = Sizes(
        size or sizes.size,
        sizes.lengths if lengths is None else tuple(sorted(listed_numbers("lengths", lengths, 2, "paper"))),
        sizes.prompt,
        sizes.decoded if decoded is None else tuple(sorted(listed_numbers("decoded", decoded, 1, "paper"))),
        sizes.rounds,
    )
    if any(sizes.lengths[-1] % length for length in sizes.lengths):
        raise GSAError(f"paper: lengths must divide the longest, {sizes.lengths[-1]}, got {lengths}")
    check_device(device, "paper")
    where = find_device(device, "paper")
    use_threads(threads)
    folder = folder_of(out)
    settings = {
        "systems": chosen,
        "size": sizes.size,
        "lengths": list(sizes.lengths),
        "prompt": sizes.prompt,
        "decoded": list(sizes.decoded),
        "device": where.type if where.type == "cpu" else torch.cuda.get_device_name(where),
        "threads": torch.get_num_threads(),
    }

    def rows(name: str, measure: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """What is measured in one go, so that it is of one machine in one state; or what an earlier call measured."""
        cell = Cell(name, {"part": name, **settings, "machine": machine()})
        result: list[dict[str, Any]] = kept(cell, lambda _: {"rows": measure()}, folder / "cells")["rows"]
        return result

    trained = [
        rows(f"training steps of {length} tokens", partial(training, chosen, sizes, length, where))
        for length in sizes.lengths
    ]
    held = [rows(f"memory of {name}", partial(memory, name, sizes, where)) for name in _variants(chosen)]
    found = {
        "training": [row for part in trained for row in part],
        "memory": [row for part in held for row in part],
        "decoding": rows("decoding", partial(decoding, chosen, sizes, where)),
    }
    record = save_record(folder / "efficiency.json", "efficiency", settings, **found, paper=PAPER)
    efficiency_picture(record, folder / "efficiency")
    show(record, efficiency_tables(record), json=json, markdown=markdown)
    tell(f"{folder}: efficiency.json, efficiency.svg, efficiency.png")


def _variants(systems: list[str]) -> list[str]:
    return [*systems, *([NO_RECOMPUTATION] if "gsa" in systems else [])]


def _model(system: str, size: str, device: torch.device) -> LM:
    """A fresh model, the same weights every time."""
    import torch

    from gsa.mixers.gsa import GatedSlotAttention
    from gsa.models import LM, preset

    torch.manual_seed(0)
    lm = LM(preset(f"{'gsa' if system == NO_RECOMPUTATION else system}-{size}")).to(device)
    for block in lm.model.layers:
        if isinstance(block.mixer, GatedSlotAttention):
            block.mixer.recompute = system != NO_RECOMPUTATION
    return lm


def _precision(device: torch.device) -> str:
    from gsa.train.precision import automatic

    return automatic(device)


def training(systems: list[str], sizes: Sizes, length: int, device: torch.device) -> list[dict[str, Any]]:
    """Tokens a second of every system at one length."""
    from gsa.bench.timing import gpu_clock, race, wall_clock
    from gsa.bench.train import stepper

    tokens = sizes.lengths[-1]
    tell(f"training steps of {length} x {tokens // length} tokens")
    models = {name: _model(name, sizes.size, device) for name in _variants(systems)}
    steps: dict[str, Callable[[], object]] = {
        name: stepper(model, length, _precision(device), rows=tokens // length) for name, model in models.items()
    }
    best = race(steps, 0.0, sizes.rounds, gpu_clock if device.type == "cuda" else wall_clock)
    return [
        {
            "system": name,
            "length": length,
            "batch_size": tokens // length,
            "parameters": model.num_parameters,
            "state": model.state_size,
            "precision": _precision(device),
            "tokens_per_second": tokens / best[name],
        }
        for name, model in models.items()
    ]


def memory(name: str, sizes: Sizes, device: torch.device) -> list[dict[str, Any]]:
    """Peak bytes of a system's step on one sequence of all its tokens."""
    import torch

    from gsa.bench.memory import gpu_peak, measurable, measured_alone

    tell(f"memory of {name}")
    length, peak = sizes.lengths[-1], None
    if device.type == "cuda":
        peak = gpu_peak(partial(_step, name, sizes.size, length, device))
    elif measurable():
        setting = {"system": name, "size": sizes.size, "length": length, "threads": torch.get_num_threads()}
        peak = measured_alone("gsa.paper.efficiency:memory_of_step", setting)["peak"]
    return [{"system": name, "length": length, "peak_bytes": peak}]


def memory_of_step(setting: dict[str, Any]) -> dict[str, int]:
    """Peak bytes of model, optimiser and one step on a CPU. Runs in a process of its own."""
    import torch

    from gsa.bench.memory import peak_of

    step = partial(_step, setting["system"], setting["size"], setting["length"], torch.device("cpu"))
    return peak_of(step, setting["threads"])


def _step(system: str, size: str, length: int, device: torch.device) -> None:
    """Model, optimiser and one step."""
    from gsa.bench.train import stepper

    stepper(_model(system, size, device), length, _precision(device))()


def decoding(systems: list[str], sizes: Sizes, device: torch.device) -> list[dict[str, Any]]:
    """Seconds until so many tokens behind the prompt are decoded, one sequence, greedily."""
    import torch

    from gsa.infer import Model
    from gsa.infer.runner import MAX_READ, Runner
    from gsa.infer.runners import make_runner

    weights = "bf16"
    runners: dict[str, Runner] = {}
    read: dict[str, float] = {}
    for name in systems:
        tell(f"a prompt of {sizes.prompt} tokens, {name}")
        model = Model.load(_model(name, sizes.size, device), weights)
        runner, state = make_runner(model, 1), None
        prompt = torch.randint(model.vocab_size, (sizes.prompt,), generator=torch.Generator().manual_seed(0))
        began = time.perf_counter()
        for piece in prompt.split(MAX_READ):
            _, state = runner.read(piece, state)
        read[name] = time.perf_counter() - began
        assert state is not None
        runner.put(0, state)
        runners[name] = runner
    spent = dict.fromkeys(systems, 0.0)
    rows: list[dict[str, Any]] = []
    done, last = 0, dict.fromkeys(systems, 1)
    while done < sizes.decoded[-1]:
        count = min([PIECE, *(mark - done for mark in sizes.decoded if mark > done)])
        for name, runner in runners.items():
            began = time.perf_counter()
            for _ in range(count):
                last[name] = int(runner.step([last[name]], [0])[0].argmax())
            spent[name] += time.perf_counter() - began
        done += count
        if done in sizes.decoded:
            tell(f"decoded {done} tokens")
            rows += [
                {
                    "system": name,
                    "decoded": done,
                    "seconds": spent[name],
                    "prompt_seconds": read[name],
                    "weights": weights,
                    "state_bytes": runner.model.state_bytes,
                    "runner": type(runner).__name__,
                }
                for name, runner in runners.items()
            ]
    return rows
