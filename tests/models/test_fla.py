"""Checkpoints of flash-linear-attention give the same logits here as an independent forward in their own layout."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gsa.cli import main
from gsa.errors import GSAError
from gsa.models.checkpoint import load_model
from gsa.models.fla import import_checkpoint
from tests.models import fla_layout

EVERY_KIND: list[dict[str, Any]] = [
    {},
    {"norm_eps": 0.1},  # shows a wrong scale before a norm
    {"tie_word_embeddings": True},
    {"elementwise_affine": False},
    {"fuse_norm": False},
    {"hidden_act": "swish"},
    {"intermediate_size": 48},
    {"hidden_ratio": 2, "norm_eps": 0.01},
]
CONVOLVED = {"use_short_conv": True, "conv_size": 3}
OF_KIND: dict[str, list[dict[str, Any]]] = {
    "gsa": [
        {"num_kv_heads": 2},
        CONVOLVED,
        {"feature_map": "relu"},
        {"feature_map": "t2r"},
        {"num_slots": None},
        {"expand_k": 0.5},
        {"gate_logit_normalizer": 3},
        {"use_output_gate": True, "use_norm": False, "clamp_min": -1.0},  # stored, and never read
        {"attn": {"layers": [1], "num_heads": 4, "window_size": 5}},
        {
            "num_kv_heads": 2,
            "attn": [
                {"layers": [0], "num_heads": 2, "qkv_bias": True},
                {"layers": [2], "num_heads": 4, "num_kv_heads": 1, "rope_theta": 500.0},
            ],
        },
    ],
    "gla": [
        {"num_kv_heads": 2},
        CONVOLVED,
        {"feature_map": "relu", "use_output_gate": False},
        {"feature_map": "sqrelu"},
        {"feature_map": "silu"},
        {"feature_map": "sigmoid"},
        {"expand_k": 1.0, "expand_v": 2.0},
        {"attn": {"layers": [0, 2], "num_heads": 2}},
    ],
    "retnet": [
        {"num_kv_heads": 2, "norm_eps": 0.1},
        {"feature_map": "gelu"},
        {"feature_map": "relu2"},
        {"use_output_gate": False},
        {"use_short_conv": True},  # stored, and never read
        {"attn": {"layers": [2], "num_heads": 2}},
    ],
    "hgrn2": [
        CONVOLVED,
        {"use_lower_bound": False},
        {"expand_ratio": 16},
        {"expand_ratio": None, "num_heads": 2},
        {"attn": {"layers": [1], "num_heads": 4}},
    ],
    "abc": [
        {"use_rope": False},
        CONVOLVED,
        {"clamp_min": -0.5, "clamp_max": 0.5},
        {"num_slots": None},
        {"expand_k": 1.0, "expand_v": 2.0},
        {"attn": {"layers": [1], "num_heads": 4}},
    ],
    "transformer": [
        {"num_kv_heads": 2},
        {"qkv_bias": True},
        {"qk_norm": True},
        {"window_size": 7},
        {"rope_theta": 100.0},
    ],
}


def write(folder: Path, config: dict, weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: x.contiguous() for name, x in weights.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("kind", "overrides"), [(kind, more) for kind in fla_layout.KINDS for more in (*EVERY_KIND, *OF_KIND[kind])]
)
def test_same_logits(kind: str, overrides: dict, tmp_path: Path) -> None:
    config, weights = fla_layout.checkpoint(kind, seed=1, **overrides)
    import_checkpoint(write(tmp_path / "fla", config, weights), tmp_path / "ours")
    tokens = torch.randint(97, (2, 40))
    found = load_model(tmp_path / "ours").double()(tokens).logits
    expected = fla_layout.forward(config, {name: x.double() for name, x in weights.items()}, tokens)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_transformers_reads_it_and_generates(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config, weights = fla_layout.checkpoint("gsa", num_kv_heads=2)
    import_checkpoint(write(tmp_path / "fla", config, weights), tmp_path / "ours")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert (model.config.bos_token_id, model.config.eos_token_id) == (1, 2)
    tokens = torch.randint(3, 97, (1, 8))
    expected = fla_layout.forward(config, weights, tokens)[:, -1].argmax(-1)
    assert model.generate(tokens, max_new_tokens=1, do_sample=False)[0, -1] == expected


def test_both_matrices_of_an_mlp_in_one(tmp_path: Path) -> None:
    """Older checkpoints keep gate and up together."""
    config, weights = fla_layout.checkpoint("gla")
    tokens = torch.randint(97, (1, 20))
    expected = fla_layout.forward(config, weights, tokens)
    for i in range(3):
        gate, up = (f"model.layers.{i}.mlp.{name}_proj.weight" for name in ("gate", "up"))
        weights[gate] = torch.cat([weights[gate], weights.pop(up)])
    import_checkpoint(write(tmp_path / "fla", config, weights), tmp_path / "ours")
    torch.testing.assert_close(load_model(tmp_path / "ours")(tokens).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "field", "value", "message"),
    [
        ("gsa", "hidden_act", "powlu", "gsa: hidden_act is 'powlu': only 'swish' or 'silu' can be represented"),
        ("gla", "attnres_block_size", 4, "attnres_block_size is 4: only None can be represented"),
        ("gla", "clamp_min", -1.0, "clamp_min is -1.0: only None"),
        ("gla", "feature_map", "gelu", "feature_map is 'gelu': only null, swish"),
        ("gsa", "feature_map", "hedgehog", "feature_map is 'hedgehog'"),
        ("gsa", "expand_v", 2, "expand_v is 2: only 1"),
        ("abc", "clamp_max", 16, "clamp_min is -32: only limits -x and x can be represented, clamp_max is 16.0"),
        ("hgrn2", "expand_ratio", 7, "expand_ratio is 7: it must divide hidden_size 32"),
        ("gsa", "num_heads", None, "num_heads is None: it is missing"),
        ("gsa", "num_heads", "four", "num_heads is 'four': expected int"),
        ("gsa", "num_heads", 0, "num_heads is 0: expected at least 1"),
        ("gsa", "rope_scaling", {"type": "linear"}, "rope_scaling is .*: this field is not known"),
        ("gsa", "attn", {"layers": [7], "num_heads": 2}, r"layer 7 is not in 0..2"),
        ("gsa", "attn", "all", "attn is 'all': expected an object"),
        ("gsa", "attn", 5, "attn is 5: expected an object"),
        ("gsa", "attn", {"layers": [1], "num_heads": 2, "qk_norm": True}, "attn: qk_norm is True: only False"),
        ("gsa", "eos_token_id", "abc", "eos_token_id is 'abc', expected a whole number"),
        ("gsa", "model_type", "mamba2", "model_type is 'mamba2', expected one of gsa, gla"),
        ("gsa", "num_slots", 5, r"f_proj.weight is \[24, 32\], the config asks for \[20, 32\]"),
        ("gsa", "num_hidden_layers", 4, "tensor model.layers.3.mixer_norm.weight is missing"),
        ("gsa", "num_hidden_layers", 2, "tensor model.layers.2.* has no place"),
    ],
)
def test_what_cannot_be_represented_is_named(kind: str, field: str, value: Any, message: str, tmp_path: Path) -> None:
    config, weights = fla_layout.checkpoint(kind)
    config[field] = value
    with pytest.raises(GSAError, match=f"import: .*{message}|import: {message}"):
        import_checkpoint(write(tmp_path / "fla", config, weights), tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = write(tmp_path / "fla", *fla_layout.checkpoint("retnet"))
    (source / "tokenizer.json").write_text("{}")
    main(["import", str(source), str(tmp_path / "ours")])
    out = capsys.readouterr().out
    assert "retnet: " in out
    assert "tokenizer.json" in out
    assert (tmp_path / "ours" / "tokenizer.json").read_text() == "{}"
    for arguments, message in (
        ((str(source), str(tmp_path / "ours")), "holds a model already"),
        ((str(source), str(source)), "is the checkpoint itself"),
        ((str(tmp_path / "nowhere"), str(tmp_path / "new")), "is not a folder"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["import", *arguments])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    source = write(tmp_path / "fla", *fla_layout.checkpoint("gsa"))
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(
        GSAError, match=r"pickled \(pytorch_model.bin\), which is never read, .* convert them to safetensors"
    ):
        import_checkpoint(source, tmp_path / "ours")


@pytest.mark.parametrize("kind", ["gsa", "gla", "retnet", "hgrn2", "abc"])
def test_a_norm_that_is_missing_is_not_made_up(kind: str, tmp_path: Path) -> None:
    config, weights = fla_layout.checkpoint(kind)
    weights = {name: x for name, x in weights.items() if "g_norm" not in name}
    with pytest.raises(GSAError, match=r"tensor model.layers.0.mixer.norm.weight is missing"):
        import_checkpoint(write(tmp_path / "fla", config, weights), tmp_path / "ours")


def test_an_absent_feature_map_is_the_default_of_its_kind(tmp_path: Path) -> None:
    for kind in ("gsa", "gla", "retnet"):
        config, weights = fla_layout.checkpoint(kind)
        tokens = torch.randint(97, (1, 20))
        expected = fla_layout.forward(config, weights, tokens)
        del config["feature_map"]
        import_checkpoint(write(tmp_path / kind, config, weights), tmp_path / f"{kind}-ours")
        torch.testing.assert_close(load_model(tmp_path / f"{kind}-ours")(tokens).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), r"tensor model.layers.1.mlp.up_proj.weight is missing"),
        (
            lambda w: w.update({"model.norm.weight": torch.zeros(32, dtype=torch.int64)}),
            r"model.norm.weight is torch.int64",
        ),
        (lambda w: w.update({"more": torch.zeros(2)}), "tensor more has no place"),
    ],
)
def test_wrong_tensors_are_named(change: Any, message: str, tmp_path: Path) -> None:
    config, weights = fla_layout.checkpoint("gsa")
    change(weights)
    with pytest.raises(GSAError, match=message):
        import_checkpoint(write(tmp_path / "fla", config, weights), tmp_path / "ours")


def test_a_tied_config_over_another_head_is_refused(tmp_path: Path) -> None:
    config, weights = fla_layout.checkpoint("gsa")
    config["tie_word_embeddings"] = True
    with pytest.raises(GSAError, match=r"import: tie_word_embeddings is true, but lm_head.weight is not"):
        import_checkpoint(write(tmp_path / "fla", config, weights), tmp_path / "ours")


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "ours").touch()
    with pytest.raises(GSAError, match="is a file, expected a folder"):
        import_checkpoint(write(tmp_path / "fla", *fla_layout.checkpoint("gsa")), tmp_path / "ours")
