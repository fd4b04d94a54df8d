"""Many clients at a time: what a server gives them, beside what its engine gives without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gsa.bench.memory import measured_alone
from gsa.bench.serving.servers import CACHE_MB, Contender, Ours, called

Tick = Callable[[str], None]
ENGINE_SHARE = 1 / 3
"""Of the server's time: so long the engine runs before it, and again after it, because machines drift."""


@dataclass(frozen=True)
class Load:
    """How much is asked."""

    clients: int
    seconds: float
    seed: int
    threads: int | None
    temperature: float = 0.0

    @property
    def asked(self) -> dict[str, Any]:
        """What questions follow from."""
        return {"seed": self.seed, "temperature": self.temperature}

    @property
    def warm(self) -> float:
        """Seconds that do not count: first requests all begin at once, and caches are empty."""
        return min(10.0, self.seconds / 3)


def beside_engine(contender: Ours, load: Load, tick: Tick) -> dict[str, Any]:
    """What clients get of a server, and what share that is of what its engine writes for the same requests."""
    before = _engine(contender, load, tick)
    row = of_clients(contender, load, tick)
    engine = (before + _engine(contender, load, tick)) / 2
    return {**row, "engine_tokens_per_second": engine, "share": row["tokens_per_second"] / engine}


def of_clients(contender: Contender, load: Load, tick: Tick) -> dict[str, Any]:
    """What clients get of a server."""
    tick(f"{called(contender.about)}: {load.clients} clients for {load.seconds:g} seconds")
    with contender.served(places=load.clients, threads=load.threads) as server:
        setting = {"clients": load.clients, "seconds": load.seconds, "warm": load.warm, **load.asked}
        row = measured_alone("gsa.bench.serving.clients:ask", {**setting, **contender.clients(server)})
    return {**contender.about, "start_seconds": server.seconds, **row}


def _engine(contender: Ours, load: Load, tick: Tick) -> float:
    """Tokens a second of the engine itself."""
    tick(f"the engine itself with {contender.name} {contender.weights}")
    setting = {
        "model": contender.model,
        "weights": contender.weights,
        "clients": load.clients,
        "seconds": load.seconds * ENGINE_SHARE,
        "warm": load.warm,
        **load.asked,
        "threads": load.threads,
        "cache_mb": CACHE_MB,
    }
    return float(measured_alone("gsa.bench.serving.engine:run", setting)["tokens_per_second"])
