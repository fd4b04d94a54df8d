"""In Triton's interpreter, kernels compute as they do on a GPU."""

import pytest

from gsa.ops.triton.availability import interpreted
from tests.device import prepare_interpreter


@pytest.fixture(scope="session", autouse=True)
def _prepared() -> None:
    if interpreted():
        prepare_interpreter()


@pytest.hookimpl(tryfirst=True)  # before those that are slow are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Interpreted kernels take seconds a case: those that no `quick_if_interpreted` of a test allows become slow."""
    from tests.ops.cases import INTERPRETED  # not before the device is settled

    for item in items if INTERPRETED else ():
        allowed = list(item.iter_markers("quick_if_interpreted"))
        if not allowed:
            continue
        given = item.callspec.params
        quick = (all(given[name] in values for name, values in mark.kwargs.items()) for mark in allowed)
        if given.get("engine", INTERPRETED) == INTERPRETED and not any(quick):
            item.add_marker(pytest.mark.slow)
