"""Model: the weights of a language model as inference reads them, and what is known of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch

from gsa.devices import find_device
from gsa.errors import GSAError
from gsa.infer.layers import use_dense_layers, use_packed_layers
from gsa.infer.state_file import Kind, kind_of
from gsa.models.checkpoint import read_model, stored_weights
from gsa.models.init import without_memory
from gsa.models.lm import LM
from gsa.models.state import ModelState
from gsa.ops.weights import DENSE, FORMATS
from gsa.train.find import find_model, read_live, warn

WEIGHTS = ("auto", *FORMATS)


class Model:
    """A language model for inference, made by `Model.load`; an `Engine` runs it. Activations and states are fp32.

    >>> model = Model.load("gsa-tiny")
    >>> model.weights, model.vocab_size
    ('bf16', 4096)
    """

    def __init__(self, lm: LM, weights: str, fingerprint: str, nbytes: int, num_parameters: int):
        self.lm, self.config = lm, lm.config
        self.weights, self.fingerprint, self.nbytes = weights, fingerprint, nbytes
        self.num_parameters = num_parameters

    @classmethod
    def load(
        cls,
        source: str | Path | LM,
        weights: str = "auto",
        *,
        device: str = "auto",
        say: Callable[[str], None] = warn,
    ) -> Model:
        """The model of a name or folder, as `find_model` finds it, or an LM as it is now, in a format of weights.

        Weights: `auto` is bf16 for weights in bf16, and fp32 for others. Device: `auto` is where an LM is, and for
        others a GPU if torch can use one. Nothing is shared with the LM. Broken checkpoints of a run that are passed
        over are told to `say`.
        """
        if isinstance(source, LM):
            place = source.lm_head.weight.device if device == "auto" else find_device(device, "Model")
            check_format(weights, place)
            return cls._of(_copied(source), weights, place)
        check_format(weights, find_device(device, "Model"))  # before a model is fetched
        return read_live(source, lambda: cls.from_folder(find_model(source, say).folder, weights, device))

    @classmethod
    def from_folder(cls, folder: Path, weights: str = "auto", device: str = "auto") -> Model:
        """The model of a folder with config.json and weights."""
        place = find_device(device, "Model")
        check_format(weights, place)
        return cls._of(read_model(folder), weights, place)

    @classmethod
    def _of(cls, lm: LM, weights: str, device: torch.device) -> Model:
        """Takes the LM over."""
        if weights == "auto":
            weights = "bf16" if lm.lm_head.weight.dtype == torch.bfloat16 else "fp32"
        num_parameters = lm.num_parameters  # before they are packed
        use_layers = use_packed_layers if device.type == "cpu" else use_dense_layers
        with torch.no_grad():
            fingerprint = _fingerprint(lm)
            nbytes = use_layers(lm.to(device).eval().requires_grad_(False), weights)
        rest = sum(x.nbytes for x in lm.parameters()) + sum(x.nbytes for x in lm.buffers())
        return cls(lm, weights, fingerprint, nbytes + rest, num_parameters)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def device(self) -> torch.device:
        return self.lm.lm_head.weight.device

    @property
    def state_bytes(self) -> int | None:
        """Bytes of a sequence's state; None if it grows with the sequence."""
        if self.lm.state_size is None:
            return None
        many = 1 << 40  # tokens, after which every window is full
        return sum(kind.nbytes for kind in self.state_kinds(many).values())

    def init_state(self) -> ModelState:
        """The state of a sequence that has not begun."""
        return self.lm.init_state(1)

    def state_kinds(self, tokens: int) -> dict[str, Kind]:
        """Dtype and shape of the tensors of a state after so many tokens, by the names they have in a file."""
        found = {}
        for i, (options, layer) in enumerate(zip(self.config.layers, self.init_state().layers, strict=True)):
            window = getattr(options, "window", None)
            cached = tokens if window is None else min(tokens, window - 1)
            for name, x in layer.items():
                dtype, shape = kind_of(x)
                # A size of 0 at the start is that of a cache, which grows.
                found[f"layers.{i}.{name}"] = Kind(dtype, tuple(size or cached for size in shape))
        return found


def check_format(weights: str, device: torch.device) -> None:
    """Refuses a format of weights that does not exist, or not on the device, before anything is loaded."""
    if weights not in WEIGHTS:
        raise GSAError(f"Model: unknown weights {weights!r}; expected one of {', '.join(WEIGHTS)}")
    if device.type != "cpu" and weights not in ("auto", *DENSE):
        raise GSAError(f"Model: {weights} weights are for CPUs, the device is {device}; choose bf16, or the device cpu")


def _copied(lm: LM) -> LM:
    """The same model, with memory of its own."""
    with without_memory():
        copy = LM(lm.config)
    copy.load_state_dict({name: x.detach().clone() for name, x in lm.state_dict().items()}, assign=True)
    copy.tie_weights()
    return copy


def _fingerprint(lm: LM) -> str:
    """A hash of the config and of every weight as it is stored."""
    digest = hashlib.sha256(lm.config.to_json().encode())
    for name, x in sorted(stored_weights(lm.config, lm.state_dict()).items()):
        digest.update(f"\n{name} {x.dtype} {list(x.shape)}\n".encode())
        digest.update(x.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
