"""Every mixer and option as compiled steps: against torch's, alone and in company, in pieces, and as snapshots."""

import pytest
import torch

from gsa import LM
from gsa.errors import GSAError
from gsa.infer import Model
from gsa.infer.compiled_runner import CompiledRunner, obstacle
from gsa.infer.runner import Runner
from gsa.infer.runners import make_runner
from gsa.infer.torch_runner import TorchRunner
from gsa.mixers.activations import FEATURE_MAPS
from gsa.mixers.registry import MIXERS
from gsa.models.state import ModelState
from gsa.ops.native.structs import CACHE_BLOCK
from gsa.ops.weights import FORMATS
from tests.models.cases import CASES, ids, model
from tests.ops.isas import ISAS, needs_native, used

pytestmark = needs_native
ODD = {"hidden_size": 60, "num_attention_heads": 6}
"""Widths that are no multiples of a vector."""
SLOTS = {"mixer": "hybrid", "window": 5, "num_sinks": 2, "num_slots": 8}
VARIANTS: dict[str, tuple[str, dict]] = {
    **{case: (case, {}) for case in CASES},
    **{
        f"feature map {name}": ("linear", {"feature_map": name, "num_key_value_heads": 1})
        for name in FEATURE_MAPS
        if name != "elu1"
    },
    **{
        f"activation {name}": ("gsa", {"value_activation": name, "output_activation": name})
        for name in ("none", "relu", "relu2", "gelu", "sigmoid", "elu1")
    },
    "gsa, odd": ("gsa", {**ODD, "num_key_value_heads": 3, "num_slots": 37, "conv_size": 2}),
    "gsa, biases": ("gsa", {"gate_bias": True, "qkv_bias": True, "conv_size": 3}),
    "gsa, constant, odd": ("gsa, constant gate", {**ODD, "num_slots": 5, "output_gate": True}),
    "gsa, no gate, odd": ("gsa, no gate", {**ODD, "num_slots": 5, "feature_map": "t2r"}),
    "gsa, router, odd": ("gsa, router", {**ODD, "num_key_value_heads": 3, "num_slots": 37, "routed_slots": 5}),
    "gsa, router, all slots": ("gsa, router, gate of heads", {"router": "sigmoid", "routed_slots": 8}),
    "gsa, router, one slot": ("gsa, router", {"router": "softmax", "routed_slots": 1, "gate_bias": True}),
    "gsa, seven queries": ("gsa", {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1}),
    "abc, odd": ("abc", {**ODD, "num_key_value_heads": 2, "expand_k": 2.0, "num_slots": 33, "gate_clamp": 0.5}),
    "abc, no positions": ("abc", {"rope_theta": 0.0, "gate_clamp": 0.0, "output_gate": False}),
    "abc, growing, no limit": ("abc, growing", {"gate_clamp": 0.0, "conv_bias": True}),
    "gla, odd": ("gla", {**ODD, "expand_k": 0.5, "gate_rank": 3, "conv_size": 3, "output_norm": "full"}),
    "gla, plain": ("gla", {"output_gate": False, "output_norm": "none", "scale": 0.7}),
    "hgrn2, odd": ("hgrn2", {**ODD, "num_attention_heads": 4, "scale": 1.0}),
    "hgrn2, unbounded": ("hgrn2", {"lower_bound": False}),
    "retnet, odd": ("retnet", {**ODD, "num_key_value_heads": 3, "expand_v": 1.5, "conv_size": 4, "conv_bias": True}),
    "retnet, no decay": ("retnet", {"decay": "none", "rope_theta": 500.0}),
    "supra, odd": ("supra", {**ODD, "num_key_value_heads": 3}),
    "linear, decaying": ("linear", {"decay": "fixed"}),
    "mamba, odd": ("mamba", {"hidden_size": 36, "expand": 1.5, "ssm_state_size": 5, "time_step_rank": 3}),
    "mamba, plain": ("mamba", {"conv_bias": False, "conv_size": 2}),
    "attention, odd": ("attention", {**ODD, "num_key_value_heads": 1, "qkv_bias": True, "qk_norm": True}),
    "attention, wide": ("attention", {"head_dim": 70, "rope_theta": 0.0}),
    "attention, all heads": ("attention", {"num_key_value_heads": 4, "qk_norm": True, "qk_norm_eps": 1e-3}),
    "window 1": ("attention, window", {"window": 1}),
    "window 2": ("attention, window", {"window": 2, "num_key_value_heads": 2, "qkv_bias": True}),
    "hybrid, positions of the window": (
        "attention",
        {**SLOTS, "slot_positions": "window", "num_sinks": 0, "num_slots": 40},
    ),
    "hybrid, odd": (
        "attention",
        {**SLOTS, **ODD, "num_key_value_heads": 1, "num_slots": 37, "window": 3, "qkv_bias": True, "qk_norm": True},
    ),
    "hybrid, wide": ("attention", {**SLOTS, "head_dim": 35, "rope_theta": 0.0, "window": 1, "num_sinks": 1}),
    "hybrid, all heads": (
        "attention",
        {**SLOTS, "num_key_value_heads": 4, "num_slots": 5, "slot_router": "gates", "gate_temperature": 0.5},
    ),
    "pattern": (
        "gsa",
        {
            "mixer": "gsa,attention(window=6),mamba,hybrid(window=4),hgrn2,retnet(rope_theta=9),attention",
            "num_hidden_layers": 7,
        },
    ),
}
QUICK = (
    "gsa, no gate, odd",
    "gsa, router, odd",
    "gsa, router, gate of heads",
    "abc, odd",
    "gla, odd",
    "hgrn2, odd",
    "retnet, odd",
    "supra, odd",
    "mamba, odd",
    "hybrid, odd",
    "pattern",
)
EVERY = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]


