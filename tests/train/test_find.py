"""One place finds a model: by the package's name, a folder, a checkpoint, a run, or a name of the Hugging Face Hub."""

import json
from pathlib import Path

import pytest
import torch

import gsa.pretrained
from gsa import LM, Engine, GSAError
from gsa.infer.text import TextEngine
from gsa.models.checkpoint import save_model
from gsa.train.checkpoint import read_checkpoint, save_checkpoint
from gsa.train.export import export_checkpoint
from gsa.train.find import find_model
from tests.models.cases import model

TOKENIZER = gsa.pretrained.folder("gsa-tiny")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def lm() -> LM:
    return model("gsa", vocab_size=4096)


@pytest.fixture
def run(lm: LM, tmp_path: Path) -> Path:
    """Of two steps; in the second, all weights have the other sign."""
    for step in (1, 2):
        save_checkpoint(tmp_path / "run", step, lm.config, {"model": lm.state_dict()}, {}, tokenizer=TOKENIZER)
        with torch.no_grad():
            for x in lm.parameters():
                x.neg_()
    return tmp_path / "run"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a Hub that is out of reach."""

    def fail(*args: object, **options: object) -> None:
        raise ConnectionError("no way there")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", fail)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def put_on(hub: Path, name: str) -> Path:
    """A folder in the cache, as the Hub's own functions leave it."""
    owner, _, own = name.partition("/")
    repository = hub / f"models--{owner}--{own}"
    folder = repository / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return folder


def fingerprint(source: object) -> str:
    return Engine(source).model.fingerprint


def test_a_name_of_the_package() -> None:
    found = find_model("gsa-tiny")
    assert (found.folder, found.checkpoint, found.run) == (TOKENIZER, None, None)
    assert fingerprint("gsa-tiny") == fingerprint(TOKENIZER) == TextEngine.load().engine.model.fingerprint


def test_a_folder(lm: LM, tmp_path: Path) -> None:
    save_model(lm, tmp_path / "model")
    assert find_model(tmp_path / "model") == find_model(str(tmp_path / "model"))
    assert fingerprint(tmp_path / "model") == fingerprint(lm)


def test_a_folder_of_the_packages_name(lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was saved as gsa-tiny is loaded as gsa-tiny, as in transformers."""
    monkeypatch.chdir(tmp_path)
    save_model(lm, tmp_path / "gsa-tiny")
    for name in ("gsa-tiny", "./gsa-tiny", Path("gsa-tiny")):
        assert fingerprint(name) == fingerprint(lm)


def test_a_checkpoint_is_compared_with_its_manifest(run: Path) -> None:
    folder = run / "checkpoints" / "step-00000001"
    found = find_model(folder)
    assert (found.folder, found.run) == (folder, None)
    assert found.checkpoint == read_checkpoint(folder)
    (folder / "state.json").write_text("{}")
    with pytest.raises(GSAError, match=r"state\.json"):
        Engine(folder)


def test_a_run_is_its_newest_whole_checkpoint(run: Path, tmp_path: Path) -> None:
    first, second = (run / "checkpoints" / f"step-0000000{step}" for step in (1, 2))
    found = find_model(run)
    assert (found.folder, found.run) == (second, run)
    assert fingerprint(run) == fingerprint(second) != fingerprint(first)
    assert export_checkpoint(run, tmp_path / "out", print).checkpoint == second
    (second / "model.safetensors").write_bytes(b"")
    said: list[str] = []
    assert find_model(run, said.append).folder == first
    assert len(said) == 1
    with pytest.warns(UserWarning, match="model.safetensors .* the one before is looked at"):
        assert TextEngine.load(run).engine.model.fingerprint == fingerprint(first)
    (first / "model.safetensors").write_bytes(b"")
    with pytest.raises(GSAError, match="the run has no whole checkpoint"):
        find_model(run, said.append)
    assert second.is_dir()  # nothing is renamed by those who only read


def test_a_name_of_the_hub(lm: LM, hub: Path) -> None:
    folder = put_on(hub, "owner/name")
    save_model(lm, folder)
    for path in TOKENIZER.glob("tokenizer*"):
        (folder / path.name).write_bytes(path.read_bytes())
    assert find_model("owner/name").folder.resolve() == folder.resolve()
    assert TextEngine.load("owner/name").engine.model.fingerprint == fingerprint(lm)


def test_what_the_hub_has_is_fetched(lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Config first, and then the rest of the same model."""
    save_model(lm, tmp_path)
    asked = []

    def download(name: str, file: str, *, local_files_only: bool) -> str:
        asked.append((name, file, local_files_only))
        return str(tmp_path / file)

    def snapshot(name: str, *, allow_patterns: list[str], local_files_only: bool) -> str:
        asked.append((name, "model*.safetensors" in allow_patterns, local_files_only))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda url, timeout: asked.append(url))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert find_model("owner/name").folder == tmp_path
    url, *rest = asked
    assert url.endswith("owner/name/resolve/main/config.json")
    assert rest == [("owner/name", "config.json", False), ("owner/name", True, False)]


