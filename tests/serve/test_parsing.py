"""Bodies that are large and bad: they are refused at their first fault, and hold nobody up."""

import json
import re
import threading
from typing import Any

import pytest
from pydantic import ValidationError

from gsa.serve import parsing
from gsa.serve.bodies import Body, ChatBody, CompletionBody, ResponseBody, StateBody
from gsa.serve.openapi import BODIES
from tests.serve.live import Live

MANY = 1000
UNKNOWN = {f"unknown{i}": 1 for i in range(MANY)}


@pytest.mark.parametrize(
    ("kind", "fields", "place"),
    [
        (ChatBody, {"messages": [1] * MANY}, "messages"),
        (ChatBody, {"messages": [{"role": "user", "content": "a", **UNKNOWN}] * MANY}, "messages"),
        (ChatBody, {"messages": [{"role": "user", "content": [1] * MANY}] * MANY}, "messages"),
        (StateBody, {"messages": [1] * MANY}, "messages"),
        (StateBody, {"ids": ["x"] * MANY}, "ids"),
        (CompletionBody, {"prompt": [1, "a"] * MANY}, "prompt"),
        (CompletionBody, {"prompt": "a", "stop": [1] * MANY}, "stop"),
        (CompletionBody, {"prompt": "a", "logit_bias": UNKNOWN}, "logit_bias"),
        (CompletionBody, {"prompt": "a", **UNKNOWN}, "unknown0"),
        (ResponseBody, {"input": [1] * MANY}, "input"),
        (ResponseBody, {"input": "a", "metadata": UNKNOWN}, "metadata"),
    ],
)
def test_of_many_faults_one_is_told(kind: type[Body], fields: dict[str, Any], place: str) -> None:
    """Each that is told takes a kilobyte, and a body has room for millions."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(fields)
    (fault,) = caught.value.errors()
    assert fault["loc"][0] == place


def test_only_small_bodies_are_checked_in_the_event_loop(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, threads = parsing._parsed, []

    def watched(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return parsed(*given)

    monkeypatch.setattr(parsing, "_parsed", watched)
    for length in (10, 2**17):
        assert server.post("/v1/states", {"ids": ["x"] * length}, 400)["error"]["param"] == "ids.0"
    loop, other = threads
    assert "AnyIO" in other
    assert "AnyIO" not in loop


def test_what_is_no_json_is_told_as_such(server: Live) -> None:
    for kind, content, status, told in (
        ("text/plain", b"{}", 415, "got 'text/plain'"),
        ("", b"{}", 415, "got none"),
        ("application/json", b"{bad", 400, "the body is not JSON: Expecting property name"),
        ("application/json", b"[" * 10**5, 400, "nested too deep"),
        ("application/json", b"\xff\xfe\xff", 400, "not JSON"),
        ("application/json", b"1" * 5000, 400, "not JSON"),
        ("application/json", b"[]", 400, "expected a JSON object"),
    ):
        answer = server.http.post("/v1/completions", content=content, headers={"Content-Type": kind})
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, None), content[:10]
        assert told in answer.json()["error"]["message"]


def test_machines_are_told_what_routes_take(server: Live) -> None:
    told = server.http.get("/openapi.json").json()
    kinds = told["components"]["schemas"]
    for path, kind in BODIES.items():
        content = told["paths"][path]["post"]["requestBody"]["content"]
        assert content["application/json"]["schema"] == {"$ref": f"#/components/schemas/{kind.__name__}"}
    assert "application/octet-stream" in content
    for kind, name in (("CompletionBody", "prompt"), ("ResponseBody", "input"), ("ChatMessage", "content")):
        assert {"type": "string"} in kinds[kind]["properties"][name]["anyOf"]
    for methods in told["paths"].values():
        for operation in methods.values():
            assert "422" not in operation["responses"]
            assert "default" in operation["responses"]
    text = json.dumps(told)
    assert set(re.findall(r'"#/([^"]*)"', text)) == {
        f"components/schemas/{name}" for name in kinds if f'schemas/{name}"' in text
    }
