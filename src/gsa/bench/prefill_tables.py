"""The report of `gsa bench prefill` as tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gsa.table import Column, Table, text_columns


def tables(report: dict[str, Any]) -> list[Table]:
    """Ours in every way, others beside it, and other mixers."""
    mixers = [mixers_table(report)] if report["mixers"] else []
    return [prompts_table(report), rivals_table(report), *mixers]


def prompts_table(report: dict[str, Any]) -> Table:
    """Tokens a second and losses for every format of the weights and every kind of products."""
    columns = [
        Column("weights", "weights", left=True),
        Column("products", "compute", left=True),
        Column("tokens/s", "tokens_per_second", "{:.0f}"),
        Column("beside fp32", "ratio", "{:.2f}x"),
        Column("share of peak", "share", "{:.0%}"),
        Column(f"loss {report['parameters'] / 1e6:.0f}M", "loss_added", "{:+.4f}"),
        Column("loss gsa-tiny", "loss_tiny_added", "{:+.4f}"),
    ]
    return Table(f"Prompts of {report['tokens']:,} tokens", columns, list(report["prompts"].values()))


def rivals_table(report: dict[str, Any]) -> Table:
    """Tokens a second of others, and how many times as fast the fastest of ours is."""
    best = max(row["tokens_per_second"] for row in report["prompts"].values())
    rows = [[name, f"{rate:.0f}", f"{best / rate:.1f}x"] for name, rate in report["rivals"].items()]
    columns = text_columns("", "tokens/s", "ours beside it")
    return Table("Others", columns, rows, list(notes(report)))


def mixers_table(report: dict[str, Any]) -> Table:
    """Tokens a second of other mixers, and their time over that of gated slot attention."""
    columns = [
        Column("mixer", "mixer", left=True),
        Column("weights", "weights", left=True),
        Column("products", "compute", left=True),
        Column("tokens/s", "tokens_per_second", "{:.0f}"),
        Column("time beside gsa", "time", "{:.2f}x"),
    ]
    return Table("Other mixers in the same shape", columns, report["mixers"])


def notes(report: dict[str, Any]) -> Iterator[str]:
    """What the words in the tables mean."""
    rates = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in report["peak"].items())
    yield f"peak, in billions of operations a second: {rates}; fp32 is torch's product, others are the units alone"
    yield "share of peak: of all time, the products' part at that rate"
    yield "loss: in nats, what products add to that of the same weights with products in fp32, read as prompts are"
    yield "ours beside it: the fastest way of ours over the other; llama.cpp computes with SmolLM2-135M itself"
    if report["left_out"] is not None:
        yield report["left_out"]
    yield f"{report['threads']} threads, {report['isa']}, torch {report['torch']}"
