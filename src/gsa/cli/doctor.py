"""`gsa doctor`: what matters on this machine, and what is missing."""

from __future__ import annotations

import json as json_module
import os
import platform
import shutil
from pathlib import Path
from typing import Any


def doctor(json: bool = False) -> None:
    """Tells what this machine offers: processor, instruction set, torch, threads, engines, memory and disk.

    Args:
        json: Print JSON instead of text.
    """
    report = examine()
    print(json_module.dumps(report, indent=2)) if json else _show(report)


def examine() -> dict[str, Any]:
    """All findings, by name."""
    import torch

    from gsa import __version__
    from gsa.infer.compute import AUTO, automatic
    from gsa.ops import backends
    from gsa.ops.matmul import UNITS, missing_unit
    from gsa.ops.native import library
    from gsa.ops.registry import engine_name
    from gsa.threads import usable_cores

    engines = backends()
    native: dict[str, Any] = {"available": engines["native"] is None, "reason": engines["native"]}
    if native["available"]:
        native |= {"isa": library.isa(), "isas": library.isas(), "library": library.library()._name}
    return {
        "gsa": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "processor": processor(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "engines": engines,
        "auto_on_cpu": engine_name("auto", torch.device("cpu")),
        "precision": _precision(),
        "native": native,
        "units": {compute: missing_unit(compute) for compute in UNITS},
        "auto_compute": {weights: automatic(weights) for weights in AUTO},
        "memory": _memory(),
        "disk": _disk(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if _matters(name)},
    }


def _precision() -> dict[str, str | None]:
    """What training takes by default, and the unit that makes it worth while."""
    import torch

    from gsa.train.precision import automatic, bf16_unit

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {"device": device.type, "auto": automatic(device), "bf16_unit": bf16_unit(device)}


def _matters(variable: str) -> bool:
    return variable.startswith(("GSA_", "OMP_", "MKL_", "TORCH_", "CUDA_VISIBLE"))


def processor() -> str:
    """The processor's name, as well as the system knows it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory() -> dict[str, int] | None:
    """Bytes in all and available, where the system tells."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return {
        name: int(fields[field].split()[0]) * 1024
        for name, field in (("total", "MemTotal"), ("available", "MemAvailable"))
    }


def _disk() -> dict[str, int]:
    """Bytes in all and free where the command runs."""
    usage = shutil.disk_usage(".")
    return {"total": usage.total, "free": usage.free}


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")

    def gigabytes(count: int) -> str:
        return f"{count / 2**30:.1f} GB"

    native = report["native"]
    table.add_row("gsa", f"{report['gsa']}, Python {report['python']}, {report['system']}")
    table.add_row("processor", f"{report['processor']}, {report['usable_cores']} of {report['cores']} cores usable")
    table.add_row("torch", f"{report['torch']}, {report['threads']} threads, {report['torch_isa']}")
    table.add_row("GPUs", ", ".join(report["gpus"]) or "none that torch can use")
    for name, reason in report["engines"].items():
        if name == "native" and reason is None:
            others = ", ".join(isa for isa in native["isas"] if isa != native["isa"])
            state = f"ready, instruction set {native['isa']} (also built: {others or 'none'})"
        else:
            state = "ready" if reason is None else f"missing: {reason}"
        table.add_row(f"engine {name}", state)
    table.add_row("auto", f"picks {report['auto_on_cpu']} on the CPU")
    for compute, missing in report["units"].items():
        table.add_row(f"products in {compute}", "ready" if missing is None else f"not here: {missing}")
    chosen = "; ".join(f"{weights} weights: {compute}" for weights, compute in report["auto_compute"].items())
    table.add_row("compute auto", f"prompts on the CPU, {chosen}")
    precision = report["precision"]
    unit = precision["bf16_unit"] or "no unit for bf16"
    table.add_row("training", f"precision auto is {precision['auto']} on the {precision['device'].upper()} ({unit})")
    if report["memory"] is not None:
        memory = report["memory"]
        table.add_row("memory", f"{gigabytes(memory['available'])} of {gigabytes(memory['total'])} available")
    table.add_row("disk", f"{gigabytes(report['disk']['free'])} of {gigabytes(report['disk']['total'])} free here")
    for name, value in report["environment"].items():
        table.add_row(name, value)
    Console().print(table, highlight=False)
