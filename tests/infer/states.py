"""Tiny models, states of them, and their files taken apart and put together again, as tests of states need them."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from typing import Any

import numpy as np
import torch

from gsa.infer.model import Model
from gsa.infer.runners import make_runner
from gsa.infer.state import State
from gsa.infer.tokens import TokenHash
from gsa.models import LM, ModelConfig

VOCABULARY = 31
MIXERS: dict[str, dict[str, Any]] = {
    "gsa": {"num_slots": 4, "conv_size": 3},
    "abc": {"mixer": "abc", "num_slots": 4, "rope_theta": 100.0},
    "mamba": {"mixer": "mamba", "ssm_state_size": 4},
    "attention": {"mixer": "attention"},
    "window": {"mixer": "attention", "window": 5},
    "no window": {"mixer": "attention", "window": 1},
    "hybrid": {"mixer": "gsa,attention(window=4)", "num_slots": 4},
    "window and slots": {"mixer": "hybrid", "window": 3, "num_sinks": 1, "num_slots": 4},
    "no sinks": {"mixer": "hybrid", "window": 2, "num_sinks": 0, "num_slots": 4},
}


def lm(name: str, **changes: Any) -> LM:
    """A tiny model, always with the same weights."""
    heads = {} if name == "mamba" else {"num_attention_heads": 2, "intermediate_size": 32}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "initializer_range": 0.2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return LM(ModelConfig(**{**sizes, **heads, **MIXERS[name], **changes}))


@cache
def model(name: str, weights: str = "fp32") -> Model:
    return Model.load(lm(name), weights)


def ids(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def read(model: Model, ids: torch.Tensor) -> State:
    """The state after these tokens."""
    logits, after = make_runner(model, 1).read(ids, None)
    digest = TokenHash.advance(TokenHash.EMPTY, ids).hex()
    return State(after, logits, len(ids), digest, model.fingerprint, model.weights)


def tensors(state: State) -> dict[str, torch.Tensor]:
    """Every tensor under the name that it has in a file."""
    layers = {f"layers.{i}.{name}": x for i, layer in enumerate(state.model.layers) for name, x in layer.items()}
    return {**layers, "logits": state.logits}


def fields(state: State) -> dict[str, object]:
    """Everything else."""
    return {name: getattr(state, name) for name in ("tokens", "digest", "fingerprint", "weights")}


def same(one: State, other: State) -> bool:
    """Whether two states are equal in everything, to the bit."""
    a, b = tensors(one), tensors(other)
    return fields(one) == fields(other) and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def taken_apart(file: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    end = 8 + int.from_bytes(file[:8], "little")
    return json.loads(file[8:end]), file[end:]


def put_together(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def sealed(header: dict[str, Any], data: bytes) -> dict[str, Any]:
    """The header with the hash of its content computed anew, as one who forges a file would."""
    metadata = {name: value for name, value in header["__metadata__"].items() if name != "content"}
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(header.keys() - {"__metadata__"}):
        start, end = header[name]["data_offsets"]
        digest.update(json.dumps([name, header[name]["dtype"], header[name]["shape"]]).encode())
        digest.update(data[start:end])
    return {**header, "__metadata__": {**metadata, "content": digest.hexdigest()}}


def numbers(header: dict[str, Any], data: bytes, name: str) -> np.ndarray:
    """The numbers of one tensor, as a copy."""
    start, end = header[name]["data_offsets"]
    return np.frombuffer(data[start:end], {"F32": "<f4", "I64": "<i8"}[header[name]["dtype"]]).copy()


def with_numbers(header: dict[str, Any], data: bytes, name: str, new: np.ndarray) -> bytes:
    """The data with other numbers for one tensor."""
    start, end = header[name]["data_offsets"]
    return data[:start] + new.tobytes() + data[end:]