def variant(name: str) -> LM:
    """With biases and shared parameters that are not as they begin."""
    case, more = VARIANTS[name]
    lm = model(case, **more)
    generator = torch.Generator().manual_seed(3)
    for key, x in lm.named_parameters():
        if key.endswith("bias") or "lower_bounds" in key or "norm" in key or "slot_" in key:
            x.data += torch.rand(x.shape, generator=generator) * (0.1 if x.dim() > 2 else 1)
    return lm


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-9))


def compare(found: ModelState, expected: ModelState, tolerance: float) -> None:
    """Names, types, shapes and numbers."""
    for mine, other in zip(found.layers, expected.layers, strict=True):
        assert list(mine) == list(other)
        for key, x in mine.items():
            assert (x.dtype, x.shape) == (other[key].dtype, other[key].shape), key
            if tolerance == 0 or not x.is_floating_point():
                assert torch.equal(x, other[key]), key
            else:
                assert x.is_contiguous()
                assert relative(x, other[key]) < tolerance, key


def stepped(here: Runner, tokens: torch.Tensor, place: int = 0) -> torch.Tensor:
    """Logits [T, V] of tokens [T], one by one."""
    return torch.cat([here.step([token], [place]) for token in tokens.tolist()])


def beside_torch(name: str, format: str, tokens: int = 24) -> None:
    loaded = Model.load(variant(name), format)
    assert obstacle(loaded) is None
    mine, other = CompiledRunner(loaded, 2), TorchRunner(loaded, 2)
    for here in (mine, other):
        here.put(1, loaded.init_state())
    found, expected = (stepped(here, ids(tokens), 1) for here in (mine, other))
    # Activations in int8 may be rounded to a neighbour where they lie halfway, and that goes on through the layers.
    tolerance = 1e-5 if format in ("fp32", "bf16") else 6e-2
    assert relative(found, expected) < tolerance
    compare(mine.take(1), other.take(1), tolerance)


@pytest.mark.parametrize("name", EVERY)
def test_as_torch(name: str) -> None:
    beside_torch(name, "fp32")


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("isa", ISAS)
def test_as_torch_in_every_format_and_instruction_set(format: str, isa: str) -> None:
    with used(isa):
        for name in VARIANTS:
            beside_torch(name, format, 8)


