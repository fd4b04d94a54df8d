"""The training loop: one step after another, evaluated, saved, and resumed to the bit.

Nothing is drawn at random after the weights: a step depends on weights, optimiser and its own number alone. So a run
that was killed and resumed takes the same path as one that was not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gsa.data.batches import MicroBatch, Rows, Steps
from gsa.data.shards import TOKENIZER
from gsa.data.tokenizer import load_tokenizer
from gsa.errors import GSAError
from gsa.models.checkpoint import read_model
from gsa.models.lm import LM
from gsa.ops.native import library
from gsa.train.evaluation import evaluate
from gsa.train.folder import RunFolder
from gsa.train.metrics import Metrics
from gsa.train.nonfinite import first_broken, told
from gsa.train.optimizer import adamw
from gsa.train.peak import Peak, flops_per_token
from gsa.train.plan import Plan
from gsa.train.position import Outcome, Position, Spent
from gsa.train.precision import AUTO, refuse_missing_unit
from gsa.train.precision import told as precision_told
from gsa.train.progress import Progress
from gsa.train.sample import sample
from gsa.train.schedule import learning_rate
from gsa.train.stop import StopWish
from gsa.train.strategies import PRECISIONS, Strategy

FIRST_LOSS_SCALE, SCALE_GROWS_AFTER = 2.0**16, 2000  # of fp16, whose gradients would vanish otherwise

WHOLE = ("single", "ddp")  # strategies by which a process has all of the model


class Trainer:
    """A run in progress, on one of its processes. `folder` is None on all but the first."""

    def __init__(self, plan: Plan, strategy: Strategy, folder: RunFolder | None, say: Callable[[str], None]):
        self.plan, self.strategy, self.folder, self.say = plan, strategy, folder, say
        settings = plan.settings
        self.rows = partial(Rows, length=settings.length, reset_at_documents=settings.reset_at_documents)
        self.data = Steps(
            self.rows(plan.tokens),
            batch_size=settings.batch_size,
            micro_batch_size=settings.micro_batch_size,
            seed=settings.seed,
            rank=strategy.rank,
            world_size=strategy.world_size,
        )
        self.position = Position(loss_scale=FIRST_LOSS_SCALE if settings.precision == "fp16" else 1.0)
        self.spent = Spent()
        self.broken: str | None = None  # what was found of the last step that was not finite
        self._start()
        self.begin = self.position.step

    def _start(self) -> None:
        """Builds the model, or brings it back to where the newest checkpoint left it."""
        plan, strategy, settings = self.plan, self.strategy, self.plan.settings
        checkpoint = self.folder.newest(self.say) if self.folder else None
        state = _shared(strategy, None if checkpoint is None else checkpoint.state)
        torch.manual_seed(settings.seed)
        if plan.weights is not None and state is None:
            model = read_model(plan.weights, dtype=torch.float32)
        else:
            model = LM(plan.config)
        if self.folder:
            self.folder.check_space(model.num_parameters)
        model.gradient_checkpointing = settings.gradient_checkpointing
        optimizer = partial(
            adamw,
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            decay_all=settings.decay_all,
        )
        if state is None:
            refuse_missing_unit(settings.precision, strategy.device)
        elif settings.precision == AUTO:  # a run keeps what it began with, on whatever machine it goes on
            strategy.precision = state["settings"].get("precision", AUTO)
        strategy.start(model, optimizer, compile=settings.compile)
        self._settle(strategy.precision, goes_on=state is not None)
        if state is not None:
            self.position = self._position(state)
            strategy.load(
                checkpoint.tensors("model") if checkpoint else None,
                checkpoint.tensors("optimizer") if checkpoint else None,
            )
            beyond = "" if self.position.step <= plan.steps else ", which is beyond the end"
            self.say(f"going on from step {self.position.step} of {plan.steps}{beyond}")
        if settings.ema is not None:
            strategy.start_ema(settings.ema)
            if state is not None and state["settings"].get("ema") is not None:
                strategy.load_ema(checkpoint.tensors("ema") if checkpoint else {})

    def _settle(self, precision: str, *, goes_on: bool) -> None:
        """Has the run's records name the precision that was chosen, and says which it is."""
        asked = self.plan.settings.precision
        self.plan = replace(self.plan, settings=replace(self.plan.settings, precision=precision))
        if self.folder:
            self.folder.plan = self.plan
        if line := precision_told(precision, self.strategy.device, asked=asked, goes_on=goes_on):
            self.say(line)

    def _position(self, state: dict[str, Any]) -> Position:
        """Where a checkpoint stands; what means nothing under changed settings begins anew."""
        position, before = Position.read(state), state["settings"]

        def changed(*names: str) -> bool:
            return any(before.get(name) != getattr(self.plan.settings, name) for name in names)

        if changed("precision"):
            position.loss_scale, position.good_steps = self.position.loss_scale, 0
        if changed("eval_data", "eval_rows", "ema"):
            position.best, position.evals_since_best = None, 0
        return position

    def run(self, metrics: Metrics | None, progress: Progress) -> Outcome:
        """Trains to the end, to a wish to stop, or until evaluations get no better."""
        settings, plan, position = self.plan.settings, self.plan, self.position
        if not progress.quiet:
            self.say = progress.note
        if library.unavailable(self.strategy.device) is None:
            library.watch_crowd()
        peak = Peak(self.strategy.device, PRECISIONS[settings.precision], self.strategy.world_size)
        flops = flops_per_token(plan.config, settings.length)
        batches = self.data.run(position.step, plan.steps, settings.workers)
        stop: int | None = None
        with StopWish(quiet=self.folder is None) as wish:
            while (reason := self._end(stop)) is None:
                began = time.perf_counter()
                with self.spent.on("data"):
                    batch = next(batches)
                with self.spent.on("compute"):
                    values, stop = self._step(batch, wish)
                seconds = time.perf_counter() - began
                values["tokens_per_second"] = self.plan.tokens_per_step / seconds
                values["peak_share"] = peak.share(flops * values["tokens_per_second"])
                if plan.eval_tokens is not None and self._due(settings.eval_every):
                    found, text = self._evaluate()
                    values |= {f"eval_{name}": value for name, value in found.items()}
                    values |= {} if text is None else {"sample": text}
                position.seconds += time.perf_counter() - began
                if metrics is not None:
                    metrics.write(position.step, values)
                progress.update(
                    position.step,
                    loss=position.smoothed_loss if position.smoothed_loss is not None else values["loss"],
                    lr=values["lr"],
                    tokens_per_second=values["tokens_per_second"],
                    peak_share=values["peak_share"],
                    grad_norm=values["grad_norm"],
                    skipped=position.skipped,
                    eval_loss=values.get("eval_loss"),
                )
                if "sample" in values:
                    progress.note(f"step {position.step}: {settings.sample_prompt}{values['sample']}")
                if self._due(settings.save_every) or self._end(stop) is not None or self._is_best():
                    self._save()
        return self._outcome(reason, stop)

    def _step(self, micro_batches: list[MicroBatch], wish: StopWish) -> tuple[dict[str, Any], int | None]:
        """One step of the optimiser, or none if the gradient is not finite; what to tell, and a signal to stop."""
        strategy, position, settings = self.strategy, self.position, self.plan.settings
        (targets,) = strategy.sum(sum(micro.targets for micro in micro_batches))
        # Noise of a step is its own, so that a run that goes on draws what it would have drawn.
        torch.manual_seed(((settings.seed * 1_000_003 + position.step) * 65_537 + strategy.rank) % 2**63)
        loss = torch.zeros((), device=strategy.device)
        for i, micro in enumerate(micro_batches):
            # Each token of the step counts the same, whichever process and micro-batch it is in.
            share = self._loss(micro) * (micro.targets / targets)
            strategy.backward(share * position.loss_scale, last=i == len(micro_batches) - 1)
            loss += share.detach()
        total, heard, signals = strategy.sum(float(loss), wish.signal is not None, wish.signal or 0)
        norm = float(strategy.gradient_norm()) / position.loss_scale
        lr = learning_rate(
            position.step, steps=self.plan.steps, warmup=self.plan.warmup, peak=settings.lr, floor=settings.min_lr
        )
        if math.isfinite(total) and math.isfinite(norm):
            clipped = 1.0 if settings.clip is None else min(1.0, settings.clip / (norm + 1e-6))
            if clipped != 1.0 or position.loss_scale != 1.0:
                strategy.scale_gradients(clipped / position.loss_scale)
            strategy.step(lr)
            if settings.ema is not None:
                strategy.update_ema()
            self._note_good_step()
        else:
            self._note_bad_step(micro_batches, total, norm)
        position.step += 1
        position.note_loss(total)
        values = {"loss": total, "lr": lr, "grad_norm": norm, "skipped": position.skipped}
        return values, round(signals / heard) if heard else None

    def _loss(self, micro: MicroBatch) -> Tensor:
        device = self.strategy.device
        ids = micro.ids.to(device)
        return self.strategy.loss(ids, ids, None if micro.cu_seqlens is None else micro.cu_seqlens.to(device))

    def _note_good_step(self) -> None:
        position = self.position
        position.skipped_in_row, position.good_steps = 0, position.good_steps + 1
        if self.plan.settings.precision == "fp16" and position.good_steps >= SCALE_GROWS_AFTER:
            position.loss_scale, position.good_steps = position.loss_scale * 2, 0

    def _note_bad_step(self, micro_batches: list[MicroBatch], loss: float, norm: float) -> None:
        """Counts a step that is skipped; the first of a row is looked into, and too many end the run."""
        strategy, position = self.strategy, self.position
        norms = strategy.gradient_norms()
        strategy.discard()
        position.skipped += 1
        said = f"step {position.step + 1} skipped: loss {loss:g}, norm of the gradient {norm:g}"
        if self.plan.settings.precision == "fp16" and math.isfinite(loss) and position.loss_scale > 1:
            position.loss_scale, position.good_steps = position.loss_scale / 2, 0
            self.say(f"{said}, loss scale now {position.loss_scale:g}")
            return
        position.skipped_in_row += 1
        if position.skipped_in_row == 1 or self.broken is None:
            found = _gathered(strategy, first_broken(strategy.model, lambda: self._forward(micro_batches), norms))
            self.broken = told(next((one for one in found if one is not None), None))
            said += f"; {self.broken}"
            if self.folder:
                numbers = {"step": position.step + 1, "loss": str(loss), "grad_norm": str(norm)}
                self.folder.report({**numbers, "first_by_process": found})
        self.say(said)
        if position.skipped_in_row >= self.plan.settings.max_skipped:
            if self.folder is None:
                raise GSAError("train: stopped together with the first process, which says why")
            raise GSAError(
                f"train: stopped, {position.skipped_in_row} steps in a row were not finite (max_skipped); "
                f"the last good checkpoint is {self.folder.last() or 'none'}; {self.broken}"
            )

    def _forward(self, micro_batches: list[MicroBatch]) -> None:
        for micro in micro_batches:
            self._loss(micro)

    def _evaluate(self) -> tuple[dict[str, float], str | None]:
        """Loss, perplexity and bits per byte on the evaluation's data, and a text that the model writes, if it can.

        All is of the average of the weights if one is kept.
        """
        strategy, position, settings = self.strategy, self.position, self.plan.settings
        assert self.plan.eval_tokens is not None
        with self.spent.on("evaluation"), strategy.evaluation(ema=settings.ema is not None):
            found = evaluate(
                strategy, self._loss, self.rows(self.plan.eval_tokens), self.data.micro_batch_size, settings.eval_rows
            )
            text = None
            if self.folder and settings.sample_tokens and strategy.name in WHOLE:
                tokenizer = load_tokenizer(str(self.plan.tokens.folder / TOKENIZER))
                text = sample(strategy.model, tokenizer, settings.sample_prompt, settings.sample_tokens)
        position.evals_since_best += 1
        if math.isfinite(found["loss"]):
            position.eval = {"step": position.step, **found}
            if position.best is None or found["loss"] < position.best["loss"]:
                position.best, position.evals_since_best = {"step": position.step, "loss": found["loss"]}, 0
        return found, text

    def _due(self, every: int) -> bool:
        """Whether something that comes every so many steps, and after the last, comes now."""
        return self.position.step % every == 0 or self.position.step == self.plan.steps

    def _is_best(self) -> bool:
        best = self.position.best
        return self.plan.settings.keep_best and best is not None and best["step"] == self.position.step

    def _end(self, stop: int | None) -> str | None:
        """Why the run ends here, if it does."""
        patience = self.plan.settings.patience
        if self.position.step >= self.plan.steps:
            return "finished"
        if patience is not None and self.position.evals_since_best >= patience:
            return "early"
        return None if stop is None else "stopped"

    def _save(self) -> None:
        with self.spent.on("saving"):
            tensors = {"model": self.strategy.weights(), "optimizer": self.strategy.optimizer_state()}
            if self.plan.settings.ema is not None:
                tensors["ema"] = self.strategy.ema_weights()
            if self.folder:
                self.folder.save(self.position, tensors)

    def _outcome(self, reason: str, signal: int | None) -> Outcome:
        position, last = self.position, self.folder.last() if self.folder else None
        return Outcome(
            reason=reason,
            signal=signal if reason == "stopped" else None,
            rank=self.strategy.rank,
            begin=self.begin,
            step=position.step,
            steps=self.plan.steps,
            tokens=position.step * self.plan.tokens_per_step,
            skipped=position.skipped,
            checkpoint=None if last is None else str(last),
            precision=self.plan.settings.precision,
            eval=position.eval,
            best=position.best,
            spent=self.spent.summary(),
        )


def _gathered(strategy: Strategy, value: Any) -> list[Any]:
    """What each process of a run has, on all of them."""
    held: list[Any] = [value] * strategy.world_size
    if strategy.world_size > 1:
        torch.distributed.all_gather_object(held, value)
    return held


def _shared(strategy: Strategy, value: dict[str, Any] | None) -> dict[str, Any] | None:
    """What the first process of a run has, on all of them."""
    if strategy.world_size == 1:
        return value
    held = [value]
    torch.distributed.broadcast_object_list(held, src=0)
    return held[0]
