"""`gsa chat`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from gsa.console import Compute, Output, Weights, tell
from gsa.sampling import DEFAULT

if TYPE_CHECKING:
    from gsa.infer.chat import Chat

COMMANDS = "/save FILE, /reset, /exit"


def chat(
    *,
    model: str = "gsa-smol",
    system: str | None = None,
    weights: Weights = "auto",
    compute: Compute = "auto",
    device: str = "auto",
    max_tokens: int = DEFAULT.max_tokens,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float = DEFAULT.presence_penalty,
    frequency_penalty: float = DEFAULT.frequency_penalty,
    seed: int | None = DEFAULT.seed,
    threads: int | None = None,
) -> None:
    """Talks with a model that has a chat template, a line at a time; each reply goes on from the state of the last.

    /save FILE saves the state, /reset begins anew, /exit ends, and so does Ctrl-D. Ctrl-C stops a reply. Lines may come
    from a pipe as well. What is not said of sampling is as the model's generation_config.json advises, if it does.

    Args:
        model: gsa-smol, a folder of a model with its tokenizer, a run, whose newest whole checkpoint is taken, or a
            name of the Hugging Face Hub (owner/name).
        system: What the model is told before the conversation.
        weights: Format of the weights in memory; auto is bf16 for weights stored in bf16, else fp32.
        compute: What prompts are computed in; auto is the format of the weights (int8 for int4) where the CPU has a
            unit for such products, else fp32. `gsa doctor` tells.
        device: Where it computes: cpu, cuda, cuda:1 for the second GPU, or auto, a GPU if torch can use one.
        max_tokens: Tokens of a reply at most.
        temperature: Below 1 likely tokens become likelier; 0 always takes the likeliest. 0.8 unless the model advises
            another (gsa-smol: 0.2).
        top_k: Choose among so many of the likeliest tokens; 0, the default, is all.
        top_p: Choose among the likeliest tokens that have this probability together; 0.95 by default (gsa-smol: 0.9).
        min_p: Choose among tokens with at least this share of the likeliest one's probability; 0 by default.
        repetition_penalty: Above 1, tokens of the turn become less likely; 1 by default (gsa-smol: 1.1).
        presence_penalty: Above 0, tokens of the reply become less likely.
        frequency_penalty: The same, for each time that a token stands there.
        seed: Of the random choices: the same conversation again gets the same replies.
        threads: Threads of torch; its own choice by default.
    """
    from gsa.console import check_typed, open_model
    from gsa.errors import GSAError
    from gsa.infer import Sampling
    from gsa.infer.chat import Chat

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
        seed=seed,
    )
    if sys.stdin is None:
        raise GSAError("chat: standard input cannot be read: it is closed")
    check_typed(system or "", "the system message")
    engine = open_model(model, weights, compute, device, threads)
    conversation = Chat(engine, engine.as_advised(sampling, given), system)
    output, refused = Output(), False
    if sys.stdin.isatty():
        tell(f"{COMMANDS}; Ctrl-C stops a reply, Ctrl-D ends")
    while True:
        try:
            line = _line()
            if line is None or line.strip() == "/exit":
                break
            if line.startswith("/"):
                _command(conversation, line)
            elif line.strip():
                _reply(conversation, line, output)
        except GSAError as error:  # which is about this line, and not the next
            refused = True
            tell(error)
        output.end()
    if refused and not sys.stdin.isatty():
        raise SystemExit(2)


def _line() -> str | None:
    """What was typed, or None at the end."""
    from gsa.console import check_typed, decoded, is_terminal
    from gsa.errors import GSAError

    name = "a line of standard input"
    try:
        if not (sys.stdin.isatty() and is_terminal(sys.stdout)):
            read = sys.stdin.buffer.readline()  # as bytes: where text is not UTF-8, the lines behind it would be lost
            return decoded(read.rstrip(b"\r\n"), name) if read else None
        import readline  # noqa: F401  (gives `input` history and editing)

        line = input("> ")
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise GSAError(f"{name} is not UTF-8 at byte {error.start}") from None
    check_typed(line, name)
    return line


def _command(conversation: Chat, line: str) -> None:
    """Does what a line with a slash asks for."""
    name, _, rest = line.strip().partition(" ")
    path = rest.strip()
    if name == "/reset" and not path:
        conversation.reset()
        told = "the conversation begins anew"
    elif name == "/save" and not path:
        told = "/save needs the name of a file, as in /save FILE"
    elif name != "/save":
        told = f"there is no {line.strip()!r}; there are {COMMANDS}"
    elif conversation.state is None:
        told = "there is no state to save before the first reply"
    else:
        conversation.state.save(path)
        told = f"{path}: the state after {conversation.state.tokens:,} tokens"
    tell(told)


def _reply(conversation: Chat, line: str, output: Output) -> None:
    """Streams a reply; ends all if the process is told to end."""
    import signal

    from gsa.reading_bar import with_reading_bar
    from gsa.train.stop import StopWish

    begun = False
    with StopWish(quiet=True) as wish:
        try:
            for piece in with_reading_bar(conversation.reply(line), lambda: conversation.prompt_tokens):
                begun = True
                output.write(piece.text)
                if wish.signal is not None or output.closed:
                    conversation.cancel()
        finally:
            output.write("\n" if begun else "")
            if wish.signal is not None:
                tell("stopped")
            if wish.signal == signal.SIGTERM:
                raise SystemExit(128 + wish.signal)