@pytest.mark.parametrize("name", EVERY)
def test_alone_and_in_company_bit_by_bit(name: str) -> None:
    """Sequences of different lengths, in other places and in changing company."""
    loaded = Model.load(variant(name), "bf16")
    texts = ids(5, 20)
    begins = [3 * i + 1 for i in range(5)]
    alone = []
    for text, begin in zip(texts, begins, strict=True):
        here = CompiledRunner(loaded, 1)
        stepped(here, text[:begin])
        alone.append(stepped(here, text[begin : begin + 6]))
    together = CompiledRunner(loaded, 7)
    for i, begin in enumerate(begins):
        stepped(together, texts[i, :begin], 6 - i)
    for t in range(6):
        order = torch.randperm(5, generator=torch.Generator().manual_seed(t)).tolist()[: 5 - t % 2]
        missing = [i for i in range(5) if i not in order]
        for some in (order, missing):
            if some:
                logits = together.step([int(texts[i, begins[i] + t]) for i in some], [6 - i for i in some])
                assert all(torch.equal(logits[row], alone[i][t]) for row, i in enumerate(some))


@pytest.mark.parametrize("name", EVERY)
def test_several_tokens_at_once_and_snapshots(name: str) -> None:
    """A text read in pieces gives what it gives token by token; a snapshot goes on in either runner."""
    loaded = Model.load(variant(name), "fp32")
    mine, other = CompiledRunner(loaded, 2), TorchRunner(loaded, 1)
    text = ids(40)
    _, state = mine.read(text[:7], None)
    logits, after = mine.read(text[7:30], state)
    mine.put(1, loaded.init_state())
    stepped(mine, text[:7], 1)
    compare(mine.take(1), state, 0)
    mine.put(1, state)
    assert torch.equal(stepped(mine, text[7:30], 1)[-1], logits)
    compare(mine.take(1), after, 0)
    other.put(0, after)
    expected = stepped(other, text[30:36])
    assert relative(stepped(mine, text[30:36], 1), expected) < 1e-5
    mine.put(0, other.take(0))
    assert relative(stepped(mine, text[36:], 0), stepped(mine, text[36:], 1)) < 1e-5
    mine.clear(1)
    compare(mine.take(1), loaded.init_state(), 0)


def test_every_mixer_is_compared() -> None:
    """One that is new has to join; and each option of these."""
    used = {options.mixer for name in VARIANTS for options in variant(name).config.layers}
    assert used == set(MIXERS)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(threads: int) -> None:
    for name in ("gsa, odd", "retnet, odd", "mamba, odd", "attention, odd", "hybrid, odd", "pattern"):
        loaded, found = Model.load(variant(name), "fp32"), []
        for count in (1, threads):
            torch.set_num_threads(count)
            here = CompiledRunner(loaded, 1)
            _, state = here.read(ids(50), None)
            here.put(0, state)
            found.append(stepped(here, ids(3)))
        assert torch.equal(*found), name


def cached(lm: LM, tokens: int) -> tuple[Model, ModelState]:
    """A model of attention, and a state of so many tokens that nobody has read."""
    loaded = Model.load(lm, "fp32")
    layers = []
    for layer in loaded.init_state().layers:
        held = {key: torch.randn(1, tokens, *x.shape[2:]) for key, x in layer.items() if key != "position"}
        layers.append({**held, "position": torch.tensor([tokens])})
    return loaded, ModelState(layers)


@pytest.mark.parametrize("begin", [CACHE_BLOCK - 4, 2 * CACHE_BLOCK - 1, 4 * CACHE_BLOCK])
def test_caches_grow_where_they_are_full(begin: int) -> None:
    """Past the borders of blocks and rings, in company of an empty one, and in pieces of 16."""
    torch.manual_seed(0)
    loaded, state = cached(model("attention", num_hidden_layers=2), begin)
    mine, other = CompiledRunner(loaded, 2), TorchRunner(loaded, 1)
    mine.put(0, state)
    mine.put(1, loaded.init_state())
    other.put(0, state)
    found = torch.cat([mine.step([token, 3], [0, 1])[:1] for token in ids(20).tolist()])
    assert relative(found, stepped(other, ids(20))) < 1e-5
    compare(mine.take(0), other.take(0), 1e-5)
    logits, after = mine.read(ids(20), state)
    assert torch.equal(logits, found[-1])
    compare(after, mine.take(0), 0)


