"""torch.export: one graph for every length, with padding, with a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ShapesCollection, export
from torch.utils import _pytree as pytree

from gsa import GSACache, GSAForCausalLM
from tests.models.hf_models import assert_same, left_padded, tiny_model, tokens


class Reads(nn.Module):
    """Logits and cache of tokens, from a cache if there is one."""

    def __init__(self, model: GSAForCausalLM):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor | None, past: GSACache | None) -> tuple[Tensor, GSACache]:
        output = self.model(ids, attention_mask=mask, past_key_values=past, use_cache=True)
        return output.logits, output.past_key_values


def test_a_cache_is_a_tree_of_its_tensors() -> None:
    model = tiny_model("hybrid")
    cache = model(tokens(2, 5)).past_key_values
    leaves, spec = pytree.tree_flatten(cache)
    parts = [x for layer in cache.state.layers for x in layer.values()]
    assert all(leaf is x for leaf, x in zip(leaves, [*parts, 5], strict=True))
    again = pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(spec)))
    assert (type(again), again.seen) == (GSACache, 5)
    ids = tokens(2, 3)
    assert torch.equal(model(ids, past_key_values=again).logits, model(ids, past_key_values=cache).logits)
    empty = pytree.tree_map(lambda x: x, GSACache())
    assert (empty.state, empty.seen) == (None, 0)
    names = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(cache)[0]]
    assert names[0] == ".state[0]['k']"
    assert names[-1] == ".seen"


def check(model: GSAForCausalLM, padded: bool, continued: bool, rows: int, lengths: tuple[int, ...]) -> None:
    """One graph, made from a short text, answers as the model does for texts of all these lengths."""

    def arguments(length: int) -> tuple[Any, ...]:
        ids, mask = left_padded([length, length - 2][:rows])
        past = None
        if continued:
            first, first_mask = left_padded([6, 4][:rows])
            with torch.no_grad():
                past = model(first, attention_mask=first_mask if padded else None).past_key_values
        return ids, mask if padded else None, past

    example, shapes = arguments(7), ShapesCollection()
    for tensor in example[:2]:
        if tensor is not None:
            shapes[tensor] = (Dim.STATIC, Dim.DYNAMIC)
    graph = export(Reads(model), example, dynamic_shapes=shapes).module()
    for length in lengths:
        ids, mask, past = arguments(length)
        found, after = graph(ids, mask, past)
        expected, cache = Reads(model)(ids, mask, past)  # after the graph: this advances the cache
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        assert_same(found[real], expected[real])
        more = tokens(rows, 3)
        assert_same(model(more, past_key_values=after).logits, model(more, past_key_values=cache).logits)


@pytest.mark.parametrize(
    ("name", "padded", "continued", "rows"),
    [
        ("gsa", False, False, 1),  # the states that are kept for the pass backward are one, or several
        ("gsa", True, True, 2),
        ("hybrid", True, True, 2),
        pytest.param("hybrid", False, True, 2, marks=pytest.mark.slow),
        pytest.param("hybrid mixer", True, True, 2, marks=pytest.mark.slow),
        pytest.param("window", True, False, 2, marks=pytest.mark.slow),
        pytest.param("attention", True, False, 2, marks=pytest.mark.slow),
        pytest.param("mamba", False, False, 1, marks=pytest.mark.slow),
    ],
)
def test_one_graph_serves_every_length(name: str, padded: bool, continued: bool, rows: int) -> None:
    changes = {} if name == "hybrid" else {"num_hidden_layers": 1}
    check(tiny_model(name, **changes), padded, continued, rows, (4, 40, 300))
