"""Agreement with an independent implementation: flash-linear-attention's own references, on their own shapes."""

import pytest
import torch
from torch.nn.functional import logsigmoid

from gsa.ops import SlotState, attention_with_bounded_memory, backends, gated_linear_attention, gated_slot_attention
from tests.fla_naive import naive
from tests.ops.cases import relative_error

pytestmark = pytest.mark.parametrize("engine", backends())
B, T, H, HQ, K, V, M = 2, 130, 2, 4, 32, 16, 8
# Every engine is compared with our own reference elsewhere; interpreted, one operation is enough here.
not_interpreted = pytest.mark.quick_if_interpreted(engine=[])


def qkv(heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(B, T, heads, K), torch.randn(B, T, H, K), torch.randn(B, T, H, V)


def gates(width: int) -> torch.Tensor:
    return logsigmoid(torch.randn(B, T, H, width)) / 8


def test_gsa(engine: str) -> None:
    q, k, v = qkv(HQ)
    s, g = torch.rand(B, T, H, M), gates(M)
    initial = SlotState(torch.randn(B, H, K, M), torch.randn(B, H, M, V))
    fla = naive("gsa").naive_recurrent_gsa
    expected, final = fla(q, k, v, s, g, initial_state=tuple(initial), output_final_state=True)
    o, state = gated_slot_attention(q, k, v, g, s, initial_state=initial, output_final_state=True, backend=engine)
    assert state is not None
    assert relative_error(o, expected) < 1e-5
    assert relative_error(state.k, final[0]) < 1e-5
    assert relative_error(state.v, final[1]) < 1e-5


@not_interpreted
def test_gla(engine: str) -> None:
    q, k, v = qkv(H)
    gk, initial = gates(K), torch.randn(B, H, K, V)
    expected, final = naive("gla").naive_recurrent_gla(q, k, v, gk, initial_state=initial, output_final_state=True)
    o, state = gated_linear_attention(q, k, v, gk=gk, initial_state=initial, output_final_state=True, backend=engine)
    assert state is not None
    assert relative_error(o, expected) < 1e-5
    assert relative_error(state, final) < 1e-5


@not_interpreted
def test_retention(engine: str) -> None:
    q, k, v = qkv(H)
    decay = torch.log1p(-(2.0 ** (-5 - torch.arange(H))))[None, None, :, None].expand(B, T, H, 1)
    expected = naive("retention").naive_retention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    o, _ = gated_linear_attention(q, k, v, gk=decay, backend=engine)
    assert relative_error(o, expected) < 1e-5


@not_interpreted
def test_abc(engine: str) -> None:
    q, k, v = qkv(H)
    w = torch.randn(B, T, H, M)
    heads_first = [x.transpose(1, 2) for x in (q, k, v, w)]
    o, state = attention_with_bounded_memory(q, k, v, w, normalise=True, output_final_state=True, backend=engine)
    assert state is not None
    expected, final = naive("abc").naive_recurrent_abc(*heads_first, output_final_state=True)
    assert relative_error(o, expected.transpose(1, 2)) < 1e-5
    assert relative_error(state.k, final[0]) < 1e-5
    assert relative_error(state.v, final[1]) < 1e-5
    expected, _ = naive("abc").naive_cumsum_abc(*heads_first)
    assert relative_error(o, expected.transpose(1, 2)) < 1e-5
