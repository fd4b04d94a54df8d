"""Peak memory: of a process of its own, or of what tensors take on a GPU.

Run as `python -m gsa.bench.memory MODULE:FUNCTION '{"T": 16384, ...}'`; prints what the function returns as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from gsa.errors import GSAError


def measured_alone(task: str, setting: dict[str, Any]) -> dict[str, Any]:
    """What the function `module:name` returns for a setting, called in a fresh process."""
    command = [sys.executable, "-m", "gsa.bench.memory", task, json.dumps(setting)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        try:
            told, said = process.communicate()
        except BaseException:
            process.kill()
            process.wait()  # `subprocess.run` would leave a process behind that is still about to end
            raise
    if process.returncode:
        lines = said.strip().splitlines() or ["no message"]
        raise GSAError(f"bench: a measurement in a process of its own failed: {lines[-1]}")
    return json.loads(told)


def measurable() -> bool:
    """Whether this system can tell the peak of a process since a moment (Linux can)."""
    return Path("/proc/self/clear_refs").exists()


def resident(process: int | None = None) -> int:
    """Bytes of a process that are in memory now; of this one unless told otherwise."""
    return _status("VmRSS", process)


def forget_peak() -> None:
    """From here on, `peak` tells of what comes."""
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """The most bytes of this process that were in memory at once, since `forget_peak`."""
    return _status("VmHWM")


def peak_of(f: Callable[[], object], threads: int) -> dict[str, int]:
    """The most bytes that f takes beyond what was there, with a heap as training has it; in a process of its own."""
    import torch

    from gsa.train.heap import keep_large_blocks

    keep_large_blocks()
    torch.set_num_threads(threads)
    torch.randn(64, 64) @ torch.randn(64, 64)  # starts threads, which is not what f takes
    before = resident()
    forget_peak()
    f()
    return {"peak": peak() - before}


def gpu_peak(f: Callable[[], object]) -> int:
    """The most bytes that tensors on the GPU took at once while f ran, without those that were there before."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    f()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _status(field: str, process: int | None = None) -> int:
    for line in Path(f"/proc/{process or 'self'}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise GSAError(f"bench: this system does not report {field}")


if __name__ == "__main__":
    module, _, function = sys.argv[1].partition(":")
    print(json.dumps(getattr(import_module(module), function)(json.loads(sys.argv[2]))))
