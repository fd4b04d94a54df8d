"""State: a snapshot of a sequence, from which it goes on at once, as often as wanted; in memory and as a file."""

from __future__ import annotations

import re
import reprlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gsa.errors import GSAError, raised_by
from gsa.files import named
from gsa.infer.model import Model
from gsa.infer.state_file import (
    FIELDS,
    MAX_TOKENS,
    NOTE,
    Kind,
    check_kinds,
    content_hash,
    kind_of,
    read_state,
    size_of_file,
    write_state,
)
from gsa.models.state import ModelState

if TYPE_CHECKING:
    from gsa.models.hf.cache import GSACache


@dataclass(frozen=True, eq=False, repr=False)
class State:
    """What a model remembers of one sequence. Nothing else writes to its memory."""

    model: ModelState
    """The memory of all layers, for one sequence."""
    logits: Tensor
    """Scores of the next token [V], fp32."""
    tokens: int
    """How many tokens were read."""
    digest: str
    """Their TokenHash, in hexadecimal."""
    fingerprint: str
    """That of the model, which alone can go on from here."""
    weights: str
    """Format of the weights that read them; the model can go on with others."""

    def __post_init__(self) -> None:
        for name, kind in (("model", ModelState), ("logits", Tensor)):
            if not isinstance(getattr(self, name), kind):
                got = type(getattr(self, name)).__name__
                raise GSAError(f"State: {name} must be a {kind.__name__}, got {got}")
        if type(self.tokens) is not int:
            raise GSAError(f"State: tokens must be a whole number, got {self.tokens!r}")
        if not 1 <= self.tokens <= MAX_TOKENS:
            raise GSAError(f"State: tokens must be from 1 to {MAX_TOKENS}, got {_short(self.tokens)}")
        for name, pattern in FIELDS.items():
            value = getattr(self, name)
            if re.fullmatch(pattern, str(value)) is None:
                raise GSAError(f"State: {name} cannot be {_short(value)}")

    def __repr__(self) -> str:
        return f"State({self.tokens} tokens, {self.nbytes} bytes, model {self.fingerprint[:12]})"

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.model.nbytes + self.logits.nbytes

    @property
    def file_bytes(self) -> int:
        """Bytes of its file."""
        return size_of_file(self._fields(), self._tensors())

    def clone(self) -> State:
        """A copy that shares no memory."""
        return replace(self, model=self.model.clone(), logits=self.logits.clone())

    def cache(self) -> GSACache:
        """A copy that `GSAForCausalLM` goes on from: what its `generate` takes as `past_key_values`."""
        from gsa.models.hf.cache import GSACache

        with torch.inference_mode(False):  # else the copy would fail where gradients are recorded
            return GSACache(self.model.clone(), self.tokens)

    def content(self) -> str:
        """A hash of all that is in it: states with the same one are the same, to the bit."""
        return content_hash(self._fields(), self._tensors())

    def check(self, model: Model, more: int = 0) -> None:
        """Raises unless this is a state of this model, from which a sequence can go on for so many tokens more."""
        with raised_by("State"):
            _check_fingerprint(self.fingerprint, model)
            tensors = self._tensors()
            check_kinds({name: kind_of(x) for name, x in tensors.items()}, _kinds(model, self.tokens))
            for name, x in tensors.items():
                if x.layout != torch.strided or x.device != model.device:
                    raise GSAError(
                        f"tensor {name} is {x.layout} on {x.device}, the model's are dense on {model.device}"
                    )
                _check_counter(name, x, self.tokens)
        self.check_room(more)

    def check_room(self, more: int) -> None:
        """Raises unless a sequence can go on from here for so many tokens more."""
        if more > MAX_TOKENS - self.tokens:
            raise GSAError(
                f"State: it has read {self.tokens:,} tokens, and {more:,} more would be beyond the {MAX_TOKENS:,} that "
                "a sequence can have"
            )

    def save(self, path: str | Path, *, note: str = "") -> None:
        """Writes the state to a file: safetensors, of which the same state always makes the same bytes. A note is what
        you know of the state beside it, for `load_noted`."""
        fields = {**self._fields(), NOTE: note} if note else self._fields()
        with raised_by("State.save"):
            _check_values(self._tensors(), self.tokens)
            write_state(named(path, "file"), fields, self._tensors())

    @classmethod
    def load(cls, path: str | Path, model: Model) -> State:
        """The state in a file, which must be one of this model, whole and unchanged."""
        return cls.load_noted(path, model)[0]

    @classmethod
    def load_noted(cls, path: str | Path, model: Model) -> tuple[State, str]:
        """The same, and the note that was saved with it: any text, since whoever wrote the file chose it."""
        if not isinstance(model, Model):
            raise GSAError(f"State.load: expected a Model, as engine.model is one, got {type(model).__name__}")

        def expected(fields: dict[str, str]) -> dict[str, Kind]:
            _check_fingerprint(fields["fingerprint"], model)
            return _kinds(model, int(fields["tokens"]))

        with raised_by(f"State.load: {path}"):
            fields, tensors = read_state(named(path, "file"), expected)
            _check_values(tensors, int(fields["tokens"]))
        logits = tensors.pop("logits")
        state = cls(
            model=ModelState.from_tensors(tensors).to(model.device),
            logits=logits.to(model.device),
            tokens=int(fields["tokens"]),
            digest=fields["digest"],
            fingerprint=fields["fingerprint"],
            weights=fields["weights"],
        )
        return state, fields.get(NOTE, "")

    def _fields(self) -> dict[str, str]:
        return {name: str(getattr(self, name)) for name in FIELDS}

    def _tensors(self) -> dict[str, Tensor]:
        return {**self.model.tensors(), "logits": self.logits}


def _kinds(model: Model, tokens: int) -> dict[str, Kind]:
    """What the tensors of a state of this model must be after so many tokens."""
    return {"logits": Kind("F32", (model.vocab_size,)), **model.state_kinds(tokens)}


def _check_fingerprint(fingerprint: str, model: Model) -> None:
    if fingerprint != model.fingerprint:
        raise GSAError(
            f"it is of another model: its fingerprint begins with {fingerprint[:12]}, "
            f"that of this model with {model.fingerprint[:12]}"
        )


def _check_values(tensors: dict[str, Tensor], tokens: int) -> None:
    """Raises for numbers that are not finite, and for counters that are not the number of tokens."""
    for name, x in tensors.items():
        if x.is_floating_point():
            odd = x[~x.isfinite()]
            if odd.numel():
                raise GSAError(f"tensor {name} holds {float(odd[0])}, expected finite numbers")
        _check_counter(name, x, tokens)


def _check_counter(name: str, x: Tensor, tokens: int) -> None:
    """Raises if a tensor counts tokens, as those of whole numbers do, and not so many."""
    if not x.is_floating_point() and bool((x != tokens).any()):
        raise GSAError(f"tensor {name} counts {x.tolist()} tokens, the state {tokens}")


def _short(value: object) -> str:
    """A value for an error, however long it is."""
    if isinstance(value, int) and abs(value) > 10**30:
        return f"a number of {value.bit_length()} bits"
    return reprlib.repr(value)
