"""Tiny models in transformers' clothes, one for every mixer and kind of gate, and what tests of them share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gsa import GSAConfig, GSAForCausalLM

PAD, VOCABULARY = 0, 60
MIXERS: dict[str, dict[str, Any]] = {
    "gsa": {"num_attention_heads": 4, "num_key_value_heads": 2, "num_slots": 8, "conv_size": 3, "conv_bias": True},
    "gsa-constant": {"mixer": "gsa", "gate": "constant", "num_attention_heads": 2, "num_slots": 8},
    "gsa-none": {"mixer": "gsa", "gate": "none", "num_attention_heads": 2, "num_slots": 8},
    "abc": {"mixer": "abc", "num_attention_heads": 2, "num_slots": 8},
    "gla": {"mixer": "gla", "num_attention_heads": 2},
    "hgrn2": {"mixer": "hgrn2", "num_attention_heads": 2},
    "retnet": {"mixer": "retnet", "num_attention_heads": 2},
    "supra": {"mixer": "supra", "num_attention_heads": 2},
    "linear": {"mixer": "linear", "num_attention_heads": 2},
    "mamba": {"mixer": "mamba", "intermediate_size": None, "ssm_state_size": 4},
    "attention": {"mixer": "attention", "num_attention_heads": 4, "num_key_value_heads": 2},
    "window": {"mixer": "attention", "num_attention_heads": 2, "window": 5},
    "hybrid mixer": {"mixer": "hybrid", "num_attention_heads": 2, "window": 4, "num_sinks": 2, "num_slots": 8},
    "hybrid": {
        "mixer": "gsa,attention(window=5),mamba",
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_slots": 8,
    },
}
every_mixer = pytest.mark.parametrize("name", MIXERS)


def tiny_config(name: str, **changes: Any) -> GSAConfig:
    """The config of a tiny model; weights are large, so that which token comes next is decided clearly."""
    base = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "initializer_range": 0.3,
        "pad_token_id": PAD,
    }
    return GSAConfig(**{**base, **MIXERS[name], **changes})


def tiny_model(name: str, **changes: Any) -> GSAForCausalLM:
    """A tiny model that does not train, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return GSAForCausalLM(tiny_config(name, **changes)).eval()


def tokens(rows: int, length: int) -> Tensor:
    """Random tokens [rows, length], no pads among them."""
    return torch.randint(1, VOCABULARY, (rows, length))


def left_padded(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Random tokens in rows of these lengths, with pads on the left up to the longest, and the mask."""
    width = max(lengths)
    mask = torch.stack([torch.arange(width) >= width - length for length in lengths]).long()
    return torch.where(mask.bool(), tokens(len(lengths), width), PAD), mask


def extended(mask: Tensor, length: int) -> Tensor:
    """The mask of a batch that has grown to this length."""
    return torch.nn.functional.pad(mask, (0, length - mask.shape[1]), value=1)


@torch.no_grad()
def uncached_logits(model: GSAForCausalLM, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """The logits of one call over the whole batch: what every other way must agree with."""
    return model(ids, attention_mask=mask, use_cache=False).logits


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Equal up to the rounding of float32."""
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
