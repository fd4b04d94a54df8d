"""Every test starts from the same seed, on one thread (two tests run at a time), with fresh memory full of NaN."""

import hashlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gsa.ops.native import library
from tests import device
from tests.examples import register_profiles

# Shells start commands in the background with Ctrl-C ignored, and processes that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

register_profiles()


def _compiled_code() -> Path:
    """Where torch keeps compiled code: apart from that of other versions, whose operators it takes for the same."""
    sources = sorted((Path(__file__).parent.parent / "src" / "gsa").rglob("*.py"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    return Path(tempfile.gettempdir()) / f"gsa-compiled-{digest[:16]}"


os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_compiled_code()))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where operators are tested; cuda (which AMD's GPUs are called, too) leaves out what is for CPUs only",
    )


def pytest_configure(config: pytest.Config) -> None:
    device.choose(config.getoption("--device"))
    config.addinivalue_line("markers", "any_device: computes on whatever --device says")
    config.addinivalue_line(
        "markers",
        "quick_if_interpreted(name=values, ...): with kernels in Triton's interpreter, only these values of the test's "
        "parameters are part of `make test`, the others are slow; each such mark allows some more",
    )
    if device.DEVICE.type != "cpu":
        # Some of torch's kernels for GPUs have no deterministic form, and say so.
        config.addinivalue_line("filterwarnings", "ignore:.*deterministic:UserWarning")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if device.DEVICE.type != "cpu":
        config.hook.pytest_deselected(items=[x for x in items if x.get_closest_marker("any_device") is None])
        items[:] = [x for x in items if x.get_closest_marker("any_device") is not None]
    # Long tests first: a process that runs out of tests takes short ones from another, and none waits for the last.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if library.unavailable(None) is None:
        library.use_every_thread(True)  # where a test has several, small cases shall meet what large ones do
    torch.manual_seed(0)
    # Also fills what torch.empty returns with NaN.
    torch.use_deterministic_algorithms(True, warn_only=device.DEVICE.type != "cpu")
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _fresh_scratch() -> None:
    """Working memory of an earlier test must not hide a read of what was never written."""
    from gsa.ops.chunk import scratch

    scratch._scratches.held.clear()


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts even short sequences into many segments, and keeps states in more than one place."""
    monkeypatch.setattr("gsa.ops.chunk.grid.SEGMENT_ELEMENTS", 4096)
    monkeypatch.setattr("gsa.ops.native.arguments.MARK_CHUNKS", 2)
    monkeypatch.setattr("gsa.ops.triton.plan.segment_length", lambda *sizes: 64)
