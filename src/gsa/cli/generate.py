"""`gsa generate`."""

from __future__ import annotations

import json as json_module
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gsa.console import Compute, Weights
from gsa.sampling import DEFAULT

if TYPE_CHECKING:
    from gsa.console import Output
    from gsa.infer.text import Piece, TextEngine, Writing

ECHOED = 1000  # characters of a prompt that a terminal shows


def generate(
    prompt: str = "",
    *,
    file: str | None = None,
    model: str = "gsa-tiny",
    weights: Weights = "auto",
    compute: Compute = "auto",
    device: str = "auto",
    max_tokens: int = DEFAULT.max_tokens,
    temperature: float = DEFAULT.temperature,
    top_k: int = DEFAULT.top_k,
    top_p: float = DEFAULT.top_p,
    min_p: float = DEFAULT.min_p,
    repetition_penalty: float = DEFAULT.repetition_penalty,
    presence_penalty: float = DEFAULT.presence_penalty,
    frequency_penalty: float = DEFAULT.frequency_penalty,
    seed: int | None = DEFAULT.seed,
    stop: list[str] | None = None,
    logprobs: int | None = DEFAULT.logprobs,
    state: str | None = None,
    save_state: str | None = None,
    threads: int | None = None,
    echo: bool | None = None,
    strict: bool = False,
    json: bool = False,
    stats: bool = False,
) -> None:
    """Continues a text, and prints the continuation as it is made.

    A prompt that was not given, and neither --file nor --state, is read from standard input, unless that is a terminal.
    On a terminal the end of the prompt is shown in front of the text, elsewhere nothing of it. The text ends after so
    many tokens, where the model ends it, before a stop string, or with Ctrl-C, and then a line end is printed.
    Everything else goes to standard error. On a terminal, control characters are spelt out.

    Args:
        prompt: The text to continue. It may be left out with --file or --state, or come from standard input. One that
            begins with - goes behind --.
        file: File with the text to continue, - for standard input; a prompt comes behind it.
        model: gsa-tiny, gsa-smol, a folder of a model with its tokenizer, a run, whose newest whole checkpoint is
            taken, or a name of the Hugging Face Hub (owner/name).
        weights: Format of the weights in memory; auto is bf16 for weights stored in bf16, else fp32.
        compute: What prompts are computed in; auto is the format of the weights (int8 for int4) where the CPU has a
            unit for such products, else fp32. `gsa doctor` tells.
        device: Where it computes: cpu, cuda, cuda:1 for the second GPU, or auto, a GPU if torch can use one.
        max_tokens: Tokens at most.
        temperature: Below 1 likely tokens become likelier; 0 always takes the likeliest.
        top_k: Choose among so many of the likeliest tokens; 0 is all.
        top_p: Choose among the likeliest tokens that have this probability together.
        min_p: Choose among tokens with at least this share of the likeliest one's probability.
        repetition_penalty: Above 1, tokens of the prompt and the text become less likely.
        presence_penalty: Above 0, tokens of the text become less likely.
        frequency_penalty: The same, for each time that a token stands there.
        seed: Of the random choices: the same again gives the same text. One is drawn by default; --stats tells it.
        stop: End before this text; may be given several times.
        logprobs: With --json, log-probabilities of all tokens, and of so many others in the place of each.
        state: Go on from a state that was saved, instead of from nothing; the prompt goes on where it ended.
        save_state: File to save the state behind the last token in.
        threads: Threads of torch; its own choice by default.
        echo: Print the whole prompt in front of the text; by default its end, if the output is a terminal.
        strict: Refuse a file with bytes that are not UTF-8, instead of replacing and counting them.
        json: Print one JSON object at the end instead of text.
        stats: Tell speed, time to the first token and bytes on standard error.
    """
    from gsa.console import Output, check_place, check_typed, load_state, open_model, read_text, tell
    from gsa.errors import GSAError
    from gsa.infer import Sampling
    from gsa.train.stop import StopWish

    if logprobs is not None and not json:
        raise GSAError("generate: --logprobs is told with --json only")
    if save_state is not None:
        check_place(save_state)
    sampling = Sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=secrets.randbits(32) if seed is None and temperature > 0 else seed,
        logprobs=logprobs,
    )
    check_typed(prompt, "the prompt")
    for typed in stop or ():
        check_typed(typed, "a stop string")
    if file is None and not prompt and state is None and sys.stdin is not None and not sys.stdin.isatty():
        file = "-"
    text = ("" if file is None else read_text(file, strict=strict)) + prompt
    if not text and state is None:
        raise GSAError(
            "generate: there is no text to continue; give a prompt, --file, --state, or text on standard input"
        )
    engine = open_model(model, weights, compute, device, threads)
    start = None if state is None else load_state(state, engine)
    output = Output()
    with StopWish(quiet=True) as wish:
        course = Course()
        writing = engine.stream(text, sampling, stop=stop or [], state=start, keep_state=save_state is not None)
        if not json:
            _echo(output, text, echo)
        for piece in course.follow(writing):
            if not json:
                output.write(piece.text)
            if wish.signal is not None or output.closed:
                writing.cancel()
        facts = _stats(engine, writing, course, sampling.seed)
        if json:
            output.write(json_module.dumps(_result(writing, course, text if echo else "", facts), indent=2))
        output.write("\n")
        _tell(engine, writing, facts if stats else None)
        if save_state is not None:  # last, for it may fail
            _save(writing, save_state)
    if wish.signal is not None:
        tell("stopped")
        raise SystemExit(128 + wish.signal)
    output.end()


