"""Model: the weights of a language model as inference reads them, and what is known of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch

from gsa.devices import find_device
from gsa.errors import GSAError
from gsa.infer.compute import check_compute, chosen_compute
from gsa.infer.layers import use_dense_layers, use_packed_layers
from gsa.infer.state_file import Kind, kind_of
from gsa.models.checkpoint import read_model, stored_weights
from gsa.models.init import without_memory
from gsa.models.lm import LM
from gsa.models.state import ModelState
from gsa.ops.weights import BITS, FORMATS
from gsa.train.find import find_model, read_live, warn

WEIGHTS = ("auto", *FORMATS)


class Model:
    """A language model for inference, made by `Model.load`; an `Engine` runs it. Activations and states are fp32.

    `weights` is the format of its weights, `compute` what products over many tokens are computed in.

    >>> model = Model.load("gsa-tiny")
    >>> model.weights, model.vocab_size
    ('bf16', 4096)
    """

    def __init__(self, lm: LM, weights: str, compute: str, fingerprint: str, nbytes: int, num_parameters: int):
        self.lm, self.config = lm, lm.config
        self.weights, self.compute, self.fingerprint = weights, compute, fingerprint
        self.nbytes, self.num_parameters = nbytes, num_parameters

    @classmethod
    def load(
        cls,
        source: str | Path | LM,
        weights: str = "auto",
        *,
        compute: str = "auto",
        device: str = "auto",
        say: Callable[[str], None] = warn,
    ) -> Model:
        """The model of a name or folder, as `find_model` finds it, or an LM as it is now.

        Nothing is shared with the LM.

        Args:
            source: The model.
            weights: Format of the weights; `auto` is bf16 for weights in bf16, and fp32 for others.
            compute: What products over many tokens, as when a prompt is read, are computed in: fp32, bf16, int8 (for
                weights in int8 and int4), or `auto`, which is the format of the weights (int8 for int4) where the CPU
                has a unit for such products, and else fp32. On GPUs it is the format of the weights.
            device: `auto` is where an LM is, and for others a GPU if torch can use one; but the CPU for weights in int8
                and int4 and where `compute` is chosen, which only CPUs have.
            say: Told of broken checkpoints of a run that are passed over.
        """
        if isinstance(source, LM):
            place = chosen_device(device, weights, compute, source.lm_head.weight.device)
            return cls.of(_copied(source), weights, compute, place)
        chosen_device(device, weights, compute)  # which refuses what cannot be, before a model is fetched

        def read() -> Model:
            return cls.from_folder(find_model(source, say).folder, weights, compute=compute, device=device)

        return read_live(source, read)

    @classmethod
    def from_folder(cls, folder: Path, weights: str = "auto", *, compute: str = "auto", device: str = "auto") -> Model:
        """The model of a folder with config.json and weights."""
        place = chosen_device(device, weights, compute)
        return cls.of(read_model(folder), weights, compute, place)

    @classmethod
    def of(cls, lm: LM, weights: str, compute: str, device: torch.device) -> Model:
        """Takes an LM over, which nobody may use any more; what need not be converted stays where it is in memory."""
        if weights == "auto":
            weights = "bf16" if lm.lm_head.weight.dtype == torch.bfloat16 else "fp32"
        num_parameters = lm.num_parameters  # before they are packed
        with torch.no_grad():
            fingerprint = _fingerprint(lm)
            lm = lm.to(device).eval().requires_grad_(False)
            if device.type == "cpu":
                compute = chosen_compute(compute, weights)
                nbytes = use_packed_layers(lm, weights, compute)
            else:
                compute, nbytes = weights, use_dense_layers(lm, weights)
        rest = sum(x.nbytes for x in lm.parameters()) + sum(x.nbytes for x in lm.buffers())
        return cls(lm, weights, compute, fingerprint, nbytes + rest, num_parameters)

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
        for i, (block, layer) in enumerate(zip(self.lm.model.layers, self.init_state().layers, strict=True)):
            cached = 0
            if block.mixer.grows:
                window = getattr(block.mixer.options, "window", None)
                cached = tokens if window is None else min(tokens, window - 1)
            for name, x in layer.items():
                dtype, shape = kind_of(x)
                # A size of 0 at the start of what grows is that of a cache.
                found[f"layers.{i}.{name}"] = Kind(dtype, tuple(size or cached for size in shape))
        return found


def chosen_device(device: str, weights: str, compute: str, best: torch.device | None = None) -> torch.device:
    """The device by name, where `auto` is the best that has these weights and products.

    What does not exist, or not on a device that was named, is refused.
    """
    if weights not in WEIGHTS:
        raise GSAError(f"Model: unknown weights {weights!r}; expected one of {', '.join(WEIGHTS)}")
    check_compute(compute, weights)
    found = best if best is not None and device == "auto" else find_device(device, "Model")
    for_cpus = f"{weights} weights are" if weights in BITS else "a choice of compute is" if compute != "auto" else None
    if found.type == "cpu" or for_cpus is None:
        return found
    if device == "auto":
        return torch.device("cpu")
    raise GSAError(f"Model: {for_cpus} for CPUs, and the device is {found}; choose the device cpu, or leave that out")


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
