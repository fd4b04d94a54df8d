"""Large blocks stay in the heap of a process that trains, unless its environment says something else."""

import os
import platform
import subprocess
import sys

import pytest

from gsa.train.heap import keep_large_blocks


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
def test_glibc_takes_the_thresholds() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    code = "from gsa.train.heap import keep_large_blocks; print(keep_large_blocks())"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_the_environment_is_left_in_charge(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            assert keep_large_blocks() is False
