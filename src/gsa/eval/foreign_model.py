"""ForeignModel: a causal model of transformers, with caches that can be copied, repeated and thinned out.

Whether a model's caches stand that, and pads on the left, is tried once, on a few tokens: models differ, and none says
so. Shape letters: N rows, T time, V vocabulary.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gsa.data.optional import first_line
from gsa.devices import find_device
from gsa.errors import GSAError, OutOfMemory, memory_errors
from gsa.eval.reader import GGUF
from gsa.extras import require
from gsa.files import named

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
POSITIONS = ("n_positions", "max_position_embeddings", "n_ctx")
"""Where configs say how many tokens a model may see."""
COARSE = 0.03
"""How far logits in half precision may be apart that should be the same, over the largest of them."""
CANNOT = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What models of others raise for caches, rows or pads that they do not take."""


@dataclass
class Grown:
    """The cache of some rows, and which of the tokens in it are pads."""

    cache: Any
    tokens: int
    mask: Tensor | None
    """[N, tokens], 0 at pads; None if there are none."""

    def repeated(self, rows: int) -> Grown:
        """A copy of one row, so many times."""
        cache = deepcopy(self.cache)
        if rows > 1:
            cache.reorder_cache(torch.zeros(rows, dtype=torch.int64))
        return Grown(cache, self.tokens, None if self.mask is None else self.mask.expand(rows, -1))

    def selected(self, rows: list[int]) -> Grown:
        """Only these rows. It takes the cache over."""
        numbers = torch.tensor(rows)
        self.cache.reorder_cache(numbers)
        return Grown(self.cache, self.tokens, None if self.mask is None else self.mask[numbers])


