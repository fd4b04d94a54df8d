"""`gsa demo`: a model writes, reads a whole book into a state of constant size, and goes on from there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.console import Console

    from gsa.chart import Series
    from gsa.infer import Engine, State
    from gsa.infer.text import TextEngine

PROMPT = "It is a truth universally acknowledged, that"
WRITTEN = 60  # tokens, each time
POSITIONS = (64, 256, 1024, 4096, 16384, 65536)
GSA, LLAMA = "GSA, state", "Llama, KV cache"


def demo(out: str = "out") -> None:
    """Writes with the model of the package, reads a book into a state, goes on from it, and shows what a token costs.

    The model is gsa-tiny; the book is Sense and Sensibility, 670 KB, which it knows from its training. The state is
    saved to a file and loaded again. Charts show the time per token, and the memory, against the position, for this
    model and for a Transformer of the same size with a KV cache (transformers' Llama, bf16).

    Args:
        out: Folder for the state and the charts.
    """
    from rich.console import Console

    from gsa import pretrained
    from gsa.extras import require
    from gsa.files import named
    from gsa.infer.text import TextEngine

    require("transformers", "demo: the Llama beside the model")
    require("matplotlib", "demo: the charts")
    console, folder = Console(highlight=False), named(out, "demo")
    with _written_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    engine = TextEngine.load("gsa-tiny", device="cpu")
    console.print("[bold]Gated slot attention[/]: softmax attention over a fixed number of memory slots.\n")
    console.print(f"[bold]1. A model writes[/] (gsa-tiny, {engine.engine.model.nbytes / 1e6:.1f} MB)")
    _write(engine, PROMPT, None, seed=1)
    ids = engine.encode(pretrained.book())
    _read(console, engine, ids, folder / "sense-and-sensibility.state")
    _cost(console, engine, ids, folder)


@contextmanager
def _written_to(folder: Path) -> Iterator[None]:
    """Turns what goes wrong with a folder into a sentence."""
    from gsa.errors import GSAError

    try:
        yield
    except OSError as error:
        raise GSAError(f"demo: {folder} is not a folder that can be written to: {error.strerror or error}") from None


def _write(engine: TextEngine, prompt: str, state: State | None, seed: int) -> None:
    """Streams a continuation, and tells how fast it came."""
    from gsa.infer import Sampling

    print(f"> {prompt.strip()}", end="", flush=True)
    settings = Sampling(max_tokens=WRITTEN, temperature=0.7, top_p=0.9, seed=seed)
    first, begun = None, time.perf_counter()
    writing = engine.stream(prompt, settings, state=state)
    for piece in writing:
        if first is None and piece.token is not None:
            first = time.perf_counter()
        print(piece.text, end="", flush=True)
    ended, made = time.perf_counter(), len(writing.generation.tokens)
    assert first is not None
    rate = (made - 1) / (ended - first)
    print(f"\n  [first token after {1e3 * (first - begun):.0f} ms, then {rate:,.0f} tokens/s]\n", flush=True)


def _read(console: Console, engine: TextEngine, ids: NDArray[np.int64], path: Path) -> None:
    """Reads the book, saves the state, loads it, and goes on from it, twice."""
    from gsa.infer import State

    console.print("[bold]2. It reads a book[/] (Sense and Sensibility) into a state, which is saved and loaded again")
    begun = time.perf_counter()
    with console.status("") as status:
        state = engine.engine.read(ids, progress=lambda read: status.update(f"read {read:,} of {len(ids):,} tokens"))
    spent = time.perf_counter() - begun
    state.save(path)
    console.print(
        f"  {state.tokens:,} tokens in {spent:.1f} s ({state.tokens / spent:,.0f} tokens/s) -> {path}, "
        f"{path.stat().st_size:,} bytes\n"
    )
    state = State.load(path, engine.engine.model)
    for seed, question in enumerate(("Marianne", "Colonel Brandon")):
        _write(engine, f"\n\n{question}", state, seed)


def _cost(console: Console, engine: TextEngine, ids: NDArray[np.int64], folder: Path) -> None:
    """Time per token and bytes of memory against the position, here and with a KV cache."""
    from gsa.chart import bars, save_lines
    from gsa.table import Column, Table

    console.print("[bold]3. What a token costs[/]: milliseconds, against its position")
    with console.status("") as status:
        times, memory = _measured(engine.engine, ids, status.update)
    console.print(bars(times, "position", "ms a token"))
    columns = [Column(name, place, "{:,.0f}") for place, name in enumerate(("position", GSA, LLAMA))]
    rows = [(position, constant, memory[LLAMA][position]) for position, constant in memory[GSA].items()]
    console.print()
    Table("Memory of one sequence, in bytes", columns, rows).print(console)
    charts = {"time_per_token.png": (times, "ms a token"), "memory.png": (memory, "bytes of state, or cache")}
    for name, (series, label) in charts.items():
        with _written_to(folder):
            save_lines(series, folder / name, "position", label, "gsa-tiny and a Llama of the same size")
        console.print(f"Chart: {folder / name}")


def _measured(engine: Engine, ids: NDArray[np.int64], tick: Callable[[str], None]) -> tuple[Series, Series]:
    """Milliseconds and bytes by position, of the model behind a text and of a Llama. All positions take turns."""
    from gsa.bench.decode_model import token
    from gsa.bench.rivals import TransformersLlama
    from gsa.bench.timing import race
    from gsa.infer.runners import make_runner

    llama, here = TransformersLlama(engine.model.config), make_runner(engine.model, len(POSITIONS))
    contenders, state, read = {}, None, 0
    for place, position in enumerate(POSITIONS):
        tick(f"going to position {position:,}")
        state, read = engine.read(ids[read:position], state), position
        here.put(place, state.model)
        contenders[f"gsa {position}"] = token(here, [place])
        contenders[f"llama {position}"] = llama.at(position)
    tick("measuring")
    best = race(contenders, seconds=10.0, rounds=2)
    times = {
        label: {position: 1e3 * best[f"{name} {position}"] for position in POSITIONS}
        for name, label in (("gsa", GSA), ("llama", LLAMA))
    }
    memory = {
        GSA: {position: float(here.take(place).nbytes) for place, position in enumerate(POSITIONS)},
        LLAMA: {position: float(llama.cache_bytes(position)) for position in POSITIONS},
    }
    return times, memory
