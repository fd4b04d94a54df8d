"""What the documents say is true: examples run, commands exist, files stand where the tree says."""

import doctest
import importlib
import re
import shlex
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

import gsa
from gsa.cli.verbs import find
from gsa.ops import SlotState, gated_slot_attention
from tests.cli.running import run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def modules_with_examples() -> list[str]:
    """All modules with an example that can run: it does not need files of a user, as those marked with SKIP do."""
    example = re.compile(r">>> (?!.*doctest: \+SKIP)")
    files = (path for path in (ROOT / "src").rglob("*.py") if example.search(path.read_text()))
    places = (path.relative_to(ROOT / "src").with_suffix("").parts for path in files)
    return sorted(".".join(place).removesuffix(".__init__") for place in places)


@pytest.mark.parametrize("module", modules_with_examples())
def test_docstring_examples(module: str) -> None:
    loaded = importlib.import_module(module)
    results = doctest.testmod(loaded, extraglobs={"gsa": gsa, "torch": torch})
    assert results.attempted > 0
    assert results.failed == 0


def code_blocks(path: Path) -> list[str]:
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
    assert blocks
    return blocks


def test_readme_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    pages = [ROOT / "README.md", *(ROOT / f"docs/{name}.md" for name in ("index", "native", "models", "inference"))]
    for path in pages:
        for block in code_blocks(path):
            exec(compile(block, path.name, "exec"), {})


GATES = {
    "slow": lambda x: logsigmoid(x) / 1e6,
    "mild": lambda x: logsigmoid(x) / 8,
    "strong": lambda x: logsigmoid(x) / 0.1,
    "zero": torch.zeros_like,
    "some -inf": lambda x: (logsigmoid(x) / 8).masked_fill(x > 1, -torch.inf),
    "all -inf": lambda x: torch.full_like(x, -torch.inf),
    "-inf beside zero": lambda x: torch.where(torch.arange(x.shape[-1]) % 2 == 0, -torch.inf, 0.0).to(x).expand_as(x),
}


@pytest.mark.parametrize("gate", GATES)
def test_chunkwise_listing_computes_the_recurrence(gate: str) -> None:
    (listing,) = code_blocks(ROOT / "docs/operator.md")
    chunkwise: dict[str, Any] = {}
    exec(compile(listing, "operator.md", "exec"), chunkwise)
    random = torch.Generator().manual_seed(0)
    B, H, K, V, M = 2, 3, 5, 4, 6
    for T, start in product((0, 1, 7, 64, 65, 150), (0.0, 1.0)):
        q, k, v, logits, Kt, Vt = (
            torch.randn(B, *shape, generator=random, dtype=torch.float64)
            for shape in ((T, H, K), (T, H, K), (T, H, V), (T, H, M), (H, K, M), (H, M, V))
        )
        # Rounded to fp32, so that fp32 and fp64 compute from the same numbers.
        q, k, v, g, Kt, Vt = (x.float().double() for x in (q, k, v, GATES[gate](logits), Kt * start, Vt * start))
        o, state = gated_slot_attention(
            q, k, v, g, scale=1.0, initial_state=SlotState(Kt, Vt), output_final_state=True, backend="reference"
        )
        assert state is not None
        for dtype, error in ((torch.float64, 1e-14), (torch.float32, 1e-6)):
            by_head = (x.transpose(1, 2).to(dtype) for x in (q, k, v, g))
            found, *memories = chunkwise["gated_slot_attention"](*by_head, Kt.to(dtype), Vt.to(dtype))
            for ours, true in zip((found.transpose(1, 2), *memories), (o, *state), strict=True):
                assert (ours.double() - true).norm() <= error * true.norm(), (T, start, dtype)


def test_readme_is_short_and_its_links_lead_somewhere() -> None:
    assert len(README.splitlines()) < 200
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert "docs/pictures/tokens.svg" in links
    for link in links:
        assert (ROOT / link).exists(), link


def test_readme_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    commands = set(re.findall(r"make ([a-z-]+)", README))
    assert {"demo", "test"} <= commands
    for command in commands:
        assert f"\n{command}:" in makefile, command


def test_commands_of_the_documents_exist(capsys: pytest.CaptureFixture) -> None:
    """Verbs and options of every indented line with the command `gsa`."""
    helps: dict[tuple[str, ...], str] = {}
    lines = 0
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for line in re.findall(r"^    (?:.*\| )?gsa (.*)$", path.read_text(), re.MULTILINE):
            words = shlex.split(line.partition("|")[0], comments=True)
            verb = tuple(find(words)[0])
            if verb not in helps:
                helps[verb] = run(capsys, *verb, "--help")[1]
            options = [word.partition("=")[0] for word in words if re.match("--?[a-z]", word)]
            for option in options:
                assert re.search(rf"(?<![\w-]){option}(?![\w-])", helps[verb]), (path.name, line, option)
            lines += 1
    assert lines > 15


def test_the_tree_is_complete() -> None:
    listed = listed_paths(ROOT / "docs/tree.md")
    files = {
        path.relative_to(ROOT).as_posix()
        for folder in ("src", "csrc", "docs")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name != "__init__.py"
    }
    missing = sorted(files - listed)
    superfluous = sorted(path for path in listed if not (ROOT / path).exists())
    assert (missing, superfluous) == ([], []), f"docs/tree.md: missing {missing}, superfluous {superfluous}"
    assert "docs/tree.md" in README


def listed_paths(page: Path) -> set[str]:
    """The paths of an indented listing: two spaces for each level, a folder's name ends with a slash."""
    paths: set[str] = set()
    above: list[str] = []
    for line in page.read_text().splitlines():
        if not line.startswith("    "):
            continue
        entry = re.fullmatch(r" {4}((?:  )*)(\S+)  +\S.*", line)
        assert entry is not None, f"{page.name}: expected a name and what it is, got {line!r}"
        level = len(entry[1]) // 2
        above[level:] = [entry[2]]
        path = "".join(above)
        assert all(folder.endswith("/") for folder in above[:-1]), f"{page.name}: {path} is not below a folder"
        assert path not in paths, f"{page.name}: {path} is listed twice"
        paths.add(path)
    return paths


def test_no_machine_is_named() -> None:
    """No absolute path of a machine in any file of the project."""
    made = (".", "build", "dist", "out", "site")
    for top in ROOT.iterdir():
        if top.name.startswith(made):
            continue
        for path in (top, *top.rglob("*")):
            if path.suffix in {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".h", ".cpp", ".svg"}:
                found = re.search(r"(?<![\w.])/(home|root|work|Users)/", path.read_text())
                assert found is None or path == Path(__file__), path
