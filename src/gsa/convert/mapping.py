"""Which tensor of a student is which of the source; what is new; what is dropped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from gsa.convert.sources import Source
from gsa.errors import GSAError
from gsa.models.config import ModelConfig
from gsa.models.sizes import Shapes, tensor_shapes

HEAD, EMBEDDINGS = "lm_head.weight", "model.embeddings.weight"
# In every layer, or outside of them: transformers' name and ours.
_RENAMED = (
    (re.compile(r"^model\.embed_tokens\."), "model.embeddings."),
    (re.compile(r"^(model\.layers\.\d+)\.input_layernorm\."), r"\1.mixer_norm."),
    (re.compile(r"^(model\.layers\.\d+)\.post_attention_layernorm\."), r"\1.mlp_norm."),
    (re.compile(r"^(model\.layers\.\d+)\.self_attn\."), r"\1.mixer."),
)
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_FREQUENCIES = "rotary_emb.inv_freq"  # older versions stored them; they follow from rope_theta


@dataclass(frozen=True)
class Mapping:
    """From a source to a student."""

    copied: dict[str, str]
    """The student's tensors by name, in the order of the source's files, and the source's name of each."""
    new: tuple[str, ...]
    """The student's tensors that the source does not have."""
    dropped: tuple[str, ...]
    """The source's tensors that the student does not have."""
    shapes: Shapes
    """Of every tensor that the student stores."""

    def sizes(self, dtype: torch.dtype) -> dict[str, int]:
        """Bytes of every tensor in this dtype, in the order in which they are written."""
        return {name: prod(self.shapes[name]) * dtype.itemsize for name in (*self.copied, *self.new)}

    def new_of(self, layer: int) -> list[str]:
        """Names, within the mixer, of a layer's new tensors."""
        prefix = f"model.layers.{layer}.mixer."
        return [name.removeprefix(prefix) for name in self.new if name.startswith(prefix)]


def our_name(name: str) -> str:
    """A tensor's name here, by transformers' name for it."""
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name


def map_tensors(source: Source, teacher: ModelConfig, student: ModelConfig) -> Mapping:
    """The mapping, after the source's tensors are compared with what its config asks for."""
    names = {our_name(name): name for name in source.tensors if not name.endswith(_FREQUENCIES)}
    dropped = [name for name in source.tensors if name.endswith(_FREQUENCIES)]
    expected, wanted = tensor_shapes(teacher), tensor_shapes(student)
    if teacher.tie_word_embeddings:
        del expected[HEAD], wanted[HEAD]
        if (head := names.pop(HEAD, None)) is not None:
            _check_tied(source, head, names.get(EMBEDDINGS))
            dropped.append(head)
    for name, shape in expected.items():
        if name not in names:
            raise GSAError(f"convert: {source.name}: tensor {_theirs(name)} is missing")
        found = tuple(source.tensors[names[name]].shape)
        if found != shape:
            raise GSAError(
                f"convert: {source.name}: tensor {names[name]} is {list(found)}, its config asks for {list(shape)}"
            )
    for name, own in names.items():
        if name not in expected:
            raise GSAError(f"convert: {source.name}: tensor {own} has no place in the model that its config describes")
        if name not in wanted:
            dropped.append(own)
    copied = {name: own for name, own in names.items() if name in wanted}
    for name in copied:
        assert wanted[name] == expected[name], name
    new = tuple(name for name in wanted if name not in copied)
    return Mapping(copied, new, tuple(dropped), wanted)


def _check_tied(source: Source, head: str, embeddings: str | None) -> None:
    if embeddings is not None and not torch.equal(source.read(head), source.read(embeddings)):
        raise GSAError(f"convert: {source.name}: tie_word_embeddings is true, but {head} is not {embeddings}")


def _theirs(name: str) -> str:
    """Transformers' name of a tensor of ours, for an error."""
    pairs = (("embeddings", "embed_tokens"), (".mixer_norm.", ".input_layernorm."), (".mixer.", ".self_attn."))
    for ours, theirs in (*pairs, (".mlp_norm.", ".post_attention_layernorm.")):
        name = name.replace(ours, theirs)
    return name


def checked(x: Tensor, name: str, source: Source, dtype: torch.dtype) -> Tensor:
    """A tensor in a dtype; raises if it is not finite, or no longer."""
    if not bool(torch.isfinite(x).all()):
        raise GSAError(f"convert: {source.name}: tensor {name} is not finite")
    y = x.to(dtype).contiguous()
    if y.dtype == torch.float16 and not bool(torch.isfinite(y).all()):
        raise GSAError(f"convert: {source.name}: tensor {name} does not fit into fp16; use bf16 or fp32")
    return y


@dataclass(frozen=True)
class Pattern:
    """Tensors whose names differ in the number of the layer alone."""

    name: str
    """With `layers.*` for the layer."""
    count: int
    shape: tuple[int, ...]


def grouped(names: Iterable[str], shapes: dict[str, tuple[int, ...]]) -> Iterator[Pattern]:
    """Tensors by pattern and shape, in their order."""
    counts: dict[tuple[str, tuple[int, ...]], int] = {}
    for name in names:
        key = _LAYER.sub("layers.*.", name), shapes[name]
        counts[key] = counts.get(key, 0) + 1
    for (pattern, shape), count in counts.items():
        yield Pattern(pattern, count, shape)
