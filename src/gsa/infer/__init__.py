"""Inference: an engine on token ids, sampling, and snapshots of states."""

from gsa.infer.engine import Engine
from gsa.infer.model import Model
from gsa.infer.reading import Prompt
from gsa.infer.requests import Completion, Generation, Token
from gsa.infer.state import State
from gsa.sampling import Sampling

__all__ = ["Completion", "Engine", "Generation", "Model", "Prompt", "Sampling", "State", "Token"]
