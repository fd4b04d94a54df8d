"""The choice between the runners."""

from __future__ import annotations

from gsa.infer.compiled_runner import CompiledRunner, obstacle
from gsa.infer.model import Model
from gsa.infer.runner import Runner
from gsa.infer.torch_runner import TorchRunner


def make_runner(model: Model, batch_size: int) -> Runner:
    """The compiled runner if it can run this model here, else torch's."""
    return CompiledRunner(model, batch_size) if obstacle(model) is None else TorchRunner(model, batch_size)
