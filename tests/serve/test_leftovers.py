"""What a request held goes with it, at once: states are megabytes, and Python's collector may not look for minutes."""

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gsa.infer.reading import Prompt
from tests.serve.live import Live

ANSWERS = 12
MESSAGES = [{"role": "user", "content": "Once upon a time"}]
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "Once upon a time"}),
    "stream of a completion": ("/v1/completions", {"prompt": "Once upon a time", "stream": True}),
    "several": ("/v1/completions", {"prompt": ["Once", "upon"], "n": 2}),
    "a state behind it": ("/v1/completions", {"prompt": "Once upon a time", "return_state": "base64"}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
    "stream of a chat": ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
    "response": ("/v1/responses", {"input": "Once upon a time", "store": False}),
    "stream of a response": ("/v1/responses", {"input": "Once upon a time", "store": False, "stream": True}),
    "error": ("/v1/completions", {"prompt": "Once upon a time", "stop": [""]}),
}


@pytest.fixture
def _uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def prompts() -> int:
    return sum(type(each) is Prompt for each in gc.get_objects())


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.usefixtures("_uncollected")
def test_no_prompt_is_left_without_the_collector(server: Live, route: str) -> None:
    path, body = ROUTES[route]
    before = prompts()
    for _ in range(ANSWERS):
        server.http.post(path, json={**body, "max_output_tokens" if "responses" in path else "max_tokens": 16}).read()
    until = time.monotonic() + 5
    while prompts() > before and time.monotonic() < until:
        time.sleep(0.05)  # the last one's task may still be about to end
    assert prompts() <= before
