"""`gsa probe slots`: the verb, its report and its tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gsa.console import Compute, Weights
from gsa.table import Column, Table, show

if TYPE_CHECKING:
    from torch import Tensor

    from gsa.eval.probes.slot_use import SlotUse

TOP = 3
"""Slots that the table of tokens names."""


def slots(
    model: str,
    *,
    prompt: str | None = None,
    text: str | None = None,
    max_tokens: int = 2048,
    layer: int | None = None,
    head: int = 0,
    threshold: float = 0.1,
    rows: int = 20,
    by_head: bool = False,
    plot: str | None = None,
    save: str | None = None,
    weights: Weights = "auto",
    compute: Compute = "auto",
    device: str = "auto",
    threads: int | None = None,
    json: bool = False,
    markdown: bool = False,
) -> None:
    """Shows which slots the tokens of a text write to and read from, how long slots remember, and which are dead.

    For models with GSA or ABC, in some of their layers at least. The first table has a row for each such layer; the
    second follows the tokens through one layer and head: the slots that they write to, with the strength (1 replaces
    what the slot holds), and those that they read from, with their share. A half-life is the number of tokens after
    which half of what a slot holds is forgotten, from its mean gate. Effective numbers of slots are exponentials of
    entropies: as many as would do if all were used alike.

    Args:
        model: gsa-tiny, a folder of a model with its tokenizer, a run, whose newest whole checkpoint is taken, or a
            name of the Hugging Face Hub (owner/name).
        prompt: The text itself.
        text: File with the text; - for standard input.
        max_tokens: Tokens of it that are read; what comes behind is left out.
        layer: The layer whose tokens are followed, counted from 0; by default the last one with slots.
        head: Its query head, counted from 0.
        threshold: A slot counts as never written if all writes to it together are below this, and as never read if no
            token reads more of it than this times an equal share (1 over the number of slots).
        rows: Tokens in the table of tokens; 0 for no such table.
        by_head: A row for each key/value head of a layer, instead of one for the layer.
        plot: Picture to write (.png, .svg, .pdf): tokens by slots, written and read, and the half-lives of all layers.
        save: File to write (safetensors) with writes, reads and log gates of all tokens, layers and heads.
        weights: Format of the weights in memory.
        compute: What texts are computed in; auto is the format of the weights where the CPU has a unit for it.
        device: Where it computes: cpu, cuda, cuda:1 for the second GPU, or auto, a GPU if torch can use one.
        threads: Threads of torch; its own choice by default.
        json: Print JSON instead of tables.
        markdown: Print Markdown instead of text.
    """
    from gsa.chart import check_picture
    from gsa.console import check_place, open_model
    from gsa.errors import GSAError, raised_by
    from gsa.eval.probes.slot_use import slot_layers, slot_use
    from gsa.reading_bar import ReadingBar

    with raised_by("probe slots"):
        _check(json=json, markdown=markdown, max_tokens=max_tokens, rows=rows, threshold=threshold)
        if plot is not None:
            check_picture(plot)
        if save is not None:
            check_place(save)
        read = _text(prompt, text)
    engine = open_model(model, weights, compute, device, threads)
    numbers = slot_layers(engine.engine.model)
    chosen = numbers[-1] if layer is None else layer
    if chosen not in numbers:
        raise GSAError(f"probe slots: layer {layer} has no slots, expected one of {', '.join(map(str, numbers))}")
    every = engine.encode(read)
    ids = every[:max_tokens].tolist()
    with ReadingBar(len(ids)) as bar:
        layers = slot_use(engine.engine.model, ids, bar.update)
    use = layers[numbers.index(chosen)]
    if not 0 <= head < use.reads.shape[1]:
        raise GSAError(f"probe slots: head must be 0 to {use.reads.shape[1] - 1} in layer {chosen}, got {head}")
    labels = [engine.tokenizer.decode([id_]) for id_ in ids]
    if save is not None:
        save_use(layers, ids, Path(save))
    if plot is not None:
        from gsa.eval.probes.slots_picture import save_picture

        save_picture(layers, use, head, labels, Path(plot), model)
    found = report(model, layers, use, head, ids, labels, threshold)
    tables = [_layer_table(found, by_head, len(every) - len(ids))]
    if rows:
        tables.append(_token_table(found, rows))
    show(found, tables, json=json, markdown=markdown)
    if not json and not markdown:
        print(_chart(found))


def _check(*, json: bool, markdown: bool, max_tokens: int, rows: int, threshold: float) -> None:
    from gsa.errors import GSAError
    from gsa.options import check_count

    if json and markdown:
        raise GSAError("json and markdown exclude each other")
    check_count("max_tokens", max_tokens, least=2)
    check_count("rows", rows, least=0)
    if not threshold >= 0:
        raise GSAError(f"threshold must be at least 0, got {threshold}")


def _text(prompt: str | None, file: str | None) -> str:
    """The text of one of both."""
    from gsa.console import check_typed, read_text
    from gsa.errors import GSAError

    if (prompt is None) == (file is None):
        raise GSAError("expected a text: either itself (--prompt TEXT) or in a file (--text FILE)")
    if file is not None:
        return read_text(file)
    assert prompt is not None
    check_typed(prompt, "the text")
    return prompt


def report(
    model: str,
    layers: Sequence[SlotUse],
    chosen: SlotUse,
    head: int,
    ids: Sequence[int],
    labels: Sequence[str],
    threshold: float,
) -> dict[str, Any]:
    """All numbers of the tables, and those of every slot and token behind them."""
    writes, reads = _rounded(chosen.writes[:, chosen.memory_of(head)]), _rounded(chosen.reads[:, head])
    return {
        "model": model,
        "tokens": len(ids),
        "threshold": threshold,
        "layers": [
            {"layer": use.layer, "mixer": use.mixer, "slots": use.slots, "heads": _heads(use, threshold)}
            for use in layers
        ],
        "followed": {
            "layer": chosen.layer,
            "head": head,
            "tokens": [
                {"id": id_, "text": label, "writes": written, "reads": read}
                for id_, label, written, read in zip(ids, labels, writes, reads, strict=True)
            ],
        },
    }


def _heads(use: SlotUse, threshold: float) -> list[dict[str, Any]]:
    effective = use.effective()
    unwritten, unread = use.never_written(threshold), use.never_read(threshold)
    return [
        {
            "head": h,
            "effective": {name: float(numbers[h]) for name, numbers in effective.items()},
            "half_lives": [life if math.isfinite(life) else None for life in use.half_lives[h].tolist()],
            "written": _rounded(use.written[h]),
            "read": _rounded(use.read[h]),
            "never_written": unwritten[h].nonzero().flatten().tolist(),
            "never_read": unread[h].nonzero().flatten().tolist(),
        }
        for h in range(use.heads)
    ]


def _rounded(x: Tensor) -> Any:
    """As lists, with few enough digits to read."""
    return x.double().round(decimals=6).tolist()


def _layer_table(found: dict[str, Any], by_head: bool, left_out: int) -> Table:
    lines = []
    for layer in found["layers"]:
        groups = [[head] for head in layer["heads"]] if by_head else [layer["heads"]]
        lines += [_line(layer, heads) for heads in groups]
    columns = [
        Column("layer", "layer"),
        *([Column("head", "head")] if by_head else []),
        Column("slots", "slots"),
        Column("written", "written", "{:.1f}"),
        Column("read", "read", "{:.1f}"),
        Column("at once", "read_by_token", "{:.1f}"),
        Column("half-life", "half_life"),
        Column("from", "shortest"),
        Column("to", "longest"),
        Column("unwritten", "never_written"),
        Column("unread", "never_read"),
    ]
    rest = f" ({left_out:,} more were left out: --max-tokens)" if left_out else ""
    notes = [
        "Written, read, at once: effective numbers of a head's slots, over the text and in what a single token reads"
        + ("." if by_head else "; means over heads."),
        "Half-lives in tokens: the median, the shortest and the longest of the slots; -: nothing is forgotten.",
        f"Unwritten: all writes together below {found['threshold']:g}; unread: never more than "
        f"{found['threshold']:g} of an equal share.",
    ]
    return Table(f"Slots of {found['model']} over {found['tokens']:,} tokens{rest}", columns, lines, notes)


def _line(layer: dict[str, Any], heads: list[dict[str, Any]]) -> dict[str, Any]:
    """A row for some heads of a layer together."""
    lives = _sorted_lives(heads)
    middle = _middle(lives)
    means = {
        name: sum(head["effective"][name] for head in heads) / len(heads)
        for name in ("written", "read", "read_by_token")
    }
    counts = {name: sum(len(head[name]) for head in heads) for name in ("never_written", "never_read")}
    return {
        "layer": layer["layer"],
        "head": heads[0]["head"],
        "slots": layer["slots"] if len(heads) == 1 else f"{len(heads)} x {layer['slots']}",
        **means,
        **counts,
        "half_life": _life(middle),
        "shortest": _life(lives[0]),
        "longest": _life(lives[-1]),
    }


def _sorted_lives(heads: list[dict[str, Any]]) -> list[float]:
    return sorted(math.inf if life is None else life for head in heads for life in head["half_lives"])


def _middle(lives: list[float]) -> float:
    """The median of sorted numbers."""
    return (lives[(len(lives) - 1) // 2] + lives[len(lives) // 2]) / 2


def _life(tokens: float) -> str:
    return "-" if math.isinf(tokens) else f"{tokens:,.1f}" if tokens < 100 else f"{tokens:,.0f}"


def _token_table(found: dict[str, Any], rows: int) -> Table:
    followed = found["followed"]
    columns = [
        Column("token", lambda token: repr(token["text"]), left=True),
        Column("writes to", lambda token: _top(token["writes"]), left=True),
        Column("reads from", lambda token: _top(token["reads"]), left=True),
    ]
    first = f"the first {rows} tokens" if rows < found["tokens"] else "all tokens"
    title = f"Layer {followed['layer']}, head {followed['head']}: {first}, and their first {TOP} slots"
    return Table(title, columns, followed["tokens"][:rows])


def _top(shares: list[float]) -> str:
    best = sorted(range(len(shares)), key=lambda slot: -shares[slot])[:TOP]
    return ", ".join(f"{slot} ({shares[slot]:.2f})" for slot in best)


def _chart(found: dict[str, Any]) -> str:
    """Half-lives by layer, for the terminal: those that are finite."""
    from gsa.chart import bars

    series: dict[str, dict[int, float]] = {"median": {}, "longest": {}}
    for layer in found["layers"]:
        lives = _sorted_lives(layer["heads"])
        finite = [life for life in lives if math.isfinite(life)]
        if finite:
            series["longest"][layer["layer"]] = finite[-1]
        if math.isfinite(_middle(lives)):
            series["median"][layer["layer"]] = _middle(lives)
    return bars(series, "layer", "half-life in tokens") if series["longest"] else "no slot forgets anything"


def save_use(layers: Sequence[SlotUse], ids: Sequence[int], path: Path) -> None:
    """Writes the use of all slots: ids [T], and layers.N.writes, .reads and .log_gates."""
    import torch
    from safetensors.torch import save_file

    from gsa.files import written

    tensors = {"ids": torch.tensor(ids)}
    for use in layers:
        for name in ("writes", "reads", "log_gates"):
            tensors[f"layers.{use.layer}.{name}"] = getattr(use, name).contiguous()
    with written(path) as place:
        save_file(tensors, place)
