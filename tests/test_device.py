"""`pytest --device cuda`: refused without a GPU, and prepared for one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import conftest, device


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "DEVICE", device.DEVICE)
    for name in ("TRITON_INTERPRET", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


def test_without_a_gpu_it_says_so() -> None:
    command = [sys.executable, "-m", "pytest", "--device", "cuda", "tests/ops/test_engines.py"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--device cuda: no GPU was found" in done.stderr


def test_on_a_gpu_kernels_are_compiled_and_bits_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    device.choose("cuda")
    assert torch.device("cuda:1") == device.DEVICE
    assert "TRITON_INTERPRET" not in os.environ
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    device.choose("cpu")
    assert torch.device("cpu") == device.DEVICE
    assert os.environ["TRITON_INTERPRET"] == "1"


@pytest.mark.any_device
def test_what_runs_on_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that are marked; on a CPU all of them."""
    dropped: list[pytest.Item] = []
    marked = request.node
    unmarked = pytest.Function.from_parent(marked.parent, name="unmarked", callobj=lambda: None)
    monkeypatch.setattr(request.config.hook, "pytest_deselected", lambda items: dropped.extend(items), raising=False)
    items: list[pytest.Item] = [marked, unmarked]
    monkeypatch.setattr(device, "DEVICE", torch.device("cpu"))
    conftest.pytest_collection_modifyitems(request.config, items)
    assert items == [marked, unmarked]
    monkeypatch.setattr(device, "DEVICE", torch.device("cuda"))
    conftest.pytest_collection_modifyitems(request.config, items)
    assert items == [marked]
    assert dropped == [unmarked]
