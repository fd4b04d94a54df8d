"""Large blocks stay in the heap of a process that trains, unless its environment says something else."""

import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from gsa.train.heap import MMAP_MAX, MMAP_THRESHOLD, TRIM_THRESHOLD, keep_large_blocks

# A process that counts the pages it is given for blocks of 64 MB, one after the other: before, and once they are kept.
COUNT = """
import ctypes, resource
from gsa.train import heap

libc = ctypes.CDLL(None)
libc.malloc.argtypes, libc.malloc.restype, libc.free.argtypes = [ctypes.c_size_t], ctypes.c_void_p, [ctypes.c_void_p]

def faults(rounds):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        block = libc.malloc(64 << 20)
        ctypes.memset(block, 1, 64 << 20)
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

class Older:  # a glibc that refuses large thresholds
    def mallopt(self, parameter, value):
        return 0 if parameter == heap.MMAP_THRESHOLD and value > 2**25 else libc.mallopt(parameter, value)

if {older}:
    heap.ctypes.CDLL = lambda name: Older()
fresh = faults(4)
kept = heap.keep_large_blocks()
faults(1)
print(kept, fresh, faults(4))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
@pytest.mark.parametrize("older", [False, True])
def test_large_blocks_keep_their_pages(older: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    code = COUNT.replace("{older}", str(older))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    kept, fresh, faults = done.stdout.split()
    assert kept == "True"
    assert int(fresh) >= 4 * 32  # of 2 MB at most
    assert int(faults) < 16


def test_what_is_refused_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.17"))
    for refused in ({TRIM_THRESHOLD}, {MMAP_THRESHOLD, MMAP_MAX}, {MMAP_THRESHOLD}, set()):
        malloc = SimpleNamespace(mallopt=lambda parameter, value, refused=refused: int(parameter not in refused))
        monkeypatch.setattr("gsa.train.heap.ctypes.CDLL", lambda name, malloc=malloc: malloc)
        assert keep_large_blocks() is (refused <= {MMAP_THRESHOLD}), refused


def test_the_environment_is_left_in_charge(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            assert keep_large_blocks() is False
