"""Sources: shards, refusals by name, and errors that leave nothing behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import gsa
from gsa.convert import Choices, prepare
from gsa.convert import run as run_module
from gsa.convert.sources import FolderSource
from gsa.convert.teacher import read_teacher
from gsa.errors import GSAError
from gsa.models.checkpoint import load_model, load_weights
from tests.cli.running import run
from tests.convert.families import changed, made, saved

GSA = Choices(to="gsa")


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Shards


def test_shards_give_what_one_file_does(tmp_path: Path) -> None:
    """Output in shards too, of no more than the largest of the source; they load, and they write."""
    whole, parts = saved(tmp_path / "whole"), saved(tmp_path / "parts", shard="20KB")
    assert len(list(parts.glob("model-*-of-*.safetensors"))) > 4
    for source, out in ((whole, "a"), (parts, "b")):
        made(source, tmp_path / out, GSA)
    a, b = load_weights(tmp_path / "a"), load_weights(tmp_path / "b")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert (tmp_path / "b/model.safetensors.index.json").exists()
    largest = max(path.stat().st_size for path in parts.glob("model-*.safetensors"))
    assert max(path.stat().st_size for path in (tmp_path / "b").glob("model-*.safetensors")) <= 1.05 * largest
    ids = torch.arange(20)[None]
    assert torch.equal(load_model(tmp_path / "a")(ids).logits, load_model(tmp_path / "b")(ids).logits)
    assert gsa.load(tmp_path / "b").generate("It", max_tokens=2, seed=0).reason in ("length", "stop")


def seven_billion(folder: Path, layers: int = 32, shards: int = 16) -> Path:
    """Mistral 7B's layout with every width divided by 32, in many files."""
    folder.mkdir()
    D, inner, V, K = 128, 448, 1000, 32
    config = {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": D // 4,
        "num_key_value_heads": 8,
        "head_dim": 4,
        "sliding_window": None,
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = {"model.embed_tokens.weight": (V, D), "lm_head.weight": (V, D), "model.norm.weight": (D,)}
    for i in range(layers):
        for name, shape in {
            "self_attn.q_proj": (D, D),
            "self_attn.k_proj": (K, D),
            "self_attn.v_proj": (K, D),
            "self_attn.o_proj": (D, D),
            "mlp.gate_proj": (inner, D),
            "mlp.up_proj": (inner, D),
            "mlp.down_proj": (D, inner),
            "input_layernorm": (D,),
            "post_attention_layernorm": (D,),
        }.items():
            weights[f"model.layers.{i}.{name}.weight"] = shape
    names, files = list(weights), {}
    for shard in range(shards):
        own = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: torch.randn(weights[name], dtype=torch.float32).bfloat16() for name in own}, folder / file)
        files |= dict.fromkeys(own, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def test_no_more_is_in_memory_than_the_largest_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout as of 7B, smaller, in 16 files: bytes of tensors that are alive are counted when each is read."""
    source = seven_billion(tmp_path / "source")
    alive: dict[int, int] = {}
    most = 0

    class Counted(torch.Tensor):
        def __del__(self) -> None:
            alive.pop(id(self), None)

    original = run_module.checked

    def counted(*args: Any) -> torch.Tensor:
        nonlocal most
        x = original(*args).as_subclass(Counted)
        alive[id(x)] = x.nbytes
        most = max(most, sum(alive.values()))
        return x

    monkeypatch.setattr(run_module, "checked", counted)
    made(source, tmp_path / "out", GSA)
    sizes = [path.stat().st_size for path in source.glob("*.safetensors")]
    assert 0 < most <= 1.05 * max(sizes)
    assert sum(sizes) > 10 * most
    assert not alive
    weights = load_weights(tmp_path / "out")
    name = "model.layers.31.mlp.down_proj.weight"
    assert torch.equal(weights[name], load_file(source / "model-00016-of-00016.safetensors")[name])
    assert {x.dtype for x in weights.values()} == {torch.bfloat16}


# Refusals


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gemma2"}, "model_type is 'gemma2', expected one of llama, mistral, qwen2, qwen3"),
        ({"model_type": 7}, "model_type is 7"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures is .*: expected LlamaForCausalLM"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            "rope_parameters: original_max_position_embeddings is None: it is missing",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            "rope_scaling: type is 'yarn': only default, linear, llama3",
        ),
        ({"rope_scaling": {"type": "linear", "rope_type": "llama3"}}, "rope_scaling: type is 'linear': only default"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_factor must be"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2, "beta": 1}},
            "rope_scaling: beta is 1: this field is not known",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters: partial_rotary_factor is 0.5"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"sliding_window": 128}, "sliding_window is 128"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({"logits_scaling": 8.0}, "logits_scaling is 8.0"),
        ({"num_local_experts": 8}, "num_local_experts is 8"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map is"),
        ({"num_attention_heads": 5, "head_dim": None}, "num_attention_heads is 5: it must divide hidden_size 32"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads"),
        ({"hidden_size": "32"}, "hidden_size is '32': expected int"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000: expected at most"),
        ({"vocab_size": ...}, "vocab_size is None: it is missing"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"vocab_size": 300}, r"tensor model.embed_tokens.weight is \[257, 32\], its config asks for \[300, 32\]"),
        ({"num_hidden_layers": 4}, "tensor model.layers.3.* is missing"),
        ({"num_hidden_layers": 2}, "tensor model.layers.2.* has no place"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true, but lm_head.weight is not"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_name(
    llama: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    source = changed(Path(shutil.copytree(llama, tmp_path / "source")), **fields)
    with pytest.raises(GSAError, match=message):
        made(source, tmp_path / "out", GSA)
    assert left(tmp_path) == ["source"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return saved(tmp_path_factory.mktemp("llama") / "source")


def test_norms_of_queries_have_no_place_in_some_students(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", "qwen3")
    for to in ("gsa", "gla", "retnet", "supra"):
        with pytest.raises(GSAError, match="norms of queries and keys"):
            made(source, tmp_path / "out", Choices(to=to))


def test_unknown_fields_are_told(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = changed(Path(shutil.copytree(llama, tmp_path / "source")), unsloth_version="2024.9", use_cache=True)
    code, out, _ = run(capsys, "convert", str(source), "--plan")
    assert code == 0
    assert "unsloth_version = '2024.9'" in out
    assert "use_cache" not in out
    made(source, tmp_path / "out", GSA)
    assert json.loads((tmp_path / "out/convert.json").read_text())["unknown_fields"] == {"unsloth_version": "'2024.9'"}
    assert "unsloth_version" in (tmp_path / "out/README.md").read_text()


def test_windows_of_the_families() -> None:
    sizes = {
        "vocab_size": 9,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
    }
    for fields, windows in (
        ({"model_type": "llama"}, (None, None, None)),
        ({"model_type": "mistral"}, (4096,) * 3),  # transformers' default
        ({"model_type": "mistral", "sliding_window": None}, (None,) * 3),
        ({"model_type": "qwen2", "sliding_window": 7, "max_window_layers": 1}, (None,) * 3),
        (
            {"model_type": "qwen2", "sliding_window": 7, "max_window_layers": 2, "use_sliding_window": True},
            (None, None, 7),
        ),
    ):
        assert read_teacher({**sizes, **fields}).windows == windows, fields


# Wrong sources


def test_wrong_sources_leave_nothing(llama: Path, tmp_path: Path) -> None:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(llama, tmp_path / "sources" / name))

    truncated = copy("truncated") / "model.safetensors"
    truncated.write_bytes(truncated.read_bytes()[:-100])
    pickled = copy("pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    empty = tmp_path / "sources/empty"
    empty.mkdir()
    broken = copy("broken")
    (broken / "config.json").write_text("{")
    integers, infinite = copy("integers"), copy("infinite")
    for folder, dtype, value in ((integers, torch.int8, 1.0), (infinite, torch.float32, torch.inf)):
        weights = load_file(folder / "model.safetensors")
        weights["model.norm.weight"] = torch.full((32,), value).to(dtype)
        save_file(weights, folder / "model.safetensors")
    lost = saved(tmp_path / "sources/lost", shard="20KB")
    sorted(lost.glob("model-*.safetensors"))[2].unlink()
    other = saved(tmp_path / "sources/other", shard="20KB")
    first, second, *_ = sorted(other.glob("model-*.safetensors"))
    second.write_bytes(first.read_bytes())
    (tmp_path / "sources/file.txt").write_text("It was")
    for name, message in {
        "truncated": "not a whole safetensors file",
        "pickled": "its weights are pickled",
        "empty": "has no config.json",
        "broken": "not JSON",
        "integers": "tensor model.norm.weight is int8; quantised weights are not read",
        "infinite": "tensor model.norm.weight is not finite",
        "lost": "model-00003-of.*not a whole|no such file|No such file",
        "other": "is missing, which model.safetensors.index.json says is there",
        "file.txt": "is a file, expected the folder of a model",
        "nothing": "there is no such folder or file, and models of the Hugging Face Hub are named owner/name",
        "a.gguf": "there is no such folder or file",
    }.items():
        with pytest.raises(GSAError, match=message):
            made(tmp_path / "sources" / name, tmp_path / "out", GSA)
        assert left(tmp_path) == ["sources"], name


def test_too_large_for_fp16(llama: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(llama, tmp_path / "source"))
    weights = load_file(source / "model.safetensors")
    weights["model.norm.weight"] *= 1e6
    save_file(weights, source / "model.safetensors")
    with pytest.raises(GSAError, match="does not fit into fp16"):
        made(source, tmp_path / "out", GSA, "fp16")
    assert left(tmp_path) == ["source"]


def test_a_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def refuse(name: str, check: object) -> Path:
        raise OSError("no route to host")

    monkeypatch.setattr("gsa.convert.sources.on_hub", refuse)
    with pytest.raises(GSAError, match="could not be fetched from the Hugging Face Hub: no route to host"):
        made(Path("owner/name"), tmp_path / "out", GSA)


def test_what_is_there_is_not_touched(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("It was")
    with pytest.raises(GSAError, match="is there already; expected a new or empty folder"):
        made(llama, out, GSA)
    assert left(out) == ["mine.txt"]
    with pytest.raises(GSAError, match="is there already"):
        made(llama, llama, GSA)


def test_too_little_disk(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "free_bytes", lambda path: 1000)
    with pytest.raises(GSAError, match="are needed, 1000 bytes are free there"):
        made(llama, tmp_path / "out", GSA)
    assert left(tmp_path) == []


def test_a_disk_that_fills_up_leaves_nothing(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: FolderSource, name: str) -> torch.Tensor:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FolderSource, "read", full)
    with pytest.raises(GSAError, match="No space left on device"):
        made(llama, tmp_path / "out", GSA)
    assert left(tmp_path) == []


# The plan


def test_the_plan_changes_nothing(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    code, out, _ = run(capsys, "convert", str(llama), str(tmp_path / "out"), "--to", "gsa", "--plan")
    assert code == 0
    for words in ("layers.*.self_attn.q_proj", "f_proj.bias", "rotary positions", "65,536", "takes about"):
        assert words in "".join(out.split("\n")), words
    assert left(tmp_path) == []


def test_the_plan_counts_memory_and_operations(llama: Path, capsys: pytest.CaptureFixture) -> None:
    """KV-cache: 2 x 3 layers x 2 heads x 8 numbers of fp32 a token. State: slots of 2 heads, keys and values."""
    code, out, _ = run(capsys, "convert", str(llama), "--to", "gsa", "--slots", "8", "--plan", "--json")
    assert code == 0
    report = json.loads(out)
    first = report["costs"][0]
    assert first["tokens"] == 1024
    assert first["cache"] == 4 * 2 * 3 * 2 * 8 * 1024
    assert first["state"] == 4 * 3 * 2 * 8 * (8 + 8)
    weights = 3 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 40 + 2 * 32) + 32 + 257 * 32  # without the embedding
    assert first["teacher_flops"] == 2 * weights + 2 * 2 * (2 * 3 * 2 * 8 * 1024)
    assert report["bytes"] == prepare(llama, Choices(to="gsa", slots=8)).nbytes
    assert len(report["new"]) == 6
