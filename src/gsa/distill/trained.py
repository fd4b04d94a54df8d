"""What of a student is trained, at which rates; and updates of low rank to matrices that stay as they are.

A low-rank update is a parametrization of torch: the matrix reads as W + B A wherever it is used, and W is not trained.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from gsa.errors import GSAError
from gsa.models.lm import LM
from gsa.models.sizes import tensor_shapes
from gsa.train.strategies.tensors import MOMENTS

Named = dict[str, nn.Parameter]
BETAS, EPSILON = (0.9, 0.95), 1e-8


class LowRank(nn.Module):
    """W + B A, with B zero at first."""

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator):
        super().__init__()
        rows, columns = weight.shape
        self.a = nn.Parameter(torch.randn(rank, columns, generator=generator).to(weight.device) * columns**-0.5)
        self.b = nn.Parameter(torch.zeros(rows, rank, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


def add_low_rank(model: LM, new: set[str], rank: int, seed: int) -> None:
    """Gives every matrix of a mixer that the teacher has too an update of this rank."""
    generator = torch.Generator().manual_seed(seed)
    for number, block in enumerate(model.model.layers):
        for name, module in list(block.mixer.named_modules()):
            if isinstance(module, nn.Linear) and f"model.layers.{number}.mixer.{name}.weight" not in new:
                if rank >= min(module.weight.shape):
                    raise GSAError(
                        f"distill: rank {rank} is not low: {name} is {list(module.weight.shape)}; leave rank out"
                    )
                module.weight.requires_grad_(False)
                register_parametrization(module, "weight", LowRank(module.weight, rank, generator))


def plain_weights(model: LM) -> dict[str, Tensor]:
    """Copies of a model's weights by their names in files, low-rank updates added to their matrices."""
    names = tensor_shapes(model.config)

    def found(name: str) -> Tensor:
        value: Any = model
        for part in name.split("."):
            value = getattr(value, part)
        return value.detach().to("cpu", copy=True)

    with torch.no_grad():
        return {name: found(name) for name in names}


@dataclass(frozen=True)
class Part:
    """Parameters that learn at one rate."""

    name: str
    parameters: Named
    lr: float


def parts(model: LM, new: set[str], wanted: Iterable[tuple[str, float]]) -> list[Part]:
    """What is trained, by rate: `wanted` has names (new, attention, rest) and rates. All else gets no gradient.

    With low-rank updates these, and not their matrices, are part of attention.
    """
    kinds: dict[str, Named] = {"new": {}, "attention": {}, "rest": {}}
    for name, parameter in model.named_parameters():
        frozen = name.endswith("parametrizations.weight.original")
        parameter.requires_grad_(False)
        if not frozen:
            kinds[_kind(name, new)][name] = parameter
    found = [Part(name, kinds[name], lr) for name, lr in wanted if kinds[name]]
    for part in found:
        for parameter in part.parameters.values():
            parameter.requires_grad_()
    if not found:
        raise GSAError("distill: there is nothing to train: the student has nothing that its teacher does not have")
    return found


def plain_name(name: str) -> str:
    """The name in files of the tensor that a parameter changes."""
    head, found, _ = name.partition(".parametrizations.")
    return f"{head}.weight" if found else name


def _kind(name: str, new: set[str]) -> str:
    if name in new:
        return "new"
    return "attention" if ".mixer." in name else "rest"


def _size(p: Tensor) -> float:
    """The root mean square of a tensor, or 1 if that is more."""
    return max(float(p.detach().double().square().mean().sqrt()), 1.0) if p.numel() else 1.0


class Optimizer:
    """AdamW without weight decay over parts, each with its own rate; its state as tensors by name."""

    def __init__(self, parts: list[Part]):
        self.parts = parts
        self.parameters: Named = {name: p for part in parts for name, p in part.parameters.items()}
        # A step of AdamW is as large as its rate, whatever it changes: numbers that are large need larger ones.
        self.rates = [part.lr * _size(p) for part in parts for p in part.parameters.values()]
        groups = [{"params": [p], "lr": rate} for p, rate in zip(self.parameters.values(), self.rates, strict=True)]
        self.adam = torch.optim.AdamW(groups, betas=BETAS, eps=EPSILON, weight_decay=0.0, fused=True)

    def norm(self) -> float:
        """The L2 norm of the gradient."""
        squares = [p.grad.double().square().sum() for p in self.parameters.values() if p.grad is not None]
        return float(torch.stack(squares).sum().sqrt())

    def step(self, scale: float, factor: float) -> None:
        """One step with all rates times `scale`, of the gradient times `factor`."""
        for group, rate in zip(self.adam.param_groups, self.rates, strict=True):
            group["lr"] = rate * scale
        for p in self.parameters.values():
            if p.grad is not None and factor != 1.0:
                p.grad.mul_(factor)
        self.adam.step()
        self.adam.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """Moments as `exp_avg.NAME` and `exp_avg_sq.NAME`, and `step`."""
        found, steps = dict[str, Tensor](), [torch.zeros(())]
        for name, p in self.parameters.items():
            held = self.adam.state.get(p, {})
            found |= {f"{m}.{name}": (held[m] if held else torch.zeros_like(p)).cpu().clone() for m in MOMENTS}
            steps += [held["step"].cpu()] if held else []
        return {**found, "step": torch.stack(steps).max()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Takes over what `state` gave, to the bit."""
        for name, p in self.parameters.items():
            moments = {m: state[f"{m}.{name}"].to(p.device).clone() for m in MOMENTS}
            self.adam.state[p] = {"step": state["step"].to(p.device).clone(), **moments}
