"""Export: what others load is what was trained, with its tokenizer and a card whose code runs."""

import errno
import json
import os
import re
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

from gsa import pretrained
from gsa.cli.export import export
from gsa.errors import GSAError
from gsa.models import LM, ModelConfig
from gsa.models.checkpoint import load_model
from gsa.train.checkpoint import save_checkpoint

VOCABULARY = 257
CONFIG = ModelConfig(hidden_size=16, num_hidden_layers=2, vocab_size=VOCABULARY, num_attention_heads=2, num_slots=4)
STATE = {
    "tokens": 123456,
    "samples": 60,
    "settings": {"lr": 3e-4, "data": "/somewhere/private/books", "ema": None, "model_options": {"num_slots": 4}},
    "data": {
        "fingerprint": "abc",
        "tokenizer": {"name": "/somewhere/private/letters", "fingerprint": "d", "vocab_size": 257, "eos_id": 256},
        "documents": 18,
        "tokens": 4000000,
        "text_bytes": 11_800_000,
        "sources": [{"path": "/somewhere/private/emma.txt", "bytes": 3}, "wiki|text", {"bytes": 3}, 7],
    },
    "eval": {"step": 3, "loss": 2.3456, "perplexity": 10.44, "bits_per_byte": 1.875},
    "best": {"step": 1, "loss": 2.2},
    "skipped": 2,
    "seconds": 5400.0,
    "gsa": "0.1.0",
}


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here depends on the disk, which may be busy."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer of bytes, with a token that ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tokenizer")
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=letters, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder


def weights(step: int, config: ModelConfig = CONFIG) -> dict[str, Tensor]:
    torch.manual_seed(step)
    return LM(config).state_dict()


def save(run: Path, step: int, tokenizer: Path | None = None, state: dict | None = None) -> Path:
    tensors = {"model": weights(step), "optimizer": {"step": torch.tensor(1)}, "ema": weights(step + 100)}
    return save_checkpoint(run, step, CONFIG, tensors, STATE if state is None else state, tokenizer=tokenizer)


@pytest.fixture
def run(tmp_path: Path, tokenizer: Path) -> Path:
    """A run with the checkpoints 1, 2 and 3, of which 1 is the best."""
    for step in (1, 2, 3):
        save(tmp_path / "run", step, tokenizer)
    return tmp_path / "run"


def holds(folder: Path, expected: dict[str, Tensor]) -> bool:
    loaded = load_model(folder).state_dict()
    return all(torch.equal(loaded[name], x) for name, x in expected.items())


