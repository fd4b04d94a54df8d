"""The report of `gsa bench decode` as tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def _table(title: str, first: str, columns: list[str]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def tables(report: dict[str, Any]) -> Iterator[Table]:
    """Formats of the weights, their speed, and others beside us."""
    yield weights_table(report)
    yield speed_table(report)
    yield rivals_table(report)


def _size(report: dict[str, Any]) -> str:
    return f"{report['parameters'] / 1e6:.0f}M"


def weights_table(report: dict[str, Any]) -> Table:
    """What a format of the weights takes, and what it costs."""
    columns = ["MB", f"loss {_size(report)}", "loss gsa-tiny", "prompt, tokens/s"]
    table = _table(f"Weights of a model with {_size(report)} parameters", "weights", columns)
    plain = report["weights"]["fp32"]
    for name, row in report["weights"].items():
        losses = (_loss(row[key], plain[key], name) for key in ("loss", "loss_tiny"))
        table.add_row(name, f"{row['bytes'] / 1e6:.0f}", *losses, f"{report['prompts'][name]:.0f}")
    return table


def speed_table(report: dict[str, Any]) -> Table:
    """Tokens a second of every format, beside what the kernels and the memory allow."""
    columns = ["tokens/s", "bound", "share", "memory's", "batch of 16"]
    table = _table("Decoding", "weights", columns)
    for name, row in report["weights"].items():
        numbers = (row[key] for key in ("tokens_per_second", "bound", "memory", "batch_tokens_per_second"))
        speed, bound, memory, batch = (f"{number:.0f}" for number in numbers)
        table.add_row(name, speed, bound, f"{100 * row['share']:.0f}%", memory, batch)
    return table


def _loss(loss: float, plain: float, name: str) -> str:
    return f"{loss:.4f}" if name == "fp32" else f"{loss - plain:+.4f}"


def rivals_table(report: dict[str, Any]) -> Table:
    """Tokens a second at each length of context; behind others, how many times as fast the fastest of ours is."""
    contexts = list(report["rivals"])
    table = _table("Others: tokens/s by context", "", [f"{int(context):,}" for context in contexts])
    names = dict.fromkeys(name for row in report["rivals"].values() for name in row)
    for name in names:
        cells = []
        for context in contexts:
            row = report["rivals"][context]
            ours = "gsa bf16" if name.endswith("bf16") else "gsa int4"
            times = "" if name.startswith("gsa") or name not in row else f" ({row[ours] / row[name]:.1f}x)"
            cells.append(f"{row[name]:.0f}{times}" if name in row else "")
        table.add_row(name, *cells)
    return table


def lines(report: dict[str, Any]) -> Iterator[str]:
    """What is no table."""
    at, batch, same, memory = (report[key] for key in ("positions", "batch", "agreement", "memory"))
    yield (
        f"position: {at['near_tokens_per_second']:.1f} tokens/s behind {at['near']:,} tokens, "
        f"{at['far_tokens_per_second']:.1f} behind {at['far']:,}: {at['ratio']:.3f}x (bf16); "
        f"state {at['state_bytes']['near']:,} and {at['state_bytes']['far']:,} bytes"
    )
    (short, rate), (long_, later) = at["read_tokens_per_second"].items()
    yield (
        f"prompts: {rate:.0f} tokens/s for {int(short):,} tokens, {later:.0f} for {int(long_):,}: "
        f"{at['read_ratio']:.3f}x (bf16)"
    )
    if memory is not None:
        peaks = [f"{int(tokens):,} tokens {found['peak'] / 1e6:.0f} MB" for tokens, found in memory.items()]
        rates = [f"{int(tokens) / found['seconds']:,.0f}" for tokens, found in memory.items()]
        yield f"memory, reading with gsa-tiny: {', '.join(peaks)} ({' and '.join(rates)} tokens/s)"
    yield (
        f"engine, fp32, {batch['requests']} requests at random times: {batch['batch_tokens_per_second']:.0f} tokens/s "
        f"16 at a time, {batch['alone_tokens_per_second']:.0f} one at a time "
        f"(the first {batch['requests_alone']}): {batch['ratio']:.1f}x"
    )
    yield f"of {same['requests']} requests to gsa-tiny, 16 at a time, {same['equal']} gave the tokens they give alone"
    yield "bound: the matrix-vector kernels on all matrices, and nothing else; memory's: reading the same bytes"
    yield (
        "loss: in nats, fp32's own and what another format adds, decoded token by token; the weights of the model with "
        f"{_size(report)} parameters are random, and its text is what its fp32 form wrote"
    )
    yield "in brackets: gsa in bf16, or int4, over the other"
    yield f"{report['threads']} threads, {report['isa']}, torch {report['torch']}"
