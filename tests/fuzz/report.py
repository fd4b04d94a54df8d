"""A plugin for pytest: tells in a file which test begins, and how many cases it has tried when it ends.

A process that dies in the middle of a test has told which one it was.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

_CASES = re.compile(r"(\d+) passing.*?, (\d+) failing")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-report", type=Path, required=True, help="the file to tell in")


def _tell(config: pytest.Config, **event: object) -> None:
    with open(config.getoption("--fuzz-report"), "a") as file:
        file.write(json.dumps(event) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _Current.said = None


class _Current:
    said: str | None = None  # why the test that runs has failed


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _tell(item.config, test=item.nodeid, begins=True)
    yield
    _tell(item.config, test=item.nodeid, begins=False, cases=_cases(item), said=_Current.said)


def _cases(item: pytest.Item) -> int:
    """How many cases hypothesis says that it tried; it has them in words only."""
    statistics = getattr(item, "hypothesis_statistics", None)
    if statistics is None:  # it failed before the first
        return 0
    counts = _CASES.findall(statistics)
    assert counts, f"hypothesis words its statistics in another way: {statistics}"
    return sum(int(passing) + int(failing) for passing, failing in counts)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        said = str(report.longrepr) if crash is None else crash.message
        _Current.said = said.strip().splitlines()[0][:300] if said.strip() else "failed"
