"""The C++ library as it is built: under sanitizers, without a compiler, and without symbols that could mix."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("cmake") is None or shutil.which("g++") is None, reason="needs CMake and GCC to build the library"
    ),
]


def _build(folder: Path, *options: str) -> Path:
    """Compiles csrc into the folder."""
    subprocess.run(
        ["cmake", "-S", ROOT / "csrc", "-B", folder, "-DCMAKE_CXX_COMPILER=g++", *options],
        check=True,
        capture_output=True,
    )
    subprocess.run(["cmake", "--build", folder, "-j", "2"], check=True, capture_output=True)
    return folder / "libgsa_native.so"


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which the library is one with the sanitizers."""
    library = _build(tmp_path_factory.mktemp("sanitized"), "-DGSA_SANITIZE=ON")
    preloaded = []
    for name in ("libasan.so", "libstdc++.so.6"):  # the second, or torch's exceptions would end the process
        command = ["g++", f"-print-file-name={name}"]
        preloaded.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
    return os.environ | {
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",
        "GSA_NATIVE_LIBRARY": str(library),
    }


def test_under_the_sanitizers(sanitized: dict[str, str]) -> None:
    """The engine's tests with every access and every operation of the library checked."""
    tests = [
        f"tests/ops/test_{name}.py"
        for name in (
            "engines",
            "native",
            "linear",
            "matmul",
            "selective_scan",
            "rows",
            "window_and_slots",
            "native_window_and_slots",
        )
    ]
    tests += ["tests/mixers/test_convolution.py", "tests/infer/test_compiled_steps.py"]
    # Left out: gradcheck, which calls the same code thousands of times, and what starts other compilers or processes.
    left_out = ("gradcheck", "reference", "fork", "without", "TestResults", "compiles", "compiled_gradients")
    chosen = " and ".join(
        ("(native or linear or matmul or rows or convolution or compiled_steps)", *(f"not {name}" for name in left_out))
    )
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-s", "-m", "not slow", "-k", chosen, *tests],
        cwd=ROOT,
        env=sanitized,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-5000:]
    assert "passed" in run.stdout


def test_the_sanitizers_see_the_library(sanitized: dict[str, str]) -> None:
    """A state that is one number too short is noticed, so that the test above can fail."""
    code = """
import torch
from gsa.ops.calls import StepCall
from gsa.ops.native.step import step
q = torch.randn(1, 1, 8)
step(StepCall(q, q, q, q, None, torch.zeros(1, 1, 8, 8), torch.zeros(63), 1.0, "softmax", False), inplace=True)
"""
    run = subprocess.run([sys.executable, "-c", code], env=sanitized, capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "heap-buffer-overflow" in run.stderr


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_instruction_sets_share_no_code(tmp_path: Path) -> None:
    """A function that the linker may take from any object could bring AVX-512 to a machine that has none."""
    _build(tmp_path)
    objects = [path for path in tmp_path.rglob("*.o") if "kernels_" in str(path)]
    assert len(objects) >= 2
    for path in objects:
        symbols = subprocess.run(["nm", "-C", path], check=True, capture_output=True, text=True).stdout
        shared = [line for line in symbols.splitlines() if line[17:18] in ("W", "V", "u")]
        assert not shared, (path.name, shared[:5])
        isa = path.parts[-2].removeprefix("kernels_").removesuffix(".dir")
        defined = [line for line in symbols.splitlines() if line[17:18] in ("T", "D", "R", "B")]
        assert all(f"gsa::{isa}::" in line for line in defined), defined


def test_installs_without_a_compiler(tmp_path: Path) -> None:
    """The wheel lacks the library and nothing else; tests/test_wheel.py has the one with it."""
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "dist", "out", "__pycache__"))
    fails = shutil.which("false") or "false"
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path / "wheels", source],
        env=os.environ | {"CXX": fails, "CC": fails},
        check=True,
        capture_output=True,
    )
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "gsa/ops/native/library.py" in names
    assert "gsa/ops/native/libgsa_native.so" not in names
    assert wheel.name.endswith("-any.whl")
