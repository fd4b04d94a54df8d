"""What `gsa bench prefill` measures of other mixers in the same shape, beside gated slot attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from gsa.bench import decode_model

WAYS = (("fp32", "fp32"), ("bf16", "bf16"), ("int8", "int8"))
"""Formats of the weights, and what products are computed in."""


def measure(
    names: list[str], tokens: int, quick: bool, seconds: float, tick: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Tokens a second of each mixer, beside gsa in turns with it."""
    import torch

    from gsa.bench.decode_mixers import shape_of
    from gsa.bench.timing import race
    from gsa.infer import Model
    from gsa.infer.runners import make_runner
    from gsa.ops.matmul import missing_unit

    if not names:
        return []
    lms = {name: decode_model.random_model(shape_of(name, quick)) for name in dict.fromkeys(["gsa", *names])}
    ids = torch.randint(lms["gsa"].config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(0))
    rows = []
    for weights, compute in WAYS:
        if compute != "fp32" and missing_unit(compute) is not None:
            continue
        tick(f"prompts of other mixers in {weights}")
        models = {name: Model.load(lm, weights, compute=compute, device="cpu") for name, lm in lms.items()}
        contenders: dict[str, Callable[[], object]] = {
            name: partial(decode_model.read_prompt, make_runner(model, 1), ids) for name, model in models.items()
        }
        best = race(contenders, seconds, rounds=3)
        rows += [
            {
                "mixer": name,
                "weights": weights,
                "compute": compute,
                "tokens_per_second": tokens / best[name],
                "time": best[name] / best["gsa"],
            }
            for name in models
        ]
    return rows