@pytest.mark.parametrize("window", [3, CACHE_BLOCK - 15, CACHE_BLOCK - 14, CACHE_BLOCK + 1])
def test_windows_wrap_around(window: int) -> None:
    """A ring is left and entered again at every border; states hold what a window holds, and nothing else."""
    torch.manual_seed(0)
    lm = model("attention, window", num_hidden_layers=2, window=window)
    loaded, mine, other, state = Model.load(lm, "fp32"), None, None, None
    mine, other = CompiledRunner(loaded, 1), TorchRunner(loaded, 1)
    text = ids(3 * CACHE_BLOCK + 10)
    for begin in range(0, len(text), 60):
        logits, state = mine.read(text[begin : begin + 60], state)
        if begin % 120:
            mine.put(0, state)
    assert state is not None
    assert state.layers[0]["k"].shape[1] == window - 1
    with torch.no_grad():
        exact = lm.double()(text[None])
    assert relative(logits, exact.logits[0, -1]) < 1e-5
    other.put(0, state)
    mine.put(0, state)
    assert relative(stepped(mine, ids(8)), stepped(other, ids(8))) < 1e-5
    compare(mine.take(0), other.take(0), 1e-5)


def test_places_before_the_first_token_are_not_seen() -> None:
    """A state of a padded batch begins with unused places."""
    torch.manual_seed(0)
    loaded, state = cached(model("attention"), 6)
    for layer in state.layers:
        layer["position"] -= 2
        layer["k"][:, :2], layer["v"][:, :2] = float("nan"), float("nan")
    clean = state.map(lambda x: x[:, 2:] if x.dim() > 1 else x)
    mine = CompiledRunner(loaded, 2)
    mine.put(0, state)
    mine.put(1, clean)
    logits = mine.step([4, 4], [0, 1])
    assert logits.isfinite().all()
    assert torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("position", [-1, 2**62, -(2**63)])
def test_a_count_of_tokens_that_cannot_be(position: int) -> None:
    loaded, state = cached(model("attention"), 3)
    for layer in state.layers:
        layer["position"].fill_(position)
    with pytest.raises(GSAError, match=f"expected a count of tokens as the position of attention, got {position}"):
        CompiledRunner(loaded, 1).put(0, state)


def test_far_positions_turn_as_in_fp64() -> None:
    """In fp32, angles at a position of ten million would be off by whole turns."""
    torch.manual_seed(0)
    loaded, state = cached(model("attention", rope_theta=1e6, hidden_size=64), 5)
    for layer in state.layers:
        layer["position"].fill_(10_000_019)
    mine, other = CompiledRunner(loaded, 1), TorchRunner(loaded, 1)
    for here in (mine, other):
        here.put(0, state)
    assert relative(stepped(mine, ids(4)), stepped(other, ids(4))) < 1e-5


def test_a_normaliser_does_not_stop_growing() -> None:
    """In fp32, log z of many equal writes stays where it is as soon as one more is less than a rounding."""
    loaded = Model.load(model("abc", gate_clamp=1e-6, num_hidden_layers=1), "fp32")
    mine = CompiledRunner(loaded, 1)
    state = loaded.init_state()
    state.layers[0]["log_z"].fill_(16.0)  # of e^16 tokens, where a write adds 1e-7
    mine.put(0, state)
    for _ in range(40):
        mine.step([1], [0])
    grown = mine.take(0).layers[0]["log_z"] - 16
    assert torch.allclose(grown, torch.full_like(grown, 40 * torch.tensor(-16.0).exp()), atol=1e-6)
    assert (grown > 0).all()


def test_whatever_torch_makes_by_default() -> None:
    """Caches are what C++ takes them for, whatever dtype and device are torch's defaults."""
    loaded = Model.load(model("attention"), "fp32")
    expected = make_runner(loaded, 1).read(ids(20), None)[0]
    torch.set_default_dtype(torch.float64)
    try:
        found = make_runner(loaded, 1).read(ids(20), None)[0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


def test_weights_that_moved_are_followed_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Model.load(model("gsa"), "fp32")
    runner = make_runner(loaded, 1)
    expected = runner.read(ids(20), None)[0]
    loaded.lm.share_memory()
    with monkeypatch.context() as broken:
        broken.setattr("gsa.infer.compiled_runner.described", lambda backbone: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runner.read(ids(20), None)
    assert torch.equal(runner.read(ids(20), None)[0], expected)
    assert runner._addresses == runner._look()