class ForeignModel:
    """A model, called with ids.

    Args:
        model: What transformers loaded.
        weights: Format of the weights, for what is told about it.
    """

    def __init__(self, model: Any, weights: str) -> None:
        self.model, config = model.eval(), model.config
        self._config = getattr(config, "text_config", None) or config
        self._accepts = set(inspect.signature(model.forward).parameters)
        self._cache_name = "past_key_values" if "past_key_values" in self._accepts else "cache_params"
        self.vocab_size = int(model.get_input_embeddings().num_embeddings)
        ends = [model.generation_config.eos_token_id if model.can_generate() else None, self._config.eos_token_id]
        self.ends = frozenset(
            id_ for end in ends for id_ in (end if isinstance(end, list) else [end]) if id_ is not None
        )
        self.about: dict[str, str | int] = {
            "model_type": config.model_type,
            "parameters": sum(p.numel() for p in model.parameters()),
            "weights": weights,
            "compute": _name(model.dtype),
            "device": str(model.device),
            "fingerprint": _fingerprint(model),
            "caches": "copied" if self.caches else "not copied: every text is read whole",
        }

    @classmethod
    def open(cls, name: str | Path, dtype: str, device: str) -> ForeignModel:
        """The model of a name, a folder or a GGUF file, which transformers finds."""
        if dtype not in ("auto", *DTYPES):
            raise GSAError(f"reader: unknown dtype {dtype!r}; expected one of auto, {', '.join(DTYPES)}")
        place, packed = find_device(device, "reader"), is_gguf(name)
        wanted = DTYPES.get(dtype, torch.float32 if packed else "auto")
        model = loaded("AutoModelForCausalLM", name, dtype=wanted).to(place)
        return cls(model, "gguf" if packed else _name(model.dtype))

    @property
    def positions(self) -> int | None:
        """Tokens that it may see at once, by its config."""
        found = [getattr(self._config, name, None) for name in POSITIONS]
        return next((int(count) for count in found if count is not None), None)

    @torch.inference_mode()
    def __call__(
        self, ids: Tensor, start: Grown | None, *, last: int = 1, mask: Tensor | None = None, own: bool = False
    ) -> tuple[Tensor, Grown]:
        """Logits of the last ids [N, T], and the cache behind them.

        They go on from `start`: one row, of which copies are made, or with `own` all rows, which are changed. `mask`
        [N, T] is 0 at pads.
        """
        rows, length = ids.shape
        if start is not None and not own:
            start = start.repeated(rows)
        seen = 0 if start is None else start.tokens
        before = None if start is None else start.mask
        if before is not None or (mask is not None and not bool(mask.all())):
            before = torch.ones(rows, seen, dtype=torch.int64) if before is None else before
            mask = torch.cat([before, torch.ones_like(ids) if mask is None else mask], 1)
        else:
            mask = None
        more: dict[str, Any] = {self._cache_name: None if start is None else start.cache}
        if mask is not None:
            more["attention_mask"] = mask.to(self.model.device)
            if "position_ids" in self._accepts:
                more["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -length:].to(self.model.device)
        if "logits_to_keep" in self._accepts:
            more["logits_to_keep"] = last
        out = self.model(input_ids=ids.to(self.model.device), use_cache=True, **more)
        return out.logits[:, -last:], Grown(getattr(out, self._cache_name, None), seen + length, mask)

    @cached_property
    def caches(self) -> bool:
        """Whether copies of a cache, repeated, go on with several tokens as the whole text does."""
        ids = self._trial

        def read() -> Tensor:
            _, start = self(ids[:, :4], None)
            self(ids[:, :3], start)
            _, rows = self(ids[:, 4:7].repeat(2, 1), start)
            return self(ids[:, 7:], rows.selected([1]), own=True)[0]

        return self._is_right(read)

    @cached_property
    def steps(self) -> bool:
        """Whether a cache, thinned out, goes on with one token at a time as the whole text does."""
        ids = self._trial

        def read() -> Tensor:
            _, rows = self(ids[:, :6].repeat(2, 1), None)
            _, row = self(ids[:, 6:7], rows.selected([1]), own=True)
            return self(ids[:, 7:], row, own=True)[0]

        return self._is_right(read)

    @cached_property
    def left_pads(self) -> bool:
        """Whether pads on the left, with a mask, change nothing."""
        ids = torch.cat([torch.zeros(1, 2, dtype=torch.int64), self._trial], 1)
        mask = torch.tensor([[0, 0, *[1] * 8]])

        def read() -> Tensor:
            if not self.steps:
                return self(ids, None, mask=mask)[0]
            _, grown = self(ids[:, :-1], None, mask=mask[:, :-1])
            return self(ids[:, -1:], grown, own=True)[0]

        return self._is_right(read)

    @property
    def _trial(self) -> Tensor:
        return torch.randint(self.vocab_size, (1, 8), generator=torch.Generator().manual_seed(0))

    def _is_right(self, read: Callable[[], Tensor]) -> bool:
        """Whether a way to read the trial gives the logits behind its last token."""
        right = self(self._trial, None)[0].float()
        try:
            with memory_errors("reader"):
                found = read().float()
        except OutOfMemory:  # which says nothing of the model
            raise
        except CANNOT:
            return False
        tolerance = 1e-4 if self.model.dtype in (torch.float32, torch.float64) else COARSE
        return bool((found - right).abs().max() <= tolerance * right.abs().max())


def is_gguf(model: str | Path) -> bool:
    """Whether a name is that of a GGUF file."""
    return Path(model).suffix == GGUF


def loaded(auto_class: str, model: str | Path, **options: Any) -> Any:
    """What a class of transformers makes of a name, a folder or a GGUF file. No code of others runs, nothing is
    unpickled."""
    require("transformers", f"reader: {model}")
    import transformers

    place = str(model)
    if is_gguf(model):
        require("gguf", f"reader: {model}")
        path = named(model, "reader")
        if not path.is_file():
            raise GSAError(f"reader: there is no file {model}")
        place, options = str(path.parent), {**options, "gguf_file": path.name}
    elif auto_class != "AutoTokenizer":
        options["use_safetensors"] = True
    try:
        return getattr(transformers, auto_class).from_pretrained(place, trust_remote_code=False, **options)
    except MemoryError:
        raise
    except Exception as error:  # broken files make it fail in any way
        raise GSAError(f"reader: transformers cannot load {model}: {first_line(error)}") from error


def _name(dtype: torch.dtype) -> str:
    """fp32 and the like."""
    return next((name for name, own in DTYPES.items() if own == dtype), str(dtype).removeprefix("torch."))


def _fingerprint(model: Any) -> str:
    """A hash of the config and of every weight."""
    digest = hashlib.sha256(model.config.to_json_string().encode())
    for name, x in sorted(model.state_dict().items()):
        digest.update(f"\n{name} {x.dtype} {list(x.shape)}\n".encode())
        digest.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
