"""`gsa distill`."""

from __future__ import annotations

import json
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gsa.distill.settings import DistillSettings


def run(settings: DistillSettings) -> None:
    """Distils, says how it went, and ends with the usual exit code if a signal stopped it."""
    from gsa.distill.result import by_position
    from gsa.distill.run import distill
    from gsa.table import show
    from gsa.train.heap import keep_large_blocks

    keep_large_blocks()
    done = distill(settings)
    if settings.json:
        model = None if done.model is None else str(done.model)
        print(json.dumps({"model": model, "signal": done.signal, "by_position": done.report}, indent=2))
    elif done.report:
        show(None, [by_position(done.report)])
    if done.signal is not None:
        name = signal.Signals(done.signal).name
        print(f"stopped by {name}, and saved; the same command goes on from there", file=sys.stderr)
        raise SystemExit(128 + done.signal)
    if not settings.json:
        print(f"{done.model}: a model as `gsa convert` writes it")
