"""In Triton's interpreter, kernels compute as they do on a GPU."""

import pytest

from gsa.ops.triton.availability import interpreted
from tests.device import prepare_interpreter


@pytest.fixture(scope="session", autouse=True)
def _prepared() -> None:
    if interpreted():
        prepare_interpreter()
