"""Everything about a distillation, in one dataclass: options of `gsa distill`, or a file in YAML."""

from __future__ import annotations

from dataclasses import dataclass

from gsa.devices import check_device
from gsa.errors import GSAError
from gsa.files import named
from gsa.options import SEED, check, choice, number
from gsa.threads import MAX_THREADS

PRECISIONS = ("auto", "fp32", "bf16")
PARTS = ("new", "attention", "all")
IDLE: tuple[tuple[str, str | int, str, tuple[str, ...]], ...] = (
    ("align_share", 0, "which leaves out the first stage", ("windows", "align_lr", "align_lr_attention")),
    (
        *("align_share", 1, "which leaves out the second stage"),
        ("lr", "lr_attention", "lr_rest", "logits", "micro_batch_size"),
    ),
    (
        *("train", "new", "which leaves all as it is that the teacher has too"),
        ("rank", "align_lr_attention", "lr_attention", "lr_rest"),
    ),
    ("train", "attention", "which leaves norms, MLPs and embeddings as they are", ("lr_rest",)),
)
"""A setting and a value of it, what that means, and the settings that then do nothing."""


@dataclass(frozen=True)
class DistillSettings:
    """Trains a converted model to do what its teacher does; the same command again goes on where it stopped.

    First layer by layer: each mixer learns its teacher's outputs, from the teacher's own inputs (align). Then as a
    whole: the model learns the teacher's distribution of the next token (distil), from likeliest tokens that are kept
    on disk for other students of the same teacher. A table by position in the context tells what it was before, and
    after each stage. OUT/model is the result, a folder as `gsa convert` writes it. Ctrl-C saves and stops.
    """

    student: str
    """Folder of a model that `gsa convert` has written."""
    out: str
    """Folder of the run: checkpoints, metrics, report, and the model that comes out."""
    data: str | None = None
    """Folder of tokens to learn from, as `gsa data prepare` writes it with the student's tokenizer."""
    eval_data: str | None = None
    """Folder of tokens for the tables; by default what `gsa data prepare --holdout` kept from `data`, if it did."""
    teacher: str | None = None
    """What the student was converted from, if that has moved since."""

    max_tokens: int = number(500_000, least=1)
    """Tokens to learn from in both stages together, rounded up to steps."""
    max_hours: float | None = number(None, above=0, most=1e5)
    """Time for both stages together: fewer steps are taken if it would not do, told after the first few of a stage."""
    align_share: float = number(0.4, least=0, most=1)
    """Share of tokens and time that the first stage gets; 0 leaves it out, 1 leaves out the second."""
    length: int = number(1024, least=2, most=2**20)
    """Tokens of a row."""
    batch_size: int = number(2, least=1, most=2**16)
    """Rows of a step."""
    micro_batch_size: int | None = number(None, least=1, most=2**16)
    """Rows that go through the model at once in the second stage, for less memory; by default all of a step."""
    windows: str | None = None
    """Windows of a hybrid in the first stage, with commas between, one for each step by chance, so that slots must work
    for tokens that are near too, e.g. `1,16,64`; by default its own."""

    train: str = choice("attention", PARTS)
    """What is trained: `new` is what the teacher does not have, `attention` all of the mixers too, `all` also norms,
    MLPs and embeddings (in the second stage)."""
    rank: int | None = number(None, least=1, most=2**16)
    """If given: matrices that the teacher has too, in mixers, get updates of this rank instead of full ones."""
    align_lr: float = number(3e-3, above=0)
    """Highest learning rate of what is new, in the first stage."""
    align_lr_attention: float = number(3e-4, above=0)
    """The same of what the mixers have from the teacher."""
    lr: float = number(1e-3, above=0)
    """Highest learning rate of what is new, in the second stage."""
    lr_attention: float = number(3e-4, above=0)
    """The same of what the mixers have from the teacher."""
    lr_rest: float = number(5e-5, above=0)
    """The same of norms, MLPs and embeddings."""
    clip: float = number(1.0, above=0)
    """Largest norm of the gradient."""

    logits: str | None = None
    """Folder for the teacher's likeliest tokens, used again by other runs; by default DATA.logits, beside the data."""
    eval_rows: int = number(16, least=1)
    """Rows of the evaluation's data that the tables are made from."""
    seed: int = number(0, least=0, most=SEED)
    """Of the order of rows, the windows, and low-rank updates."""
    precision: str = choice("auto", PRECISIONS)
    """Of the passes through the models; weights are fp32. `auto` takes bf16 where CPU or GPU have units for it."""
    device: str = "auto"
    """Where the models are: cpu, cuda, cuda:1 for the second GPU, or auto, a GPU if torch can use one."""
    threads: int | None = number(None, least=1, most=MAX_THREADS)
    """Threads of torch; its own choice by default. The same number gives the same bits."""
    save_minutes: float = number(10.0, above=0, most=1e6)
    """Minutes between checkpoints."""
    json: bool = False
    """Print the report as JSON, without progress."""

    def __post_init__(self) -> None:
        check(self, "distill")
        check_device(self.device, "distill")
        for name in ("student", "out", "data", "eval_data", "teacher", "logits"):
            if (place := getattr(self, name)) is not None:
                named(place, f"distill: {name}")
        if not self.data:
            raise GSAError("distill: data is missing: give --data, a folder that `gsa data prepare` has written")
        windows_of(self)
        self._check_use()
        if self.micro_batch_size is not None and self.batch_size % self.micro_batch_size:
            raise GSAError(
                f"distill: batch_size {self.batch_size} must be a multiple of micro_batch_size {self.micro_batch_size}"
            )

    def _check_use(self) -> None:
        """Raises for the first setting with a value of its own that others leave without effect."""
        for name, value, why, idle in IDLE:
            for other in idle if getattr(self, name) == value else ():
                if getattr(self, other) != getattr(type(self), other):
                    raise GSAError(f"distill: {other} does nothing with {name} {value}, {why}")
        if self.train == "all" and self.align_share == 1:
            raise GSAError("distill: train all is attention with align_share 1: all else is for the second stage")

    def __call__(self) -> None:
        """What `gsa distill` does."""
        from gsa.cli.distill import run

        run(self)


def windows_of(settings: DistillSettings) -> tuple[int, ...]:
    """The windows to draw from; none for a student's own."""
    if settings.windows is None:
        return ()
    try:
        found = tuple(int(word) for word in settings.windows.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise GSAError(
            f"distill: windows must be whole numbers from 1 with commas between (1,16,64), got {settings.windows!r}"
        )
    return found
