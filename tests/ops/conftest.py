"""In Triton's interpreter, kernels compute as they do on a GPU."""

import pytest
import torch

from gsa.ops.triton.availability import interpreted
from tests.device import prepare_interpreter


@pytest.fixture(scope="session", autouse=True)
def _prepared() -> None:
    if interpreted():
        prepare_interpreter()


@pytest.hookimpl(tryfirst=True)  # before those that are slow are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Interpreted kernels take seconds a case: `make test` leaves out fp32 where fp64, which asks more, is tested."""
    for item in items:
        if interpreted() and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            given = item.callspec.params
            again = item.originalname == "test_linear_attention" or (
                item.originalname == "test_slot_attention" and not given.get("name", "gate: ").startswith("gate: ")
            )
            if again and given.get("engine") == "triton" and given.get("dtype") == torch.float32:
                item.add_marker(pytest.mark.slow)
