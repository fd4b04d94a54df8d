"""A source as a model of ours, in memory: the teacher that students are compared with."""

from __future__ import annotations

from pathlib import Path

import torch

from gsa.convert.mapping import checked
from gsa.convert.run import prepare
from gsa.convert.students import Choices
from gsa.errors import memory_errors
from gsa.models.init import without_memory
from gsa.models.lm import LM


def load_teacher(source: str | Path, dtype: torch.dtype = torch.float32) -> LM:
    """The model in a folder, a GGUF file, or at a name of the Hub, with softmax attention, as it is."""
    conversion = prepare(source, Choices(to="attention"))
    opened, mapping = conversion.source, conversion.mapping
    with without_memory():
        model = LM(conversion.student)
    with memory_errors("convert"):
        weights = {name: checked(opened.read(own), own, opened, dtype) for name, own in mapping.copied.items()}
    model.load_state_dict(weights, strict=False, assign=True)  # map_tensors has compared names; a tied head has none
    model.tie_weights()
    return model.eval().requires_grad_(False)
