"""What the documents say is true: examples run, commands exist, files stand where the tree says."""

import doctest
import importlib
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    "module",
    [
        "gsa.cli.console",
        "gsa.data.order",
        "gsa.infer.engine",
        "gsa.infer.model",
        "gsa.infer.sampling",
        "gsa.mixers.registry",
        "gsa.models.catalogue",
        "gsa.models.config",
        "gsa.models.lm",
        "gsa.models.hf.config",
        "gsa.ops.api",
        "gsa.ops.step",
        "gsa.ops.registry",
        "gsa.ops.checks",
        "gsa.ops.linear",
        "gsa.ops.weights",
        "gsa.ops.selective_scan",
        "gsa.train.find",
        "gsa.train.progress",
        "gsa.train.schedule",
    ],
)
def test_docstring_examples(module: str) -> None:
    loaded = importlib.import_module(module)
    results = doctest.testmod(loaded, extraglobs={"torch": torch})
    assert results.attempted > 0
    assert results.failed == 0


def test_readme_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    for path in (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("native", "models", "inference"))):
        blocks = re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
        assert blocks
        for block in blocks:
            exec(compile(block, path.name, "exec"), {})


def test_readme_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    commands = set(re.findall(r"make ([a-z-]+)", README))
    assert {"demo", "test"} <= commands
    for command in commands:
        assert f"\n{command}:" in makefile, command


def test_readme_tree_is_the_tree() -> None:
    tree = README.split("## What is where")[1].split("## ")[0]
    named = set(re.findall(r"\b([\w]+\.(?:py|h|cpp))\b", tree))
    rooms = [
        path
        for room in ("data", "infer", "mixers", "models", "ops", "train")
        for path in (ROOT / "src/gsa" / room).rglob("*.py")
    ]
    files = {path.name for path in (*rooms, *(ROOT / "csrc").glob("*.[hc]*"))}
    assert files - {"__init__.py"} <= named
    for name in named:
        assert [*(ROOT / "src/gsa").rglob(name), *(ROOT / "csrc").glob(name), *(ROOT / "tests").rglob(name)], name


def test_no_machine_is_named() -> None:
    """No absolute path of a machine in any file of the project."""
    for path in ROOT.rglob("*"):
        inside = path.relative_to(ROOT).parts
        if path.suffix in {".py", ".md", ".toml", ".txt", ".yaml", ".h", ".cpp"} and not inside[0].startswith(
            (".", "out", "build")
        ):
            found = re.search(r"(?<![\w.])/(home|root|work|Users)/", path.read_text())
            assert found is None or path == Path(__file__), path
