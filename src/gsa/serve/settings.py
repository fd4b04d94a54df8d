"""What a server allows: places, limits, where states are kept, who may ask."""

from __future__ import annotations

from dataclasses import dataclass

from gsa.errors import GSAError
from gsa.options import check, number

MEGABYTE = 2**20


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """The limits of a server; every request has some."""

    api_key: str | None = None
    """What every request has to bring; none lets anyone ask who can reach the server."""
    origins: tuple[str, ...] = ()
    """Web sites whose pages may ask, as in https://example.org; the server's own page always may."""
    max_concurrency: int = number(16, least=1, most=4096)
    """Answers that are written at the same time."""
    max_queue: int = number(256, least=0, most=10**6)
    """Answers that may wait for their turn; more are refused with 429."""
    events_per_second: float = number(1000.0, above=0, most=10**6)
    """Events of all streams together, about: where more tokens are written, an event brings several of an answer."""
    max_tokens: int = number(4096, least=1, most=10**9)
    """Tokens of an answer at most, and where a chat names no limit."""
    max_prompt_tokens: int = number(1_000_000, least=1, most=10**9)
    """Tokens of a prompt at most."""
    max_body_mb: int = number(64, least=1, most=2**20)
    """Megabytes of a request at most."""
    body_seconds: float = number(60.0, above=0, most=86400)
    """Seconds that a request may take to arrive."""
    cache_mb: int = number(1024, least=0, most=2**30)
    """Megabytes of memory for states of earlier prompts, from which prompts that begin alike go on; 0 is none."""
    state_mb: int = number(1024, least=1, most=2**30)
    """Megabytes of memory for states that have an id."""
    state_dir: str | None = None
    """Folder in which states outlive the server; without one, they are in memory only."""
    state_dir_mb: int = number(10240, least=1, most=2**30)
    """Megabytes that the folder may take, half for states that have an id, half for those of the cache."""
    drain_seconds: float = number(30.0, least=0, most=86400)
    """Seconds that answers may still take after SIGTERM or Ctrl-C."""

    def __post_init__(self) -> None:
        check(self, "serve")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise GSAError("serve: api_key must be at least one printable ASCII character: it has to fit in a header")
        if self.api_key is not None and self.api_key != self.api_key.strip():
            raise GSAError("serve: api_key must not begin or end with a space: in a header, nobody could tell")
        for origin in self.origins:
            if not origin.startswith(("http://", "https://")) or origin.count("/") != 2:
                raise GSAError(f"serve: an origin is like https://example.org, without a path, got {origin!r}")

    @property
    def max_body_bytes(self) -> int:
        return self.max_body_mb * MEGABYTE
