"""Reader: what evaluation asks of a model. Ids in; log-likelihoods, log-probabilities and greedy texts out.

Two kinds stand behind it: models of ours (`gsa.eval.ours`), and any causal model that transformers loads
(`gsa.eval.foreign`). Shape letters: T time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from gsa import pretrained
from gsa.errors import GSAError
from gsa.files import named, read_json
from gsa.models.checkpoint import CONFIG, MODEL_TYPE
from gsa.train.checkpoint import FOLDER
from gsa.train.find import model_type_on_hub
from gsa.train.manifest import MANIFEST

GGUF = ".gguf"


class Continuation(NamedTuple):
    """A request: how likely is it that a context goes on like this? Neither is empty."""

    context: Sequence[int]
    continuation: Sequence[int]


class Score(NamedTuple):
    """The answer."""

    log_likelihood: float
    """The sum over the continuation's tokens, in nats."""
    greedy: bool
    """Whether each of them is the likeliest in its place."""


class ReaderTokenizer(ABC):
    """A model's tokenizer, as evaluation sees it."""

    eos_id: int
    """End of text."""
    bos_id: int | None
    """Begin of text, if there is such a token."""
    vocab_size: int

    @abstractmethod
    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The ids of a text; with `special`, among those that the tokenizer puts around every text, often none."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens by name."""


class Reader(ABC):
    """A model that evaluation reads texts with."""

    name: str
    """As the user called it."""
    about: dict[str, str | int]
    """kind ("gsa" or "transformers"), mixer or model_type, parameters, weights, compute, device, fingerprint."""
    tokenizer: ReaderTokenizer
    max_length: int | None
    """Tokens that the model may see at once; None if there is no limit. What is longer loses its beginning."""
    rereads: bool = False
    """Whether `log_probs` reads all that stands before once more, so that a text is better read in one piece."""

    @abstractmethod
    def score(
        self, requests: Sequence[Continuation], *, batch_size: int, reuse: bool = True
    ) -> Iterator[tuple[int, Score]]:
        """The number of each request and its answer, as they come, in any order.

        About `batch_size` requests are read together, which changes time and memory, but no score by more than 1e-4.
        What contexts have in common is read once; without `reuse`, every request is read whole.
        """

    @abstractmethod
    def log_probs(self, ids: Sequence[int], state: object = None) -> tuple[Tensor, object]:
        """Log-probabilities of ids, each given all before it, and the state after them, from which others go on.

        Without a state the first id has nothing before it: fp32 [T - 1], and [T] with one. A state belongs to the
        reader that gave it, and stays as it is. Texts of any length are read in pieces.
        """

    def stored(self, state: object) -> dict[str, Tensor] | None:
        """A state of `log_probs` as tensors for a file, or None if it cannot be kept in one."""
        return None

    def restored(self, tensors: Mapping[str, Tensor], ids: int) -> object:
        """The state after so many ids, of which `stored` gave these tensors; what others have changed is refused."""
        raise GSAError(f"{self.name} is a model whose states cannot be kept in files")

    @abstractmethod
    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, until: Sequence[str], batch_size: int
    ) -> Iterator[tuple[int, str]]:
        """The number of each prompt and how the model goes on, as they come, in any order.

        The likeliest token is always taken. A text ends before the first stop string of `until`, with the end of text,
        or after `max_tokens`.
        """


def open_reader(
    model: str | Path,
    *,
    weights: str = "auto",
    compute: str = "auto",
    device: str = "auto",
    dtype: str = "auto",
    max_length: int | None = None,
) -> Reader:
    """A reader of a model of ours (a name, a folder, a run), or of one that transformers loads (also a GGUF file).

    Args:
        model: A name or folder that `gsa.load` takes, or one of transformers', or a file that ends with .gguf.
        weights: Format of the weights; for models of ours.
        compute: What products over many tokens are computed in; for models of ours.
        device: Where it computes: cpu, cuda, cuda:1 for the second GPU, or auto, a GPU if torch can use one.
        dtype: fp32, bf16 or fp16, or auto, which is that of the weights, and fp32 for GGUF; for transformers.
        max_length: Tokens that the model may see at once, if not as many as its config says.
    """
    if max_length is not None and (type(max_length) is not int or max_length < 2):
        raise GSAError(f"reader: max_length must be a whole number of at least 2, got {max_length!r}")
    if is_ours(model):
        if dtype != "auto":
            raise GSAError(f"reader: {model} is a model of ours, for which weights and compute are chosen, not dtype")
        from gsa.eval.ours import OurReader

        return OurReader.open(model, weights=weights, compute=compute, device=device, max_length=max_length)
    if weights != "auto" or compute != "auto":
        raise GSAError(f"reader: {model} is a model of transformers, for which dtype is chosen, not weights or compute")
    from gsa.eval.foreign import ForeignReader

    return ForeignReader.open(model, dtype=dtype, device=device, max_length=max_length)


def is_ours(model: str | Path) -> bool:
    """Whether a name means a model of ours, which `find_model` then finds; others are for transformers.

    Nothing but a config is read, of a folder or of the Hub.
    """
    path = named(pretrained.path_of(model), "model")
    if path.is_dir():
        if (path / MANIFEST).exists() or (path / FOLDER).is_dir():
            return True
        return (path / CONFIG).exists() and read_json(path / CONFIG).get("model_type") == MODEL_TYPE
    if path.exists() or path.suffix == GGUF:
        return False
    return model_type_on_hub(str(model)) in (MODEL_TYPE, None)  # what is not there, `find_model` tells best
