"""States that clients hold themselves, as base64 or as files: a chat goes on from them as from an id."""

import base64
import json
from typing import Any

import pytest

from gsa.infer.state_file import MAX_NOTE
from gsa.serve.serving import saved
from tests.serve.live import Live
from tests.serve.test_complaints import text

FILE = {"Content-Type": "application/octet-stream"}


def state_of(answer: dict[str, Any]) -> dict[str, Any]:
    return answer["choices"][0]["state"]


def test_a_chat_goes_on_from_a_held_state_as_from_its_id(server: Live) -> None:
    by_id = state_of(server.chat("Hello", return_state="id"))
    held = state_of(server.chat("Hello", return_state="base64"))
    content = server.http.get(f"/v1/states/{by_id['id']}/content").content
    assert base64.b64decode(held["base64"]) == content
    uploaded = server.http.post("/v1/states", content=content, headers=FILE).json()
    assert uploaded["messages"] == 2
    expected = server.chat("And?", state=by_id["id"])
    for state in ({"base64": held["base64"]}, uploaded["id"]):
        answer = server.chat("And?", state=state)
        assert text(answer) == text(expected)
        assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    again = state_of(server.chat("And?", state={"base64": held["base64"]}, return_state="id"))
    assert server.http.get(f"/v1/states/{again['id']}").json()["messages"] == 4


def test_a_held_state_of_messages_may_be_answered_as_it_is(server: Live) -> None:
    made = server.post("/v1/states", {"messages": [{"role": "user", "content": "Hello"}]}, 201)
    content = server.http.get(f"/v1/states/{made['id']}/content").content
    answer = server.chat(state={"base64": base64.b64encode(content).decode()})
    assert text(answer) == text(server.chat("Hello"))


def test_a_conversation_that_has_to_be_read_anew_does_not_forget_what_it_stood_behind(server: Live) -> None:
    """A stop string was read and is not part of the message, so the past is told differently."""
    document = server.post("/v1/states", {"text": "The moon.\n"}, 201)["id"]
    stop = text(server.chat("Of what?", state=document, max_tokens=30))[4:6]
    ask = {"max_tokens": 30, "stop": stop}
    held = state_of(server.chat("Of what?", state=document, return_state="base64", **ask))
    by_id = state_of(server.chat("Of what?", state=document, return_state="id", **ask))
    assert text(server.chat("Sure?", state={"base64": held["base64"]})) == text(server.chat("Sure?", state=by_id["id"]))
    content = base64.b64encode(server.http.get(f"/v1/states/{document}/content").content).decode()
    unkept = state_of(server.chat("Of what?", state={"base64": content}, return_state="base64", **ask))
    error = server.chat("Sure?", state={"base64": unkept["base64"]}, status=400)["error"]
    assert "was brought and not kept" in error["message"]


@pytest.mark.parametrize(
    "changes",
    [
        {"reply": [-1]},
        {"reply": [10**6]},
        {"reply": ["a"]},
        {"messages": []},
        {"messages": [{"role": "user", "content": "a"}]},
        {"messages": [{"role": "tool", "content": "a"}], "reply": None},
        {"messages": [{"role": "user", "content": "\ud800"}], "reply": None},
        {"messages": 3},
        {"behind": 3},
        {"instructed": "yes"},
        {"other": 1},
    ],
)
def test_the_conversation_of_a_held_state_is_checked(server: Live, changes: dict[str, Any]) -> None:
    """Whoever holds a file can write it anew, hash and all."""
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    state, path = server.serving.texts.engine.read([1, 2]), "/v1/states"
    for note, status in (({"messages": talk, "reply": [3], **changes}, 400), ({"messages": talk, "reply": [3]}, 201)):
        answer = server.http.post(path, content=_noted(server, state, json.dumps(note)), headers=FILE)
        assert answer.status_code == status, answer.text
    assert server.http.post(path, content=_noted(server, state, "no JSON"), headers=FILE).status_code == 400


def _noted(server: Live, state: Any, note: str) -> bytes:
    class Saved:
        def save(self, path: Any, note_: str = note, **ignored: str) -> None:
            state.save(path, note=note_)

    return saved(Saved())


def test_a_conversation_too_long_for_a_file_is_refused_before_it_is_answered(server: Live) -> None:
    long = '"' * (MAX_NOTE // 4)  # each is spelt out twice, as JSON within JSON
    error = server.chat(long, return_state="base64", status=400)["error"]
    assert error["param"] == "return_state"
    assert "ask for an id" in error["message"]
