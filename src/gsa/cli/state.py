"""`gsa state`."""

from __future__ import annotations

import json as json_module
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gsa.cli.console import Weights

if TYPE_CHECKING:
    from gsa.infer.state_file import Kind


def save(
    *,
    file: str,
    out: str,
    model: str = "gsa-tiny",
    state: str | None = None,
    weights: Weights = "auto",
    threads: int | None = None,
) -> None:
    """Reads a document of any length, and saves what the model remembers of it.

    `gsa generate --state FILE` goes on from there at once, as often as wanted. The file is there when it is whole, and
    not before.

    Args:
        file: Text to read, UTF-8; - for standard input.
        out: File to write.
        model: gsa-tiny, or a folder of a model with its tokenizer, or of a run, whose newest whole checkpoint is taken.
        state: An earlier state, which the text goes on from.
        weights: Format of the weights in memory; a state serves them all.
        threads: Threads of torch; its own choice by default.
    """
    from gsa.cli.console import ReadingBar, check_place, open_model, read_text
    from gsa.errors import GSAError
    from gsa.files import byte_count
    from gsa.infer import State

    check_place(out)
    text = read_text(file)
    if not text:
        raise GSAError(f"state: {file} is empty, expected text")
    engine = open_model(model, weights, threads)
    start = None if state is None else State.load(state, engine.engine.model)
    began = time.monotonic()
    ids = engine.encode(text, continues=start is not None)
    with ReadingBar(len(ids)) as bar:
        found = engine.engine.read(ids, start, progress=bar.update)
    found.save(out)
    seconds = time.monotonic() - began
    earlier = "" if start is None else f" after {start.tokens:,}"
    print(f"{out}: {len(ids):,} tokens{earlier}, {byte_count(Path(out).stat().st_size)}, {seconds:.1f} s")


def show(path: str, json: bool = False) -> None:
    """Tells what a saved state is, without its model; and reads all of it, to see whether it is whole.

    Args:
        path: File that `gsa state save`, `gsa generate --save-state` or `State.save` wrote.
        json: Print JSON instead of text.
    """
    from gsa.errors import raised_by
    from gsa.files import byte_count
    from gsa.infer.state_file import read_state

    with raised_by(f"state: {path}"):
        kinds = _kinds(Path(path))
        fields, tensors = read_state(Path(path), lambda _: kinds)
    facts: dict[str, Any] = {
        "file": path,
        "tokens": int(fields["tokens"]),
        "bytes": Path(path).stat().st_size,
        "tensors": len(tensors),
        "vocab_size": int(tensors["logits"].numel()),
        "digest": fields["digest"],
        "fingerprint": fields["fingerprint"],
        "weights": fields["weights"],
    }
    if json:
        print(json_module.dumps(facts, indent=2))
        return
    print(f"{path}: whole; a state after {facts['tokens']:,} tokens, {byte_count(facts['bytes'])}")
    print(f"tokens {facts['digest'][:12]}, read with {facts['weights']} weights")
    print(f"model {facts['fingerprint'][:12]}, vocabulary {facts['vocab_size']}")


def _kinds(path: Path) -> dict[str, Kind]:
    """What the tensors of a file are, by its header."""
    from safetensors import SafetensorError, safe_open

    from gsa.errors import GSAError
    from gsa.infer.state_file import DTYPES, Kind

    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
            kinds = {name: Kind(x.get_dtype(), tuple(x.get_shape())) for name, x in slices.items()}
    except (SafetensorError, OSError) as error:
        raise GSAError(f"not a whole safetensors file: {error}") from None
    odd = [name for name, kind in kinds.items() if kind.dtype not in DTYPES.values()]
    if odd or "logits" not in kinds:
        raise GSAError(f"not a state: {f'tensor {odd[0]} is {kinds[odd[0]].dtype}' if odd else 'it has no logits'}")
    return kinds
