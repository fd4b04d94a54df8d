"""`gsa bench train`: training steps of small language models, every mixer beside softmax attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gsa.bench.arguments import prepare
from gsa.errors import GSAError
from gsa.table import Column, Table, show

if TYPE_CHECKING:
    from gsa.models import LM, ModelConfig

# Of 8 layers of width 512, with their heads; two of Mamba's layers stand for one of the others.
MODELS: dict[str, dict[str, Any]] = {
    "attention": {"num_attention_heads": 8},
    "gsa": {"num_attention_heads": 4, "num_slots": 64},
    "abc": {"num_attention_heads": 4, "num_slots": 64},
    "gla": {"num_attention_heads": 4},
    "hgrn2": {"num_attention_heads": 4},
    "retnet": {"num_attention_heads": 4, "intermediate_size": 768},
    "supra": {"num_attention_heads": 4},
    "linear": {"num_attention_heads": 4},
    "mamba": {"num_hidden_layers": 16},
}
SIZES = {"hidden_size": 512, "num_hidden_layers": 8, "vocab_size": 8192}


@dataclass(frozen=True)
class Row:
    """What was measured of one model at one length."""

    mixer: str
    T: int
    parameters: int
    seconds: float
    """Of a step: forward, backward, AdamW."""
    tokens_per_second: float
    speedup: float
    """Attention's time over this one's."""
    peak_bytes: int | None
    """The most memory that a process holds for model, optimiser and step."""


def train(
    lengths: str = "2048,8192",
    mixers: str | None = None,
    threads: int | None = None,
    rounds: int = 3,
    json: bool = False,
    markdown: bool = False,
) -> None:
    """Training steps of a language model with each mixer, beside one with softmax attention.

    8 layers of width 512 (16 without MLPs for Mamba), a vocabulary of 8192, one sequence, fp32, AdamW. All models take
    turns, and times are the best of several; peak memory is that of a process that does one step alone.

    Args:
        lengths: Lengths of the sequence, with commas between.
        mixers: Mixers to measure, with commas between; all by default. Attention is always among them.
        threads: Threads of torch; its own choice by default.
        rounds: How often each takes its turn, at least.
        json: Print JSON instead of a table.
        markdown: Print the table as Markdown.
    """
    chosen = list(MODELS) if mixers is None else list(dict.fromkeys(["attention", *mixers.split(",")]))
    for name in chosen:
        if name not in MODELS:
            raise GSAError(f"bench: unknown mixer {name!r}; expected some of {', '.join(MODELS)}")
    numbers = [int(text) if text.strip().isdecimal() else 0 for text in lengths.split(",")]
    if min(numbers) < 2:
        raise GSAError(f"bench: lengths must be whole numbers from 2, with commas between, got {lengths!r}")
    prepare("bench", json=json, markdown=markdown, threads=threads, rounds=rounds)
    report = measure(numbers, chosen, rounds, progress=not json)
    show(report, [speed_table(report)], json=json, markdown=markdown)


def measure(lengths: list[int], mixers: list[str], rounds: int, progress: bool) -> dict[str, Any]:
    """All numbers of the benchmark."""
    import torch
    from rich.console import Console

    from gsa.bench.memory import measurable, measured_alone
    from gsa.bench.timing import race

    threads, rows = torch.get_num_threads(), []
    with Console(stderr=True, quiet=not progress).status("measuring") as status:
        for T in lengths:
            status.update(f"training steps, T = {T}")
            models = {name: _model(name) for name in mixers}
            best = race({name: stepper(model, T) for name, model in models.items()}, 0.0, rounds)
            sizes = {name: model.num_parameters for name, model in models.items()}
            del models
            for name in mixers:
                status.update(f"peak memory, {name}, T = {T}")
                setting = {"mixer": name, "T": T, "threads": threads}
                peak = measured_alone("gsa.bench.train:memory_of_step", setting)["peak"] if measurable() else None
                rows.append(Row(name, T, sizes[name], best[name], T / best[name], best["attention"] / best[name], peak))
    return {
        "threads": threads,
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "rows": [asdict(row) for row in rows],
    }


def _config(name: str) -> ModelConfig:
    from gsa.models import ModelConfig

    return ModelConfig(mixer=name, **{**SIZES, **MODELS[name]})


def _model(name: str) -> LM:
    import torch

    from gsa.models import LM

    torch.manual_seed(0)
    return LM(_config(name))


def stepper(model: LM, T: int) -> Callable[[], float]:
    """A training step on a sequence of T random tokens, which returns the loss."""
    import torch

    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(model.config.vocab_size, (1, T), generator=torch.Generator().manual_seed(0))

    def step() -> float:
        loss = model(ids, labels=ids).loss
        assert loss is not None
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        return loss.item()

    return step


def memory_of_step(setting: dict[str, Any]) -> dict[str, int]:
    """Peak bytes of model, optimiser and one step. Runs in a process of its own."""
    import torch

    from gsa.bench.memory import forget_peak, peak, resident

    torch.set_num_threads(setting["threads"])
    torch.randn(64, 64) @ torch.randn(64, 64)  # starts threads, which is not the step's memory
    before = resident()
    forget_peak()
    stepper(_model(setting["mixer"]), setting["T"])()
    return {"peak": peak() - before}


def speed_table(report: dict[str, Any]) -> Table:
    """The steps as a table."""
    columns = [
        Column("mixer", "mixer", left=True),
        Column("T", "T"),
        Column("parameters", lambda row: row["parameters"] / 1e6, "{:.1f}M"),
        Column("s/step", "seconds", "{:.2f}"),
        Column("tokens/s", "tokens_per_second", "{:.0f}"),
        Column("speed-up", "speedup", "{:.2f}x"),
        Column("peak", lambda row: None if row["peak_bytes"] is None else row["peak_bytes"] / 2**20, "{:.0f} MB"),
    ]
    notes = [
        "a step is forward, backward and AdamW; speed-up: attention's time over this one's",
        "peak: memory of model, optimiser and step, in a process of its own",
        f"{report['threads']} threads, {report['cpu']}, torch {report['torch']}",
    ]
    return Table("Training steps, one sequence, fp32", columns, report["rows"], notes)
