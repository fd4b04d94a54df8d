"""A token as one call of the native engine: against the model in fp64, against torch, and against itself in company."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gsa import LM
from gsa.errors import GSAError
from gsa.infer import Model
from gsa.infer.compiled_runner import SHORT_READ, CompiledRunner, obstacle
from gsa.infer.layers import InferenceLinear
from gsa.infer.runners import make_runner
from gsa.infer.torch_runner import TorchRunner
from gsa.mixers.attention import Attention
from gsa.models.state import ModelState
from gsa.ops.weights import FORMATS
from tests.models.cases import CASES, ids, model
from tests.ops.isas import ISAS, needs_native, used

pytestmark = needs_native
VARIANTS: dict[str, dict] = {
    "the paper's": {},
    "one key/value head": {"num_key_value_heads": 1},
    "all heads": {"num_key_value_heads": 4},
    "odd sizes": {"hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 3, "num_slots": 7},
    "wide values": {"expand_v": 2.0, "expand_k": 0.5},
    "gated output": {"output_gate": True, "output_norm": "heads"},
    "no norm": {"output_norm": "none", "output_activation": "none"},
    "scaled": {"scale": 0.3, "gate_temperature": 0.5},
    "slow": {"gate_temperature": 1000.0},
    "relu": {"feature_map": "relu", "value_activation": "relu2", "readout": "relu", "output_activation": "sigmoid"},
    "relu2": {"feature_map": "none", "readout": "relu2"},
    "swish": {"feature_map": "sigmoid", "readout": "swish", "value_activation": "none"},
    "identity": {"readout": "identity"},
    "tied": {"tie_word_embeddings": True},
    "mixed": {"mixer": "gsa,gsa(num_slots=5,readout=swish)"},
}


def variant(name: str) -> LM:
    return model("gsa", **VARIANTS[name])


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def stepped(here: CompiledRunner | TorchRunner, tokens: torch.Tensor, place: int = 0) -> torch.Tensor:
    """Logits [T, V] of tokens [T], one by one."""
    return torch.cat([here.step([token], [place]) for token in tokens.tolist()])


@pytest.mark.parametrize("name", VARIANTS)
def test_as_the_model_in_double_precision(name: str) -> None:
    lm, tokens = variant(name), ids(1, 40)
    loaded = Model.load(lm, "fp32")
    here = make_runner(loaded, 3)
    assert isinstance(here, CompiledRunner)
    here.put(1, loaded.init_state())
    found = stepped(here, tokens[0], 1)
    with torch.no_grad():
        exact = lm.double()(tokens)
    assert relative(found, exact.logits[0]) < 3e-6
    for mine, other in zip(here.take(1).layers, exact.state.layers, strict=True):
        for key, x in mine.items():
            assert relative(x, other[key]) < 3e-6


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
def test_as_torch_in_every_format_and_instruction_set(format: str, isa: str) -> None:
    loaded = Model.load(variant("tied"), format)
    mine, other = CompiledRunner(loaded, 2), TorchRunner(loaded, 2)
    for here in (mine, other):
        here.put(1, loaded.init_state())
    with used(isa):
        found, expected = (stepped(here, ids(30), 1) for here in (mine, other))
    # Activations in int8 may be rounded to a neighbour where they lie halfway.
    assert relative(found, expected) < (3e-6 if format in ("fp32", "bf16") else 3e-2)


@pytest.mark.parametrize("format", FORMATS)
def test_alone_and_in_company_bit_by_bit(format: str) -> None:
    loaded = Model.load(variant("the paper's"), format)
    texts = ids(20, 12)
    alone = []
    for text in texts:
        here = CompiledRunner(loaded, 1)
        alone.append(stepped(here, text))
    here = CompiledRunner(loaded, 20)
    order = torch.randperm(20).tolist()
    for t in range(12):
        logits = here.step([int(texts[i, t]) for i in order], order)
        for row, i in enumerate(order):
            assert torch.equal(logits[row], alone[i][t])


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 40, SHORT_READ])
def test_several_tokens_at_once_bit_by_bit(count: int) -> None:
    loaded = Model.load(variant("the paper's"), "fp32")
    one, many = CompiledRunner(loaded, 1), CompiledRunner(loaded, 3)
    tokens = ids(count)
    _, begun = many.read(ids(7, seed=2), None)
    for state in (None, begun):
        one.put(0, loaded.init_state() if state is None else state)
        logits, after = many.read(tokens, state)
        assert torch.equal(logits, stepped(one, tokens)[-1])
        for mine, other in zip(after.layers, one.take(0).layers, strict=True):
            assert all(torch.equal(mine[key], other[key]) for key in mine)
    untouched = loaded.init_state()
    for place in range(3):
        for mine, other in zip(many.take(place).layers, untouched.layers, strict=True):
            assert all(torch.equal(mine[key], other[key]) for key in mine)


@pytest.mark.parametrize(("case", "format"), [("gsa", "fp32"), ("gsa", "int8"), ("gla", "bf16"), ("hybrid", "int4")])
def test_threads_that_read_with_one_runner_do_not_meet(case: str, format: str) -> None:
    """Short texts have states of their own; for long ones, weights are unpacked to memory that all layers share."""
    here = make_runner(Model.load(model(case, hidden_size=64, intermediate_size=200), format), 1)
    texts = [ids(length, seed=length) for length in (3, 40, 64, 65, 100, 200)]
    alone = [here.read(text, None) for text in texts]

    def read_all(shift: int) -> bool:
        order = [(i + shift) % len(texts) for i in range(len(texts))] * 5
        return all(_same(here.read(texts[i], None), alone[i]) for i in order)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read_all, range(4)))


def _same(found: tuple[torch.Tensor, ModelState], expected: tuple[torch.Tensor, ModelState]) -> bool:
    pairs = zip(found[1].layers, expected[1].layers, strict=True)
    return torch.equal(found[0], expected[0]) and all(torch.equal(x[key], y[key]) for x, y in pairs for key in x)


def test_threads_change_nothing() -> None:
    lm = model("gsa", hidden_size=256, vocab_size=1000, num_slots=32)
    loaded = Model.load(lm, "fp32")
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(stepped(CompiledRunner(loaded, 1), ids(5)))
        results.append(CompiledRunner(loaded, 1).read(ids(5), None)[0][None])
    assert all(torch.equal(result[-1], results[0][-1]) for result in results)


@pytest.mark.parametrize("format", FORMATS)
def test_weights_that_torch_moves_or_frees(format: str) -> None:
    """share_memory_(), which sending a model to another process calls, puts them elsewhere; what was there is gone."""
    loaded = Model.load(variant("gated output"), format)
    here = CompiledRunner(loaded, 1)
    begin = loaded.init_state()
    before, text = stepped(here, ids(5)), here.read(ids(5), None)[0]
    weights = [layer.packed_weight.weight for layer in loaded.lm.modules() if isinstance(layer, InferenceLinear)]
    for x in (*weights, *loaded.lm.parameters()):
        x.share_memory_()
        x.data = x.data.clone()
    here.put(0, begin)
    assert torch.equal(stepped(here, ids(5)), before)
    assert torch.equal(here.read(ids(5), None)[0], text)
    for x in (weights[-1], loaded.lm.model.norm.weight):
        x.untyped_storage().resize_(x.nbytes - 1)
        with pytest.raises(GSAError, match=r"the model's .* needs .* bytes of memory"):
            here.put(0, begin)
        with pytest.raises(GSAError, match=r"the model's .* needs .* bytes of memory"):
            here.read(ids(5), None)
        x.untyped_storage().resize_(x.nbytes)


def test_places_keep_to_themselves() -> None:
    loaded = Model.load(variant("the paper's"), "fp32")
    here = CompiledRunner(loaded, 3)
    _, state = here.read(ids(70), None)
    before = state.clone()
    here.put(1, state)
    taken = here.take(1)
    here.step([5], [1])
    for changed, kept, given in zip(here.take(1).layers, taken.layers, before.layers, strict=True):
        for key in given:
            assert torch.equal(kept[key], given[key])
            assert not torch.equal(changed[key], given[key])
    assert all(torch.equal(x[key], y[key]) for x, y in zip(state.layers, before.layers, strict=True) for key in x)
    here.clear(1)
    assert all(not x.any() for layer in here.take(1).layers for x in layer.values())


def test_what_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Model.load(model("hybrid"))
    assert obstacle(loaded) is None
    assert isinstance(make_runner(loaded, 1), CompiledRunner)

    class Other(Attention):
        pass

    loaded.lm.model.layers[2].mixer.__class__ = Other
    assert obstacle(loaded) == "layer 2: its mixer is Other, which is not compiled"
    assert isinstance(make_runner(loaded, 1), TorchRunner)
    convolved = Model.load(model("gsa, convolved"))
    convolved.lm.model.layers[1].mixer.k_conv.activation = torch.tanh
    assert obstacle(convolved) == "layer 1: its activation is tanh, which is not compiled"
    monkeypatch.setattr("gsa.ops.native.library._MISSING", "it is not built")
    assert obstacle(Model.load(model("gsa"))) == "it is not built"
    assert isinstance(make_runner(Model.load(model("gsa")), 1), TorchRunner)


@pytest.mark.parametrize("case", CASES)
def test_every_mixer_steps_as_its_model_runs(case: str) -> None:
    lm, tokens = model(case), ids(2, 12)
    loaded = Model.load(lm, "fp32")
    here = make_runner(loaded, 4)
    states = [here.read(text[:5], None)[1] for text in tokens]
    here.put(3, states[0])
    here.put(1, states[1])
    found = torch.stack([here.step(tokens[:, t].tolist(), [3, 1]) for t in range(5, 12)], 1)
    with torch.no_grad():
        expected = lm(tokens).logits[:, 5:]
    assert relative(found, expected) < 1e-4
