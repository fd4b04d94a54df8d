"""The report of `gsa bench decode` as tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gsa.table import Column, Table, text_columns


def tables(report: dict[str, Any]) -> list[Table]:
    """Formats of the weights, their speed, other mixers, and others beside us."""
    mixers = [mixers_table(report)] if report["mixers"] else []
    return [weights_table(report), speed_table(report), *mixers, rivals_table(report)]


def _size(report: dict[str, Any]) -> str:
    return f"{report['parameters'] / 1e6:.0f}M"


def weights_table(report: dict[str, Any]) -> Table:
    """What a format of the weights takes, and what it costs."""
    plain = report["weights"]["fp32"]
    rows = [
        [
            name,
            f"{row['bytes'] / 1e6:.0f}",
            *(_loss(row[key], plain[key], name) for key in ("loss", "loss_tiny")),
            f"{report['prompts'][name]:.0f}",
        ]
        for name, row in report["weights"].items()
    ]
    columns = text_columns("weights", "MB", f"loss {_size(report)}", "loss gsa-tiny", "prompt, tokens/s")
    return Table(f"Weights of a model with {_size(report)} parameters", columns, rows)


def _loss(loss: float, plain: float, name: str) -> str:
    return f"{loss:.4f}" if name == "fp32" else f"{loss - plain:+.4f}"


def speed_table(report: dict[str, Any]) -> Table:
    """Tokens a second of every format, beside what the kernels and the memory allow."""
    columns = [
        Column("weights", "weights", left=True),
        Column("tokens/s", "tokens_per_second", "{:.0f}"),
        Column("bound", "bound", "{:.0f}"),
        Column("share", "share", "{:.0%}"),
        Column("memory's", "memory", "{:.0f}"),
        Column("batch of 16", "batch_tokens_per_second", "{:.0f}"),
    ]
    return Table("Decoding", columns, [{"weights": name, **row} for name, row in report["weights"].items()])


def mixers_table(report: dict[str, Any]) -> Table:
    """Tokens a second of every mixer in the same shape, beside what the kernels and the memory allow."""
    columns = [
        Column("mixer", "mixer", left=True),
        Column("weights", "weights", left=True),
        Column("context", "context", "{:,}"),
        Column("tokens/s", "tokens_per_second", "{:.0f}"),
        Column("bound", "bound", "{:.0f}"),
        Column("share", "share", "{:.0%}"),
    ]
    note = "bound, with a context: the kernels on all matrices, and the reading of a cache of so many tokens"
    return Table("Mixers in the same shape", columns, report["mixers"], [note])


def rivals_table(report: dict[str, Any]) -> Table:
    """Tokens a second at each length of context; behind others, how many times as fast ours is in bf16 or int4."""
    contexts = report["rivals"]
    names = dict.fromkeys(name for row in contexts.values() for name in row)
    rows = [[name, *(_beside(name, row) for row in contexts.values())] for name in names]
    columns = text_columns("", *(f"{int(context):,}" for context in contexts))
    return Table("Others: tokens/s by context", columns, rows, list(notes(report)))


def _beside(name: str, row: dict[str, float]) -> str:
    """The speed of one at a context, if it was measured there; and of others, how many times as fast ours is."""
    if name not in row:
        return ""
    ours = "gsa bf16" if name.endswith("bf16") else "gsa int4"
    return f"{row[name]:.0f}" + ("" if name.startswith("gsa") else f" ({row[ours] / row[name]:.1f}x)")


def notes(report: dict[str, Any]) -> Iterator[str]:
    """What is no table, and what the words in them mean."""
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