def test_pickled_weights_of_the_hub_are_named(lm: LM, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not fetched; what the Hub lists tells of them."""
    folder = put_on(hub, "owner/pickled")
    save_model(lm, folder)
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda name, revision: ["config.json", "pytorch_model.bin"])
    with pytest.raises(GSAError, match=r"model 'owner/pickled': there is neither model.safetensors nor"):
        find_model("owner/pickled")  # out of the cache, where they would not be
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda url, timeout: None)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda name, file, local_files_only: str(folder / file))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: str(folder))
    for load in (find_model, gsa.load, LM.from_pretrained):
        with pytest.raises(GSAError, match=r"model 'owner/pickled': its weights are pickled \(pytorch_model.bin\)"):
            load("owner/pickled")


def test_a_model_of_the_hub_that_is_not_ours(hub: Path) -> None:
    (put_on(hub, "owner/llama") / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(GSAError, match="model_type is 'llama', expected 'gated_slot_attention'"):
        find_model("owner/llama")


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "model must be a name or a folder, got ''"),
        (
            "nowhere",
            "model 'nowhere' was not found: there is no folder nowhere, the package has gsa-smol, gsa-tiny, and models "
            "of",
        ),
        ("gsa-tiny/", "model 'gsa-tiny/' was not found"),
        ("./no/where", r"models of the Hugging Face Hub are named owner/name$"),
        (Path("owner/name"), "model 'owner/name' was not found: there is no such folder"),
        (
            "owner/name",
            "model 'owner/name' was not found: there is no folder owner/name, the package has gsa-smol, gsa-tiny, and "
            "it could not be fetched from the Hugging Face Hub: no way there",
        ),
        ("gsa-tinny", r"named owner/name; did you mean gsa-tiny\?$"),
        ("gsa-small", "gsa-small is a preset without weights, which `gsa train --model gsa-small` can train$"),
        ("file", "model file is a file, expected the folder of a model"),
        ("begun", "model begun: the run has no checkpoint yet"),
        ("empty", r"model empty is neither a model \(config.json\), nor a checkpoint .* nor a run \(checkpoints\)"),
    ],
)
def test_what_is_not_there_is_said_alike_by_all(
    name: str | Path, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "settings.json").write_text("{}")
    for use in (find_model, Engine, TextEngine.load, gsa.load, LM.from_pretrained):
        with pytest.raises(GSAError, match=message):
            use(name)  # type: ignore[operator]


def test_a_name_that_is_nearly_one_of_the_package_asks_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gsa.train.find.on_hub", lambda name: pytest.fail("the Hub was asked"))
    with pytest.raises(GSAError, match="did you mean gsa-tiny"):
        find_model("gsa-tinny")


def test_offline_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(GSAError, match=r"which may not be asked: HF_HUB_OFFLINE is set$"):
        find_model("owner/name")


def test_a_name_that_the_hub_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import RepositoryNotFoundError

    class NotFound(RepositoryNotFoundError):
        def __init__(self) -> None:
            Exception.__init__(self, "401 Client Error. (Request ID: x)\n\nRepository Not Found")

    def missing(url: str, timeout: float) -> None:
        raise NotFound

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", missing)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(GSAError, match=r"and the Hugging Face Hub has no model of that name that you may read$"):
        find_model("owner/name")
