"""The engine itself, with the requests of the clients and nothing between; run by `measured_alone`."""

from __future__ import annotations

import time
from itertools import count
from typing import TYPE_CHECKING, Any

from gsa.bench.serving.answers import Answer, summary
from gsa.bench.serving.questions import question

if TYPE_CHECKING:
    from gsa.infer.requests import Generation
    from gsa.infer.text import TextEngine


def run(setting: dict[str, Any]) -> dict[str, Any]:
    """What an engine writes in `seconds`, behind `warm` seconds that do not count, for so many `clients`, each of
    which asks the next thing when it has its answer. It has the places and the cache that the server has."""
    from gsa.infer.text import TextEngine
    from gsa.threads import use_threads

    use_threads(setting["threads"])
    texts = TextEngine.load(
        setting["model"],
        setting["weights"],
        batch_size=setting["clients"],
        state_cache_bytes=setting["cache_mb"] * 2**20,
    )
    begin = time.perf_counter() + setting["warm"]
    end = begin + setting["seconds"]
    return summary(_written(texts, setting, end), begin, end)


def _written(texts: TextEngine, setting: dict[str, Any], end: float) -> list[Answer]:
    """The answers that an engine begins until then."""
    seed, clients, temperature = setting["seed"], setting["clients"], setting["temperature"]
    answers: list[Answer] = []
    live: dict[int, tuple[int, Answer, Generation]] = {}
    numbers = [count() for _ in range(clients)]

    def begin(client: int) -> None:
        answer = Answer(time.perf_counter())
        generation = _submitted(texts, question(seed, client, next(numbers[client]), temperature))
        answers.append(answer)
        live[generation.id] = client, answer, generation

    for client in range(clients):
        begin(client)
    while time.perf_counter() < end:
        tokens = texts.engine.step()
        now = time.perf_counter()
        for token in tokens:
            _, answer, _ = live[token.request.id]
            answer.arrivals.append(now)
            answer.tokens += 1
        for id_, (client, answer, generation) in list(live.items()):
            if generation.done:
                answer.cached = generation.completion().cached_tokens  # raises if it has failed
                del live[id_]
                begin(client)
    return answers


def _submitted(texts: TextEngine, body: dict[str, Any]) -> Generation:
    """A request as the server makes it of a body."""
    from gsa.sampling import Sampling

    sampling = Sampling(**{name: value for name, value in body.items() if name != "prompt"}, stop=texts.ends)
    return texts.engine.submit(texts.engine.prompt(texts.encode(body["prompt"])), sampling)
