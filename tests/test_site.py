"""The site of `make docs`: it builds without warnings, has every public name, and fetches nothing."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import gsa
from gsa.bench import decode_model
from tests.scripts import DOCS, script

ROOT = Path(__file__).parent.parent


def test_the_site_is_whole(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    assert "mkdocs build --strict" in (ROOT / "Makefile").read_text()
    run = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr == ""
    for page in tmp_path.rglob("*.html"):
        fetched = re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?(https?:)?//", page.read_text())
        assert not fetched, page
    for page, module in (("gsa", gsa), *((name, importlib.import_module(f"gsa.{name}")) for name in ("ops", "infer"))):
        text = (tmp_path / f"reference/{page}.html").read_text()
        for name in module.__all__:
            if name.startswith("__") or isinstance(getattr(module, name), ModuleType):
                continue
            where = name if page == "gsa" else f"{page}\\.([a-z_]+\\.)?{name}"
            assert re.search(rf'id="gsa\.{where}"', text), (page, name)
    examples = (tmp_path / "reference/ops.html").read_text()
    assert "&gt;&gt;&gt; " in examples
    assert "<blockquote>" not in examples


def test_examples_become_blocks_of_code() -> None:
    fenced = script(DOCS / "reference/examples.py").fenced
    assert fenced("What.\n\n>>> f(1)\n2\n\nMore.") == "What.\n\n```pycon\n>>> f(1)\n2\n```\n\nMore."
    assert fenced("No example.\n\n    code") == "No example.\n\n    code"


def test_pictures_show_the_tables() -> None:
    drawn = script(DOCS / "pictures/draw.py").pictures()
    assert set(drawn) == {path.name for path in (DOCS / "pictures").glob("*.svg")}
    for name, content in drawn.items():
        assert (DOCS / "pictures" / name).read_text() == content, f"docs/pictures/{name}: run `make pictures`"


def test_the_table_of_memory_is_true() -> None:
    config = decode_model.shape(quick=False)
    (options,) = set(config.layers)
    widths = options.kv_heads * options.key_width * config.num_hidden_layers
    table = script(DOCS / "pictures/draw.py").lines_of((DOCS / "results.md").read_text(), "tokens read")
    assert len(table["GSA, state"]) == 4
    for context, size in table["GSA, state"].items():
        assert size == 2 * 4 * widths * options.num_slots
        assert table["Llama, KV cache"][context] == 2 * 2 * widths * context
