"""DeepSpeed ZeRO: optimiser, gradients and weights in parts, by stage."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from gsa.errors import GSAError
from gsa.extras import imported
from gsa.models.lm import LM
from gsa.train.strategies.distributed import Distributed
from gsa.train.strategies.tensors import MOMENTS


class DeepSpeed(Distributed):
    """DeepSpeed with ZeRO stage 1 (the optimiser is in parts), 2 (gradients too) or 3 (weights too).

    DeepSpeed takes means over processes, and from the pass backward to its own step the gradients are its own. So what
    the loop does with them (sum, scale, throw away) is kept as one factor, which a hook of the optimiser applies in the
    middle of DeepSpeed's step.
    """

    name = "deepspeed"

    def __init__(self, precision: str, device: torch.device | None, zero_stage: int):
        self._package = _package()
        self._stage = zero_stage
        super().__init__(precision, device)
        accelerator = import_module("deepspeed.accelerator").get_accelerator().device_name()
        if accelerator != self.device.type:
            raise GSAError(
                f"engine deepspeed: the device is {self.device.type}, DeepSpeed has chosen {accelerator}; "
                f"set DS_ACCELERATOR={self.device.type} in the environment"
            )
        self._factor: float | None = float(self.world_size)
        """What gradients are multiplied by in the step; None: there is no step."""

    def start(self, model: LM, optimizer: Callable[[LM], torch.optim.Optimizer], *, compile: bool) -> None:
        if compile and self._stage == 3:
            # Its hooks on every module would be compiled too, again and again.
            raise GSAError(
                "engine deepspeed: zero_stage 3 does not go with torch.compile; choose fsdp, or stage 1 or 2"
            )
        super().start(model, optimizer, compile=compile)
        self.optimizer.register_step_pre_hook(self._apply_factor)
        self._engine: Any
        self._engine, self._zero, _, _ = self._package.initialize(
            model=self._wrapped,
            optimizer=self.optimizer,
            config={
                "train_micro_batch_size_per_gpu": 1,  # only DeepSpeed's own statistics look at it
                "gradient_accumulation_steps": 1,  # `backward` says when a step is complete
                "zero_optimization": {"stage": self._stage},
                "gradient_clipping": 0.0,  # which is none, and the loop's own; DeepSpeed's default is not
                "zero_allow_untested_optimizer": True,  # torch's AdamW is not on its list
                "steps_per_print": None,
            },
            dist_init_required=False,
        )
        if self._stage == 3:
            # The head's weight is used outside of its module, where DeepSpeed would not look for it.
            self._package.zero.register_external_parameter(self._wrapped, model.lm_head.weight)
        self._wrapped = self._engine
        self._make_moments()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss)

    def gradient_norms(self) -> dict[str, float]:
        utils = self._package.utils
        norms = {}
        for name, p in self._parameters.items():
            gradient = utils.safe_get_full_grad(p)
            norms[name] = float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) * self._scale()
        return norms

    def gradient_norm(self) -> float:
        # Not from `gradient_norms`: that would gather each gradient.
        if self._stage < 3:
            norm = float(self._zero.scaled_global_norm())
            return norm * self._scale() if norm >= 0 else math.inf  # -1 stands for not finite
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        for p in self._parameters.values():
            part = self._package.utils.safe_get_local_grad(p)
            squares += torch.linalg.vector_norm(part, dtype=torch.float64).square()
        dist.all_reduce(squares)
        return math.sqrt(squares) * self._scale()

    def scale_gradients(self, factor: float) -> None:
        self._factor = self._scale() * factor

    def step(self, lr: float) -> None:
        self._set_lr(lr)
        self._engine.step()
        self._factor = float(self.world_size)

    def discard(self) -> None:
        # DeepSpeed can only drop gradients that are complete: this micro-batch, which adds nothing, completes them.
        self._pass()
        self._factor = None
        self.step(0.0)

    def optimizer_state(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for moment in MOMENTS:
            for name, p in self._parameters.items():
                whole = self._package.utils.safe_get_full_optimizer_state(p, moment)
                if self.rank == 0:
                    found[f"{moment}.{name}"] = whole.to("cpu", copy=True)
        if self.rank == 0:
            found["step"] = torch.tensor(float(self._steps()[0]))
        return found

    def start_ema(self, decay: float) -> NoReturn:
        raise GSAError("engine deepspeed: it keeps no EMA of the weights; choose ddp or fsdp, or train without")

    def close(self) -> None:
        if hasattr(self, "_zero"):
            self._engine.destroy()
        super().close()

    def _whole(self, x: Tensor) -> Tensor:
        return self._package.utils.safe_get_full_fp32_param(x)

    def _load_weights(self, weights: dict[str, Tensor]) -> None:
        utils = self._package.utils
        for name, whole in self._received(weights):
            p = self._parameters[name]
            if self._stage < 3:
                utils.safe_set_full_fp32_param(p, whole)
            else:
                utils.safe_set_local_fp32_param(p, self._part(p, whole))
        # These were the optimiser's copies. Its step gives them to the model, even one without gradients.
        self.discard()
        if not self._engine.was_step_applied():
            raise GSAError("engine deepspeed: load: the weights before were not finite, start again")

    def _load_optimizer(self, state: dict[str, Tensor]) -> None:
        utils = self._package.utils
        for moment in MOMENTS:
            for name, whole in self._received(state, f"{moment}."):
                p = self._parameters[name]
                if self._stage < 3:
                    utils.safe_set_full_optimizer_state(p, whole, moment)
                else:
                    utils.safe_set_local_optimizer_state(p, self._part(p, whole), moment)
        step = self._received_step(state)
        for held in self._steps():
            held.copy_(step)

    def _part(self, parameter: Any, whole: Tensor) -> Tensor:
        """This process's part of a whole parameter; parts are of one size, with zeros at the end."""
        size = parameter.ds_tensor.numel()
        padded = torch.nn.functional.pad(whole.flatten(), (0, size * self.world_size - whole.numel()))
        return padded.narrow(0, size * self.rank, size)

    def _scale(self) -> float:
        assert self._factor is not None
        return self._factor

    def _apply_factor(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if self._factor is None:
                    p.grad = None
                elif p.grad is not None:
                    p.grad.mul_(self._factor)

    def _steps(self) -> list[Tensor]:
        """The counts of steps that the optimiser keeps, one for each of its tensors."""
        return [state["step"] for state in self.optimizer.state.values()]

    def _pass(self) -> None:
        """A micro-batch that adds nothing to the gradients and completes them."""
        ids = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        self.backward(self.loss(ids, ids, None) * 0.0, last=True)

    def _make_moments(self) -> None:
        """Has the optimiser make its moments, as zeros, which it and DeepSpeed would put off to the first step."""
        self._set_lr(0.0)
        held = [p for group in self.optimizer.param_groups for p in group["params"]]  # of stage 3, none outside a step
        for p in held:
            p.grad = torch.zeros_like(p)
        self.optimizer.step()
        for p in held:
            p.grad = None
        self._pass()
        self.scale_gradients(0.0)
        self.step(0.0)
        for step in self._steps():
            step.zero_()


def _package() -> Any:
    return imported("deepspeed", "engine deepspeed")
