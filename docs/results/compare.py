"""`python docs/results/compare.py RUN...`: the losses of several runs, step by step, as CSV with the runs' names."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def table(runs: list[Path]) -> str:
    """A line for each step that all runs have made."""
    losses = [[json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs]
    lines = [",".join(["step", *(run.name for run in runs)])]
    for step, row in enumerate(zip(*losses, strict=False), 1):
        lines.append(",".join([str(step), *(f"{loss:.5f}" for loss in row)]))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table([Path(name) for name in sys.argv[1:]]), end="")
