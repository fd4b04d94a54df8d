"""Distillation: a converted model learns to do what its teacher does, layer by layer and then as a whole."""

from gsa.distill.run import distill
from gsa.distill.settings import DistillSettings

__all__ = ["DistillSettings", "distill"]
