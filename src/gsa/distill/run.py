"""`distill`: from settings to a distilled model, in two stages, each of which goes on where it was stopped."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gsa.convert.by_position import Reading, compare_all
from gsa.data.batches import Steps
from gsa.distill.align import Align
from gsa.distill.likeliest import TeacherRows, fingerprint
from gsa.distill.prepare import Prepared, prepare
from gsa.distill.result import write_result
from gsa.distill.settings import DistillSettings, windows_of
from gsa.distill.stage import Objective, Stage, changed_facts
from gsa.distill.trained import Optimizer, add_low_rank, parts, plain_name
from gsa.distill.whole import Whole
from gsa.errors import GSAError, memory_errors
from gsa.files import read_json, written
from gsa.locks import locked
from gsa.threads import use_threads

REPORT, MODEL = "report.json", "model"
ALIGN, DISTIL = "align", "distil"
TRAINED = {"new": ("new",), "attention": ("new", "attention"), "all": ("new", "attention", "rest")}
SHOWN = (
    *("student", "out", "data", "eval_data", "eval_rows", "teacher"),
    *("logits", "threads", "device", "save_minutes", "json"),
)
"""Settings that do not decide the path of a run, or are known by what they hold."""
Report = dict[str, list[dict[str, Any]]]
"""By position in the context: before, and after each stage."""


@dataclass(frozen=True)
class Distilled:
    """How a run ended."""

    model: Path | None
    """The distilled model; None if a signal came first."""
    signal: int | None
    report: Report


def distill(settings: DistillSettings) -> Distilled:
    """Distils a student as the settings say, or goes on with it.

    >>> distill(DistillSettings("smol-hybrid", "runs/smol", data="data/text", max_tokens=500_000))  # doctest: +SKIP
    """
    use_threads(settings.threads)
    out = Path(settings.out)
    _check_out(out)
    prepared = prepare(settings)
    with memory_errors("distill"):
        run = _Run(prepared, out)  # which raises for all that can be known to go wrong, before there is a folder
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GSAError(f"distill: out {out} cannot be used: {error}") from None
    with locked(out, "distill"), memory_errors("distill"):
        return run.go()


def _check_out(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise GSAError(f"distill: out {out} is a file, expected a folder")
    found = {path.name for path in out.iterdir() if not path.name.startswith(".")} if out.is_dir() else set()
    if found and not found & {ALIGN, DISTIL, REPORT}:
        raise GSAError(f"distill: out {out} is a folder with other files in it: choose a new one")


@dataclass(frozen=True)
class _Plan:
    """A stage that is to come, with all that it needs."""

    name: str
    share: float
    wanted: list[tuple[str, float]]
    """What is trained, and at which rates."""
    data: Steps
    steps: int
    objective: Objective


class _Run:
    """A distillation in progress."""

    def __init__(self, prepared: Prepared, out: Path):
        self.prepared, self.out = prepared, out
        settings, student = prepared.settings, prepared.student
        self.quiet = settings.json
        self.teacher_print = fingerprint(prepared.teacher)
        self.facts = {
            **{name: value for name, value in asdict(settings).items() if name not in SHOWN},
            "precision": str(prepared.precision),
            "student": fingerprint(student),
            "teacher": self.teacher_print,
            "tokens": prepared.rows.tokens.fingerprint,
        }
        if settings.rank is not None:
            add_low_rank(student, prepared.new, settings.rank, settings.seed)
        self.teacher_reading = _once(Reading.of(prepared.teacher))
        self.evaluated = prepared.evaluated_print
        self.report: Report = {}
        self.plans = list(self._plans())

    def go(self) -> Distilled:
        prepared, settings = self.prepared, self.prepared.settings
        self.report = self._read_report()
        self._evaluate("before")
        trained, tokens = set[str](), dict[str, int]()
        for stage in self._stages():
            if stage.resume() and stage.position.step < stage.position.steps:
                self.say(f"{stage.name}: going on from step {stage.position.step} of {stage.position.steps}")
            elif stage.position.step < stage.position.steps:
                self.say(f"{stage.name}: {stage.position.steps} steps")
            signal = stage.run(quiet=self.quiet, save_seconds=60 * settings.save_minutes)
            if signal is not None:
                return Distilled(None, signal, self.report)
            trained |= {plain_name(name) for name in stage.optimizer.parameters}
            tokens[stage.name] = stage.position.steps * stage.data.tokens
            self._evaluate(stage.name)
        write_result(prepared, self.out / MODEL, sorted(trained), tokens, self.report)
        return Distilled(self.out / MODEL, None, self.report)

    def say(self, line: str) -> None:
        if not self.quiet:
            print(line, file=sys.stderr, flush=True)

    def _plans(self) -> Iterator[_Plan]:
        """The stages in order, so far that what would stop a later one is found before the first."""
        settings = self.prepared.settings
        rates = {
            ALIGN: {"new": settings.align_lr, "attention": settings.align_lr_attention},
            DISTIL: {"new": settings.lr, "attention": settings.lr_attention, "rest": settings.lr_rest},
        }
        for name, share in ((ALIGN, settings.align_share), (DISTIL, 1 - settings.align_share)):
            if share:
                wanted = [(kind, lr) for kind, lr in rates[name].items() if kind in TRAINED[settings.train]]
                parts(self.prepared.student, self.prepared.new, wanted)  # raises if there is nothing to train
                data = Steps(
                    self.prepared.rows,
                    batch_size=settings.batch_size,
                    micro_batch_size=settings.micro_batch_size if name == DISTIL else None,
                    seed=settings.seed,
                    rank=0,
                    world_size=1,
                )
                steps = max(-int(-settings.max_tokens * share // data.tokens), 1)
                yield _Plan(name, share, wanted, data, steps, self._objective(name, steps * data.tokens))

    def _stages(self) -> Iterator[Stage]:
        """The stages in order, each made when the one before has ended: what it trains is what that has left."""
        first = 0
        for plan in self.plans:
            yield self._stage(plan, first)
            first += plan.steps

    def _stage(self, plan: _Plan, first: int) -> Stage:
        prepared, settings = self.prepared, self.prepared.settings
        return Stage(
            name=plan.name,
            folder=self.out / plan.name,
            model=prepared.student,
            optimizer=Optimizer(parts(prepared.student, prepared.new, plan.wanted)),
            objective=plan.objective,
            data=plan.data,
            first=first,
            steps=plan.steps,
            seconds=None if settings.max_hours is None else 3600 * settings.max_hours * plan.share,
            clip=settings.clip,
            precision=prepared.precision,
            facts=self.facts,
            tokenizer=prepared.folder,
            say=self.say,
        )

    def _objective(self, name: str, tokens: int) -> Objective:
        prepared, settings = self.prepared, self.prepared.settings
        if name == ALIGN:
            return Align(
                prepared.student, prepared.teacher, prepared.rows, windows=windows_of(settings), seed=settings.seed
            )
        folder = Path(settings.logits or f"{prepared.rows.tokens.folder}.logits")
        teacher_rows = TeacherRows(folder, prepared.teacher, self.teacher_print, prepared.rows, prepared.precision)
        teacher_rows.check_space(min(tokens, prepared.rows.tokens.length))
        return Whole(prepared.student, teacher_rows)

    def _evaluate(self, when: str) -> None:
        """Compares student and teacher by position, unless that was done before a stop."""
        prepared = self.prepared
        if prepared.evaluated is None or when in self.report:
            return
        rows = prepared.evaluated.to(prepared.student.lm_head.weight.device)
        student = {"student": Reading.of(prepared.student)}
        places = compare_all(student, self.teacher_reading, rows, quiet=self.quiet)["student"].places()
        self.report[when] = [asdict(place) for place in places]
        with written(self.out / REPORT) as file:
            found = {"facts": self.facts, "evaluated": self.evaluated, "by_position": self.report}
            file.write_text(json.dumps(found, indent=2) + "\n")

    def _read_report(self) -> Report:
        """What was found before a stop; a report of another run is refused.

        One table is of one set of texts: if they are others now, all of it is measured anew. Every weight that it
        tells of comes by again, since a stage that has ended is read from its checkpoint.
        """
        if not (self.out / REPORT).exists():
            return {}
        found = read_json(self.out / REPORT, made_by="gsa distill")
        if changed := changed_facts(found.get("facts"), self.facts):
            raise GSAError(
                f"distill: {self.out} is of a run with other settings ({', '.join(changed)}): choose another out"
            )
        if not isinstance(found.get("by_position"), dict):
            raise GSAError(f"distill: {self.out / REPORT}: expected by_position, the tables of a run")
        if self.evaluated is not None and found.get("evaluated") != self.evaluated:
            self.say("the tables were of other texts: they are measured anew")
            return {}
        return found["by_position"]


def _once(reading: Reading) -> Reading:
    """A reading that keeps what it has found: the teacher reads the same texts for every table."""
    kept: dict[int, Tensor] = {}

    def features(rows: Tensor, number: int) -> Tensor:
        if number not in kept:
            kept[number] = reading.features(rows, number)
        return kept[number]

    return Reading(features, reading.head)