def test_what_is_exported_loads_everywhere(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "new" / "model"
    export(str(run), str(out))
    count = f"{load_model(out).num_parameters:,}"
    assert f"step 3: {count} parameters, fp32 ->" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {
        *("README.md", "config.json", "model.safetensors", "modeling_gsa.py", "tokenizer.json"),
        "tokenizer_config.json",
    }
    assert holds(out, weights(3))
    theirs = AutoModelForCausalLM.from_pretrained(out)
    assert theirs.config.eos_token_id == theirs.generation_config.eos_token_id == 256
    words = AutoTokenizer.from_pretrained(out)
    # The checkpoint's tokenizer has no token for pads.
    assert theirs.config.pad_token_id == words.pad_token_id == 256
    assert json.loads((out / "config.json").read_text())["auto_map"]["AutoConfig"] == "modeling_gsa.GSAConfig"
    ids = words("Größe", return_tensors="pt").input_ids
    assert words.decode(ids[0]) == "Größe"
    assert torch.equal(theirs(ids).logits, load_model(out)(ids).logits)


def test_which_checkpoint_and_which_weights(run: Path, tmp_path: Path) -> None:
    export(str(run), str(tmp_path / "best"), best=True)
    assert holds(tmp_path / "best", weights(1))
    export(str(run / "checkpoints" / "step-00000002"), str(tmp_path / "second"))
    assert holds(tmp_path / "second", weights(2))
    export(str(run), str(tmp_path / "average"), ema=True)
    assert holds(tmp_path / "average", weights(103))
    assert re.search(r"\| fp32, [0-9.]+ KB, moving average \|", (tmp_path / "average" / "README.md").read_text())


@pytest.mark.parametrize(("name", "dtype"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_dtypes(run: Path, tmp_path: Path, name: str, dtype: str) -> None:
    export(str(run), str(tmp_path / "out"), dtype=name)
    loaded = load_model(tmp_path / "out")
    assert {str(x.dtype) for x in loaded.parameters()} == {f"torch.{dtype}"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    expected = {name: x.to(getattr(torch, dtype)) for name, x in weights(3).items()}
    assert holds(tmp_path / "out", expected)


def test_weights_keep_their_dtype(tmp_path: Path) -> None:
    half = {name: x.to(torch.bfloat16) for name, x in weights(1).items()}
    save_checkpoint(tmp_path / "run", 1, CONFIG, {"model": half}, {})
    export(str(tmp_path / "run"), str(tmp_path / "out"))
    assert holds(tmp_path / "out", half)
    assert load_model(tmp_path / "out").lm_head.weight.dtype == torch.bfloat16


def test_a_tied_head_stays_tied(tmp_path: Path) -> None:
    config = ModelConfig.from_dict({**CONFIG.to_dict(), "tie_word_embeddings": True})
    save_checkpoint(tmp_path / "run", 1, config, {"model": weights(1, config)}, {})
    export(str(tmp_path / "run"), str(tmp_path / "out"))
    model = load_model(tmp_path / "out")
    assert model.lm_head.weight is model.model.embeddings.weight
    assert f"{model.num_parameters:,}" in (tmp_path / "out" / "README.md").read_text()


def test_json(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    export(str(run), str(tmp_path / "out"), json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["step"] == 3
    assert told["parameters"] == load_model(tmp_path / "out").num_parameters
    assert told["dtype"] == "fp32"
    assert told["checkpoint"].endswith("step-00000003")
    assert set(told["files"]) == {path.name for path in (tmp_path / "out").iterdir()}


def test_a_broken_checkpoint_is_passed_over_aloud_and_left_as_it_is(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (run / "checkpoints/step-00000003/optimizer.safetensors").unlink()
    export(str(run), str(tmp_path / "out"))
    assert "optimizer.safetensors is missing" in capsys.readouterr().err
    assert holds(tmp_path / "out", weights(2))
    assert (run / "checkpoints/step-00000003").is_dir()
    with pytest.raises(GSAError, match=r"optimizer\.safetensors is missing"):
        export(str(run / "checkpoints/step-00000003"), str(tmp_path / "other"))


def test_mistakes_are_said_before_anything_is_written(run: Path, tmp_path: Path) -> None:
    one = run / "checkpoints/step-00000003"
    plain = save_checkpoint(tmp_path / "plain", 1, CONFIG, {"model": weights(1)}, {})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    empty = tmp_path / "empty"
    (empty / "checkpoints").mkdir(parents=True)
    cases = [
        ((tmp_path / "nowhere", "out"), {}, "export: model .* was not found: there is no such folder"),
        (("gsa-tiny", "out"), {}, "export: model 'gsa-tiny' was not found: there is no such folder"),
        ((pretrained.folder("gsa-tiny"), "out"), {}, "is a model, but neither a checkpoint of training nor a run"),
        ((empty, "out"), {}, "has no whole checkpoint"),
        ((one, "out"), {"best": True}, "--best chooses among those of a run's folder"),
        ((tmp_path / "plain", "out"), {"best": True}, "the run has not evaluated any"),
        ((plain, "out"), {"ema": True}, "has no moving average"),
        ((run, "out"), {"dtype": "int8"}, "dtype must be one of fp32, bf16, fp16, got 'int8'"),
        ((run, "full"), {}, "is there already; expected a new or empty folder"),
        ((run, "full/file"), {}, "is there already; expected a new or empty folder"),
        ((run, "full/file/out"), {}, "export: cannot write"),
    ]
    for (source, out), options, message in cases:
        with pytest.raises(GSAError, match=message):
            export(str(source), str(tmp_path / out), **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "full", "plain", "run"]
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["file"]


def test_a_best_checkpoint_that_is_gone(tmp_path: Path) -> None:
    save(tmp_path / "run", 3)
    with pytest.raises(GSAError, match="of step 1, is no longer there"):
        export(str(tmp_path / "run"), str(tmp_path / "out"), best=True)


def test_a_device_beside_the_weights_is_not_copied(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", 3)
    (folder / "tokenizer.extra.json").symlink_to("/dev/zero")
    with pytest.raises(GSAError, match="not a regular file"):
        export(str(tmp_path / "run"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_weights_that_a_dtype_cannot_hold(tmp_path: Path) -> None:
    large = {**weights(1), "model.norm.weight": torch.full((16,), 1e6)}
    save_checkpoint(tmp_path / "run", 1, CONFIG, {"model": large}, {})
    with pytest.raises(GSAError, match=r"tensor model\.norm\.weight is not finite in fp16"):
        export(str(tmp_path / "run"), str(tmp_path / "out"), dtype="fp16")
    export(str(tmp_path / "run"), str(tmp_path / "out"), dtype="bf16")


@pytest.mark.parametrize("end", [257, -1, "2", True])
def test_an_end_of_text_outside_the_vocabulary(tmp_path: Path, end: object) -> None:
    save(tmp_path / "run", 1, state={"data": {"tokenizer": {"eos_id": end}}})
    with pytest.raises(GSAError, match=f"eos_id is {end!r}, expected 0 to 256"):
        export(str(tmp_path / "run"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["os.fsync", "os.rename"])
def test_a_full_disk_leaves_no_half_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "out").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(place, full)
        with pytest.raises(GSAError, match=r"export: cannot write .*out: .*No space left on device.* are needed"):
            export(str(run), str(tmp_path / "out"))
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]
    assert os.listdir(tmp_path / "out") == []
    export(str(run), str(tmp_path / "out"))
    assert holds(tmp_path / "out", weights(3))


def card_of(folder: Path) -> tuple[dict, str]:
    """Front matter and text of a card."""
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


def test_the_card_says_what_is_known(run: Path, tmp_path: Path) -> None:
    export(str(run), str(tmp_path / "small-model"), licence="apache-2.0")
    front, text = card_of(tmp_path / "small-model")
    assert front == {
        "library_name": "gsa",
        "pipeline_tag": "text-generation",
        "tags": ["gated-slot-attention", "gsa"],
        "license": "apache-2.0",
    }
    model = load_model(tmp_path / "small-model")
    for line in (
        "# small-model",
        "with the token mixer `gsa`, trained with gsa-lm 0.1.0.",
        "| layers | 2 |",
        "| width | 16 |",
        f"| parameters | {model.num_parameters:,} |",
        f"| state | {model.state_size:,} numbers per sequence of any length |",
        "| vocabulary | 257 tokens, tokenizer `letters` |",
        "| steps | 3 |",
        "| tokens seen | 123,456 |",
        "| steps skipped, not finite | 2 |",
        "| time | 1.50 hours |",
        "| documents in the data | 18 |",
        "| text in the data | 11.3 MB |",
        "| sources | `emma.txt`, `wiki text` |",
        "| validation loss | 2.3456 nats per token |",
        "| perplexity | 10.440 |",
        "| bits per byte | 1.8750 |",
        "| measured | at step 3 |",
        "lr: 0.0003",
        'data: "books"',
    ):
        assert line in text, line
    assert "somewhere" not in text


def test_the_card_says_whose_loss_it_is(tmp_path: Path) -> None:
    """A run with a moving average evaluates that."""
    save(tmp_path / "run", 3, state={**STATE, "settings": {"ema": 0.999}})
    export(str(tmp_path / "run"), str(tmp_path / "last"))
    export(str(tmp_path / "run"), str(tmp_path / "average"), ema=True)
    for name, last in (("last", True), ("average", False)):
        text = card_of(tmp_path / name)[1]
        assert "| measured | at step 3, of the weights' moving average |" in text
        assert ("were not measured" in text) == last


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"eval": None, "best": None, "data": None, "settings": None},
        {"eval": {"loss": float("nan"), "step": 3}, "data": [], "settings": [], "seconds": "long", "gsa": 3},
        {"data": {"tokenizer": None, "sources": {"a": 1}, "documents": "many"}, "eval": 3, "tokens": True},
    ],
)
def test_the_card_leaves_out_what_is_not_known(tmp_path: Path, state: dict) -> None:
    save(tmp_path / "run", 3, state=state)
    export(str(tmp_path / "run"), str(tmp_path / "out"))
    front, text = card_of(tmp_path / "out")
    assert "license" not in front
    assert "| steps | 3 |" in text
    for absent in ("None", "nan", "Evaluation", "Settings", "sources", "True", "many"):
        assert absent not in text
    assert "eos_token_id" not in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.parametrize("with_tokenizer", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_code_in_the_card_runs(
    tmp_path: Path,
    tokenizer: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    with_tokenizer: bool,
    dtype: str,
) -> None:
    save(tmp_path / "run", 1, tokenizer if with_tokenizer else None)
    export(str(tmp_path / "run"), str(tmp_path / "a model"), dtype=dtype)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (tmp_path / "a model" / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    if with_tokenizer:
        assert printed.count("It was") == 2
    else:
        assert "tensor" in printed
        assert f"torch.Size([1, 1, {VOCABULARY}])" in printed


def test_a_state_that_grows_and_many_sources(tmp_path: Path) -> None:
    config = ModelConfig(mixer="attention", hidden_size=16, num_hidden_layers=1, vocab_size=20, num_attention_heads=2)
    state = {"data": {"sources": [f"book-{i}" for i in range(25)]}}
    save_checkpoint(tmp_path / "run", 1, config, {"model": weights(1, config)}, state)
    export(str(tmp_path / "run"), str(tmp_path / "out"))
    text = card_of(tmp_path / "out")[1]
    assert "| state | grows with the sequence |" in text
    assert "`book-19` and 5 more |" in text
