"""`gsa paper ablation`: the paper's ablations as small language models, and recipes of GSA beside GLA and Xfmr++."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from gsa.bench.arguments import listed
from gsa.console import tell
from gsa.data.shards import Tokens
from gsa.errors import GSAError
from gsa.options import check_count
from gsa.paper.ablation_report import ablation_picture, ablation_tables
from gsa.paper.cells import Cell, Result, run_cells
from gsa.paper.language_run import LanguageRun, run_language, settings_of
from gsa.paper.record import folder_of, save_record
from gsa.table import show
from gsa.threads import usable_cores
from gsa.train.settings import Value

HELD_OUT = "10%"
"""Of the book that comes with the package, where no data is given."""


@dataclass(frozen=True)
class Row:
    """A line of a table."""

    label: str
    options: dict[str, Value] = field(default_factory=dict)
    model: str = "gsa-tiny"
    paper: float | None = None
    """The paper's perplexity: 340M parameters, 10B tokens of SlimPajama."""
    lr: float | None = None


_SLOTS: dict[str, Value] = {"num_slots": 64}
PAPER: dict[str, Row] = {
    "gsa": Row("GSA, 64 slots", _SLOTS, paper=13.51),
    "no-decay": Row("without decay (ABC)", {**_SLOTS, "gate": "none"}, paper=16.94),
    "constant-decay": Row("data-independent decay", {**_SLOTS, "gate": "constant"}, paper=15.83),
    "identity": Row("no softmax", {**_SLOTS, "readout": "identity"}, paper=14.03),
    "swish": Row("Swish for softmax", {**_SLOTS, "readout": "swish"}, paper=13.71),
    "relu": Row("ReLU for softmax", {**_SLOTS, "readout": "relu"}, paper=13.69),
    "relu2": Row("ReLU² for softmax", {**_SLOTS, "readout": "relu2"}, paper=13.95),
    "slots-32": Row("32 slots", {"num_slots": 32}, paper=13.74),
    "slots-128": Row("128 slots", {"num_slots": 128}, paper=13.46),
    "router": Row("router, 8 of 64 slots", {**_SLOTS, "router": "sigmoid"}),
}
"""The nine rows of the paper's table, and the router."""
RATES = (1e-3, 2e-3, 4e-3)
RECIPE: dict[str, Row] = {
    **{
        f"{system}-{rate:g}": Row(f"{label}, rate {rate:g}", model=f"{system}-tiny", lr=rate)
        for system, label in (("gsa", "GSA"), ("gla", "GLA"), ("xfmr", "Xfmr++"))
        for rate in RATES
    },
    "gsa-tau-4": Row("GSA, tau 4", {"gate_temperature": 4.0}),
    "gsa-tau-16": Row("GSA, tau 16", {"gate_temperature": 16.0}),
    "gsa-bias": Row("GSA, half-lives from 16 to 1024", {"gate_bias": True}),
    "gsa-conv": Row("GSA, short convolution", {"conv_size": 4}),
    "gla-conv": Row("GLA, short convolution", {"conv_size": 4}, model="gla-tiny"),
    "gsa-heads-2": Row("GSA, 2 heads", {"num_attention_heads": 2}),
    "gsa-heads-8": Row("GSA, 8 heads", {"num_attention_heads": 8}),
    "gla-heads-4": Row("GLA, 4 heads", {"num_attention_heads": 4}, model="gla-tiny"),
    "gsa-slots-64": Row("GSA, 64 slots", _SLOTS),
    "gsa-router": Row("GSA, router, 8 of 64 slots", {**_SLOTS, "router": "sigmoid"}),
}
"""What may help gsa-tiny, and the same for those it is compared with."""
TABLES = {"paper": PAPER, "recipe": RECIPE}


