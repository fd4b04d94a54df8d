"""GGUF files, llama.cpp's: config, tensors and tokenizer as transformers names them.

Weights come as fp32, whatever they are quantised to. Rows of queries and keys of the kind `llama` lie in pairs there,
as llama.cpp turns them for rotary positions, and are put back in order.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gsa.convert.sources import Source
from gsa.data.optional import first_line
from gsa.data.tokenizer import JSON
from gsa.errors import GSAError
from gsa.extras import require
from gsa.files import read_json
from gsa.models.fields import Fields
from gsa.terminal import quoted

KINDS = ("llama", "qwen2", "qwen3")
"""Kinds of models, which are called the same in transformers (Mistral's are `llama`)."""
_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
BYTE_LEVEL = "gpt2"
"""What GGUF calls tokenizers of bytes, which come with the name of a rule that splits text before they see it."""
LIKE_GPT2 = (None, "default", "gpt-2", "phi-2")
DIGITS_FIRST = ("smollm", "starcoder", "refact")
"""Rules: as GPT-2 does; the same behind digits that are split off one by one. transformers knows others."""
_SPECIAL = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}
_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_OF_LAYERS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)")


class GGUFSource(Source):
    """A GGUF file."""

    def __init__(self, place: Path, name: str):
        require("gguf", f"convert: {name}")
        import gguf

        self.place, self.name, self.origin, self._quants = place, name, str(place.resolve()), gguf.quants
        try:
            self._reader = gguf.GGUFReader(place)
        except MemoryError:
            raise
        except Exception as error:  # broken files make it fail in any way
            raise GSAError(f"convert: {place} is not a whole GGUF file: {first_line(error)}") from None
        kind = self._value("general.architecture")
        if kind not in KINDS:
            raise GSAError(f"convert: {place}: general.architecture is {quoted(kind)}, expected {', '.join(KINDS)}")
        self.kind = str(kind)

    def _value(self, key: str) -> Any:
        field = self._reader.get_field(key)
        try:
            return None if field is None else field.contents()
        except Exception as error:
            raise GSAError(f"convert: {self.place}: {key} cannot be read: {first_line(error)}") from None

    @cached_property
    def fields(self) -> Fields:
        fields: Fields = {"model_type": self.kind, "tie_word_embeddings": "output.weight" not in self._stored}
        told = {}
        for key in self._reader.fields:
            own = key.removeprefix(f"{self.kind}.")
            if own != key and own in _FIELDS:
                fields[_FIELDS[own]] = self._value(key)
            elif own != key:
                told[own] = self._value(key)
        self._check(fields, told)
        if "vocab_size" not in fields:
            fields["vocab_size"] = self.tensors["model.embed_tokens.weight"].shape[0]
        for own, name in _SPECIAL.items():
            if (value := self._value(f"tokenizer.ggml.{own}")) is not None:
                fields[name] = value
        return {**fields, **told}

    def _check(self, fields: Fields, told: Fields) -> None:
        """Refuses what cannot be represented; `told` keeps what is not known."""
        if "rope_freqs.weight" in self._stored:
            raise GSAError(f"convert: {self.place}: tensor rope_freqs.weight scales rotary positions: not supported")
        self._check_scaling(told)
        if told.pop("attention.causal", True) is not True:
            raise GSAError(f"convert: {self.place}: attention.causal is false: not a model that writes text")
        if "attention.sliding_window" in told:
            raise GSAError(f"convert: {self.place}: attention.sliding_window: not supported in GGUF files")
        heads, width = fields.get("num_attention_heads"), fields.get("hidden_size")
        if type(heads) is int and type(width) is int and heads > 0:
            head = fields.get("head_dim", width // heads)
            for key in ("attention.value_length", "rope.dimension_count"):
                size = told.pop(key, head)
                if size != head:
                    raise GSAError(f"convert: {self.place}: {key} is {quoted(size)}, and heads are {head} wide")

    def _check_scaling(self, told: Fields) -> None:
        """Refuses scaled rotary positions; where a factor comes without a type, llama.cpp takes it for linear."""
        kind = told.pop("rope.scaling.type", None)
        if kind not in (None, "none"):
            raise GSAError(f"convert: {self.place}: rope.scaling.type is {quoted(kind)}: not supported")
        for key in ("rope.scaling.factor", "rope.scale_linear"):
            factor = told.pop(key, 1)
            if kind is None and factor not in (0, 1):  # 0 stands for none
                raise GSAError(f"convert: {self.place}: {key} is {quoted(factor)}: scaling is not supported")

    @cached_property
    def _stored(self) -> dict[str, Any]:
        """The tensors by GGUF's names."""
        return {x.name: x for x in self._reader.tensors}

    @cached_property
    def _names(self) -> dict[str, str]:
        """GGUF's name of every tensor of ours."""
        return {_renamed(name): name for name in self._stored}

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return {
            name: torch.empty([int(n) for n in reversed(self._stored[own].shape)], dtype=torch.float32, device="meta")
            for name, own in self._names.items()
        }

    @property
    def largest_shard(self) -> None:
        return None

    def read(self, name: str) -> Tensor:
        stored = self._stored[self._names[name]]
        try:
            x = torch.from_numpy(self._quants.dequantize(stored.data, stored.tensor_type).copy())
        except MemoryError:
            raise
        except Exception as error:  # broken files make it fail in any way
            raise GSAError(f"convert: {self.place}: tensor {stored.name} cannot be read: {first_line(error)}") from None
        x = x.reshape(self.tensors[name].shape)
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        return unpaired(x, int(self.fields[heads])) if heads and self.kind == "llama" else x

    def _write_companions(self, folder: Path) -> list[str]:
        from gsa.eval.foreign_model import loaded

        before = {path.name for path in folder.iterdir()}
        loaded("AutoTokenizer", self.place).save_pretrained(folder)
        if self._value("tokenizer.ggml.model") == BYTE_LEVEL:
            self._split_as_told(folder / JSON)
        return sorted({path.name for path in folder.iterdir()} - before)

    def _split_as_told(self, path: Path) -> None:
        """Has a tokenizer of bytes split text as the file names it, where transformers does not know the name."""
        rule, content = self._value("tokenizer.ggml.pre"), read_json(path)
        if (content["pre_tokenizer"] or {}).get("type") != "ByteLevel" or rule in LIKE_GPT2:
            return
        if rule not in DIGITS_FIRST:
            raise GSAError(
                f"convert: {self.place}: tokenizer.ggml.pre is {quoted(rule)}: how it splits text is not known"
            )
        digits = {"type": "Digits", "individual_digits": True}
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, content["pre_tokenizer"]]}
        path.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")


def unpaired(x: Tensor, heads: int) -> Tensor:
    """Rows [heads * K, ...] with the halves of each head one behind the other, which lay in pairs.

    >>> unpaired(torch.tensor([0, 10, 1, 11, 2, 12]), heads=1).tolist()
    [0, 1, 2, 10, 11, 12]
    """
    return x.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _renamed(name: str) -> str:
    """A tensor's name in transformers; one that is not known stays as it is, and finds no place later."""
    stem, _, suffix = name.rpartition(".")
    found = _LAYER.fullmatch(stem)
    if found is None:
        return f"{_TENSORS[stem]}.{suffix}" if stem in _TENSORS else name
    return f"model.layers.{found[1]}.{_OF_LAYERS[found[2]]}.{suffix}" if found[2] in _OF_LAYERS else name
