"""The choice between the runners, and between ways of reading."""

from __future__ import annotations

from gsa.errors import GSAError
from gsa.infer.compiled_runner import CompiledRunner, obstacle
from gsa.infer.model import Model
from gsa.infer.runner import Runner
from gsa.infer.torch_runner import TorchRunner


def make_runner(model: Model, batch_size: int, reading: str = "fast") -> Runner:
    """The compiled runner if it can run this model here, else torch's. Only the compiled one can read exactly."""
    reason = obstacle(model, reading)
    if reason is None:
        return CompiledRunner(model, batch_size, reading)
    if reading == "exact":
        raise GSAError(f"engine: reading cannot be exact here: {reason}")
    return TorchRunner(model, batch_size)


def chosen_reading(reading: str, model: Model, keeps_states: bool) -> str:
    """What `auto` means: exact where states are kept and the compiled runner can, else fast."""
    if reading != "auto":
        return reading
    return "exact" if keeps_states and obstacle(model, "exact") is None else "fast"
