"""`gsa demo` with a chat model: a question, a book that is read into the conversation, and what SmolLM2 would take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gsa.cli.demo import show_cost, streamed

if TYPE_CHECKING:
    from rich.console import Console

    from gsa.chart import Series
    from gsa.infer import Model
    from gsa.infer.chat import Chat
    from gsa.models.state import ModelState

QUESTION = "What is the capital of France?"
READ = 2048  # tokens of the book: eight windows, in five seconds on two cores
ABOUT = "What is this novel about? Answer in one sentence."
LATER = "Thank you. And what is the capital of Italy?"
WRITTEN = 80  # tokens of an answer at most
POSITIONS = (64, 256, 1024, 4096, 16384)
SECONDS = 10.0  # of measuring
HERE, TEACHER = "gsa-smol, state", "SmolLM2, KV cache"


def talk(console: Console, model: str, folder: Path) -> None:
    """Talks, reads, goes on from a saved state, and measures."""
    from gsa.files import byte_count
    from gsa.infer import Sampling
    from gsa.infer.chat import Chat
    from gsa.infer.text import TextEngine

    engine = TextEngine.load(model, device="cpu")
    loaded = engine.engine.model
    state = byte_count(loaded.state_bytes or 0)
    console.print(
        f"[bold]1. A model answers[/] ({model}: {loaded.num_parameters / 1e6:.0f}M parameters in {loaded.weights}, "
        f"{byte_count(loaded.nbytes)}; state {state})"
    )
    # What SmolLM2's makers advise; without any chance, a model of this size goes in circles behind a long text.
    chat = Chat(engine, engine.as_advised(Sampling(max_tokens=WRITTEN, seed=0), {}))
    _ask(chat, QUESTION)
    _read(console, chat, folder / "conversation.state")
    console.print("[bold]3. What a token costs[/]: milliseconds, against its position")
    with console.status("") as status:
        times, memory = _measured(loaded, _teacher(model, loaded), status.update)
    show_cost(console, times, memory, folder, f"{model} and SmolLM2 with its cache, same weights and engine")


def _ask(chat: Chat, message: str, shown: str | None = None) -> float:
    """Streams an answer; the seconds to its first token."""
    from gsa.reading_bar import with_reading_bar

    print(f"> {message if shown is None else shown}", flush=True)
    return streamed(with_reading_bar(chat.reply(message), lambda: chat.prompt_tokens))


def _read(console: Console, chat: Chat, path: Path) -> None:
    """Has the beginning of the book read, saves the state of the conversation, and goes on from the file."""
    from gsa import pretrained
    from gsa.infer import State

    ids = chat.engine.encode(pretrained.book())
    text = chat.engine.tokenizer.decode(ids[:READ])
    console.print(
        f"[bold]2. It reads the beginning of a book[/] (Sense and Sensibility, {min(READ, len(ids)):,} of {len(ids):,} "
        "tokens), and the conversation goes on"
    )
    spent = _ask(chat, f"Here is the beginning of a novel.\n\n{text}\n\n{ABOUT}", f"Here is the beginning ... {ABOUT}")
    assert chat.state is not None
    chat.state.save(path)
    console.print(
        f"  {chat.prompt_tokens:,} tokens read in {spent:.1f} s ({chat.prompt_tokens / spent:,.0f} tokens/s); the "
        f"conversation is saved as {path}, {path.stat().st_size:,} bytes, and loaded again:\n"
    )
    chat.state = State.load(path, chat.engine.engine.model)
    _ask(chat, LATER)


def _teacher(name: str, model: Model) -> Model:
    """The model whose weights these are: attention over all tokens, without slots."""
    from gsa.convert.verify import teacher_of
    from gsa.infer import Model
    from gsa.models.checkpoint import load_model
    from gsa.models.config import ModelConfig

    new = {"mixer", "num_slots", "window", "num_sinks", "slot_router", "slot_positions"}
    fields = {name: value for name, value in model.config.to_dict().items() if name not in new}
    config = ModelConfig.from_dict({**fields, "mixer": "attention"})
    # Not a copy: memory that is mapped from a file is read faster, and the other model's is.
    return Model.of(teacher_of(load_model(name), config), model.weights, model.compute, model.device)


def _measured(model: Model, teacher: Model, tick: Callable[[str], None]) -> tuple[Series, Series]:
    """Milliseconds and bytes by position, here and with a cache, whose numbers do not matter. Positions take turns."""
    from gsa.bench.decode_model import token
    from gsa.bench.timing import race
    from gsa.infer.runners import make_runner

    runners = {label: make_runner(each, len(POSITIONS)) for label, each in ((HERE, model), (TEACHER, teacher))}
    contenders = {}
    for place, position in enumerate(POSITIONS):
        tick(f"going to position {position:,}")
        for label, each in ((HERE, model), (TEACHER, teacher)):
            runners[label].put(place, _state(each, position))
            contenders[f"{label} {position}"] = token(runners[label], [place])
    tick("measuring")
    # Before the race, in which sequences go on.
    memory = {
        label: {position: float(here.take(place).nbytes) for place, position in enumerate(POSITIONS)}
        for label, here in runners.items()
    }
    best = race(contenders, SECONDS, rounds=2)
    times = {label: {position: 1e3 * best[f"{label} {position}"] for position in POSITIONS} for label in runners}
    return times, memory


def _state(model: Model, tokens: int) -> ModelState:
    """A state after so many tokens, in which all numbers are 1."""
    import torch

    from gsa.models.state import ModelState

    state = model.init_state().tensors()
    for name, kind in model.state_kinds(tokens).items():
        dtype = state[name].dtype
        state[name] = torch.full(kind.shape, 1 if dtype.is_floating_point else tokens, dtype=dtype)
    return ModelState.from_tensors(state)
