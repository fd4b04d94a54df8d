"""What benchmarks check before they measure anything."""

from __future__ import annotations

from gsa.errors import GSAError, raised_by
from gsa.options import check_count
from gsa.threads import use_threads

MOST = 2**31 - 1


def prepare(operation: str, *, json: bool, markdown: bool, threads: int | None = None, **counts: int | None) -> None:
    """Raises if options exclude each other or a count is below one, naming the operation; sets torch's threads."""
    with raised_by(operation):
        if json and markdown:
            raise GSAError("json and markdown exclude each other")
        for name, count in counts.items():
            check_count(name, count, most=MOST)
        use_threads(threads)


def require_native() -> None:
    """Raises if the native engine, which a benchmark is about, cannot run."""
    import torch

    from gsa.ops.native import library

    reason = library.unavailable(torch.device("cpu"))
    if reason is not None:
        raise GSAError(f"bench: the native engine cannot run here: {reason}")
