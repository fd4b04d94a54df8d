"""What `make wheel` builds: a source archive, and a wheel that runs where there is no compiler."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler to build the wheel"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with both, built by the command of the Makefile."""
    folder = tmp_path_factory.mktemp("dist")
    assert "\t$(BIN)/python -m build --outdir dist .\n" in (ROOT / "Makefile").read_text()
    run = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", folder, ROOT], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-5000:]
    return folder


@pytest.fixture(scope="module")
def elsewhere(built: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a machine that has the wheel, what it depends on, and nothing else to run."""
    folder = tmp_path_factory.mktemp("elsewhere")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin/python"
    (wheel,) = built.glob("*.whl")
    install = ["install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", wheel]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, *install], check=True)
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip())
    # torch and the others are those of this environment: behind the wheel, and without what installs gsa here.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GSA_", "TRITON"))}
    environment = kept | {"PATH": str(folder / "bin")}
    for tool in ("cc", "c++", "gcc", "g++", "clang", "cmake", "make"):
        assert shutil.which(tool, path=environment["PATH"]) is None
    return environment


def run(environment: dict[str, str], program: str, *arguments: str, cwd: Path) -> str:
    path = shutil.which(program, path=environment["PATH"])
    assert path is not None
    done = subprocess.run(
        [path, *arguments], env=environment, cwd=cwd, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_runs_without_a_compiler(elsewhere: dict[str, str], tmp_path: Path) -> None:
    assert run(elsewhere, "gsa", "--version", cwd=tmp_path).startswith("gsa ")
    report = json.loads(run(elsewhere, "gsa", "doctor", "--json", cwd=tmp_path))
    inside = str(Path(elsewhere["PATH"]).parent)
    assert report["native"]["available"], report["native"]["reason"]
    assert report["native"]["library"].startswith(inside)
    code = """
import torch, gsa
from gsa.ops import gated_slot_attention
print(gsa.__file__)
q, k, v = torch.randn(3, 1, 100, 2, 16)
g = -torch.rand(1, 100, 2, 8)
o, _ = gated_slot_attention(q, k, v, g, backend="native")
torch.testing.assert_close(o, gated_slot_attention(q, k, v, g, backend="reference")[0], atol=1e-5, rtol=1e-5)
"""
    assert run(elsewhere, "python", "-c", code, cwd=tmp_path).startswith(inside)
    first = run(elsewhere, "gsa", "generate", "It is a truth", "-n", "8", "--seed", "1", cwd=tmp_path)
    assert first.strip()
    assert first == run(elsewhere, "gsa", "generate", "It is a truth", "-n", "8", "--seed", "1", cwd=tmp_path)


def test_everything_is_inside(built: Path) -> None:
    """The wheel has every file of the package and nothing else; the archive, all that builds and tests it."""
    ours = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"gsa/pretrained/gsa-tiny/model.safetensors", "gsa/py.typed"} < ours
    assert any(name.startswith("gsa/pretrained/books/") for name in ours)
    (wheel,) = built.glob("gsa_lm-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    added = {name for name in names if not name.startswith("gsa_lm-")}
    assert added == ours | {"gsa/ops/native/libgsa_native.so"}
    (archive,) = built.glob("gsa_lm-*.tar.gz")
    with tarfile.open(archive) as opened:
        inside = {name.partition("/")[2] for name in opened.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "csrc/native.h", "tests/test_wheel.py"} <= inside
    assert {f"src/{name}" for name in ours} <= inside
    assert not [name for name in inside if name.startswith((".venv", "build/", "out/", "site/"))]
