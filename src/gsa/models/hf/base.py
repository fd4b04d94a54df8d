"""What GSAModel and GSAForCausalLM share: loading, and what transformers wants to know of them."""

from __future__ import annotations

import os
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel

from gsa import pretrained
from gsa.errors import GSAError
from gsa.models.checkpoint import check_files, files_on_hub, pickled, without_weights
from gsa.models.hf.config import GSAConfig
from gsa.models.init import initialise
from gsa.models.sizes import check_numbers


class GSAPreTrainedModel(PreTrainedModel):
    """What transformers wants to know of both models."""

    config_class = GSAConfig
    config: GSAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _input_embed_layer = "embeddings"
    _no_split_modules = ["Block"]  # noqa: RUF012  (here and below: as transformers declares it)
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _is_stateful = True  # no way back to earlier tokens
    _supports_sdpa = True
    _can_compile_fullgraph = True

    def _init_weights(self, module: nn.Module) -> None:
        initialise(module, self.config.initializer_range, self.config.num_hidden_layers)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """transformers skips modules of other packages without parameters of their own; ours fill their children's."""
        parameters = list(module.parameters())
        if parameters and all(getattr(p, "_is_hf_initialized", False) for p in parameters):
            module._is_hf_initialized = True  # type: ignore[assignment]
        else:
            super()._initialize_weights(module, False)

    def _move_missing_keys_from_meta_to_device(self, missing_keys: Any, *args: Any, **options: Any) -> None:
        """Where transformers takes memory for tensors that a checkpoint lacks, or has in another shape."""
        lacking = [self.get_parameter_or_buffer(key) for key in missing_keys]
        check_numbers(
            sum(x.numel() for x in lacking),
            lacking[0].dtype if lacking else torch.float32,
            torch.device("cpu"),
            f"{type(self).__name__}: what the config asks for and the checkpoint lacks has",
        )
        super()._move_missing_keys_from_meta_to_device(missing_keys, *args, **options)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing: folders that are saved carry a module that leads here (`gsa.models.remote`), not copies of ours."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *args: Any,
        output_loading_info: bool = False,
        ignore_mismatched_sizes: bool = False,
        **options: Any,
    ) -> Any:
        """As in transformers, and with the names of models in the package.

        Tensors that are missing, too many or of another shape are errors that name them.
        """
        path = pretrained.path_of(pretrained_model_name_or_path)
        if options.get("use_safetensors") is False:
            raise GSAError(f"{cls.__name__}: use_safetensors is false, and weights are read from safetensors only")
        options["use_safetensors"] = True  # None, transformers' own default, would read pickled weights too
        try:
            loaded: Any = super().from_pretrained(
                path, *args, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
        except SafetensorError as error:
            check_files(path)
            raise GSAError(f"{cls.__name__}: {path}: {error}") from None
        except OSError as error:
            files = _files(path, options)
            if not pickled(files) or any(file.endswith(".safetensors") for file in files):
                raise  # it is about something else
            raise GSAError(f"{cls.__name__}: {without_weights(path, files)}") from error
        model, info = loaded
        for name, problem in (
            ("missing_keys", "lacks"),
            ("unexpected_keys", "has, but the model has not,"),
            ("mismatched_keys", "has in another shape (name, there, here)"),
        ):
            found = sorted(info[name], key=str)
            if found and not (name == "mismatched_keys" and ignore_mismatched_sizes):
                more = f" and {len(found) - 1} more" if len(found) > 1 else ""
                raise GSAError(f"{cls.__name__}: the checkpoint {path} {problem} {found[0]}{more}")
        return (model, info) if output_loading_info else model


def _files(path: Any, options: dict[str, Any]) -> list[str]:
    """The files of a model that is asked for by a folder, or by a name of the Hub; none where that cannot be told."""
    folder = os.path.join(path, options.get("subfolder") or "")
    if os.path.isdir(folder):
        return os.listdir(folder)
    return files_on_hub(str(path), options.get("revision"))