def _echo(output: Output, text: str, wish: bool | None) -> None:
    """Shows the prompt if that is wished for; its end, if nobody said a word about it, on a terminal."""
    if wish:
        output.write(text)
    elif wish is None and output.terminal:
        output.write(text if len(text) <= ECHOED else f"...{text[-ECHOED:]}", dim=True)


@dataclass
class Course:
    """What happened when while a text was written."""

    text: list[str] = field(default_factory=list)
    reason: str = ""
    began: float = field(default_factory=time.monotonic)
    first: float | None = None
    """When the first token came."""
    last: float | None = None

    def follow(self, writing: Writing) -> Iterator[Piece]:
        """Passes all pieces on; shows on the terminal how far a long prompt is read."""
        from gsa.reading_bar import with_reading_bar

        for piece in with_reading_bar(writing, lambda: writing.generation.prompt_tokens):
            if piece.token is not None:
                self.last = time.monotonic()
                self.first = self.first or self.last
            self.text.append(piece.text)
            self.reason = piece.reason or self.reason
            yield piece


def _save(writing: Writing, path: str) -> None:
    from gsa.console import tell

    kept = writing.generation.kept
    if kept is None:
        tell("the prompt was not read to its end; no state is saved")
        return
    kept.save(path)
    tell(f"{path}: the state after {kept.tokens:,} tokens")


def _stats(engine: TextEngine, writing: Writing, course: Course, seed: int | None) -> dict[str, Any]:
    """Figures of a text that was written; None where there is nothing to measure."""
    model, generation = engine.engine.model, writing.generation
    waited = None if course.first is None else course.first - course.began
    made, spent = len(generation.tokens) - 1, (course.last or 0) - (course.first or 0)
    return {
        "seed": seed,
        "prompt_tokens": generation.prompt_tokens,
        "prompt_tokens_per_second": None if not waited else generation.prompt_tokens / waited,
        "seconds_to_first_token": waited,
        "tokens": len(generation.tokens),
        "tokens_per_second": made / spent if made > 0 and spent > 0 else None,
        "state_bytes": model.state_bytes,
        "weight_bytes": model.nbytes,
        "weights": model.weights,
        "compute": model.compute,
    }


def _result(writing: Writing, course: Course, before: str, facts: dict[str, Any]) -> dict[str, Any]:
    """What --json prints."""
    generation = writing.generation
    found: dict[str, Any] = {
        "text": before + "".join(course.text),
        "tokens": generation.tokens,
        "reason": course.reason,
    }
    if generation.logprobs is not None:
        found |= {"logprobs": generation.logprobs, "top": generation.top}
    return {**found, "seed": facts["seed"], "stats": {key: value for key, value in facts.items() if key != "seed"}}


def _tell(engine: TextEngine, writing: Writing, facts: dict[str, Any] | None) -> None:
    """Tells the figures, if there are any, and which tokens left no trace in the text."""
    from gsa.console import tell

    known, tokens = engine.tokenizer.vocab_size, writing.generation.tokens
    textless = sum(token >= known for token in tokens)
    if textless:
        tell(
            f"{textless:,} of {len(tokens):,} tokens have no text: the tokenizer knows {known:,} of the model's "
            f"{engine.engine.model.vocab_size:,}"
        )
    for line in [] if facts is None else _lines(facts):
        tell(line)


def _lines(facts: dict[str, Any]) -> list[str]:
    from gsa.files import byte_count

    state = facts["state_bytes"]
    lines = []
    if facts["seconds_to_first_token"] is not None:
        lines.append(
            f"first token after {facts['seconds_to_first_token']:.3f} s: {facts['prompt_tokens']:,} tokens of prompt, "
            f"{facts['prompt_tokens_per_second']:,.0f} tokens/s"
        )
    rate = facts["tokens_per_second"]
    lines.append(f"{facts['tokens']:,} tokens" + ("" if rate is None else f", {rate:,.1f} tokens/s"))
    lines.append(f"state {'grows with the text' if state is None else byte_count(state)}")
    lines.append(f"weights {byte_count(facts['weight_bytes'])}, {facts['weights']}; prompts in {facts['compute']}")
    if facts["seed"] is not None:
        lines.append(f"seed {facts['seed']}")
    return lines
