"""Model: a language model ready to be run, with its weights packed."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gsa.errors import GSAError
from gsa.infer.packed import pack_layers
from gsa.models.checkpoint import load_model, stored_weights
from gsa.models.init import without_memory
from gsa.models.lm import LM
from gsa.models.state import ModelState
from gsa.ops.packed import FORMATS

if TYPE_CHECKING:
    from gsa.infer.compiled import CompiledPlaces

PIECE = 512
"""Tokens that are read at once. Memory for activations is that of one piece, however long the prompt."""
SHORT = 64
"""Tokens up to which a text is read by the compiled steps, where there are any."""
WEIGHTS = ("auto", *FORMATS)


class Model:
    """A language model for inference, made by `Model.load`; activations and states are fp32.

    >>> model = Model.load("gsa-tiny")
    >>> logits, state = model.prefill(torch.tensor([10, 11, 12]), None)
    """

    def __init__(self, lm: LM, weights: str, fingerprint: str, nbytes: int):
        self.lm, self.config = lm, lm.config
        self.weights, self.fingerprint, self.nbytes = weights, fingerprint, nbytes
        self._busy = Lock()  # working memory is shared by all who read with this model

    @classmethod
    def load(cls, source: str | Path | LM, weights: str = "auto") -> Model:
        """The model of a folder, of the package ("gsa-tiny"), or an LM as it is now, in a format of weights.

        `auto` is bf16 for weights in bf16, and fp32 for others. Nothing is shared with the LM.
        """
        if weights not in WEIGHTS:
            raise GSAError(f"Model: unknown weights {weights!r}; expected one of {', '.join(WEIGHTS)}")
        lm = _copied(source) if isinstance(source, LM) else load_model(_folder(source))
        dtype = lm.lm_head.weight.dtype
        if weights == "auto":
            weights = "bf16" if dtype == torch.bfloat16 else "fp32"
        with torch.no_grad():
            fingerprint = _fingerprint(lm)
            packed = pack_layers(lm.eval().requires_grad_(False), weights)
        rest = sum(x.nbytes for x in lm.parameters()) + sum(x.nbytes for x in lm.buffers())
        return cls(lm, weights, fingerprint, sum(x.nbytes for x in packed) + rest)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def device(self) -> torch.device:
        return self.lm.lm_head.weight.device

    @property
    def state_bytes(self) -> int | None:
        """Bytes of a sequence's state; None if it grows with the sequence."""
        from gsa.infer.state import kinds

        if self.lm.state_size is None:
            return None
        full = 1 << 40  # tokens, so that every window is
        return sum(kind.nbytes for name, kind in kinds(self, full).items() if name != "logits")

    def init_state(self) -> ModelState:
        """The state of a sequence that has not begun."""
        return self.lm.init_state(1)

    @torch.inference_mode()
    def prefill(self, ids: Tensor, state: ModelState | None) -> tuple[Tensor, ModelState]:
        """Reads up to PIECE tokens [T] of one sequence: scores of the next token [vocab], and the state after them.

        The state that is given is not changed.
        """
        if ids.dim() != 1 or not 1 <= ids.shape[0] <= PIECE:
            raise GSAError(f"prefill: expected 1 to {PIECE} ids, got {list(ids.shape)}")
        with self._busy:
            if ids.shape[0] <= SHORT and self._steps is not None:
                self._steps.put(0, self.init_state() if state is None else state)
                return self._steps.feed(ids.tolist(), 0), self._steps.take(0)
            x, after = self.lm.model(ids[None].to(self.device), state)
            assert after is not None
            return self.lm.lm_head(x[0, -1:])[0], after

    @cached_property
    def _steps(self) -> CompiledPlaces | None:
        """A place of its own for short texts, if the native engine can step this model."""
        from gsa.infer.compiled import CompiledPlaces, obstacle

        return CompiledPlaces(self, 1) if obstacle(self) is None else None


def _folder(source: str | Path) -> Path:
    from gsa import pretrained

    if isinstance(source, str) and source in pretrained.names():
        return pretrained.folder(source)
    path = Path(source)
    if not path.is_dir():
        raise GSAError(
            f"Model: there is no folder {source}, and no model of that name in the package "
            f"({', '.join(pretrained.names())})"
        )
    return path


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
