"""What prompts are computed in: the choice, its error, and that one prompt always gives the same bits."""

import pytest
import torch
from torch.nn import functional as F

import gsa
from gsa.bench.decode_loss import of_a_book
from gsa.errors import GSAError
from gsa.infer import Engine, Model, Sampling, State
from gsa.infer.compute import AUTO, automatic, check_compute, chosen_compute
from gsa.infer.layers import InferenceLinear
from gsa.infer.runners import make_runner
from gsa.models.state import ModelState
from gsa.ops.matmul import UNITS
from tests.models.cases import CASES, ids, model
from tests.ops.isas import needs_native, used

pytestmark = needs_native

BARS = {"bf16": 0.001, "int8": 0.005}  # nats


@pytest.fixture
def units_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units for everybody: where the CPU has none, plain code that gives the same bits."""
    from gsa.ops import matmul as operator
    from gsa.ops.native import matmul as native

    lacking = {compute for compute in UNITS if not native.has_unit(compute)}
    compiled = native.matmul
    monkeypatch.setattr(native, "has_unit", lambda compute: True)
    monkeypatch.setattr(
        operator.native,
        "matmul",
        lambda weights, x, count, compute, *rest: compiled(
            weights, x, count, f"{compute}-portable" if compute in lacking else compute, *rest
        ),
    )


def losses(loaded: Model, texts: torch.Tensor) -> float:
    """Mean loss of texts [N, T] that are read as prompts are, with the scores of every token."""
    lm, total = loaded.lm, 0.0
    for text in texts:
        with torch.inference_mode():
            x, _ = lm.model(text[None, :-1])
            logits = F.linear(x[0], loaded.lm.lm_head.packed_weight.unpack())
            total += float(F.cross_entropy(logits, text[1:]))
    return total / len(texts)


@pytest.mark.parametrize(
    ("weights", "compute"), [("bf16", "bf16"), ("fp32", "bf16"), ("int8", "int8"), ("int4", "int8")]
)
def test_loss(units_anywhere: None, weights: str, compute: str) -> None:
    """On the book in the package, beside the same weights in fp32."""
    texts = of_a_book(200)[:6]
    plain, fast = (losses(Model.load("gsa-tiny", weights, compute=way), texts) for way in ("fp32", compute))
    assert 0 < abs(fast - plain) <= BARS[compute]


@pytest.mark.parametrize("case", CASES)
def test_every_mixer(units_anywhere: None, case: str) -> None:
    """Reads close to fp32, and nothing in it stays fp32 by mistake."""
    lm, tokens = model(case), ids(100)
    for weights, compute, bound in (("bf16", "bf16", 0.03), ("int8", "int8", 0.06)):
        expected, found = (
            make_runner(Model.load(lm, weights, compute=way), 1).read(tokens, None)[0] for way in ("fp32", compute)
        )
        assert 0 < float((found - expected).norm() / expected.norm()) < bound, compute


def test_one_prompt_gives_the_same_bits(units_anywhere: None) -> None:
    """Whatever else runs, and in any number of threads."""
    prompts = [ids(length).tolist() for length in (100, 700, 90, 530)]
    for weights, compute in (("bf16", "bf16"), ("int8", "int8")):
        loaded = Model.load(model("gsa"), weights, compute=compute)
        settings = Sampling(max_tokens=3, temperature=0, logprobs=1)
        together = Engine(loaded, batch_size=4).generate(prompts, settings, keep_state=True)
        torch.set_num_threads(1)
        alone = [Engine(loaded, batch_size=1).generate(prompt, settings, keep_state=True) for prompt in prompts]
        torch.set_num_threads(2)
        for one, other in zip(together, alone, strict=True):
            assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)
            assert one.state is not None
            assert other.state is not None
            assert _equal(one.state.model, other.state.model)


def _equal(one: ModelState, other: ModelState) -> bool:
    pairs = zip(one.tensors().values(), other.tensors().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def test_a_state_goes_on_with_any_compute(units_anywhere: None, tmp_path: pytest.TempPathFactory) -> None:
    """A file tells nothing of it, and serves them all."""
    file = tmp_path / "state"  # type: ignore[operator]
    Engine("gsa-tiny", weights="bf16", compute="bf16").read(ids(80).tolist()).save(file)
    for weights, compute in (("bf16", "fp32"), ("int8", "int8")):
        other = Engine("gsa-tiny", weights=weights, compute=compute)
        state = State.load(file, other.model)
        assert other.read(ids(80).tolist(), state).tokens == 160


def test_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gsa.infer.compute.missing_unit", lambda compute: None)
    assert {weights: automatic(weights) for weights in AUTO} == AUTO
    assert AUTO["fp32"] == "fp32"
    monkeypatch.setattr("gsa.infer.compute.missing_unit", lambda compute: "there is none")
    assert {automatic(weights) for weights in AUTO} == {"fp32"}


def test_auto_in_a_lower_instruction_set() -> None:
    with used("baseline"):
        loaded = Model.load("gsa-tiny")
        assert (loaded.weights, loaded.compute) == ("bf16", "fp32")
        assert {layer.compute for layer in loaded.lm.modules() if isinstance(layer, InferenceLinear)} == {"fp32"}


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GSAError, match="Model: unknown compute 'fp64'; expected one of auto, fp32, bf16, int8"):
        gsa.load("gsa-tiny", compute="fp64")
    monkeypatch.setattr("gsa.infer.compute.missing_unit", lambda compute: None)
    for weights in ("bf16", "fp32"):
        with pytest.raises(GSAError, match=f"compute int8 needs weights in int8 or int4, got {weights}"):
            chosen_compute("int8", weights)
    with pytest.raises(GSAError, match="engine: compute 'bf16' was asked for, the model has 'fp32'"):
        Engine(Model.load("gsa-tiny", compute="fp32"), compute="bf16")
    monkeypatch.setattr("gsa.infer.compute.missing_unit", lambda compute: f"this CPU has no {UNITS[compute]}")
    for compute, name in UNITS.items():
        expected = f"Model: compute {compute} was asked for, and this CPU has no {name}; auto and fp32 run everywhere"
        with pytest.raises(GSAError, match=expected):
            check_compute(compute, "int8")
