"""The model type `gsa` of lm-evaluation-harness: any Reader as the harness's model.

The harness finds types that are imported. `python -m gsa.eval.harness` is its own command with this one among them:

python -m gsa.eval.harness run --model gsa --model_args model=gsa-tiny --tasks piqa
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gsa.errors import GSAError
from gsa.extras import require

require("lm_eval", "eval: the evaluation harness")

import lm_eval.models  # noqa: E402, F401  (its own types, which it would not look for once there is another)
from lm_eval.api.model import TemplateLM  # noqa: E402
from lm_eval.api.registry import register_model  # noqa: E402
from lm_eval.models.utils import normalize_gen_kwargs  # noqa: E402
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # noqa: E402

from gsa.eval.answers import Answers  # noqa: E402
from gsa.eval.foreign_tokenizer import ForeignTokenizer  # noqa: E402
from gsa.eval.reader import Continuation, Reader, open_reader  # noqa: E402

BATCH_SIZE = 64
MAX_GEN_TOKS = 256
"""Tokens of a text if a task does not say how many, as with the harness's type `hf`."""
COMMAND_DEVICE = "cuda:0"
"""What the harness's command asks for if nobody said a word about it, also where there is no GPU."""
ANY_LENGTH = 2**31 - 1
"""What the harness is told of models without a limit."""


@register_model("gsa")
class HarnessModel(TemplateLM):  # type: ignore[misc]  # the harness has no types
    """A Reader, or the model of a name, a folder or a GGUF file, for the harness.

    Args:
        model: What is evaluated.
        batch_size: Requests that are read together; "auto" is 64.
        max_batch_size: The harness gives it to all models; it means nothing here.
        device: Where it computes; none and the command's default, cuda:0, are a GPU if torch can use one.
        weights: Format of the weights, for models of ours.
        compute: What products over many tokens are computed in, for models of ours.
        dtype: For models of transformers.
        max_length: Tokens that the model may see at once; by default what its config says, or any number.
        answers: Answers of earlier runs and of this one, or their file.
        reuse: Whether what contexts have in common is read once.
    """

    def __init__(
        self,
        model: str | Path | Reader,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        weights: str = "auto",
        compute: str = "auto",
        dtype: str = "auto",
        max_length: int | None = None,
        answers: Answers | str | Path | None = None,
        reuse: bool = True,
    ) -> None:
        super().__init__()
        if isinstance(model, Reader):
            self.reader = model
        else:
            self.reader = open_reader(
                model,
                weights=weights,
                compute=compute,
                device="auto" if device in (None, COMMAND_DEVICE) else device,
                dtype=dtype,
                max_length=max_length,
            )
        self.batch_size = _batch_size(batch_size)
        self.answers = answers if isinstance(answers, Answers) else Answers(answers)
        self.reuse = reuse

    @property
    def eot_token_id(self) -> int:
        return self.reader.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it."""
        bos = self.reader.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        return ANY_LENGTH if self.reader.max_length is None else self.reader.max_length

    @property
    def max_gen_toks(self) -> int:
        return MAX_GEN_TOKS

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into its results."""
        return {"model": self.reader.name, **self.reader.about}

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, left_truncate_len: int | None = None, **others: Any
    ) -> list[int]:
        """The ids of a text, with the special tokens that the tokenizer puts around it, unless they are there."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.reader.tokenizer.decode([self.prefix_token_id]))
        ids = self.reader.tokenizer.encode(string, special=add_special_tokens)
        return ids[-left_truncate_len:] if left_truncate_len else ids

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **others: Any,
    ) -> list[tuple[float, bool]]:
        asked = [Continuation(context, continuation) for _, context, continuation in requests]
        scores = self.answers.scores(
            self.reader, asked, batch_size=self.batch_size, reuse=self.reuse, what="log-likelihoods"
        )
        for (texts, _, _), score in zip(requests, scores, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, tuple(score))
        return [(score.log_likelihood, score.greedy) for score in scores]

    def loglikelihood_rolling(self, requests: Iterable[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts: in windows of max_length, each of which begins from nothing."""
        texts = [request.args[0] for request in requests]
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for number, text in enumerate(texts):
            ids = self.tok_encode(text)
            length = min(self.max_length, max(len(ids), 1))
            for window in get_rolling_token_windows(ids, self.prefix_token_id, max_seq_len=length, context_len=1):
                context, continuation = make_disjoint_window(window)
                windows.append((None, list(context), list(continuation)))
                owners.append(number)
        totals = [0.0] * len(texts)
        for number, (total, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[number] += total
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: Iterable[Any], disable_tqdm: bool = False) -> list[str]:
        """How the model goes on with texts, as their tasks want it; always with the likeliest token."""
        asked = [request.args for request in requests]
        groups: dict[tuple[int, tuple[str, ...]], list[int]] = defaultdict(list)
        for number, (_, wishes) in enumerate(asked):
            groups[_settings(wishes)].append(number)
        texts = [""] * len(asked)
        for (max_tokens, until), numbers in groups.items():
            prompts = [self.tok_encode(asked[number][0]) or [self.prefix_token_id] for number in numbers]
            made = self.answers.texts(
                self.reader, prompts, max_tokens=max_tokens, until=until, batch_size=self.batch_size
            )
            for number, text in zip(numbers, made, strict=True):
                texts[number] = text
                self.cache_hook.add_partial("generate_until", asked[number], text)
        return texts

    @property
    def tokenizer_name(self) -> str:
        """Of the chat template, for the harness's cache of requests."""
        return self.reader.name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The model's template, in Jinja; there is one or none."""
        return self._conversations().chat_template

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as the model was trained to read it."""
        if not add_generation_prompt:
            raise GSAError("eval: a conversation that ends within a reply of the model is not supported")
        return self._conversations().render(chat_history)

    def _conversations(self) -> ForeignTokenizer:
        tokenizer = self.reader.tokenizer
        if not isinstance(tokenizer, ForeignTokenizer):
            raise GSAError("eval: conversations are for models of transformers; leave the chat template out")
        return tokenizer


def _batch_size(wish: int | str | None) -> int:
    if wish is None or wish == "auto":
        return BATCH_SIZE
    try:
        return int(wish)
    except ValueError:
        raise GSAError(f"eval: batch_size must be a whole number or auto, got {wish!r}") from None


def _settings(wishes: dict[str, Any]) -> tuple[int, tuple[str, ...]]:
    """How many tokens at most, and before which strings a text ends."""
    kwargs = normalize_gen_kwargs(wishes, MAX_GEN_TOKS)
    if kwargs.get("do_sample"):
        raise GSAError(f"eval: texts are made of the likeliest tokens, the task wants them drawn: {wishes}")
    until = kwargs.get("until") or []
    strings = [until] if isinstance(until, str) else list(until)
    return int(kwargs["max_gen_toks"]), tuple(string for string in strings if string)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
