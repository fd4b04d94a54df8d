"""`train`: from settings to the outcome of a run."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import asdict

from gsa.data.batches import rows_at_once
from gsa.devices import find_device
from gsa.errors import GSAError, OutOfMemory, memory_errors
from gsa.threads import use_threads
from gsa.train.estimate import Estimate, estimate
from gsa.train.folder import RunFolder, opened, recorded_precision
from gsa.train.loop import Trainer
from gsa.train.metrics import Metrics
from gsa.train.plan import Plan, make_plan
from gsa.train.position import Outcome
from gsa.train.precision import AUTO, automatic
from gsa.train.progress import Progress
from gsa.train.settings import TrainSettings
from gsa.train.strategies import Strategy, strategy
from gsa.train.strategies.launch import launched_processes


def train(settings: TrainSettings) -> Outcome:
    """Trains a model as the settings say, in this process or as one of several that a launcher started.

    >>> train(TrainSettings(model="gsa-tiny", data="data/books", out="runs/books", steps=1000))  # doctest: +SKIP
    """
    plan = _prepared(settings)
    device = None if settings.device == "auto" else settings.device
    chosen = strategy(settings.engine, precision=settings.precision, device=device, zero_stage=settings.zero_stage)
    try:
        with memory_errors("train"):
            return _train(plan, chosen)
    except OutOfMemory as error:
        raise OutOfMemory(f"{error}; smaller micro-batches, gradient checkpointing and bf16 need less") from error
    finally:
        chosen.close()


def _train(plan: Plan, chosen: Strategy) -> Outcome:
    settings, first = plan.settings, chosen.rank == 0

    def say(line: str) -> None:
        if first:
            print(line, file=sys.stderr, flush=True)

    with opened(plan) if first else nullcontext() as folder:
        trainer = Trainer(plan, chosen, folder, say)
        with Progress(plan.steps, trainer.begin, quiet=settings.json or not first) as progress:
            if folder is None:
                return trainer.run(None, progress)
            folder.write_settings()
            with Metrics(
                plan.out,
                resume_step=trainer.begin,
                tensorboard=settings.tensorboard,
                wandb=settings.wandb,
                settings=asdict(trainer.plan.settings),
                say=say,
            ) as metrics:
                return trainer.run(metrics, progress)


def preview(settings: TrainSettings) -> tuple[Plan, Estimate]:
    """What a run would do and take, without starting it."""
    plan, processes = _prepared(settings), launched_processes()
    rows = rows_at_once(settings.batch_size, settings.micro_batch_size, processes)
    device = find_device(settings.device, "engine")
    precision = settings.precision
    if precision == AUTO:
        precision = recorded_precision(plan.out) or automatic(device)
    found = estimate(
        plan.config,
        length=settings.length,
        rows=rows,
        accumulation=settings.batch_size // (rows * processes),
        world_size=processes,
        engine=("ddp" if processes > 1 else "single") if settings.engine == "auto" else settings.engine,
        precision=precision,
        ema=settings.ema is not None,
        gradient_checkpointing=settings.gradient_checkpointing,
        steps=plan.steps,
        device=device,
        zero_stage=settings.zero_stage,
        reset_at_documents=settings.reset_at_documents,
    )
    RunFolder(plan).check_space(found.parameters)
    return plan, found


def _prepared(settings: TrainSettings) -> Plan:
    """The plan, and the process made ready for it."""
    if ":" in settings.device and launched_processes() > 1:
        raise GSAError(
            f"train: device {settings.device} is one GPU, and a launcher started {launched_processes()} processes; "
            "with the device cuda each takes the GPU of its number"
        )
    use_threads(settings.threads)
    return make_plan(settings)
