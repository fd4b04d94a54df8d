"""Small models of every kind, and how far two computations of one thing may be apart."""

import torch

from gsa.models import LM, ModelConfig

VOCABULARY = 50
CASES: dict[str, dict] = {
    "gsa": {"mixer": "gsa", "num_attention_heads": 4, "num_key_value_heads": 2, "num_slots": 8},
    "gsa, convolved": {"mixer": "gsa", "num_attention_heads": 2, "num_slots": 8, "conv_size": 4, "conv_bias": True},
    "gsa, constant gate": {"mixer": "gsa", "num_attention_heads": 2, "num_slots": 8, "gate": "constant"},
    "gsa, no gate": {"mixer": "gsa", "num_attention_heads": 2, "num_slots": 8, "gate": "none"},
    "gsa, router": {
        "mixer": "gsa",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_slots": 9,
        "router": "sigmoid",
        "routed_slots": 3,
        "router_noise": 0,
    },
    "gsa, router, gate of heads": {
        "mixer": "gsa",
        "num_attention_heads": 2,
        "num_slots": 8,
        "router": "softmax",
        "routed_slots": 2,
        "router_noise": 0,
        "gate": "head",
        "qk_norm": True,
    },
    "abc": {"mixer": "abc", "num_slots": 8},
    "abc, growing": {"mixer": "abc", "num_slots": 8, "normalise": False, "conv_size": 3},
    "gla": {"mixer": "gla", "num_key_value_heads": 2},
    "hgrn2": {"mixer": "hgrn2", "num_attention_heads": 4},
    "hgrn2, convolved": {"mixer": "hgrn2", "num_attention_heads": 4, "conv_size": 3, "lower_bound": False},
    "retnet": {"mixer": "retnet", "num_attention_heads": 4, "num_key_value_heads": 2},
    "supra": {"mixer": "supra", "num_attention_heads": 4},
    "linear": {"mixer": "linear", "num_attention_heads": 4, "num_key_value_heads": 2},
    "mamba": {"mixer": "mamba"},
    "attention": {"mixer": "attention", "num_attention_heads": 4, "num_key_value_heads": 2},
    "attention, window": {"mixer": "attention", "num_attention_heads": 4, "window": 5},
    "hybrid mixer": {
        "mixer": "hybrid",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "window": 3,
        "num_sinks": 1,
        "num_slots": 4,
    },
    "hybrid": {
        "mixer": "gsa*2,attention(window=4,num_attention_heads=2)",
        "num_attention_heads": 4,
        "num_slots": 8,
    },
}


def config(case: str, **more: object) -> ModelConfig:
    """Wide fresh weights, so that what a token says of another is large, and an epsilon that keeps norms of almost
    nothing from blowing up rounding errors."""
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "vocab_size": VOCABULARY,
        "initializer_range": 0.2,
        "rms_norm_eps": 1e-2,
    }
    return ModelConfig(**{**sizes, **CASES[case], **more})


def model(case: str, **more: object) -> LM:
    torch.manual_seed(0)
    return LM(config(case, **more)).eval()


def ids(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).detach().abs().max()) if a.numel() else 0.0