def ablation(
    *,
    out: str = "paper/ablation",
    table: str = "paper",
    rows: str = "all",
    data: str | None = None,
    eval_data: str | None = None,
    tokens: int = 1_000_000,
    seeds: int = 3,
    quick: bool = False,
    processes: int | None = None,
    json: bool = False,
    markdown: bool = False,
) -> None:
    """Trains small language models that differ in one thing each, and shows their perplexity beside the paper's.

    All have the size of gsa-tiny and see the same tokens in the same order, with the same learning rate; runs with
    other seeds tell what chance does. Results come cell by cell: the same command goes on where it was stopped. With a
    million tokens and three seeds, the paper's table takes about an hour and a half on two cores.

    Args:
        out: Folder for results: ablation.json, a picture as SVG and PNG, and a file for every run.
        table: paper, its nine rows and the router; or recipe, settings of GSA beside GLA and Xfmr++.
        rows: Rows of the table with commas between, or all.
        data: Folder of tokens to learn from, as `gsa data prepare` writes it; by default those of the book in the
            package, of which a tenth is kept to be evaluated on.
        eval_data: Folder of tokens to evaluate on; by default what was kept from `data`.
        tokens: Tokens that each run learns from.
        seeds: Runs of each row.
        quick: Four rows, one seed, few tokens of the book in the package: a look in less than three minutes.
        processes: Runs at a time, each of one thread; as many as cores by default.
        json: Print JSON instead of tables.
        markdown: Print the tables as Markdown.
    """
    if json and markdown:
        raise GSAError("paper: json and markdown exclude each other")
    if table not in TABLES:
        raise GSAError(f"paper: table must be one of {', '.join(TABLES)}, got {table!r}")
    for name, count in (("tokens", tokens), ("seeds", seeds), ("processes", processes)):
        check_count(f"paper: {name}", count, most=10**12)
    known = TABLES[table]
    chosen = listed("rows", rows, known, {"all": known}, "paper")
    if data is None and eval_data is not None:
        raise GSAError("paper: eval_data does nothing without data: the book in the package keeps a part of itself")
    if quick:
        chosen, tokens, seeds = chosen[:4], min(tokens, 40_000), 1
    if data is not None:
        Tokens.open(data)  # which checks it, before anything is written
        eval_data = eval_data or _held_out(data)
        Tokens.open(eval_data)
    folder = folder_of(out)
    if data is None:
        data, eval_data = _packaged_book(folder)
    assert eval_data is not None
    base = LanguageRun(data=data, eval_data=eval_data, tokens=tokens)
    found = measure({name: known[name] for name in chosen}, base, seeds, folder / "cells", processes or usable_cores())
    names = {"data": Path(base.data).name, "eval_data": Path(base.eval_data).name}  # no folders of this machine
    settings = {"table": table, "seeds": seeds, **asdict(base), **names}
    record = save_record(folder / f"{_name(table)}.json", "ablation", settings, rows=found)
    ablation_picture(record, folder / _name(table))
    show(record, ablation_tables(record), json=json, markdown=markdown)
    tell(f"{folder}: {_name(table)}.json, {_name(table)}.svg, {_name(table)}.png")


def _name(table: str) -> str:
    return "ablation" if table == "paper" else table


def measure(rows: dict[str, Row], base: LanguageRun, seeds: int, folder: Path, processes: int) -> list[dict[str, Any]]:
    """Perplexities of every row, of all seeds."""
    runs = [
        replace(base, model=row.model, options=row.options, lr=base.lr if row.lr is None else row.lr, seed=seed)
        for seed in range(seeds)  # a whole table first, then others to tell what chance does
        for row in rows.values()
    ]
    names = [f"{row.label}, seed {seed}" for seed in range(seeds) for row in rows.values()]
    cells = [Cell(name, settings_of(run)) for name, run in zip(names, runs, strict=True)]
    results = run_cells(
        cells, run_language, folder, processes=processes, say=tell, told=lambda found: f"{found['perplexity']:.2f}"
    )
    return [_row(name, row, results[place :: len(rows)]) for place, (name, row) in enumerate(rows.items())]


def _row(name: str, row: Row, results: list[Result]) -> dict[str, Any]:
    perplexities = [result["perplexity"] for result in results]
    losses = [result["loss"] for result in results]
    return {
        "row": name,
        "label": row.label,
        "options": row.options,
        "model": row.model,
        "perplexities": perplexities,
        "perplexity": mean(perplexities),
        "losses": losses,
        "loss": mean(losses),
        "spread": stdev(losses) if len(losses) > 1 else None,
        "bits_per_byte": mean(result["bits_per_byte"] for result in results),
        "paper": row.paper,
        "seconds": sum(result["seconds"] for result in results),
    }


def _held_out(data: str) -> str:
    from gsa.data.holdout import HELDOUT

    kept = Path(data) / HELDOUT
    if not kept.is_dir():
        raise GSAError(f"paper: {data} keeps nothing to evaluate on: give --eval-data, or prepare it with --holdout")
    return str(kept)


def _packaged_book(folder: Path) -> tuple[str, str]:
    """Tokens of the book in the package by gsa-tiny's tokenizer, prepared in the folder if they are not there."""
    from gsa import pretrained
    from gsa.data.prepare import prepare
    from gsa.files import written

    text = folder / "book.jsonl"
    if not text.exists():
        import json as json_module

        chapters = [part for part in pretrained.book().split("\nCHAPTER ") if part.strip()]
        with written(text) as place:
            place.write_text("".join(json_module.dumps({"text": chapter}) + "\n" for chapter in chapters))
    out = folder / "tokens"
    prepare([str(text)], str(pretrained.folder("gsa-tiny")), out, holdout=HELD_OUT, processes=1, progress=False)
    return str(out), _held_out(str(out))
