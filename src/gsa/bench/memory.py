"""Peak memory of one call, measured in a process of its own.

Run as `python -m gsa.bench.memory '{"T": 16384, ...}'`; prints {"peak": bytes, "tensors": bytes} as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from gsa.errors import GSAError


def peak_memory(backward: bool, T: int, heads: int, width: int, slots: int, backend: str, threads: int) -> float:
    """Peak bytes of a call, as a multiple of what cannot be avoided: inputs and output, and their gradients."""
    setting = {
        "backward": backward,
        "T": T,
        "heads": heads,
        "width": width,
        "slots": slots,
        "backend": backend,
        "threads": threads,
    }
    run = subprocess.run(
        [sys.executable, "-m", "gsa.bench.memory", json.dumps(setting)], capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise GSAError(f"bench: the memory measurement failed: {run.stderr.strip().splitlines()[-1:]}")
    result = json.loads(run.stdout)
    return float(result["peak"] / result["tensors"])


def _resident() -> int:
    return _status("VmRSS")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise GSAError(f"bench: this system does not report {field}")


def measurable() -> bool:
    """Whether this system can tell the peak of a process since a moment (Linux can)."""
    return Path("/proc/self/clear_refs").exists()


def _measure(setting: dict[str, Any]) -> dict[str, int]:
    import torch

    from gsa.bench.ops import slot_tensors
    from gsa.ops import gated_slot_attention

    torch.set_num_threads(setting["threads"])

    def call(T: int) -> int:
        tensors = slot_tensors(T, setting["heads"], setting["width"], setting["slots"], tau=8.0)
        for x in tensors:
            x.requires_grad_(setting["backward"])
        o, _ = gated_slot_attention(*tensors, scale=1.0, backend=setting["backend"])
        size = sum(x.nbytes for x in (*tensors, o))
        if setting["backward"]:
            o.backward(torch.ones_like(o))
            size *= 2
        return size

    call(64)  # loads code and starts threads, which is not the call's memory
    before = _resident()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    tensors = call(setting["T"])
    return {"peak": _status("VmHWM") - before, "tensors": tensors}


if __name__ == "__main__":
    print(json.dumps(_measure(json.loads(sys.argv[1]))))
