"""gsa.load: a model that takes text and gives text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import overload

from gsa.arguments import checked_names
from gsa.data.tokenizer import Tokenizer
from gsa.errors import GSAError, raised_by
from gsa.files import byte_count
from gsa.infer.chat import Chat
from gsa.infer.engine import Engine
from gsa.infer.state import State
from gsa.infer.text import Text, TextEngine, Writing
from gsa.models.config import ModelConfig
from gsa.sampling import DEFAULT, Sampling
from gsa.threads import use_threads


@checked_names
def load(
    model: str | Path = "gsa-tiny",
    *,
    weights: str = "auto",
    compute: str = "auto",
    device: str = "auto",
    batch_size: int = 16,
    state_cache_bytes: int = 0,
    state_dir: str | Path | None = None,
    state_dir_bytes: int = 4 << 30,
    threads: int | None = None,
) -> TextModel:
    """A model that writes text: one of the package, a folder, a checkpoint or a run of training, or one of the Hub.

    Args:
        model: "gsa-tiny", "gsa-smol", a folder of a model with its tokenizer, a run, whose newest whole checkpoint is
            taken, or a name of the Hugging Face Hub (owner/name).
        weights: Format of the weights in memory: "fp32", "bf16", "int8", "int4", or "auto", which is bf16 for weights
            stored in bf16 and fp32 for others. Those in int8 and int4 are for CPUs.
        compute: What prompts are computed in: "fp32", "bf16", "int8" (for weights in int8 and int4), or "auto", which
            is the format of the weights (int8 for int4) where the CPU has a unit for such products, and else fp32.
        device: Where it computes: "cpu", "cuda", or "auto", a GPU if torch can use one.
        batch_size: Texts that are written at the same time; more wait for their turn.
        state_cache_bytes: Memory for states that texts leave, from which prompts that begin alike go on; 0 is none.
        state_dir: Folder in which they are kept too, until the next time; it needs memory for them.
        state_dir_bytes: Bytes of the files in that folder, at most.
        threads: Threads of torch, for the whole process; its own choice by default.

    >>> model = gsa.load("gsa-tiny")
    >>> model
    TextModel('gsa-tiny', 4,590,848 parameters, bf16 weights (8.8 MB), state of 256.0 KB)
    >>> model.generate("She was", max_tokens=10, temperature=0)
    ' very well, but she was not\\na little'
    """
    if not isinstance(model, str | Path):
        raise GSAError(f"load: model must be a name or a folder, got {type(model).__name__}")
    if threads is not None and type(threads) is not int:
        raise GSAError(f"load: threads must be a whole number or none, got {threads!r}")
    use_threads(threads)
    texts = TextEngine.load(
        model,
        weights,
        compute=compute,
        device=device,
        batch_size=batch_size,
        state_cache_bytes=state_cache_bytes,
        state_dir=state_dir,
        state_dir_bytes=state_dir_bytes,
    )
    return TextModel(texts, str(model))


class TextModel:
    """A language model with its tokenizer, made by `gsa.load`. Several threads may use it."""

    def __init__(self, texts: TextEngine, name: str) -> None:
        self.name = name
        self._texts = texts

    @property
    def engine(self) -> Engine:
        """What is beneath: token ids in, token ids out."""
        return self._texts.engine

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back."""
        return self._texts.tokenizer

    @property
    def config(self) -> ModelConfig:
        """Sizes of the model, and the mixer of its layers."""
        return self.engine.model.config

    def __repr__(self) -> str:
        model = self.engine.model
        state = model.state_bytes
        size = "that grows with the text" if state is None else f"of {byte_count(state)}"
        weights = f"{model.weights} weights ({byte_count(model.nbytes)})"
        return f"TextModel({self.name!r}, {model.num_parameters:,} parameters, {weights}, state {size})"

    @overload
    def generate(
        self,
        prompt: str,
        *,
        max_tokens: int = ...,
        temperature: float = ...,
        top_k: int = ...,
        top_p: float = ...,
        min_p: float = ...,
        repetition_penalty: float = ...,
        presence_penalty: float = ...,
        frequency_penalty: float = ...,
        logit_bias: dict[int, float] = ...,
        seed: int | None = ...,
        stop: str | Sequence[str] | None = ...,
        logprobs: int | None = ...,
        state: State | None = ...,
        keep_state: bool = ...,
    ) -> Text: ...

    @overload
    def generate(
        self,
        prompt: list[str] | tuple[str, ...],
        *,
        max_tokens: int = ...,
        temperature: float = ...,
        top_k: int = ...,
        top_p: float = ...,
        min_p: float = ...,
        repetition_penalty: float = ...,
        presence_penalty: float = ...,
        frequency_penalty: float = ...,
        logit_bias: dict[int, float] = ...,
        seed: int | None = ...,
        stop: str | Sequence[str] | None = ...,
        logprobs: int | None = ...,
        state: State | None = ...,
        keep_state: bool = ...,
    ) -> list[Text]: ...

    @checked_names
    def generate(
        self,
        prompt: str | list[str] | tuple[str, ...],
        *,
        max_tokens: int = DEFAULT.max_tokens,
        temperature: float = DEFAULT.temperature,
        top_k: int = DEFAULT.top_k,
        top_p: float = DEFAULT.top_p,
        min_p: float = DEFAULT.min_p,
        repetition_penalty: float = DEFAULT.repetition_penalty,
        presence_penalty: float = DEFAULT.presence_penalty,
        frequency_penalty: float = DEFAULT.frequency_penalty,
        logit_bias: dict[int, float] = DEFAULT.logit_bias,
        seed: int | None = DEFAULT.seed,
        stop: str | Sequence[str] | None = (),
        logprobs: int | None = DEFAULT.logprobs,
        state: State | None = None,
        keep_state: bool = False,
    ) -> Text | list[Text]:
        """The continuation of a text, or of each of several, without the text itself.

        Args:
            prompt: A text, or a list of texts, which are continued at the same time.
            max_tokens: Tokens at most.
            temperature: Below 1 likely tokens become likelier; 0 always takes the likeliest.
            top_k: Choose among so many of the likeliest tokens; 0 is all.
            top_p: Choose among the likeliest tokens that have this probability together.
            min_p: Choose among tokens with at least this share of the likeliest one's probability.
            repetition_penalty: Above 1, tokens of the prompt and the text become less likely.
            presence_penalty: Above 0, tokens of the text become less likely.
            frequency_penalty: The same, for each time that a token stands there.
            logit_bias: What is added to the scores of some tokens, by their ids; -100 keeps one out.
            seed: Of the random choices: the same again gives the same text.
            stop: End before this text, or the first of several; None is the same as no text.
            logprobs: Tell log-probabilities of all tokens (`text.logprobs`), and of so many others in the place of each
                (`text.top`).
            state: Go on from what `read`, `load_state` or an earlier text has left; it stays as it is.
            keep_state: Keep the state behind the last token (`text.state`), to go on from.

        >>> model = gsa.load("gsa-tiny")
        >>> text = model.generate("Call me", max_tokens=10, temperature=0)
        >>> text, text.reason
        (',\\nI am not to be a little,', 'length')
        """
        sampling = Sampling(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias,
            seed=seed,
            logprobs=logprobs,
        )
        several = isinstance(prompt, list | tuple)
        prompts = list(prompt) if several else [prompt]
        writings: list[Writing] = []
        try:
            writings.extend(self._write("generate", each, sampling, stop, state, keep_state) for each in prompts)
            texts = [writing.rest() for writing in writings]
        finally:
            for writing in writings:
                writing.close()
        return texts if several else texts[0]

    @checked_names
    def stream(
        self,
        prompt: str,
        *,
        max_tokens: int = DEFAULT.max_tokens,
        temperature: float = DEFAULT.temperature,
        top_k: int = DEFAULT.top_k,
        top_p: float = DEFAULT.top_p,
        min_p: float = DEFAULT.min_p,
        repetition_penalty: float = DEFAULT.repetition_penalty,
        presence_penalty: float = DEFAULT.presence_penalty,
        frequency_penalty: float = DEFAULT.frequency_penalty,
        logit_bias: dict[int, float] = DEFAULT.logit_bias,
        seed: int | None = DEFAULT.seed,
        stop: str | Sequence[str] | None = (),
        logprobs: int | None = DEFAULT.logprobs,
        state: State | None = None,
        keep_state: bool = False,
    ) -> TextStream:
        """The continuation of a text as it is written: an iterator of texts, which together are what `generate` gives.

        Arguments are those of `generate`. When it has ended, its `text` is the whole.

        >>> for text in gsa.load("gsa-tiny").stream("She was", max_tokens=10, temperature=0):
        ...     print(text, end="", flush=True)
         very well, but she was not
        a little
        """
        sampling = Sampling(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias,
            seed=seed,
            logprobs=logprobs,
        )
        return TextStream(self._write("stream", prompt, sampling, stop, state, keep_state))

    @checked_names
    def chat(
        self,
        *,
        system: str | None = None,
        max_tokens: int = DEFAULT.max_tokens,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float = DEFAULT.presence_penalty,
        frequency_penalty: float = DEFAULT.frequency_penalty,
        logit_bias: dict[int, float] = DEFAULT.logit_bias,
        seed: int | None = DEFAULT.seed,
        stop: str | Sequence[str] | None = (),
    ) -> Chat:
        """A conversation: `chat.say("Hello")` gives the answer, `chat.stream("Hello")` gives it as it is written.

        The model must have a chat template beside its tokenizer. `system` is what it is told before the conversation;
        the others are arguments of `generate`, for every answer; None is what the model's generation_config.json
        advises, or else the default of `generate`.
        """
        given = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
        }
        sampling = Sampling(
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
            max_tokens=max_tokens,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias,
            seed=seed,
        )
        return Chat(self._texts, self._texts.as_advised(sampling, given), system, stop)

    @checked_names
    def read(self, text: str, *, state: State | None = None, progress: Callable[[int], None] | None = None) -> State:
        """What the model remembers of a text of any length: `generate` goes on from it at once, as often as wanted.

        With a state, the text goes on where that ended. `progress` is called with the number of tokens read so far.

        >>> model = gsa.load("gsa-tiny")
        >>> state = model.read("It was a dark and stormy night. " * 100)
        >>> state.tokens, state.nbytes
        (1001, 278528)
        >>> model.generate("The colonel", state=state, max_tokens=8, temperature=0)
        '\\nwas a little man, and the'
        """
        self._check("read", text, state)
        return self.engine.read(self._texts.encode(text, continues=state is not None), state, progress)

    def load_state(self, path: str | Path) -> State:
        """A state of this model from a file that `state.save(path)` wrote."""
        return State.load(path, self.engine.model)

    def _write(
        self,
        what: str,
        prompt: object,
        sampling: Sampling,
        stop: str | Sequence[str] | None,
        state: State | None,
        keep_state: bool,
    ) -> Writing:
        text = self._check(what, prompt, state)
        with raised_by(what):
            return self._texts.stream(text, sampling, stop=stop, state=state, keep_state=keep_state)

    def _check(self, what: str, text: object, state: object) -> str:
        if not isinstance(text, str):
            raise GSAError(f"{what}: expected a text, got {type(text).__name__}; `engine` takes token ids")
        if state is None:
            if not text:
                raise GSAError(f"{what}: the text is empty, and there is no state to go on from")
        elif not isinstance(state, State):
            hint = "; load_state reads one from a file" if isinstance(state, str | Path) else ""
            raise GSAError(f"{what}: state must be a gsa.State, got {type(state).__name__}{hint}")
        return text


class TextStream(Iterator[str]):
    """A text as it is written, in pieces; `close` ends it, and so does dropping it."""

    def __init__(self, writing: Writing) -> None:
        self._writing = writing
        self._pieces: list[str] = []

    def __next__(self) -> str:
        for piece in self._writing:
            if piece.text:
                self._pieces.append(piece.text)
                return piece.text
        raise StopIteration

    @property
    def text(self) -> Text:
        """All that was given so far, and how it came about."""
        return Text.of("".join(self._pieces), self._writing)

    def close(self) -> None:
        """Ends it."""
        self._writing.close()
