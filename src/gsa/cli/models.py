"""`gsa models` and `gsa import`."""

from __future__ import annotations

from typing import Any

from gsa.table import Column, Table, show


def models(json: bool = False) -> None:
    """Lists presets and models with their parameters and the size of their state, and says which have weights here.

    The state is what a sequence leaves behind, over all layers: in numbers, and in multiples of width x layers as the
    paper counts it (Mamba's two layers for one of the others counted as one). Attention's grows with the sequence.

    Args:
        json: Print JSON instead of a table.
    """
    from gsa import pretrained
    from gsa.models import presets

    rows = [describe(name) for name in dict.fromkeys((*presets(), *pretrained.names()))]
    show(rows, [_table(rows)], json=json)


def import_(path: str, out: str) -> None:
    """Turns a checkpoint of flash-linear-attention into one of ours, which transformers loads too.

    Reads config.json and safetensors of the kinds gsa, gla, retnet, hgrn2, abc and transformer. What cannot be
    represented is refused by name, before anything is written. A tokenizer beside the checkpoint comes along.

    Args:
        path: Folder of the checkpoint.
        out: Folder to write, new or without a model.
    """
    from gsa.models.fla import import_checkpoint

    done = import_checkpoint(path, out)
    beside = f", with {', '.join(done.copied)}" if done.copied else ""
    print(
        f"{done.kind}: {done.parameters / 1e6:.1f}M parameters, {done.config.num_hidden_layers} layers -> {out}{beside}"
    )


def describe(name: str) -> dict[str, Any]:
    """What `gsa models` says of a preset, or of a model of the package."""
    from gsa import pretrained
    from gsa.models import LM, preset, presets
    from gsa.models.checkpoint import load_config
    from gsa.models.init import without_memory

    config = preset(name) if name in presets() else load_config(pretrained.packaged(name))
    with without_memory():
        model = LM(config)
    blocks = sum(1.0 if block.mlp is not None else 0.5 for block in model.model.layers)
    state = model.state_size
    return {
        "name": name,
        "weights": name in pretrained.names() and pretrained.lacking(name) is None,
        "base": pretrained.base_package(name) if name in pretrained.names() else None,  # whose weights it updates
        "mixer": config.mixer,
        "parameters": model.num_parameters,
        "width": config.hidden_size,
        "layers": config.num_hidden_layers,
        "heads": getattr(config.layers[0], "num_attention_heads", None),
        "vocabulary": config.vocab_size,
        "state": state,
        "state_over_width": None if state is None else state / (blocks * config.hidden_size),
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    from gsa import pretrained
    from gsa.extras import name_of

    columns = [
        Column("preset", "name", left=True),
        Column("weights", lambda row: "here" if row["weights"] else row["base"] and "missing", left=True),
        Column("size", lambda row: row["parameters"] / 1e6, "{:.1f}M"),
        Column("width", "width"),
        Column("layers", "layers"),
        Column("heads", "heads"),
        Column("vocab", "vocabulary"),
        Column("state", lambda row: "grows" if row["state"] is None else f"{row['state'] / 1e6:.2f}M"),
        Column("state/(L d)", "state_over_width", "{:g}"),
    ]
    notes = [f"{row['name']} has weights in the package." for row in rows if row["weights"] and not row["base"]]
    for row in rows:
        if row["base"]:
            notes.append(f"{row['name']} is an update of the weights in {name_of(row['base'])}, and no preset.")
            notes += [] if row["weights"] else [f"{pretrained.lacking(row['name'])}."]
    notes.append("The others are configurations to train.")
    return Table("Presets", columns, rows, notes)
