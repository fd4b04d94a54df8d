"""Rotary positions by themselves."""

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from gsa.mixers.rotary import Rope, rotate


def test_rotary_positions_have_every_derivative() -> None:
    x, positions = torch.randn(2, 5, 3, 8, dtype=torch.float64, requires_grad=True), torch.arange(5)[None]

    def run(x: Tensor) -> Tensor:
        return rotate(x, positions, Rope(100.0))

    assert torch.autograd.gradcheck(run, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, x)
    torch.testing.assert_close(torch.func.vmap(run)(x[None])[0], run(x))
    by_func = torch.func.grad(lambda x: run(x).square().sum())(x)
    torch.testing.assert_close(by_func, 2 * x)  # a turn changes no length


@pytest.mark.parametrize(
    ("rope", "parameters"),
    [
        (Rope(500.0), {"rope_type": "default"}),
        (Rope(500.0, 4.0), {"rope_type": "linear", "factor": 4.0}),
        (
            Rope(500.0, 8.0, 64, 1.0, 4.0),
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        ),
    ],
)
def test_frequencies_are_those_of_transformers(rope: Rope, parameters: dict) -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=1, rope_parameters={"rope_theta": 500.0, **parameters})
    found = rope.frequencies(32, None, torch.float64)
    torch.testing.assert_close(found.float(), LlamaRotaryEmbedding(config).inv_freq)
    assert (rope.factor == 1) == torch.equal(found, Rope(500.0).frequencies(32, None, torch.float64))
