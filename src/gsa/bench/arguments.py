"""What benchmarks check before they measure anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gsa.errors import GSAError, raised_by
from gsa.options import check_count
from gsa.terminal import quoted
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


def listed(
    what: str,
    text: str,
    known: Iterable[str],
    words: Mapping[str, Iterable[str]] | None = None,
    operation: str = "bench",
) -> list[str]:
    """The names in a list such as `gsa, gla`, each once, in the order they came.

    `words`, such as `all`, stand for several names, or for none.

    >>> listed("mixers", "gla, all", ["gsa", "gla"], {"all": ["gsa", "gla"]})
    ['gla', 'gsa']
    """
    from gsa.mixers.registry import suggestion

    meanings = {**(words or {}), **{name: [name] for name in known}}
    found: list[str] = []
    for name in (part.strip() for part in text.split(",")):
        if name not in meanings:
            raise GSAError(
                f"{operation}: {what}: {quoted(name)} is not known{suggestion(name, meanings)}; expected "
                f"{', '.join(meanings)}, or several with commas between, got {quoted(text)}"
            )
        found += meanings[name]
    return list(dict.fromkeys(found))


def listed_numbers(what: str, text: str, least: int, operation: str = "bench") -> list[int]:
    """The whole numbers in a list such as `2048,8192`, each once, in the order they came.

    >>> listed_numbers("lengths", "2048, 8192", least=2)
    [2048, 8192]
    """
    found: list[int] = []
    for part in (part.strip() for part in text.split(",")):
        number = int(part) if part.isdecimal() and len(part) <= len(str(MOST)) else None
        if number is None or not least <= number <= MOST:
            raise GSAError(
                f"{operation}: {what} must be whole numbers from {least} to {MOST}, with commas between, got "
                f"{quoted(text)}"
            )
        found.append(number)
    return list(dict.fromkeys(found))


def require_native() -> None:
    """Raises if the native engine, which a benchmark is about, cannot run."""
    import torch

    from gsa.ops.native import library

    reason = library.unavailable(torch.device("cpu"))
    if reason is not None:
        raise GSAError(f"bench: the native engine cannot run here: {reason}")
