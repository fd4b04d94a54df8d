"""`gsa chat`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from gsa.cli.console import CLOSED_PIPE, Output, Weights

if TYPE_CHECKING:
    from gsa.infer.chat import Chat

COMMANDS = "/save FILE, /reset, /exit"


def chat(
    *,
    model: str,
    system: str | None = None,
    weights: Weights = "auto",
    max_tokens: int = 1024,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 0.95,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    threads: int | None = None,
) -> None:
    """Talks with a model that has a chat template, a line at a time; each reply goes on from the state of the last.

    /save FILE saves the state, /reset begins anew, /exit ends, and so does Ctrl-D. Ctrl-C stops a reply. Lines may come
    from a pipe as well.

    Args:
        model: Folder of a model with its tokenizer, or of a run, whose newest whole checkpoint is taken.
        system: What the model is told before the conversation.
        weights: Format of the weights in memory; auto is bf16 for weights stored in bf16, else fp32.
        max_tokens: Tokens of a reply at most.
        temperature: Below 1 likely tokens become likelier; 0 always takes the likeliest.
        top_k: Choose among so many of the likeliest tokens; 0 is all.
        top_p: Choose among the likeliest tokens that have this probability together.
        min_p: Choose among tokens with at least this share of the likeliest one's probability.
        repetition_penalty: Above 1, tokens of the turn become less likely.
        seed: Of the random choices: the same conversation again gets the same replies.
        threads: Threads of torch; its own choice by default.
    """
    from gsa.cli.console import open_model
    from gsa.infer import Sampling
    from gsa.infer.chat import Chat

    sampling = Sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    conversation = Chat(open_model(model, weights, threads), sampling, system)
    output = Output()
    if sys.stdin.isatty():
        print(f"{COMMANDS}; Ctrl-C stops a reply, Ctrl-D ends", file=sys.stderr)
    while (line := _line()) is not None and line.strip() != "/exit":
        if line.startswith("/"):
            _command(conversation, line)
        elif line.strip():
            _reply(conversation, line, output)


def _line() -> str | None:
    """What was typed, or None at the end."""
    from gsa.errors import GSAError

    terminal = sys.stdin.isatty()
    if terminal:
        import readline  # noqa: F401  (gives `input` history and editing)
    try:
        return input("> " if terminal else "")
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise GSAError(f"chat: standard input is not UTF-8 at byte {error.start} of a line") from None


def _command(conversation: Chat, line: str) -> None:
    """Does what a line with a slash asks for; a mistake in it ends nothing."""
    from gsa.errors import GSAError

    name, _, rest = line.strip().partition(" ")
    path = rest.strip()
    if name == "/reset" and not path:
        conversation.reset()
        told = "the conversation begins anew"
    elif name != "/save" or not path:
        told = f"there is no {line.strip()!r}; there are {COMMANDS}"
    elif conversation.state is None:
        told = "there is no state to save before the first reply"
    else:
        try:
            conversation.state.save(path)
            told = f"{path}: the state after {conversation.state.tokens:,} tokens"
        except GSAError as error:
            told = str(error)
    print(f"gsa: {told}", file=sys.stderr)


def _reply(conversation: Chat, line: str, output: Output) -> None:
    """Streams a reply; ends all if the process is told to end, or nobody reads any more."""
    import signal

    from gsa.train.stop import StopWish

    with StopWish(quiet=True) as wish:
        for piece in conversation.reply(line):
            output.write(piece.text)
            if wish.signal is not None or output.closed:
                conversation.cancel()
        output.write("\n")
    if wish.signal == signal.SIGTERM:
        raise SystemExit(128 + wish.signal)
    if output.closed:
        raise SystemExit(CLOSED_PIPE)
