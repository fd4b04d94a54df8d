"""A training run before it starts: every setting, file and size is checked here, while nothing is lost."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from gsa import pretrained
from gsa.data.batches import rows_at_once
from gsa.data.holdout import HELDOUT
from gsa.data.shards import TOKENIZER, Tokens
from gsa.data.tokenizer import load_tokenizer
from gsa.errors import GSAError, raised_by
from gsa.models.catalogue import preset, presets
from gsa.models.checkpoint import load_config
from gsa.models.config import ModelConfig
from gsa.train.find import find_model, read_live
from gsa.train.settings import TrainSettings, tokens_per_step, total_steps, warmup_steps
from gsa.train.strategies.launch import launched_processes

VOCABULARY_MULTIPLE = 64  # sizes that matrix units like


@dataclass(frozen=True)
class Plan:
    """What will be done."""

    settings: TrainSettings
    config: ModelConfig
    weights: Path | None
    """Folder of the weights to begin with; None for fresh ones."""
    tokens: Tokens
    eval_tokens: Tokens | None
    steps: int
    warmup: int

    @property
    def out(self) -> Path:
        """Folder of the run."""
        return Path(str(self.settings.out))

    @property
    def tokens_per_step(self) -> int:
        """Tokens that a step learns from, over all processes."""
        return tokens_per_step(self.settings)


def make_plan(settings: TrainSettings) -> Plan:
    """The plan of a run; raises for the first thing that is wrong."""
    with raised_by("train"):
        tokens = Tokens.open(Path(str(settings.data)))
        eval_tokens = _eval_tokens(settings, tokens)
        config, weights = _model(settings, tokens)
        _check_tokenizers(settings, tokens, eval_tokens, config, weights)
        if tokens.length < settings.length:
            raise GSAError(f"data {tokens.folder} has {tokens.length} tokens, fewer than one row of {settings.length}")
        if eval_tokens is not None and eval_tokens.length < 2:
            raise GSAError(f"eval_data {eval_tokens.folder} has {eval_tokens.length} tokens, too few to predict one")
        rows_at_once(settings.batch_size, settings.micro_batch_size, launched_processes())
        steps = total_steps(settings, tokens.length)
        warmup = warmup_steps(settings, steps)
        if warmup > steps:
            raise GSAError(f"the warm-up of {warmup} steps is longer than the run of {steps}")
        _check_out(Path(str(settings.out)))
    return Plan(settings, config, weights, tokens, eval_tokens, steps, warmup)


def _eval_tokens(settings: TrainSettings, tokens: Tokens) -> Tokens | None:
    """What to evaluate on: what was asked for, or what was held out when the tokens were prepared."""
    heldout = tokens.folder / HELDOUT
    if settings.eval_data is not None:
        return Tokens.open(Path(settings.eval_data))
    if tokens.manifest.options.get("holdout") is not None and heldout.is_dir():
        return Tokens.open(heldout)
    if settings.patience is not None:
        raise GSAError("patience needs eval_data, or data that was prepared with --holdout")
    return None


def _model(settings: TrainSettings, tokens: Tokens) -> tuple[ModelConfig, Path | None]:
    """The model's config, and the folder of its weights if it has any."""
    options, path = dict(settings.model_options), Path(settings.model)
    if settings.model in presets():
        vocabulary = -(-tokens.tokenizer.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        fields = preset(settings.model).to_dict() | {"vocab_size": vocabulary} | options
        return ModelConfig.from_dict(fields), None
    if path.is_file():
        return ModelConfig.from_dict(ModelConfig.load(path).to_dict() | options), None
    if not path.is_dir() and "/" not in settings.model and settings.model not in pretrained.names():
        preset(settings.model)  # raises, and names the presets there are
    folder, config = read_live(settings.model, lambda: _with_config(find_model(settings.model, _tell).folder))
    if options:
        raise GSAError(f"model_options {options} cannot change a model that has its weights in {folder}")
    return config, folder


def _with_config(folder: Path) -> tuple[Path, ModelConfig]:
    return folder, load_config(folder)


def _tell(line: str) -> None:
    """Says something once, however many processes a launcher has started."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)


def _check_tokenizers(
    settings: TrainSettings, tokens: Tokens, eval_tokens: Tokens | None, config: ModelConfig, weights: Path | None
) -> None:
    """Raises unless data, model and recipe speak of the same tokens."""
    expected = tokens.tokenizer
    if expected.vocab_size > config.vocab_size:
        raise GSAError(
            f"data {tokens.folder} has tokens of {expected.name!r} up to {expected.vocab_size - 1}, "
            f"the model knows {config.vocab_size} (vocab_size)"
        )
    others = {}
    if eval_tokens is not None:
        others[f"eval_data {eval_tokens.folder}"] = eval_tokens.tokenizer.fingerprint
    if settings.tokenizer is not None:
        others[f"tokenizer {settings.tokenizer!r}"] = load_tokenizer(settings.tokenizer).fingerprint
    if weights is not None and (weights / "tokenizer.json").exists():
        others[f"the tokenizer of model {weights}"] = load_tokenizer(str(weights)).fingerprint
    folder = tokens.folder / TOKENIZER
    others[f"the tokenizer in {folder}"] = load_tokenizer(str(folder)).fingerprint
    for what, fingerprint in others.items():
        if fingerprint != expected.fingerprint:
            raise GSAError(
                f"{what} does not match: data {tokens.folder} was prepared with {expected.name!r}, "
                f"fingerprint {expected.fingerprint[:12]}, this one has {fingerprint[:12]}"
            )


def _check_out(out: Path) -> None:
    """Raises unless a run can be written there."""
    if out.exists() and not out.is_dir():
        raise GSAError(f"out {out} is a file, expected a folder")
    known = {"checkpoints", "metrics.jsonl", "settings.json"}
    found = {path.name for path in out.iterdir() if not path.name.startswith(".")} if out.is_dir() else set()
    if found and not found & known:
        raise GSAError(f"out {out} is a folder with other files in it: choose a new one")
