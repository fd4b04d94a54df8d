"""`gsa bench linear`: matrix-vector products over the weights of a small language model, one token at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gsa.bench.arguments import prepare, require_native
from gsa.table import Column, Table, show

if TYPE_CHECKING:
    from torch import Tensor

    from gsa.ops.linear import PackedWeight


@dataclass(frozen=True)
class Model:
    """Sizes of a transformer of 135M parameters."""

    layers: int = 30
    width: int = 576
    kv: int = 192
    """Of keys and of values: 3 heads of 64; queries have 9."""
    mlp: int = 1536
    vocabulary: int = 49152

    def weights(self) -> list[dict[str, Tensor]]:
        """Random weights: of each layer by name, and last the head."""
        import torch

        random = torch.Generator().manual_seed(0)
        shapes = {
            "q": (self.width, self.width),
            "k": (self.kv, self.width),
            "v": (self.kv, self.width),
            "o": (self.width, self.width),
            "gate": (self.mlp, self.width),
            "up": (self.mlp, self.width),
            "down": (self.width, self.mlp),
        }
        layers = [shapes] * self.layers + [{"head": (self.vocabulary, self.width)}]
        return [
            {name: torch.randn(N, K, generator=random) / K**0.5 for name, (N, K) in layer.items()} for layer in layers
        ]


@dataclass(frozen=True)
class Row:
    """What was measured of one way to multiply by all the weights once."""

    name: str
    ms: float
    tokens_per_second: float
    gbytes_per_second: float
    """Of the bytes of the weights, as stored."""
    read_gbytes_per_second: float
    """Of reading the same bytes and nothing else, in the same run."""
    error: float
    """Of W x, relative, against fp64 on the unrounded weights."""


WAYS = {  # name: format, activations
    "fp32": ("fp32", "fp32"),
    "bf16": ("bf16", "fp32"),
    "int8": ("int8", "fp32"),
    "int8 x int8": ("int8", "int8"),
    "int4": ("int4", "fp32"),
    "int4 x int8": ("int4", "int8"),
}
RATIOS = (  # faster, slower
    ("fp32", "torch fp32"),
    ("bf16", "torch bf16"),
    ("int8", "bf16"),
    ("int8 x int8", "bf16"),
    ("int4", "int8"),
    ("int4 x int8", "int8 x int8"),
    ("step, fused", "step, stacked"),
    ("step, fused", "step"),
)
STEP = ("int8", "int8")  # the format in which whole steps are timed


def linear(threads: int | None = None, seconds: float = 30.0, json: bool = False, markdown: bool = False) -> None:
    """Matrix-vector products over the weights of a 135M model, beside torch's and beside the memory's rate.

    A token is a product with every matrix: 30 layers of width 576 (MLP 1536, 9 query and 3 key/value heads of 64) and a
    head of 49152 words. All ways take turns; times are the best of several.

    Args:
        threads: Threads of torch; its own choice by default.
        seconds: How long to measure.
        json: Print JSON instead of a table.
        markdown: Print the table as Markdown.
    """
    prepare("bench", json=json, markdown=markdown, threads=threads)
    report = measure(Model(), seconds)
    show(report, [speed_table(report)], json=json, markdown=markdown)


def measure(model: Model, seconds: float, rounds: int = 4) -> dict[str, Any]:
    """All numbers of the benchmark."""
    import torch

    from gsa.bench.timing import race
    from gsa.ops.native import library
    from gsa.ops.native.linear import Reader

    require_native()
    layers = model.weights()
    with torch.no_grad():
        packed = {format: _packed(layers, format) for format, _ in WAYS.values()}
        readers = {
            format: Reader(
                [x for weight in weights for x in (weight.weight, weight.scale, weight.zero) if x is not None]
            )
            for format, weights in packed.items()
        }
        contenders: dict[str, Callable[[], object]] = {f"read {format}": read for format, read in readers.items()}
        for format in ("fp32", "bf16"):
            contenders[f"torch {format}"] = _torch_token([weight.weight for weight in packed[format]])
        for name, (format, activations) in WAYS.items():
            contenders[name] = _token(packed[format], activations)
        contenders |= _steps(layers)
        best = race(contenders, seconds, rounds)
        errors = _errors(layers[0]["gate"])
    formats = {"torch fp32": "fp32", "torch bf16": "bf16"} | {name: format for name, (format, _) in WAYS.items()}
    rows = [
        Row(
            name,
            ms=1e3 * best[name],
            tokens_per_second=1 / best[name],
            gbytes_per_second=readers[format].nbytes / best[name] / 1e9,
            read_gbytes_per_second=readers[format].nbytes / best[f"read {format}"] / 1e9,
            error=errors[name],
        )
        for name, format in formats.items()
    ]
    return {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "isa": library.isa(),
        "rows": [asdict(row) for row in rows],
        "steps": {name: 1e3 * time for name, time in best.items() if name.startswith("step")},
        "ratios": {f"{fast} / {slow}": best[slow] / best[fast] for fast, slow in RATIOS},
    }


def _packed(layers: list[dict[str, Tensor]], format: str) -> list[PackedWeight]:
    from gsa.ops.linear import pack

    return [pack(weight, format) for layer in layers for weight in layer.values()]


def _errors(weight: Tensor) -> dict[str, float]:
    """The relative error of each way to multiply by this weight, over 16 normal vectors."""
    import torch

    from gsa.ops.linear import matvec, pack

    x = torch.randn(16, weight.shape[1], generator=torch.Generator().manual_seed(1))
    exact = x.double() @ weight.double().T
    products = {
        "torch fp32": torch.nn.functional.linear(x, weight),
        "torch bf16": torch.nn.functional.linear(x.bfloat16(), weight.bfloat16()),
    }
    for name, (format, activations) in WAYS.items():
        products[name] = matvec(pack(weight, format), x, activations=activations, backend="native")
    return {name: float((y.double() - exact).norm() / exact.norm()) for name, y in products.items()}


def _torch_token(weights: list[Tensor]) -> Callable[[], None]:
    import torch

    pairs = [(weight, torch.randn(1, weight.shape[1]).to(weight.dtype)) for weight in weights]

    def token() -> None:
        for weight, x in pairs:
            torch.nn.functional.linear(x, weight)

    return token


def _token(weights: list[PackedWeight], activations: str) -> Callable[[], None]:
    import torch

    from gsa.ops.linear import matvec

    pairs = [(weight, torch.randn(1, weight.K)) for weight in weights]

    def token() -> None:
        for weight, x in pairs:
            matvec(weight, x, activations=activations, backend="native")

    return token


def _steps(layers: list[dict[str, Tensor]]) -> dict[str, Callable[[], Tensor]]:
    """A token through all layers but for the attention itself, with norms, SwiGLU and residuals, in three ways.

    One by one; with q, k, v and gate, up as one matrix each; and also with all but the products done within them.
    """
    import torch
    from torch.nn import functional as F

    from gsa.ops.linear import matvec, pack

    format, activations = STEP
    *blocks, last = [{name: pack(w, format) for name, w in layer.items()} for layer in layers]
    stacked = [
        {
            "qkv": pack(torch.cat([layer[name] for name in "qkv"]), format),
            "o": block["o"],
            "gate_up": pack(torch.cat([layer["gate"], layer["up"]]), format),
            "down": block["down"],
        }
        for layer, block in zip(layers, blocks, strict=False)
    ]
    width = last["head"].K
    start, norm, epsilon = torch.randn(1, width), torch.ones(width), 1e-5

    def product(weight: PackedWeight, x: Tensor, **pieces: Any) -> Tensor:
        return matvec(weight, x, activations=activations, backend="native", **pieces)

    def normed(x: Tensor) -> Tensor:
        return F.rms_norm(x, (width,), norm, epsilon)

    def one_by_one() -> Tensor:
        x = start
        for block in blocks:
            y = normed(x)
            q, _, _ = (product(block[name], y) for name in "qkv")
            x = x + product(block["o"], q)
            y = normed(x)
            x = x + product(block["down"], F.silu(product(block["gate"], y)) * product(block["up"], y))
        return product(last["head"], normed(x))

    def one_matrix_for_many() -> Tensor:
        x = start
        for block in stacked:
            x = x + product(block["o"], product(block["qkv"], normed(x))[:, :width])
            gate, up = product(block["gate_up"], normed(x)).chunk(2, -1)
            x = x + product(block["down"], F.silu(gate) * up)
        return product(last["head"], normed(x))

    def fused() -> Tensor:
        x = start
        for block in stacked:
            x = product(block["o"], product(block["qkv"], x, norm=(norm, epsilon))[:, :width], residual=x)
            x = product(block["down"], product(block["gate_up"], x, norm=(norm, epsilon)), swiglu=True, residual=x)
        return product(last["head"], x, norm=(norm, epsilon))

    return {"step": one_by_one, "step, stacked": one_matrix_for_many, "step, fused": fused}


def speed_table(report: dict[str, Any]) -> Table:
    """The rates as a table."""
    columns = [
        Column("weights x activations", "name", left=True),
        Column("ms", "ms", "{:.2f}"),
        Column("tokens/s", "tokens_per_second", "{:.1f}"),
        Column("GB/s", "gbytes_per_second", "{:.1f}"),
        Column("read", "read_gbytes_per_second", "{:.1f}"),
        Column("share", lambda row: row["gbytes_per_second"] / row["read_gbytes_per_second"], "{:.0%}"),
        Column("error", lambda row: 100 * row["error"], "{:.2g}%"),
    ]
    steps = ", ".join(f"{name.removeprefix('step, ')} {ms:.2f} ms" for name, ms in report["steps"].items())
    notes = [
        *(f"{name}: {ratio:.2f}x" for name, ratio in report["ratios"].items()),
        f"a {' x '.join(STEP)} token with norms, SwiGLU and residuals: {steps}",
        "read: GB/s of reading the same bytes and nothing else; error: of W x, relative, normal weights",
        f"{report['threads']} threads, {report['isa']}, torch {report['torch']}",
    ]
    return Table("A token through the weights of a 135M model", columns, report["rows"], notes)
