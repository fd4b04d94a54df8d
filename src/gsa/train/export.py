"""From a checkpoint of training to a folder that others load: weights, config, tokenizer and model card."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gsa.data.tokenizer import CONFIG as TOKENIZER_CONFIG
from gsa.data.tokenizer import padding
from gsa.errors import GSAError, raised_by
from gsa.files import named, read_file, read_json, whole_folder
from gsa.models.checkpoint import CONFIG, companions, config_text, empty_model, stored_weights, write_weights
from gsa.models.config import ModelConfig
from gsa.models.remote import AUTO_MAP, write_module
from gsa.train.card import CardFacts, model_card
from gsa.train.checkpoint import SHARD_BYTES, Checkpoint, checkpoints, read_checkpoint
from gsa.train.find import find_model, read_live

CARD = "README.md"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Exported:
    """What was exported."""

    checkpoint: Path
    folder: Path
    step: int
    parameters: int
    dtype: str
    files: list[str]


def export_checkpoint(
    source: str | Path,
    out: Path,
    say: Callable[[str], None],
    *,
    best: bool = False,
    ema: bool = False,
    dtype: str | None = None,
    licence: str | None = None,
) -> Exported:
    """Writes a checkpoint, or the newest or best of a run, as a Hugging Face folder; `out` must be new or empty.

    Weights keep their dtype unless another is asked for; with `ema` they are the moving average. Broken checkpoints of
    a run that are passed over are told to `say`.
    """
    out = named(out, "export").resolve()
    if dtype is not None and dtype not in DTYPES:
        raise GSAError(f"export: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise GSAError(f"export: {out} is there already; expected a new or empty folder")
    return read_live(source, lambda: _exported(_chosen(source, best, say), out, ema=ema, dtype=dtype, licence=licence))


def _exported(checkpoint: Checkpoint, out: Path, *, ema: bool, dtype: str | None, licence: str | None) -> Exported:
    """Writes a checkpoint to a folder."""
    if ema and "ema" not in checkpoint.groups:
        raise GSAError(f"export: {checkpoint.folder} has no moving average of the weights: it was trained without")
    config = checkpoint.config()
    weights = stored_weights(config, checkpoint.tensors("ema" if ema else "model"))
    model = empty_model(config, weights, f"export: {checkpoint.folder}")
    if dtype is not None:
        weights = {name: x.to(DTYPES[dtype]) for name, x in weights.items()}
    _check_finite(weights)
    named_dtype = _named(next(iter(weights.values())).dtype)
    weight_bytes = sum(x.nbytes for x in weights.values())
    beside = companions(checkpoint.folder)
    with_tokenizer = any(file.name.startswith("tokenizer") for file in beside)
    facts = CardFacts(out.name, model, named_dtype, weight_bytes, ema, with_tokenizer, licence)
    with whole_folder(out, "export", weight_bytes) as folder:
        write_weights(folder, weights, shard_bytes=SHARD_BYTES)
        for file in beside:
            (folder / file.name).write_bytes(read_file(file))
        special = _special_tokens(config, checkpoint.state, pads_with_end=_pads_with_end(folder / TOKENIZER_CONFIG))
        (folder / CONFIG).write_text(
            config_text(config, next(iter(weights.values())).dtype, auto_map=AUTO_MAP, **special)
        )
        write_module(folder)
        (folder / CARD).write_text(model_card(facts, checkpoint.state), encoding="utf-8")
        files = sorted(path.name for path in folder.iterdir())
    return Exported(checkpoint.folder, out, checkpoint.step, model.num_parameters, named_dtype, files)


def _chosen(source: str | Path, best: bool, say: Callable[[str], None]) -> Checkpoint:
    """The checkpoint that is meant by a folder. Only what was trained here has one, so names are not looked for."""
    with raised_by("export"):
        found = find_model(Path(source), say)
    if found.checkpoint is None:
        raise GSAError(f"export: {source} is a model, but neither a checkpoint of training nor a run")
    if not best:
        return found.checkpoint
    if found.run is None:
        raise GSAError(f"export: {source} is one checkpoint; --best chooses among those of a run's folder")
    evaluated = found.checkpoint.state.get("best")
    step = evaluated.get("step") if isinstance(evaluated, dict) else None
    if step is None:
        raise GSAError(f"export: no checkpoint of {source} is the best: the run has not evaluated any")
    folders = [folder for number, folder in checkpoints(found.run) if number == step]
    if not folders:
        raise GSAError(f"export: the best checkpoint of {source}, of step {step}, is no longer there")
    return read_checkpoint(folders[-1])


def _check_finite(weights: dict[str, Tensor]) -> None:
    for name, x in weights.items():
        if not bool(torch.isfinite(x).all()):
            raise GSAError(f"export: tensor {name} is not finite in {_named(x.dtype)}")


def _named(dtype: torch.dtype) -> str:
    """What a dtype is called here, or torch's name for one that is not among those to choose from."""
    names = {known: name for name, known in DTYPES.items()}
    return names.get(dtype, str(dtype).removeprefix("torch."))


def _pads_with_end(tokenizer_config: Path) -> bool:
    """Whether pads are end of text in transformers; a tokenizer without a pad token is given that one."""
    values = read_json(tokenizer_config) if tokenizer_config.exists() else {}
    end, pad = values.get("eos_token"), values.get("pad_token")
    if isinstance(end, str) and pad is None:
        tokenizer_config.write_text(json.dumps({**values, **padding(end)}, indent=2) + "\n")
        return True
    return end is not None and pad == end


def _special_tokens(config: ModelConfig, state: dict[str, Any], *, pads_with_end: bool) -> dict[str, int]:
    """Fields of config.json: the token that ends a text and may stand at pads, if the state knows the tokenizer."""
    data = state.get("data")
    tokenizer = data.get("tokenizer") if isinstance(data, dict) else None
    end = tokenizer.get("eos_id") if isinstance(tokenizer, dict) else None
    if end is None:
        return {}
    if type(end) is not int or not 0 <= end < config.vocab_size:
        raise GSAError(f"export: the tokenizer's eos_id is {end!r}, expected 0 to {config.vocab_size - 1}")
    return {"eos_token_id": end, **({"pad_token_id": end} if pads_with_end else {})}
