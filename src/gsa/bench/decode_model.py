"""What `gsa bench decode` measures of our own model: weights, positions, prompts, batches."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gsa.infer import Model
    from gsa.infer.runner import Runner
    from gsa.models import LM, ModelConfig
    from gsa.ops.weights import PackedWeight

BATCH = 16
LONG = 65_536
"""Tokens of a long prompt."""


def shape(quick: bool = False) -> ModelConfig:
    """Gated slot attention in the shape of SmolLM2-135M; `quick` has few layers."""
    from gsa.models import ModelConfig

    return ModelConfig(
        mixer="gsa",
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=3 if quick else 30,
        num_attention_heads=9,
        num_key_value_heads=3,
        num_slots=64,
        vocab_size=49152,
        tie_word_embeddings=True,
    )


def random_model(config: ModelConfig) -> LM:
    """The same weights every time."""
    import torch

    from gsa.models import LM

    torch.manual_seed(0)
    return LM(config)


def products_of(model: Model) -> tuple[list[PackedWeight], str]:
    """All matrices that a token goes through, and what activations they take."""
    from gsa.infer.layers import InferenceLinear

    layers = [layer for layer in model.lm.modules() if isinstance(layer, InferenceLinear)]
    return [layer.packed_weight for layer in layers], layers[0].activations


def weights(models: dict[str, Model], seconds: float) -> dict[str, dict[str, Any]]:
    """Tokens a second of each format beside its bound: the kernels' time for all matrices and nothing else.

    Also beside the time in which memory can be read, and for a batch.
    """
    from gsa.bench.timing import race
    from gsa.infer.runners import make_runner
    from gsa.ops.native.decode import Products
    from gsa.ops.native.linear import Reader

    contenders: dict[str, Callable[[], object]] = {}
    for name, model in models.items():
        matrices, activations = products_of(model)
        here = make_runner(model, BATCH)
        parts = [x for matrix in matrices for x in (matrix.weight, matrix.scale, matrix.zero) if x is not None]
        contenders[f"{name} token"] = token(here, [0])
        contenders[f"{name} products"] = Products(matrices, activations)
        contenders[f"{name} read"] = Reader(parts)
        contenders[f"{name} batch"] = token(here, list(range(BATCH)))
    best = race(contenders, seconds)
    return {
        name: {
            "bytes": model.nbytes,
            "tokens_per_second": 1 / best[f"{name} token"],
            "bound": 1 / best[f"{name} products"],
            "share": best[f"{name} products"] / best[f"{name} token"],
            "memory": 1 / best[f"{name} read"],
            "batch_tokens_per_second": BATCH / best[f"{name} batch"],
        }
        for name, model in models.items()
    }


def token(here: Runner, places: list[int]) -> Callable[[], object]:
    """A token for each of these places."""
    ids = [7 * (place + 1) for place in places]
    return lambda: here.step(ids, places)


def positions(model: Model, near: int, far: int, seconds: float, tick: Callable[[str], None]) -> dict[str, Any]:
    """Tokens a second behind a short and a very long text, and how fast texts are read.

    While the long one is read, short prompts are read in between, so that both meet the same machine.
    """
    from statistics import median

    import torch

    from gsa.bench.timing import race
    from gsa.infer.runner import MAX_READ
    from gsa.infer.runners import make_runner

    ids = torch.randint(model.vocab_size, (far,), generator=torch.Generator().manual_seed(0))
    prompt = 4 * MAX_READ
    here, state, short, long_ = make_runner(model, 2), None, [], []
    for number, begin in enumerate(range(0, far, MAX_READ)):
        if number % 16 == 0:
            tick(f"reading {far:,} tokens: {begin:,}")
            short.append(_timed(here, ids[:prompt], None)[0] / prompt)
        piece = ids[begin : begin + MAX_READ]
        spent, state = _timed(here, piece, state)
        if begin < LONG:
            long_.append(spent / len(piece))
    assert state is not None
    here.put(0, _timed(here, ids[:near], None)[1])
    here.put(1, state)
    best = race({"near": token(here, [0]), "far": token(here, [1])}, seconds)
    return {
        "near": near,
        "far": far,
        "near_tokens_per_second": 1 / best["near"],
        "far_tokens_per_second": 1 / best["far"],
        "ratio": best["near"] / best["far"],
        "state_bytes": {"near": here.take(0).nbytes, "far": here.take(1).nbytes},
        "read_tokens_per_second": {str(prompt): 1 / median(short), str(min(far, LONG)): 1 / median(long_)},
        "read_ratio": median(short) / median(long_),
    }


def read_prompt(here: Runner, ids: Any) -> Any:
    """Reads ids from the beginning, piece by piece; the state after them."""
    return _timed(here, ids, None)[1]


def products_per_token(model: Model) -> int:
    """Multiplications in the matrices of all blocks for a token of a prompt. The head is for its last one alone."""
    from gsa.infer.layers import InferenceLinear

    layers = [layer for layer in model.lm.model.layers.modules() if isinstance(layer, InferenceLinear)]
    return sum(layer.packed_weight.N * layer.packed_weight.K for layer in layers)


def _timed(here: Runner, ids: Any, state: Any) -> tuple[float, Any]:
    """Seconds to read ids, piece by piece, and the state after them."""
    from gsa.infer.runner import MAX_READ

    begun = time.perf_counter()
    for begin in range(0, len(ids), MAX_READ):
        _, state = here.read(ids[begin : begin + MAX_READ], state)
    return time.perf_counter() - begun, state


def prompts(models: dict[str, Model], tokens: int, seconds: float) -> dict[str, float]:
    """Tokens a second at which a prompt is read, for each format of the weights."""
    import torch

    from gsa.bench.timing import race
    from gsa.infer.runners import make_runner

    size = min(model.vocab_size for model in models.values())
    ids = torch.randint(size, (tokens,), generator=torch.Generator().manual_seed(0))
    best = race({name: partial(_timed, make_runner(model, 1), ids, None) for name, model in models.items()}, seconds)
    return {name: tokens / time for name, time in best.items()}


def batch(model: Model, requests: int, longest: int, tick: Callable[[str], None]) -> dict[str, Any]:
    """Tokens a second of an engine with requests that come at random times, 16 at a time, and a few of them one at a
    time."""
    wanted = jobs(model, requests, longest)
    few = wanted[: max(2, requests // BATCH)]
    rates: dict[int, list[float]] = {1: [], BATCH: []}
    for _ in range(2):
        for size, some in ((1, few), (BATCH, wanted)):
            tick(f"an engine with {size} place{'s' if size > 1 else ''}")
            rates[size].append(_served(model, size, some)[0])
    alone, together = max(rates[1]), max(rates[BATCH])
    return {
        "requests": requests,
        "requests_alone": len(few),
        "alone_tokens_per_second": alone,
        "batch_tokens_per_second": together,
        "ratio": together / alone,
    }


def agreement(model: Model, requests: int, longest: int) -> dict[str, int]:
    """How many of some requests at random times, 16 at a time, give what they give alone."""
    wanted = jobs(model, requests, longest)
    alone, together = (_served(model, size, wanted)[1] for size in (1, BATCH))
    return {"requests": requests, "equal": sum(a == b for a, b in zip(alone, together, strict=True))}


Job = tuple[list[int], int, tuple[int, ...]]
"""A prompt, tokens at most, and tokens that end it."""


def jobs(model: Model, number: int, longest: int) -> list[Job]:
    """Random ones; a few tokens end a text early."""
    chance, vocabulary = random.Random(0), model.vocab_size
    prompts = [[chance.randrange(vocabulary) for _ in range(chance.randint(4, 32))] for _ in range(number)]
    ends = [tuple(chance.randrange(vocabulary) for _ in range(chance.randint(0, 8))) for _ in range(number)]
    return [(ids, chance.randint(longest // 4, longest), end) for ids, end in zip(prompts, ends, strict=True)]


def _served(model: Model, size: int, wanted: list[Job]) -> tuple[float, list[list[int]]]:
    """Tokens a second, and what each job gave. None to two of them come with every step, as chance wills."""
    from gsa.infer import Engine, Sampling

    engine, chance, waiting, made = Engine(model, batch_size=size), random.Random(1), deque(wanted), []
    begun = time.perf_counter()
    while waiting or engine.busy:
        for _ in range(chance.randint(0, 2)):
            if waiting:
                ids, length, end = waiting.popleft()
                made.append(engine.submit(ids, Sampling(max_tokens=length, temperature=0.0, stop=end)))
        engine.step()
    spent = time.perf_counter() - begun
    outputs = [list(generation.tokens) for generation in made]
    return sum(map(len, outputs)) / spent, outputs


def read_alone(setting: dict[str, Any]) -> dict[str, Any]:
    """Peak memory of a process that reads so many tokens with gsa-tiny; run by `gsa.bench.memory`."""
    import torch

    from gsa.bench.memory import forget_peak, peak
    from gsa.infer import Engine

    torch.set_num_threads(setting["threads"])
    engine = Engine("gsa-tiny", device="cpu", batch_size=1)
    tokens = setting["tokens"]
    ids = torch.randint(engine.model.vocab_size, (tokens,), generator=torch.Generator().manual_seed(0))
    forget_peak()
    begun = time.perf_counter()
    state = engine.read(ids)
    return {"peak": peak(), "seconds": time.perf_counter() - begun, "tokens": state.tokens}
