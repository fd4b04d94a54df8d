"""`gsa state`."""

from __future__ import annotations

import json as json_module
import time
from pathlib import Path
from typing import Any

from gsa.console import Compute, Weights


def save(
    *,
    file: str,
    out: str,
    model: str = "gsa-tiny",
    state: str | None = None,
    weights: Weights = "auto",
    compute: Compute = "auto",
    device: str = "auto",
    threads: int | None = None,
    strict: bool = False,
) -> None:
    """Reads a document of any length, and saves what the model remembers of it.

    `gsa generate --state FILE` goes on from there at once, as often as wanted. The file is there when it is whole, and
    not before.

    Args:
        file: Text to read; - for standard input. Bytes that are not UTF-8 are replaced and counted.
        out: File to write.
        model: gsa-tiny, gsa-smol, a folder of a model with its tokenizer, a run, whose newest whole checkpoint is
            taken, or a name of the Hugging Face Hub (owner/name).
        state: An earlier state, which the text goes on from.
        weights: Format of the weights in memory; a state serves them all.
        compute: What prompts are computed in; auto is the format of the weights (int8 for int4) where the CPU has a
            unit for such products, else fp32. `gsa doctor` tells.
        device: Where it computes: cpu, cuda, cuda:1 for the second GPU, or auto, a GPU if torch can use one.
        threads: Threads of torch; its own choice by default.
        strict: Refuse a file with bytes that are not UTF-8.
    """
    from gsa.console import Output, check_place, load_state, open_model, read_text
    from gsa.errors import GSAError
    from gsa.files import byte_count
    from gsa.reading_bar import ReadingBar

    check_place(out)
    text = read_text(file, strict=strict)
    if not text:
        raise GSAError(f"state: {file} is empty, expected text")
    engine = open_model(model, weights, compute, device, threads)
    start = None if state is None else load_state(state, engine)
    began = time.monotonic()
    ids = engine.encode(text, continues=start is not None)
    with ReadingBar(len(ids)) as bar:
        found = engine.engine.read(ids, start, progress=bar.update)
    found.save(out)
    seconds = time.monotonic() - began
    earlier = "" if start is None else f" after {start.tokens:,}"
    output = Output()
    output.write(f"{out}: {len(ids):,} tokens{earlier}, {byte_count(Path(out).stat().st_size)}, {seconds:.1f} s\n")
    output.end()


def show(path: str, json: bool = False) -> None:
    """Tells what a saved state is, without its model; and reads all of it, to see whether it is whole.

    Args:
        path: File that `gsa state save`, `gsa generate --save-state` or `State.save` wrote.
        json: Print JSON instead of text.
    """
    from gsa.console import Output
    from gsa.errors import raised_by
    from gsa.files import named
    from gsa.infer.state_file import inspect_state

    with raised_by(f"state: {path}"):
        fields, kinds = inspect_state(named(path, "state"))
    facts: dict[str, Any] = {
        "file": path,
        "tokens": int(fields["tokens"]),
        "bytes": Path(path).stat().st_size,
        "tensors": len(kinds),
        "vocab_size": kinds["logits"].shape[0],
        "digest": fields["digest"],
        "fingerprint": fields["fingerprint"],
        "weights": fields["weights"],
    }
    output = Output()
    output.write((json_module.dumps(facts, indent=2) if json else _told(facts)) + "\n")
    output.end()


def _told(facts: dict[str, Any]) -> str:
    from gsa.files import byte_count

    return (
        f"{facts['file']}: whole; a state after {facts['tokens']:,} tokens, {byte_count(facts['bytes'])}\n"
        f"tokens {facts['digest'][:12]}, read with {facts['weights']} weights\n"
        f"model {facts['fingerprint'][:12]}, vocabulary {facts['vocab_size']}"
    )
