"""How large a model is, from its config alone: one block of each kind is made, without memory, however many there are.

So what is too large is refused before anything is built.
"""

from __future__ import annotations

from collections import Counter
from math import prod

import torch
from torch import nn

from gsa.errors import OutOfMemory
from gsa.files import byte_count
from gsa.memory import memory_of, swap
from gsa.mixers.base import Options
from gsa.mixers.norm import RMSNorm
from gsa.mixers.shared import add_shared_parameters
from gsa.models.backbone import Block
from gsa.models.config import ModelConfig
from gsa.models.init import without_memory

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(config: ModelConfig) -> Shapes:
    """Every tensor of a model by its name, as in the model's state dict."""
    blocks, ends = _blocks(config), _ends(config)
    layers = {
        f"model.layers.{i}.{name}": shape
        for i, options in enumerate(config.layers)
        for name, shape in blocks[options].items()
    }
    return {**ends, **layers, "lm_head.weight": (config.vocab_size, config.hidden_size)}


def parameter_count(config: ModelConfig) -> int:
    """Numbers in all parameters of a model, shared ones counted once: `LM(config).num_parameters`."""
    blocks = _blocks(config)
    heads = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    layers = sum(_numbers(blocks[options]) * count for options, count in Counter(config.layers).items())
    return _numbers(_ends(config)) + layers + heads


def check_memory(config: ModelConfig, operation: str, *, headless: bool = False) -> None:
    """Raises if a model that is about to be built has more weights than the memory of torch's default device.

    Nothing is refused that could be held, if only with swap. A model without memory (on torch's meta device, or of fake
    tensors) is never too large, nor one whose parameters are spread over processes as they are made.
    """
    probe = RMSNorm(1, config.rms_norm_eps).weight  # what happens to one parameter happens to all
    has_memory = type(probe.data) is torch.Tensor and not probe.is_meta and probe.numel() > 0
    if has_memory:
        head = config.vocab_size * config.hidden_size if headless and not config.tie_word_embeddings else 0
        count = parameter_count(config) - head
        check_numbers(count, probe.dtype, probe.device, f"{operation}: the model has")


def check_parts(config: ModelConfig, operation: str, device: torch.device) -> None:
    """Raises if a device cannot hold the largest block, or what stands around the blocks, with gradients in fp32."""
    largest = max(_numbers(shapes) for shapes in _blocks(config).values())
    ends = _numbers(_ends(config))
    for what, count in (("a block of the model", largest), ("embedding and norm of the model", ends)):
        check_numbers(2 * count, torch.float32, device, f"{operation}: {what}, with gradients, has")


def check_numbers(count: int, dtype: torch.dtype, device: torch.device, what: str) -> None:
    """Raises if a device has not enough memory for so many parameters; `what` says whose they are."""
    memory, size = memory_of(device), count * dtype.itemsize
    if memory is None:
        return
    memory += swap() if device.type == "cpu" else 0
    if size > memory:
        raise OutOfMemory(
            f"{what} {count:,} parameters; they take {byte_count(size)} in {str(dtype).removeprefix('torch.')}, and "
            f"there are {byte_count(memory)} of memory"
        )


def _blocks(config: ModelConfig) -> dict[Options, Shapes]:
    """The tensors of a block, for each kind of block."""
    with without_memory():
        return {options: _shapes(Block(config, options)) for options in dict.fromkeys(config.layers)}


def _ends(config: ModelConfig) -> Shapes:
    """What stands around the blocks, and what they share; without the head."""
    shared = nn.Module()
    with without_memory():
        add_shared_parameters(shared, config.layers)
    width = config.hidden_size
    return {
        **{f"model.{name}": shape for name, shape in _shapes(shared).items()},
        "model.embeddings.weight": (config.vocab_size, width),
        "model.norm.weight": (width,),
    }


def _shapes(module: nn.Module) -> Shapes:
    return {name: tuple(x.shape) for name, x in module.state_dict().items()}


def _numbers(shapes: Shapes) -> int:
    return sum(prod(shape) for shape in shapes.values())
