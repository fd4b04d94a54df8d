"""Everything about a training run, in one dataclass: a recipe in YAML, or options of `gsa train`."""

from __future__ import annotations

from dataclasses import dataclass, field

from gsa.devices import check_device
from gsa.errors import GSAError
from gsa.files import named
from gsa.options import SEED, check, choice, number
from gsa.threads import MAX_THREADS

ENGINES = ("auto", "single", "ddp", "fsdp", "deepspeed")
PRECISIONS = ("auto", "fp32", "bf16", "fp16")
MAX_STEPS = 10**12
MAX_ROWS = 2**20  # of a step
MAX_WORKERS = 256  # each is a process
Value = bool | int | float | str


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Trains a language model from prepared tokens to a checkpoint; the same command again goes on where it stopped.

    Settings come from a recipe of the package (`--recipe gsa-tiny`) or a file of your own (`--config my.yaml`), and
    from options, which win. Ctrl-C saves and stops. On several processes: `torchrun --nproc-per-node 8 -m gsa train
    ...`, with `--engine fsdp` or `deepspeed` for large models.
    """

    model: str = "gsa-tiny"
    """A preset (`gsa models` lists them), a config in JSON, or a model to go on from: a folder, a run,
    or a name of the Hugging Face Hub (owner/name)."""
    model_options: dict[str, Value] = field(default_factory=dict)
    """Fields of the model's config to change, e.g. `{num_slots: 32}`."""
    data: str | None = None
    """Folder of tokens to learn from, as `gsa data prepare` writes it."""
    eval_data: str | None = None
    """Folder of tokens to evaluate on; by default what `gsa data prepare --holdout` kept from `data`, if it did."""
    tokenizer: str | None = None
    """If given: the tokenizer that the tokens must have been prepared with."""
    out: str | None = None
    """Folder of the run: checkpoints, metrics, settings."""

    length: int = number(2048, least=2, most=2**30)
    """Tokens of a row."""
    batch_size: int = number(8, least=1, most=MAX_ROWS)
    """Rows of a step, over all processes."""
    micro_batch_size: int | None = number(None, least=1, most=MAX_ROWS)
    """Rows that go through the model at once, while gradients accumulate; by default a process's whole share."""
    reset_at_documents: bool = True
    """Whether the model forgets where a document begins; if not, documents are plainly joined."""
    steps: int | None = number(None, least=1, most=MAX_STEPS)
    """Steps to train; or give `tokens` or `epochs`."""
    tokens: int | None = number(None, least=1)
    """Tokens to train on, rounded up to steps."""
    epochs: float | None = number(None, above=0, most=1e6)
    """Times to go through the data, rounded up to steps."""
    seed: int = number(0, least=0, most=SEED)
    """Of fresh weights and of the order of rows."""
    workers: int = number(0, least=0, most=MAX_WORKERS)
    """Processes that load data ahead; rows are read from memory-mapped files, so that none is needed on local disks."""

    lr: float = number(3e-4, above=0)
    """Highest learning rate."""
    min_lr: float = number(3e-5, least=0)
    """Learning rate at the end."""
    warmup_steps: int | None = number(None, least=0, most=MAX_STEPS)
    """Steps in which the learning rate rises; or give `warmup_tokens`. 1% of the steps by default."""
    warmup_tokens: int | None = number(None, least=0)
    """The same in tokens."""
    weight_decay: float = number(0.01, least=0)
    """Of AdamW, on matrices: not on norms, biases and embeddings."""
    decay_all: bool = False
    """Whether weight decay is on every parameter."""
    beta1: float = number(0.9, least=0, below=1)
    """Of AdamW."""
    beta2: float = number(0.95, least=0, below=1)
    """Of AdamW."""
    eps: float = number(1e-8, above=0)
    """Of AdamW."""
    clip: float | None = number(1.0, above=0)
    """Largest norm of the gradient."""
    ema: float | None = number(None, above=0, below=1)
    """If given, an average of the weights is kept with this decay, e.g. 0.999, and evaluated."""
    max_skipped: int = number(10, least=1)
    """Steps in a row with a loss or gradient that is not finite, after which the run stops."""

    precision: str = choice("auto", PRECISIONS)
    """Of the passes through the model; weights are fp32. `auto` takes bf16 where CPU or GPU have units for it, else
    fp32; a run that goes on keeps what it began with."""
    gradient_checkpointing: bool = False
    """Whether activations are computed again in the pass backward, for less memory."""
    compile: bool = False
    """Whether torch.compile is used."""
    engine: str = choice("auto", ENGINES)
    """How several processes train together: ddp, fsdp (FSDP2) or deepspeed (ZeRO)."""
    zero_stage: int = number(2, least=1, most=3)
    """Stage of DeepSpeed's ZeRO, 1 to 3."""
    device: str = "auto"
    """Where the model is: cpu, cuda, cuda:1 for the second GPU, or auto, a GPU if torch can use one."""
    threads: int | None = number(None, least=1, most=MAX_THREADS)
    """Threads of torch; its own choice by default. The same number gives the same bits."""

    eval_every: int = number(500, least=1)
    """Steps between evaluations."""
    eval_rows: int | None = number(None, least=1)
    """Rows to evaluate on; all by default."""
    sample_prompt: str = "The"
    """Text whose likeliest continuation is shown at evaluations, and goes to the metrics."""
    sample_tokens: int = number(40, least=0, most=10**6)
    """Tokens of that continuation; 0 for none. Models that are spread over processes (fsdp, deepspeed) show none."""
    patience: int | None = number(None, least=1)
    """Evaluations without a better loss, after which the run stops early."""
    save_every: int = number(500, least=1)
    """Steps between checkpoints."""
    keep_last: int = number(2, least=1)
    """Newest checkpoints to keep."""
    keep_best: bool = True
    """Whether the checkpoint with the best loss of an evaluation is kept too."""
    tensorboard: bool = False
    """Whether metrics are written for TensorBoard too."""
    wandb: str | None = None
    """Project of Weights & Biases to write metrics to."""
    dry_run: bool = False
    """Print parameters, memory, tokens, steps and time, and stop."""
    json: bool = False
    """Print the outcome as JSON, without progress."""

    def __post_init__(self) -> None:
        check(self, "train")
        check_device(self.device, "train")
        for name in ("model", "data", "eval_data", "tokenizer", "out"):
            if (place := getattr(self, name)) is not None:
                named(place, f"train: {name}")
        for name in ("data", "out"):
            if not getattr(self, name):
                raise GSAError(f"train: {name} is missing: give --{name}, or {name} in the recipe")
        if sum(value is not None for value in (self.steps, self.tokens, self.epochs)) != 1:
            raise GSAError("train: give one of steps, tokens and epochs")
        if self.warmup_steps is not None and self.warmup_tokens is not None:
            raise GSAError("train: give warmup_steps or warmup_tokens, not both")
        if self.min_lr > self.lr:
            raise GSAError(f"train: min_lr {self.min_lr:g} is above lr {self.lr:g}")
        if self.ema is not None and self.engine == "deepspeed":
            raise GSAError("train: ema does not go with engine deepspeed, which hides its weights; choose ddp or fsdp")


# Functions, not methods: on the command line a method would be a command.
def tokens_per_step(settings: TrainSettings) -> int:
    """Tokens that a step learns from, over all processes."""
    return settings.batch_size * settings.length


def total_steps(settings: TrainSettings, data_tokens: int) -> int:
    """Steps of the run, on data of so many tokens."""
    if settings.steps is not None:
        return settings.steps
    tokens = settings.tokens if settings.tokens is not None else (settings.epochs or 0) * data_tokens
    return max(-int(-tokens // tokens_per_step(settings)), 1)


def warmup_steps(settings: TrainSettings, steps: int) -> int:
    """Steps of warm-up, of so many."""
    if settings.warmup_tokens is not None:
        return -(-settings.warmup_tokens // tokens_per_step(settings))
    return steps // 100 if settings.warmup_steps is None else settings.warmup_steps
