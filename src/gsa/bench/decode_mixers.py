"""What `gsa bench decode` measures of every mixer in the same shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gsa.bench import decode_model

if TYPE_CHECKING:
    from gsa.infer import Model
    from gsa.infer.runner import Runner
    from gsa.models import ModelConfig, ModelState
    from gsa.ops.weights import PackedWeight

CONTEXT = 2048
"""Tokens that attention has in its cache."""
FORMATS = ("bf16", "int4")


def shape_of(mixer: str, quick: bool) -> ModelConfig:
    """The shape of SmolLM2-135M with another mixer. Two layers of Mamba, without MLP, stand for one of the others."""
    from gsa.mixers.registry import mixer_class, option_names
    from gsa.models import ModelConfig

    plain, known = decode_model.shape(quick), option_names(mixer)
    others = set(ModelConfig.option_names()) - set(known)
    if mixer == "hgrn2":
        others.add("num_attention_heads")  # its own are 128 wide
    fields = {name: value for name, value in plain.to_dict().items() if name not in others}
    if not mixer_class(mixer).with_mlp:
        fields |= {"intermediate_size": None, "num_hidden_layers": 2 * plain.num_hidden_layers}
    return ModelConfig.from_dict({**fields, "mixer": mixer})


def measure(
    names: list[str],
    quick: bool,
    seconds: float,
    tick: Callable[[str], None],
    formats: tuple[str, ...] = FORMATS,
) -> list[dict[str, Any]]:
    """Tokens a second of each mixer and format, beside its bound."""
    from gsa.infer import Model

    rows = []
    for name in names:
        lm = decode_model.random_model(shape_of(name, quick))
        for format in formats:
            tick(f"a token of {name} in {format}")
            rows.append({"mixer": name, "weights": format, **_measured(Model.load(lm, format), quick, seconds)})
    return rows


def _measured(model: Model, quick: bool, seconds: float) -> dict[str, Any]:
    """A token beside all products of it and, of attention, the reading of its cache."""
    from gsa.bench.timing import race
    from gsa.infer.runners import make_runner
    from gsa.ops.native.decode import Products
    from gsa.ops.native.linear import Reader

    here, state = make_runner(model, 1), None
    step = decode_model.token(here, [0])
    contenders: dict[str, Callable[[], object]] = {"products": Products(*decode_model.products_of(model))}
    if model.config.mixer == "hybrid":
        here.put(0, _worn(here))
        contenders["slots"] = Products(_slot_matrices(model), "fp32")
    elif model.state_bytes is None:
        state = _read(here, 128 if quick else CONTEXT)
        step = _at(here, state, step)
        contenders["cache"] = Reader([layer[part] for layer in state.layers for part in ("k", "v")])
    best = race({"token": step, **contenders}, seconds)
    bound = sum(time for name, time in best.items() if name != "token")
    return {
        "tokens_per_second": 1 / best["token"],
        "bound": 1 / bound,
        "share": bound / best["token"],
        "context": None if state is None else state.layers[0]["k"].shape[1],
    }


def _read(here: Runner, tokens: int) -> ModelState:
    """The state behind so many tokens of a random model, of which only the size matters here."""
    import torch

    empty = here.model.init_state()
    layers = []
    for layer in empty.layers:
        parts = {name: torch.randn(1, tokens, *x.shape[2:]) for name, x in layer.items() if name != "position"}
        layers.append({**parts, "position": torch.tensor([tokens])})
    return type(empty)(layers)


def _slot_matrices(model: Model) -> list[PackedWeight]:
    """Those of `hybrid` that are no linear layers, in the format that decoding reads."""
    from gsa.mixers.hybrid import Hybrid
    from gsa.ops.weights import pack

    format = "fp32" if model.weights == "fp32" else "bf16"
    mixers = [block.mixer for block in model.lm.model.layers if isinstance(block.mixer, Hybrid)]
    return [pack(x.flatten(0, 1), format) for mixer in mixers for x in (mixer.slot_router.weight, mixer.slot_query)]


def _worn(here: Runner) -> ModelState:
    """A state of a random model with a full window behind it, and slots that were written to."""
    import torch

    state = here.model.init_state()
    for layer in state.layers:
        for name, x in layer.items():
            if name == "position":
                x.fill_(CONTEXT)
            else:
                x.copy_(torch.rand(x.shape))
    return state


def _at(here: Runner, state: ModelState, step: Callable[[], object]) -> Callable[[], object]:
    """A step behind a state, which is put back from time to time; the best time is one without that."""
    done = 0

    def run() -> None:
        nonlocal done
        if done % 32 == 0:
            here.put(0, state)
        done += 1
        step()

    return run
