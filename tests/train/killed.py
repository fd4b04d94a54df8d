"""A run that is killed again and again: `python -m tests.train.killed SETTINGS.json SEED KILLS` prints where it was.

Each attempt is a process of its own that starts the same run and, some moments later, kills itself with SIGKILL: after
some steps, in the middle of a pass, or at some call of the system while a checkpoint is written; all at random.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gsa.train import loop, run
from gsa.train.checkpoint import checkpoints
from gsa.train.settings import TrainSettings


def kill_at(owner: Any, name: str, call: int) -> None:
    """From now on, the call of this number is the last thing the process does."""
    function: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **options)

    setattr(owner, name, counted)


def attempt(settings: TrainSettings, rng: random.Random) -> int:
    """Runs until it ends or kills itself; the status of the process."""
    moments: list[tuple[Any, str, int]] = [
        (loop.Trainer, "_step", rng.randint(1, 6)),
        (loop.Trainer, "_loss", rng.randint(1, 12)),
        (os, "fsync", rng.randint(1, 20)),
        (os, "rename", rng.randint(1, 4)),
        (os, "replace", rng.randint(1, 6)),
        (os, "unlink", rng.randint(1, 20)),
    ]
    moment = rng.choice(moments)
    child = os.fork()
    if child == 0:
        kill_at(*moment)
        run.train(settings)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def main() -> None:
    settings = TrainSettings(**json.loads(Path(sys.argv[1]).read_text()))
    rng, most = random.Random(int(sys.argv[2])), int(sys.argv[3])
    begins: list[int] = []
    while len(begins) < most:
        status = attempt(settings, rng)
        begins.append(newest(Path(str(settings.out))))
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            break
    run.train(settings)
    print(json.dumps(begins))


def newest(folder: Path) -> int:
    """The step of the newest checkpoint, from which the next attempt goes on."""
    return max((step for step, _ in checkpoints(folder)), default=0)


if __name__ == "__main__":
    main()
