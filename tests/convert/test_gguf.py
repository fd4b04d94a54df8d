"""GGUF files: rows of queries and keys in order again, quantised weights as they are, and the tokenizer within."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

import gsa
from gsa.convert import Choices
from gsa.convert.gguf_file import GGUFSource
from gsa.convert.sources import open_source
from gsa.errors import GSAError
from gsa.models.checkpoint import load_model
from gsa.models.fields import Fields
from tests.convert.families import CASES, VOCABULARY, made, model_of

THEIRS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
IDS = torch.randint(VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(1))


def paired(x: Tensor, heads: int) -> Tensor:
    """Rows as llama.cpp has them: of each head 0, K/2, 1, K/2 + 1, ..."""
    rows = []
    for head in x.chunk(heads):
        half = len(head) // 2
        rows += [row for i in range(half) for row in (head[i], head[half + i])]
    return torch.stack(rows)


def written(path: Path, case: str = "llama", quantise: bool = False, more: Fields | None = None) -> Path:
    """A GGUF file of a tiny model, with a tokenizer of bytes."""
    model, kind = model_of(case), CASES[case][0].lower()
    config = model.config
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(500.0)
    if case == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    _add_tokenizer(writer)
    for key, value in {"add_tokenizer_pre": "smollm", **(more or {})}.items():
        getattr(writer, key)(value)
    weights = model.state_dict()
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    for name, x in weights.items():
        stem, _, suffix = name.rpartition(".")
        own = stem
        if kind == "llama" and stem.endswith(("q_proj", "k_proj")):
            x = paired(x, config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads)
        if stem.startswith("model.layers."):
            _, _, layer, rest = stem.split(".", 3)
            own = f"blk.{layer}.{THEIRS[rest]}"
        else:
            own = THEIRS[stem]
        if quantise and x.dim() == 2 and x.shape[1] % 32 == 0:
            data = gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"{own}.{suffix}", data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(f"{own}.{suffix}", x.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: Any) -> None:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    writer.add_tokenizer_model("gpt2")
    letters = list(bytes_to_unicode().values())[:-1]  # the last, a soft hyphen, makes room for a merge
    writer.add_token_list([*letters, "ab", "<|end|>"])
    writer.add_token_types([*[1] * 256, 3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(256)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")


@pytest.mark.parametrize(
    "case",
    [
        "llama",
        pytest.param("llama, all heads, tied", marks=pytest.mark.slow),
        "qwen2",
        pytest.param("qwen3", marks=pytest.mark.slow),
    ],
)
def test_a_file_gives_the_models_logits(tmp_path: Path, case: str) -> None:
    made(written(tmp_path / "a.gguf", case), tmp_path / "out", Choices(to="attention"))
    with torch.no_grad():
        found, expected = load_model(tmp_path / "out")(IDS).logits, model_of(case)(IDS).logits
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_quantised_weights_are_what_they_stand_for(tmp_path: Path) -> None:
    source = open_source(written(tmp_path / "a.gguf", quantise=True))
    plain = open_source(written(tmp_path / "b.gguf"))
    for name in plain.tensors:
        found, expected = source.read(name), plain.read(name)
        assert found.dtype == torch.float32
        quantised = expected.dim() == 2 and expected.shape[1] % 32 == 0
        assert torch.equal(found, expected) != quantised, name
        assert (found - expected).abs().max() <= expected.abs().max() / 127


@pytest.mark.parametrize(
    ("rule", "pieces"),
    [
        ("smollm", ["a", "ĠĠ", "1", "2", "b"]),  # as llama.cpp cuts it, and the model's own tokenizer
        ("gpt-2", ["a", "Ġ", "Ġ12", "b"]),
        ("qwen2", ["a", "Ġ", "Ġ", "1", "2", "b"]),  # by transformers
    ],
)
def test_text_is_split_as_the_file_says(tmp_path: Path, rule: str, pieces: list[str]) -> None:
    from tokenizers import Tokenizer

    open_source(written(tmp_path / "a.gguf", more={"add_tokenizer_pre": rule})).write_companions(tmp_path)
    split = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).pre_tokenizer
    assert [piece for piece, _ in split.pre_tokenize_str("a  12b")] == pieces


def test_an_unknown_way_to_split_text_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.gguf", more={"add_tokenizer_pre": "odd"})
    with pytest.raises(GSAError, match=r"tokenizer\.ggml\.pre is 'odd': how it splits text is not known"):
        made(path, tmp_path / "out", Choices(to="gsa"))
    assert not (tmp_path / "out").exists()


def test_tokenizer_and_chat_template_come_along(tmp_path: Path) -> None:
    made(written(tmp_path / "a.gguf"), tmp_path / "out", Choices(to="gsa"))
    model = gsa.load(tmp_path / "out")
    assert model.tokenizer.vocab_size == VOCABULARY
    assert model.tokenizer.decode(model.tokenizer.encode(["Hé 12"])[0]) == "Hé 12"
    assert model.generate("It was", max_tokens=2, seed=0).reason in ("length", "stop")
    assert model.chat(max_tokens=2).say("Hello") is not None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"add_sliding_window": 8}, "attention.sliding_window"),
        ({"add_rope_dimension_count": 4}, "rope.dimension_count is 4, and heads are 8 wide"),
        ({"add_rope_scaling_type": gguf.RopeScalingType.LINEAR}, "rope.scaling.type is 'linear'"),
        ({"add_rope_scaling_factor": 4.0}, "rope.scaling.factor is 4.0: scaling is not supported"),
        ({"add_causal_attention": False}, "attention.causal is false"),
        ({"add_expert_count": 4}, "expert_count is 4"),
    ],
)
def test_what_cannot_be_represented_is_refused(tmp_path: Path, more: Fields, message: str) -> None:
    with pytest.raises(GSAError, match=re.escape(message)):
        made(written(tmp_path / "a.gguf", more=more), tmp_path / "out", Choices(to="gsa"))
    assert not (tmp_path / "out").exists()


def test_broken_files_are_refused(tmp_path: Path) -> None:
    """Wherever a file is cut, nothing but a GSAError comes, and nothing is written."""
    whole = written(tmp_path / "a.gguf").read_bytes()
    for length in (0, 3, 20, 100, 1000, len(whole) // 2, len(whole) - 2000):
        (tmp_path / "b.gguf").write_bytes(whole[:length])
        with pytest.raises(GSAError):
            made(tmp_path / "b.gguf", tmp_path / "out", Choices(to="gsa"))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "b.gguf"], length


def test_other_kinds_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "gemma2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(GSAError, match=r"general\.architecture is 'gemma2'"):
        GGUFSource(tmp_path / "a.gguf", "a.gguf")
