"""Whatever comes, a route answers with sense or with an error that says what is wrong, never with one of its own."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.serve.live import Live, events

SURROGATE = "half \ud800"
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**30]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(["", "state_x", "resp_x", "id", "base64", "<|im_end|>", "a" * 300, "stop", SURROGATE, "\x00"]),
    st.lists(st.one_of(st.integers(-1, 300), st.text(max_size=3), st.none()), max_size=3),
    st.dictionaries(
        st.sampled_from(["base64", "role", "5", "a", SURROGATE]), st.one_of(st.none(), st.integers(-200, 200))
    ),
    st.just([[1, 2], [3]]),
    st.just([{"role": "user", "content": "a"}]),
    st.just([{"role": "user", "content": [{"type": "text", "text": "a"}]}]),
)
COMMON = [
    "model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stream", "cache", "cache_salt", "seed",
    "metadata", "store", "user", "unknown", SURROGATE,
]  # fmt: skip
CHOICES = [
    "n", "stop", "presence_penalty", "frequency_penalty", "logit_bias", "stream_options", "state", "return_state",
    "logprobs", "max_tokens",
]  # fmt: skip
FIELDS = {
    "/v1/completions": ["prompt", "echo", "suffix", "best_of", *CHOICES, *COMMON],
    "/v1/chat/completions": ["messages", "top_logprobs", "max_completion_tokens", "tools", *CHOICES, *COMMON],
    "/v1/responses": ["input", "instructions", "previous_response_id", "max_output_tokens", "text", *COMMON],
    "/v1/states": ["text", "messages", "ids", "state", "name", "model", "stream", "cache_salt", "unknown"],
}
SENSE: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/states": {"text": "a"},
}


def check(answer: Any, sent: object) -> None:
    assert answer.status_code < 500, (sent, answer.text)
    if answer.headers["content-type"].startswith("text/event-stream"):
        told = [event for event in events(answer.text) if event is not None]
        assert not [event for event in told if "server_error" in json.dumps(event)], (sent, told)
    elif answer.status_code >= 400:
        error = answer.json()["error"]
        assert error["message"], sent
        assert {"message", "type", "param", "code"} == error.keys()


@examples(240)
@given(st.sampled_from(list(FIELDS)), st.data())
def test_bodies_of_any_fields(server: Live, path: str, data: st.DataObject) -> None:
    changes = data.draw(st.dictionaries(st.sampled_from(FIELDS[path]), VALUES, max_size=4))
    body = {**SENSE[path], **changes}
    content = json.dumps(body)
    check(server.http.post(path, content=content, headers={"Content-Type": "application/json"}), body)


@examples(60)
@given(
    st.sampled_from(["GET", "POST", "DELETE", "PUT", "HEAD"]),
    st.sampled_from([*FIELDS, "/v1/states/x", "/v1/states/x/content", "/v1/models/x", "/v1/responses/x", "/", "/%00"]),
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from(
            [b"[" * 10**5, b"1" * 5000, b'{"prompt": NaN}', b'{"prompt": 1e999}', b'"\\ud800"', b"null", b"{}"]
        ),
    ),
    st.sampled_from(["application/json", "application/octet-stream", "text/plain", "application/json; charset=x", ""]),
    st.sampled_from([{}, {"cache_salt": "x"}, {"name": "\ud83d"}, {"name": "a" * 1000}]),
)
def test_any_bytes_to_any_route(
    server: Live, method: str, path: str, content: bytes, kind: str, query: dict[str, str]
) -> None:
    params = {name: value.encode("utf-8", "surrogatepass") for name, value in query.items()}
    answer = server.http.request(method, path, content=content, headers={"Content-Type": kind}, params=params)
    if method == "HEAD":
        assert answer.status_code < 500
    else:
        check(answer, (method, path, content, kind, query))


@pytest.mark.slow
@examples(2000)
@given(st.sampled_from(list(FIELDS)), st.data())
def test_bodies_of_many_more_fields(server: Live, path: str, data: st.DataObject) -> None:
    changes = data.draw(st.dictionaries(st.sampled_from(FIELDS[path]), VALUES, max_size=8))
    content = json.dumps({**SENSE[path], **changes})
    check(server.http.post(path, content=content, headers={"Content-Type": "application/json"}), content)
    assert server.serving.worker.failure is None
