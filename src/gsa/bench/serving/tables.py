"""The report of `gsa bench serve` as tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gsa.bench.serving.servers import OURS, called
from gsa.table import Column, Table

Row = dict[str, Any]


def tables(report: dict[str, Any]) -> list[Table]:
    """Servers beside their engines, long prompts, servers beside others', and conversations; what holds for all of
    them stands beneath the last."""
    parts = (
        ("load", load_table),
        ("long_prompts", long_prompts_table),
        ("rivals", rivals_table),
        ("chats", chats_table),
    )
    found = [make(report[name]) for name, make in parts if report[name]]
    found = found or [Table("Serving", [Column("nothing was measured", 0)], [])]
    left_out = [f"left out: {why}" for why in report["missing"]]
    drawn = f"temperature {report['temperature']:g}, " if report["temperature"] else ""
    machine = f"{drawn}{report['threads']} threads, {report['isa']}, torch {report['torch']}"
    return [*found[:-1], replace(found[-1], notes=[*found[-1].notes, *left_out, machine])]


def load_table(rows: list[Row]) -> Table:
    """What clients get of our servers, and what the engines give."""
    columns = [
        _MODEL,
        Column("tokens/s", "tokens_per_second", "{:.0f}"),
        Column("engine", "engine_tokens_per_second", "{:.0f}"),
        Column("share", "share", "{:.0%}"),
        *_TIMES,
        Column("errors", "errors"),
        Column("MB\nfrom / to", _megabytes),
    ]
    notes = [
        "tokens/s: over HTTP, as the server counts them; engine: for the same requests, without a server",
        "first token: ms from the request to it; between: ms from one event with text to the next",
        *(f"{row['name']}: {_more(row)}" for row in rows),
        *_errors(rows),
    ]
    return Table(_title(rows), columns, rows, notes)


def long_prompts_table(rows: list[Row]) -> Table:
    """How long others wait while a very long prompt is read."""
    columns = [
        _MODEL,
        Column("tokens", "prompt_tokens", "{:,}"),
        Column("seconds", "prompt_seconds", "{:.1f}"),
        Column("between, before\np50 / p99 / longest", lambda row: _all_three(row["between_tokens"])),
        Column("meanwhile\np50 / p99 / longest", lambda row: _all_three(row["between_tokens_meanwhile"])),
    ]
    notes = [
        "seconds: to read the long prompt; between: ms from one event of another client to its next, before and "
        "while it is read"
    ]
    return Table(f"{rows[0]['clients']} streaming clients beside a long prompt", columns, rows, notes)


def rivals_table(rows: list[Row]) -> Table:
    """The first row is llama.cpp's, which the others are compared with."""
    theirs = rows[0]["tokens_per_second"]
    columns = [
        _SERVER,
        _MODEL,
        Column("tokens/s", "tokens_per_second", "{:.0f}"),
        Column("ratio", lambda row: row["tokens_per_second"] / theirs if theirs else None, "{:.1f}x"),
        *_TIMES,
    ]
    notes = [
        "the same prompts and limits for all; gsa-smol: SmolLM2-135M converted; 135m: its shape, with random weights",
        "ratio: tokens/s over llama.cpp's",
        *_errors(rows),
    ]
    return Table(f"Beside llama.cpp's server: {_title(rows)}", columns, rows, notes)


def chats_table(rows: list[Row]) -> Table:
    """Ours are compared with each of the others, if there are any."""
    others = [row for row in rows if row["server"] != OURS]
    columns = [
        _SERVER,
        _MODEL,
        Column("first\nturn", lambda row: _ms(row["first_turn"])),
        Column("second\nturn", lambda row: _ms(row["second_turn"])),
        Column("after a\nrestart", lambda row: _ms(row["after_restart"])),
        Column("cached\ntokens", lambda row: row["cached_after_restart"] if row["server"] == OURS else None, "{:.0f}"),
        *(_ratio(other) for other in others),
    ]
    notes = [
        "ms to the first token, medians; every turn tells the whole conversation; after a restart: the second turn, "
        "with what the server has kept on disk; cached: tokens of that turn that were not read again",
        *(["ratio: the time of llama.cpp after a restart over ours; disk: if it has a cache there"] if others else []),
    ]
    return Table(f"Conversations of about {rows[0]['tokens']:,} tokens", columns, rows, notes)


def _ratio(other: Row) -> Column:
    """How many times as long another server takes after a restart."""
    header = f"ratio{other['server'].removeprefix('llama.cpp').replace(', ', chr(10))}"
    return Column(
        header, lambda row: other["after_restart"] / row["after_restart"] if row["server"] == OURS else None, "{:.1f}x"
    )


def _title(rows: list[Row]) -> str:
    return f"{rows[0]['clients']} streaming clients for {rows[0]['seconds']:g} seconds"


def _more(row: Row) -> str:
    """What has no column."""
    cache = [row["memory"][moment]["cache_bytes"] for moment in ("begin", "end")]
    states = "" if None in cache else f"; {cache[0] / 1e6:.0f} and then {cache[1] / 1e6:.0f} MB are states in its cache"
    per_event = "no" if row["tokens_per_event"] is None else f"{row['tokens_per_event']:.2f}"
    return f"{row['answers']:,} answers, {per_event} tokens an event{states}"


def _errors(rows: list[Row]) -> list[str]:
    return [f"{called(row)}: {row['errors']} errors, first {row['first_error']}" for row in rows if row["errors"]]


def _ms(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return f"{1e3 * seconds:.1f}" if seconds < 0.1 else f"{1e3 * seconds:,.0f}"


def _both(times: dict[str, float | None]) -> str | None:
    return None if times["p50"] is None else f"{_ms(times['p50'])} / {_ms(times['p99'])}"


def _all_three(times: dict[str, float | None]) -> str | None:
    both = _both(times)
    return None if both is None else f"{both} / {_ms(times['longest'])}"


def _megabytes(row: Row) -> str | None:
    """Memory of the server's process when the window began and when it ended."""
    both = [row["memory"][moment]["bytes"] for moment in ("begin", "end")]
    return None if None in both else f"{both[0] / 1e6:.0f} / {both[1] / 1e6:.0f}"


_SERVER = Column("server", "server", left=True)
_MODEL = Column("model", "{name} {weights}".format_map, left=True)
_TIMES = [
    Column("first token\np50 / p99", lambda row: _both(row["first_token"])),
    Column("between\np50 / p99", lambda row: _both(row["between_tokens"])),
]
