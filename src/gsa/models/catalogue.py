"""Models by name, at the paper's sizes and at a laptop's.

The paper (section 4 and appendix): 1.3B is 24 layers of width 2048, 2.7B 32 of 2560, 340M (ablations) 24 of 1024, all
with the Mistral tokenizer's 32000 tokens. Each mixer has its heads from there, and so its state size.
"""

from __future__ import annotations

from typing import Any

from gsa.errors import GSAError
from gsa.mixers.registry import suggestion
from gsa.models.config import ModelConfig

# Size: width, layers, vocabulary, whether the head is the embedding. 340M has that many parameters only when tied.
SIZES: dict[str, tuple[int, int, int, bool]] = {
    "tiny": (256, 4, 4096, True),
    "small": (512, 8, 8192, True),
    "340m": (1024, 24, 32000, True),
    "1.3b": (2048, 24, 32000, False),
    "2.7b": (2560, 32, 32000, False),
}


def _gsa(width: int) -> dict[str, Any]:
    return {"num_attention_heads": 5 if width == 2560 else 4, "num_slots": 64 if width > 256 else 32}


def _raven(width: int) -> dict[str, Any]:
    """GSA's successor: every token goes to an eighth of the slots, which a whole head gates."""
    gsa = _gsa(width)
    slots, heads = gsa["num_slots"], gsa["num_attention_heads"]
    more = {"router": "sigmoid", "routed_slots": slots // 8, "gate": "head", "qk_norm": True}
    return {**gsa, **more, "scale": (width // heads) ** -0.5}


def _gla(width: int) -> dict[str, Any]:
    return {"num_attention_heads": max(width // 512, 2 if width < 1024 else 4)}  # keys of 256 from 1.3B on


def _retnet(width: int) -> dict[str, Any]:
    # Values are twice as wide, so the MLP is half as wide.
    heads = max(width // 256, 2 if width < 1024 else 4)
    return {"num_attention_heads": heads, "intermediate_size": -(-width * 4 // 3 // 256) * 256}


def _hgrn2(width: int) -> dict[str, Any]:
    return {"num_attention_heads": max(width // 128, 4)}


def _attention(width: int) -> dict[str, Any]:
    return {"num_attention_heads": width // 128 if width == 2560 else width // 64}


SYSTEMS: dict[str, tuple[str, Any]] = {
    "gsa": ("gsa", _gsa),
    "gla": ("gla", _gla),
    "hgrn2": ("hgrn2", _hgrn2),
    "retnet": ("retnet", _retnet),
    "mamba": ("mamba", lambda width: {}),
    "xfmr": ("attention", _attention),
    "abc": ("abc", _gsa),
    "raven": ("gsa", _raven),
}

_MISTRAL: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
}
# What the paper finetunes Mistral 7B into: ReLU features and no output gate for RetNet and GLA.
_FINETUNED: dict[str, dict[str, Any]] = {
    "gsa": {"mixer": "gsa", "num_slots": 64},
    "gla": {"mixer": "gla", "feature_map": "relu", "output_gate": False, "expand_k": 1.0},
    "retnet": {"mixer": "retnet", "feature_map": "relu", "output_gate": False, "expand_v": 1.0},
    "supra": {"mixer": "supra"},
    "xfmr": {"mixer": "attention", "window": 4096},
}


def presets() -> list[str]:
    """The names of all presets."""
    sized = [f"{system}-{size}" for size in SIZES for system in SYSTEMS]
    return [*sized, *(f"{system}-7b-mistral" for system in _FINETUNED)]


def preset(name: str) -> ModelConfig:
    """A model's config by name.

    >>> preset("gsa-1.3b").num_hidden_layers
    24
    """
    system, _, size = str(name).partition("-")
    if size == "7b-mistral" and system in _FINETUNED:
        return ModelConfig(**_MISTRAL, **_FINETUNED[system])
    if system not in SYSTEMS or size not in SIZES:
        raise GSAError(f"preset: unknown preset {name!r}{suggestion(name, presets())}; `gsa models` lists them")
    mixer, options = SYSTEMS[system]
    width, layers, vocabulary, tied = SIZES[size]
    return ModelConfig(
        mixer=mixer,
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=2 * layers if system == "mamba" else layers,  # two of Mamba's replace mixer and MLP
        tie_word_embeddings=tied,
        **options(width),
    )
