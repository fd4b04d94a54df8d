"""Mistakes that people make with a server, and what they are told."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gsa.cli import main
from gsa.cli.serve import uninterrupted
from gsa.errors import GSAError
from gsa.serve.run import bound, example, open_serving, run
from gsa.serve.settings import ServeSettings
from tests.serve.live import Live, served

HELLO = [{"role": "user", "content": "Hello"}]


def refused(live: Live, path: str, body: dict[str, object]) -> tuple[str, str | None]:
    """What a client is told, and of which field."""
    error = live.post(path, body, 400)["error"]
    return error["message"], error["param"]


@pytest.fixture(scope="module")
def brief(folder: Path) -> Iterator[Live]:
    """A server of short answers."""
    with served(folder, max_tokens=10) as live:
        yield live


def test_answers_without_a_limit_have_the_servers_if_that_is_less(brief: Live) -> None:
    assert brief.post("/v1/completions", {"prompt": "One", "temperature": 0})["usage"]["completion_tokens"] == 10
    assert "max_tokens" not in example(brief.serving, "here")
    brief.serving.template, kept = None, brief.serving.template
    try:
        assert '"max_tokens": 10}' in example(brief.serving, "here")
    finally:
        brief.serving.template = kept


@pytest.mark.parametrize(
    ("path", "body", "message", "param"),
    [
        ("completions", {"prompt": "a", "max_tokens": 50}, "max_tokens: 50 were asked for", "max_tokens"),
        (
            "chat/completions",
            {"messages": HELLO, "max_completion_tokens": 50},
            "max_completion_tokens: 50 were",
            "max_completion_tokens",
        ),
        ("responses", {"input": "a", "max_output_tokens": 50}, "max_output_tokens: 50 were", "max_output_tokens"),
        (
            "completions",
            {"prompt": "a", "best_of": 2},
            "best_of is not supported here; it may be left out, or be 1",
            "best_of",
        ),
        (
            "chat/completions",
            {"messages": HELLO, "audio": {}},
            "audio is not supported here; it may be left out",
            "audio",
        ),
        (
            "chat/completions",
            {"messages": [{**HELLO[0], "audio": {"id": "a"}}]},
            "messages.0.audio is not supported here; it may be left out",
            "messages.0.audio",
        ),
        ("responses", {"input": []}, "input: ", "input"),
    ],
)
def test_an_error_names_the_field_it_is_about(
    brief: Live, path: str, body: dict[str, object], message: str, param: str
) -> None:
    told, name = refused(brief, f"/v1/{path}", body)
    assert told.startswith(message)
    assert not told.endswith("or be ")
    assert name == param


def test_a_body_that_is_no_json_names_no_field(brief: Live) -> None:
    for path in ("completions", "states"):
        answer = brief.http.post(f"/v1/{path}", content=b"{bad", headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] is None


def test_a_response_of_a_model_that_does_not_talk_is_about_its_input(
    brief: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brief.serving, "template", None)
    assert refused(brief, "/v1/responses", {"input": "a"})[1] == "input"
    assert refused(brief, "/v1/chat/completions", {"messages": HELLO})[1] == "messages"


def test_messages_may_say_who_speaks(brief: Live) -> None:
    named = brief.post("/v1/chat/completions", {"messages": [{**HELLO[0], "name": "bob"}], "temperature": 0})
    plain = brief.post("/v1/chat/completions", {"messages": HELLO, "temperature": 0})
    assert named["choices"] == plain["choices"]


def test_a_response_is_deleted_by_its_own_id(brief: Live) -> None:
    id_ = brief.post("/v1/responses", {"input": "a"})["id"]
    for other in ("x", id_.removeprefix("resp_"), id_ + "0"):
        answer = brief.http.delete(f"/v1/responses/{other}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
        assert f"no response '{other}'" in answer.json()["error"]["message"]
    assert brief.http.delete(f"/v1/responses/{id_}").json()["deleted"]
    assert brief.http.delete(f"/v1/responses/{id_}").status_code == 404


def test_a_salted_state_is_found_with_its_salt_in_the_address(brief: Live) -> None:
    id_ = brief.post("/v1/states", {"text": "One two", "cache_salt": "me"}, 201)["id"]
    for path in (f"/v1/states/{id_}", f"/v1/states/{id_}/content"):
        assert brief.http.get(path).status_code == 404
        assert brief.http.get(path, params={"cache_salt": "me"}).status_code == 200
    assert brief.http.delete(f"/v1/states/{id_}").status_code == 404
    assert brief.http.delete(f"/v1/states/{id_}", params={"cache_salt": "me"}).status_code == 200


def test_two_servers_of_one_port_that_start_together(folder: Path) -> None:
    """Both have the address as long as none listens; the second that does is told."""
    first = bound("127.0.0.1", 0)
    port = first.getsockname()[1]
    second = bound("127.0.0.1", port)
    with first:
        first.listen()
        serving = open_serving(
            str(folder), ServeSettings(), name=None, weights="auto", compute="auto", device="cpu", say=lambda text: None
        )
        with pytest.raises(GSAError, match=f"cannot listen on 127.0.0.1 port {port}: .*in use"):
            run(serving, "127.0.0.1", second, lambda text: None)


@pytest.mark.parametrize("key", ["", " k", "k ", "ä"])
def test_keys_that_cannot_be_used_are_refused(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for args in (["--api-key", key], []):
        monkeypatch.setenv("GSA_API_KEY", key)
        with pytest.raises(SystemExit) as end:
            main(["serve", "gsa-tiny", "--port", "0", *args])
        assert end.value.code == 2
        assert "api_key must" in capsys.readouterr().err


def test_the_line_to_try_names_the_variable_only_if_it_has_the_key(
    closed: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GSA_API_KEY", raising=False)
    assert "Bearer KEY" in example(closed.serving, "here")
    monkeypatch.setenv("GSA_API_KEY", closed.serving.settings.api_key or "")
    assert "Bearer $GSA_API_KEY" in example(closed.serving, "here")


def test_ctrl_c_waits_for_the_end_of_imports() -> None:
    done = []

    def imported() -> None:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        imported()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
