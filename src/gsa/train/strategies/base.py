"""Strategy: where weights, optimiser and gradients are, as the training loop sees them; here, on one process."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn

from gsa.errors import GSAError
from gsa.models.lm import LM
from gsa.train.precision import AUTO, automatic
from gsa.train.strategies.tensors import MOMENTS, check_tensors, optimizer_shapes, own_part

PRECISIONS: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class LossOf(nn.Module):
    """A model's loss in a precision, as a module: what wraps it sees tensors go in and one tensor come out."""

    def __init__(self, model: LM, precision: str):
        super().__init__()
        self.model, self.precision = model, precision

    def forward(self, ids: Tensor, labels: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        # in here, since DeepSpeed ends any autocast that is around it
        with torch.autocast(ids.device.type, PRECISIONS[self.precision], enabled=self.precision != "fp32"):
            loss = self.model(ids, labels=labels, cu_seqlens=cu_seqlens).loss
        assert loss is not None
        return loss


class Strategy:
    """Weights, optimiser and gradients on one process or many.

    Methods that give numbers or tensors of the whole are collective: every process calls them, in the same order. Loss
    and gradient are sums over processes and micro-batches; whoever wants a mean weighs the losses.
    """

    name: ClassVar[str]
    rank: int = 0
    world_size: int = 1
    device: torch.device
    model: LM
    """The model itself; its parameters may be shards."""
    optimizer: torch.optim.Optimizer
    precision: str
    """A name of PRECISIONS, or until `start` also `auto`."""

    def __init__(self, precision: str, device: torch.device):
        self.precision, self.device = precision, device
        self._ema: dict[str, Tensor] | None = None
        self._ema_decay = 0.0
        self._ema_is_in = False

    def start(self, model: LM, optimizer: Callable[[LM], torch.optim.Optimizer], *, compile: bool) -> None:
        """Takes a model, in fp32 whatever it came in, with the weights that it has on the first process."""
        if self.precision == AUTO:
            # the same on all processes: bf16 if each of them would take it
            (able,) = self.sum(automatic(self.device) == "bf16")
            self.precision = "bf16" if able == self.world_size else "fp32"
        self.model = model.to(self.device, torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                self._broadcast(parameter)
        if compile:
            # torch's compiler looks for a gradient of each block's input, and torch then warns that there is none
            warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning)
            for block in model.model.layers:
                block.compile()
        self._wrapped = self._wrap(LossOf(model, self.precision))
        self.optimizer = optimizer(model)
        self._parameters = dict(model.named_parameters())  # a tied head is not named again
        self._shapes = {name: tuple(p.shape) for name, p in self._parameters.items()}

    def loss(self, ids: Tensor, labels: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """The mean cross-entropy of this process's micro-batch, in nats; ids and labels [B, T], cu_seqlens [N+1].

        All of them are on `device`.
        """
        return self._wrapped(ids, labels, cu_seqlens)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Adds the gradient of a loss; after the last of a step, gradients are sums over all processes."""
        loss.backward()

    def gradient_norms(self) -> dict[str, float]:
        """The L2 norm of each parameter's gradient by name, the same on every process."""
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        # in fp64: a large gradient must not overflow, and shards must give what the whole gives
        squares = [
            zero if p.grad is None else torch.linalg.vector_norm(own_part(p.grad), dtype=torch.float64).square()
            for p in self._parameters.values()
        ]
        norms = self._sum_of_shards(torch.stack(squares)).sqrt().tolist()
        return dict(zip(self._parameters, norms, strict=True))

    def gradient_norm(self) -> float:
        """The L2 norm of the whole gradient, the same on every process."""
        return math.sqrt(sum(norm * norm for norm in self.gradient_norms().values()))

    def scale_gradients(self, factor: float) -> None:
        """Multiplies the whole gradient."""
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                own_part(parameter.grad).mul_(factor)

    def step(self, lr: float) -> None:
        """One step of the optimiser at this learning rate; gradients are gone after it."""
        self._set_lr(lr)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def discard(self) -> None:
        """Lets go of gradients, and of a pass forward that nothing followed."""
        self.optimizer.zero_grad()

    def sum(self, *values: float) -> list[float]:
        """Each number summed over processes, in fp64."""
        return [float(value) for value in values]

    def weights(self) -> dict[str, Tensor]:
        """Copies of all weights by name, whole, in fp32, on the CPU; on the first process, and nothing on others."""
        return self._gathered(self._parameters)

    def optimizer_state(self) -> dict[str, Tensor]:
        """AdamW's moments as `exp_avg.NAME` and `exp_avg_sq.NAME`, and `step`; as `weights` gives them."""
        states = {name: self.optimizer.state.get(p, {}) for name, p in self._parameters.items()}
        found: dict[str, Tensor] = {}
        for moment in MOMENTS:
            held = {f"{moment}.{name}": states[name].get(moment) for name in states}
            parts = {
                key: torch.zeros_like(p) if x is None else x
                for (key, x), p in zip(held.items(), self._parameters.values(), strict=True)
            }
            found |= self._gathered(parts)
        if self.rank == 0:
            steps = [float(state["step"]) for state in states.values() if state]
            found["step"] = torch.tensor(max(steps, default=0.0))
        return found

    def load(self, weights: dict[str, Tensor] | None, optimizer_state: dict[str, Tensor] | None) -> None:
        """Takes over what `weights` and `optimizer_state` gave, to the bit; what the first process gives counts."""
        problem = self._problem(weights, optimizer_state)
        given = self._agree("load", problem, weights is not None, optimizer_state is not None)
        if given[0]:
            self._load_weights(weights or {})
        if given[1]:
            self._load_optimizer(optimizer_state or {})

    def start_ema(self, decay: float) -> None:
        """Keeps an exponential moving average of the weights from here on; it begins as the weights."""
        if not 0.0 < decay < 1.0:
            raise GSAError(f"engine: decay of the EMA is {decay}, expected more than 0 and less than 1")
        self._ema_decay = decay
        self._ema = {name: p.detach().clone() for name, p in self._parameters.items()}

    def update_ema(self) -> None:
        """Moves the average towards the weights."""
        for name, average in self._average().items():
            own_part(average).lerp_(own_part(self._parameters[name].detach()), 1.0 - self._ema_decay)

    def ema_weights(self) -> dict[str, Tensor]:
        """The averaged weights, as `weights` gives them."""
        return self._gathered(self._average())

    def load_ema(self, weights: dict[str, Tensor]) -> None:
        """Takes over what `ema_weights` gave, to the bit; what the first process gives counts."""
        average = self._average()
        problem = check_tensors(weights, self._shapes) if self.rank == 0 else None
        self._agree("load_ema", problem)
        for name, whole in self._received(weights):
            self._take(average[name], whole)

    @contextmanager
    def with_ema(self) -> Iterator[None]:
        """Inside the context, the model has the averaged weights."""
        average = self._average()
        self._swap(average)
        self._ema_is_in = True
        try:
            yield
        finally:
            self._ema_is_in = False
            self._swap(average)

    @contextmanager
    def evaluation(self, *, ema: bool) -> Iterator[None]:
        """Inside the context, the model is in its evaluation mode, with the averaged weights if asked for."""
        self.model.eval()
        try:
            if ema:
                with self.with_ema():
                    yield
            else:
                yield
        finally:
            self.model.train()

    def close(self) -> None:
        """Ends the connection to other processes."""

    # What strategies for several processes override.

    def _wrap(self, loss: LossOf) -> nn.Module:
        return loss

    def _broadcast(self, x: Tensor) -> None:
        """Gives a tensor on every process what it holds on the first."""

    def _sum_of_shards(self, x: Tensor) -> Tensor:
        """The sum over processes, if each of them holds a part of every parameter."""
        return x

    def _whole(self, x: Tensor) -> Tensor:
        """All of a tensor that may be in parts."""
        return x

    def _take(self, x: Tensor, whole: Tensor) -> None:
        """Gives a tensor that may be in parts its part of the whole."""
        x.copy_(whole)

    # Helpers of the above.

    def _set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def _average(self) -> dict[str, Tensor]:
        if self._ema is None or self._ema_is_in:
            raise GSAError(f"engine: the EMA {'is in use' if self._ema_is_in else 'was not started'}")
        return self._ema

    @torch.no_grad()
    def _swap(self, others: dict[str, Tensor]) -> None:
        for name, other in others.items():
            own, other = own_part(self._parameters[name]), own_part(other)
            held = own.clone()
            own.copy_(other)
            other.copy_(held)

    @torch.no_grad()
    def _gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole copies on the CPU of the first process, one tensor at a time."""
        found: dict[str, Tensor] = {}
        for name, x in tensors.items():
            whole = self._whole(x)
            if self.rank == 0:
                found[name] = whole.detach().to("cpu", copy=True)
        return found

    def _received(self, wholes: dict[str, Tensor], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Each parameter's name and the whole tensor of that name, which the first process holds, one at a time."""
        for name, shape in self._shapes.items():
            whole = torch.zeros(shape, dtype=torch.float32, device=self.device)
            if self.rank == 0:
                whole.copy_(wholes[prefix + name])
            self._broadcast(whole)
            yield name, whole

    def _received_step(self, state: dict[str, Tensor]) -> Tensor:
        step = torch.zeros((), dtype=torch.float32, device=self.device)
        if self.rank == 0:
            step.copy_(state["step"])
        self._broadcast(step)
        return step

    @torch.no_grad()
    def _load_weights(self, weights: dict[str, Tensor]) -> None:
        for name, whole in self._received(weights):
            self._take(self._parameters[name], whole)

    def _load_optimizer(self, state: dict[str, Tensor]) -> None:
        step = self._received_step(state)
        for group in self.optimizer.param_groups:
            on_device = group.get("fused") or group.get("capturable")  # as torch keeps it
            for p in group["params"]:
                own_step = step.clone() if on_device else step.cpu().clone()
                self.optimizer.state[p] = {"step": own_step} | {moment: torch.zeros_like(p) for moment in MOMENTS}
        for moment in MOMENTS:
            for name, whole in self._received(state, f"{moment}."):
                self._take(self.optimizer.state[self._parameters[name]][moment], whole)

    def _problem(self, weights: dict[str, Tensor] | None, optimizer_state: dict[str, Tensor] | None) -> str | None:
        """What is wrong with tensors to load, on the first process; None if nothing is."""
        if self.rank != 0:
            return None
        problem = None if weights is None else check_tensors(weights, self._shapes)
        if problem is None and optimizer_state is not None:
            problem = check_tensors(optimizer_state, optimizer_shapes(self._shapes))
        return problem

    def _agree(self, operation: str, problem: str | None, *flags: bool) -> list[bool]:
        """What the first process says of each flag, on all; a problem there is an error on all, so that none waits."""
        first = self.rank == 0
        wrong, *said = self.sum(problem is not None, *(flag and first for flag in flags))
        if wrong:
            raise GSAError(f"engine {self.name}: {operation}: {problem or 'refused by the first process'}")
        return [bool(flag) for flag in said]
