"""Servers that the tests of this folder share: one of a model that talks, one that asks for a key."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.live import KEY, Live, served, write_talker


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a chat template."""
    return write_talker(tmp_path_factory.mktemp("model") / "talks")


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[Live]:
    with served(folder) as live:
        yield live


@pytest.fixture(scope="session")
def closed(folder: Path) -> Iterator[Live]:
    """One that asks for a key, and lets the pages of one site in."""
    with served(folder, api_key=KEY, origins=("https://friend.example",), max_body_mb=1, body_seconds=2.0) as live:
        yield live
