"""Who may ask, from where, and how much."""

import base64
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
from fastapi.routing import APIRoute

from gsa.errors import GSAError
from gsa.serve.app import routes_of
from gsa.serve.settings import ServeSettings
from tests.serve.live import KEY, Live


def paths(live: Live) -> list[tuple[str, str]]:
    """Every method and path that the app has, and some that it has not."""
    found = []
    for route in routes_of(live.serving):
        assert isinstance(route, APIRoute)
        found += [(method, route.path.replace("{id}", "x").replace("{id:path}", "talks")) for method in route.methods]
    assert len(found) > 15
    return [*found, ("GET", "/openapi.json"), ("GET", "/nothing"), ("PUT", "/v1/states"), ("OPTIONS", "/v1/models")]


def test_without_the_key_no_route_gives_anything(closed: Live) -> None:
    basic = base64.b64encode(b"user:wrong").decode()
    keys = ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {basic}"}, {"Authorization": KEY})
    with httpx2.Client(base_url=closed.address) as http:
        for method, path in paths(closed):
            for headers in keys:
                answer = http.request(method, path, headers=headers)
                assert answer.status_code == 401, (method, path)
                assert method == "HEAD" or answer.json()["error"]["code"] == "invalid_api_key"
                assert "gsa" not in answer.text


def test_the_key_opens_and_browsers_can_ask_for_it(closed: Live) -> None:
    assert closed.http.get("/v1/models").status_code == 200
    with httpx2.Client(base_url=closed.address) as http:
        assert http.get("/").headers["www-authenticate"].startswith("Basic ")
        assert "<title>gsa</title>" in http.get("/", auth=("anyone", KEY)).text
        assert http.get("/v1/models", headers={"Authorization": f"bearer {KEY}"}).status_code == 200


def test_pages_of_others_may_not_ask(closed: Live, server: Live) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    for live in (closed, server):
        answer = live.http.post("/v1/completions", json=body, headers={"Origin": "https://other.example"})
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
        own = live.http.post("/v1/completions", json=body, headers={"Origin": live.address})
        assert own.status_code == 200
    friend = {"Origin": "https://friend.example"}
    answer = closed.http.post("/v1/completions", json=body, headers=friend)
    assert answer.headers["access-control-allow-origin"] == "https://friend.example"
    with httpx2.Client(base_url=closed.address) as http:  # browsers ask first, without the key
        first = http.options("/v1/completions", headers={**friend, "Access-Control-Request-Method": "POST"})
        wanted = {"Access-Control-Request-Headers": "authorization,content-type,x-stainless-arch"}
        openai = http.options("/v1/completions", headers={**friend, "Access-Control-Request-Method": "POST", **wanted})
        stranger = {"Origin": "https://other.example", "Access-Control-Request-Method": "POST", **wanted}
        refused = http.options("/v1/completions", headers=stranger)
    assert (first.status_code, first.headers["access-control-allow-headers"]) == (204, "Authorization, Content-Type")
    assert openai.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-arch"
    assert "access-control-allow-headers" not in refused.headers


def test_without_a_key_the_name_must_be_this_machines(server: Live) -> None:
    for host in ("rebound.example", "[", "localhost.example", "localhost@other"):
        answer = server.http.get("/v1/models", headers={"Host": host})
        assert answer.status_code == 403, host
    assert server.http.get("/v1/models", headers={"Origin": "http://["}).status_code == 403
    assert server.http.get("/v1/models", headers={"Origin": "null"}).status_code == 403
    assert server.http.get("/v1/models", headers={"Host": "localhost:8000"}).status_code == 200


def test_bodies_that_are_too_large_or_too_slow(closed: Live) -> None:
    large = b'{"prompt": "' + b"a" * 2**20 + b'"}'
    headers = {"Content-Type": "application/json"}
    answer = closed.http.post("/v1/completions", content=large, headers=headers)
    assert (answer.status_code, "1 MB" in answer.text) == (413, True)
    pieces = (large[i : i + 2**16] for i in range(0, len(large), 2**16))  # whose length nobody tells
    assert closed.http.post("/v1/completions", content=pieces, headers=headers).status_code == 413
    address = urlsplit(closed.address)
    with socket.create_connection((address.hostname, address.port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{{".encode())
        assert connection.recv(12) == b"HTTP/1.1 408"


def test_the_counters_of_the_documents_exist(server: Live) -> None:
    document = (Path(__file__).parent.parent.parent / "docs/serving.md").read_text()
    named = set(re.findall(r"`(gsa_[a-z_]+)`", document))
    told = server.http.get("/metrics").text
    assert len(named) > 14
    assert [name for name in named if f"# TYPE {name.removesuffix('_total')}" not in told] == []


def test_settings_say_what_is_wrong() -> None:
    for fields, expected in (
        ({"max_concurrency": 0}, "max_concurrency must be at least 1"),
        ({"api_key": ""}, "api_key must be"),
        ({"api_key": "schlüssel"}, "api_key must be"),
        ({"origins": ("example.org",)}, "an origin is like https://example.org"),
        ({"origins": ("https://example.org/",)}, "without a path"),
    ):
        with pytest.raises(GSAError, match=expected):
            ServeSettings(**fields)


def test_the_page_runs_nothing_but_its_own_files(server: Live) -> None:
    answer = server.http.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    static = Path(__file__).parent.parent.parent / "src/gsa/serve/static"
    for path in static.iterdir():
        place = "/" if path.name == "index.html" else f"/static/{path.name}"
        assert server.http.get(place).content == path.read_bytes()
        content = path.read_text()
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "style=", "onclick="):
            assert word not in content, (path.name, word)
        assert "http" not in content.replace("http://www.w3.org/2000/svg", "").replace("https?:", ""), path.name


def test_what_a_server_tells_of_itself_has_a_head(server: Live) -> None:
    for path in ("/health", "/metrics", "/v1/models", "/v1/models/talks"):
        answer = server.http.head(path)
        assert (answer.status_code, answer.content) == (200, b""), path


def test_who_is_not_let_in_is_counted(closed: Live) -> None:
    refused = 'gsa_requests_total{route="none",status="401"}'
    with httpx2.Client(base_url=closed.address) as http:
        assert http.get("/v1/models").status_code == 401
        before = closed.metric(refused)
        assert http.get("/v1/models").status_code == 401
    assert closed.metric(refused) == before + 1
