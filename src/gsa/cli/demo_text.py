"""`gsa demo` without the package of a chat model: gsa-tiny continues texts, and reads a whole book."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gsa.cli.demo import show_cost, streamed

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


def write(console: Console, model: str, folder: Path) -> None:
    """Writes, reads the book, goes on from the state, and measures."""
    from gsa import pretrained
    from gsa.infer.text import TextEngine

    engine = TextEngine.load(model, device="cpu")
    console.print(f"[bold]1. A model writes[/] ({model}, {engine.engine.model.nbytes / 1e6:.1f} MB)")
    _write(engine, PROMPT, None, seed=1)
    ids = engine.encode(pretrained.book())
    _read(console, engine, ids, folder / "sense-and-sensibility.state")
    console.print("[bold]3. What a token costs[/]: milliseconds, against its position")
    with console.status("") as status:
        times, memory = _measured(engine.engine, ids, status.update)
    show_cost(console, times, memory, folder, f"{model} and a Llama of the same size")


def _write(engine: TextEngine, prompt: str, state: State | None, seed: int) -> None:
    """Streams a continuation."""
    from gsa.infer import Sampling

    print(f"> {prompt.strip()}", end="", flush=True)
    streamed(engine.stream(prompt, Sampling(max_tokens=WRITTEN, temperature=0.7, top_p=0.9, seed=seed), state=state))


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
