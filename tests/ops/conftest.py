"""In Triton's interpreter, kernels round as they do on a GPU."""

import pytest

from gsa.ops.triton.availability import interpreted
from tests.device import round_like_a_gpu


@pytest.fixture(scope="session", autouse=True)
def _round_like_a_gpu() -> None:
    if interpreted():
        round_like_a_gpu()
