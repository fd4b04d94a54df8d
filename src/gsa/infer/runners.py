"""The choice between the runners, and between ways of reading."""

from __future__ import annotations

import torch

from gsa import __version__
from gsa.errors import GSAError
from gsa.infer.compiled_runner import CompiledRunner, obstacle
from gsa.infer.model import Model
from gsa.infer.runner import Runner
from gsa.infer.torch_runner import TorchRunner
from gsa.ops.native import library


def make_runner(model: Model, batch_size: int, reading: str = "fast") -> Runner:
    """The compiled runner if it can run this model here, else torch's. Only the compiled one can read exactly."""
    reason = obstacle(model, reading)
    if reason is None:
        return CompiledRunner(model, batch_size, reading)
    if reading == "exact":
        raise GSAError(f"engine: reading cannot be exact here: {reason}")
    return TorchRunner(model, batch_size)


def computation(runner: Runner) -> str:
    """All that decides the bits of a state beside its tokens. They may differ with any release."""
    model = runner.model
    by = f"native {library.isa()}" if isinstance(runner, CompiledRunner) else f"torch {torch.__version__}"
    how = "exact" if runner.exact else f"fast {model.compute} {torch.__version__}"
    return " ".join([__version__, model.fingerprint, model.weights, model.device.type, by, how])


def chosen_reading(reading: str, model: Model, keeps_states: bool) -> str:
    """What `auto` means: exact where states are kept and the compiled runner can, else fast."""
    if reading != "auto":
        return reading
    return "exact" if keeps_states and obstacle(model, "exact") is None else "fast"
