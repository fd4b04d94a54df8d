"""Tiny Transformers of every family, made with transformers and saved as people find them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from gsa.convert import Choices, Converted, convert
from gsa.data.tokenizer import load_tokenizer

VOCABULARY = 257
"""That of bytes, so that there is a tokenizer."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-3,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, all heads, tied": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama, wide heads": ("Llama", {"head_dim": 12}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA_3}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "mistral, window": ("Mistral", {"sliding_window": 6, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen2, window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}


def model_of(case: str, **more: Any) -> Any:
    """A model with random weights that are large enough for everything to show, biases and norms too."""
    family, options = CASES[case]
    config = getattr(transformers, f"{family}Config")(
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, **SIZES, **options, **more}
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            x.normal_(1.0 if "norm" in name else 0.0, 0.3 if x.dim() == 1 else 1.5 * x.shape[-1] ** -0.5)
    return model


@cache
def tokenizer_files() -> dict[str, str]:
    return load_tokenizer("bytes").files()


def saved(folder: Path, case: str = "llama", *, shard: str = "5GB", **more: Any) -> Path:
    """A folder with such a model and a tokenizer."""
    model_of(case, **more).save_pretrained(folder, max_shard_size=shard)
    for name, text in tokenizer_files().items():
        (folder / name).write_text(text)
    return folder


def made(source: Path, out: Path, choices: Choices, dtype: str | None = None) -> Converted:
    """What a source becomes, without calibration."""
    return convert(source, out, choices, dtype, tokens=0)


def changed(folder: Path, **fields: Any) -> Path:
    """The folder with other fields in its config.json; None takes a field away."""
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))
    return folder
