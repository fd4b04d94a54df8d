"""`gsa bench train`: training steps of small language models, every mixer beside softmax attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gsa.bench.arguments import listed, listed_numbers, prepare
from gsa.errors import GSAError
from gsa.table import Column, Table, show
from gsa.terminal import quoted

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
    "hybrid": {"num_attention_heads": 8},
}
SIZES = {"hidden_size": 512, "num_hidden_layers": 8, "vocab_size": 8192}
SHAPES = ("small", "smollm2")


@dataclass(frozen=True)
class Row:
    """What was measured of one model at one length."""

    mixer: str
    T: int
    precision: str
    parameters: int
    seconds: float
    """Of a step: forward, backward, AdamW."""
    tokens_per_second: float
    speedup: float
    """Attention's time over this one's, in the same precision."""
    product_share: float
    """FLOP/s of the step over those of products alone, in the same run and precision."""
    peak_bytes: int | None
    """The most memory that a process holds for model, optimiser and step."""


def train(
    lengths: str = "2048,8192",
    mixers: str = "all",
    shape: str = "small",
    precision: str = "auto",
    threads: int | None = None,
    rounds: int = 3,
    json: bool = False,
    markdown: bool = False,
) -> None:
    """Training steps of a language model with each mixer, beside one with softmax attention.

    8 layers of width 512 (16 without MLPs for Mamba), a vocabulary of 8192, one sequence, AdamW. All models take turns,
    and times are the best of several; peak memory is that of a process that does one step alone. The products that a
    step is compared with are those of a layer's MLP, T x 512 by 512 x 1408, forward and backward; FLOPs are counted as
    in training. The shape of SmolLM2-135M, all heads and slots as `gsa bench prefill` has them, is another choice.

    Args:
        lengths: Lengths of the sequence, with commas between.
        mixers: Mixers to measure, with commas between, or `all`. Attention is always among them.
        shape: Of the models, small or smollm2.
        precision: Of the passes, fp32, bf16, or auto: bf16 where the CPU has units for it. Several with commas between
            are measured beside each other.
        threads: Threads of torch; its own choice by default.
        rounds: How often each takes its turn, at least.
        json: Print JSON instead of a table.
        markdown: Print the table as Markdown.
    """
    from gsa.train.heap import keep_large_blocks

    chosen = list(dict.fromkeys(["attention", *listed("mixers", mixers, MODELS, {"all": MODELS})]))
    numbers = listed_numbers("lengths", lengths, least=2)
    precisions = _precisions(precision)
    if shape not in SHAPES:
        raise GSAError(f"bench: shape must be one of {', '.join(SHAPES)}, got {quoted(shape)}")
    prepare("bench", json=json, markdown=markdown, threads=threads, rounds=rounds)
    keep_large_blocks()  # as `gsa train` does
    report = measure(numbers, chosen, precisions, rounds, progress=not json, shape=shape)
    show(report, [speed_table(report)], json=json, markdown=markdown)


def _precisions(text: str) -> list[str]:
    """The precisions to measure, in the order they were named."""
    import torch

    from gsa.train.precision import AUTO, UNITS, automatic, bf16_unit

    device = torch.device("cpu")
    found = listed("precision", text, ("fp32", "bf16"), {AUTO: [automatic(device)]})
    if "bf16" in found and bf16_unit(device) is None:
        raise GSAError(f"bench: this CPU has no unit for bf16 ({', '.join(UNITS)}), a step would take minutes")
    return found


def measure(
    lengths: list[int], mixers: list[str], precisions: list[str], rounds: int, progress: bool, shape: str = "small"
) -> dict[str, Any]:
    """All numbers of the benchmark."""
    import torch
    from rich.console import Console

    from gsa.bench.memory import measurable, measured_alone
    from gsa.bench.timing import race
    from gsa.train.peak import flops_per_token, product_rate
    from gsa.train.strategies import PRECISIONS

    threads, rows = torch.get_num_threads(), []
    rates: list[dict[str, Any]] = []
    wide, mlp = _config("gsa", shape).hidden_size, _config("gsa", shape).mlp_width
    with Console(stderr=True, quiet=not progress).status("measuring") as status:
        for T in lengths:
            status.update(f"training steps, T = {T}")
            models = {name: _model(name, shape) for name in mixers}
            steps = {
                f"{name} {precision}": stepper(model, T, precision)
                for name, model in models.items()
                for precision in precisions
            }
            products = {precision: product_rate(T, wide, mlp, PRECISIONS[precision]) for precision in precisions}
            best = race({**steps, **products}, 0.0, rounds)
            sizes = {name: model.num_parameters for name, model in models.items()}
            del models, steps
            for precision, rate in products.items():
                rates.append({"T": T, "precision": precision, "flops": rate()})
                for name in mixers:
                    status.update(f"peak memory, {name}, T = {T}")
                    setting = {"mixer": name, "shape": shape, "T": T, "precision": precision, "threads": threads}
                    peak = measured_alone("gsa.bench.train:memory_of_step", setting)["peak"] if measurable() else None
                    seconds = best[f"{name} {precision}"]
                    rows.append(
                        Row(
                            name,
                            T,
                            precision,
                            sizes[name],
                            seconds,
                            T / seconds,
                            best[f"attention {precision}"] / seconds,
                            flops_per_token(_config(name, shape), T) * T / seconds / rates[-1]["flops"],
                            peak,
                        )
                    )
    return {
        "threads": threads,
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "shape": shape,
        "product": [wide, mlp],
        "products": rates,
        "rows": [asdict(row) for row in rows],
    }


def _config(name: str, shape: str = "small") -> ModelConfig:
    from gsa.bench.decode_mixers import shape_of
    from gsa.models import ModelConfig

    if shape == "smollm2":
        return shape_of(name, quick=False)
    return ModelConfig(mixer=name, **{**SIZES, **MODELS[name]})


def _model(name: str, shape: str = "small") -> LM:
    import torch

    from gsa.models import LM

    torch.manual_seed(0)
    return LM(_config(name, shape))


def stepper(model: LM, T: int, precision: str = "fp32", rows: int = 1) -> Callable[[], float]:
    """A training step on sequences of T random tokens, where the model is; it returns the loss."""
    import torch

    from gsa.train.strategies.base import LossOf

    loss_of = LossOf(model, precision)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(model.config.vocab_size, (rows, T), generator=torch.Generator().manual_seed(0))
    ids = ids.to(model.lm_head.weight.device)

    def step() -> float:
        loss = loss_of(ids, ids, None)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        return loss.item()

    return step


def memory_of_step(setting: dict[str, Any]) -> dict[str, int]:
    """Peak bytes of model, optimiser and one step. Runs in a process of its own."""
    from gsa.bench.memory import peak_of

    def step() -> None:
        stepper(_model(setting["mixer"], setting["shape"]), setting["T"], setting["precision"])()

    return peak_of(step, setting["threads"])


def speed_table(report: dict[str, Any]) -> Table:
    """The steps as a table."""
    columns = [
        Column("mixer", "mixer", left=True),
        Column("T", "T"),
        Column("precision", "precision", left=True),
        Column("parameters", lambda row: row["parameters"] / 1e6, "{:.1f}M"),
        Column("s/step", "seconds", "{:.2f}"),
        Column("tokens/s", "tokens_per_second", "{:.0f}"),
        Column("speed-up", "speedup", "{:.2f}x"),
        Column("of products", lambda row: 100 * row["product_share"], "{:.0f}%"),
        Column("peak", lambda row: None if row["peak_bytes"] is None else row["peak_bytes"] / 2**20, "{:.0f} MB"),
    ]
    rates = ", ".join(
        f"{rate['flops'] / 1e9:.0f} GFLOP/s ({rate['precision']}, T = {rate['T']})" for rate in report["products"]
    )
    wide, mlp = report["product"]
    notes = [
        "a step is forward, backward and AdamW; speed-up: attention's time over this one's",
        f"of products: the step's FLOP/s over those of T x {wide} by {wide} x {mlp}, forward and backward: {rates}",
        "peak: memory of model, optimiser and step, in a process of its own",
        f"{report['threads']} threads, {report['cpu']}, torch {report['torch']}",
    ]
    title = "Training steps, one sequence"
    title += ", the shape of SmolLM2-135M" if report["shape"] == "smollm2" else ""
    return Table(title, columns, report["rows"], notes)
