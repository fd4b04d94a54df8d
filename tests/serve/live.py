"""Servers in a thread, for real clients; and models that talk, small enough to answer at once."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import torch
import uvicorn

from gsa.models.checkpoint import save_model
from gsa.serve.run import Server, bound, config_of, open_serving
from gsa.serve.serving import Serving
from gsa.serve.settings import ServeSettings
from tests.infer.talking import END_ID, write_tokenizer
from tests.models.cases import model

KEY = "a-key-of-a-test"


def write_talker(folder: Path) -> Path:
    """A model with a chat template, whose likeliest tokens are always letters: what it says is read as it was said."""
    write_tokenizer(folder)
    lm = model("gsa", vocab_size=259, tie_word_embeddings=False)
    others = [id_ for id_ in range(259) if not chr(id_).isalpha() or id_ > 127]
    with torch.no_grad():
        lm.lm_head.weight[others] = 0
    save_model(lm, folder, eos_token_id=[END_ID, 256])
    return folder


class Live:
    """A server that runs."""

    def __init__(self, serving: Serving, address: str, server: uvicorn.Server) -> None:
        self.serving, self.address, self.server = serving, address, server
        key = serving.settings.api_key
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.http = httpx2.Client(base_url=address, headers=headers, timeout=60)

    def post(self, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
        answer = self.http.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def complete(self, prompt: Any, status: int = 200, **fields: Any) -> dict[str, Any]:
        """The answer to a completion, greedy unless told otherwise."""
        return self.post("/v1/completions", {"prompt": prompt, "temperature": 0, "max_tokens": 8, **fields}, status)

    def chat(self, *texts: str, status: int = 200, **fields: Any) -> dict[str, Any]:
        """The answer to a conversation, whose messages are the user's and the model's in turns."""
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
        body = {"messages": messages, "temperature": 0, "max_tokens": 8, **fields}
        return self.post("/v1/chat/completions", body, status)

    def metric(self, name: str) -> float:
        """A number of /metrics."""
        lines = self.http.get("/metrics").text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.split(" ")[0] == name)

    def wait_for(self, answers: int, seconds: float = 30) -> None:
        """Returns when so many answers are being written or wait."""
        end = time.monotonic() + seconds
        while self.serving.worker.pending != answers or not self.serving.texts.engine.busy:
            assert time.monotonic() < end
            time.sleep(0.01)

    def idle(self, seconds: float = 30) -> bool:
        """Whether no answer is being written any more, soon."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.serving.worker.pending == 0 and not self.serving.texts.engine.busy:
                return True
            time.sleep(0.01)
        return False


def events(text: str) -> list[Any]:
    """The objects of a stream of events, and None for [DONE]."""
    datas = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [None if data == "[DONE]" else json.loads(data) for data in datas]


@contextmanager
def served(name: str | Path, **options: Any) -> Iterator[Live]:
    """A server of a model on any free port; it is drained at the end."""
    settings = ServeSettings(**{"max_concurrency": 4, "cache_mb": 64, "state_mb": 64, "max_tokens": 200, **options})
    serving = open_serving(
        str(name), settings, name=None, weights="auto", compute="auto", device="cpu", say=lambda text: None
    )
    server, listener = Server(config_of(serving, "127.0.0.1"), serving), bound("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        port = listener.getsockname()[1]
        live = Live(serving, f"http://127.0.0.1:{port}", server)
        with live.http:
            yield live
    finally:
        server.should_exit = True
        thread.join()
        serving.close()
