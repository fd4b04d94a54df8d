"""Sources: shards, refusals by name, and errors that leave nothing behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import gsa
from gsa.convert import Choices, convert, prepare
from gsa.convert import run as run_module
from gsa.convert.sources import FolderSource
from gsa.convert.teacher import read_teacher
from gsa.convert.verify import verify_folder
from gsa.errors import GSAError
from gsa.models.checkpoint import load_model, load_weights
from tests.cli.running import run
from tests.convert.families import VOCABULARY, changed, made, saved

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
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
            },
            "rope_parameters is .*: rope_scaling says something else",
        ),
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
    for choices in (*(Choices(to=to) for to in ("gla", "retnet", "supra")), Choices(to="gsa", paper=True)):
        with pytest.raises(GSAError, match="norms of queries and keys"):
            made(source, tmp_path / "out", choices)
    made(source, tmp_path / "out", GSA)
    kept = load_weights(source)["model.layers.0.self_attn.q_norm.weight"]
    assert torch.equal(load_model(tmp_path / "out").model.layers[0].mixer.q_norm.weight, kept)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_window_of_null_is_none(tmp_path: Path, family: str) -> None:
    """transformers has its default of 4096 where nothing is said, and no window where null is."""
    source = changed(saved(tmp_path / "source", family), use_sliding_window=True, sliding_window=None)
    fields = json.loads((source / "config.json").read_text())
    fields.pop("layer_types", None)
    assert set(read_teacher(fields).windows) == {None}
    fields.pop("sliding_window")
    assert set(read_teacher(fields | {"max_window_layers": 0}).windows) == {4096}


def with_tensor(source: Path, name: str, change: Callable[[Tensor], Tensor]) -> Path:
    """The folder with a tensor changed."""
    file = source / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, name: change(tensors[name])}, file, metadata={"format": "pt"})
    return source


@pytest.mark.parametrize("to", ["hybrid", "gsa"])
def test_weights_that_are_not_finite_are_named_by_calibration_too(llama: Path, tmp_path: Path, to: str) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    source = with_tensor(Path(shutil.copytree(llama, tmp_path / "source")), name, lambda x: x.log())
    with pytest.raises(GSAError, match=f"tensor {name} is not finite"):
        convert(source, tmp_path / "out", Choices(to=to), tokens=256)
    assert left(tmp_path) == ["source"]


def test_weights_of_several_dtypes_keep_all_their_digits(llama: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(llama, tmp_path / "source"))
    tensors = load_file(source / "model.safetensors")
    mixed = {name: x.to(torch.float16 if "attn" in name else torch.bfloat16) for name, x in tensors.items()}
    save_file(mixed, source / "model.safetensors", metadata={"format": "pt"})
    assert made(source, tmp_path / "out", GSA).dtype == "float32"
    assert verify_folder(tmp_path / "out")[1].found.endswith("equal")
    made(source, tmp_path / "rounded", GSA, "bf16")
    assert "equal, rounded to bfloat16" in verify_folder(tmp_path / "rounded")[1].found


def test_tokens_that_the_model_does_not_have(llama: Path, tmp_path: Path) -> None:
    """Those that were added, a pad say, are left out; a vocabulary that is larger than the model's is refused."""
    source = Path(shutil.copytree(llama, tmp_path / "source"))
    path, config = source / "tokenizer.json", source / "tokenizer_config.json"
    plain = path.read_text()
    tokenizer = tokenizers.Tokenizer.from_str(plain)
    tokenizer.add_special_tokens(["<pad>"])
    path.write_text(tokenizer.to_str())
    config.write_text(json.dumps({**json.loads(config.read_text()), "pad_token": "<pad>"}))
    made(source, tmp_path / "out", GSA)
    assert gsa.load(tmp_path / "out").tokenizer.vocab_size == VOCABULARY
    assert "pad_token" not in json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    content = json.loads(plain)
    content["model"]["vocab"]["zzz"] = 300
    path.write_text(json.dumps(content))
    with pytest.raises(GSAError, match="the tokenizer has a vocabulary of 301, the model of 257"):
        made(source, tmp_path / "other", GSA)
    path.write_text(plain[:100])
    with pytest.raises(GSAError, match=f"^convert: .*{source.name}") as caught:
        made(source, tmp_path / "other", GSA)
    assert "unfinished" not in str(caught.value)
    assert left(tmp_path) == ["out", "source"]


def test_a_source_is_found_again_from_another_folder(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(llama, tmp_path / "owner/model")
    monkeypatch.chdir(tmp_path)
    made(Path("owner/model"), tmp_path / "out", GSA)
    monkeypatch.chdir("/")
    assert all(check.passed for check in verify_folder(tmp_path / "out"))
    shutil.rmtree(tmp_path / "owner")
    with pytest.raises(GSAError, match="was not found: there is no such folder or file"):
        verify_folder(tmp_path / "out")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("SOURCE", "OUT", "--verify", "DONE"), "OUT does nothing with --verify"),
        (("--verify", "DONE", "--slots", "3"), "--slots does nothing with --verify"),
        (("--verify", "DONE", "--plan"), "--plan does nothing with --verify"),
        (("SOURCE", "--plan", "--calibrate", "nosuch"), "nosuch cannot be read"),
        (("SOURCE", "--plan", "--calibrate-tokens", "-7"), "calibrate_tokens must be at least 0, got -7"),
        (("SOURCE", "OUT", "--calibrate", "BOOK", "--calibrate-tokens", "0"), "a text does nothing without tokens"),
        (("SOURCE", "OUT", "--to", "gsa", "--paper", "--calibrate-tokens", "99"), "so a number of tokens does nothing"),
        (("SOURCE", "OUT", "--to", "attention", "--seed", "7"), "nothing in attention begins at random, so seed 7"),
        (("SOURCE", "OUT", "--calibrate", "SOURCE/model.safetensors"), "is no text: it has bytes of value 0"),
        (("SOURCE", "OUT", "--to", "gsa", "--calibrate-tokens", "1"), "there is nothing to measure in texts of 1"),
    ],
)
def test_options_that_would_do_nothing(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture, words: tuple[str, ...], message: str
) -> None:
    (tmp_path / "book").write_text("It was a dark and stormy night. " * 100)
    places = {"SOURCE": llama, "OUT": tmp_path / "out", "DONE": tmp_path / "done", "BOOK": tmp_path / "book"}
    code, _, err = run(capsys, "convert", *(_placed(word, places) for word in words))
    assert code == 2
    assert message in err
    assert left(tmp_path) == ["book"]


def _placed(word: str, places: dict[str, Path]) -> str:
    first, *rest = word.split("/")
    return str(places[first].joinpath(*rest)) if first in places else word


def test_unknown_fields_are_told(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = changed(
        Path(shutil.copytree(llama, tmp_path / "source")), unsloth_version="2024.9", use_cache=True, scaled_heads=False
    )
    code, out, _ = run(capsys, "convert", str(source), "--plan")
    assert code == 0
    assert "unsloth_version = '2024.9'" in out
    assert "scaled_heads = False" in out
    assert "use_cache" not in out
    made(source, tmp_path / "out", GSA)
    assert json.loads((tmp_path / "out/convert.json").read_text())["unknown_fields"] == {
        "unsloth_version": "'2024.9'",
        "scaled_heads": "False",
    }
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
