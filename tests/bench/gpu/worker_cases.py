"""Work for processes."""

import os
import signal
import subprocess
import time
from pathlib import Path


def square(x: int) -> int:
    return x * x


def fail(text: str) -> None:
    raise KeyError(text)


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def leave(code: int) -> None:
    os._exit(code)


def interpreted() -> bool:
    from gsa.ops.triton.availability import interpreted

    return interpreted()


def wait_with_a_child(note: str) -> None:
    """Says who they are, and stays."""
    child = subprocess.Popen(["sleep", "60"])
    Path(f"{note}.part").write_text(f"{os.getpid()} {child.pid}")
    Path(f"{note}.part").rename(note)
    time.sleep(60)
