"""`gsa serve`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from gsa.console import Compute, Weights
from gsa.serve.settings import ServeSettings

_DEFAULT = ServeSettings()


def serve(
    model: str = "gsa-smol",
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    name: str | None = None,
    origins: list[str] | None = None,
    weights: Weights = "auto",
    compute: Compute = "auto",
    device: str = "auto",
    threads: int | None = None,
    max_concurrency: int = _DEFAULT.max_concurrency,
    max_queue: int = _DEFAULT.max_queue,
    events_per_second: float = _DEFAULT.events_per_second,
    max_tokens: int = _DEFAULT.max_tokens,
    max_prompt_tokens: int = _DEFAULT.max_prompt_tokens,
    max_body_mb: int = _DEFAULT.max_body_mb,
    body_seconds: float = _DEFAULT.body_seconds,
    cache_mb: int = _DEFAULT.cache_mb,
    state_mb: int = _DEFAULT.state_mb,
    state_dir: str | None = _DEFAULT.state_dir,
    state_dir_mb: int = _DEFAULT.state_dir_mb,
    drain_seconds: float = _DEFAULT.drain_seconds,
) -> None:
    """Serves a model over HTTP as OpenAI's clients speak it, with states as resources, and a page to talk with it.

    SIGTERM or Ctrl-C lets it finish the answers it is writing, and save states; a second one stops it at once.

    Args:
        model: gsa-smol, gsa-tiny, a folder of a model with its tokenizer, a run, whose newest whole checkpoint is
            taken, or a name of the Hugging Face Hub (owner/name).
        host: Address to listen on; 0.0.0.0 is all of this machine's, for others in the network. Set a key then.
        port: Port to listen on; 0 is any that is free.
        api_key: What every request has to bring, on every route; better given as the environment variable GSA_API_KEY,
            since others on this machine can see a command line.
        name: What clients call the model; by default its own name, or that of its folder.
        origins: Web sites whose pages may ask, as in https://example.org; may be given several times.
        weights: Format of the weights in memory; auto is bf16 for weights stored in bf16, else fp32.
        compute: What prompts are computed in; auto is the format of the weights (int8 for int4) where the CPU has a
            unit for such products, else fp32. `gsa doctor` tells.
        device: Where it computes: cpu, cuda, cuda:1 for the second GPU, or auto, a GPU if torch can use one.
        threads: Threads of torch; its own choice by default.
        max_concurrency: Answers that are written at the same time.
        max_queue: Answers that may wait for their turn; more are refused with 429.
        events_per_second: Events of all streams together, about: where more tokens are written, an event brings several
            of an answer.
        max_tokens: Tokens of an answer at most, and where a chat names no limit.
        max_prompt_tokens: Tokens of a prompt at most.
        max_body_mb: Megabytes of a request at most.
        body_seconds: Seconds that a request may take to arrive.
        cache_mb: Megabytes of memory for states of earlier prompts, from which prompts that begin alike go on; 0 is
            none.
        state_mb: Megabytes of memory for states that have an id.
        state_dir: Folder in which states outlive the server; without one, they are in memory only.
        state_dir_mb: Megabytes that the folder may take, half for states that have an id, half for those of the cache.
        drain_seconds: Seconds that answers may still take after SIGTERM or Ctrl-C.
    """
    from gsa.console import tell
    from gsa.extras import require
    from gsa.serve.collector import kept_for_good
    from gsa.threads import use_threads

    for package in ("fastapi", "uvicorn", "prometheus_client"):
        require(package, "serve: the HTTP interface")
    settings = ServeSettings(
        api_key=os.environ.get("GSA_API_KEY") if api_key is None else api_key,
        origins=tuple(origins or ()),
        max_concurrency=max_concurrency,
        max_queue=max_queue,
        events_per_second=events_per_second,
        max_tokens=max_tokens,
        max_prompt_tokens=max_prompt_tokens,
        max_body_mb=max_body_mb,
        body_seconds=body_seconds,
        cache_mb=cache_mb,
        state_mb=state_mb,
        state_dir=state_dir,
        state_dir_mb=state_dir_mb,
        drain_seconds=drain_seconds,
    )
    with kept_for_good():
        with uninterrupted():  # pydantic makes an error of its own of a Ctrl-C while it is imported
            from gsa.devices import use_device
            from gsa.serve.run import bound, open_serving, run

        use_threads(threads)
        listener = bound(host, port)
        serving = open_serving(model, settings, name=name, weights=weights, compute=compute, device=device, say=tell)
        use_device(serving.texts.engine.model.device)
    run(serving, host, listener, tell)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Has Ctrl-C wait for the end of the block."""
    came = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
