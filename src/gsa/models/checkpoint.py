"""Models as folders: config.json and safetensors, as transformers writes them; read back with every tensor checked."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gsa.errors import GSAError
from gsa.files import open_file, read_json, written
from gsa.mixers.registry import suggestion
from gsa.models.config import ModelConfig
from gsa.models.init import without_memory
from gsa.models.lm import LM
from gsa.models.remote import AUTO_MAP, write_module
from gsa.models.sizes import tensor_shapes
from gsa.terminal import quoted

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MODEL_TYPE = "gated_slot_attention"
# Files of a tokenizer, and of what else belongs to a model without being config or weights.
_COMPANION = re.compile(
    r"tokenizer.*\.(json|model)|(added_tokens|generation_config|special_tokens_map|vocab)\.json|merges\.txt|vocab\.txt"
    r"|spiece\.model|chat_template\.jinja"
)
_PICKLED = re.compile(r"(?!training_args|optimizer|scheduler|rng_state).*\.(bin|pt|pth|ckpt)", re.DOTALL)
"""Files of weights that Python's pickle wrote."""
_MISSPELT = 0.85
"""How alike two names are, from 0 to 1, for one to be taken for the other misspelt: hidden_act is not hidden_size."""
# What transformers writes beside the fields of a ModelConfig.
OF_TRANSFORMERS = {
    "architectures",
    "attn_implementation",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "experts_implementation",
    "id2label",
    "is_encoder_decoder",
    "label2id",
    "logits_in_training",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "per_layer_config",
    "problem_type",
    "quantization_config",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


def save_model(model: LM, folder: str | Path, **more: Any) -> None:
    """Writes a model to a folder that `load_model` and transformers read; more fields (eos_token_id, ...) if given.

    Files appear under their names only when they are whole, and the config last.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if not isinstance(model, LM):
        raise GSAError(f"save_model: expected a gsa.LM, got {type(model).__name__}")
    write_model(model.config, stored_weights(model.config, model.state_dict()), folder, **more)


def stored_weights(config: ModelConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a state dict that are written: without a tied head, which is the embedding."""
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return {name: x.detach().contiguous() for name, x in weights.items() if name not in tied}


def write_model(config: ModelConfig, weights: dict[str, Tensor], folder: str | Path, **more: Any) -> None:
    """Writes a model folder as `save_model` does, from a config and tensors by name."""
    folder = Path(folder)
    fields = config_text(config, _dtype(weights), **{"auto_map": AUTO_MAP, **more})
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise GSAError(f"save_model: {folder} is a file, expected a folder") from None
    with written(folder / CONFIG) as config_file, written(folder / WEIGHTS) as weights_file:
        _save(weights, weights_file)
        write_module(folder)
        config_file.write_text(fields)
        # Until the block ends there is no config: none is better than one that may not fit the weights.
        (folder / CONFIG).unlink(missing_ok=True)
        for stale in (folder / INDEX, *folder.glob("model-*-of-*.safetensors")):
            stale.unlink(missing_ok=True)


def _dtype(weights: dict[str, Tensor]) -> torch.dtype:
    return next(iter(weights.values())).dtype


def config_text(config: ModelConfig, dtype: torch.dtype, **more: Any) -> str:
    """config.json of a model with weights of this dtype; more fields of transformers if given."""
    for name in more:
        if name not in OF_TRANSFORMERS:
            raise GSAError(f"save_model: unknown field {name!r}{suggestion(name, OF_TRANSFORMERS)}")
    fields = {
        "architectures": ["GSAForCausalLM"],
        "model_type": MODEL_TYPE,
        "dtype": str(dtype).removeprefix("torch."),
        **config.to_dict(),
        **more,
    }
    return json.dumps(fields, indent=2) + "\n"


def write_weights(folder: Path, weights: dict[str, Tensor], *, name: str = "model", shard_bytes: int) -> None:
    """Writes tensors to NAME.safetensors, or to numbered files with an index if they are more than so many bytes.

    For a folder that nobody reads yet: nothing is renamed or synced.
    """
    sizes = {key: x.nbytes for key, x in weights.items()}
    write_shards(folder, sizes, weights.__getitem__, name=name, shard_bytes=shard_bytes)


def write_shards(
    folder: Path, sizes: dict[str, int], read: Callable[[str], Tensor], *, name: str = "model", shard_bytes: int
) -> None:
    """Writes tensors as `write_weights` does, of which `read` gives each when its file is written.

    So there are never more in memory than one file has. `sizes` are the bytes of each, in order.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for key, size in sizes.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(key)
        filled += size
    if len(shards) == 1:
        _save({key: read(key) for key in sizes}, folder / f"{name}.safetensors")
        return
    file_of: dict[str, str] = {}
    for i, keys in enumerate(shards, 1):
        file = f"{name}-{i:05d}-of-{len(shards):05d}.safetensors"
        _save({key: read(key) for key in keys}, folder / file)
        file_of |= dict.fromkeys(keys, file)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_of}
    (folder / f"{name}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _save(weights: dict[str, Tensor], path: Path) -> None:
    """Writes a safetensors file with the permissions of any new file; safetensors itself is for the owner alone."""
    path.touch()
    mode = path.stat().st_mode
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(mode)


def load_model(model: str | Path, *, dtype: torch.dtype | None = None) -> LM:
    """A model by name or folder, in the dtype of its weights unless another is asked for.

    "gsa-tiny" and "gsa-smol" are in the package; others are folders, checkpoints and runs of training, or names of the
    Hugging Face Hub (owner/name), as `gsa.train.find.find_model` finds them.

    >>> load_model("gsa-tiny").num_parameters
    4590848
    """
    from gsa.train.find import find_model, read_live  # it knows what runs look like, and is built on this room

    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise GSAError(f"LM: dtype must be a floating torch.dtype, such as torch.bfloat16, or None, got {dtype!r}")
    return read_live(model, lambda: read_model(find_model(model).folder, dtype=dtype))


def read_model(folder: Path, *, dtype: torch.dtype | None = None) -> LM:
    """The model in a folder that was found."""
    config = load_config(folder)
    weights = load_weights(folder)
    model = empty_model(config, weights, f"checkpoint {folder}")
    if dtype is not None:
        weights = {name: x.to(dtype) for name, x in weights.items()}
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    return model.requires_grad_()


def empty_model(config: ModelConfig, weights: dict[str, Tensor], what: str) -> LM:
    """A model without memory for its weights; raises unless these are its weights, by name, shape and kind."""
    expected = tensor_shapes(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    check_tied(config, weights, what)
    for name in expected:
        if name not in weights and name not in tied:
            raise GSAError(f"{what}: tensor {name} is missing")
    for name, x in weights.items():
        if name not in expected:
            raise GSAError(f"{what}: tensor {name} is not part of the model")
        if tuple(x.shape) != expected[name]:
            raise GSAError(f"{what}: tensor {name} is {list(x.shape)}, the config asks for {list(expected[name])}")
        if not x.is_floating_point():
            raise GSAError(f"{what}: tensor {name} is {x.dtype}, expected floating point")
    with without_memory():  # last: only a checkpoint that fits is worth a model
        return LM(config)


def check_tied(config: ModelConfig, weights: dict[str, Tensor], what: str) -> None:
    """Raises if head and embedding should be one and are not."""
    head, embeddings = weights.get("lm_head.weight"), weights.get("model.embeddings.weight")
    if config.tie_word_embeddings and head is not None and embeddings is not None and not torch.equal(head, embeddings):
        raise GSAError(f"{what}: tie_word_embeddings is true, but lm_head.weight is not model.embeddings.weight")


def load_config(folder: str | Path) -> ModelConfig:
    """The config of a model folder."""
    path = Path(folder) / CONFIG
    fields = read_json(path)
    if fields.get("model_type") != MODEL_TYPE:
        raise GSAError(
            f"{path}: model_type is {quoted(fields.get('model_type'))}, expected {MODEL_TYPE!r}; "
            "`gsa import` reads flash-linear-attention's checkpoints"
        )
    try:
        check_spelling(fields)
        known = [entry.name for entry in fields_of(ModelConfig)]
        return ModelConfig.from_dict({name: value for name, value in fields.items() if name in known})
    except GSAError as error:
        raise GSAError(f"{path}: {error}") from None


def check_spelling(names: Iterable[str]) -> None:
    """Raises for a name that is almost one of ours: what else stands in a config.json of transformers is let be."""
    known = [entry.name for entry in fields_of(ModelConfig)]
    for name in names:
        close = difflib.get_close_matches(name, known, 1, _MISSPELT)
        if close and name not in known and not of_transformers(name):
            raise GSAError(f"config: unknown field {quoted(name)} (did you mean {close[0]!r}?)")


def of_transformers(field: str) -> bool:
    """Whether a field of config.json belongs to transformers."""
    return field.startswith("_") or field in OF_TRANSFORMERS


def companions(folder: str | Path) -> list[Path]:
    """The files of a folder that belong to a model beside config and weights: its tokenizer's, by their names."""
    return [path for path in sorted(Path(folder).iterdir()) if _COMPANION.fullmatch(path.name)]


def load_weights(folder: str | Path, *, name: str = "model") -> dict[str, Tensor]:
    """All tensors of a folder by name, from NAME.safetensors or from several files with an index."""
    weights: dict[str, Tensor] = {}
    for path in weight_files(Path(folder), name):
        with opened(path) as file:
            weights |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (not a dict)
    return weights


def described_weights(folder: str | Path, *, name: str = "model") -> dict[str, Tensor]:
    """What `load_weights` gives, without the numbers: tensors on torch's device `meta`."""
    described: dict[str, Tensor] = {}
    for path in weight_files(Path(folder), name):
        described |= described_file(path)
    return described


def described_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file without their numbers."""
    described: dict[str, Tensor] = {}
    with opened(path) as file:
        for key in file.keys():  # noqa: SIM118  (not a dict)
            shape = file.get_slice(key).get_shape()
            some = file.get_slice(key)[:0] if shape else file.get_tensor(key)
            described[key] = torch.empty(shape, dtype=some.dtype, device="meta")
    return described


def weight_files(folder: Path, name: str = "model") -> list[Path]:
    """The safetensors files of a folder: NAME.safetensors, or those that its index names."""
    whole, index = folder / f"{name}.safetensors", folder / f"{name}.safetensors.index.json"
    files = [whole.name]
    if not whole.exists() and index.exists():
        file_of = read_json(index).get("weight_map")
        if not isinstance(file_of, dict) or not all(isinstance(file, str) for file in file_of.values()):
            raise GSAError(f"{index}: weight_map must map tensors to files")
        files = sorted(set(file_of.values()))
        for file in files:
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise GSAError(f"{index}: {file!r} is not the name of a safetensors file beside the index")
    elif not whole.exists():
        raise without_weights(folder, os.listdir(folder) if folder.is_dir() else (), name)
    return [folder / file for file in files]


def without_weights(place: str | Path, files: Iterable[str], name: str = "model") -> GSAError:
    """What is wrong with a place, on disk or on the Hub, whose files have no weights that are read."""
    if found := pickled(files):
        return GSAError(
            f"{place}: its weights are pickled ({', '.join(found)}), which is never read, since it may run any code; "
            "convert them to safetensors"
        )
    return GSAError(f"{place}: there is neither {name}.safetensors nor {name}.safetensors.index.json")


def pickled(files: Iterable[str]) -> list[str]:
    """The files that are pickled weights, by their names."""
    return sorted(file for file in files if _PICKLED.fullmatch(file))


def files_on_hub(name: str, revision: str | None = None) -> list[str]:
    """The names of all files of a model of the Hugging Face Hub; none where that cannot be told."""
    from huggingface_hub import list_repo_files

    try:
        return list_repo_files(name, revision=revision)
    except Exception:  # whatever is wrong there, something else is being told already
        return []


def check_files(folder: str | Path) -> None:
    """Raises for the first safetensors file of a folder that is not whole."""
    for path in sorted(Path(folder).glob("*.safetensors")):
        with opened(path):
            pass


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file, open; one that is not whole is refused."""
    try:
        with open_file(path), safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise GSAError(f"{path}: not a whole safetensors file: {error}") from None
    except RuntimeError:  # which is how torch tells that a file is gone when it comes to its tensors
        if path.exists():
            raise
        raise GSAError(f"{path}: the file was removed while it was read") from None
