"""However tokens are cut, packed or padded, and whoever their neighbours are, a model says the same of them."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gsa.models import LM
from tests.examples import examples
from tests.models.cases import CASES, config, difference, ids, model

pytestmark = pytest.mark.parametrize("case", CASES)
LIMIT = 1e-4
cached = functools.cache(model)


@pytest.fixture(autouse=True)
def _no_grad() -> None:
    torch.set_grad_enabled(False)
    yield
    torch.set_grad_enabled(True)


def alone(case: str, *parts: torch.Tensor) -> torch.Tensor:
    """Logits [T, V] of one sequence, computed at once."""
    return cached(case)(torch.cat(parts)[None]).logits[0]


@examples(15)
@given(data=st.data())
def test_any_split(case: str, data: st.DataObject) -> None:
    B, T = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40))
    cuts = sorted(data.draw(st.lists(st.integers(0, T), max_size=5)))
    tokens, state, pieces = ids(B, T), None, []
    for begin, end in zip([0, *cuts], [*cuts, T], strict=True):
        if end > begin:
            output = cached(case)(tokens[:, begin:end], state)
            state = output.state
            pieces.append(output.logits)
    assert difference(torch.cat(pieces, 1), cached(case)(tokens).logits) < LIMIT


@examples(5)
@given(T=st.integers(1, 30), B=st.integers(1, 3))
def test_step_by_step(case: str, T: int, B: int) -> None:
    tokens, state, pieces = ids(B, T), cached(case).init_state(B), []
    for t in range(T):
        output = cached(case)(tokens[:, t : t + 1], state)
        state = output.state
        pieces.append(output.logits)
    assert difference(torch.cat(pieces, 1), cached(case)(tokens).logits) < LIMIT


@examples(15)
@given(data=st.data())
def test_packing_and_going_on_packed(case: str, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 15), min_size=1, max_size=5).filter(any))
    more = data.draw(st.lists(st.integers(0, 7), min_size=len(lengths), max_size=len(lengths)).filter(any))
    first, second = ([ids(n, seed=10 * i + n) for i, n in enumerate(ns)] for ns in (lengths, more))

    def packed(parts: list[torch.Tensor], state: object = None) -> object:
        borders = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)
        return cached(case)(torch.cat(parts)[None], state, cu_seqlens=borders)

    output = packed(first)
    expected = torch.cat([alone(case, part) for part in first if len(part)])
    assert difference(output.logits[0], expected) < LIMIT
    output = packed(second, output.state)
    expected = [alone(case, a, b)[len(a) :] for a, b in zip(first, second, strict=True) if len(b)]
    assert difference(output.logits[0], torch.cat(expected)) < LIMIT


@examples(15)
@given(data=st.data())
def test_padding_anywhere_and_going_on(case: str, data: st.DataObject) -> None:
    B, T = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 20))
    kinds = data.draw(st.lists(st.sampled_from(["left", "right", "anywhere"]), min_size=B, max_size=B))
    mask = torch.ones(B, T, dtype=torch.int64)
    for row, kind in enumerate(kinds):
        pads = data.draw(st.integers(0, T))
        places = {"left": range(pads), "right": range(T - pads, T)}.get(kind)
        mask[row, list(data.draw(st.sets(st.integers(0, T - 1))) if places is None else places)] = 0
    tokens, after = ids(B, T), ids(B, 4, seed=2)
    output = cached(case)(tokens, mask=mask)
    following = cached(case)(after, output.state)
    for row in range(B):
        real = tokens[row][mask[row].bool()]
        expected = alone(case, real, after[row])
        assert difference(output.logits[row][mask[row].bool()], expected[: len(real)]) < LIMIT
        assert difference(following.logits[row], expected[len(real) :]) < LIMIT
        assert torch.isfinite(output.logits[row]).all()


@examples(5)
@given(T=st.integers(1, 30), seed=st.integers(0, 100))
def test_batch_neighbours_do_not_matter(case: str, T: int, seed: int) -> None:
    tokens, others = ids(3, T), ids(3, T, seed=seed)
    others[1] = tokens[1]
    assert difference(cached(case)(tokens).logits[1], cached(case)(others).logits[1]) < LIMIT
    assert difference(cached(case)(tokens).logits[1], alone(case, tokens[1])) < LIMIT


def test_later_tokens_do_not_matter(case: str) -> None:
    tokens, changed = ids(2, 30), ids(2, 30, seed=3)
    changed[:, :17] = tokens[:, :17]
    a, b = cached(case)(tokens).logits, cached(case)(changed).logits
    assert difference(a[:, :17], b[:, :17]) < LIMIT
    assert difference(a[:, 17:], b[:, 17:]) > 0.1


def test_a_call_leaves_the_state_it_is_given(case: str) -> None:
    state = cached(case)(ids(2, 9)).state
    before = state.clone()
    for more in (ids(2, 1), ids(2, 6)):
        cached(case)(more, state)
    for layer, kept in zip(state.layers, before.layers, strict=True):
        assert all(torch.equal(layer[name], kept[name]) for name in layer)


def test_gradients_flow_through_splits_packs_and_pads(case: str) -> None:
    """In fp64: the gradient of a loss is the same whichever way the tokens are given."""
    torch.set_grad_enabled(True)
    torch.manual_seed(0)
    lm = LM(config(case)).double()
    tokens = ids(2, 23)
    weights = torch.randn(2, 23, lm.config.vocab_size, dtype=torch.float64)

    def gradients(logits: torch.Tensor, along: torch.Tensor = weights) -> list[torch.Tensor]:
        lm.zero_grad()
        (logits * along).sum().backward()
        return [p.grad.clone() for p in lm.parameters()]

    whole = gradients(lm(tokens).logits)
    first = lm(tokens[:, :9])
    middle = lm(tokens[:, 9:10], first.state)
    last = lm(tokens[:, 10:], middle.state)
    split = gradients(torch.cat([first.logits, middle.logits, last.logits], 1))
    packed = gradients(
        lm(tokens.flatten()[None], cu_seqlens=torch.tensor([0, 23, 46])).logits, weights.flatten(0, 1)[None]
    )
    padded = lm(torch.nn.functional.pad(tokens, (3, 2)), mask=torch.nn.functional.pad(torch.ones_like(tokens), (3, 2)))
    padded = gradients(padded.logits[:, 3:-2])
    for name, expected, *others in zip(dict(lm.named_parameters()), whole, split, packed, padded, strict=True):
        assert expected.abs().max() > 0, name
        for other in others:
            torch.testing.assert_close(other, expected, rtol=1e-8, atol=1e-9, msg=name)
